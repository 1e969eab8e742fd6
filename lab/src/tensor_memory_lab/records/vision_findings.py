"""What the runs of docs/vision.md show, in sentences made from their records.

A sentence says "is shown" of a difference whose 95 % interval leaves zero out, and of nothing else.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence

from tensor_memory_lab.records.intervals import Estimate, estimate
from tensor_memory_lab.records.paired import difference_text
from tensor_memory_lab.records.rows import grouped
from tensor_memory_lab.records.vision_gains import MEMORY, alike, baselines
from tensor_memory_lab.records.vision_runs import (
    Record,
    by_frames,
    measured_alone,
    peak,
)
from tensor_memory_lab.records.wording import estimate_text, listing

MARK, AIM = 5.0, 2.5
"""Step time in times of `frames` that the published shape must stay within, and should."""

Runs = Mapping[int, Record]
"""One method's runs by seed."""


def findings(found: Mapping[str, Sequence[Record]], planned: Sequence[int] = ()) -> str:
    """A list of what was found, by kinds of runs; `planned` are the T there will be in the end."""
    lines = []
    if images := found.get("images"):
        *_, split = images[0]["test"]
        heading = f"PSNR with {_hidden(split)} % hidden, in dB"
        lines += [
            reconstruction_finding(images),
            variants_finding("Masked birds", heading, images, split, "psnr"),
        ]
    if video := found.get("video"):
        lengths = by_frames(video)
        for frames, part in lengths.items():
            lines += [
                action_finding(frames, part),
                missing_finding(frames, part),
                last_frame_finding(frames, part),
                variants_finding(
                    f"Actions, T = {frames}", "Top-1, in points", part, "test", "accuracy"
                ),
            ]
        if later := [str(frames) for frames in sorted(set(planned)) if frames not in lengths]:
            lines.append(f"Accuracy at T = {listing(later)}: not run yet.")
    if cost := found.get("cost"):
        lines.append(cost_finding(cost))
    if published := found.get("cost-published"):
        lines.append(published_finding(published))
    return "".join(f"{_wrapped(line)}\n" for line in lines if line)


def reconstruction_finding(records: Sequence[Record]) -> str:
    """`spatial` against `base` by ratio, the spread of all methods, and what the memory is used."""
    methods = _methods(records)
    if not _comparable(methods, "base"):
        return ""
    splits = list(records[0]["test"])
    with_memory, base = methods[MEMORY], methods["base"]
    gains = [_paired(with_memory, base, _measure(split, "psnr")) for split in splits]
    spread = max(_spread(methods, _measure(split, "psnr")) for split in splits)
    text = (
        f"**Masked birds: {verdict(gains)}.** `spatial` less `base` in PSNR: "
        f"{listing([_plain(gain, 'psnr') for gain in gains])} dB at "
        f"{listing([_hidden(split) for split in splits])} % hidden; "
        f"the means of all {len(methods)} methods lie within {spread:.2f} dB of each other."
    )
    uses = [_use(with_memory, split, "psnr") for split in splits]
    known = [use for use in uses if use is not None]
    if known:
        most = max(known, key=lambda use: abs(use.mean))
        text += (
            f" Switching the memory of the trained model off changes PSNR by at most "
            f"{abs(most.mean):.3f} dB."
        )
    return text


def action_finding(frames: int, records: Sequence[Record]) -> str:
    """Top-1 of every method, `spatial` against `frames`, and how little such runs can tell."""
    methods = _methods(records)
    if not _comparable(methods, "frames"):
        return ""
    gain, text = _top1(f"Actions, T = {frames}", methods)
    use = _use(methods[MEMORY], "test", "accuracy")
    if use is not None:
        text += f" What the memory of the trained model adds: {_plain(use, 'accuracy')} points."
    clips = records[0]["facts"].get("clips")
    if clips and gain.half_width is not None:
        text += (
            f" {gain.count} seeds with {clips['train']} training and {clips['test']} test clips "
            f"are a coarse measure: a difference below {100 * gain.half_width:.0f} points would "
            "not show."
        )
    return text


