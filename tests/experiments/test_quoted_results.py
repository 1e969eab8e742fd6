"""Numbers that the README quotes of runs are those of their committed records."""

import re

import pytest
from quoted import ROOT, records_of, words_of

from tensor_memory.experiments.recipes import load_recipes
from tensor_memory.experiments.results import config_from_dict, diagnostics_page
from tensor_memory.experiments.results.intervals import estimate
from tensor_memory.experiments.results.paired import paired
from tensor_memory.experiments.results.rows import grouped
from tensor_memory.experiments.results.wording import estimate_text


def test_what_the_readme_says_of_the_diagnostics_was_measured():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    quoted = text.partition("## Does it help?")[2].partition("\n## ")[0]
    tables = "\n".join(diagnostics_page.blocks(ROOT / "results" / "diagnostics").values())
    tables += (ROOT / "docs" / "vision.md").read_text(encoding="utf-8")  # held to its records
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
    apart = ["42.9 ± 1.8 %", "99.8 ± 0.2 %", "11.0 ± 7.3"]  # held below
    assert [n for n in numbers + several if n not in tables and n not in apart] == []


def runs_of(recipe, method, **memory):
    """The committed runs of a method whose memory differs from the recipe's in these fields."""
    usual = load_recipes()[recipe]().model.memory.to_dict() | memory
    return [
        record
        for record in records_of("diagnostics")
        if (record["recipe"], record["method"]) == (recipe, method)
        and config_from_dict(record["config"]).model.memory.to_dict() == usual
    ]


def accuracies(runs):
    return [f"{100 * run['test']['test']['accuracy']:.1f}" for run in runs]


def test_what_is_said_of_no_harm_was_measured():
    text = words_of("docs/diagnostics.md")
    runs = {method: runs_of("no-harm", method) for method in ("tensor", "base")}
    sooner, later = (
        estimate_text(estimate([_valid_at(run, 100) for run in runs[method]]), "accuracy")
        for method in ("tensor", "base")
    )
    assert f"{sooner} of valid after 100 steps, where attention alone has {later}" in text
    ends = [
        estimate([run["curve"][-1]["valid"]["loss"] for run in runs[method]]).mean
        for method in ("tensor", "base")
    ]
    assert f"{ends[0]:.4f} with the memory and {ends[1]:.4f} for attention alone" in text
    assert {run["best_step"] for run in runs["tensor"]} == {200}
    assert "At that step, 200 of 1,500" in text
    layers = [run["memory"]["layers"] for run in runs["tensor"]]
    use = estimate([first["use"] for first, _ in layers]).mean
    assert f"the first adds {100 * use:.0f} % of the norm" in text
    assert {round(layer["gate"], 2) for both in layers for layer in both} == {0.51}
    assert "0.51 in both layers" in text


def test_what_is_said_of_the_published_occlusion_without_its_memory_was_measured():
    lost = [
        f"{100 * (run['test']['test']['accuracy'] - _without_memory(run)):.1f}"
        for run in runs_of("occlusion-published", "tensor")
    ]
    assert f"({lost[0]}, {lost[1]} and {lost[2]} points)" in words_of("docs/diagnostics.md")


def _without_memory(run):
    return run["memory"]["test_without_memory"]["test"]["accuracy"]


def test_what_is_said_of_more_voxels_was_measured():
    many, few = (runs_of("windowed-ablation", "tensor", grid=[n, n, n]) for n in (8, 4))
    shown = estimate(gains(many, few))
    told = f"512 voxels have {shown.mean:.1f} ± {shown.half_width:.1f} points more than 64"
    assert told in words_of("docs/diagnostics.md")


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
    memory, alone = (
        [run for run in runs_of("binding", method) if written(run) == (20, 0.05)]
        for method in ("tensor", "base")
    )
    shown = estimate(gains(memory, alone))
    told = f"behind, by {-shown.mean:.2f} ± {shown.half_width:.2f} points"
    assert told in words_of("docs/diagnostics.md")


def written(run):
    return run["config"]["task"]["writes"], run["config"]["task"]["noise"]


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
    records = records_of("diagnostics")
    left = {}
    for record in records:
        task = record["config"]["task"]
        if record["recipe"] == "binding" and task["writes"] in (100, 200):
            left.setdefault((task["writes"], record["seed"]), []).append(_first_at(record, 0.1))
    assert len(left) == 6
    assert all(abs(one - other) <= 100 for one, other in left.values())  # a step of the curves
    assert "at about the same step of the same seed" in words_of("docs/diagnostics.md")


