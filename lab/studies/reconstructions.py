"""Reconstructions as a figure: what a run is shown, what each makes of it, the photo.

    python lab/studies/reconstructions.py RUN RUN … --output docs/images

RUN is the folder of a finished run that kept its checkpoints. Every run is shown the same images
under the same masks. The figure is drawn twice, on white and on dark.

Needs: pip install tensor-memory-lab
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from tensor_memory_lab.files import write_whole
from tensor_memory_lab.models import Model
from tensor_memory_lab.records.figure import WIDTH, Theme, style
from tensor_memory_lab.tasks.masked_images import MaskedImages, compose
from tensor_memory_lab.train import load_run

GAP, TITLE = 0.04, 0.2
"""Inches between pictures, and above them for names."""
HIDDEN = 0.5
"""Shade of a hidden patch."""


@torch.no_grad()
def reconstruct(
    task: MaskedImages, models: Mapping[str, Model], *, split: str = "test@75%", rows: int = 3
) -> dict[str, Tensor]:
    """Columns of pictures (rows, 3, H, W) in [0, 1]: shown, one per model, photo.

    Visible patches are those of the photo; only hidden ones are a model's. The images are spread
    over the split, whose neighbours are of one class.
    """
    there = task.batches(split, 1)
    if not 1 <= rows <= there:
        raise ValueError(f"--rows: expected 1 to {there}, the images of {split}, got {rows}")
    every = there // rows
    chosen = [task.batch(split, every * row, 1) for row in range(rows)]
    batch = {name: torch.cat([one[name] for one in chosen]) for name in chosen[0]}
    target, hidden = task.images(batch["patches"]), task.hidden(batch["visible"])
    columns = {"shown": torch.where(hidden[:, None], HIDDEN, target)}
    for name, model in models.items():
        outputs, _ = model.eval()(batch)
        columns[name] = compose(task.images(outputs["patches"].float()), target, hidden)
    return columns | {"photo": target}


def draw(columns: Mapping[str, Tensor], path: Path, theme: Theme) -> None:
    """The columns side by side under their names."""
    import matplotlib
    from matplotlib.figure import Figure

    rows = len(next(iter(columns.values())))
    side = (WIDTH + GAP) / len(columns) - GAP
    height = TITLE + rows * (side + GAP) - GAP
    with matplotlib.rc_context(style(theme)):
        figure = Figure(figsize=(WIDTH, height))
        for number, (name, pictures) in enumerate(columns.items()):
            left = number * (side + GAP)
            figure.text(left / WIDTH, 1 - 0.04 / height, name, va="top")
            for row, picture in enumerate(pictures.clamp(0, 1).cpu()):
                bottom = (rows - 1 - row) * (side + GAP)
                box = (left / WIDTH, bottom / height, side / WIDTH, side / height)
                axis = figure.add_axes(box)
                axis.imshow(picture.permute(1, 2, 0).numpy())
                axis.axis("off")
        write_whole(path, lambda at: figure.savefig(at, format="png", dpi=150))


def main(argv: Sequence[str] | None = None) -> int:
    """Draw what runs make of the same masked images."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, help="folders of runs")
    folder = "folder of the figure, light and dark (default docs/images)"
    add("--output", type=Path, default=Path("docs/images"), help=folder)
    add("--split", default="test@75%", help="which test split (default test@75%%)")
    add("--rows", type=int, default=3, help="images to show (default 3)")
    options = parser.parse_args(argv)
    try:
        options.output.mkdir(parents=True, exist_ok=True)  # before the models run
        task, models = load_runs(options.runs)
        columns = reconstruct(task, models, split=options.split, rows=options.rows)
        for theme in get_args(Theme):
            draw(columns, options.output / f"vision-reconstructions-{theme}.png", theme)
    except (ValueError, OSError) as error:  # a run of another kind, or none
        parser.error(str(error))
    print(f"{options.output}: {', '.join(columns)}")
    return 0


def load_runs(folders: Sequence[Path]) -> tuple[MaskedImages, dict[str, Model]]:
    """The one task of all these runs, and their models by method."""
    task: MaskedImages | None = None
    models: dict[str, Model] = {}
    for folder in folders:
        config, found, model = load_run(folder)
        if not isinstance(found, MaskedImages):
            raise ValueError(
                f"{folder}: expected a run of masked reconstruction, got one of {found.name}"
            )
        if task is not None and found.config != task.config:
            raise ValueError(f"{folder}: expected the task of {folders[0]}, got another")
        task = task or found
        name = config.model.method
        labels = ", ".join(f"{key} {value}" for key, value in model.labels().items())
        name = f"{name} ({labels})" if name in models and labels else name
        if name in models:
            raise ValueError(
                f"{folder}: expected runs that differ in more than their seed, got {name} again"
            )
        models[name] = model
    assert task is not None
    return task, models


if __name__ == "__main__":
    raise SystemExit(main())
