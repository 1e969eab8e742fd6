"""The remembered world as a picture: a walk, and what each run answers when asked everywhere.

    python lab/studies/world_pictures.py RUN RUN … --output world.png

RUN is the folder of a finished run of `world` that kept its checkpoints and was trained with
--task.elsewhere 0.5: others have never been asked for a place far from the agent. All runs walk the
same way over the same image of the test split. After 32, 128 and 1,024 glimpses each is asked for
the patch at every place of a raster, one question at a time, so that no question changes what is
remembered.

Needs: pip install tensor-memory-lab
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tensor_memory_lab.files import write_whole
from tensor_memory_lab.models.world import WorldModel
from tensor_memory_lab.tasks.images import from_patches
from tensor_memory_lab.tasks.world import World
from tensor_memory_lab.train import load_run

AFTER = (32, 128, 1024)
"""Glimpses after which runs are asked."""
AT_ONCE = 16
"""Questions asked in one call, each after the whole walk."""
GAP, TITLE = 4, 14
"""Pixels between pictures, and above them for names."""
UNSEEN = 0.5
"""Shade of what has not been seen."""


def long_walk(task: World, image: int, glimpses: int) -> tuple[Tensor, Tensor]:
    """Poses and patches (T, …) of walk number `image` of the test split, with so many glimpses."""
    config = replace(task.config, glimpses=glimpses, tests=("test",), drift=0.0, change=False)
    batch = World(config, 0, task.images).batch("test", image, 1)
    return batch["poses"][0], batch["seen"][0]


@torch.no_grad()
def answers(model: WorldModel, poses: Tensor, seen: Tensor, *, side: int, patch: int) -> Tensor:
    """What a model expects everywhere after a walk (T, …): an image (3, side, side) in [0, 1]."""
    across = side // patch
    line = torch.linspace(-1, 1, across, device=poses.device)
    y, x = torch.meshgrid(line, line, indexing="ij")
    questions = torch.stack([x, y], dim=-1).view(-1, 1, 2)
    found = []
    for asked in questions.split(AT_ONCE):
        walks = poses.expand(len(asked), -1, -1)
        blank = seen.new_zeros(len(asked), 1, seen.shape[-1])
        batch = {
            "poses": torch.cat([walks, asked], dim=1),
            "seen": torch.cat([seen.expand(len(asked), -1, -1), blank], dim=1),
        }
        found.append(model(batch)[0]["patches"][:, -1].float())
    patches = torch.cat(found)[None]
    return (from_patches(patches, patch, side, side)[0] / 2 + 0.5).clamp(0, 1)


def seen_so_far(image: Tensor, poses: Tensor, patch: int) -> Tensor:
    """An image (3, side, side) with what no glimpse of a walk has shown in grey."""
    side = image.shape[-1]
    line = torch.arange(side, device=image.device) - (side - 1) / 2
    near = ((poses * (side - patch) / 2)[:, :, None] - line).abs() <= patch / 2  # (T, 2, side)
    shown = (near[:, 1, :, None] & near[:, 0, None]).any(0)
    return torch.where(shown, image, UNSEEN)


def columns(
    task: World, models: Mapping[str, WorldModel], image: int, after: Sequence[int]
) -> tuple[Tensor, Tensor, dict[str, list[Tensor]]]:
    """The image, the poses of the walk, and per row of the picture an image for each of `after`."""
    c = task.config
    poses, seen = long_walk(task, image, max(after))
    whole = whole_image(task, image)
    rows = {"seen so far": [seen_so_far(whole, poses[:n], c.patch) for n in after]}
    for name, model in models.items():
        model.eval()
        size = {"side": c.side, "patch": c.patch}
        rows[name] = [answers(model, poses[:n], seen[:n], **size) for n in after]
    return whole, poses, rows


def whole_image(task: World, image: int) -> Tensor:
    """The image of walk number `image` of the test split: (3, side, side) in [0, 1]."""
    return task.pixels("test", range(image, image + 1))[0] / 2 + 0.5


def picture(
    whole: Tensor,
    poses: Tensor,
    rows: Mapping[str, Sequence[Tensor]],
    *,
    after: Sequence[int],
    patch: int,
    scale: int = 2,
) -> Any:
    """The image with the walk on it, then the rows under each other, as a Pillow image."""
    from PIL import Image, ImageDraw

    def tile(image: Tensor) -> Any:
        data = (image * 255).round().byte().permute(1, 2, 0).cpu().numpy()
        size = (scale * data.shape[1], scale * data.shape[0])
        return Image.fromarray(data).resize(size, Image.Resampling.NEAREST)

    side = scale * whole.shape[-1]
    step = side + GAP
    size = (len(after) * step - GAP, (len(rows) + 1) * (step + TITLE) - GAP)
    page = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(page)
    centres = ((poses * (1 - patch / whole.shape[-1]) + 1) / 2 * side).tolist()
    for column, n in enumerate(after):
        left = column * step
        draw.text((left, 0), f"{n:,} glimpses", fill="black")
        walked = tile(whole)
        ImageDraw.Draw(walked).line([tuple(at) for at in centres[:n]], fill="red", width=1)
        page.paste(walked, (left, TITLE))
    for row, (name, images) in enumerate(rows.items(), start=1):
        top = row * (step + TITLE)
        draw.text((0, top), name, fill="black")
        for column, image in enumerate(images):
            page.paste(tile(image), (column * step, top + TITLE))
    return page


def load_runs(folders: Sequence[Path]) -> tuple[World, dict[str, WorldModel]]:
    """The one world of all these runs, and their models by method."""
    task: World | None = None
    models: dict[str, WorldModel] = {}
    for folder in folders:
        config, found, model = load_run(folder)
        if not isinstance(found, World) or not isinstance(model, WorldModel):
            raise ValueError(f"{folder}: expected a run of world, got one of {found.name}")
        task = task or found
        if (found.config.side, found.config.patch) != (task.config.side, task.config.patch):
            raise ValueError(
                f"{folder}: expected images and patches as of {folders[0]}, got others"
            )
        if config.model.method in models:
            raise ValueError(
                f"{folder}: expected runs of different methods, got {config.model.method} again"
            )
        models[config.model.method] = model
    assert task is not None
    return task, models


def main(argv: Sequence[str] | None = None) -> int:
    """Draw what runs remember of a walk."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--output", type=Path, default=Path("world.png"))
    parser.add_argument("--image", type=int, default=0, help="which walk of the test split")
    parser.add_argument("--after", type=int, nargs="+", default=AFTER, help="glimpses to ask after")
    parser.add_argument("--scale", type=int, default=2, help="enlarge pixels so many times")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(argv)
    if options.scale < 1 or min(options.after) < 1 or options.image < 0:
        parser.error("expected --scale and --after of 1 or more, --image of 0 or more")
    try:
        options.output.parent.mkdir(parents=True, exist_ok=True)  # before the models run
        task, models = load_runs(options.runs)
        task = task.to(torch.device(options.device))
        models = {name: model.to(options.device) for name, model in models.items()}
        whole, poses, rows = columns(task, models, options.image, options.after)
        patch = task.config.patch
        page = picture(whole, poses, rows, after=options.after, patch=patch, scale=options.scale)
        write_whole(options.output, lambda at: page.save(at, format="PNG", optimize=True))
    except (ValueError, OSError, IndexError) as error:  # a run of another kind, or none
        parser.error(str(error))
    print(f"{options.output}: {', '.join(rows)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
