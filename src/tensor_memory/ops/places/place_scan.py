"""The place memory's recurrence: check the inputs, choose a backend, run it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tensor_memory.config import Rule
from tensor_memory.ops import dispatch
from tensor_memory.ops.autograd import Options, Recurrence, no_autocast
from tensor_memory.ops.inputs import products_dtype
from tensor_memory.ops.places import across, chunked, reference
from tensor_memory.ops.places.inputs import PlaceInputs


def _backend(name: str) -> Any:
    """The module of a backend. Triton is imported only where the fused backend is chosen."""
    if name == "triton":
        from tensor_memory.ops.places import triton as triton_backend

        return triton_backend
    return reference if name == "reference" else chunked


PLACES = Recurrence("places", PlaceInputs, _backend, chunked.scan)


def place_scan(
    write_at: Tensor,
    read_at: Tensor | None,
    content: Tensor,
    rate: Tensor,
    log_keep: Tensor,
    width: Tensor | None,
    state: Tensor,
    *,
    rule: Rule = "linear",
    wrap: Sequence[bool] | None = None,
    resets: Tensor | None = None,
    backend: str = "auto",
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Write and read a grid by place, token by token in meaning, in parallel in fact.

    S ← αS + β φ(p) vᵀ (rule "linear") or S ← αS + β φ(p)(v − φ(p)ᵀ αS)ᵀ (rule "delta"), then
    r = φ(q)ᵀ S. A row named in `resets` is emptied before its token. A token with rate 0 and
    log_keep 0 changes nothing.

    Args:
        write_at: (B, N, H, n) places p in [-1, 1]; coordinate 0 addresses the last grid axis.
        read_at: (B, N, H, n) places q; None reads where it writes.
        content: (B, N, H, C) what is written, v.
        rate: (B, N, H) β.
        log_keep: (B, N, H) log α, at most 0 and finite; -1000 keeps nothing.
        width: (H) of the Gaussian in voxels; None interpolates between the nearest voxels.
        state: (B, H, *grid, C) S before the first token.
        rule: "linear" adds, "delta" overwrites.
        wrap: one bool per grid axis: whether its last voxel is the neighbour of its first.
        resets: (B, N) bool.
        backend: "reference" (token by token), "torch" (in chunks), "triton" (fused, on a GPU),
            which then serve or raise; "auto" takes the fastest that can serve.
        group: processes that hold the parts of one sequence, in the order of their ranks; see
            `PlaceMemory.forward`.

    Returns:
        reads (B, N, H, C) and the state after, in float32, or in float64 where an input is.

    >>> at = torch.tensor([[-1.0], [1.0], [-1.0]]).view(1, 3, 1, 1)
    >>> content = torch.tensor([5.0, 7.0, 0.0]).view(1, 3, 1, 1)
    >>> rate = torch.tensor([1.0, 1.0, 0.0]).view(1, 3, 1)  # the third token only reads
    >>> reads, state = place_scan(
    ...     at, None, content, rate, torch.zeros(1, 3, 1), None, torch.zeros(1, 1, 4, 1))
    >>> reads.flatten().tolist(), state.flatten().tolist()
    ([5.0, 7.0, 5.0], [5.0, 0.0, 0.0, 7.0])
    """
    inputs = place_inputs(
        write_at, read_at, content, rate, log_keep, width, state,
        rule=rule, wrap=wrap, resets=resets,
    )  # fmt: skip
    return run_places(inputs, backend, products_dtype(content), group)


def run_places(
    inputs: PlaceInputs, backend: str, products: torch.dtype, group: ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """`place_scan` of inputs that have been checked; a fused backend multiplies in `products`."""
    inputs, device = inputs.prepared(), inputs.state.device
    # exp of this is 0 already. Smaller values would take the digits of others in sums over a chunk.
    least = 1.2 * math.log(torch.finfo(inputs.dtype).tiny)
    inputs = inputs._replace(log_keep=inputs.log_keep.clamp(min=least))
    chosen = place_backend(inputs, backend, device)

    def scan(inputs: PlaceInputs) -> tuple[Tensor, Tensor]:
        if inputs.content.numel() == 0:
            return inputs.empty_reads(), inputs.state.clone()
        if chosen == "triton":
            reads, state = PLACES.run(inputs.prepared(), Options(0, products, chosen))
            return reads, state
        return PLACES.backend(chosen).scan(inputs)

    if group is not None:
        across.check_group(group)
    with no_autocast(device):
        return scan(inputs) if group is None else across.scan_across(inputs, group, scan)


def place_backend(inputs: PlaceInputs, backend: str, device: torch.device) -> str:
    """The backend that serves a scan of these sizes and types; raises where none does."""
    return dispatch.choose(
        "place_scan", backend, device, lambda: PLACES.backend("triton").why_not(inputs)
    )


def place_inputs(
    write_at: Tensor,
    read_at: Tensor | None,
    content: Tensor,
    rate: Tensor,
    log_keep: Tensor,
    width: Tensor | None,
    state: Tensor,
    *,
    rule: Rule,
    wrap: Sequence[bool] | None,
    resets: Tensor | None,
) -> PlaceInputs:
    """The arguments of `place_scan` by name, checked."""
    axes = state.ndim - 3 if isinstance(state, Tensor) else 0
    if wrap is not None and not isinstance(wrap, list | tuple):
        raise TypeError(
            f"place_scan: expected wrap as a list with True or False per axis, got {wrap!r:.80}; "
            "leave it out where no axis is a circle"
        )
    inputs = PlaceInputs(
        write_at, read_at, content, rate, log_keep, width, state, resets, rule,
        (False,) * axes if wrap is None else tuple(wrap),
    )  # fmt: skip
    inputs.check()
    return inputs
