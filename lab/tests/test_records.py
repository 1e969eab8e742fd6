"""Configs and results as JSON: what comes back, what is refused."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from invented_runs import LinearConfig, SignTaskConfig, record, sign
from tensor_memory import MemoryConfig
from tensor_memory_lab.recipes import load_recipes
from tensor_memory_lab.recipes.language import language
from tensor_memory_lab.records import (
    append,
    config_dict,
    config_from_dict,
    config_hash,
    declared,
    read,
    read_records,
    read_result,
    register_config,
    run_name,
    write_result,
)
from tensor_memory_lab.records.config import CONFIGS, current, local_places
from tensor_memory_lab.run_config import BudgetConfig, OptimizerConfig, RunConfig

configs = st.builds(
    RunConfig,
    recipe=st.text(min_size=1),
    task=st.builds(SignTaskConfig, numbers=st.integers(1, 9), data_dir=st.none() | st.text()),
    model=st.builds(
        LinearConfig,
        wide=st.booleans(),
        memory=st.builds(
            MemoryConfig,
            channels=st.integers(1, 64),
            grid=st.lists(st.integers(2, 9), min_size=1, max_size=4).map(tuple),
            spread_bias=st.floats(-3, 3),
        ),
    ),
    optimizer=st.builds(
        OptimizerConfig,
        lr=st.floats(1e-9, 1.0),
        betas=st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)),
    ),
    budget=st.builds(BudgetConfig, steps=st.integers(1, 10**6), patience=st.none() | st.just(3)),
    seed=st.integers(0, 2**31),
    precision=st.sampled_from(["float32", "bf16"]),
)


@given(configs)
def test_a_config_comes_back_from_json_equal(config):
    back = config_from_dict(json.loads(json.dumps(config_dict(config))))
    assert back == config
    assert type(back.model.memory.grid) is tuple


@given(configs, st.integers(0, 99))
def test_seed_speed_and_place_of_the_data_leave_the_hash_alone(config, seed):
    task = replace(config.task, data_dir="elsewhere")
    moved = replace(config, seed=seed, speed="compile", task=task)
    assert config_hash(moved) == config_hash(config)


@pytest.mark.parametrize(
    "change",
    [
        {"task": SignTaskConfig(numbers=5)},
        {"model": LinearConfig(method="tensor")},
        {"model": LinearConfig(memory=MemoryConfig())},
        {"optimizer": OptimizerConfig()},
        {"budget": BudgetConfig()},
        {"precision": "bf16"},
        {"recipe": "other"},
    ],
)
def test_any_other_value_changes_the_hash(change):
    assert config_hash(replace(sign(), **change)) != config_hash(sign())


def test_a_run_is_named_after_recipe_method_hash_and_seed():
    config = replace(sign(), seed=3)
    assert run_name(config) == f"sign-base-{config_hash(config)}-s3"
    assert "/" not in run_name(replace(config, recipe="a/b c"))


@pytest.mark.parametrize("name", ["os:system", "subprocess:Popen", "TypeVar", "run_config", None])
def test_only_known_dataclasses_are_built(name):
    with pytest.raises(ValueError, match=r"expected one of RunConfig, .* or a registered class"):
        config_from_dict({"class": name})


def test_every_class_that_files_name_is_found_and_those_of_all_recipes_are_among_them():
    for name, module in CONFIGS.items():
        assert is_dataclass(getattr(importlib.import_module(module), name))
    for make in load_recipes().values():
        config = make()
        assert config_from_dict(json.loads(json.dumps(config_dict(config)))) == config


def test_a_run_is_told_by_how_it_departs_from_its_recipe():
    usual = replace(sign(), task=SignTaskConfig(numbers=4), model=LinearConfig())
    model = LinearConfig("tensor", wide=True, memory=MemoryConfig(channels=4, grid=(3, 3)))
    task = SignTaskConfig(numbers=9, data_dir="elsewhere")
    config = replace(usual, seed=7, task=task, model=model)
    found = declared(config, usual)
    assert found["settings"] == {"task.numbers": 9}
    assert found["variant"] == {"model.wide": True, "model.memory.grid": [3, 3]}
    found = declared(config, usual, settings=("task", "model.wide"), method=("model",))
    assert found["settings"] == {"task.numbers": 9, "model.wide": True}


def test_what_is_no_config_is_refused():
    with pytest.raises(ValueError, match="expected a dict that names its dataclass"):
        config_from_dict({"steps": 1})
    with pytest.raises(TypeError, match="expected a dataclass, got 3"):
        config_dict(3)
    with pytest.raises(TypeError, match="expected a dataclass"):
        register_config(int)
    with pytest.raises(TypeError, match=r"SignTaskConfig\.data_dir: expected plain values"):
        config_dict(SignTaskConfig(data_dir=object()))  # pyright: ignore[reportArgumentType]


def test_an_unknown_field_is_named_and_a_missing_one_has_its_default():
    plain = config_dict(BudgetConfig(steps=7))
    with pytest.raises(ValueError, match=r"BudgetConfig: unknown field stepz; known are steps, "):
        config_from_dict(plain | {"stepz": 1})
    del plain["patience"]
    assert config_from_dict(plain) == BudgetConfig(steps=7)
    with pytest.raises(ValueError, match="RunConfig: expected a value for recipe, task, model"):
        config_from_dict({"class": config_dict(sign())["class"]})


@dataclass(frozen=True)
class WithPath:
    place: Path
    name: str | Path = "a"


def test_a_path_comes_back_as_what_the_class_says():
    assert config_from_dict(config_dict(WithPath(Path("a/b")))) == WithPath(Path("a/b"), "a")


def test_a_result_comes_back_and_what_is_not_finite_is_null(tmp_path):
    found = record(sign(), accuracy=float("nan"))
    write_result(tmp_path / "result.json", found)
    back = read_result(tmp_path / "result.json")
    assert back["test"]["test"] == {"accuracy": None, "loss": 0.5}
    assert config_from_dict(back["config"]) == sign()
    assert read_records([tmp_path]) == [{"study": ""} | back]


def test_texts_of_ones_own_are_told_apart_by_their_folders_and_wikitext_is_one():
    def name(folder, **task):
        config = language()
        return run_name(replace(config, task=replace(config.task, data_dir=folder, **task)))

    assert name("a/poems") == name("b/letters")
    assert name("a/poems", corpus="any") == name("b/poems", corpus="any")
    assert name("a/poems", corpus="any") != name("a/letters", corpus="any")


def test_a_config_older_than_a_field_is_of_the_run_that_has_its_default():
    old = config_dict(sign())
    del old["model"]["memory"]["input_bias"]
    assert current(old) == config_dict(sign())


def test_a_study_is_a_line_per_run_in_order_and_names_itself(tmp_path):
    path = tmp_path / "results" / "signs.jsonl"
    for seed in (2, 0, 1):
        append(path, record(replace(sign(), seed=seed)))
    assert len(path.read_text().splitlines()) == 3
    runs = read(path)
    assert list(runs["seed"]) == [2, 0, 1]
    assert set(runs["study"]) == {"signs"}
    assert read_records([path.parent]) == read_records([path])


def test_a_study_is_found_by_its_name(tmp_path, monkeypatch):
    append(tmp_path / "results" / "signs.jsonl", record(sign()))
    monkeypatch.chdir(tmp_path)
    assert len(read("signs")) == 1
    with pytest.raises(FileNotFoundError, match="signz: no such file, folder or study"):
        read("signz")


def test_a_row_has_the_config_and_the_measures_under_their_own_names(tmp_path):
    memory = {
        "layers": [{"name": "0", "gate": 0.5, "use": 0.1}],
        "test_without_memory": {"test": {"accuracy": 0.25}},
    }
    model = LinearConfig("tensor", memory=MemoryConfig(channels=4, grid=(3, 3)))
    append(tmp_path / "a.jsonl", record(replace(sign(), model=model), memory=memory))
    (row,) = read(tmp_path / "a.jsonl").to_dict("records")
    assert row["model.memory.grid"] == (3, 3)
    assert (row["task"], row["task.numbers"], row["rate"]) == ("sign", 4, 0.1)
    assert (row["test.accuracy"], row["off.test.accuracy"], row["ceiling.test"]) == (0.9, 0.25, 1)
    assert (row["memory.gate"], row["commit"], row["hardware"]) == ((0.5,), "0123456789", "a CPU")
    assert (row["method"], row["variant"], row["label"]) == (
        "tensor",
        "grid=3×3",
        "tensor (grid=3×3)",
    )


def test_timings_of_a_shared_device_are_left_out(tmp_path):
    append(tmp_path / "a.jsonl", record(sign(), shared_device=True))
    row = read(tmp_path / "a.jsonl").iloc[0]
    assert "step_ms" not in row
    assert row["record"]["step_ms"] == 20.0


def test_a_bad_line_is_named_by_file_and_number(tmp_path):
    path = tmp_path / "signs.jsonl"
    append(path, record(sign()))
    good = path.read_text()
    path.write_text(good + '{"kind": "run", "con\n')
    with pytest.raises(ValueError, match=r"signs\.jsonl, line 2: expected a record as one line"):
        read(path)
    path.write_text(good + '{"kind": "walk"}\n')
    with pytest.raises(ValueError, match=r"line 2: expected a record of kind run, .*, got 'walk'"):
        read(path)
    path.write_text(good + "[1, 2]\n")
    with pytest.raises(ValueError, match=r"line 2: expected a record of kind run, .*, got None"):
        read(path)


@pytest.mark.parametrize("key", ["config", "labels", "metric", "curve", "test", "ceiling"])
def test_a_record_that_cannot_be_shown_is_refused(tmp_path, key):
    lacking = {name: value for name, value in record(sign()).items() if name != key}
    with pytest.raises(ValueError, match=f"its {key} of type .*, got nothing; leave it out"):
        append(tmp_path / "a.jsonl", lacking)
    with pytest.raises(ValueError, match=f"its {key} of type .*, got 3"):
        write_result(tmp_path / "a.json", lacking | {key: 3})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["/somebody/data/birds.zip", "data/birds.zip/", "birds.zip"])
def test_a_record_keeps_of_a_place_its_name_alone(tmp_path, place):
    config = replace(sign(), task=SignTaskConfig(data_dir=place))
    found = record(config)
    append(tmp_path / "a.jsonl", found)
    (back,) = read_records([tmp_path / "a.jsonl"])
    assert back["config"]["task"]["data_dir"] == "birds.zip"
    assert found["config"]["task"]["data_dir"] == place  # the caller's record is as it was
    assert config_hash(config_from_dict(back["config"])) == config_hash(config)


def test_the_same_record_counts_once_and_two_that_differ_are_refused(tmp_path):
    append(tmp_path / "a.jsonl", record(sign()))
    write_result(tmp_path / "result.json", record(sign()))
    assert len(read_records([tmp_path])) == 1
    append(tmp_path / "told.jsonl", record(sign()) | {"tries": {"optimizer.lr": [0.1, 0.2]}})
    assert len(read_records([tmp_path])) == 1
    append(tmp_path / "b.jsonl", record(sign(), accuracy=0.1))
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1 and .*b\.jsonl, line 1: expected one"):
        read_records([tmp_path])


def test_a_study_takes_one_record_of_a_config_and_seed(tmp_path):
    path = tmp_path / "signs.jsonl"
    append(path, record(sign()))
    written = path.read_text()
    append(path, record(sign()))
    with pytest.raises(ValueError, match=r"signs\.jsonl, line 1: expected no record"):
        append(path, record(sign(), accuracy=0.1))
    assert path.read_text() == written
    append(path, record(replace(sign(), seed=7)))
    assert len(read_records([path])) == 2
    older = json.loads(written)
    del older["config"]["optimizer"]["place_rate"]  # as written before there was such a field
    path.write_text(json.dumps(older) + "\n")
    with pytest.raises(ValueError, match="expected no record of this config"):
        append(path, record(sign(), accuracy=0.1))


def test_a_study_that_is_no_text_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}", encoding="utf-16")
    with pytest.raises(ValueError, match=r"a\.jsonl: expected records as lines of text"):
        read_records([tmp_path])


def test_json_of_another_kind_is_passed_over_in_folders_and_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text("[1, 2]")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    write_result(tmp_path / "result.json", record(sign()))
    assert len(read_records([tmp_path])) == 1
    with pytest.raises(ValueError, match=r"config\.json: expected a record"):
        read_records([tmp_path / "config.json"])


APPENDING = """
import json, sys
from tensor_memory_lab.records.store import append
record = json.loads(sys.stdin.read())
for seed in range(10_000):
    append(sys.argv[1], record | {"seed": seed})
    print(seed, flush=True)
