"""Numbers that README and docs quote of the diagnostics are those of their committed records."""

import re
from dataclasses import replace

import pytest

from quoted import ROOT, records_of, words_of
from tensor_memory_lab.recipes import load_recipes
from tensor_memory_lab.records import config_from_dict, diagnostics_page
from tensor_memory_lab.records.intervals import estimate
from tensor_memory_lab.records.paired import paired
from tensor_memory_lab.records.wording import estimate_text


def test_what_the_readme_says_of_the_diagnostics_was_measured():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    quoted = text.partition("## Does it help?")[2].partition("\n## ")[0]
    tables = "\n".join(diagnostics_page.blocks(ROOT / "results" / "diagnostics").values())
    tables += (ROOT / "docs" / "vision.md").read_text(encoding="utf-8")  # held to its records
    faster = [run["test"]["test"]["accuracy"] for run in records_of("diagnostics-rate")]
    tables += estimate_text(estimate(faster), "accuracy")
    numbers = re.findall(r"\d+\.\d ± \d+\.\d %", quoted)
    assert len(numbers) >= 11
    assert [number for number in numbers if number not in tables] == []


def test_what_the_claims_of_the_diagnostics_quote_was_measured():
    page = words_of("docs/diagnostics.md")
    claims = page.partition("## Claim by claim")[2].partition("## How far a write")[0]
    tables = "\n".join(diagnostics_page.blocks(ROOT / "results" / "diagnostics").values())
    numbers = re.findall(r"[+-]?\d+\.\d ± \d+\.\d(?: %)?", claims)
    several = re.findall(r"(\d+\.\d ± \d+\.\d) (?:and|against|of) [^|]*?%", claims)
    assert len(numbers) >= 40
    assert len(several) >= 8
    apart = ["42.9 ± 1.8 %", "83.8 ± 3.0", "99.8 ± 0.2 %", "11.0 ± 7.3", "34.7 ± 6.9", "2.4 ± 2.3",
             "1.7 ± 0.5", "96.9 ± 0.2 %"]  # fmt: skip
    assert {n for n in numbers + several if n not in tables} == set(apart)  # held below


def runs_of(recipe, method, *, heads=4, task=None, **memory):
    """The committed runs of a method that differ from their recipe in these fields alone."""
    usual = load_recipes()[recipe]()
    asked = replace(usual.task, **task or {})
    state = usual.model.memory.to_dict() | memory
    found = []
    for record in records_of("diagnostics"):
        if (record["recipe"], record["method"]) == (recipe, method):
            config = config_from_dict(record["config"])
            model = config.model
            if (config.task, model.heads, model.memory.to_dict()) == (asked, heads, state):
                found.append(record)
    return found


def accuracies(runs):
    return [f"{100 * run['test']['test']['accuracy']:.1f}" for run in runs]


def test_what_is_said_of_no_harm_was_measured():
    text = words_of("docs/diagnostics.md")
    runs = {method: runs_of("no-harm", method) for method in ("tensor", "slots", "base")}
    memory, slots, alone = (
        estimate_text(estimate([_valid_at(run, 100) for run in runs[method]]), "accuracy")
        for method in ("tensor", "slots", "base")
    )
    told = f"{memory} of valid after 100, where slots have {slots} and attention alone {alone}"
    assert told.replace(f"{slots} and", f"{slots.removesuffix(' %')} and") in text
    assert {_first_at(run, 0.99) for run in runs["tensor"]} == {100}
    assert {_first_at(run, 0.99) for run in runs["base"]} == {300}
    assert "99 % of valid are right after 100 steps, without it after 300" in text
    ends = [
        estimate([run["curve"][-1]["valid"]["loss"] for run in runs[method]]).mean
        for method in ("tensor", "base")
    ]
    assert f"{ends[0]:.4f} with the memory and {ends[1]:.4f} for attention alone" in text
    assert {run["best_step"] for run in runs["tensor"]} == {1500}
    assert "after all 1,500 steps most answers are gone" in text
    layers = [run["memory"]["layers"] for run in runs["tensor"]]
    use = estimate([first["use"] for first, _ in layers]).mean
    assert f"the first adds {100 * use:.0f} % of the norm" in text
    assert {round(layer["gate"], 2) for both in layers for layer in both} == {0.51}
    assert "0.51 in both layers" in text


