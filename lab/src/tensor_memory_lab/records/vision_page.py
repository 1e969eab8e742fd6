"""The tables and figures of docs/vision.md, made from the records of runs.

    python -m tensor_memory_lab.records.vision_page results/vision docs/vision.md

The folder holds `images`, `video`, `cost` and `cost-published`: runs of masked reconstruction, runs
of action recognition, and short runs alone on their device that tell time and memory. What stands
between `<!-- NAME -->` and `<!-- /NAME -->` of the page is replaced; a table without records stays
as it is. Rows that the plans in `grids`, two folders up, hold and no record answers say so.
`images/reconstructions.png`, where it is there, is shown under the table.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensor_memory_lab.models.image import ImageModelConfig
from tensor_memory_lab.models.video import VideoModelConfig
from tensor_memory_lab.records.intervals import estimate
from tensor_memory_lab.records.pages import fill_page
from tensor_memory_lab.records.planned import NOT_RUN
from tensor_memory_lab.records.records import read_finished
from tensor_memory_lab.records.tables import Table, markdown
from tensor_memory_lab.records.vision_figures import draw_cost, draw_missing
from tensor_memory_lab.records.vision_findings import findings
from tensor_memory_lab.records.vision_gains import gains, summary
from tensor_memory_lab.records.vision_runs import (
    Record,
    by_frames,
    lengths,
    measured_alone,
    peak,
    planned_runs,
    rows,
)
from tensor_memory_lab.records.wording import bytes_text, estimate_text, listing


def reconstruction_table(records: Sequence[Record], planned: Sequence[Record] = ()) -> Table:
    """PSNR and SSIM over hidden patches by mask ratio, and the published metric beside zero."""
    splits = list(records[0]["test"])
    table = []
    for row in rows([*records, *planned]):
        line = {"method": row.label, "parameters": _parameters(row.runs), "seeds": row.seeds}
        line |= {f"PSNR {_at(s)}": _text(row.runs, s, "psnr") for s in splits}
        line |= {f"SSIM {_at(s)}": _text(row.runs, s, "ssim") for s in splits}
        line |= {f"published metric {_at(s)}": _text(row.runs, s, "published_psnr") for s in splits}
        table.append(line)
    some = list(records)[:1]  # what knows nothing is the same in every run
    nothing = {"method": "*mean of the visible pixels*", "parameters": "0", "seeds": "–"}
    zero = {"method": "*zero in every patch*", "parameters": "0", "seeds": "–"}
    for split in splits:
        for title, measure in (("PSNR", "psnr"), ("SSIM", "ssim")):
            nothing[f"{title} {_at(split)}"] = _text(some, split, f"{measure}_mean_of_visible")
            zero[f"{title} {_at(split)}"] = "–"
        heading = f"published metric {_at(split)}"
        nothing[heading] = _text(some, split, "published_psnr_mean_of_visible")
        zero[heading] = _text(some, split, "published_psnr_zero")
    columns = list(table[0])
    return table + [{name: line[name] for name in columns} for line in (nothing, zero)]


def action_table(records: Sequence[Record], planned: Sequence[Record] = ()) -> Table:
    """Top-1 and top-5 by T and method; what the memory's rows lose with the memory off."""
    table = []
    for frames, part in by_frames([*records, *planned]).items():
        for row in rows(part):
            table.append(
                {
                    "T": str(frames),
                    "method": row.label,
                    "parameters": _parameters(row.runs),
                    "carried": bytes_text(row.runs[0]["state_bytes"]) if row.runs else "–",
                    "seeds": row.seeds,
                    "top-1": _text(row.runs, "test", "accuracy"),
                    "top-5": _text(row.runs, "test", "top5"),
                    "top-1, memory off": _without_memory(row.runs),
                }
            )
    return table


def missing_table(records: Sequence[Record]) -> Table:
    """Top-1 with frames missing somewhere, at the end, and with a region missing."""
    table = []
    for frames, part in by_frames(records).items():
        splits = list(part[0]["test"])
        for row in rows(part):
            line = {"T": str(frames), "method": row.label}
            for split in splits:
                line[_heading(split, frames)] = _text(row.runs, split, "accuracy")
            table.append(line)
    return _same_columns(table)


