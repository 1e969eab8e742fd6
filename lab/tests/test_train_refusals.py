"""What the loop refuses, and in which words; what a full disk leaves standing."""

import errno
import json
import os
import resource
import signal
from pathlib import Path

import pytest

from tensor_memory_lab.train import RunOptions, load_run, train
from tensor_memory_lab.train.folder import RunFolder
from tiny_runs import TinyTask, tiny_run


def run(folder, config=None, **options):
    return train(config or tiny_run(), RunOptions(folder, device="cpu", quiet=True, **options))


@pytest.fixture
def unfinished(tmp_path):
    """A run of 20 steps that was killed before its result, its checkpoint before at step 16."""
    run(tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    return tmp_path / "run"


def test_files_made_of_other_data_are_not_written_over(tmp_path):
    folder = RunFolder(tmp_path / "run")
    for _ in range(2):
        folder.create(tiny_run(), {"vocabulary.txt": "the\ncat"})
    with pytest.raises(
        ValueError, match=r"vocabulary.txt: expected what this run's data makes, got"
    ):
        folder.create(tiny_run(), {"vocabulary.txt": "the\ndog"})
    assert (tmp_path / "run" / "vocabulary.txt").read_text() == "the\ncat"
    folder.release()


def test_a_task_that_draws_nothing_is_refused_before_there_is_a_folder(tmp_path, monkeypatch):
    def batch(task, split, index, size):
        raise ValueError("expected a longer text")

    with monkeypatch.context() as short:
        short.setattr(TinyTask, "batch", batch)
        with pytest.raises(ValueError, match="expected a longer text"):
            run(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert run(tmp_path / "run")["finished"]


def last(folder, part="model.safetensors"):
    return folder / "checkpoints" / json.loads((folder / "last").read_text())["checkpoint"] / part


def test_a_folder_with_a_run_is_refused_without_resume(tmp_path):
    run(tmp_path / "run")
    message = (
        r"expected a new or empty folder, got one that holds a run \(config.json, metrics.jsonl, "
        r"result.json, checkpoints, last\); continue it with --resume, or choose another --output"
    )
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "run")


def test_another_config_is_refused_by_the_names_of_its_fields(tmp_path):
    run(tmp_path / "run")
    changed = tiny_run(optimizer={"lr": 0.5}, budget={"steps": 21}, seed=1)
    with pytest.raises(ValueError, match="expected the config this run was started with") as error:
        run(tmp_path / "run", changed, resume=True)
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


def replace_config(path):
    state = json.loads(path.read_text())
    path.write_text(json.dumps(state | {"config": "another"}))


def replace_format(path):
    state = json.loads(path.read_text())
    path.write_text(json.dumps(state | {"format": 99}))


def empty_list(path):
    path.write_text("[]")


def lose_journal(path):
    state = json.loads(path.read_text())
    del state["journal"]
    path.write_text(json.dumps(state))


BROKEN = {
    "model.safetensors": [
        (truncate, r"expected [\d,]+ bytes, got [\d,]+: a truncated or foreign checkpoint"),
        (alter, "got other content: a damaged or foreign checkpoint"),
        (Path.unlink, "no such file; expected a whole checkpoint"),
    ],
    "optimizer.safetensors": [(truncate, "a truncated or foreign checkpoint")],
    "state.json": [
        (truncate, "expected the state of a checkpoint as JSON, got a truncated or foreign file"),
        (replace_config, "of another one: a foreign checkpoint"),
        (replace_format, "expected format 1, got 99"),
        (empty_list, r"expected the state of a checkpoint, an object in JSON, got \[\]"),
        (lose_journal, "expected the state of a checkpoint, got one without journal"),
        (Path.unlink, "no such file; expected a whole checkpoint"),
    ],
}


@pytest.mark.parametrize(
    ("part", "damage", "message"),
    [(part, *case) for part, cases in BROKEN.items() for case in cases],
)
def test_a_broken_checkpoint_is_refused_and_the_one_before_used_when_asked(
    unfinished, part, damage, message
):
    damage(last(unfinished, part))
    with pytest.raises(ValueError, match=message) as error:
        run(unfinished, resume=True)
    told = str(error.value)
    assert told.startswith(str(last(unfinished, part)))
    assert told.endswith(
        "continue from the checkpoint before it with --resume --from-previous, or start again in "
        "another --output"
    )
    record = run(unfinished, resume=True, from_previous=True)
    assert record["finished"]
    assert record["steps"] == 20


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"checkpoint": 3}', '{"checkpoint": "x"}'])
def test_a_broken_pointer_is_refused_by_name_with_the_cure(unfinished, text):
    (unfinished / "last").write_text(text)
    for again in (lambda: run(unfinished, resume=True), lambda: load_run(unfinished, "last")):
        with pytest.raises(ValueError, match="last: expected the pointer to a checkpoint") as error:
            again()
        assert str(error.value).endswith("; train again into another folder")


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
    with pytest.raises(ValueError, match=r"result\.json: expected .* delete it: .* --resume"):
        run(tmp_path / "run", resume=True)
    result.unlink()
    assert run(tmp_path / "run", resume=True)["test"] == whole["test"]