@pytest.mark.parametrize("page", ["README.md", "docs/diagnostics.md"])
def test_what_is_said_of_single_seeds_with_an_open_forget_gate_was_measured(page):
    runs = runs_of("windowed-map", "tensor", forget_bias=5.0)
    first, second, third = accuracies(runs)
    text = words_of(page)
    assert f"{first}, {second} and {third} %" in text


def test_what_is_said_of_the_start_for_long_gaps_was_measured():
    text = words_of("docs/diagnostics.md")
    for recipe in ("windowed-binding-long", "windowed-map"):
        records = records_of("diagnostics")
        runs = [
            record
            for record in records
            if record["recipe"] == recipe and record["config"]["model"]["memory"].get("gain") == 4
        ]
        assert [run["seed"] for run in runs] == [0, 1, 2]
        first, second, third = (f"{100 * run['test']['test']['accuracy']:.1f}" for run in runs)
        assert f"{first}, {second} and {third} %" in text
        if recipe == "windowed-binding-long":
            assert min(_valid_at(run, 500) for run in runs) > 0.89
            assert "90 % after 500 of the 4,000 steps" in text
            shown = estimate([100 * run["test"]["test"]["accuracy"] for run in runs])
            howto = (ROOT / "docs" / "howto.md").read_text(encoding="utf-8")
            assert f"{shown.mean:.1f} ± {shown.half_width:.1f} % from this one" in howto


def _valid_at(run, step):
    (accuracy,) = (c["valid"]["accuracy"] for c in run["curve"] if c["step"] == step)
    return accuracy


def over_the_long_gap(method):
    records = records_of("forget-bias", "longer")
    runs = [record for record in records if record["method"] == method]
    assert [run["seed"] for run in runs] == [0, 1, 2]
    assert {(run["steps"], run["state_bytes"]) for run in runs} == {(2000, 8192)}
    first, second, third = (f"{100 * run['test']['test']['accuracy']:.1f}" for run in runs)
    return f"{first}, {second} and {third} %"


def test_what_is_said_of_three_small_seeds_over_the_long_gap_was_measured():
    text = words_of("docs/diagnostics.md")
    memory, linear = over_the_long_gap("tensor"), over_the_long_gap("linear")
    assert text.index(memory) < text.index(linear)


def test_what_the_readme_says_of_images_and_video_was_measured():
    text = words_of("README.md")
    birds = records_of("vision", "images")
    clips = records_of("vision", "video")
    short = [run for run in clips if run["facts"]["frames"] == 8]

    def shown(records, method, split, measure):
        runs = dict(grouped(records))[method]  # less its variants
        return estimate_text(estimate([run["test"][split][measure] for run in runs]), measure)

    spatial, base = (shown(birds, method, "test@75%", "psnr") for method in ("spatial", "base"))
    assert f"{spatial} dB with the memory, {base} without" in text
    spatial, frames, joint = (
        shown(short, method, "test", "accuracy") for method in ("spatial", "frames", "joint")
    )
    assert f"{spatial} with the memory, {frames} frame by frame" in text
    assert f"{joint} with attention over all frames" in text
    long = [run for run in clips if run["facts"]["frames"] == 64]
    spatial, frames, joint = (
        shown(long, method, "test", "accuracy").removesuffix(" %")
        for method in ("spatial", "frames", "joint")
    )
    assert f"with 64 frames {spatial}, {frames} and {joint} %" in text


def test_what_the_readme_says_of_the_leak_was_measured():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    records = records_of("leak-demo")
    scores = {
        method: estimate([r["test"]["test"]["score"] for r in records if r["method"] == method])
        for method in ("tensor", "base", "tensor-depth")
    }
    leaking = scores["tensor-depth"]
    assert f"{leaking.mean:.2f} ± {leaking.half_width:.2f}" in text
    assert {f"{scores[method].mean:.2f}" for method in ("base", "tensor")} == {"6.00"}
    assert "causal models score 6.00" in text


def test_what_is_said_of_the_leak_in_real_text_was_measured():
    readme, page = words_of("README.md"), words_of("docs/leak.md")
    runs = {run["method"]: run for run in records_of("language", "leak")}
    (window, prefix), (honest, cut) = (
        [run["test"][split]["score"] for split in ("test@window", "test@prefix")]
        for run in (runs["tensor-depth"], runs["tensor"])
    )
    assert f"{honest - window:.2f} better than the causal one" in page
    assert f"it is {prefix - cut:.2f} worse" in page
    assert f"rises by {100 * (prefix / window - 1):.1f} %" in page
    assert abs(cut - honest) < 0.02
    assert f"{window:.2f} with the future and {prefix:.2f} without" in readme
    assert f"the causal memory {honest:.2f} and {cut:.2f}" in readme
