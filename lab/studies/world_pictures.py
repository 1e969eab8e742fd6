"""The remembered world as a picture: a walk, and what each run answers when asked everywhere.

    python lab/studies/world_pictures.py RUN RUN … --output world   # world-light.png and -dark.png

RUN is the folder of a finished run of `world` that kept its checkpoints and was trained with
--task.elsewhere 0.5: others have never been asked for a place far from the agent. All runs walk the
same way over the same image of the test split. After 32, 128 and 1,024 glimpses each is asked for
the patch at every half patch, one question at a time, so that no question changes what is
remembered; where patches overlap, the mean is shown.

Needs: pip install tensor-memory-lab
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from tensor_memory_lab.files import write_whole
from tensor_memory_lab.models.world import WorldModel
from tensor_memory_lab.records.figure import WIDTH, Theme, style
from tensor_memory_lab.tasks.world import World
from tensor_memory_lab.train import load_run

AFTER = (32, 128, 1024)
"""Glimpses after which runs are asked."""
AT_ONCE = 16
"""Questions asked in one call, each after the whole walk."""
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
    stride = patch if patch % 2 else patch // 2
    line = torch.linspace(-1, 1, (side - patch) // stride + 1, device=poses.device)
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
    patches = torch.cat(found).unflatten(-1, (patch, patch, 3)).movedim(-1, 1)
    spread = patches.flatten(1).T[None]  # (1, values, questions)
    size = {"output_size": side, "kernel_size": patch, "stride": stride}
    mean = functional.fold(spread, **size) / functional.fold(torch.ones_like(spread), **size)
    return (mean[0] / 2 + 0.5).clamp(0, 1)


def seen_so_far(image: Tensor, poses: Tensor, patch: int) -> Tensor:
    """An image (3, side, side) with what no glimpse of a walk has shown in grey."""
    side = image.shape[-1]
    line = torch.arange(side, device=image.device) - (side - 1) / 2
    near = ((poses * (side - patch) / 2)[:, :, None] - line).abs() <= patch / 2  # (T, 2, side)
    shown = (near[:, 1, :, None] & near[:, 0, None]).any(0)
    return torch.where(shown, image, UNSEEN)


def remembered(
    task: World, models: Mapping[str, WorldModel], image: int, after: Sequence[int]
) -> tuple[Tensor, Tensor, dict[str, list[Tensor]]]:
    """The image, the poses of the walk, and per column of the picture an image for each `after`."""
    c = task.config
    poses, seen = long_walk(task, image, max(after))
    whole = task.pixels("test", range(image, image + 1))[0] / 2 + 0.5  # in [0, 1]
    columns = {"seen so far": [seen_so_far(whole, poses[:n], c.patch) for n in after]}
    for name, model in models.items():
        model.eval()
        size = {"side": c.side, "patch": c.patch}
        columns[name] = [answers(model, poses[:n], seen[:n], **size) for n in after]
    return whole, poses, columns


def draw(
    whole: Tensor,
    poses: Tensor,
    columns: Mapping[str, Sequence[Tensor]],
    path: Path,
    theme: Theme,
    *,
    after: Sequence[int],
    patch: int,
) -> None:
    """The image with the walk on it, then the columns beside each other, a row for each `after`."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    side = whole.shape[-1]
    walk = ((poses * (side - patch) + side - 1) / 2).cpu().numpy()
    wide = (WIDTH - 0.2) / (len(columns) + 1)  # a row has its name at the left
    with rc_context(style(theme)):
        pads = ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02, wspace=0, hspace=0)
        figure = Figure((WIDTH, wide * len(after) + 0.25), layout=pads)
        axes = figure.subplots(len(after), len(columns) + 1, squeeze=False)
        for row, n in zip(axes, after, strict=True):
            shown = {"the walk": whole} | {
                name: images[after.index(n)] for name, images in columns.items()
            }
            for axis, (name, image) in zip(row, shown.items(), strict=True):
                axis.imshow(image.permute(1, 2, 0).cpu().numpy(), interpolation="nearest")
                axis.set(xticks=[], yticks=[], title=name if n == after[0] else None)
                axis.spines[:].set_visible(False)
            row[0].plot(*walk[:n].T, color="#D55E00", linewidth=0.7)
            row[0].set_ylabel(f"{n:,} glimpses")
        write_whole(path, lambda at: figure.savefig(at, format="png", dpi=150))


def load_runs(folders: Sequence[Path]) -> tuple[World, dict[str, WorldModel]]:
    """The one world of all these runs, and their models by method."""
    task: World | None = None
    models: dict[str, WorldModel] = {}
    for folder in folders:
        config, found, model = load_run(folder)
        if not isinstance(found, World) or not isinstance(model, WorldModel):
            raise ValueError(f"{folder}: expected a run of world, got one of {found.name}")
        if not found.config.elsewhere:
            raise ValueError(
                f"{folder}: expected a run trained for questions anywhere, got task.elsewhere 0, "
                "whose answers far from the agent mean nothing; train one with --task.elsewhere 0.5"
            )
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
    parser.add_argument(
        "--output", type=Path, default=Path("world"), help="beginning of the two files"
    )
    parser.add_argument("--image", type=int, default=0, help="which walk of the test split")
    parser.add_argument("--after", type=int, nargs="+", default=AFTER, help="glimpses to ask after")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(argv)
    if min(options.after) < 1 or options.image < 0:
        parser.error("expected --after of 1 or more, --image of 0 or more")
    try:
        options.output.parent.mkdir(parents=True, exist_ok=True)  # before the models run
        task, models = load_runs(options.runs)
        task = task.to(torch.device(options.device))
        models = {name: model.to(options.device) for name, model in models.items()}
        whole, poses, columns = remembered(task, models, options.image, options.after)
        size = {"after": options.after, "patch": task.config.patch}
        for theme in ("light", "dark"):
            path = options.output.with_name(f"{options.output.name}-{theme}.png")
            draw(whole, poses, columns, path, theme, **size)
            print(path)
    except (ValueError, OSError, IndexError) as error:  # a run of another kind, or none
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