def missing_finding(frames: int, records: Sequence[Record]) -> str:
    """What memory, `frames` and `joint` lose with a quarter and with half of the frames missing."""
    methods = {m: runs for m, runs in _methods(records).items() if m in ("joint", "frames", MEMORY)}
    parts = [(f"test@missing={frames // 4}", "a quarter"), (f"test@missing={frames // 2}", "half")]
    parts = [(split, part) for split, part in parts if split in records[0]["test"]]
    if not _comparable(methods, "frames") or not parts:
        return ""
    losses, kept = [], []
    for split, part in parts:
        lost = _change(split)
        changes = [
            f"`{method}` {_plain(estimate([lost(run) for run in runs.values()]), 'accuracy')}"
            for method, runs in methods.items()
        ]
        losses.append(f"{part} of the frames missing somewhere: {listing(changes)}")
        kept.append(_paired(methods[MEMORY], methods["frames"], lost))
    shown = verdict(kept).replace("gain", "robustness from the memory")
    return (
        f"**Missing frames, T = {frames}: {shown}.** Points of top-1 against the whole clip, with "
        f"{'; with '.join(losses)}. Change of `spatial` less that of `frames`: "
        f"{listing([_plain(one, 'accuracy') for one in kept])}."
    )


def last_frame_finding(frames: int, records: Sequence[Record]) -> str:
    """What is carried to a head that sees the last frame alone, and what is left without it."""
    methods = _methods(records, " (readout last)")
    if not _comparable(methods, "frames"):
        return ""
    _, text = _top1(f"Only the last frame read, T = {frames}", methods)
    if (blank := "test@last=1") in records[0]["test"]:
        text += (
            " With that frame blank, so that all there is comes from what was carried or attended "
            f"to: {_means(methods, _measure(blank, 'accuracy'))}."
        )
    return text


def variants_finding(
    title: str, heading: str, records: Sequence[Record], split: str, measure: str
) -> str:
    """Memories that are not the plain one, each against what carries nothing beside it."""
    rows = dict(grouped(records))
    told, gains = [], []
    for label, runs in rows.items():
        if runs[0]["method"] != MEMORY or alike(label, rows):
            continue
        for other, against in baselines(label, rows).items():
            ours, theirs = _by_seed(runs), _by_seed(against)
            if set(ours) & set(theirs):
                gains.append(_paired(ours, theirs, _measure(split, measure)))
                told.append(f"`{label}` less `{other}` {_plain(gains[-1], measure)}")
    if not gains:
        return ""
    return f"**{title}, other memories: {verdict(gains)}.** {heading}: {listing(told)}."


def cost_finding(records: Sequence[Record]) -> str:
    """How time and memory grow with T, and how many times `frames` and `joint` at each T."""
    methods = measured_alone(records)
    if not {MEMORY, "frames", "joint"} <= set(methods):
        return ""
    lengths = sorted(set.intersection(*(set(methods[m]) for m in (MEMORY, "frames", "joint"))))
    if len(lengths) < 2:
        return ""
    memory, joint = methods[MEMORY], methods["joint"]
    short, long = lengths[0], lengths[-1]
    time = memory[long]["step_ms"] / memory[short]["step_ms"]
    space = peak(memory[long]) / max(peak(memory[short]), 1)
    # A tenth over proportional is what a clock and an allocator may add.
    grows = "linear in T" if max(time, space) <= 1.1 * long / short else "more than linear in T"
    cheaper = [t for t in lengths if memory[t]["step_ms"] < joint[t]["step_ms"]]
    against = (
        f"cheaper than `joint` at T = {listing(cheaper)}" if cheaper else "never below `joint`"
    )
    over = {
        other: listing([_times(memory[t], methods[other][t]) for t in lengths])
        for other in ("frames", "joint")
    }
    held = listing([f"{peak(memory[t]) / max(peak(joint[t]), 1):.1f}" for t in lengths])
    return (
        f"**Cost: {grows}, {against}.** From T = {short} to {long}, {long / short:g} times the "
        f"frames, a step with the memory takes {time:.1f} times as long and {space:.1f} times the "
        f"peak memory, one of `joint` {joint[long]['step_ms'] / joint[short]['step_ms']:.1f} times "
        f"as long. At T = {listing(lengths)} the memory takes {over['frames']} times the step time "
        f"of `frames`, {over['joint']} times that of `joint`, and {held} times the peak memory of "
        "`joint`."
    )


