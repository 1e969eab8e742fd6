"""A number's origin is recorded where it is known and null where it is not."""

import subprocess

import pytest
import torch

import tensor_memory
from tensor_memory_lab.provenance import provenance, write_record
from tensor_memory_lab.records import read_records

IDENTITY = ["-c", "user.name=test", "-c", "user.email=test@example.org"]


def git(folder, *arguments):
    done = subprocess.run(
        ["git", "-C", str(folder), *IDENTITY, *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.fixture(autouse=True)
def nobodys_repository(monkeypatch):
    """A git hook runs with its own repository named in the environment; ours are elsewhere."""
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "TENSOR_MEMORY_COMMIT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository that looks like this project's, with one commit."""
    package = tmp_path / "src" / "tensor_memory"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "start")
    monkeypatch.setattr(tensor_memory, "__file__", str(package / "__init__.py"))
    return tmp_path


def test_the_commit_and_its_changes_are_recorded(checkout):
    found = provenance()
    assert found["commit"] == git(checkout, "rev-parse", "HEAD")
    assert found["dirty"] is False
    (checkout / "src" / "tensor_memory" / "__init__.py").write_text("changed = True\n")
    assert provenance()["dirty"] is True


def test_a_result_that_is_not_committed_yet_does_not_make_the_code_dirty(checkout):
    (checkout / "result.json").write_text("{}")
    assert provenance()["dirty"] is False
    for folder in ("results", "docs"):
        (checkout / folder).mkdir()
        (checkout / folder / "a.jsonl").write_text("")
    git(checkout, "add", ".")
    git(checkout, "commit", "--quiet", "-m", "a study and a page")
    (checkout / "results" / "a.jsonl").write_text("{}\n")
    (checkout / "docs" / "a.jsonl").unlink()
    assert provenance()["dirty"] is False


def test_the_commit_of_a_repository_around_an_installed_copy_is_not_ours(checkout, monkeypatch):
    installed = checkout / "venv" / "tensor_memory"
    installed.mkdir(parents=True)
    monkeypatch.setattr(tensor_memory, "__file__", str(installed / "__init__.py"))
    found = provenance()
    assert (found["commit"], found["dirty"]) == (None, None)


def test_outside_a_repository_the_commit_is_null(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_memory, "__file__", str(tmp_path / "__init__.py"))
    found = provenance()
    assert (found["commit"], found["dirty"]) == (None, None)


def test_a_copy_without_its_history_takes_the_commit_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_memory, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setenv("TENSOR_MEMORY_COMMIT", "0123abc")
    found = provenance()
    assert (found["commit"], found["dirty"]) == ("0123abc", None)


def test_without_git_the_commit_is_null(checkout, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert provenance()["commit"] is None


def test_versions_and_hardware_are_recorded():
    found = provenance()
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["tensor-memory"] == tensor_memory.__version__
    assert found["hardware"]["cores"] >= 1
    assert found["hardware"]["cpu"]


def test_a_gpu_is_named_only_where_it_was_measured_on(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"GPU {device}")
    assert provenance()["hardware"]["gpu"] == "GPU None"  # the current one
    assert provenance(torch.device("cuda:1"))["hardware"]["gpu"] == "GPU cuda:1"
    assert provenance(torch.device("cpu"))["hardware"]["gpu"] is None


def test_a_record_holds_what_was_run_what_came_out_and_where(tmp_path):
    what = {"benchmark": "none", "config": {"a": 1}, "seed": 3, "result": {"b": 2}}
    for _ in range(2):
        write_record(tmp_path / "study.jsonl", **what)
    first, second = read_records([tmp_path / "study.jsonl"])
    assert first == second | {"date": first["date"]}
    assert what.items() <= first.items()
    assert set(provenance()) < set(first)
