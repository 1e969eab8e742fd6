"""The diagnostics page shows the committed records, all of them and nothing else."""

import json
import re
from pathlib import Path

import pytest

from tensor_memory_lab.recipes import load_recipes
from tensor_memory_lab.records import diagnostics_page, read_results
from tensor_memory_lab.records.pages import fill

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "diagnostics.md"
RESULTS = ROOT / "results" / "diagnostics"


@pytest.fixture(scope="module")
def records():
    return read_results([RESULTS])


def test_the_committed_page_is_what_its_records_fill_it_with():
    text = PAGE.read_text(encoding="utf-8")
    assert fill(text, diagnostics_page.blocks(RESULTS)) == text


def test_every_place_of_the_page_is_a_recipe_or_their_cost(records):
    names = {line[5:-4] for line in PAGE.read_text().splitlines() if line.startswith("<!-- ")}
    opened = {name for name in names if not name.startswith("/")}
    assert {name[1:] for name in names - opened} == opened
    assert opened <= {*load_recipes(), "cost"}
    assert {record["recipe"] for record in records} <= opened


def test_a_place_without_records_says_so():
    page = "<!-- a -->\n<!-- /a -->\n\n<!-- b -->\n\n<!-- /b -->\n\n<!-- c -->\nKept.\n<!-- /c -->"
    filled = fill(page, {"b": "1"})
    a, b, c = re.findall(r"<!-- \w -->(.*?)<!-- /", filled, re.DOTALL)
    assert (a, b, c) == ("\nNot measured yet.\n", "\n\n1\n", "\nKept.\n")
    assert fill(filled, {}) == filled
    assert "<!-- a -->\n\n2\n<!-- /a -->" in fill(filled, {"a": "2"})  # measured since


def test_no_heading_of_the_page_stands_over_nothing(records):
    text = PAGE.read_text(encoding="utf-8")
    measured = {record["recipe"] for record in records}
    measured |= {"cost"} if RESULTS.with_name("diagnostics-cost").is_dir() else set()
    for name, block in re.findall(r"<!-- (\S+) -->\n(.*?)<!-- /\1 -->", text, re.DOTALL):
        assert (block == "Not measured yet.\n") == (name not in measured), name


def test_the_claims_can_be_read_at_a_glance():
    section = (
        PAGE.read_text(encoding="utf-8").partition("## Claim by claim")[2].partition("\n## ")[0]
    )
    cells = [cell for line in section.splitlines() if line[:1] == "|" for cell in line.split("|")]
    assert len(cells) > 50
    assert [cell for cell in cells if len(cell.split()) > 50] == []  # the rest stands below


def small_row(config):
    """How the page tells one of the small runs from the others."""
    model, memory = config["model"], config["model"]["memory"]
    if model["method"] == "linear":
        return f"linear, {'two heads' if model['heads'] == 2 else 'one head'} | | |"
    told = (memory["forget_bias"], memory["spread_bias"], memory["read_heads"])
    name = {
        model["memory_layers"] == [0, 1]: "tensor, a memory in both layers",
        memory["chunk_size"] == 3: "tensor, three tokens per chunk, each reading",
        told == (0, 1, 1): "tensor, as published",
    }.get(True, "tensor")
    return f"{name} | {told[0]:g} | {told[1]:g} | {told[2]:g}"


def test_the_small_runs_are_quoted_as_they_came_out():
    gaps = (9, 40, 124)  # of the map, and of the two kinds of binding
    found = {}
    for record in read_results([RESULTS.parent / "forget-bias" / "small"]):
        cells = found.setdefault(small_row(record["config"]), ["–", "–", "–"])
        gap = record["config"]["task"]["gap"]
        cells[gaps.index(gap)] = f"{100 * record['valid']['accuracy']:.1f} %"
    page = PAGE.read_text(encoding="utf-8")
    lines = [f"| {row} | {' | '.join(cells)} |" for row, cells in found.items()]
    assert len(lines) == 14
    assert [line for line in lines if line not in page] == []


def test_the_runs_over_the_long_gap_are_quoted_as_they_came_out():
    found, tasks = {}, ((8, 8, 1000), (20, 32, 500))
    for record in read_results([RESULTS.parent / "forget-bias" / "long"]):
        config = record["config"]
        task, memory = config["task"], config["model"]["memory"]
        start = [memory.get(name, usual) for name, usual in LATER.items()]
        row = " | ".join(f"{value:g}" for value in start)
        if record["method"] == "tensor":
            assert (memory["forget_bias"], memory["spread_bias"]) == (5, -1)
        else:
            row = f"| | {start[-1]:g}"
        cells = found.setdefault(f"{record['method']} | {row}", ["–", "–"])
        column = tasks.index((task["writes"], task["values"], config["budget"]["steps"]))
        cells[column] = f"{100 * record['valid']['accuracy']:.1f} %"
    page = PAGE.read_text(encoding="utf-8")
    lines = [f"| {row} | {' | '.join(cells)} |" for row, cells in found.items()]
    assert len(lines) == 7
    assert [line for line in lines if line not in page] == []


