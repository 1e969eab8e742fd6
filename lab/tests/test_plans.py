"""Every plan: it opens with its command, and its runs are ones that `run` takes."""

from __future__ import annotations

import functools
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from sampled import exhaustive_but
from tensor_memory_lab.cli import main
from tensor_memory_lab.commands.grid import PlannedRun, expand, read_plan
from tensor_memory_lab.commands.tries import chosen_runs, first_runs
from tensor_memory_lab.recipes import load_recipes
from tensor_memory_lab.records import config_from_dict, read_records, run_name

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "lab" / "plans"
PLANS = sorted(path.stem for path in FOLDER.glob("*.toml"))
SAMPLE = ("language", "leak-demo", "open")  # reading the flags of all takes half a minute
EXPANDED = exhaustive_but(SAMPLE, PLANS)


def command(plan: str) -> list[str]:
    """The words of the command in the comment that opens a plan."""
    text = (FOLDER / f"{plan}.toml").read_text(encoding="utf-8")
    found = re.search(r"^#   (tensor-memory-lab sweep .*?[^\\])$", text, re.M | re.S)
    assert found, plan
    return shlex.split(found[1].replace("\\\n#", " "))


@functools.cache  # reading flags takes a while
def planned(plan: str) -> tuple[list[PlannedRun], list[str]]:
    """The runs that are known by now, and a line for each that waits for a choice."""
    words = command(plan)
    flags = words[words.index("--task.decoder") :][:2] if "--task.decoder" in words else []
    stages = read_plan(FOLDER / f"{plan}.toml", flags)
    chosen, waiting = chosen_runs(stages, lambda run: records(plan).get(run.name))
    return [*first_runs(stages), *chosen], waiting


def runs_of(plan: str) -> list[PlannedRun]:
    return planned(plan)[0]


@functools.cache
def records(plan: str) -> dict[str, dict[str, Any]]:
    """The runs of the study that a plan names, by the names they have today."""
    words = command(plan)
    study = ROOT / words[words.index("--results") + 1]
    found = read_records([study]) if study.exists() else []
    return {
        run_name(config_from_dict(record["config"])): record
        for record in found
        if record["kind"] == "run"
    }


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_opens_with_its_command_its_time_and_its_result(plan):
    assert command(plan)[:4] == ["tensor-memory-lab", "sweep", "--plan", f"lab/plans/{plan}.toml"]
    opening = (FOLDER / f"{plan}.toml").read_text(encoding="utf-8").split("\ntimeout = ")[0]
    assert re.search(r"^# Time: (about )?\d+ minutes on ", opening, re.M)
    assert re.search(r"^# Result", opening, re.M)
    assert all(line.startswith("#") for line in opening.split("\n") if line)


@pytest.mark.parametrize("plan", EXPANDED)
def test_the_runs_of_a_plan_differ(plan):
    runs = runs_of(plan)
    assert len({run.name for run in runs}) == len(runs) >= 3
    assert all(run.timeout for run in runs)


NOT_RUN = {"language": [("language-paper", "wide-local", 2)]}
"""Runs of plans that have no record."""
NOT_YET = (
    "language-places",
    "maze",
    "mqar",
    "mqar-whole",
    "open",
    "place-rate",
    "places-windowed",
    "vision-places",
    "world-settings",
    "world-time",
)
"""Plans that nobody has run to their end."""


@pytest.mark.parametrize("plan", EXPANDED)
def test_every_run_of_a_plan_has_its_record_in_the_study_it_names(plan):
    missing = [run.config for run in runs_of(plan) if run.name not in records(plan)]
    if plan in NOT_YET:
        assert missing or planned(plan)[1]
        return
    named = [(config.recipe, config.model.method, config.seed) for config in missing]
    assert named == NOT_RUN.get(plan, [])


def test_a_sweep_shows_the_runs_of_a_plan(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", "--plan", str(FOLDER / "leak-demo.toml"), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert all(f"new {run.name} " in " ".join(shown.split()) for run in runs_of("leak-demo"))
    assert shown.endswith(f"{len(runs_of('leak-demo'))} runs, 0 of them finished\n")


def test_a_stage_of_a_plan_runs_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sweep = ["sweep", "--plan", str(FOLDER / "leak-demo.toml"), "--dry-run", "--stage"]
    stages = read_plan(FOLDER / "leak-demo.toml")
    assert main([*sweep, str(len(stages))]) == 0
    assert f"\n{len(expand(stages[-1:]))} runs, 0 of them" in capsys.readouterr().out
    assert main([*sweep, "9"]) != 0
    assert f"expected one of the {len(stages)} stages of" in capsys.readouterr().err
    assert main(["sweep", "leak-demo", "--stage", "1"]) != 0
    assert "--stage: expected a --plan" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_the_ablations_change_one_choice_at_a_time():
    unchanged = load_recipes()["windowed-ablation"]().model.memory.to_dict()
    pairs = [{"reads", "chunk_size"}, {"read_heads", "write_heads"}]  # one choice, two fields
    for run in runs_of("ablations"):
        memory = run.config.model.memory.to_dict()
        changed = {name for name in memory if memory[name] != unchanged[name]}
        assert len(changed) <= 1 or changed in pairs


@pytest.mark.parametrize(
    "plan", ["vision-images", pytest.param("vision-actions", marks=pytest.mark.exhaustive)]
)
def test_a_plan_that_is_cut_off_leaves_whole_seeds(plan):
    """In every stage a seed is done by all methods and lengths before the next one begins."""
    for stage in read_plan(FOLDER / f"{plan}.toml"):
        seeds = [run.config.seed for run in expand([stage])]
        assert seeds == sorted(seeds)