def published_finding(records: Sequence[Record]) -> str:
    """The step time at the published shape against the project's mark and aim; cheaper memories."""
    methods = {label: next(iter(runs.values())) for label, runs in measured_alone(records).items()}
    if not {MEMORY, "frames"} <= set(methods):
        return ""
    frames, memory = methods["frames"]["step_ms"], methods[MEMORY]["step_ms"]
    ratio = memory / frames
    mark = "within" if ratio <= MARK else "beyond"
    aim = f"{'and' if ratio <= AIM else 'above'} the aim of {AIM:g}"
    others = [
        f"`{label}` {run['step_ms'] / frames:.2f}"
        for label, run in methods.items()
        if run["method"] == MEMORY and label != MEMORY
    ]
    text = (
        f"**Published shape: {ratio:.2f} times `frames`** ({memory:.2f} against {frames:.2f} ms), "
        f"{mark} the mark of {MARK:g} times, {aim}."
    )
    return text + (f" Times `frames` with other memories: {listing(others)}." if others else "")


def verdict(gains: Sequence[Estimate]) -> str:
    """What the intervals of differences allow to be said.

    >>> verdict([Estimate(0.1, 0.2, 3)]), verdict([Estimate(0.3, 0.2, 3), Estimate(0.1, 0.2, 3)])
    ('no gain is shown', 'a gain is shown')
    >>> verdict([Estimate(-0.3, 0.2, 3)]), verdict([Estimate(-0.3, 0.2, 3), Estimate(0.3, 0.2, 3)])
    ('a loss is shown', 'a gain is shown in some, a loss in others')
    """
    shown = [g.mean for g in gains if g.half_width is not None and abs(g.mean) > g.half_width]
    if not shown:
        return "no gain is shown"
    if min(shown) > 0:
        return "a gain is shown"
    return "a loss is shown" if max(shown) < 0 else "a gain is shown in some, a loss in others"


def _methods(records: Sequence[Record], departure: str = "") -> dict[str, Runs]:
    """Methods with this departure in their label and no other, their runs by seed."""
    return {
        runs[0]["method"]: _by_seed(runs)
        for label, runs in grouped(records)
        if label == runs[0]["method"] + departure
    }


def _by_seed(runs: Sequence[Record]) -> Runs:
    return {run["seed"]: run for run in runs}


def _comparable(methods: Mapping[str, Runs], other: str) -> bool:
    """Whether the memory and another method share a seed."""
    return bool(set(methods.get(MEMORY, {})) & set(methods.get(other, {})))


def _top1(title: str, methods: Mapping[str, Runs]) -> tuple[Estimate, str]:
    """What the memory adds to `frames`, and the sentences that say so beside every method."""
    top1 = _measure("test", "accuracy")
    gain = _paired(methods[MEMORY], methods["frames"], top1)
    return gain, (
        f"**{title}: {verdict([gain])}.** Top-1: {_means(methods, top1)}; `spatial` less "
        f"`frames`: {_plain(gain, 'accuracy')} points."
    )


def _hidden(split: str) -> str:
    """Percent of the patches that a split hides."""
    return split.removeprefix("test@").removesuffix("%")


def _measure(split: str, name: str) -> Callable[[Record], float]:
    return lambda run: run["test"][split][name]


def _means(methods: Mapping[str, Runs], value: Callable[[Record], float]) -> str:
    return listing(
        [
            f"`{name}` {estimate_text(estimate([value(run) for run in runs.values()]), 'accuracy')}"
            for name, runs in methods.items()
        ]
    )


def _change(split: str) -> Callable[[Record], float]:
    """Top-1 of a split less that of whole clips."""
    return lambda run: run["test"][split]["accuracy"] - run["test"]["test"]["accuracy"]


def _paired(runs: Runs, others: Runs, value: Callable[[Record], float]) -> Estimate:
    return estimate([value(run) - value(others[s]) for s, run in runs.items() if s in others])


def _use(runs: Runs, split: str, name: str) -> Estimate | None:
    """The measure of trained models less the same with their memory switched off."""
    off = [(run, (run.get("memory") or {}).get("test_without_memory")) for run in runs.values()]
    pairs = [(run["test"][split][name], without[split][name]) for run, without in off if without]
    return estimate([on - without for on, without in pairs]) if pairs else None


def _spread(methods: Mapping[str, Runs], value: Callable[[Record], float]) -> float:
    means = [estimate([value(run) for run in runs.values()]).mean for runs in methods.values()]
    return max(means) - min(means)


def _times(record: Record, reference: Record) -> str:
    return f"{record['step_ms'] / reference['step_ms']:.1f}"


def _plain(difference: Estimate, measure: str) -> str:
    return difference_text(difference, measure).strip("*")


def _wrapped(line: str) -> str:
    return textwrap.fill(
        f"- {line}",
        width=100,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