LATER = {"input_bias": 0.0, "feedback": 1.0, "gain": 1.0}
"""Starting values, and what a record older than them means."""


def test_a_page_is_filled_and_its_figures_drawn(tmp_path, capsys):
    recipe = "windowed-binding"
    source = next(iter(sorted(RESULTS.glob(f"{recipe}-tensor-*-s0.json"))))
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / source.name).write_text(source.read_text())
    page = tmp_path / "page.md"
    page.write_text(f"# A page\n\n<!-- {recipe} -->\n<!-- /{recipe} -->\n")
    assert diagnostics_page.main([str(tmp_path / "results"), str(page)]) == 0
    assert f"filled {recipe}" in capsys.readouterr().out
    text = page.read_text()
    assert "| tensor | 1 |" in text
    assert f"![accuracy against steps](images/diagnostics-{recipe}-curves.png)" in text
    assert (tmp_path / "images" / f"diagnostics-{recipe}-curves.png").stat().st_size > 1000


def test_what_a_step_costs_is_told_by_runs_alone_on_their_device(tmp_path):
    results, costs = tmp_path / "found", tmp_path / "found-cost"
    results.mkdir()
    costs.mkdir()
    assert diagnostics_page.blocks(results) == {}
    for method, ms, changes in (
        ("base", 2.0, {}),
        ("tensor", 5.0, {"peak_memory_bytes": 3 * 2**20}),
        ("xl", 9.0, {"shared_device": True}),
    ):
        source = next(iter(sorted(RESULTS.glob(f"windowed-binding-{method}-*-s0.json"))))
        record = json.loads(source.read_text()) | {"shared_device": False, "step_ms": ms}
        record |= {"steps_per_second": 1000 / ms} | changes
        (costs / source.name).write_text(json.dumps(record))
    text = diagnostics_page.blocks(results)["cost"]
    assert "| method | windowed-binding |" in text
    assert "| base | 2.00 ms (1.0×), 500 per s, " in text
    assert "| tensor | 5.00 ms (2.5×), 200 per s, 3.0 MiB |" in text
    assert "xl" not in text
    assert "4,000 steps, each run alone on its device. Hardware: NVIDIA H200. Commit: " in text


def test_methods_that_are_planned_and_not_run_are_named(tmp_path):
    results, plans = tmp_path / "results" / "found", tmp_path / "grids"
    results.mkdir(parents=True)
    plans.mkdir()
    stage = '[[stage]]\nrecipes = ["windowed-binding"]\n'
    methods = 'over = { "model.method" = ["xl", "tensor", "base"] }\n'
    (plans / "1-some.toml").write_text(stage + methods + '[[stage]]\nrecipes = ["windowed-map"]\n')
    (plans / "6-cost.toml").write_text(stage + 'set = { "model.method" = "wide" }\n')
    source = next(iter(sorted(RESULTS.glob("windowed-binding-tensor-*-s0.json"))))
    (results / source.name).write_text(source.read_text())
    assert (
        ". Planned, not run yet: base and xl.\n"
        in diagnostics_page.blocks(results)["windowed-binding"]
    )
    other = next(iter(sorted(RESULTS.glob("windowed-map-tensor-*-s0.json"))))
    (results / other.name).write_text(other.read_text())
    assert "Planned" not in diagnostics_page.blocks(results)["windowed-map"]


def test_records_without_a_place_are_an_error():
    with pytest.raises(ValueError, match=r"expected <!-- .* -->"):
        fill("# A page without places\n", diagnostics_page.blocks(RESULTS))


def test_a_page_or_results_that_are_not_there_are_told_and_nothing_is_made(tmp_path, capsys):
    page = tmp_path / "page.md"
    for told, results in (
        (f"{tmp_path / 'none'}: no such folder", tmp_path / "none"),
        (f"{page}: no such file", tmp_path),
    ):
        with pytest.raises(SystemExit):
            diagnostics_page.main([str(results), str(page)])
        assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_broken_record_and_a_missing_place_are_told_and_leave_the_page(tmp_path, capsys):
    results, page = tmp_path / "results", tmp_path / "page.md"
    results.mkdir()
    page.write_text("# A page without places\n")
    broken = results / "a.json"
    broken.write_text("{")
    for told in (f"{broken}: expected", "expected <!-- windowed-binding -->"):
        with pytest.raises(SystemExit) as stopped:
            diagnostics_page.main([str(results), str(page)])
        assert stopped.value.code == 2
        assert told in capsys.readouterr().err
        broken.write_text(next(RESULTS.glob("windowed-binding-tensor-*-s0.json")).read_text())
    assert page.read_text() == "# A page without places\n"