def test_from_previous_goes_on_from_the_checkpoint_before(unfinished, tmp_path):
    whole = run(tmp_path / "whole")
    record = run(unfinished, resume=True, from_previous=True)
    assert record["curve"] == whole["curve"]
    lines = (unfinished / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == list(range(1, 21))


def test_from_previous_without_one_is_refused(tmp_path):
    run(tmp_path / "run", tiny_run(budget={"checkpoint_every": 100}))
    (tmp_path / "run" / "result.json").unlink()
    config = tiny_run(budget={"checkpoint_every": 100})
    with pytest.raises(ValueError, match="expected a checkpoint before step-000020, got none"):
        run(tmp_path / "run", config, resume=True, from_previous=True)
    with pytest.raises(ValueError, match="expected resume=True beside it"):
        RunOptions(tmp_path, from_previous=True)


def test_weights_of_another_model_are_refused(unfinished, monkeypatch):
    import tiny_runs

    class Other(tiny_runs.TinyModel):
        def __init__(self, config, task):
            super().__init__(config, task)
            self.extra = self.head

    class Wider(tiny_runs.TinyModel):
        def __init__(self, config, task):
            super().__init__(config, task)
            self.extra = tiny_runs.nn.Linear(2, 2)

    monkeypatch.setattr(tiny_runs, "TinyModel", Wider)
    with pytest.raises(ValueError, match=r"differ in extra\.bias, extra\.weight: a foreign"):
        run(unfinished, resume=True)
    monkeypatch.setattr(tiny_runs, "TinyModel", Other)  # tied weights have two names, kept once
    assert run(unfinished, resume=True)["finished"]


def test_a_file_in_the_way_of_the_folder_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"run: cannot write the run's folder \(Not a directory\)"):
        run(tmp_path / "file" / "run")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_told(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match=r"cannot write the run's folder \(Permission denied\)"):
        run(tmp_path / "run")


def intact(folder):
    """Names and bytes of everything that the pointers of a run name."""
    pointer = json.loads((folder / "last").read_text())
    names = {pointer["checkpoint"], pointer["best"], pointer["previous"]["checkpoint"]}
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for name in sorted(names)
        for path in sorted((folder / "checkpoints" / name).iterdir())
    } | {name: (folder / name).read_bytes() for name in ("last", "best")}


def fill_disk_at(monkeypatch, step):
    """Writes of a checkpoint fail from this step on, as on a full disk."""
    from tensor_memory_lab.train import checkpoints

    save = checkpoints.save_tensors

    def full(path, tensors, *, kind):
        save(path, tensors, kind=kind)
        if kind.startswith("optimizer") and f"step-{step:06d}" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoints, "save_tensors", full)


def test_a_full_disk_is_told_and_earlier_checkpoints_are_intact(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        fill_disk_at(patch, 12)
        with pytest.raises(OSError, match="No space left on device") as error:
            run(folder)
    told = str(error.value)
    assert "step-000012: cannot write the checkpoint of step 12" in told
    assert told.endswith(
        "Checkpoints written before are intact: make room or mend the folder, then continue with "
        "--resume"
    )
    assert json.loads((folder / "last").read_text())["checkpoint"] == "step-000008"
    assert not list((folder / "checkpoints").glob(".*"))  # what was half written is gone
    before = intact(folder)
    whole = run(tmp_path / "whole")
    with monkeypatch.context() as patch:
        fill_disk_at(patch, 12)
        with pytest.raises(OSError, match="No space left"):
            run(folder, resume=True)
    assert intact(folder) == before
    assert run(folder, resume=True)["curve"] == whole["curve"]


@pytest.fixture
def small_files():
    """A limit on the size of files: the system itself refuses the write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_write_that_the_system_refuses_is_told(tmp_path, small_files):
    folder, config = tmp_path / "run", tiny_run(model={"dim": 64})
    run(folder, config)
    (folder / "result.json").unlink()
    before = {p: p.read_bytes() for p in (folder / "checkpoints" / "step-000016").iterdir()}
    small_files(8000)  # room for metrics, not for weights
    with pytest.raises(OSError, match=r"cannot write the checkpoint of step 20 .*File too large"):
        run(folder, config, resume=True, from_previous=True)
    assert {p: p.read_bytes() for p in before} == before


def test_a_batch_that_cannot_be_cut_is_refused(tmp_path):
    config = tiny_run(budget={"accumulate": 5})
    message = r"expected a multiple of 5 \(1 processes × 5 accumulated parts\), got 12"
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "run", config)
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_no_number_stops_the_run(tmp_path):
    config = tiny_run(optimizer={"lr": 1e30, "clip": 0.0}, budget={"steps": 50})
    with pytest.raises(ValueError, match=r"expected a finite training loss, got .*; lower --opt"):
        run(tmp_path / "run", config)


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
    with pytest.raises(FileNotFoundError, match="of a run that kept them: `sweep` drops them"):
        load_run(tmp_path / "run")
    with pytest.raises(ValueError, match="which: expected 'best' or 'last', got 'first'"):
        load_run(tmp_path / "run", "first")