def reconstruction_gains(records: Sequence[Record]) -> str:
    """What the memory adds to PSNR and SSIM, in a sentence and a table."""
    splits = list(records[0]["test"])
    columns = {f"PSNR {_at(s)}": (s, "psnr") for s in splits}
    columns |= {f"SSIM {_at(s)}": (s, "ssim") for s in splits}
    return _gains_text(gains(records, columns))


def action_gains(records: Sequence[Record]) -> str:
    """What the memory adds to top-1, on whole clips and with half of the frames missing."""
    table: Table = []
    for frames, part in by_frames(records).items():
        halves = [f"test@missing={frames // 2}", f"test@last={frames // 2}"]
        splits = [s for s in part[0]["test"] if s in ("test", *halves) or "region" in s]
        columns = {_heading(split, frames): (split, "accuracy") for split in splits}
        table += [{"T": str(frames)} | line for line in gains(part, columns)]
    return _gains_text(table, " to top-1, in points")


def cost_table(
    records: Sequence[Record], planned: Sequence[Record] = (), *, growths: bool = True
) -> Table:
    """Step time and peak memory by T, of runs alone on their device, and how much of `frames`.

    `growth` is d log(ms) / d log(T) between the two longest: 1 is linear, 2 quadratic.
    """
    methods = measured_alone(records)
    table = []
    for label, wanted in lengths(records, planned).items():
        line, found = {"method": label}, methods.get(label, {})
        for frames in wanted:
            line[f"T = {frames}"] = _cost(found.get(frames), methods.get("frames", {}).get(frames))
        if growths:
            line["growth of time"] = growth(found, lambda record: record["step_ms"])
            line["growth of memory"] = growth(found, peak)
        table.append(line)
    return _same_columns(table)


def growth(found: Mapping[int, Record], value: Callable[[Record], float]) -> str:
    """The power of T by which a cost grows between the two largest T measured."""
    if len(found) < 2:
        return "–"
    short, long = sorted(found)[-2:]
    first, second = value(found[short]), value(found[long])
    if first <= 0 or second <= 0:
        return "–"
    return f"T^{math.log(second / first) / math.log(long / short):.2f}"


def _cost(record: Record | None, reference: Record | None) -> str:
    if record is None:
        return NOT_RUN
    times = f" ({record['step_ms'] / reference['step_ms']:.1f}×)" if reference else ""
    return f"{record['step_ms']:.1f} ms{times}, {bytes_text(peak(record))}"


def caption(records: Sequence[Record]) -> str:
    """Task, decoder of videos, seeds, hardware and commits of a table."""
    tasks = sorted({record["task"].partition(" ")[0] for record in records})
    seeds = sorted({record["seed"] for record in records})
    gpus = {record["hardware"]["gpu"] or record["hardware"]["cpu"] for record in records}
    commits = {(record["commit"] or "unknown")[:10] for record in records}
    decoders = sorted({f["decoder"] for f in (r["facts"] for r in records) if "decoder" in f})
    shown = f"seeds {listing(seeds)}, mean ± half of the 95 % interval"
    return (
        f"{listing(tasks)}{f', decoded with {listing(decoders)}' if decoders else ''}; "
        f"{shown if len(seeds) > 1 else f'seed {seeds[0]}'}; {listing(sorted(gpus))}; "
        f"commit {listing(sorted(commits))}.\n"
    )


