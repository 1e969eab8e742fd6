"""What the loop refuses, and in which words; what a full disk leaves standing."""

import errno
import math
import os
import resource
import shutil
import signal

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import tiny_runs
from tensor_memory_lab.records import read_result
from tensor_memory_lab.run_config import BudgetConfig, OptimizerConfig
from tensor_memory_lab.train import RunOptions, checkpoint, load_run, train
from tensor_memory_lab.train.checkpoint import RunFolder
from tiny_runs import TinyTask, lines, run, tiny_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of 20 steps and its record."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    return folder, run(folder)


@pytest.fixture
def finished(trained, tmp_path):
    """The same run in a folder of its own."""
    return shutil.copytree(trained[0], tmp_path / "run")


@pytest.fixture
def unfinished(finished):
    """As it was killed before its result, its checkpoint before at step 16."""
    (finished / "result.json").unlink()
    return finished


def test_files_made_of_other_data_are_not_written_over(tmp_path):
    folder = RunFolder(tmp_path / "run")
    for _ in range(2):
        folder.create(tiny_run(), {"vocabulary.txt": "the\ncat"})
    with pytest.raises(ValueError, match=r"vocabulary.txt: expected what this run's data makes"):
        folder.create(tiny_run(), {"vocabulary.txt": "the\ndog"})
    assert (tmp_path / "run" / "vocabulary.txt").read_text() == "the\ncat"
    folder.release()


@pytest.mark.parametrize(
    ("name", "wrong", "error", "message"),
    [
        ("batch", lambda task, *_: task.nowhere, AttributeError, "nowhere"),
        ("facts", lambda task: {"x": torch.ones(2)}, ValueError, r"TinyTask.facts: expected plain"),
    ],
)
def test_a_task_that_cannot_be_trained_or_told_is_refused_before_there_is_a_folder(
    tmp_path, monkeypatch, name, wrong, error, message
):
    monkeypatch.setattr(TinyTask, name, wrong)
    with pytest.raises(error, match=message):
        run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_with_a_run_is_refused_without_resume(finished):
    message = (
        r"expected a new or empty folder, got one that holds a run \(config.json, metrics.jsonl, "
        r"result.json, checkpoints\); continue it with --resume, or choose another --output"
    )
    with pytest.raises(ValueError, match=message):
        run(finished)


def test_another_config_is_refused_by_the_names_of_its_fields(finished):
    changed = tiny_run(optimizer={"lr": 0.5}, budget={"steps": 21}, seed=1)
    with pytest.raises(ValueError, match="expected the config this run was started with") as error:
        run(finished, changed, resume=True)
    told = str(error.value)
    assert "optimizer.lr: 0.01 there, 0.5 now" in told
    assert "budget.steps: 20 there, 21 now" in told
    assert "seed: 0 there, 1 now" in told
    assert "warmup" not in told
    assert told.endswith("Resume with the same values, or choose another --output")


def truncate(path):
    path.write_bytes(path.read_bytes()[:-10])


def alter(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def change_header(**changes):
    def change(path):
        with safe_open(path, framework="pt") as file:
            header = file.metadata()
        save_file(load_file(path), path, metadata=header | changes)

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "expected a whole checkpoint, got a missing, truncated or foreign file"),
        (alter, "got other content: a damaged checkpoint"),
        (change_header(journal="{}"), "got other content: a damaged checkpoint"),
        (change_header(config="other"), "got one of another: a foreign checkpoint"),
        (change_header(format="99"), "expected a checkpoint of format 2, got '99'"),
    ],
)
def test_a_broken_checkpoint_is_refused_and_the_one_before_used_when_asked(
    trained, unfinished, damage, message
):
    last = unfinished / "checkpoints" / "step-000020.safetensors"
    damage(last)
    with pytest.raises(ValueError, match=message) as error:
        run(unfinished, resume=True)
    told = str(error.value)
    assert told.startswith(str(last))
    assert told.endswith(
        "continue from the checkpoint before it with --resume --from-previous, or start again in "
        "another --output"
    )
    record = run(unfinished, resume=True, from_previous=True)
    assert record["curve"] == trained[1]["curve"]
    assert [line["step"] for line in lines(unfinished)] == list(range(1, 21))


def test_from_previous_without_one_is_refused(tmp_path):
    config = tiny_run(budget={"checkpoint_every": 100})
    run(tmp_path / "run", config)
    (tmp_path / "run" / "result.json").unlink()
    with pytest.raises(ValueError, match="expected two checkpoints, got 1; leave --from-previous"):
        run(tmp_path / "run", config, resume=True, from_previous=True)
    with pytest.raises(ValueError, match="expected resume=True beside it"):
        RunOptions(tmp_path, from_previous=True)


