"""Tables and figures of records, the report, and the tables of the documentation."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import matplotlib
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from invented_runs import BASE, TENSOR, SignTaskConfig, run
from tensor_memory import MemoryConfig
from tensor_memory_lab.commands.report import report_command, report_table
from tensor_memory_lab.commands.tables import pages_with_tables, tables_command
from tensor_memory_lab.records import append, write_result
from tensor_memory_lab.records import figure as figures
from tensor_memory_lab.records.evidence import Evidence
from tensor_memory_lab.records.figure import figure
from tensor_memory_lab.records.store import frame, parts
from tensor_memory_lab.records.table import column, interval, markdown, select, table
from tensor_memory_lab.run_config import BudgetConfig, OptimizerConfig

ROOT = Path(__file__).parents[2]


def cells(records, *columns, **options):
    return table(frame(records), [column(one) for one in columns], **options)


def seeds(model=BASE, accuracies=(0.91, 0.94, 0.94), **changes):
    return [run(model, seed=seed, accuracy=a, **changes) for seed, a in enumerate(accuracies)]


def test_a_row_is_the_mean_and_interval_over_its_seeds():
    (line,) = report_table(frame(seeds()))
    assert line == {
        "method": "base",
        "seeds": "3",
        "accuracy": "93.0 ± 4.3 %",  # 4.303 × 0.01732 / √3
        "ceiling": "100.0 %",
        "parameters": "10",
        "state": "2.0 KiB",
        "steps/s": "50",
    }


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=9))
def test_an_interval_moves_and_scales_with_its_values(values):
    mean, half = interval(values)
    moved = interval([3 * value + 1 for value in values])
    assert half is not None
    assert half >= 0
    assert moved.mean == pytest.approx(3 * mean + 1, abs=1e-6)
    assert moved.half == pytest.approx(3 * half, abs=1e-6)


def test_one_seed_shows_no_interval_and_a_diverged_run_is_not_averaged_away():
    assert cells(seeds(accuracies=(0.5,)), "test.accuracy")[0]["accuracy"] == "50.0 %"
    diverged = run(seed=1, test={"test": {"accuracy": None, "loss": None}})
    found = cells([run(accuracy=0.5), diverged], "test.accuracy")
    assert found[0]["accuracy"] == "diverged"
    assert cells([diverged], "test.accuracy")[0]["accuracy"] == "diverged"
    less = {"value": "test.accuracy", "less": "base"}
    assert cells([diverged, run(TENSOR, seed=1)], less)[1]["accuracy less base"] == "diverged"


def test_methods_come_in_their_order_and_settings_by_number():
    tasks = [SignTaskConfig(numbers=count) for count in (10, 9, 2)]
    found = report_table(frame(run(m, task=task) for task in tasks for m in (TENSOR, BASE)))
    assert [(line["numbers"], line["method"]) for line in found] == [
        (numbers, method) for numbers in ("2", "9", "10") for method in ("base", "tensor")
    ]


def test_a_departure_from_the_recipe_is_part_of_a_methods_name():
    small = replace(TENSOR, memory=MemoryConfig(channels=4, grid=(3, 3)))
    found = report_table(frame([run(small), run(BASE), run(TENSOR)]))
    assert [line["method"] for line in found] == ["base", "tensor", "tensor (grid=3×3)"]


def test_runs_of_a_row_that_differ_in_more_than_their_seed_are_refused_with_the_fields_named():
    other = run(seed=1) | {"settings": {}}
    other["config"]["budget"]["steps"] = 400
    told = r"base: expected runs that differ in their seed alone, got several values of budget\.ste"
    with pytest.raises(ValueError, match=told):
        cells([run(), other], "test.accuracy")
    assert len(cells([run(), other], "test.accuracy", rows=["budget.steps", "label"])) == 2
    with pytest.raises(ValueError, match=r"base: expected .*, got a seed twice"):
        cells([run(), run()], "test.accuracy")


def test_a_field_that_some_runs_of_a_row_lack_tells_them_apart_from_another_value():
    older, other = run(seed=1), run(replace(BASE, wide=True), seed=2)
    del older["config"]["model"]["wide"]  # written before there was such a field, so not wide
    assert len(cells([run(), older], "test.accuracy", rows=["method"])) == 1
    with pytest.raises(ValueError, match=r"base: expected .*, got several values of model\.wide"):
        cells([run(), older, other], "test.accuracy", rows=["method"])


def test_what_changes_no_number_tells_no_runs_apart():
    other = run(seed=1, task=SignTaskConfig(data_dir="elsewhere"))
    other["config"]["budget"]["checkpoint_every"] = 1
    del other["config"]["model"]["wide"]  # written before there was such a field
    assert len(cells([run(), other], "test.accuracy")) == 1


def test_differences_are_taken_seed_by_seed_and_bold_where_the_sign_is_shown():
    records = [*seeds(BASE, (0.5, 0.7, 0.9)), *seeds(TENSOR, (0.61, 0.8, 0.99))]
    less = {"value": "test.accuracy", "less": "base"}
    base, tensor = cells(records, less)
    assert base["accuracy less base"] == "–"
    assert tensor["accuracy less base"] == "**+10.0 ± 2.5**"
    apart = [*seeds(BASE, (0.5, 0.7)), *seeds(TENSOR, (0.9, 0.6))]
    assert cells(apart, less)[1]["accuracy less base"] == "+15.0 ± 317.7"
    assert cells([run(TENSOR), run(BASE, seed=1)], less)[1]["accuracy less base"] == "–"


def test_a_difference_is_taken_within_a_setting():
    records = [
        run(model, seed=s, accuracy=a + n / 100, task=SignTaskConfig(numbers=n))
        for model, a in ((BASE, 0.5), (TENSOR, 0.6))
        for n in (2, 4)
        for s in (0, 1)
    ]
    found = cells(
        records, {"value": "test.accuracy", "less": "base"}, rows=["task.numbers", "label"]
    )
    shown = [line["accuracy less base"] for line in found if line["method"] == "tensor"]
    assert shown == ["**+10.0 ± 0.0**", "**+10.0 ± 0.0**"]


def test_a_value_may_be_a_multiple_and_a_share_of_the_way():
    records = [run(BASE, accuracy=0.2), run(TENSOR, accuracy=0.6, step_ms=50.0)]
    wide = replace(TENSOR, wide=True)
    records.append(run(wide, accuracy=0.4))
    found = cells(
        records,
        {"value": "step_ms", "over": "base", "title": "times"},
        {"value": "test.accuracy", "between": ["base", "tensor"], "title": "share"},
    )
    assert [line["times"] for line in found] == ["1.00×", "2.50×", "1.00×"]
    assert [line["share"] for line in found] == ["0 %", "100 %", "50 %"]
    diverged = run(wide, seed=1, test={"test": {"accuracy": None}})
    records += [run(BASE, seed=1), run(TENSOR, seed=1), diverged]
    share = {"value": "test.accuracy", "between": ["base", "tensor"]}
    assert cells(records, share)[2]["accuracy"] == "diverged"


def test_a_value_that_one_seed_lacks_is_left_out_and_has_not_diverged():
    records = [run(), run(seed=1, shared_device=True), run(TENSOR), run(TENSOR, seed=1)]
    less = {"value": "step_ms", "less": "base", "title": "slower by"}
    found = cells(records, "steps_per_second", less)
    assert [line["steps/s"] for line in found] == ["–", "50"]
    assert [line["slower by"] for line in found] == ["–", "–"]


def test_another_study_lends_a_value_to_the_same_row():
    forgets = replace(TENSOR, memory=replace(TENSOR.memory, forget_bias=5.0))
    cost = frame([run(BASE, step_ms=3.0), run(TENSOR, step_ms=7.0)])
    said = {"config": {"task": {"numbers": 4}}, "test": {"test": {"accuracy": 0.1}}}
    other = {"config": {"task": {"numbers": 9}}, "test": {"test": {"accuracy": 0.2}}}
    published = {"kind": "paper", "recipe": "sign", "method": "base"}
    paper = frame([published | said, published | other])
    found = cells(
        [run(BASE), run(forgets)],
        {"value": "step_ms", "study": "cost", "without": ["forget_bias"]},
        {"value": "step_ms", "study": "cost", "or_own": True, "title": "or own"},
        {"value": "test.accuracy", "study": "paper", "title": "paper"},
        others={"cost": cost, "paper": paper},
    )
    assert [line["step"] for line in found] == ["3.0 ms", "7.0 ms"]
    assert [line["or own"] for line in found] == ["3.0 ms", "20.0 ms"]
    assert [line["paper"] for line in found] == ["10.0 %", "–"]


def test_columns_may_be_repeated_across_values_and_rows_sorted_by_a_measure():
    records = [
        run(model, accuracy=a, task=SignTaskConfig(numbers=n))
        for model, n, a in ((BASE, 2, 0.9), (BASE, 16, 0.8), (TENSOR, 16, 0.7))
    ]
    found = cells(records, "test.accuracy", across="task.numbers")
    assert found == [
        {"method": "base", "numbers 2": "90.0 %", "numbers 16": "80.0 %"},
        {"method": "tensor", "numbers 2": "–", "numbers 16": "70.0 %"},
    ]
    (line,) = cells(
        records[:2], "test.accuracy", across="task.numbers", names={"2": "two", "16": "sixteen"}
    )
    assert line == {"method": "base", "two": "90.0 %", "sixteen": "80.0 %"}
    rows = cells(records, "test.accuracy", rows=["task.numbers", "label"], sort="test.accuracy")
    assert [line["accuracy"] for line in rows] == ["70.0 %", "80.0 %", "90.0 %"]


def test_how_a_value_is_shown_can_be_said():
    memory = {
        "layers": [{"name": "0", "gate": 0.5, "use": 0.1}, {"name": "1", "gate": 0.7, "use": None}],
        "test_without_memory": {},
    }
    (line,) = cells(
        seeds(TENSOR, (0.5, 0.25), memory=memory),
        "memory.gate",
        "memory.use",
        {"value": "test.accuracy", "show": "seeds", "title": "each"},
        {"value": "test.accuracy", "show": "max", "title": "best"},
        {"value": ["step_ms", "test.loss"], "digits": 1, "title": "both"},
        {"value": "peak_memory_bytes", "kind": "bytes"},
    )
    assert list(line.values()) == [
        "tensor", "0.5, 0.7", "0.1, –", "50.0 %, 25.0 %", "50.0 %", "20.0 ± 0.0 / 0.5 ± 0.0", "1 B",
    ]  # fmt: skip


def test_what_is_unknown_is_refused_with_what_is_known():
    with pytest.raises(ValueError, match="unknown les; known are value, "):
        column({"value": "a", "les": "b"})
    with pytest.raises(ValueError, match=r"got task\.number; nearest are task\.numbers, "):
        cells([run()], "test.accuracy", rows=["task.number"])
    with pytest.raises(ValueError, match=r"expected a kind of percent, .*, got 'share'"):
        column({"value": "test.accuracy", "kind": "share"})
    with pytest.raises(ValueError, match=r"expected a title of its own for each column, got .*acc"):
        cells([run()], "test.accuracy", "test.accuracy")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"show": "median"}, "expected a show of mean, seeds, max, first, got 'median'"),
        ({"less": "a", "between": ["a", "b"]}, "expected one of less, .*, got less, between; make"),
        ({"less": "a", "study": "b"}, "expected less or study, got both; drop one"),
        ({"between": ["a", "b"], "study": "c"}, "expected between or study, got both; drop one"),
        ({"less": "a", "over": "b"}, "expected one of less, .*, got less, over; make a column"),
        ({"match": ["recipe"]}, "expected less or over or between beside match, got none; add it"),
        ({"or_own": True}, "expected study beside or_own, got none; add it, or leave or_own out"),
        ({"without": ["gain"]}, "expected study beside without, got none"),
    ],
)
def test_what_a_column_would_ignore_is_refused(given, told):
    with pytest.raises(ValueError, match=rf"^column 'test\.accuracy': {told}"):
        column({"value": "test.accuracy", **given})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"less": "nobody"}, r"a label .*, got nobody; there are base, tensor \(wide=yes\)$"),
        ({"over": "tensor"}, r"a label .*, got tensor; there are base, tensor \(wide=yes\)$"),
        ({"between": ["base", "nobody"], "match": ["recipe"]}, r"a method .*, got nobody; there"),
    ],
)
def test_a_comparison_with_a_method_that_no_row_has_is_refused(given, told):
    records = [run(BASE), run(replace(TENSOR, wide=True))]
    with pytest.raises(ValueError, match=rf"^column 'test\.accuracy': expected {told}"):
        cells(records, {"value": "test.accuracy", **given})
    cells(records, {"value": "test.accuracy", "less": "tensor", "match": ["recipe"]})


def test_rows_that_are_methods_are_compared_with_a_method_whatever_its_variant():
    records = [run(BASE, accuracy=0.5), run(replace(TENSOR, wide=True), accuracy=0.6)]
    base, _ = cells(records, {"value": "test.accuracy", "less": "tensor"}, rows=["method"])
    assert base["accuracy less tensor"] == "-10.0"


def test_a_rate_that_was_tried_belongs_to_the_method():
    less = {"value": "test.accuracy", "less": "base"}
    tries = {"tries": {"optimizer.lr": [0.1, 0.2]}}
    best = [
        run(method, seed=seed) | {"settings": {"optimizer.lr": rate, "budget.steps": 20}}
        for seed in (0, 1)
        for method, rate in ((BASE, 0.1), (TENSOR, 0.2))
    ]
    assert cells(best, less)[1]["accuracy less base"] == "–"
    best = [one | tries for one in best]
    assert cells(best, less)[1]["accuracy less base"] != "–"
    other = run(BASE, task=SignTaskConfig(numbers=16)) | tries
    other |= {"settings": {"optimizer.lr": 0.3, "budget.steps": 20}}
    with pytest.raises(ValueError, match="expected one row of 'base' to compare with, got 2"):
        cells([*best, other], less | {"match": ["recipe"]}, rows=["label", "task.numbers"])


def test_select_compares_what_is_shown():
    patient = run(TENSOR, task=SignTaskConfig(numbers=16), budget=BudgetConfig(patience=3))
    runs = frame([run(BASE), patient])
    assert len(select(runs, {"task.numbers": [4, 8]})) == 1
    assert list(select(runs, {"budget.patience": "none"})["method"]) == ["base"]
    assert len(select(runs, {"model.memory.grid": [2, 2], "method": "tensor"})) == 1


def test_entries_of_a_record_may_be_rows():
    record = {
        "kind": "benchmark", "benchmark": "scan", "seed": 0, "config": {},
        "result": {"shapes": {"a": {"ms": {"forward": 1.5}}, "b": {"ms": {"forward": 2.5}}}},
    }  # fmt: skip
    found = table(frame(parts(record, "result.shapes.*")), [column("ms.forward")], rows=["key"])
    assert found == [{"key": "a", "forward": "1.5000"}, {"key": "b", "forward": "2.500"}]


def test_a_markdown_table_has_numbers_to_the_right():
    text = markdown([{"method": "a|b", "x": "1.0 ± 0.1"}, {"method": "c", "x": "–"}])
    assert text == "| method | x |\n| :-- | --: |\n| a\\|b | 1.0 ± 0.1 |\n| c | – |\n"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for record in (*seeds(BASE), *seeds(TENSOR, (0.5, 0.6, 0.7))):
        append("results/signs.jsonl", record)
    return tmp_path


@pytest.mark.parametrize("width", ["30", "60", "200"])
def test_the_report_is_a_table_at_any_width_and_no_markdown(here, capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", width)
    assert report_command(["signs", "--less", "base"]) == 0
    told = capsys.readouterr().out
    assert "93.0 ± 4.3 %" in told
    assert "|" not in told
    assert "**" not in told
    assert "commit 0123456789" in told
    assert told.startswith("sign\n")


def test_the_report_as_markdown_and_as_a_figure(here, capsys):
    assert report_command(["results", "--markdown", "--where", "method=base"]) == 0
    told = capsys.readouterr().out
    assert "## sign\n\n| method | seeds | accuracy |" in told
    assert "tensor" not in told
    drawn = Path("new", "curves.svg")
    assert report_command(["signs", "--figure", str(drawn), "--measure", "test.loss"]) == 0
    assert "tensor" in drawn.read_text()
    append("results/signs.jsonl", run(seed=3, budget=BudgetConfig(steps=8)) | {"settings": {}})
    assert report_command(["signs", "--figure", "curves.svg", "--by", "budget.steps"]) == 0
    with pytest.raises(ValueError, match=r"got test\.los; nearest are test\.loss"):
        report_command(["signs", "--measure", "test.los"])
    with pytest.raises(ValueError, match="expected runs with method=nobody, found none"):
        report_command(["signs", "--where", "method=nobody"])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--split", "nope"], r"--split: expected a test split of sign \(test\), got nope"),
        (["--x", "steps"], "expected --figure FILE beside --x and --y, got none"),
        (["--y", "test.loss"], "expected --figure FILE beside --x and --y, got none"),
        (["--figure", "a.xyz"], r"--figure: expected a file that ends in \.png, .*, got a\.xyz"),
    ],
)
def test_the_report_refuses_what_it_would_ignore(here, options, told):
    with pytest.raises(ValueError, match=told):
        report_command(["signs", *options])


def test_the_report_compares_only_within_recipes_that_have_the_method(here, capsys):
    append("results/signs.jsonl", run(TENSOR) | {"recipe": "other", "seed": 9})
    assert report_command(["signs", "--less", "base", "--markdown"]) == 0
    other, sign = capsys.readouterr().out.split("## sign")
    assert "less base" in sign
    assert "less base" not in other


def test_the_report_compares_methods_each_at_the_rate_that_was_best_for_it(here, capsys):
    for model, rate, accuracies in ((BASE, 0.1, (0.5, 0.6)), (TENSOR, 0.2, (0.7, 0.8))):
        for lr in (0.1, 0.2):
            tried = {"optimizer": OptimizerConfig(lr=lr), "variant": {"optimizer.lr": lr}}
            append("tried.jsonl", run(model, seed=9, test={}, **tried))
        chosen = {
            "optimizer": OptimizerConfig(lr=rate),
            "variant": {"model.dim": 32, "optimizer.lr": rate},
            "tries": {"optimizer.lr": [0.1, 0.2], "valid": [0.9, 0.9], "seed": 9},
        }
        for record in seeds(model, accuracies, **chosen):
            append("tried.jsonl", record)
    assert report_command(["tried.jsonl", "--less", "base", "--markdown"]) == 0
    told = capsys.readouterr().out
    assert "dim=32)\n\n| method | seeds | accuracy | less base | ceiling | lr |" in told
    assert "| base | 2 | 55.0 ± 63.5 % | – | 100.0 % | 0.1 |" in told
    assert "| tensor | 2 | 75.0 ± 63.5 % | **+20.0 ± 0.0** | 100.0 % | 0.2 |" in told
    assert "without a test, as tries are, so left out: 4 runs" in told
    with pytest.raises(ValueError, match=r"--less: expected one of .* base, tensor, got b"):
        report_command(["tried.jsonl", "--less", "bases"])
    for nine in ("9", "9e0"):
        assert report_command(["tried.jsonl", "--where", f"seed={nine}"]) == 0
        assert "tensor (lr=0.2)" in capsys.readouterr().out


def test_the_report_of_run_folders_names_those_that_are_not_done(here, capsys):
    done, begun = Path("runs/done"), Path("runs/begun")
    for folder in (done, begun):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match="expected records of finished runs, found none in runs"):
        report_command(["runs"])
    own = run(replace(BASE, method="my-own method"), task=SignTaskConfig(numbers=9))
    write_result(done / "result.json", own)
    assert report_command(["runs"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("sign (numbers=9)\n")
    assert "my-own method" in told
    assert f"left out: {begun}" in told


@pytest.mark.parametrize("x", ["step", pytest.param("task.numbers", marks=pytest.mark.exhaustive)])
def test_the_same_records_draw_the_same_figure(tmp_path, x):
    records = [
        run(model, seed=seed, accuracy=0.9 - 0.02 * n, task=SignTaskConfig(numbers=n))
        for model in (BASE, TENSOR)
        for seed in (0, 1)
        for n in (2, 4, 16)
    ]
    y = "valid.accuracy" if x == "step" else "test.accuracy"
    panels = ["task.numbers"] if x == "step" else []
    for name in ("a.svg", "b.svg"):
        figure(frame(records), tmp_path / name, x=x, y=y, panels=panels)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def points(monkeypatch, records, **axes):
    """What a figure draws of each line: places on the axis, and means."""
    seen = []
    monkeypatch.setattr(figures, "_draw", lambda axis, points, *_: seen.append(points))
    figure(frame(records), "a.svg", **axes)
    return [(list(one["x"]), list(one["mean"])) for one in seen]


def test_a_run_that_diverged_takes_its_point_out_of_a_figure(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failed = run(seed=2, test={"test": {"accuracy": None}}, curve=[])
    across = {"x": "parameters", "y": "test.accuracy"}
    assert points(monkeypatch, seeds(), **across) == [([10.0], [pytest.approx(93)])]
    assert points(monkeypatch, [*seeds()[:2], failed], **across) == [([], [])]
    assert points(monkeypatch, seeds(), y="valid.accuracy")[0][0]
    assert points(monkeypatch, [*seeds()[:2], failed], y="valid.accuracy") == [([], [])]


def test_an_axis_of_no_measure_or_no_number_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"expected a measure of the learning curves.* valid\.nope"
    ):
        figure(frame(seeds()), tmp_path / "a.svg", y="valid.nope")
    with pytest.raises(ValueError, match=r"model\.method: expected a column of numbers"):
        figure(frame(seeds()), tmp_path / "a.svg", x="model.method", y="test.accuracy")
    with pytest.raises(ValueError, match=r"model\.memory\.grid: expected a column of numbers"):
        figure(frame(seeds()), tmp_path / "a.svg", x="model.memory.grid", y="test.accuracy")
    with pytest.raises(ValueError, match="expected a column of the records, got nothere"):
        figure(frame(seeds()), tmp_path / "a.svg", x="nothere", y="test.accuracy")


@pytest.mark.parametrize("x", ["step", "parameters"])
def test_a_point_of_a_figure_is_of_runs_that_differ_in_their_seed_alone(tmp_path, x):
    records = [run(seed=seed, task=SignTaskConfig(numbers=2 + seed)) for seed in (0, 1)]
    y = "valid.accuracy" if x == "step" else "test.accuracy"
    at = "" if x == "step" else ", parameters 10"
    told = rf"^base{at}: expected runs that .*, got several values of task\.numbers; .*`panels`"
    with pytest.raises(ValueError, match=told):
        figure(frame(records), tmp_path / "a.svg", x=x, y=y)
    with pytest.raises(ValueError, match=r"^yes, base.*: expected .*, got a seed twice"):
        figure(frame([run(), run()]), tmp_path / "a.svg", x=x, y=y, panels=["finished"])
    figure(frame(records), tmp_path / "a.svg", x=x, y=y, panels=["task.numbers"])
    figure(frame(records), tmp_path / "a.svg", x="task.numbers", y="test.accuracy")


@pytest.mark.parametrize("numbers", [(2,), pytest.param((2, 4, 16), marks=pytest.mark.exhaustive)])
def test_a_figure_is_as_wide_as_any_other_on_white_and_on_dark(tmp_path, numbers):
    records = [
        run(model, seed=0, accuracy=0.9, task=SignTaskConfig(numbers=n))
        for model in (BASE, TENSOR)
        for n in numbers
    ]
    corners = []
    for theme in ("light", "dark"):
        options = {"y": "valid.accuracy", "panels": ["task.numbers"], "theme": theme}
        path = figure(frame(records), tmp_path / f"{theme}.png", **options)
        with Image.open(path) as drawn:
            assert drawn.width == 1080
            corners.append(drawn.convert("L").getpixel((0, 0)))
    assert corners == [255, 24]


def test_lines_have_their_names_at_their_ends_and_shares_the_whole_axis(tmp_path):
    records = [run(model, seed=0, accuracy=0.9) for model in (BASE, TENSOR)]
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text as text
        path = figure(
            frame(records), tmp_path / "a.svg", y="valid.accuracy", names={"base": "attention"}
        )
    written = re.findall(r"<text [^>]*>([^<]*)</text>", path.read_text())
    assert {"attention", "tensor", "0", "100"} <= set(written)
    assert "base" not in written


def test_bytes_stand_on_a_logarithmic_axis_of_powers_of_two(tmp_path):
    kept = {BASE: (9_000, 17_000, 34_000), TENSOR: (11_000, 20_000, 38_000)}
    records = [
        {**run(model, seed=0, accuracy=0.9), "state_bytes": size}
        for model, sizes in kept.items()
        for size in sizes
    ]
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        path = figure(frame(records), tmp_path / "a.svg", x="state_bytes", y="test.accuracy")
    ticks = re.findall(r' x="(\S+)" [^>]*>(\d+ KiB)</text>', path.read_text())
    assert [name for _, name in ticks] == ["8 KiB", "16 KiB", "32 KiB"]
    first, second, third = (float(place) for place, _ in ticks)
    assert second - first == pytest.approx(third - second, abs=0.01)


def test_a_peer_has_its_colour_in_every_figure_and_shares_it_with_nobody(tmp_path):
    peers, others = ("gla", "deltanet"), ("base", "wide", "window", "xl", "slots", "tensor")
    colours = []
    for methods in (peers, others + peers):
        records = [run(replace(BASE, method=name)) for name in methods]
        with matplotlib.rc_context({"svg.fonttype": "none"}):
            path = figure(frame(records), tmp_path / "a.svg", y="valid.accuracy", theme="dark")
        found = re.findall(r'fill: (#\w{6})"[^>]*>([a-z]+)</text>', path.read_text())
        colours.append({name: colour for colour, name in found if name != "step"})
    alone, among = colours
    assert set(alone) == set(peers)
    assert alone.items() <= among.items()
    assert len(set(among.values())) == len(among) == 8


def test_a_page_is_filled_and_checked(here, capsys):
    declared = Path("tables.toml")
    declared.write_text(
        '[table.signs]\nstudy = "signs"\ncolumns = ["test.accuracy"]\n'
        '[table.base]\nlike = "signs"\nwhere = { method = "base" }\ncaption = false\n'
        '[figure.curves]\nstudy = "signs"\ny = "valid.accuracy"\n'
    )
    page = Path("page.md")
    page.write_text("A\n\n<!-- table: base -->\n<!-- /table -->\n\nB\n")
    command = ["page.md", "--tables", "tables.toml"]
    assert tables_command([*command, "--check"]) == 1
    assert "page.md: the table base is not what the records give" in capsys.readouterr().err
    assert tables_command([*command, "--figures", "drawn"]) == 0
    assert page.read_text() == (
        "A\n\n<!-- table: base -->\n\n| method | accuracy |\n| :-- | --: |\n"
        "| base | 93.0 ± 4.3 % |\n\n<!-- /table -->\n\nB\n"
    )
    assert sorted(path.name for path in Path("drawn").iterdir()) == [
        "curves-dark.png",
        "curves-light.png",
    ]
    assert tables_command([*command, "--check"]) == 0
    page.write_text(page.read_text().replace("93.0", "99.0"))
    assert tables_command([*command, "--check"]) == 1
    with pytest.raises(SystemExit):
        tables_command([*command, "--check", "--figures", "drawn"])
    assert "--figures: not allowed with argument --check" in capsys.readouterr().err
    page.write_text("<!-- table: bases -->\n<!-- /table -->\n")
    with pytest.raises(ValueError, match=r"'bases': expected one that .* declares, .* signs, base"):
        tables_command(command)
    page.write_text("<!-- table: base -->\n")
    with pytest.raises(ValueError, match=r"page\.md: expected <!-- /table -->"):
        tables_command(command)
    declared.write_text('[table.base]\nstudy = "signs"\ncolums = []\n')
    page.write_text("<!-- table: base -->\n<!-- /table -->\n")
    with pytest.raises(ValueError, match="unknown colums; known are"):
        tables_command(command)
    declared.write_text('[figure.curves]\nstudy = "signs"\nonly = { method = "base" }\n')
    page.write_text("")
    with pytest.raises(ValueError, match="figure 'curves': unknown only; known are"):
        tables_command([*command, "--figures", "drawn"])
    declared.write_text('[figure.curves]\nstudy = "signs"\n')
    with pytest.raises(ValueError, match="figure 'curves': expected y in it"):
        tables_command([*command, "--figures", "drawn"])
    declared.write_text("[figure.curves\n")
    with pytest.raises(ValueError, match=r"tables\.toml: expected TOML \(.*; mend it there"):
        tables_command(command)
    assert pages_with_tables(Path("drawn")) == []
    with pytest.raises(FileNotFoundError, match=r"lab/tables\.toml: .* a clone .* --tables FILE"):
        tables_command(["page.md"])


def test_columns_may_be_less_each_of_some_methods_and_are_left_out_without_values(here):
    Path("tables.toml").write_text(
        '[table.one]\nstudy = "signs"\nonly = { method = "tensor" }\nless = ["base"]\n'
        'columns = ["test.accuracy", { value = "steps", title = "length" }]\ncaption = false\n'
        '[table.two]\nlike = "one"\nless = ["base", "tensor"]\n'
    )
    evidence = Evidence(Path("tables.toml"), Path("results"))
    row = "| :-- | --: | --: |\n| tensor | **-33.0 ± 21.2** | +0.000 ± 0.000 |\n"
    assert evidence.table("one") == "| method | less base | length |\n" + row
    assert evidence.table("two") == "| method | less base | length, less base |\n" + row
    Path("tables.toml").write_text('[table.one]\nstudy = "signs"\ncolumns = ["test.acuracy"]\n')
    with pytest.raises(ValueError, match=r"got test\.acuracy; nearest are test\.accuracy"):
        Evidence(Path("tables.toml"), Path("results")).table("one")


def test_the_caption_names_the_commits_of_values_from_another_study(here):
    cost = run(BASE, step_ms=3.0, commit="fedcba9876543210", hardware={"gpu": "a GPU"})
    append("results/cost.jsonl", cost)
    append("results/cost.jsonl", run(replace(BASE, wide=True), commit="of a row not shown"))
    said = {"kind": "paper", "recipe": "sign", "method": "base", "config": {}}
    append("results/paper.jsonl", said | {"test": {"test": {"accuracy": 0.1}}})
    Path("tables.toml").write_text(
        '[table.signs]\nstudy = "signs"\ncolumns = [\n'
        '  { value = "step_ms", study = "cost", or_own = true },\n'
        '  { value = "test.accuracy", study = "paper" },\n]\n'
    )
    told = Evidence(Path("tables.toml"), Path("results")).table("signs").splitlines()[-1]
    assert told == (
        "Seeds 0, 1, 2; mean ± half of the 95 % interval; a CPU; commit 0123456789; "
        "from cost.jsonl: a GPU; commit fedcba9876."
    )


def test_the_tables_of_the_documentation_are_what_the_records_give():
    pages = [str(page) for page in pages_with_tables(ROOT)]
    places = ["--tables", str(ROOT / "lab" / "tables.toml"), "--results", str(ROOT / "results")]
    assert not pages or tables_command([*pages, *places, "--check"]) == 0