def blocks(folder: Path, figures: Path) -> dict[str, str]:
    """Markdown by the name of its place in the page, of what there are records for."""
    plans = folder.parent.parent / "grids"
    kinds = ("images", "video", "cost", "cost-published")
    found = {kind: read_finished(folder / kind) for kind in kinds}
    texts: dict[str, str] = {}
    if images := found.get("images"):
        planned = _planned(plans, "vision-images*.toml", ImageModelConfig())
        text = markdown(reconstruction_table(images, planned)) + "\n" + caption(images)
        texts["reconstruction"] = text + reconstruction_gains(images) + _picture(folder, figures)
    if video := found.get("video"):
        planned = _planned(plans, "vision-actions*.toml", VideoModelConfig(), frames=8)
        text = markdown(action_table(video, planned)) + "\n" + caption(video)
        texts["actions"] = text + action_gains(video)
        files = draw_missing(video, figures / "vision-missing")
        shown = f"![Top-1 against the number of missing frames](images/{files[0].name})\n"
        texts["missing"] = shown + "\n" + markdown(missing_table(video)) + "\n" + caption(video)
    if (cost := found.get("cost")) and measured_alone(cost):
        files = draw_cost(cost, figures / "vision-cost")
        shown = f"![Step time and peak memory against T](images/{files[0].name})\n"
        planned = _planned(plans, "vision-cost.toml", VideoModelConfig(), frames=8)
        table = markdown(cost_table(cost, planned))
        texts["cost"] = shown + "\n" + table + "\n" + caption(cost)
    if (published := found.get("cost-published")) and measured_alone(published):
        planned = _planned(plans, "vision-cost-published.toml", VideoModelConfig(), frames=8)
        table = markdown(cost_table(published, planned, growths=False))
        texts["cost-published"] = table + "\n" + caption(published)
    planned = _planned(plans, "vision-actions*.toml", VideoModelConfig(), frames=8)
    if text := findings(found, [run["facts"]["frames"] for run in planned]):
        texts["findings"] = text
    return texts


def main(argv: Sequence[str] | None = None) -> int:
    """Fill the page from a folder of results."""
    return fill_page(
        argv,
        blocks,
        module="tensor_memory_lab.records.vision_page",
        results="images, video, cost and cost-published",
    )


def _planned(plans: Path, names: str, usual: Any, *, frames: int | None = None) -> list[Record]:
    """The runs of all plans of a kind."""
    found = sorted(plans.glob(names))
    return [run for plan in found for run in planned_runs(plan, usual, frames)]


def _picture(folder: Path, figures: Path) -> str:
    """The reconstructions, copied beside the page's other figures; nothing where there are none."""
    made = folder / "images" / "reconstructions.png"
    if not made.is_file():
        return ""
    shutil.copyfile(made, figures / "vision-reconstructions.png")
    return "\n![Input, masked, each method, target](images/vision-reconstructions.png)\n"


def _gains_text(table: Table, unit: str = "") -> str:
    if not table:
        return ""
    return (
        f"\nWhat the memory adds{unit}, paired by seed, bold where the 95 % interval leaves zero "
        f"out (by chance alone, one cell in twenty). {summary(table)}\n\n"
        f"{markdown(_same_columns(table))}"
    )


def _parameters(runs: Sequence[Record]) -> str:
    return f"{runs[0]['parameters']:,}" if runs else "–"


def _text(runs: Sequence[Record], split: str, measure: str) -> str:
    if not runs:
        return NOT_RUN
    found = [run["test"].get(split, {}).get(measure) for run in runs]
    if all(value is None for value in found):
        return "–"
    return estimate_text(estimate(found), measure)


def _without_memory(runs: Sequence[Record]) -> str:
    found = [
        run["memory"]["test_without_memory"]["test"]["accuracy"]
        for run in runs
        if run.get("memory") and run["memory"].get("test_without_memory")
    ]
    return estimate_text(estimate(found), "accuracy") if found else "–"


def _same_columns(table: Table) -> Table:
    columns = dict.fromkeys(name for line in table for name in line)
    last = [name for name in columns if name.startswith("growth")]
    ordered = [name for name in columns if name not in last] + last
    return [{name: line.get(name, "–") for name in ordered} for line in table]


def _heading(split: str, frames: int) -> str:
    """`missing=4` of 8 as a part, so that clips of different length share a column."""
    kind, _, count = split.removeprefix("test@").partition("=")
    if split == "test":
        return "whole"
    if not count.isdigit():
        return split.removeprefix("test@")
    return f"{'somewhere' if kind == 'missing' else 'at the end'}: {100 * int(count) / frames:g} %"


def _at(split: str) -> str:
    return split.removeprefix("test@")


if __name__ == "__main__":
    raise SystemExit(main())