@pytest.mark.parametrize("text", ['{"class', "[]", "{}"])
def test_a_broken_config_is_refused_by_name_with_the_cure(unfinished, text):
    (unfinished / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json: expected the config of a run") as error:
        load_run(unfinished, "last")
    assert str(error.value).startswith(str(unfinished))
    assert str(error.value).endswith("or train again into another folder")


def test_a_config_of_classes_nobody_made_known_says_how_to_name_them(unfinished):
    (unfinished / "config.json").write_text('{"class": "os:path"}')
    with pytest.raises(ValueError, match=r"got 'os:path'; if it is yours, .* register_config") as e:
        load_run(unfinished, "last")
    assert str(e.value).startswith(str(unfinished / "config.json"))


def test_a_result_that_is_cut_short_is_made_again_as_the_message_says(tmp_path):
    whole = run(tmp_path / "run")
    result = tmp_path / "run" / "result.json"
    truncate(result)
    with pytest.raises(ValueError, match=r"result\.json: expected .* Delete it, and --resume"):
        run(tmp_path / "run", resume=True)
    result.unlink()
    assert run(tmp_path / "run", resume=True)["test"] == whole["test"]


class Tied(tiny_runs.TinyModel):
    def __init__(self, config, task):
        super().__init__(config, task)
        self.extra = self.head  # two names, kept once


class Wider(tiny_runs.TinyModel):
    def __init__(self, config, task):
        super().__init__(config, task)
        self.extra = tiny_runs.nn.Linear(2, 2)


def test_weights_of_another_model_are_refused(unfinished, monkeypatch):
    monkeypatch.setattr(tiny_runs, "TinyModel", Wider)
    with pytest.raises(ValueError, match=r"differ in extra\.bias, extra\.weight: a foreign"):
        run(unfinished, resume=True)
    monkeypatch.setattr(tiny_runs, "TinyModel", Tied)
    assert run(unfinished, resume=True)["finished"]


def test_a_file_in_the_way_of_the_folder_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"run: cannot write the run's folder \(Not a directory\)"):
        run(tmp_path / "file" / "run")


def fill_disk_at(monkeypatch, step):
    """The checkpoint of this step cannot be written, as on a full disk."""

    def full(tensors, path, metadata):
        save_file(tensors, path, metadata=metadata)
        if f"step-{step:06d}" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "save_file", full)


def test_a_full_disk_is_told_and_earlier_checkpoints_are_intact(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        fill_disk_at(patch, 12)
        with pytest.raises(OSError, match="No space left on device") as error:
            run(folder)
    told = str(error.value)
    assert "step-000012.safetensors: cannot write the checkpoint of step 12" in told
    assert told.endswith(
        "Checkpoints written before are intact: make room or mend the folder, then continue with "
        "--resume"
    )
    assert RunFolder(folder).steps() == [4, 8]
    assert not list((folder / "checkpoints").glob(".*"))  # what was half written is gone
    assert run(folder, resume=True)["curve"] == run(tmp_path / "whole")["curve"]


@pytest.fixture
def small_files():
    """A limit on the size of files: the system itself refuses the write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_write_that_the_system_refuses_is_told(tmp_path, small_files):
    small_files(8000)  # room for metrics, not for weights
    with pytest.raises(OSError, match=r"cannot write the checkpoint of step 4 .*File too large"):
        run(tmp_path / "run", tiny_run(model={"dim": 64}))


def test_a_batch_that_cannot_be_cut_is_refused(tmp_path):
    config = tiny_run(budget={"accumulate": 5})
    message = r"expected a multiple of 5 \(1 processes × 5 accumulated parts\), got 12"
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "run", config)
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_no_number_stops_the_run_and_its_record_says_so(tmp_path):
    config = tiny_run(optimizer={"lr": 1e30, "clip": 0.0}, budget={"steps": 50})
    with pytest.raises(ValueError, match=r"expected a finite training loss, got .*; lower --opt"):
        run(tmp_path / "run", config)
    record = read_result(tmp_path / "run" / "result.json")
    assert record["finished"]
    assert record["steps"] < 50
    assert record["valid"] == {record["metric"]: None}
    assert record["test"] == dict.fromkeys(["test", "test@half"], record["valid"])


@pytest.mark.parametrize("device", ["gpu", "cuda:x"])
def test_an_unknown_device_is_refused(tmp_path, device):
    with pytest.raises(ValueError, match="device: expected auto, cpu, cuda or cuda:N, got"):
        train(tiny_run(), RunOptions(tmp_path, device=device, quiet=True))


def test_a_tracker_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"expected one of those installed .*, got nosuch"):
        run(tmp_path / "run", trackers=("nosuch",))


def test_what_is_no_run_cannot_be_loaded(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected the folder of a run, with config"):
        load_run(tmp_path)
    run(tmp_path / "run", keep_checkpoints=False)
    with pytest.raises(FileNotFoundError, match="expected a run that kept them: `sweep` drops"):
        load_run(tmp_path / "run")
    with pytest.raises(ValueError, match="which: expected 'best' or 'last', got 'first'"):
        load_run(tmp_path / "run", "first")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: BudgetConfig(patience=0), r"budget\.patience: expected 1 or more, or None, got 0"),
        (lambda: OptimizerConfig(lr=math.nan), "lr: expected a positive number, got nan"),
        (lambda: OptimizerConfig(clip=math.nan), "clip and warmup of 0 or more, got 0.01, nan"),
        (lambda: OptimizerConfig(betas=(1.5, 0.9)), r"betas: expected two numbers in \[0, 1\)"),
        (lambda: OptimizerConfig(schedule="linear"), "optimizer.schedule: .* got 'linear'"),
        (lambda: tiny_run(precision="fp16"), "precision: .* float32, bf16, got 'fp16'"),
        (lambda: tiny_run(speed="graphs"), "speed: expected one of auto, .* got 'graphs'"),
    ],
)
def test_a_value_that_would_be_taken_for_another_is_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()
