"""Pictures of a recording, one function each, each drawn on an axis that is given to it.

with theme():
    figure, axis = matplotlib.pyplot.subplots(layout="constrained")
    draw_state_norm(axis, recording)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tensor_memory.inspect.grid_figures import (
    draw_mask,
    draw_projection,
    draw_slices,
    nothing,
)
from tensor_memory.inspect.layer_recording import GridRecording, require_index
from tensor_memory.inspect.place_layer import PlaceLayerRecording
from tensor_memory.inspect.theme import ink, palette, theme

__all__ = [
    "draw_gates",
    "draw_mask",
    "draw_occupancy",
    "draw_projection",
    "draw_saturation",
    "draw_slices",
    "draw_state_norm",
    "draw_trajectories",
    "draw_use",
    "theme",
]

AnyLayer = GridRecording | PlaceLayerRecording

SHOWN = 24
"""Chunks whose reads and writes are drawn in space, at most; more would hide each other."""

OCCUPIED = 0.1
"""A voxel counts as occupied above this share of the largest norm."""

SATURATED = 0.95
"""A coordinate beyond this is at the border, where tanh has no slope left."""


def draw_trajectories(axis: Any, layer: GridRecording, *, row: int = 0, shown: int = SHOWN) -> None:
    """Where the row wrote, as spheres of radius σ, and the path of its reads; a 3-D axis.

    Of a longer row the last `shown` chunks are drawn; later ones stand out more.
    """
    if getattr(axis, "name", "") != "3d":
        raise ValueError(
            "draw_trajectories: expected a 3-D axis, got a flat one; make it with "
            "figure.add_subplot(projection='3d')"
        )
    reads_in, writes_in, *_ = palette(axis)
    _, chunks = _timeline(layer, row, layer.present)
    chunks = chunks[-shown:].tolist()
    before = None
    for number, chunk in enumerate(chunks):
        late = 0.25 + 0.75 * (number + 1) / len(chunks)
        for head, at in enumerate(_in_space(layer.write_at[chunk, row].float())):
            if bool(layer.written[chunk, row]):
                radius = None if layer.spread is None else float(layer.spread[chunk, row, head])
                _sphere(axis, at, radius, writes_in, late)
        reads = _in_space(layer.read_at[chunk, row].float())  # (Q, 3)
        reads = reads[~reads.isnan().any(1)]
        if not len(reads):  # where the model's values were not finite
            continue
        axis.scatter(*reads.t().numpy(), color=reads_in, s=9, alpha=late, depthshade=False)
        if before is not None:
            axis.plot(
                *torch.stack([before, reads[0]]).t().numpy(),
                color=reads_in,
                linewidth=0.9,
                alpha=late,
            )
        before = reads[-1]
    axis.plot([], [], [], "o-", color=reads_in, markersize=3, linewidth=0.9, label="reads")
    named = {"label": "writes" if layer.spread is None else "writes, radius σ"}
    axis.plot([], [], [], "o", color=writes_in, markersize=6, alpha=0.7, **named)
    for name, set_limits in (("x", axis.set_xlim), ("y", axis.set_ylim), ("z", axis.set_zlim)):
        set_limits(-1, 1)
        getattr(axis, f"set_{name}label")(name, labelpad=-4)
        getattr(axis, f"set_{name}ticks")([-0.5, 0, 0.5])
        axis.tick_params(axis=name, pad=0 if name == "z" else -3)
        pane = getattr(axis, f"{name}axis")
        pane.set_pane_color((0.5, 0.5, 0.5, 0.06))
        pane._axinfo["grid"].update(color=(0.5, 0.5, 0.5, 0.25), linewidth=0.4)
    axis.set_box_aspect((1, 1, 1), zoom=0.9)
    what = "x, y, z of reads and writes" if layer.config.axes == 4 else "reads and writes"
    where = ""
    if chunks:
        start, stop = layer.span[chunks[0], row, 0], layer.span[chunks[-1], row, 1]
        where = f", tokens {start} to {stop - 1}"
    axis.set_title(f"{what} of {layer.name}{where}", loc="left")
    axis.legend(loc="upper right", labelcolor=ink(axis))


def draw_gates(axis: Any, layer: GridRecording, *, row: int = 0) -> None:
    """The gates over the stream, averaged over voxels and channels; rate and keep of a head."""
    tokens, chunks = _timeline(layer, row, layer.written)
    if not len(chunks):
        nothing(axis)
        return
    styles = ("-", "--", ":")
    for gate, name in enumerate(layer.gate_names):
        values = layer.gates[chunks, row, gate].float().numpy()
        axis.plot(tokens, values, styles[gate], color=palette(axis)[gate], label=name)
    axis.set_ylim(0, 1)
    axis.set_ylabel("mean gate")
    _finish(axis, f"gates of {layer.name}")


def draw_use(axis: Any, layers: Iterable[AnyLayer]) -> None:
    """For every layer of a recording σ(γ), how far its gate is open, and how much of x it adds.

    Use is ‖σ(γ)m‖ / ‖x‖ of all chunks and rows: the median, and from the 10th to the 90th of 100.
    """
    layers = list(layers)
    if not any(bool(layer.present.any()) for layer in layers):
        nothing(axis)
        return
    gate_in, use_in, *_ = palette(axis)
    for place, layer in enumerate(layers):
        use = layer.use[layer.present].double()
        use = use[~use.isnan()]
        named = {"label": "‖σ(γ)m‖ / ‖x‖"} if place == 0 else {}
        if len(use):
            low, middle, high = use.quantile(torch.tensor([0.1, 0.5, 0.9]).double()).tolist()
            axis.plot([low, high], [place + 0.12] * 2, color=use_in, linewidth=2)
            axis.plot([middle], [place + 0.12], "o", color=use_in, markersize=5, **named)
        named = {"label": "σ(γ)"} if place == 0 else {}
        if layer.gate is not None:
            axis.plot([layer.gate], [place - 0.12], "D", color=gate_in, markersize=5, **named)
    axis.set_yticks(range(len(layers)), [layer.name for layer in layers])
    axis.set_ylim(len(layers) - 0.5, -0.5)
    axis.set_xlim(left=0)
    axis.set_xlabel("share")
    axis.set_title("gate and use per layer", loc="left")
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))


def draw_state_norm(axis: Any, layers: Iterable[AnyLayer], *, row: int = 0) -> None:
    """The norm of all that is held over the stream, a line per layer of a recording."""
    drawn, names = 0, {}
    for number, layer in enumerate(layers):
        names[layer.norm_name] = None
        tokens, chunks = _timeline(layer, row, layer.present)
        if not len(chunks):
            continue
        norm = layer.norms[chunks, row].double().flatten(1).norm(dim=1)
        colours, styles = palette(axis), ("-", "--", ":", "-.")
        style = {"color": colours[number % 6], "linestyle": styles[number // 6 % 4]}
        axis.plot(tokens, norm.numpy(), label=layer.name, **style)
        drawn += 1
    if not drawn:
        nothing(axis)
        return
    axis.set_ylim(bottom=0)
    axis.set_ylabel(f"{' or '.join(names)} of the grid")
    _finish(axis, "the state over the stream", legend=drawn > 1)


def draw_occupancy(axis: Any, layer: GridRecording, *, row: int = 0) -> None:
    """How much of the grid is in use over the stream.

    The share of voxels above a tenth of the largest ‖h‖, and the effective share,
    (Σ‖h‖²)² / (V Σ‖h‖⁴), which is 1 where all voxels hold as much and 1 / V where one holds all.
    """
    tokens, chunks = _timeline(layer, row, layer.present)
    if not len(chunks):
        nothing(axis)
        return
    norm = layer.hidden_norm[chunks, row].double().flatten(1)  # (T, V)
    occupied = (norm > OCCUPIED * norm.amax(1, keepdim=True)).double().mean(1)
    energy = norm.square()
    effective = energy.sum(1).square() / (norm.shape[1] * energy.square().sum(1)).clamp(min=1e-30)
    above, share, *_ = palette(axis)
    axis.plot(tokens, occupied.numpy(), "-", color=above, label=f"above {OCCUPIED:.0%} of the most")
    axis.plot(tokens, effective.numpy(), "--", color=share, label="effective share")
    axis.set_ylim(0, 1.02)
    axis.set_ylabel("share of voxels")
    _finish(axis, f"occupancy of {layer.name}")


def draw_saturation(axis: Any, layer: GridRecording) -> None:
    """How near the border of the grid coordinates lie: |μ| of all reads and writes."""
    drawn = False
    for at, name, colour in zip(
        (layer.read_at, layer.write_at), ("reads", "writes"), palette(axis), strict=False
    ):
        values = at[~at.isnan()].float().abs()
        if not len(values):
            continue
        share = float((values > SATURATED).float().mean())
        weights = torch.full_like(values, 1 / len(values))
        axis.hist(
            values.numpy(),
            bins=torch.linspace(0, 1, 41).tolist(),
            weights=weights.numpy(),
            histtype="stepfilled" if name == "reads" else "step",
            alpha=0.5 if name == "reads" else 1,
            linewidth=1.2,
            color=colour,
            label=f"{name}:\n{share:.0%} beyond {SATURATED}",
        )
        drawn = True
    if not drawn:
        nothing(axis)
        return
    axis.axvline(SATURATED, color=ink(axis), linewidth=0.6, linestyle=":")
    axis.set_xlim(0, 1)
    axis.set_xlabel("|μ|")
    axis.set_ylabel("share of coordinates")
    axis.set_title(f"saturation of {layer.name}", loc="left")
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1), borderaxespad=0)


def _timeline(layer: AnyLayer, row: int, which: Tensor) -> tuple[Any, Tensor]:
    """The tokens at which a row's chunks ended, and the chunks: those that are marked (T, B)."""
    if not layer.rows:
        return [], torch.zeros(0, dtype=torch.long)
    require_index(row, layer.rows, "row")
    chunks = which[:, row].nonzero().flatten()
    return layer.span[chunks, row, 1].numpy(), chunks


