"""Configs and results as JSON: what comes back, what is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from invented_runs import LinearConfig, SignTaskConfig, record, sign
from tensor_memory import MemoryConfig
from tensor_memory_lab.recipes import load_recipes
from tensor_memory_lab.recipes.language import language
from tensor_memory_lab.records import (
    config_dict,
    config_from_dict,
    config_hash,
    read_results,
    register_config,
    run_name,
    write_result,
)
from tensor_memory_lab.records.positions import read_positions
from tensor_memory_lab.records.records import current, local_places
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
def test_seed_and_place_of_the_data_leave_the_hash_alone(config, seed):
    moved = replace(config, seed=seed, task=replace(config.task, data_dir="elsewhere"))
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


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "subprocess:Popen",
        "tensor_memory_lab.run_config:TypeVar",
        "tensor_memory_lab.records.records:write_result",
        "tensor_memory_lab.nowhere:Config",
        "tensor_memory_labx:Config",
        "tensor_memory.state:MemoryState",
        None,
    ],
)
def test_only_dataclasses_of_the_experiments_are_built(name):
    with pytest.raises(ValueError, match=r"expected a dataclass of tensor_memory\.experiments"):
        config_from_dict({"class": name})


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
    path = write_result(tmp_path / "deep" / "results", found)
    assert path == tmp_path / "deep" / "results" / f"{run_name(sign())}.json"
    (back,) = read_results([tmp_path])
    assert back["test"]["test"] == {"accuracy": None, "loss": 0.5}
    assert back["config"] == found["config"]
    assert config_from_dict(back["config"]) == sign()


def test_a_folder_for_results_may_have_any_name(tmp_path):
    (tmp_path / "all.json").mkdir()
    path = write_result(tmp_path / "all.json", record(sign()))
    assert path == tmp_path / "all.json" / f"{run_name(sign())}.json"


def test_texts_of_ones_own_are_told_apart_by_their_folders_and_wikitext_is_one():
    def name(folder, **task):
        config = language()
        return run_name(replace(config, task=replace(config.task, data_dir=folder, **task)))

    assert name("a/poems") == name("b/letters")
    assert name("a/poems", corpus="any") == name("b/poems", corpus="any")
    assert name("a/poems", corpus="any") != name("a/letters", corpus="any")


def test_a_record_older_than_a_field_is_of_the_run_that_has_its_default(tmp_path):
    memory = MemoryConfig(channels=4, grid=(2, 2), forget_bias=5.0)
    config = replace(sign(), model=LinearConfig(memory=memory))
    other = replace(config.model, memory=replace(memory, input_bias=-3.0))
    assert run_name(replace(config, model=other)) != run_name(config)
    old = record(config)
    del old["config"]["model"]["memory"]["input_bias"]
    assert current(old["config"]) == config_dict(config)
    assert write_result(tmp_path, old).name == f"{run_name(config)}.json"
    write_result(tmp_path / "again.json", record(config, accuracy=0.1))
    with pytest.raises(ValueError, match="expected one result per config and seed, got two that"):
        read_results([tmp_path])


@pytest.mark.parametrize("place", ["/somebody/data/birds.zip", "data/birds.zip/", "birds.zip"])
def test_a_result_keeps_of_a_place_its_name_alone(tmp_path, place):
    config = replace(sign(), task=SignTaskConfig(data_dir=place))
    found = record(config)
    path = write_result(tmp_path, found)
    assert path.name == f"{run_name(config)}.json"
    (back,) = read_results([path])
    assert back["config"]["task"]["data_dir"] == "birds.zip"
    assert found["config"]["task"]["data_dir"] == place  # the caller's record is as it was
    assert config_hash(config_from_dict(back["config"])) == config_hash(config)


def test_no_committed_result_says_where_somebody_keeps_data():
    results = Path(__file__).parents[2] / "results"
    found = [*read_results([results]), *read_positions(results / "language" / "positions")]
    assert len(found) > 200
    assert [r["config"]["task"] for r in found if local_places(r["config"]) != r["config"]] == []


def test_the_same_result_in_two_places_counts_once(tmp_path):
    for folder in ("a", "b"):
        write_result(tmp_path / folder / "result.json", record(sign()))
    write_result(tmp_path / "a", record(replace(sign(), seed=1)))
    assert sorted(found["seed"] for found in read_results([tmp_path])) == [0, 1]
    assert len(read_results([tmp_path / "a", tmp_path / "b", tmp_path])) == 2


def test_two_results_for_one_config_and_seed_are_refused(tmp_path):
    write_result(tmp_path / "a.json", record(sign()))
    write_result(tmp_path / "b.json", record(sign(), accuracy=0.1))
    with pytest.raises(ValueError, match=r"a\.json and .*b\.json: expected one result per config"):
        read_results([tmp_path])


def test_json_of_another_kind_is_passed_over_in_folders_and_refused_by_name(tmp_path):
    other = tmp_path / "bench.json"
    other.write_text('{"benchmark": "scan"}')
    write_result(tmp_path, record(sign()))
    assert len(read_results([tmp_path])) == 1
    with pytest.raises(ValueError, match=r"bench\.json: expected the result of a run"):
        read_results([other])
    with pytest.raises(FileNotFoundError, match="no such file or folder; expected results"):
        read_results([tmp_path / "nowhere"])
    (tmp_path / "torn.json").write_text('{"kind": "run", "con')
    with pytest.raises(
        ValueError, match=r"torn\.json: expected the result of a run as JSON, got a"
    ):
        read_results([tmp_path])


def test_a_list_is_passed_over_in_folders_and_refused_by_name(tmp_path):
    path = tmp_path / "list.json"
    path.write_text("[1, 2]")
    assert read_results([tmp_path]) == []
    with pytest.raises(ValueError, match=r"list\.json: expected the result of .* got \[1, 2\]"):
        read_results([path])


@pytest.mark.parametrize("key", ["config", "labels", "metric", "curve", "test", "ceiling"])
def test_a_record_that_cannot_be_shown_is_refused_by_name_with_the_cure(tmp_path, key):
    path = write_result(tmp_path, record(sign()))
    written = json.loads(path.read_text())
    path.write_text(json.dumps(written | {key: None}))
    with pytest.raises(ValueError, match=f"its {key} of type .*, got None; leave it out") as error:
        read_results([tmp_path])
    assert str(error.value).startswith(str(path))
    del written[key]
    path.write_text(json.dumps(written))
    with pytest.raises(ValueError, match=f"kind 'run', without {key}; leave it out, or delete it"):
        read_results([tmp_path])


def test_a_record_that_lacks_something_is_not_written(tmp_path):
    with pytest.raises(ValueError, match=r"expected the result of a run .* without config"):
        write_result(tmp_path / "a.json", {"kind": "run"})
    assert not list(tmp_path.iterdir())


def test_images_of_ones_own_are_told_apart_by_their_folder():
    config = load_recipes()["images"]()
    cats, dogs, moved = (
        run_name(replace(config, task=replace(config.task, data_dir=place)))
        for place in ("/a/cats", "/a/dogs", "/b/cats")
    )
    assert cats == moved != dogs
