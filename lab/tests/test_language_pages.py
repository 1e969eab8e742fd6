"""The pages about language and the leak: tables from records, places filled, none typed by hand."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from language_records import record
from tensor_memory import MemoryConfig
from tensor_memory_lab.commands.grid import expand, read_plan
from tensor_memory_lab.recipes import find_recipe
from tensor_memory_lab.recipes.leak_demo import leak_demo
from tensor_memory_lab.records import (
    config_dict,
    language_page,
    language_search,
    leak_page,
    write_result,
)
from tensor_memory_lab.records.comparison import compare
from tensor_memory_lab.records.language_page import (
    carried_table,
    fresh_table,
    rate_table,
    search_table,
)
from tensor_memory_lab.records.language_rows import (
    RECIPE_METHODS,
    planned_runs,
    table_rows,
    timed,
)
from tensor_memory_lab.records.language_search import draw_search, limits_table
from tensor_memory_lab.records.positions import write_positions

DOCS = Path(__file__).parents[2] / "docs"


def fresh(method, perplexity, seed=0, **values):
    made = record(method, perplexity, seed=seed) | values
    made["recipe"] = made["config"]["recipe"] = "language-paper"
    made["config"]["task"] |= {"carried": False, "protocol": "paper"}
    made["test"] = {"test": made["test"]["test"]}
    return made


def dice(method, scores, seed=0):
    config = leak_demo()
    sees = method == "tensor-depth"
    model = replace(config.model, method=method, non_causal=sees)
    made = record("base", 1.0)
    return made | {
        "recipe": "leak-demo",
        "config": config_dict(replace(config, seed=seed, model=model)),
        "method": method,
        "seed": seed,
        "metric": "score",
        "labels": {"non_causal": True} if sees else {},
        "curve": [
            {"step": step, "loss": 1.0, "valid": {"score": score}}
            for step, score in ((100, 6.0), (200, scores[0]))
        ],
        "test": {
            split: {"score": score, "loss": 1.0}
            for split, score in zip(
                ("test", "test@window", "test@prefix"), (scores[0], *scores), strict=True
            )
        },
        "ceiling": dict.fromkeys(("test", "test@window", "test@prefix"), 6.0),
    }


def test_the_papers_table_has_means_counts_the_paper_and_costs():
    runs = [fresh("base", value, seed) for seed, value in enumerate((110.0, 111.0, 112.0))]
    runs.append(
        fresh("tensor", 109.0, memory={"test_without_memory": {"test": {"perplexity": 140.0}}})
    )
    base, tensor = fresh_table(runs)
    assert base["test"] == "111.00 ± 2.48"
    assert base["valid"] == "116.00 ± 2.48"
    assert (base["paper"], base["seeds"], base["parameters"]) == ("130.30", "3", "25,912,704")
    assert (base["step"], base["peak memory"]) == ("20.0 ms", "4.0 GiB")
    assert (base["test, memory off"], tensor["test, memory off"]) == ("–", "140.00")


def test_the_context_of_a_prediction_stands_in_every_row():
    labels = {"context": "64 per layer within window 512"}
    for table in (fresh_table, carried_table, search_table):
        (line,) = table([record("local", 120.0, labels=labels)])
        assert line["context"] == labels["context"]


def test_rates_are_compared_within_one_recipe():
    runs = [fresh("base", 112.0), fresh("base", 110.0, 1), fresh("base", 109.0)]
    runs[2]["config"]["optimizer"] = runs[2]["config"]["optimizer"] | {"lr": 2e-3}
    table = rate_table([runs[2], *runs[:2], record("base", 105.0)])
    assert [(line["recipe"], line["learning rate"], line["seeds"]) for line in table] == [
        ("language-carried", "0.001", "1"),
        ("language-paper", "0.001", "2"),
        ("language-paper", "0.002", "1"),
    ]
    assert (table[2]["valid"], table[2]["test"]) == ("114.00", "109.00")


def test_streams_show_what_is_carried_and_what_it_closes():
    table = carried_table(
        [
            record("base", 100.0),
            record("local", 120.0),
            record("tensor-local", 115.0, step_ms=25.0, labels={"context": "64 per layer"}),
        ]
    )
    assert [line["method"] for line in table] == ["base", "local", "tensor-local"]
    assert table[2]["context"] == "64 per layer"
    assert (table[2]["gap closed"], table[2]["of local"]) == ("25 %", "1.25×")


def test_the_search_keeps_every_row_the_best_on_valid_first():
    lucky = record("tensor-local", 90.0, memory_layers=(0, 1), gate_init=-2.0)
    lucky["valid"] = {"perplexity": 126.0}
    table = search_table(
        [
            record("base", 100.0),
            record("local", 120.0),
            record("tensor-local", 125.0, memory_layers=(0, 1)),
            record("tensor-local", 110.0, memory_layers=(0, 1), placement="after_attention"),
            lucky,
            record("local", 115.0, window=128),
            record("local", 90.0, positions="rotary"),
            record("base", 92.0, positions="rotary"),
            record("tensor-local", 88.0, positions="rotary"),
        ]
    )
    assert [line["variant"] for line in table] == [
        "base",
        "tensor-local (layers 0+1, placement after_attention)",
        "local",
        "tensor-local (layers 0+1, gate_init -2)",
        "tensor-local (layers 0+1)",
        "local (window 128)",
        "tensor-local (positions rotary)",  # nothing to close, and in order all the same
        "local (positions rotary)",
        "base (positions rotary)",
    ]
    shares = ["100 %", "50 %", "0 %", "150 %", "-25 %", "0 %", "–", "–", "–"]
    assert [line["gap closed"] for line in table] == shares
    assert table[3]["gap closed, valid"] == "-5 %"


def memory(**changes):
    return replace(MemoryConfig(), **changes)


def test_the_search_says_what_loosening_each_limit_is_worth(tmp_path):
    def variant(perplexity, *, layers=(0, 1), **changes):
        return record("tensor-local", perplexity, memory_layers=layers, memory=memory(**changes))

    runs = [
        record("base", 100.0),
        record("local", 120.0),
        variant(118.0),
        variant(116.0, forget_bias=2.0),
        variant(115.0, forget_bias=3.0),
        variant(110.0, reads="token", forget_bias=3.0),
        variant(119.0, layers=(3,)),
        record("tensor-local", 105.0, window=128, memory_layers=(0, 1)),
        record("local", 115.0, window=128),
        record("local", 90.0, positions="rotary"),
        record("base", 80.0, positions="rotary"),
        record("tensor-local", 85.0, positions="rotary", memory_layers=(0,)),
    ]
    found = language_page.searched(runs)
    table = limits_table(found)
    assert [(line["limit"], line["change"], line["perplexity"]) for line in table] == [
        ("decay", "forget_bias 3", "-3.00"),  # of one limit, what is worth most first
        ("decay", "forget_bias 2", "-2.00"),
        ("layers", "memory_layers 3", "+1.00"),
        ("several", "reads token, forget_bias 3", "-8.00"),
    ]
    assert [line["gap closed, valid"] for line in table] == ["25 %", "20 %", "5 %", "50 %"]
    assert limits_table(language_page.searched(runs[:2])) == []
    for run in runs[:5]:
        del run["config"]["model"]["memory"]["input_bias"]  # as recorded before there was one
    assert limits_table(language_page.searched(runs)) == table
    drawn = draw_search(found, tmp_path / "search")[1].read_text()
    told = ("tensor-local", "step time over that of local attention", "wider window")
    for shown in (*told, "learned positions", "rotary positions"):
        assert shown in drawn
    assert drawn.count(">aim ") == 2
    few = draw_search(found[:3], tmp_path / "few")[1].read_text()
    assert "rotary positions" not in few


def test_the_search_draws_a_row_among_those_with_its_positions(tmp_path, monkeypatch):
    runs = [
        record("local", 120.0, step_ms=20.0),
        record("tensor-local", 118.0, step_ms=25.0),
        record("local", 90.0, positions="rotary", step_ms=30.0),
    ]
    drawn = []
    monkeypatch.setattr(language_search, "_save", lambda figure, _: drawn.append(figure))
    draw_search(language_page.searched(runs), tmp_path / "search")
    (figure,) = drawn
    panels = {
        axis.get_title(): {tuple(map(float, mark.get_xydata()[0])) for mark in axis.lines}
        for axis in figure.axes
    }
    learned = {(run["step_ms"] / 20, run["valid"]["perplexity"]) for run in runs[:2]}
    rotary = {(1.0, runs[2]["valid"]["perplexity"])}
    assert panels == {"learned positions": learned, "rotary positions": rotary}


def test_the_search_shows_an_aim_where_there_is_a_gap_alone(tmp_path):
    runs = [record("base", 100.0), record("local", 99.0), record("tensor-local", 98.0)]
    drawn = draw_search(language_page.searched(runs), tmp_path / "search")[1].read_text()
    assert "tensor-local" in drawn
    assert ">aim " not in drawn


def plan(name):
    return DOCS.parent / "grids" / f"{name}.toml"


@pytest.mark.parametrize(
    "name", ["0-rate", "1-fresh", "2-carried", "3-search", "3-best", "4-rest", "5-leak", "cost"]
)
def test_what_a_plan_holds_is_what_a_sweep_would_run(name):
    path = plan(f"language-{name}")
    runs = expand(read_plan(path))
    for recipe in dict.fromkeys(run.config.recipe for run in runs):
        expected = [
            (config_dict(run.config.model), run.config.seed)
            for run in runs
            if run.config.recipe == recipe
        ]
        found = [(run["config"]["model"], run["seed"]) for run in planned_runs(path, recipe)]
        assert sorted(map(repr, found)) == sorted(map(repr, expected))
        assert RECIPE_METHODS.get(recipe, "base") == find_recipe(recipe)().model.method


def test_a_stage_of_one_recipe_may_name_it_without_a_list(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text('[[stage]]\nrecipes = "language-carried"\nover = { seed = [0, 1] }\n')
    assert len(expand(read_plan(path))) == 2
    assert [run["seed"] for run in planned_runs(path, "language-carried")] == [0, 1]
    assert planned_runs(path, "language") == []  # a part of the name is another recipe


def test_planned_rows_without_a_run_and_missing_seeds_are_told():
    planned = planned_runs(plan("language-1-fresh"), "language-paper")
    base, local, *others = fresh_table([fresh("base", 110.0), fresh("base", 111.0, 1)], planned)
    assert (base["seeds"], base["test"][:6]) == ("2 of 3", "110.50")
    assert (local["method"], local["seeds"], local["test"]) == ("local", "0 of 3", "not run yet")
    assert [line["method"] for line in others] == ["tensor", "tensor-local"]
    assert all(line.keys() == base.keys() for line in others)


def test_rows_that_were_run_are_not_planned_any_more():
    planned = planned_runs(plan("language-2-carried"), "language-carried")
    runs = [record(run["method"], 110.0, seed=run["seed"], **XL.get(run["method"], {}))
            for run in planned]  # fmt: skip
    rows = table_rows(runs, planned)
    assert [row.seeds for row in rows] == ["3"] * len(rows)
    assert [line["test"] for line in carried_table(runs, planned)] == ["110.00 ± 0.00"] * len(rows)


XL = {"xl": {"segment": 64}}


def test_runs_take_the_cost_of_one_that_was_measured_alone():
    runs = [
        record("base", 100.0, step_ms=99.0),
        record("linear", 100.0, step_ms=66.0),
        record("local", 120.0, step_ms=99.0, shared=True),
        record("tensor-local", 110.0, step_ms=88.0, shared=True),
        record("tensor-local", 111.0, step_ms=77.0, shared=True, placement="after_attention"),
        record("tensor-local", 112.0, step_ms=66.0, shared=True, memory=memory(forget_bias=3.0)),
        record("tensor-local", 113.0, step_ms=55.0, shared=True, memory=memory(chunk_size=4)),
    ]
    costs = [record("local", 999.0, step_ms=20.0), record("tensor-local", 999.0, step_ms=25.0)]
    for run in costs:
        run["config"]["budget"]["steps"] = run["steps"] = 100
        run["peak_memory_bytes"] = 3 * 2**30
    costs.append(record("base", 999.0, step_ms=5.0))
    found = {line["method"]: line for line in carried_table(timed(runs, costs))}
    assert found["base"]["step"] == "5.0 ms"
    assert found["linear"]["step"] == "66.0 ms"  # its own: it was alone, and nothing else was
    assert (found["local"]["step"], found["local"]["peak memory"]) == ("20.0 ms", "3.0 GiB")
    assert (found["tensor-local"]["step"], found["tensor-local"]["of local"]) == (
        "25.0 ms",
        "1.25×",
    )
    assert found["tensor-local (placement after_attention)"]["step"] == "–"
    assert found["tensor-local (forget_bias 3)"]["step"] == "25.0 ms"  # another start alone
    assert found["tensor-local (K 4)"]["step"] == "–"
    assert found["tensor-local"]["test"] == "110.00"


def test_the_language_page_is_filled_from_records(tmp_path, capsys):
    results = tmp_path / "results"
    (tmp_path / "grids").mkdir()
    for path in DOCS.parent.glob("lab/plans/language-*.toml"):
        shutil.copy(path, tmp_path / "grids")
    results = results / "language"
    write_result(results / "fresh", fresh("base", 110.0))
    write_result(results / "fresh", record("recurrent-slots", 130.0, segment=256))
    write_result(results / "carried", record("local", 120.0, shared=True))
    write_result(results / "search", record("local", 121.0))
    write_result(results / "rate", fresh("base", 110.0))
    cost = record("local", 999.0, step_ms=20.5) | {"steps": 100}
    cost["config"]["budget"]["steps"] = 100
    write_result(results / "cost", cost)
    position = {
        "kind": "positions", "method": "tensor-local", "seed": 0, "labels": {}, "trained": "fresh",
        "step": 8, "config": {"budget": {"steps": 8}},
        "state_bytes": 1024, "length": 512, "positions": [256.0, 768.0], "losses": [4.5, 4.4],
        "windows": [
            {"history": 0, "loss": 4.5, "gain": 0.0, "gain_error": 0.0},
            {"history": 512, "loss": 4.4, "gain": 0.1, "gain_error": 0.01},
        ],
    }  # fmt: skip
    write_positions(results / "positions" / "one.json", position)
    page = tmp_path / "language.md"
    shutil.copy(DOCS / "language.md", page)
    assert language_page.main([str(results), str(page)]) == 0
    assert "filled rate, language-paper, carried, search and positions" in capsys.readouterr().out
    text = page.read_text()
    for shown in ("110.00", "120.00", "121.00", "+0.1000 ± 0.0196", "not run yet", "20.5 ms"):
        assert shown in text
    assert "Step and peak memory: 100 steps of the same alone, commit " in text
    carried, search = (
        text.partition(f"<!-- {name} -->")[2].partition(f"<!-- /{name} -->")[0]
        for name in ("carried", "search")
    )
    assert "130.00" in carried
    assert "or where there are none the run itself" in carried  # of the slots
    assert "the run itself" not in search
    assert (tmp_path / "images" / "language-positions.svg").is_file()
    figure = tmp_path / "images" / "language-search.svg"
    assert not figure.exists()  # the ends of the gap alone
    write_result(results / "search", record("tensor-local", 111.0))
    assert language_page.main([str(results), str(page)]) == 0
    assert figure.is_file()


def test_the_leak_page_shows_scores_with_the_future_and_without(tmp_path):
    for seed in (0, 1):
        write_result(tmp_path / "results" / "leak-demo", dice("tensor-depth", (1.4, 500.0), seed))
        write_result(tmp_path / "results" / "leak-demo", dice("tensor", (6.0, 6.0), seed))
    page = tmp_path / "leak.md"
    shutil.copy(DOCS / "leak.md", page)
    assert leak_page.main([str(tmp_path / "results"), str(page)]) == 0
    filled = page.read_text().partition("<!-- dice -->")[2].partition("<!-- /dice -->")[0]
    assert "tensor-depth (sees the future)" in filled
    assert "500.00" in filled
    assert "6.00" in filled
    assert "perplexity" not in filled
    drawn = (tmp_path / "images" / "leak-dice.svg").read_text()
    assert ">(sees the future)<" in drawn  # beneath its bars too
    assert "tensor-depth (sees the future)" in drawn
    assert "floor of what sees only the past" in drawn


def test_the_leak_page_names_the_control_that_was_not_run():
    (comparison,) = compare([dice("tensor-depth", (1.4, 500.0))])
    table = leak_page.leak_table(comparison, ["tensor-depth", "tensor", "tensor"])
    assert [line["method"] for line in table] == ["tensor-depth (sees the future)", "tensor"]
    assert table[1]["all tokens, whole windows"] == "not run yet"


@pytest.mark.parametrize("name", ["language", "leak"])
def test_pages_show_what_the_committed_records_say(name, tmp_path):
    """Whoever commits records fills the page again."""
    module = {"language": language_page, "leak": leak_page}[name]
    results = DOCS.parent / "results" / ("language" if name == "language" else "")
    page = tmp_path / f"{name}.md"
    shutil.copy(DOCS / f"{name}.md", page)
    assert module.main([str(results), str(page)]) == 0
    assert page.read_text() == (DOCS / f"{name}.md").read_text()
    for figure in (tmp_path / "images").glob("*.svg"):
        assert (DOCS / "images" / figure.name).is_file()