"""


def test_appending_survives_a_kill_and_another_process(tmp_path):
    path = tmp_path / "signs.jsonl"
    command = [sys.executable, "-c", APPENDING, str(path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdin.write(json.dumps(record(sign())))
        other.stdin.close()
        told = [other.stdout.readline()]
        for seed in range(-10, 0):
            append(path, record(replace(sign(), seed=seed)))
        other.send_signal(signal.SIGKILL)
        told += other.stdout.readlines()
    seeds = set(read(path)["seed"])  # every line is whole
    assert set(range(-10, 0)) <= seeds
    assert {int(seed) for seed in told} <= seeds


RESULTS = Path(__file__).parents[2] / "results"


def test_every_committed_record_is_read_and_says_nothing_about_somebodys_disk():
    records = read_records(sorted(RESULTS.glob("*.jsonl")))
    assert len(records) > 800
    named = [r for r in records if local_places(r.get("config", {})) != r.get("config", {})]
    assert named == []
    assert {path.suffix for path in RESULTS.iterdir()} == {".jsonl"}


def test_images_of_ones_own_are_told_apart_by_their_folder():
    config = load_recipes()["images"]()
    cats, dogs, moved = (
        run_name(replace(config, task=replace(config.task, data_dir=place)))
        for place in ("/a/cats", "/a/dogs", "/b/cats")
    )
    assert cats == moved != dogs