def test_beside_windows_of_two_tokens_no_harm_is_learned_at_once_by_all():
    methods = ("base", "tensor", "linear", "xl")
    runs = [run for method in methods for run in runs_of("windowed-no-harm", method)]
    assert len(runs) == 12
    assert min(_valid_at(run, 100) for run in runs) > 0.99
    assert {_without_memory(run) for run in runs if run["method"] == "tensor"} == {1.0}
    assert "all methods are above 99 % after 100 steps" in words_of("docs/diagnostics.md")


def test_what_is_said_of_the_published_occlusion_without_its_memory_was_measured():
    lost = [
        100 * (run["test"]["test"]["accuracy"] - _without_memory(run))
        for run in runs_of("occlusion-published", "tensor")
    ]
    assert len(lost) == 5
    told = f"all five seeds lose when it is switched off, {min(lost):.1f} to {max(lost):.1f} points"
    assert told in words_of("docs/diagnostics.md")


GATES = {
    "windowed-binding": "`windowed-binding` ({0:.2f}, {1:.2f})",
    "windowed-delay": "`windowed-delay` ({0:.2f}, {1:.2f})",
    "windowed-ablation": "50 bindings ({0:.2f}, {1:.2f}), of which it answers 3.9 %",
    "binding-long": "`binding-long` ({0:.2f}, {1:.2f})",
    "occlusion-published": "published occlusion ({0:.2f}, {1:.2f}, {2:.2f})",
}


@pytest.mark.parametrize("recipe", GATES)
def test_what_is_said_of_the_gates_was_measured(recipe):
    task = {"writes": 50} if recipe == "windowed-ablation" else None
    runs = runs_of(recipe, "tensor", task=task)
    layers = [[layer["gate"] for layer in run["memory"]["layers"]] for run in runs]
    gates = [estimate(gates).mean for gates in zip(*layers, strict=True)]
    assert GATES[recipe].format(*gates) in words_of("docs/diagnostics.md")


def _without_memory(run):
    return run["memory"]["test_without_memory"]["test"]["accuracy"]


def test_what_is_said_of_more_voxels_was_measured():
    many, few = (runs_of("windowed-ablation", "tensor", grid=[n, n, n]) for n in (8, 4))
    shown = estimate(gains(many, few))
    told = f"512 voxels have {shown.mean:.1f} ± {shown.half_width:.1f} points more than 64"
    assert told in words_of("docs/diagnostics.md")


def test_what_is_said_of_axes_and_forget_biases_was_measured():
    def more(many, few):
        shown = estimate(gains(*(runs_of("windowed-ablation", "tensor", **m) for m in (many, few))))
        return f"{shown.mean:.1f} ± {shown.half_width:.1f}"

    text = words_of("docs/diagnostics.md")
    one, two, three = {"grid": [216]}, {"grid": [12, 18]}, {}
    less = f"{more(three, one)} points less than along three and {more(two, one)} less than along"
    assert less in text
    biases = {"forget_bias": 3.0}, {"forget_bias": 1.0}
    assert f"3 with {more(*biases)} points more than 1" in text


def test_what_is_said_of_seeds_that_differ_was_measured():
    text = words_of("docs/diagnostics.md")
    first, second, third = accuracies(runs_of("windowed-ablation", "tensor"))
    assert f"84.6 ± 29.9 % as published: {first}, {second} and {third} %" in text
    assert round(float(second) - float(first)) == 23
    assert "whose seeds lie 23 points apart" in text
    hidden = [
        float(accuracy)
        for method in ("base", "wide", "slots", "tensor")
        for accuracy in accuracies(runs_of("occlusion-valid", method))
    ]
    assert f"seeds lie between {min(hidden)} and {max(hidden)} %" in text


def test_what_is_said_of_twenty_writes_with_little_noise_was_measured():
    asked = {"writes": 20, "noise": 0.05}
    memory, alone = (runs_of("binding", method, task=asked) for method in ("tensor", "base"))
    shown = estimate(gains(memory, alone))
    told = f"behind by {-shown.mean:.2f} ± {shown.half_width:.2f} points"
    assert told in words_of("docs/diagnostics.md")


