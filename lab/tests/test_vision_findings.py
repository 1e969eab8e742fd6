"""Sentences of the vision page: each says what the records allow, whichever way they turn out."""

from dataclasses import replace
from pathlib import Path

import pytest

from tensor_memory_lab.recipes.video import ucf101_nine
from tensor_memory_lab.records import read_results
from tensor_memory_lab.records.intervals import estimate
from tensor_memory_lab.records.rows import grouped
from tensor_memory_lab.records.vision_findings import (
    action_finding,
    cost_finding,
    findings,
    last_frame_finding,
    missing_finding,
    published_finding,
    reconstruction_finding,
    variants_finding,
    verdict,
)
from tensor_memory_lab.records.vision_page import blocks
from tensor_memory_lab.records.wording import estimate_text
from vision_records import GIB, costs, image_record, video_record

ROOT = Path(__file__).parents[2]


def images(gain):
    """Three seeds, `spatial` better by `gain` dB on the mean, by 0.1 more or less in a seed."""
    off = {"test_without_memory": image_record("base", 18.99)["test"], "layers": []}
    runs = [image_record("base", 19.0 + seed, seed) for seed in (0, 1, 2)]
    for seed, apart in enumerate((-0.1, 0.0, 0.1)):
        runs.append(image_record("spatial", 19.0 + seed + gain + apart, seed, memory=off))
    return runs


@pytest.mark.parametrize(
    ("gain", "said"),
    [(0.1, "no gain is shown"), (0.5, "a gain is shown"), (-0.5, "a loss is shown")],
)
def test_a_gain_is_said_to_be_shown_where_its_interval_leaves_zero_out(gain, said):
    text = reconstruction_finding(images(gain))
    assert f"**Masked birds: {said}.**" in text
    both = f"{gain:+.2f} ± 0.25"  # t with 2 degrees of freedom, s = 0.1
    assert f"in PSNR: {both} and {both} dB at 25 and 75 % hidden" in text
    assert f"all 2 methods lie within {abs(gain):.2f} dB" in text


def test_what_switching_the_memory_off_changes_is_said():
    assert "changes PSNR by at most 1.110 dB" in reconstruction_finding(images(0.1))


def test_actions_are_compared_with_frames_by_seed():
    clips = {"train": 727, "valid": 146, "test": 341}
    runs = [video_record("frames", 8, 0.5 + 0.1 * seed, seed) for seed in (0, 1, 2)]
    runs += [video_record("spatial", 8, a, s) for s, a in enumerate((0.51, 0.62, 0.73))]
    for run in runs:
        run["facts"]["clips"] = clips
    text = action_finding(8, runs)
    assert text.startswith(
        "**Actions, T = 8: no gain is shown.** Top-1: `frames` 60.0 ± 24.8 % and"
    )
    assert "`spatial` less `frames`: +2.0 ± 2.5 points" in text  # 1, 2 and 3
    assert "3 seeds with 727 training and 341 test clips" in text
    assert "a difference below 2 points would not show" in text


def test_a_loss_with_missing_frames_is_against_the_whole_clip_of_the_same_run():
    runs = [video_record(m, 8, 0.5 + 0.1 * s, s) for m in ("frames", "spatial") for s in (0, 1, 2)]
    text = missing_finding(8, runs)
    assert "a quarter of the frames missing somewhere: `frames` -12.5 ± 0.0 and" in text
    assert "half of the frames missing somewhere: `frames` -25.0 ± 0.0 and" in text
    assert "no robustness from the memory is shown" in text
    for run in runs:
        if run["method"] == "spatial":
            run["test"]["test@missing=4"]["accuracy"] += 0.2
    assert "T = 8: a robustness from the memory is shown" in missing_finding(8, runs)


