"""tensor-memory-lab inspect RUN_FOLDER: a trained model is recorded on its task's own data."""

import shutil
from dataclasses import replace

import pytest
import torch

from tensor_memory import MemoryConfig, Recording, record
from tensor_memory_lab.commands.inspect import inspect_command
from tensor_memory_lab.recipes import find_recipe
from tensor_memory_lab.recipes.windowed import demo
from tensor_memory_lab.records import config as stored_configs
from tensor_memory_lab.train import RunOptions, load_run, train
from tiny_text import write_text
from vision_data import tiny_actions, tiny_birds

SMALL = MemoryConfig(channels=4, grid=(3, 3, 3), chunk_size=2)


def binding_run(folder, method):
    config = demo()
    config = replace(
        config,
        task=replace(config.task, valid_rows=8, test_rows=16),
        model=replace(config.model, method=method, dim=16, heads=2),
        budget=replace(config.budget, steps=2, evaluate_every=1),
    )
    train(config, RunOptions(output=folder, device="cpu", quiet=True))
    return folder


@pytest.fixture(scope="module")
def binding(tmp_path_factory):
    return binding_run(tmp_path_factory.mktemp("binding") / "tensor", "tensor")


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    folder = tmp_path_factory.mktemp("language")
    data = write_text(folder / "data")
    config = find_recipe("language-carried")()
    memory = MemoryConfig(channels=4, grid=(3, 3), chunk_size=4)
    config = replace(
        config,
        task=replace(config.task, data_dir=str(data), corpus="any", length=10),
        model=replace(
            config.model, method="tensor-local", dim=16, layers=2, heads=2, window=4, memory=memory
        ),
        optimizer=replace(config.optimizer, warmup=1),
        budget=replace(config.budget, steps=2, batch_size=2, evaluate_every=1),
        precision="float32",
    )
    train(config, RunOptions(output=folder / "run", device="cpu", quiet=True))
    return folder


def inspect(folder, *options):
    assert inspect_command([str(folder), *map(str, options)]) == 0


def test_a_run_is_recorded_on_the_first_rows_of_its_test_data(binding, tmp_path, capsys):
    kept, page = tmp_path / "new" / "kept", tmp_path / "page.html"
    inspect(binding, "--save", kept, "--html", page)
    out = capsys.readouterr().out
    assert "4 rows, 1 layer" in out
    assert f"page: {page}" in out
    recording = Recording.load(kept)
    _, task, model = load_run(binding)
    batch = task.batch("test", 0, 4)
    with torch.no_grad(), record(model) as expected:
        model(batch)
    assert recording.names == expected.names
    for name, array in expected[0].arrays().items():
        torch.testing.assert_close(
            recording[0].arrays()[name], array, rtol=0, atol=0, equal_nan=True
        )
    assert recording.texts == task.describe(batch)["texts"]
    assert "what is at (" in page.read_text(encoding="utf-8")


OWN_RUNS = """
from dataclasses import dataclass, replace
from tensor_memory_lab.recipes.windowed import demo
from tensor_memory_lab.tasks.binding import BindingConfig

@dataclass(frozen=True)
class OwnConfig(BindingConfig):
    pass

def own():
    config = demo()
    return replace(
        config,
        task=OwnConfig(valid_rows=8, test_rows=16, writes=4, values=4, queries=2, gap=1),
        model=replace(config.model, method="tensor", dim=16, heads=2),
        budget=replace(config.budget, steps=2, evaluate_every=1),
    )
"""


def test_a_run_of_classes_of_one_s_own_is_opened_by_its_recipe(tmp_path, monkeypatch):
    (tmp_path / "own_runs.py").write_text(OWN_RUNS)
    monkeypatch.chdir(tmp_path)
    train(find_recipe("own_runs:own")(), RunOptions(output=tmp_path / "run", quiet=True))
    monkeypatch.setattr(
        stored_configs, "_registered", {}
    )  # as in a process that has not made the run
    with pytest.raises(ValueError, match=r"got 'own_runs:OwnConfig'; .*--recipe module:function"):
        inspect("run")
    inspect("run", "--recipe", "own_runs:own", "--save", "kept")
    assert Recording.load("kept").rows == 4