def test_what_is_said_of_two_hundred_writes_with_other_noise_was_measured():
    (exact, exact_memory), (noisy, noisy_memory) = (
        [
            accuracies(runs_of("binding", method, task={"writes": 200, "noise": noise}))[0]
            for method in ("base", "tensor")
        ]
        for noise in (0.0, 0.1)
    )
    told = f"{exact} and {exact_memory} %, {noisy} and {noisy_memory} %"
    assert told in words_of("docs/diagnostics.md")


def gains(runs, others):
    """Points of accuracy that runs have more than others of the same seed."""
    return [
        100 * (one["test"]["test"]["accuracy"] - other["test"]["test"]["accuracy"])
        for one, other in paired(runs, others)
    ]


def test_what_is_said_of_the_steps_to_95_percent_was_measured():
    reached = {
        method: sorted(_first_at(run, 0.95) for run in runs_of("windowed-binding", method))
        for method in ("tensor", "linear")
    }
    memory, linear = reached["tensor"], reached["linear"]
    told = f"95 % after {memory[0]} to {memory[-1]} steps against {linear[0]} to {linear[-1]:,}"
    assert told in words_of("docs/diagnostics.md")


def _first_at(run, accuracy):
    return next(c["step"] for c in run["curve"] if c["valid"]["accuracy"] >= accuracy)


def test_at_many_writes_memory_and_attention_leave_chance_together():
    left = {}
    for record in records_of("diagnostics"):
        task = record["config"]["task"]
        if record["recipe"] == "binding" and task["writes"] in (100, 200):
            row = task["writes"], task["noise"], record["seed"]
            left.setdefault(row, []).append(_first_at(record, 0.1))
    assert len(left) == 14
    assert all(one == other for one, other in left.values())
    assert "within the same 100 steps of the same seed" in words_of("docs/diagnostics.md")


def test_what_is_said_of_the_delay_was_measured():
    memory, linear, cache = (
        sorted(_first_at(run, 0.99) for run in runs_of("windowed-delay", method))
        for method in ("tensor", "linear", "xl")
    )
    assert linear[0] == linear[-1]
    told = (
        f"99 % after {memory[0]} to {memory[-1]}, {linear[0]}, and {cache[0]} to {cache[-1]} steps"
    )
    assert told in words_of("docs/diagnostics.md")


def test_what_is_said_of_linear_attentions_tries_over_the_long_gap_was_measured():
    text, recipe = words_of("docs/diagnostics.md"), "windowed-binding-long"
    heads = [accuracies(runs_of(recipe, "linear", heads=heads)) for heads in (1, 2, 8)]
    (one,), (two,), (eight,) = heads
    assert f"{one}, {two} and {eight} % with 1, 2 and 8 heads (one seed each)" in text
    faster = records_of("diagnostics-rate")
    assert {run["config"]["optimizer"]["lr"] for run in faster} == {3e-3}
    first, second, third = accuracies(faster)
    assert f"three times the rate it comes to {first}, {second} and {third} %" in text
    shown = estimate(gains(started_for_long_gaps(recipe), faster))
    assert f"{shown.mean:.1f} ± {shown.half_width:.1f} points behind the memory" in text
    steps = sorted(_first_at(run, 0.9) for run in faster)
    assert f"passes 90 % after {steps[0]:,} to {steps[-1]:,} steps" in text


def test_what_is_said_of_linear_attentions_tries_on_the_map_was_measured():
    text, recipe = words_of("docs/diagnostics.md"), "windowed-map"
    tries = [runs_of(recipe, "linear", heads=heads) for heads in (1, 2, 4, 8)]
    runs = [run for found in (*tries, runs_of(recipe, "linear", gain=4.0)) for run in found]
    assert len(runs) == 15
    best = max(run["test"]["test"]["accuracy"] for run in runs)
    assert f"above all fifteen runs of linear attention (at most {100 * best:.1f} %)" in text
    opened = sorted(
        run["test"]["test"]["accuracy"] for run in runs_of(recipe, "tensor", forget_bias=5.0)
    )
    assert opened[1] > best
    assert f"(one head, seed 1: {accuracies(tries[0])[1]} %)" in text
    shown = estimate(gains(tries[2], started_for_long_gaps(recipe)))
    behind = f"{shown.mean:.1f} ± {shown.half_width:.1f} points behind linear attention"
    assert behind in text
    assert behind in words_of("docs/howto.md")


