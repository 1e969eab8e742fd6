"""Make everything that docs/guide/inspect.md shows: train, record, draw, photograph the viewer.

    python lab/studies/gallery.py --data-dir wikitext-2   # half an hour on one CPU core
    python lab/studies/gallery.py --draw                  # a minute, from saved recordings
    python lab/studies/gallery.py --draw --walk runs/demo/memory.html   # and that of `make demo`

Models are trained only where their runs are not there yet. Without --data-dir (a folder with
train.txt, valid.txt and test.txt of WikiText-2) the model of text keeps the recording it has. The
viewer is photographed where there is a chromium and playwright to drive it.

Needs: pip install tensor-memory-lab.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
from pathlib import Path

from tensor_memory import Recording
from tensor_memory_lab.cli import main as lab
from tensor_memory_lab.commands.inspect import record_run

RECIPES = {
    "binding": "demo --model.method tensor --model.memory.forget-bias 0 --optimizer.warmup 100 "
    "--budget.steps 900 --budget.evaluate-every 50",
    "language": "language-carried --task.level byte --task.length 128 --model.method tensor-local "
    "--model.window 32 --model.dim 128 --model.layers 2 --model.heads 4 --model.dropout 0 "
    "--model.memory.grid 6 6 6 --model.memory.channels 16 --model.memory.chunk-size 8 "
    "--optimizer.lr 2e-3 --optimizer.warmup 100 --budget.steps 1500 --budget.batch-size 16 "
    "--budget.evaluate-every 500 --precision float32",
}
"""What `tensor-memory-lab run` trains."""

WINDOWS = {"binding": 1, "language": 4}
"""Windows of test data that are recorded of it, two rows each."""

FIGURES = {
    "binding": ["slices", "projection", "mask", "trajectories", "gates", "state-norm"],
    "language": ["projection", "gates", "use", "saturation"],
}
"""What is drawn of its first memory layer."""
TITLES = {"binding": "Windowed binding", "language": "Bytes of WikiText-2"}

VIEWS = {
    "binding": [("binding", (1280, 800), "#t=13"), ("phone", (390, 844), "#t=11")],
    "language": [("language", (1280, 800), "#t=40")],
    "walk": [("walk", (1280, 800), "#t=150")],
}
"""Photographs of a page: name, size of the window, the view."""


def train(name: str, folder: Path, data: Path | None) -> None:
    """Train the model where it is not trained."""
    if (folder / "result.json").exists():
        return
    where = [] if data is None else ["--task.data-dir", str(data)]
    resumed = ["--resume"] if folder.exists() else []
    arguments = [*RECIPES[name].split(), *where, *resumed, "--device", "cpu"]
    if lab(["run", *arguments, "--output", str(folder)]):
        raise SystemExit(f"{name}: stopped before the end; the same command goes on")


def photograph(name: str, images: Path, page: Path) -> None:
    """The viewer as a browser shows it, light and dark."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    if found is None or importlib.util.find_spec("playwright") is None:
        print(f"{name}: no chromium, or no playwright: the viewer is not photographed")
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        for view, (width, height), at in VIEWS[name]:
            for theme in ("light", "dark"):
                opened = browser.new_page(
                    viewport={"width": width, "height": height}, color_scheme=theme
                )
                opened.goto(page.resolve().as_uri() + at)
                opened.wait_for_timeout(500)
                opened.screenshot(path=images / f"viewer-{view}-{theme}.png")
                opened.close()
        browser.close()


def main(argv: list[str] | None = None) -> int:
    """Train, record, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    draw = "train nothing, draw from the recordings there are"
    add("--draw", action="store_true", help=draw)
    add("--data-dir", type=Path, help="folder of WikiText-2")
    runs = "trained models (default runs/gallery)"
    add("--runs", type=Path, default=Path("runs/gallery"), help=runs)
    add("--docs", type=Path, default=Path("docs"), help="recordings and pictures (default docs)")
    add("--walk", type=Path, help="a page of `make demo`, to photograph it too")
    options = parser.parse_args(argv)
    if options.data_dir is not None and not options.data_dir.is_dir():
        parser.error(f"--data-dir: expected a folder of WikiText-2, got {options.data_dir}")
    recordings, images = options.docs / "recordings", options.docs / "images" / "inspect"
    recordings.mkdir(parents=True, exist_ok=True)
    for name in RECIPES:
        data = options.data_dir if name == "language" else None
        kept = recordings / f"{name}.safetensors"
        if not options.draw and (name != "language" or data is not None):
            folder = options.runs / name
            train(name, folder, data)
            record_run(folder, rows=2, windows=WINDOWS[name], data_dir=data).save(kept)
        if kept.exists():
            recording = Recording.load(kept)
            recording.save_figures(
                images / name, layers=[0], themes=("light", "dark"), kinds=FIGURES[name]
            )
            page = options.runs / f"{name}.html"
            page.parent.mkdir(parents=True, exist_ok=True)
            recording.save_page(page, title=TITLES[name])
            photograph(name, images, page)
    if options.walk is not None:
        photograph("walk", images.parent, options.walk)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