def test_a_head_that_sees_the_last_frame_alone_is_compared_with_its_like():
    read = {"readout": "last"}
    start = read | {"memory": replace(ucf101_nine().model.memory, forget_bias=5.0)}
    runs = [video_record("frames", 4, 0.5, seed, model=read) for seed in (0, 1)]
    runs += [video_record("spatial", 4, 0.6, seed, model=read) for seed in (0, 1)]
    others = [video_record("frames", 4, 0.9, seed) for seed in (0, 1)]
    others += [video_record("spatial", 4, 0.9, 0), video_record("spatial", 4, 0.8, 0, model=start)]
    text = last_frame_finding(4, [*others, *runs])
    assert text.startswith(
        "**Only the last frame read, T = 4: a gain is shown.** Top-1: `frames` 50.0 ± 0.0 % and "
        "`spatial` 60.0 ± 0.0 %; `spatial` less `frames`: +10.0 ± 0.0 points. With that frame blank"
    )
    assert text.endswith("attended to: `frames` 37.5 ± 0.0 % and `spatial` 47.5 ± 0.0 %.")
    assert last_frame_finding(4, others) == ""
    assert text in " ".join(findings({"video": [*others, *runs]}).replace("\n- ", "\n").split())


def test_other_memories_are_compared_with_what_carries_nothing_beside_them():
    last, memory = {"readout": "last"}, ucf101_nine().model.memory
    starts = [{"scope": "depth"}, last | {"memory": replace(memory, forget_bias=5.0)}]
    runs = [video_record("frames", 4, 0.5, s, model=m) for m in ({}, last) for s in (0, 1)]
    runs += [video_record("joint", 4, 0.9, seed) for seed in (0, 1)]
    runs += [video_record("spatial", 4, 0.7, seed, model=last) for seed in (0, 1)]  # the plain one
    runs += [video_record("spatial", 4, 0.6, seed, model=starts[0]) for seed in (0, 1)]
    runs += [video_record("spatial", 4, 0.4 + seed, seed, model=starts[1]) for seed in (0, 1)]
    text = variants_finding("Four", "Top-1", runs, "test", "accuracy")
    assert text == (
        "**Four, other memories: a gain is shown.** Top-1: `spatial (readout last, forget_bias 5)` "
        "less `frames (readout last)` +40.0 ± 635.3 and `spatial (scope depth)` less `frames` "
        "+10.0 ± 0.0."
    )
    assert "- **Actions, T = 4, other memories: a gain" in findings({"video": runs})
    assert variants_finding("Four", "Top-1", runs[:8], "test", "accuracy") == ""
    assert variants_finding("Four", "Top-1", runs[-4:], "test", "accuracy") == ""


def test_cost_is_called_linear_only_where_time_and_memory_are():
    text = cost_finding(costs())
    assert text.startswith("**Cost: linear in T, cheaper than `joint` at T = 32 and 64.**")
    assert "takes 8.0 times as long and 8.0 times the peak memory" in text
    assert "2.0, 2.0 and 2.0 times the step time of `frames`" in text
    assert "2.0, 0.5 and 0.2 times that of `joint`" in text
    assert "1.0, 0.2 and 0.1 times the peak memory of `joint`" in text
    hungry = costs()
    for run in hungry:
        if run["method"] == "spatial" and run["facts"]["frames"] == 64:
            run["peak_memory_bytes"] = 11 * GIB
    assert "**Cost: more than linear in T" in cost_finding(hungry)
    dear = [
        run | {"step_ms": 100.0 * run["step_ms"]} for run in costs() if run["method"] == "spatial"
    ]
    dear += [run for run in costs() if run["method"] != "spatial"]
    assert "**Cost: linear in T, never below `joint`.**" in cost_finding(dear)


@pytest.mark.parametrize(
    ("ms", "said"),
    [
        (24.0, "within the mark of 5 times, and the aim"),
        (49.0, "within the mark of 5 times, above the aim"),
        (51.0, "beyond the mark of 5 times, above the aim"),
    ],
)
def test_the_published_shape_is_held_against_mark_and_aim(ms, said):
    runs = [video_record("frames", 8, 0.5), video_record("spatial", 8, 0.5, step_ms=ms)]
    runs.append(video_record("spatial", 8, 0.5, step_ms=15.0, model={"scope": "depth"}))
    text = published_finding(runs)
    assert f"{ms / 10:.2f} times `frames`** ({ms:.2f} against 10.00 ms), {said}" in text
    assert "`spatial (scope depth)` 1.50" in text


