"""tensor-memory-lab sweep: every run a job of its own, here or on a cluster that is played here."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from submitit.core.utils import JobPaths

import forked
from invented_runs import record, sign
from tensor_memory_lab.cli import main
from tensor_memory_lab.commands import jobs
from tensor_memory_lab.commands.arguments import parse_run
from tensor_memory_lab.commands.grid import Stage, read_plan
from tensor_memory_lab.commands.tries import check_stages, in_lots
from tensor_memory_lab.recipes import find_recipe
from tensor_memory_lab.records import append, config_from_dict, read_records, run_name, write_result

SIGN = "invented_runs:sign"


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # recipes of one's own add the folder
    places = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, places)))  # for the jobs
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def do_jobs_here(found: Any, **_: Any) -> Any:
    """What a sweep does of its jobs, in this process: theirs would import torch again."""
    for job in found:
        assert jobs.run_command([*job.arguments, "--device", "cpu"]) == 0
        yield jobs.Ended(job, 1.0, job.folder / "none", killed=False)


def test_runs_that_fail_are_told_with_what_their_logs_end_with(capsys):
    grid = ["sweep", SIGN, "--over", "task.trouble=raise,die", "--device", "cpu"]
    assert main([*grid, "--jobs", "2"]) == 1
    out = capsys.readouterr()
    assert out.err.startswith("2 runs to do on device cpu, 0 finished already\n")
    assert "0 runs done, 0 skipped, 2 failed" in out.out
    assert "ValueError: task.trouble: expected none, got what was asked for" in out.err
    assert "its process was killed or stopped" in out.err
    logs = {path.parent.parent.name: path.read_text() for path in Path().glob("runs/*/log/*.out")}
    assert len(logs) == 2
    assert sum("Traceback" in log for log in logs.values()) == 1
    assert not list(Path("runs").rglob("*.pkl"))


def test_a_sweep_runs_its_grid_and_skips_what_is_done(capsys, monkeypatch):
    monkeypatch.setattr("tensor_memory_lab.commands.sweep_runs.do_jobs", do_jobs_here)
    grid = ["sweep", SIGN, "--over", "seed=0,2", "--device", "cpu", "--results", "kept.jsonl"]
    assert main([*grid, "--jobs", "2"]) == 0
    assert "2 runs done, 0 skipped, 0 failed" in capsys.readouterr().out
    found = read_records(["kept.jsonl"])
    assert [(run["finished"], run["shared_device"]) for run in found] == [(True, True)] * 2
    assert not list(Path("runs").glob("*/checkpoints"))
    again = ["sweep", SIGN, "--over", "seed=0,1", "--results", "kept.jsonl", "--dry-run"]
    assert main(again) == 0
    _, _, first, second, count = capsys.readouterr().out.splitlines()
    assert first.split()[0] == "finished"
    assert second.split() == ["new", second.split()[1], "seed=1"]
    assert count == "2 runs, 1 of them finished"


TRIES = f"""
[[stage]]
recipes = "{SIGN}"
over = {{ "model.method" = ["base", "tensor"], seed = [1, 2] }}
tries = {{ "optimizer.lr" = [1e-9, 0.3] }}
"""


def test_every_method_gets_the_same_tries_and_the_best_goes_on(capsys, monkeypatch):
    monkeypatch.setattr("tensor_memory_lab.commands.sweep_runs.do_jobs", do_jobs_here)
    Path("plan.toml").write_text(TRIES)
    sweep = ["sweep", "--plan", "plan.toml", "--device", "cpu", "--results", "kept.jsonl"]
    assert main([*sweep, "--budget.steps", "6"]) == 0
    assert "8 runs done, 0 skipped, 0 failed" in capsys.readouterr().out
    found = read_records(["kept.jsonl"])
    tries, runs = [r for r in found if "tries" not in r], [r for r in found if "tries" in r]
    # Methods take turns, so that runs side by side compile different code.
    assert [r["method"] for r in tries] == ["base", "tensor"] * 2
    for method in ("base", "tensor"):
        mine = [r for r in tries if r["method"] == method]
        assert [(r["seed"], r["config"]["optimizer"]["lr"]) for r in mine] == [(0, 1e-9), (0, 0.3)]
        told = {
            "optimizer.lr": [1e-9, 0.3],
            "valid": [r["valid"]["accuracy"] for r in mine],
            "seed": 0,
        }
        best = told["optimizer.lr"][told["valid"].index(max(told["valid"]))]
        for run in (r for r in runs if r["method"] == method):
            assert run["tries"] == told
            assert run["config"]["optimizer"]["lr"] == best == 0.3
    assert all(r["test"] == {} for r in tries)  # the test split is touched by what counts alone
    assert all(set(r["test"]) == {"test"} for r in runs)
    assert [r["seed"] for r in runs] == [1, 1, 2, 2]
    assert main([*sweep, "--budget.steps", "6", "--dry-run"]) == 0
    assert capsys.readouterr().out.endswith("8 runs, 8 of them finished\n")


def test_a_run_that_is_still_the_best_of_more_tries_says_so(monkeypatch):
    monkeypatch.setattr("tensor_memory_lab.commands.sweep_runs.do_jobs", do_jobs_here)
    sweep = ["sweep", SIGN, "--over", "seed=1", "--device", "cpu", "--results", "kept.jsonl"]
    sweep += ["--budget.steps", "6", "--tries"]

    def told() -> list[str]:
        (run,) = (r for r in read_records(["kept.jsonl"]) if "tries" in r)
        assert len(run["tries"]["valid"]) == len(run["tries"]["optimizer.lr"])
        return run["tries"]["optimizer.lr"]

    assert main([*sweep, "optimizer.lr=1e-9,0.3"]) == 0
    assert told() == ["1e-9", "0.3"]
    before = Path("kept.jsonl").read_text().splitlines()
    assert main([*sweep, "optimizer.lr=1e-9,0.3,1e-8"]) == 0
    assert told() == ["1e-9", "0.3", "1e-8"]
    after = Path("kept.jsonl").read_text().splitlines()
    assert [line for line in before if "tries" not in line] == after[: len(before) - 1]
    assert main([*sweep, "optimizer.lr=1e-9,0.3"]) == 0  # fewer tell less
    assert told() == ["1e-9", "0.3", "1e-8"]


def test_a_tried_field_is_told_as_records_name_it_however_its_flag_is_written(monkeypatch):
    monkeypatch.setattr("tensor_memory_lab.commands.sweep_runs.do_jobs", do_jobs_here)
    sweep = ["sweep", SIGN, "--over", "seed=1", "--device", "cpu", "--results", "kept.jsonl"]
    assert main([*sweep, "--budget.steps", "6", "--tries", "optimizer.weight-decay=0,0.1"]) == 0
    (run,) = (r for r in read_records(["kept.jsonl"]) if "tries" in r)
    assert run["tries"]["optimizer.weight_decay"] == ["0", "0.1"]


@pytest.mark.parametrize("flag", ["--budget.test", "--budget.no-test"])
def test_tries_have_no_test_whatever_the_runs_that_count_have(capsys, flag):
    tries = ["--over", "seed=1", "--tries", "optimizer.lr=0.1,0.2"]
    assert main(["sweep", SIGN, *tries, flag, "--dry-run"]) == 0
    assert capsys.readouterr().out.count("budget.test=False") == 2


def test_tries_may_be_made_in_another_setting(capsys, monkeypatch):
    monkeypatch.setattr("tensor_memory_lab.commands.sweep_runs.do_jobs", do_jobs_here)
    plain = TRIES.replace("[1, 2]", "[1]") + 'set = {"budget.steps" = 6}\n'
    longer = plain.replace("6", "8") + 'tried = {"budget.steps" = 6}\n'
    sweep = ["sweep", "--plan", "plan.toml", "--device", "cpu", "--results", "kept.jsonl"]
    Path("plan.toml").write_text(plain)
    assert main(sweep) == 0
    Path("plan.toml").write_text(longer)
    assert main(sweep) == 0
    assert "2 runs done, 4 skipped, 0 failed" in capsys.readouterr().out
    found = {(r["method"], r["steps"]): r for r in read_records(["kept.jsonl"]) if "tries" in r}
    text = Path("kept.jsonl").read_text().replace(found["base", 8]["tries"]["runs"][0], "of-old")
    Path("kept.jsonl").write_text(text)
    assert main(sweep) == 0
    assert Path("kept.jsonl").read_text() == text  # names alone are no news
    for method in ("base", "tensor"):
        short, long = (dict(found[method, steps]["tries"]) for steps in (6, 8))
        assert len(long.pop("runs")) == 2
        assert long == short
        assert found[method, 8]["config"]["optimizer"]["lr"] == 0.3


def do_timed_jobs(found: Any, **_: Any) -> Any:
    """Records of jobs that are never run, with invented times of a step."""
    for job in found:
        config, settings = parse_run(find_recipe(job.arguments[0]), job.arguments[1:])
        slow = config.model.method == "tensor"
        shared = settings.shared_device
        kept = record(config, step_ms=20.0 if slow else 5.0, shared_device=shared)
        settings.output.mkdir(parents=True)
        write_result(settings.output / "result.json", kept)
        yield jobs.Ended(job, 1.0, job.folder / "none", killed=False)


def test_runs_of_equal_time_get_the_steps_that_take_it(monkeypatch):
    monkeypatch.setattr("tensor_memory_lab.commands.sweep_runs.do_jobs", do_timed_jobs)
    usual = "set = { 'budget.evaluate-every' = 50, 'budget.test' = true }\n"
    Path("plan.toml").write_text(TRIES + usual + "seconds = 10\n")
    sweep = ["sweep", "--plan", "plan.toml", "--device", "cpu", "--results", "kept.jsonl"]
    assert main([*sweep, "--jobs", "3"]) == 0
    found = read_records(["kept.jsonl"])
    steps = {(r["method"], r["steps"]) for r in found if "tries" in r}
    assert steps == {("base", 2000), ("tensor", 500)}
    timed = [r for r in found if r["steps"] == 200]
    assert [r["shared_device"] for r in timed] == [False, False]
    assert all(r["tries"]["seconds"] == 10 for r in found if "tries" in r)


def test_a_step_time_of_another_launch_is_refused(capsys, monkeypatch):
    monkeypatch.setattr("tensor_memory_lab.commands.sweep_runs.do_jobs", do_timed_jobs)
    Path("plan.toml").write_text(f"[[stage]]\nrecipes = '{SIGN}'\nseconds = 10\n")
    sweep = ["sweep", "--plan", "plan.toml", "--device", "cpu", "--results", "kept.jsonl"]
    assert main(sweep) == 0
    timed, _ = read_records(["kept.jsonl"])
    name = run_name(config_from_dict(timed["config"]))
    asked = f"{name}: expected the time of a step with --speed eager on a device of its own, got "
    assert main([*sweep, "--speed", "eager"]) == 2
    error = capsys.readouterr().err
    assert f"{asked}a record with --speed auto; delete runs/{name} and its line in kept.j" in error
    shutil.rmtree(Path("runs", name))
    assert main([*sweep, "--speed", "eager"]) == 2
    assert "--speed auto; delete its line in kept.jsonl, or give" in capsys.readouterr().err
    Path("kept.jsonl").unlink()
    assert main([*sweep, "--speed", "eager"]) == 0
    assert "1 run done, 1 skipped, 0 failed" in capsys.readouterr().out
    assert read_records(["kept.jsonl"])[0]["config"]["speed"] == "eager"


def test_a_step_time_of_a_shared_device_is_refused(capsys, monkeypatch):
    """Whether it was there before the sweep, or the sweep itself shared the device for it."""
    monkeypatch.setattr("tensor_memory_lab.commands.sweep_runs.do_jobs", do_timed_jobs)
    short = "'budget.steps' = 200, 'budget.evaluate-every' = 200, 'budget.test' = false"
    Path("plan.toml").write_text(
        f"[[stage]]\nrecipes = '{SIGN}'\nset = {{ {short} }}\nover = {{ seed = [0, 1] }}\n"
        f"[[stage]]\nrecipes = '{SIGN}'\nseconds = 10\n"
    )
    sweep = ["sweep", "--plan", "plan.toml", "--device", "cpu"]
    said = "of its own, got a record with --speed auto on a shared device"
    assert main([*sweep, "--jobs", "2"]) == 1
    assert said in capsys.readouterr().err
    assert main(sweep) == 2
    assert f"{said}; delete runs/sign-" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("over", "tries", "said"),
    [
        ("task.noise=0.1", "noise=0.1,0.2", "noise: expected it in over or in tries, got it in"),
        ("budget.batch_size=4", "budget.batch-size=8,16", "budget.batch-size: expected it in over"),
        ("seed=1", "seed=2,3", "seed: expected it in over or in tries, got it in both"),
        ("model.method=base", "seed=2,3", "a field to choose a value of, got seed in tries"),
        ("seed=1", "budget.test=true,false", "a value of, got budget.test in tries"),
    ],
)
def test_a_value_that_tries_would_replace_is_refused(capsys, over, tries, said):
    grid = ["--over", over, "--tries", tries, "--dry-run"]
    assert main(["sweep", SIGN, *grid]) == 2
    assert said in capsys.readouterr().err
    name, values = tries.split("=")
    field, value = over.split("=")
    value = value if value[0].isdigit() else f"'{value}'"
    plan = f"over = {{ '{field}' = [{value}] }}\ntries = {{ '{name}' = [{values}] }}\n"
    Path("plan.toml").write_text(f"[[stage]]\nrecipes = '{SIGN}'\n{plan}")
    assert main(["sweep", "--plan", "plan.toml", "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert "plan.toml, stage 1: " in error
    assert said in error


@pytest.mark.parametrize("given", ["over", "tries", "set", "flag"])
def test_steps_beside_seconds_are_refused(capsys, given):
    table = f"{given} = {{ 'budget.steps' = {4 if given == 'set' else [4, 8]} }}\n"
    plan = f"[[stage]]\nrecipes = '{SIGN}'\nseconds = 10\n"
    Path("plan.toml").write_text(plan + (table if given != "flag" else ""))
    flags = ["--budget.steps=4"] if given == "flag" else []
    assert main(["sweep", "--plan", "plan.toml", "--dry-run", *flags]) == 2
    assert "stage 1: expected budget.steps or seconds, got both" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "got"),
    [
        (["--over", "seed=0,1"], "got 0, 1; go over seeds such as 1, 2 and 3"),
        (["--over", "model.method=base"], "got none; go over seeds"),
        (["--seed", "1"], "got none; go over seeds"),
    ],
)
def test_the_runs_that_count_have_other_seeds_than_the_tries(capsys, given, got):
    assert main(["sweep", SIGN, *given, "--tries", "optimizer.lr=0.1,0.2", "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert "sweep: expected seeds other than 0 in over, since the tries have that one" in error
    assert got in error


def test_the_stages_of_all_plans_can_choose():
    for plan in sorted((Path(__file__).parents[1] / "plans").glob("*.toml")):
        check_stages(read_plan(plan))


@pytest.mark.parametrize("rates", ["1e-3,0.001,3e-3", "3e-3,1e-3,1e-3"])
def test_values_to_try_that_are_the_same_run_are_refused(capsys, rates):
    tries = ["--over", "seed=1", "--tries", f"optimizer.lr={rates}", "--dry-run"]
    assert main(["sweep", SIGN, *tries]) == 2
    error = capsys.readouterr().err
    assert "sweep: expected tries that are different runs, got the same run twice" in error
    assert "optimizer.lr=1e-3 seed=0" in error


def test_a_stage_that_tries_is_done_before_the_next_begins():
    chooses, plain = Stage([SIGN], tries={"optimizer.lr": [0.1]}), Stage([SIGN])
    lots = in_lots([plain, plain, chooses, chooses, plain])
    assert [len(lot) for lot in lots] == [2, 1, 1, 1]
    assert lots[1] == [chooses]


@pytest.mark.parametrize("finished", [0, 1])
def test_nothing_is_chosen_before_all_tries_have_finished(capsys, monkeypatch, finished):
    def some(found: Any, **options: Any) -> Any:
        return do_jobs_here(found[:finished], **options)

    monkeypatch.setattr("tensor_memory_lab.commands.sweep_runs.do_jobs", some)
    tries = ["--over", "seed=1", "--tries", "optimizer.lr=0.1,0.2", "--device", "cpu"]
    assert main(["sweep", SIGN, *tries, "--budget.steps", "2", "--dry-run"]) == 0
    assert "\n1 combination has tries to finish first" in capsys.readouterr().out
    assert main(["sweep", SIGN, *tries, "--budget.steps", "2"]) == 1
    assert len(list(Path("runs").glob("*/result.json"))) == finished
    assert "a choice needs all 2 tries" in capsys.readouterr().err


def test_a_try_that_diverges_is_the_worst_and_a_run_that_does_is_in_the_study(capsys, monkeypatch):
    def some_fail(found: Any, **_: Any) -> Any:
        for job in found:
            told = pytest.raises(ValueError, match="expected a finite training loss")
            with told if "1e38" in " ".join(job.arguments) else nullcontext():
                jobs.run_command([*job.arguments, "--device", "cpu"])
            yield jobs.Ended(job, 1.0, job.folder / "none", killed=False)

    monkeypatch.setattr("tensor_memory_lab.commands.sweep_runs.do_jobs", some_fail)
    sweep = ["sweep", SIGN, "--device", "cpu", "--budget.steps", "6", "--results", "kept.jsonl"]
    assert main([*sweep, "--over", "seed=1", "--tries", "optimizer.lr=1e38,0.1"]) == 0
    (chosen,) = (r for r in read_records(["kept.jsonl"]) if "tries" in r)
    assert chosen["config"]["optimizer"]["lr"] == 0.1
    assert chosen["tries"]["valid"][0] is None
    assert main([*sweep, "--over", "seed=2", "--optimizer.lr", "1e38"]) == 0
    assert "test accuracy diverged" in capsys.readouterr().out
    assert read_records(["kept.jsonl"])[-1]["test"] == {"test": {"accuracy": None}}


def test_what_is_finished_is_not_run_again_and_its_result_is_copied(capsys):
    folder = Path("runs", run_name(sign()))
    folder.mkdir(parents=True)
    write_result(folder / "result.json", record(sign()))
    assert main(["sweep", SIGN, "--device", "cpu", "--results", "kept.jsonl"]) == 0
    assert "0 runs done, 1 skipped, 0 failed" in capsys.readouterr().out
    assert main(["sweep", SIGN, "--device", "cpu", "--results", "kept.jsonl"]) == 0
    assert len(Path("kept.jsonl").read_text().splitlines()) == 1


def test_a_result_of_an_older_version_counts_as_the_run_it_is_of(capsys):
    old = record(sign())
    del old["config"]["precision"]  # a field that has come since, and is at its default
    append("kept.jsonl", old)
    assert main(["sweep", SIGN, "--results", "kept.jsonl", "--dry-run"]) == 0
    assert "\nfinished " in capsys.readouterr().out
    for changed, state in (("--speed eager", "finished"), ("--precision bf16", "new")):
        again = ["sweep", SIGN, "--results", "kept.jsonl", "--dry-run", *changed.split()]
        assert main(again) == 0
        assert f"\n{state} " in capsys.readouterr().out


def test_a_result_that_is_cut_short_is_named_before_a_sweep_goes_on(capsys):
    folder = Path("runs", run_name(sign()))
    folder.mkdir(parents=True)
    for text in ('{"finished": tr', "[]", "{}"):
        (folder / "result.json").write_text(text)
        assert main(["sweep", SIGN, "--dry-run"]) == 2
        assert f"{folder / 'result.json'}: expected " in capsys.readouterr().err


def test_a_run_that_takes_too_long_is_ended(capsys):
    grid = ["sweep", SIGN, "--over", "task.trouble=sleep", "--timeout", "1", "--device", "cpu"]
    assert main(grid) == 1
    assert "its time was over; the same command with a longer" in capsys.readouterr().err


def test_ctrl_c_saves_the_runs_and_the_same_command_continues_them(tmp_path, monkeypatch, capsys):
    command = ["sweep", SIGN, "--device", "cpu", "--over", "task.trouble=wait"]
    process = forked.start(main, command, folder=tmp_path, PYTHONPATH=os.environ["PYTHONPATH"])
    while not list(Path().glob("runs/*/metrics.jsonl")):  # it waits in its fourth step
        assert process.is_alive(), Path("err").read_text()
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does: every process gets it
    Path("go").touch()
    process.join()
    error = Path("err").read_text()
    assert process.exitcode == 130, error
    assert error.endswith("sweep: interrupted; the same command continues it\n")
    (log,) = Path().glob("runs/*/log/*.out")
    assert "saved step" in log.read_text()
    assert "Traceback" not in error + log.read_text()
    assert not list(Path().glob("runs/*/result.json"))
    assert main([*command, "--dry-run"]) == 0
    assert "\nunfinished " in capsys.readouterr().out
    monkeypatch.setattr("tensor_memory_lab.commands.sweep_runs.do_jobs", do_jobs_here)
    assert main(command) == 0
    assert "continuing after step" in capsys.readouterr().err


def test_a_time_limit_of_the_sweep_ends_runs_that_have_not_begun(capsys):
    over = threading.Event()

    def end_when_begun() -> None:
        while not over.wait(0.02):
            if list(Path().glob("runs/*/log/*.out")):  # the job is importing now
                os.kill(os.getpid(), signal.SIGTERM)  # to the sweep alone
                return

    ending = threading.Thread(target=end_when_begun)
    ending.start()
    try:
        assert main(["sweep", SIGN, "--device", "cpu"]) == 130
    finally:
        over.set()
        ending.join()
    error = capsys.readouterr().err
    assert error.endswith("sweep: interrupted; the same command continues it\n")
    assert "Traceback" not in error


CLUSTER = {
    "sbatch": "export SLURM_JOB_ID=$$\nsetsid bash $1 >/dev/null 2>&1 &\n"
    "echo Submitted batch job $$",
    "srun": "while [[ $1 == --* ]]; do\n  [[ $1 == --output ]] && out=$2\n"
    "  [[ $1 == --unbuffered ]] || shift\n  shift\ndone\nout=${out//%j/$SLURM_JOB_ID}\n"
    'exec "$@" >>"${out//%t/0}" 2>&1',
    "sacct": "echo 'JobID|State|NodeList'",
}


def test_one_option_sends_the_runs_to_a_cluster(tmp_path, monkeypatch, capsys):
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in CLUSTER.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    grid = ["sweep", SIGN, "--device", "cpu", "--slurm", "small", "--timeout", "90"]
    assert main([*grid, "--results", "kept.jsonl"]) == 0
    assert "1 run to do on SLURM partition small" in capsys.readouterr().err
    (found,) = read_records(["kept.jsonl"])
    assert not found["shared_device"]
    (script,) = (path for path in Path().glob("runs/*/log/*_submission.sh"))
    text = script.read_text()
    for line in ("--partition=small", "--signal=TERM@30", "--time=2", "--gpus-per-node=0"):
        assert f"#SBATCH {line}\n" in text


def test_a_machine_without_a_cluster_says_so(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["sweep", SIGN, "--device", "cpu", "--slurm", "small"]) == 2
    assert "--slurm: expected a machine that has srun" in capsys.readouterr().err


@pytest.mark.parametrize(("begins", "seconds"), [(0, 60), (50, 10)])
def test_time_in_the_queue_of_a_cluster_is_none_of_a_jobs_own(
    tmp_path, monkeypatch, begins, seconds
):
    """A job with half a minute fails a minute after it was handed in."""
    clock = SimpleNamespace(now=0, monotonic=lambda: clock.now)
    clock.sleep = lambda _: setattr(clock, "now", clock.now + 10)

    class Submitted:
        paths = JobPaths(tmp_path, "7")

        def done(self) -> bool:
            if clock.now >= begins:
                self.paths.stdout.touch()
            return clock.now >= 60

    monkeypatch.setattr(jobs, "time", clock)
    monkeypatch.setattr(jobs, "_submit", lambda *_: Submitted())
    job = jobs.Job("late", (), tmp_path, timeout=30)
    (ended,) = jobs.do_jobs([job], devices=["cpu"], slurm="small")
    assert ended.seconds == seconds
    assert ended.timed_out == (seconds > 30)


def test_an_interrupted_sweep_cancels_its_jobs_on_a_cluster():
    class Submitted:
        cancelled = False

        def cancel(self, check: bool) -> None:
            self.cancelled = True

        def done(self) -> bool:
            return self.cancelled

    running: list[Any] = [Submitted(), Submitted()]
    jobs._end(running, "small")
    assert all(job.cancelled for job in running)


def test_a_job_sees_the_gpus_that_its_sweep_sees(monkeypatch):
    """submitit starts a job with CUDA_VISIBLE_DEVICES empty."""
    before, seen = signal.getsignal(signal.SIGTERM), []
    monkeypatch.setattr(jobs, "run_command", lambda _: seen.append(dict(os.environ)) or 0)
    for given in ("1", None):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        jobs.run_job([], {"CUDA_VISIBLE_DEVICES": given})
    signal.signal(signal.SIGTERM, before)
    assert [environment.get("CUDA_VISIBLE_DEVICES") for environment in seen] == ["1", None]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("taken")])
def test_a_result_that_cannot_be_copied_costs_its_run_alone(capsys, monkeypatch, error):
    def done_at_once(found: Any, **_: Any) -> Any:
        for job in found:
            job.folder.mkdir(parents=True)
            config = replace(sign(), seed=int(job.name[-1]))
            write_result(job.folder.parent / "result.json", record(config))
            yield jobs.Ended(job, 1.0, job.folder / "none", killed=False)

    def full(path: Path, found: dict[str, Any]) -> None:
        if found["seed"] == 0:
            raise error
        append(path, found)

    monkeypatch.setattr("tensor_memory_lab.commands.sweep_runs.do_jobs", done_at_once)
    monkeypatch.setattr("tensor_memory_lab.commands.sweep_runs.append", full)
    runs = ["sweep", SIGN, "--over", "seed=0,1", "--results", "kept.jsonl", "--device", "cpu"]
    assert main(runs) == 1
    out = capsys.readouterr()
    assert "1 run done, 0 skipped, 1 failed" in out.out
    assert f"its result could not be added to kept.jsonl ({error})" in out.err
    assert len(read_records(["kept.jsonl"])) == 1


def test_a_sweep_with_a_wrong_device_or_folder_stops_before_its_first_run(capsys):
    assert main(["sweep", SIGN, "--device", "cpu,gpu"]) == 2
    assert "device: expected auto, cpu, cuda or cuda:N, got 'gpu'" in capsys.readouterr().err
    assert not Path("runs").exists()
    Path("taken").write_text("a file")
    for option, path, what in (
        ("--output", "taken", "runs"),
        ("--results", "taken/study.jsonl", "results"),
    ):
        assert main(["sweep", SIGN, "--device", "cpu", option, path]) == 2
        told = f"taken: cannot be made a folder for {what} (File exists)"
        assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([SIGN, "--plan", "plan.toml"], "expected recipes and --over, or --plan, got both"),
        (["--over", "seed=1"], "expected the names of recipes first, or --plan"),
        ([SIGN, "--resume"], "a sweep resumes what is unfinished by itself"),
        ([SIGN, "--quiet"], "a sweep resumes what is unfinished by itself"),
    ],
)
def test_a_command_that_makes_no_sense_is_refused(capsys, arguments, said):
    assert main(["sweep", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--jobs", "0", "--jobs: expected 1 or more, got 0"),
        ("--timeout", "-3", "--timeout: expected seconds, more than 0, got -3"),
        ("--timeout", "inf", "--timeout: expected seconds, more than 0, got inf"),
        ("--timeout", "soon", "--timeout: expected seconds, more than 0, got soon"),
    ],
)
def test_a_sweep_without_jobs_or_time_is_refused(capsys, flag, value, said):
    with pytest.raises(SystemExit):
        main(["sweep", SIGN, flag, value])
    assert said in capsys.readouterr().err
