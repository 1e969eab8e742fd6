"""Figures of results: what they draw, what they leave out, and that lines can be told apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from invented_runs import BASE, TENSOR, SignTaskConfig, record, run, sweep_records
from tensor_memory import MemoryConfig
from tensor_memory_lab.models.toy import ToyModelConfig
from tensor_memory_lab.records import plots
from tensor_memory_lab.records.comparison import METHODS, compare
from tensor_memory_lab.records.report import write_report
from tensor_memory_lab.run_config import RunConfig
from tensor_memory_lab.tasks.binding import BindingConfig


def test_no_two_lines_of_a_figure_look_alike():
    def toy(method: str, **changes: Any) -> dict[str, Any]:
        model = ToyModelConfig(method=method, window=2, **changes)  # pyright: ignore
        return record(RunConfig(recipe="binding", task=BindingConfig(), model=model))

    memories = [MemoryConfig(channels=16, forget_bias=bias) for bias in (0.0, 1.0, 3.0, 5.0, 8.0)]
    methods = ("base", "wide", "slots", "slots-matched", "tensor", "xl", "linear")
    found = [toy(method, memory=memories[0]) for method in methods]
    found += [toy("tensor", memory=memory) for memory in memories[1:]]
    found.append(toy("recurrent-slots", slots=16, memory=memories[0]))
    (comparison,) = compare(found)
    looks = plots.looks(comparison)
    assert len(looks) == len(found)
    assert len({(colour, dash) for colour, dash, _ in looks.values()}) == len(found)
    assert looks["tensor"] == plots.LOOKS["tensor"]
    # The only kind of its method is drawn as its method everywhere.
    assert looks["recurrent-slots (slots=16)"] == plots.LOOKS["recurrent-slots"]
    assert looks["tensor (forget_bias=3)"][0] == plots.BLUE


def ablations() -> list[dict[str, Any]]:
    """One method in six variants, and two methods over three settings of the task."""
    memories = [MemoryConfig(channels=4, grid=(2, 2), forget_bias=bias) for bias in range(7)]
    found = [run(replace(TENSOR, memory=memory), seed=s) for memory in memories for s in (0, 1)]
    return found + [
        run(replace(model, memory=memories[0]), seed=s, task=SignTaskConfig(numbers=count))
        for model in (BASE, TENSOR)
        for s in (0, 1)
        for count in (2, 16)
    ]


def test_many_variants_of_a_method_have_a_figure_of_their_own(tmp_path):
    text = write_report(ablations(), tmp_path)
    assert "![accuracy of every variant, sign](sign-variants.png)" in text
    drawn = (tmp_path / "sign-variants.svg").read_text()
    assert all(f"tensor (forget_bias={bias})" in drawn for bias in range(1, 7))
    assert "numbers 4" in drawn
    assert "numbers 16" not in drawn  # there one method stands as it is
    assert "variants" not in write_report(sweep_records(), tmp_path / "other")


def test_a_sweep_leaves_out_what_stands_at_one_value_alone(tmp_path):
    write_report(ablations(), tmp_path)
    drawn = (tmp_path / "sign-numbers.svg").read_text()
    assert "tensor" in drawn
    assert "base" in drawn
    assert "forget_bias" not in drawn


def test_a_figure_has_room_for_the_longest_name(tmp_path):
    plain = MemoryConfig(channels=4, grid=(2, 2))
    open_and_narrow = replace(plain, read_heads=2, write_heads=2, forget_bias=5.0, spread_bias=-1.0)
    models = [replace(TENSOR, memory=memory) for memory in (plain, open_and_narrow)]
    records = [run(model, seed=seed) for model in (BASE, *models) for seed in (0, 1)]
    write_report(records, tmp_path)  # what does not fit is a warning, and those are errors here
    drawn = (tmp_path / "sign-curves.svg").read_text()
    assert "read_heads=2, write_heads=2, spread_bias=-1, forget_bias=5" in drawn


def test_a_legend_follows_the_table_and_ends_with_the_ceiling(tmp_path):
    write_report(ablations(), tmp_path)
    drawn = (tmp_path / "sign-curves.svg").read_text()
    order = ["base", "tensor", "tensor (forget_bias=1)", "tensor (forget_bias=6)", "ceiling"]
    places = [drawn.rindex(f">{label}<") for label in order]
    assert places == sorted(places)


def test_curves_are_means_over_seeds_with_their_interval():
    records = [run(seed=seed, accuracy=a) for seed, a in enumerate((0.8, 0.9))]
    (comparison,) = compare(records)
    steps, means, halves = plots._curve(comparison.rows[0], "accuracy")
    assert steps == [2, 4]
    assert means == pytest.approx([0.425, 0.85])
    assert halves == pytest.approx([12.706 * 0.025, 12.706 * 0.05], rel=1e-4)


def test_a_curve_ends_where_the_first_seed_has_stopped():
    early = run(seed=1, accuracy=0.2, stopped_early=True)
    early["curve"].pop()
    (comparison,) = compare([run(accuracy=0.8), early])
    steps, means, _ = plots._curve(comparison.rows[0], "accuracy")
    assert (steps, means) == ([2], pytest.approx([0.25]))


@pytest.mark.parametrize(("last", "lines"), [(0.8, 1), (0.2, 4)])
def test_seeds_that_end_far_apart_are_drawn_each(tmp_path, monkeypatch, last, lines):
    drawn = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: drawn.append(figure.axes[0]) or [])
    records = [run(seed=seed, accuracy=a) for seed, a in enumerate((0.9, 0.85, last))]
    (comparison,) = compare([one | {"ceiling": {"test": None}} for one in records])
    plots.draw_curves(comparison, tmp_path / "curves")
    assert len(drawn[0].lines) == lines
    ends = sorted(line.get_ydata()[-1] for line in drawn[0].lines)
    assert any(end == pytest.approx(100 * (0.9 + 0.85 + last) / 3) for end in ends)
    if lines == 4:
        assert ends[0] == pytest.approx(20.0)
        low, high = drawn[0].get_ylim()
        assert 0 < high - low < 100  # no band from nothing to everything


def test_a_panel_of_many_lines_leaves_the_seeds_out(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: drawn.append(figure.axes[0]) or [])
    variants = [
        replace(TENSOR, memory=MemoryConfig(channels=channels, grid=(2, 2)))
        for channels in range(1, plots.MOST_LINES + 2)
    ]
    records = [
        run(one, seed=seed, accuracy=a) for one in variants for seed, a in enumerate((0.9, 0.2))
    ]
    (comparison,) = compare([run(), *(one | {"ceiling": {"test": None}} for one in records)])
    plots.draw_curves(comparison, tmp_path / "curves")
    assert len(drawn[0].lines) == len(comparison.rows) + 1  # and the ceiling


def test_every_method_looks_its_own_way():
    assert len(set(plots.LOOKS.values())) == len(plots.LOOKS)
    assert {*plots.LOOKS, *plots.SAME} == set(METHODS)
    assert set(plots.SAME.values()) <= set(plots.LOOKS)
    assert len(set(plots.OTHERS)) == len(plots.OTHERS)


def test_a_point_of_a_sweep_has_the_bar_of_its_own_seeds(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: drawn.append(figure.axes[0]) or [])
    records = [
        run(accuracy=a, seed=seed, task=SignTaskConfig(numbers=count))
        for count, accuracies in {2: (0.8, 0.81), 4: (0.7,), 16: (0.5, 0.52)}.items()
        for seed, a in enumerate(accuracies)
    ]
    (comparison,) = compare(records)
    plots.draw_sweep(comparison, "task.numbers", tmp_path / "sweep")
    (bars,) = drawn[0].collections
    heights = {place: high - low for (place, low), (_, high) in bars.get_segments()}
    assert heights == pytest.approx({2: 2 * 12.706 * 0.5, 4: 0.0, 16: 2 * 12.706}, rel=1e-4)