def _finish(axis: Any, title: str, *, legend: bool = True) -> None:
    axis.set_xlabel("tokens seen")
    axis.set_title(title, loc="left")
    if legend:
        axis.legend(loc="upper left", bbox_to_anchor=(1, 1), borderaxespad=0)


def _in_space(at: Tensor) -> Tensor:
    """Coordinates (..., n) -> (..., 3): missing ones are 0, a fourth is left out."""
    missing = max(0, 3 - at.shape[-1])
    return torch.nn.functional.pad(at[..., :3], (0, missing))


def _sphere(axis: Any, at: Tensor, radius: float | None, colour: str, late: float) -> None:
    """The middle of a write and, where it has a width, three great circles around it."""
    x, y, z = at.tolist()
    axis.scatter([x], [y], [z], color=colour, s=14, alpha=late, depthshade=False)
    if radius is None:  # the nearest voxel alone is written
        return
    turn = torch.linspace(0, 2 * torch.pi, 65)
    circle = torch.stack([turn.cos(), turn.sin(), torch.zeros_like(turn)])  # (3, 65)
    for shift in range(3):
        points = at[:, None] + radius * circle.roll(shift, 0)
        points = points.where((points.abs() <= 1).all(0), torch.nan)  # what leaves the grid is cut
        axis.plot(*points.numpy(), color=colour, linewidth=0.6, alpha=0.6 * late)