def test_what_cannot_be_compared_is_not_spoken_of():
    assert findings({"images": [image_record("base", 19.0)], "cost": costs()[:3]}) == ""
    apart = [video_record("frames", 8, 0.5, 0), video_record("spatial", 8, 0.5, 1)]
    assert findings({"video": apart}) == ""


def test_clips_that_are_planned_and_not_run_are_named():
    text = findings({"video": [video_record("frames", 8, 0.5)]}, [8, 32, 64, 32])
    assert text == "- Accuracy at T = 32 and 64: not run yet.\n"


def test_the_committed_page_says_what_the_committed_records_say(tmp_path):
    page = (ROOT / "docs" / "vision.md").read_text(encoding="utf-8")
    texts = blocks(ROOT / "results" / "vision", tmp_path)
    assert set(texts) == {
        "findings", "reconstruction", "actions", "missing", "cost", "cost-published",
    }  # fmt: skip
    for name, text in texts.items():
        assert f"<!-- {name} -->\n\n{text}\n<!-- /{name} -->" in page, name


def test_what_the_page_says_in_short_is_so_in_the_records():
    page = (ROOT / "docs" / "vision.md").read_text(encoding="utf-8")
    assert "In short: on these small sets no gain from the memory is shown" in page
    folder = ROOT / "results" / "vision"
    found = {kind: read_results([folder / kind]) for kind in ("images", "video", "cost")}
    said = findings(found)
    assert "no gain is shown" in said
    assert "no robustness from the memory is shown" in said
    assert "a gain is shown" not in said
    assert "a robustness from the memory is shown" not in said
    assert "never below `joint`" in said
    lost = {  # points of top-1 with a quarter of 8 frames missing
        method: estimate([100 * (r["test"]["test@missing=2"]["accuracy"] - whole(r)) for r in runs])
        for method, runs in grouped([r for r in found["video"] if r["facts"]["frames"] == 8])
    }
    assert lost["joint"].mean + lost["joint"].half_width < 0
    assert max(abs(lost[method].mean) for method in ("frames", "wide", "registers", "spatial")) < 2


def test_what_the_page_says_of_the_last_frame_alone_is_so_in_the_records():
    found = read_results([ROOT / "results" / "vision" / "video"])
    read, started = {run["method"]: {} for run in found}, []
    for run in found:
        model = run["config"]["model"]
        if model["readout"] == "last" and model["memory"]["forget_bias"] == 0:
            read[run["method"]][run["seed"]] = run
        elif model["readout"] == "last":
            started.append(run)
    joint, memory = read["joint"], read["spatial"]
    more = estimate([100 * (whole(joint[seed]) - whole(memory[seed])) for seed in (0, 1, 2)])
    page = " ".join((ROOT / "docs" / "vision.md").read_text(encoding="utf-8").split())
    assert f"has {more.mean:.1f} ± {more.half_width:.1f} points more than the memory" in page
    assert "with that frame blank the memory's model gives every clip the same class" in page
    assert {blank(run) for run in memory.values()} == {43 / 341}  # clips of one of the nine classes
    assert "a head that sees nothing has 12.6," in page
    shown = [estimate_text(estimate(map(of, started)), "accuracy") for of in (blank, whole)]
    assert f"three seeds do not show: {shown[0]} with that frame blank" in page
    found_blank = estimate(map(blank, started))
    assert abs(found_blank.mean - 43 / 341) < found_blank.half_width
    frames, all_frames = (
        estimate_text(estimate(map(whole, read[method].values())), "accuracy").removesuffix(" %")
        for method in ("frames", "joint")
    )
    assert f"{shown[1]} with it, where `frames` has {frames} and attention over all frames" in page
    assert f"attention over all frames {all_frames}." in page


def blank(run):
    return run["test"]["test@last=1"]["accuracy"]


def whole(run):
    return run["test"]["test"]["accuracy"]


def test_a_verdict_of_one_seed_shows_nothing():
    runs = [image_record("base", 19.0), image_record("spatial", 25.0)]
    assert "no gain is shown" in reconstruction_finding(runs)
    assert verdict([]) == "no gain is shown"