def test_what_is_said_of_the_cost_was_measured():
    text = words_of("docs/diagnostics.md")
    step = {
        (run["recipe"], run["method"]): run["step_ms"] for run in records_of("diagnostics-cost")
    }
    recipes = sorted({recipe for recipe, _ in step})
    told = (
        "{} times that of attention alone; with linear attention {} times, with the cache {}, "
        "with 16 carried slots {} "
    )
    times = []
    for method in ("tensor", "linear", "xl", "recurrent-slots"):
        over_base = [step[recipe, method] / step[recipe, "base"] for recipe in recipes]
        times.append(f"{min(over_base):.1f} to {max(over_base):.1f}")
    assert told.format(*times) in text
    told = "takes {} times that of attention alone, with linear attention {} times"
    assert told.format(*times) in words_of("README.md")
    longer = step["windowed-binding-long", "tensor"] / step["windowed-binding-long", "linear"]
    assert f"A step of the memory takes {longer:.1f} times as long there" in text
    memory, linear, cache = (
        [_first_at(run, 0.95) * step["windowed-binding", method] for run in runs]
        for method in ("tensor", "linear", "xl")
        for runs in [runs_of("windowed-binding", method)]
    )
    assert max(min(memory), min(linear)) < min(max(memory), max(linear))
    assert 4 < min(memory) / max(cache) < 6
    assert "need about the same time to 95 % of `windowed-binding`, the cache a fifth." in text


@pytest.mark.parametrize("page", ["README.md", "docs/diagnostics.md"])
def test_what_is_said_of_single_seeds_with_an_open_forget_gate_was_measured(page):
    runs = runs_of("windowed-map", "tensor", forget_bias=5.0)
    first, second, third = accuracies(runs)
    text = words_of(page)
    assert f"{first}, {second} and {third} %" in text


def started_for_long_gaps(recipe):
    start = {"forget_bias": 5.0, "spread_bias": -1.0, "feedback": 0.0, "gain": 4.0}
    runs = runs_of(recipe, "tensor", **start)
    assert [run["seed"] for run in runs] == [0, 1, 2]
    return runs


def test_what_is_said_of_the_start_for_long_gaps_was_measured():
    text = words_of("docs/diagnostics.md")
    for recipe in ("windowed-binding-long", "windowed-map"):
        first, second, third = accuracies(started_for_long_gaps(recipe))
        assert f"{first}, {second} and {third} %" in text
    runs = started_for_long_gaps("windowed-binding-long")
    memory, linear = (
        sorted(_first_at(run, 0.9) for run in found)
        for found in (runs, runs_of("windowed-binding-long", "linear"))
    )
    told = (
        f"passes 90 % after {memory[0]} to {memory[-1]} of the 4,000 steps, linear attention after"
    )
    assert f"{told} {linear[0]:,} to {linear[-1]:,}" in text
    shown = estimate([100 * run["test"]["test"]["accuracy"] for run in runs])
    howto = (ROOT / "docs" / "howto.md").read_text(encoding="utf-8")
    assert f"{shown.mean:.1f} ± {shown.half_width:.1f} % from this one" in howto


def _valid_at(run, step):
    (accuracy,) = (c["valid"]["accuracy"] for c in run["curve"] if c["step"] == step)
    return accuracy


def over_the_long_gap(method, gain):
    runs = [
        run
        for run in records_of("forget-bias", "longer")
        if (run["method"], run["config"]["model"]["memory"]["gain"]) == (method, gain)
    ]
    assert [run["seed"] for run in runs] == [0, 1, 2]
    assert {(run["steps"], run["state_bytes"]) for run in runs} == {(2000, 8192)}
    first, second, third = accuracies(runs)
    return f"{first}, {second} and {third} %"


def test_what_is_said_of_three_small_seeds_over_the_long_gap_was_measured():
    memory, linear, louder = (
        over_the_long_gap(*start) for start in (("tensor", 4), ("linear", 1), ("linear", 4))
    )
    told = f"{memory} for the memory, {linear} for linear attention, {louder} for linear attention"
    assert told in words_of("docs/diagnostics.md")