def test_rows_split_and_checkpoint_can_be_chosen(binding, tmp_path):
    inspect(
        binding, "--rows", 2, "--split", "valid", "--which", "last", "--save", tmp_path / "kept"
    )
    task = load_run(binding)[1]
    texts = task.describe(task.batch("valid", 0, 2))["texts"]
    assert Recording.load(tmp_path / "kept").texts == texts


def test_a_carried_text_goes_on_from_window_to_window(language, tmp_path):
    kept = tmp_path / "kept"
    inspect(language / "run", "--rows", 2, "--windows", 3, "--save", kept)
    recording = Recording.load(kept)
    assert recording.rows == 2
    layer = recording[1]
    assert layer.seen.tolist() == [8, 8]  # 30 tokens in chunks of 4, the last of them unfinished
    assert layer.span[:, 0].tolist() == [[a, min(a + 4, 30)] for a in range(0, 30, 4)]
    with pytest.raises(ValueError, match=r"--windows: expected \d+ or fewer, .*, got 8000"):
        inspect(language / "run", "--rows", 2, "--windows", 8000)
    line = "\n the cat sat on the mat ."
    assert "".join(recording.texts[0]) == (line * 4)[: len("".join(recording.texts[0]))]
    assert recording.text(1, 2, 0) == "\n the cat sat"  # tokens 8 to 11: a line has eight


def test_data_that_have_moved_can_be_named(language, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(language / "run", run)
    moved = tmp_path / "moved"
    (language / "data").rename(moved)
    with pytest.raises(OSError, match=str(language / "data")):
        inspect(run)
    inspect(run, "--data-dir", moved)
    moved.rename(language / "data")


def test_what_a_run_cannot_do_is_told(binding, tmp_path):
    for options, complaint in (
        (["--windows", "2"], "--windows: expected 1, since binding W=8"),
        (["--data-dir", "x"], "data_dir: expected none for BindingConfig"),
        (["--split", "tset"], "split: expected train, valid or test, got 'tset'"),
        (["--html", tmp_path, "--save", tmp_path], "expected another path for each output"),
        (["--save", binding / "config.json"], "config.json: expected a recording to replace"),
    ):
        with pytest.raises(ValueError, match=complaint):
            inspect(binding, *options)
    base = binding_run(tmp_path / "base", "base")
    with pytest.raises(ValueError, match="a memory, got one of the method base"):
        inspect(base)
    with pytest.raises((ValueError, OSError), match=r"expected the folder of a run, with config"):
        inspect(tmp_path)


@pytest.mark.parametrize("name", ["ucf101-9", "cub"])
def test_pictures_are_shown_where_tokens_are_patches(tmp_path, name):
    if name == "cub":
        layout = tiny_birds(tmp_path)
        model = {"dim": 16, "decoder_dim": 8, "decoder_heads": 2, "layers": 3}
    else:
        layout = tiny_actions(tmp_path, 4) | {"frames": 2}
        model = {"dim": 16, "layers": 2}
    config = find_recipe(name)()
    config = replace(
        config,
        task=replace(config.task, **layout),
        model=replace(config.model, method="spatial", memory=SMALL, heads=2, **model),
        optimizer=replace(config.optimizer, warmup=1),
        budget=replace(config.budget, steps=1, batch_size=2, evaluate_every=1),
        precision="float32",
    )
    train(config, RunOptions(output=tmp_path / "run", device="cpu", quiet=True))
    kept = tmp_path / "kept"
    inspect(tmp_path / "run", "--rows", 2, "--save", kept)
    recording, task = Recording.load(kept), load_run(tmp_path / "run")[1]
    assert recording.frames is not None
    last = int(recording[0].span[:, 0, 1].max())
    assert last == recording.frames.shape[1] * recording.tokens_per_frame
    if name == "cub":
        assert recording.frames.shape == (2, 1, 32, 32, 3)
    else:
        assert torch.equal(recording.frames, task.batch("test", 0, 2)["clip"])
