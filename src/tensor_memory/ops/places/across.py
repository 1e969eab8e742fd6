"""A sequence cut over the processes of a group: each scans its part, states are exchanged.

Rule "linear": the state after a part is e^g S + Δ, with S the state before it, g the part's sum of
log α and Δ what the part makes of an empty state. So every process scans at once, one exchange
gathers all (e^g, Δ), and a process adds to its reads what the parts before it have left. Backward
is one exchange in the other direction. Both have a constant size, whatever the length.

Rule "delta": a part changes what it finds, so the state is handed on from process to process, and
its gradient back. The scans run one after the other.

In both, a node of the graph on every process runs the exchange of the backward. Nodes are tied to
the reads and to the states, so that a backward reaches them on every process or on none: one
process alone in an exchange would wait for ever.

Letters: B batch, N tokens of this process, H heads, V voxels, C channels, P processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tensor_memory.ops.autograd import refuse_second_derivative
from tensor_memory.ops.places.chunked import read_before
from tensor_memory.ops.places.inputs import PlaceInputs

Scan = Callable[[PlaceInputs], tuple[Tensor, Tensor]]

NO_SECOND_DERIVATIVE = (
    "expected a backward that is not differentiated again, got create_graph=True; a sequence cut "
    "over processes has no second derivative: leave group out, with the whole sequence in one"
)


def check_group(group: Any) -> None:
    """Raise unless `group` is a group of processes that this one belongs to."""
    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "group: expected a torch.distributed.ProcessGroup that this process belongs to, got "
            f"{type(group).__name__}; torch.distributed.new_group() and mesh.get_group() make one, "
            "torch.distributed.group.WORLD is that of all processes"
        )


def scan_across(inputs: PlaceInputs, group: Any, scan: Scan) -> tuple[Tensor, Tensor]:
    """The reads of this process' part, and the state after the last part, on every process.

    Args:
        inputs: this process' part. The state counts on the first process alone.
        group: parts in the order of its ranks.
        scan: the recurrence in one process.
    """
    if dist.get_world_size(group) == 1:
        return scan(inputs)
    return (_gather if inputs.rule == "linear" else _hand_on)(inputs, group, scan)


def _gather(inputs: PlaceInputs, group: Any, scan: Scan) -> tuple[Tensor, Tensor]:
    rank = dist.get_rank(group)
    not_first = torch.tensor(rank > 0, device=inputs.state.device)
    begin = inputs.state.masked_fill(not_first, 0)  # which leaves the state in the graph
    reads, after = scan(inputs._replace(state=begin))
    keep = inputs.log_keep.sum(1).exp()  # (B, H)
    if inputs.resets is not None:
        keep = keep.masked_fill(inputs.resets.any(1, keepdim=True), 0)
    packed = torch.cat([keep.flatten(), after.flatten()])
    anchor = torch.zeros((), requires_grad=True)
    parts, reads = _Gather.apply(anchor, packed, reads, group)  # type: ignore[misc]
    state = before = torch.zeros_like(after)
    for other, part in enumerate(parts.unbind()):  # in the same order everywhere: equal bits
        if other == rank:
            before = state
        keep, change = part.split([keep.numel(), after.numel()])
        shape = (*after.shape[:2], *[1] * (after.ndim - 2))
        state = keep.view(shape) * state + change.view(after.shape)
    return reads + read_before(inputs, before), state


def _hand_on(inputs: PlaceInputs, group: Any, scan: Scan) -> tuple[Tensor, Tensor]:
    anchor = torch.zeros((), requires_grad=True)
    received = _Receive.apply(group, anchor, *inputs[:7])
    reads, after = scan(PlaceInputs(*received, *inputs[7:]))  # type: ignore[misc]
    return _Send.apply(after, reads, group)  # type: ignore[return-value]


class _Gather(torch.autograd.Function):
    """What every process has packed, (P, values), and this process' reads.

    The anchor lets all processes take part in the backward, also one that needs no gradient. So
    do the reads, where nothing but them enters a loss.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        _, packed, reads, ctx.group = inputs
        found = [torch.empty_like(packed) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(found, packed, group=ctx.group)
        return torch.stack(found), reads.view_as(reads)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        refuse_second_derivative(NO_SECOND_DERIVATIVE)
        grad_parts, grad_reads = grads
        sent = grad_parts.contiguous()  # row p goes to process p
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=ctx.group)
        return None, received.sum(0), grad_reads, None


class _Receive(torch.autograd.Function):
    """The floats of a scan, with the state that the process before hands on; the first has its own.

    All go through here, so that a gradient of any of them takes this node along.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor | None, ...]:
        ctx.group, _, *tokens, state = inputs
        passed = [None if tensor is None else tensor.view_as(tensor) for tensor in tokens]
        rank = dist.get_rank(ctx.group)
        if rank == 0:
            return *passed, state.view_as(state)
        received = torch.empty_like(state, memory_format=torch.contiguous_format)
        dist.recv(received, _global(ctx.group, rank - 1), ctx.group)
        return *passed, received

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        refuse_second_derivative(NO_SECOND_DERIVATIVE)
        *tokens, state = grads
        rank = dist.get_rank(ctx.group)
        if rank > 0:
            dist.send(state.contiguous(), _global(ctx.group, rank - 1), ctx.group)
            state = torch.zeros_like(state)  # the graph before goes on everywhere
        return None, None, *tokens, state


class _Send(torch.autograd.Function):
    """The state after the last part, on every process, and this process' reads."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        after, reads, ctx.group = inputs
        rank, last = dist.get_rank(ctx.group), dist.get_world_size(ctx.group) - 1
        state = after.clone(memory_format=torch.contiguous_format)
        if rank < last:
            dist.send(state, _global(ctx.group, rank + 1), ctx.group)
        dist.broadcast(state, _global(ctx.group, last), ctx.group)
        return reads.view_as(reads), state

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        refuse_second_derivative(NO_SECOND_DERIVATIVE)
        grad_reads, grad_state = grads
        rank, last = dist.get_rank(ctx.group), dist.get_world_size(ctx.group) - 1
        total = grad_state.clone(memory_format=torch.contiguous_format)
        dist.reduce(total, _global(ctx.group, last), group=ctx.group)
        if rank < last:
            dist.recv(total, _global(ctx.group, rank + 1), ctx.group)
        return total, grad_reads, None


def _global(group: Any, rank: int) -> int:
    """A rank of the group among all processes."""
    return dist.get_global_rank(group, rank)
