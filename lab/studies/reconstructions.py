"""Reconstructions as a picture: input, masked, what each run makes of it, target.

    python lab/studies/reconstructions.py RUN RUN … --output birds.png

RUN is the folder of a finished run that kept its checkpoints. Every run is shown the same images
under the same masks.

Needs: pip install tensor-memory-lab
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tensor_memory_lab.files import write_whole
from tensor_memory_lab.models import Model
from tensor_memory_lab.tasks.masked_images import MaskedImages, compose
from tensor_memory_lab.train import load_run

GAP = 2
"""Pixels between pictures."""
HIDDEN = 0.5
"""Shade of a hidden patch."""


@torch.no_grad()
def reconstruct(
    task: MaskedImages, models: Mapping[str, Model], *, split: str = "test@75%", rows: int = 6
) -> dict[str, Tensor]:
    """Columns of pictures (rows, 3, H, W) in [0, 1]: input, masked, one per model, target.

    Visible patches are those of the input; only hidden ones are a model's. The images are spread
    over the split, whose neighbours are of one class.
    """
    there = task.batches(split, 1)
    if not 1 <= rows <= there:
        raise ValueError(f"--rows: expected 1 to {there}, the images of {split}, got {rows}")
    every = there // rows
    chosen = [task.batch(split, every * row, 1) for row in range(rows)]
    batch = {name: torch.cat([one[name] for one in chosen]) for name in chosen[0]}
    target, hidden = task.images(batch["patches"]), task.hidden(batch["visible"])
    columns = {
        "input": target,
        "masked": torch.where(hidden[:, None], HIDDEN, target),
    }
    for name, model in models.items():
        outputs, _ = model.eval()(batch)
        columns[name] = compose(task.images(outputs["patches"].float()), target, hidden)
    return columns | {"target": target}


def picture(columns: Mapping[str, Tensor], *, scale: int = 1) -> Any:
    """The columns side by side under their names, as a Pillow image."""
    from PIL import Image, ImageDraw

    tiles = {
        name: (column.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
        for name, column in columns.items()
    }
    rows, height, width, _ = next(iter(tiles.values())).shape
    height, width, title = height * scale, width * scale, 14
    size = (len(tiles) * (width + GAP) - GAP, title + rows * (height + GAP) - GAP)
    whole = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(whole)
    for column, (name, pictures) in enumerate(tiles.items()):
        left = column * (width + GAP)
        draw.text((left, 0), name, fill="black")
        for row, one in enumerate(pictures):
            tile = Image.fromarray(one).resize((width, height), Image.Resampling.NEAREST)
            whole.paste(tile, (left, title + row * (height + GAP)))
    return whole


def main(argv: Sequence[str] | None = None) -> int:
    """Draw what runs make of the same masked images."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--output", type=Path, default=Path("reconstructions.png"))
    parser.add_argument("--split", default="test@75%", help="which test split (default test@75%%)")
    parser.add_argument("--rows", type=int, default=6, help="images to show (default 6)")
    parser.add_argument("--scale", type=int, default=1, help="enlarge pixels so many times")
    options = parser.parse_args(argv)
    if options.scale < 1:
        parser.error(f"--scale: expected 1 or more, got {options.scale}")
    try:
        options.output.parent.mkdir(parents=True, exist_ok=True)  # before the models run
        task, models = load_runs(options.runs)
        columns = reconstruct(task, models, split=options.split, rows=options.rows)
        image = picture(columns, scale=options.scale)
        write_whole(options.output, lambda at: image.save(at, format="PNG", optimize=True))
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
