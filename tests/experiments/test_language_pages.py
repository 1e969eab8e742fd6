"""The pages about language and the leak: tables from records, places filled, none typed by hand."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from language_records import record

from tensor_memory.experiments.recipes.leak_demo import leak_demo
from tensor_memory.experiments.results import config_dict, language_page, leak_page, write_result
from tensor_memory.experiments.results.language_page import (
    carried_table,
    fresh_table,
    search_table,
)
from tensor_memory.experiments.results.positions import write_positions

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


def test_the_search_keeps_every_row_the_best_first():
    table = search_table(
        [
            record("base", 100.0),
            record("local", 120.0),
            record("tensor-local", 125.0, memory_layers=(2, 5)),
            record("tensor-local", 110.0, memory_layers=(2, 5), placement="after_attention"),
            record("local", 115.0, window=128),
        ]
    )
    assert [line["variant"] for line in table] == [
        "base",
        "tensor-local (layers 2×5, placement after_attention)",
        "local",
        "tensor-local (layers 2×5)",
        "local (window 128)",
    ]
    assert [line["gap closed"] for line in table] == ["100 %", "50 %", "0 %", "-25 %", "0 %"]


def test_the_language_page_is_filled_from_records(tmp_path, capsys):
    results = tmp_path / "results"
    write_result(results / "fresh", fresh("base", 110.0))
    write_result(results / "carried", record("local", 120.0))
    write_result(results / "search", record("local", 121.0))
    position = {
        "kind": "positions", "method": "tensor-local", "seed": 0, "labels": {}, "trained": "fresh",
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
    assert "filled language-paper, carried, search and positions" in capsys.readouterr().out
    text = page.read_text()
    for shown in ("110.00", "120.00", "121.00", "+0.1000 ± 0.0196"):
        assert shown in text
    assert (tmp_path / "images" / "language-positions.svg").is_file()


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
    assert "tensor-depth (sees the future)" in drawn
    assert "floor of what sees only the past" in drawn


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
