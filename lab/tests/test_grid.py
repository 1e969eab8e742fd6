"""Grids of runs, from --over and from plan files."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensor_memory_lab.commands.arguments import RunSettings, parse_run
from tensor_memory_lab.commands.grid import Stage, expand, parse_over, read_plan
from tensor_memory_lab.recipes import find_recipe

SIGN = "invented_runs:sign"


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True),
    st.lists(st.sampled_from(["base", "tensor"]), min_size=1, max_size=2, unique=True),
    st.lists(st.integers(1, 9), min_size=1, max_size=3, unique=True),
)
def test_a_grid_is_the_product_of_its_values_each_once(seeds, methods, numbers):
    over = {"seed": seeds, "model.method": methods, "task.numbers": numbers}
    runs = expand([Stage([SIGN], over)])
    found = {(r.config.seed, r.config.model.method, r.config.task.numbers) for r in runs}
    assert len(runs) == len(found) == math.prod(len(values) for values in over.values())
    assert len({run.name for run in runs}) == len(runs)


def test_values_are_read_as_flags_are():
    over = parse_over(
        ["model.memory.grid=2 2,3 3 3", "model.wide=true,false", "budget.patience=None,3"]
    )
    configs = [run.config for run in expand([Stage([SIGN], over)])]
    assert {config.model.memory.grid for config in configs} == {(2, 2), (3, 3, 3)}
    assert {config.model.wide for config in configs} == {True, False}
    assert {config.budget.patience for config in configs} == {None, 3}


def test_flags_given_plainly_apply_to_all():
    runs = expand([Stage([SIGN], {"seed": [0, 1]}, ["--budget.steps", "7", "--model.wide"])])
    assert all(run.config.budget.steps == 7 and run.config.model.wide for run in runs)


@pytest.mark.parametrize("text", ["seed", "seed=", "=1", "seed=1,,2"])
def test_a_malformed_over_is_refused(text):
    with pytest.raises(ValueError, match="--over: expected field=value,value such as seed=0,1,2"):
        parse_over([text])


def test_a_field_that_comes_twice_is_refused():
    with pytest.raises(ValueError, match="--over seed: expected each field once"):
        parse_over(["seed=1", "seed=2"])


@pytest.mark.parametrize("flags", [["--seed", "3"], ["--seed=3"]])
def test_a_field_that_is_fixed_and_varied_is_refused(flags):
    with pytest.raises(
        ValueError, match=r"seed: expected one value for all runs, or several .* both"
    ):
        expand([Stage(["binding"], {"seed": [0, 1]}, flags)])


def test_a_field_is_the_same_however_it_is_written(tmp_path):
    with pytest.raises(ValueError, match="expected each field once, got it twice"):
        parse_over(["budget.batch_size=8,16", "--budget.batch-size=32"])
    with pytest.raises(ValueError, match="expected each field once, got it twice"):
        parse_over(["noise=0,0.1", "task.noise=0.2"])
    with pytest.raises(ValueError, match="noise: expected one value for all runs, or several"):
        expand([Stage(["binding"], {"noise": [0, 0.1]}, ["--task.noise", "0.2"])])
    with pytest.raises(ValueError, match=r"budget.test: expected one value for all runs, or sev"):
        expand([Stage(["binding"], {"budget.test": [False, True]}, ["--budget.no-test"])])
    plan = tmp_path / "plan.toml"
    plan.write_text('[[stage]]\nrecipes = ["binding"]\nover = { "budget.batch_size" = [8, 16] }\n')
    with pytest.raises(ValueError, match=r"plan.toml, stage 1: budget.batch_size: .* got both"):
        expand(read_plan(plan, ["--budget.batch-size", "4"]))


def test_a_run_that_an_earlier_stage_has_is_left_out_and_stages_stay_in_order():
    stages = [
        Stage([SIGN], {"budget.steps": [2, 8, 4]}),
        Stage([SIGN], {"budget.steps": [16, 8]}),
    ]
    assert [run.config.budget.steps for run in expand(stages)] == [2, 8, 4, 16]


def test_the_arguments_of_a_run_make_its_config():
    over = {"model.memory.grid": [[2, 2], [3, 3]], "model.wide": [True, False], "seed": [0, 7]}
    for run in expand([Stage([SIGN], over, ["--task.numbers", "5"])]):
        name, *flags = run.arguments
        assert parse_run(find_recipe(name), flags) == (run.config, RunSettings())


def test_a_path_may_hold_blanks():
    (run,) = expand([Stage([SIGN], {"task.data-dir": ["my disk/my data"]})])
    assert run.config.task.data_dir == "my disk/my data"


def test_runs_that_differ_only_in_speed_or_in_where_their_data_lies_are_refused():
    complaint = "expected runs that differ in more than speed and where their data lies, got speed "
    with pytest.raises(ValueError, match=rf"{complaint}.* with .*'a'.* with .*'b'"):
        expand([Stage([SIGN], {"task.data_dir": ["a", "b"]})])
    with pytest.raises(ValueError, match=rf"{complaint}eager with .* and speed compile with "):
        expand([Stage([SIGN], {"speed": ["eager", "compile"]})])


def test_an_unknown_field_ends_with_status_2_and_the_nearest_name(capsys):
    with pytest.raises(SystemExit) as ended:
        expand([Stage([SIGN], {"task.nubmers": [1]})])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "--task.numbers" in error
    assert f"tensor-memory-lab run {SIGN} --help" in error  # sweep has no help of a recipe's fields


def test_a_seed_that_is_no_number_is_refused_as_any_flag_is(capsys):
    with pytest.raises(SystemExit) as ended:
        expand([Stage([SIGN], parse_over(["seed=0,first"]))])
    assert ended.value.code == 2
    assert "first" in capsys.readouterr().err


PLAN = """
timeout = 60
[[stage]]
recipes = ["invented_runs:sign"]
set = { "budget.steps" = 6, "model.wide" = true }
over = { "model.method" = ["base", "tensor"], "model.memory.grid" = [[2, 2], [3, 3]] }
[[stage]]
recipes = "invented_runs:sign"
over = { seed = [5] }
timeout = 9.5
"""


def test_a_plan_is_read_from_toml(tmp_path: Path):
    (tmp_path / "plan.toml").write_text(PLAN)
    runs = expand(read_plan(tmp_path / "plan.toml", ["--task.numbers", "3"]))
    assert [run.timeout for run in runs] == [60, 60, 60, 60, 9.5]
    assert [run.config.model.memory.grid for run in runs[:2]] == [(2, 2), (3, 3)]
    assert all(run.config.task.numbers == 3 for run in runs)
    assert runs[0].config.budget.steps == 6
    assert runs[0].config.model.wide
    assert runs[4].config.seed == 5


def test_flags_beside_a_plan_are_stronger_than_what_it_sets(tmp_path: Path):
    (tmp_path / "plan.toml").write_text(PLAN)
    runs = expand(read_plan(tmp_path / "plan.toml", ["--budget.steps", "2"]))
    assert {run.config.budget.steps for run in runs} == {2}


DEFAULTS = f"""
timeout = 60
recipes = "{SIGN}"
set = {{ "budget.steps" = 6, "optimizer.lr" = 0.5 }}
over = {{ "model.memory-layers" = [[0]], seed = [1, 2] }}
tries = {{ "task.noise" = [0.1, 0.2] }}
tried = {{ "budget.steps" = 4 }}
[[stage]]
[[stage]]
recipes = ["leak-demo"]
timeout = 9
set = {{ "budget.steps" = 3 }}
over = {{ "model.method" = ["base", "tensor"], "model.memory_layers" = [[0], [1]] }}
tries = {{ "task.noise" = [0.3] }}
tried = {{ "budget.steps" = 2, "optimizer.lr" = 0.1 }}
"""


def test_what_a_stage_says_is_stronger_than_what_its_plan_says_for_all(tmp_path: Path):
    (tmp_path / "plan.toml").write_text(DEFAULTS)
    first, second = read_plan(tmp_path / "plan.toml")
    assert (first.recipes, first.timeout) == ([SIGN], 60)
    assert first.over == {"model.memory-layers": [[0]], "seed": [1, 2]}
    assert first.flags == ["--budget.steps", "6", "--optimizer.lr", "0.5"]
    assert first.tries == {"task.noise": [0.1, 0.2]}
    assert first.tried == ["--budget.steps", "4", "--optimizer.lr", "0.5"]
    assert (second.recipes, second.timeout) == (["leak-demo"], 9)
    assert second.flags == ["--budget.steps", "3", "--optimizer.lr", "0.5"]
    assert second.tries == {"task.noise": [0.3]}
    assert second.tried == ["--budget.steps", "2", "--optimizer.lr", "0.1"]
    # The stage's own fields are the outer ones of the product, however they are written.
    assert list(second.over) == ["model.method", "model.memory_layers", "seed"]
    assert second.over["model.memory_layers"] == [[0], [1]]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[[stages]]\nrecipes = ['a']", r"unknown key 'stages'; did you mean 'stage'\?"),
        ("[[stage]]\nrecipe = 'a'", r"stage 1: unknown key 'recipe'; did you mean 'recipes'\?"),
        ("[[stage]]\nover = {seed = [1]}", r"stage 1: expected recipes = \[\"name\", ...\]"),
        ("[[stage]]\nrecipes=['a']\nover={seed = 1}", "expected a list for 'seed', got"),
        ("[[stage]]\nrecipes = [1]", r"stage 1: expected recipes = \[\"name\", ...\], got \[1\]"),
        ("[[stage]]\nrecipes=['a']\ntimeout = true", "expected timeout in seconds, got True"),
        ("timeout = 3", r"expected at least one \[\[stage\]\]"),
        ("timeout = 'x'\n[[stage]]\nrecipes=['a']", "expected timeout in seconds, got 'x'"),
        ("[[stage]]\nrecipes=['a']\ntimeout = 0", "stage 1: expected timeout in seconds, got 0"),
        ("[[stage]]\nrecipes=['a']\nset = 3", "stage 1: expected a table for 'set', got 3"),
        ("[[stage]]\nrecipes=['a']\nover = ['b']", r"expected a table for 'over', got \['b'\]"),
        ("stage = 3", r"expected at least one \[\[stage\]\]"),
        ("stage = [3]", "stage 1: expected a table, got 3"),
        ("[[stage", "expected a plan in TOML"),
        ("set = 3\n[[stage]]\nrecipes=['a']", r"plan\.toml: expected a table for 'set', got 3"),
        (
            "recipes = [1]\n[[stage]]",
            r"plan\.toml: expected recipes = \[\"name\", ...\], got \[1\]",
        ),
        ("over = {seed = 1}\n[[stage]]", r"plan\.toml: expected a list for 'seed', got 1"),
        ("seconds = 9\n[[stage]]\nrecipes=['a']", r"plan\.toml: unknown key 'seconds'; .* timeout"),
        ("recipes = 'a'\ntried = {seed = 1}\n[[stage]]", "stage 1: expected tries, since it has"),
        (
            "[[stage]]\nrecipes=['a']\nover={'model.memory-layers'=[1], 'model.memory_layers'=[2]}",
            "stage 1: over model.memory_layers: expected each field once, got it twice",
        ),
        (
            "[[stage]]\nrecipes=['a']\ntries={'task.noise'=[1], noise=[2]}",
            "stage 1: tries noise: expected each field once, got it twice",
        ),
        (
            "[[stage]]\nrecipes=['a']\nset={'budget.batch_size'=1, 'budget.batch-size'=2}",
            "stage 1: set budget.batch-size: expected each field once, got it twice",
        ),
    ],
)
def test_a_wrong_plan_is_refused_with_what_was_expected(tmp_path, text, complaint):
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(ValueError, match=complaint):
        read_plan(tmp_path / "plan.toml")


@pytest.mark.parametrize(
    "typo", ['set = {"budget.stps" = 4}', 'over = {"budget.stps" = [4]}', 'set = {seed = "x"}']
)
def test_a_typo_in_a_stage_is_told_with_its_file_and_number(tmp_path, capsys, typo):
    plan = tmp_path / "plan.toml"
    plan.write_text(f"{PLAN}[[stage]]\nrecipes = '{SIGN}'\n{typo}\n")
    with pytest.raises(SystemExit) as ended:
        expand(read_plan(plan))
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == (
        f"{plan}, stage 3: expected fields of {SIGN}, got what is named above; mend the set or "
        "over of the stage or of the whole plan, or the flags beside --plan"
    )


def test_a_recipe_that_is_not_there_is_told_with_its_file_and_stage(tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(f"{PLAN}[[stage]]\nrecipes = 'bindng'\n")
    with pytest.raises(ValueError, match=r"plan\.toml, stage 3: recipe 'bindng': no such recipe"):
        expand(read_plan(plan))


def test_a_missing_plan_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.toml: no such file; expected a plan"):
        read_plan(tmp_path / "none.toml")
