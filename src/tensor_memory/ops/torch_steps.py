"""One block of rows through the recurrence and back, a step at a time; `torch_scan.py` drives it.

Volumes are (C, *grid, B), rows innermost, so that the gates' mix is one product (4C, 2C + 1) ×
(2C + 1, V·B), its four blocks of rows are i, f, o, g, and a shift along any axis is a slice made
of long contiguous runs. The mix's last input is a channel of ones, whose weights are the bias.

A step's record is 7C channels: h and c before it, tanh(c) after it, then the gates i, f, o, g.

Letters: B rows of the block, S steps, n axes, V voxels, C channels, Q reads and M writes per step.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from tensor_memory.ops import deposit
from tensor_memory.ops.request import Request
from tensor_memory.ops.sampling import coordinate_gradient, corners

STATE, RECORD = 2, 7  # volumes in a state and in a step's record

_sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
_tanh_backward = torch.ops.aten.tanh_backward.grad_input


class Block:
    """What steers a block of rows, made ready, and the scratch its steps share."""

    def __init__(self, request: Request) -> None:
        self.request = request
        B, self.C, *grid = request.hidden.shape
        self.grid, C = tuple(grid), self.C
        taps, steps = request.taps, request.write_at.shape[1]

        assert request.read_at is not None
        self.read_at = request.read_at
        index, weight = corners(self.read_at, self.grid)  # (B, S, Q, 2ⁿ)
        row = torch.arange(B, device=index.device)
        self.read_index = (index.permute(1, 2, 3, 0) * B + row).flatten(1)  # (S, Q·2ⁿ·B)
        self.read_weight = weight.permute(1, 2, 3, 0).contiguous()  # (S, Q, 2ⁿ, B)

        self.content = request.content.permute(1, 2, 3, 0).contiguous()  # (S, M, C, B)
        self.profiles = deposit.profiles(request.write_at, request.spread, self.grid)
        self.factors = [  # (S, M, C or 1, size, B)
            deposit.filter_profile(profile, None if taps is None else taps[axis, :C])
            for axis, profile in enumerate(self.profiles)
        ]
        self.taps = None  # (n, 3, C, 1 .. 1)
        if taps is not None:
            self.taps = taps[:, C:].transpose(1, 2).reshape(-1, 3, C, *[1] * (len(grid) + 1))
        self.mix = torch.cat([request.mix, request.bias[:, None]], dim=1)  # (4C, 2C + 1)
        self.writes = _by_step(request.writes, steps, absent=True)
        self.resets = _by_step(request.resets, steps, absent=False)

        self.inputs = request.content.new_empty(2 * C + 1, *grid, B)
        self.inputs[-1] = 1
        self.filtered = [self.new_volumes(1) for _ in grid[1:]] + [self.inputs[C : 2 * C]]

    def new_volumes(self, count: int) -> Tensor:
        """Uninitialised (count · C, *grid, B)."""
        B = self.request.hidden.shape[0]
        return self.request.content.new_empty(count * self.C, *self.grid, B)

    def load(self, record: Tensor) -> None:
        """Put the initial state into a record."""
        record[: self.C] = self.request.hidden.movedim(0, -1)
        record[self.C : 2 * self.C] = self.request.cell.movedim(0, -1)

    def run(self, tape: list[Tensor], reads: Tensor) -> None:
        """All steps, each from one entry of the tape to the next, which may be the same tensor."""
        for s, (now, after) in enumerate(pairwise(tape)):
            state = now[: STATE * self.C]
            _empty(state, self.resets[s])
            if reads.shape[2]:
                reads[:, s] = self.read(s, state[: self.C])
            self._write(s, now, after)

    def read(self, s: int, hidden: Tensor) -> Tensor:
        """Step s' reads (B, Q, C)."""
        values = self.corner_values(s, hidden)
        return (values * self.read_weight[s]).sum(2).permute(2, 1, 0)

    def corner_values(self, s: int, hidden: Tensor) -> Tensor:
        """(C, Q, 2ⁿ, B)."""
        values = hidden.view(self.C, -1).index_select(1, self.read_index[s])
        return values.view(self.C, *self.read_weight.shape[1:])

    def gather_inputs(self, s: int, hidden: Tensor) -> None:
        """[U; h], both filtered, into `inputs`; h along the first axes alone into `filtered`."""
        deposit.volume(self.content[s], [f[s] for f in self.factors], out=self.inputs[: self.C])
        if self.taps is None:
            self.filtered[-1].copy_(hidden)
            return
        for axis, (axis_taps, out) in enumerate(zip(self.taps, self.filtered, strict=True)):
            axis_filter(hidden, axis_taps, axis, out)
            hidden = out

    def _write(self, s: int, now: Tensor, after: Tensor) -> None:
        """c ← σ(f)·c + σ(i)·tanh(g); h ← σ(o)·tanh(c), where the step writes."""
        C, write = self.C, self.writes[s]
        hidden, cell, tanh_cell, gates = now.split([C, C, C, 4 * C])
        if write is False:
            if after is not now:
                after[: STATE * C].copy_(now[: STATE * C])
                now[STATE * C :].zero_()  # what is returned is never left to chance
            return
        self.gather_inputs(s, hidden)
        torch.mm(self.mix, self.inputs.flatten(1), out=gates.flatten(1))
        gates[: 3 * C].sigmoid_()
        gates[3 * C :].tanh_()
        i, f, o, g = gates.split(C)
        if write is True:
            new_cell = torch.mul(f, cell, out=after[C : 2 * C]).addcmul_(i, g)
            torch.tanh(new_cell, out=tanh_cell)
            torch.mul(o, tanh_cell, out=after[:C])
        else:
            new_cell = (f * cell).addcmul_(i, g)
            torch.tanh(new_cell, out=tanh_cell)
            torch.where(write, o * tanh_cell, hidden, out=after[:C])
            torch.where(write, new_cell, cell, out=after[C : 2 * C])


class BlockGradients:
    """A block's way back: the gradient of its state, and what its steps have added up so far."""

    def __init__(
        self, block: Block, grad_reads: Tensor, grad_hidden: Tensor, grad_cell: Tensor
    ) -> None:
        self.block = block
        C, request = block.C, block.request
        self.reads = grad_reads.permute(1, 3, 2, 0).contiguous()  # (S, C, Q, B)
        self.hidden = grad_hidden.movedim(0, -1).clone(
            memory_format=torch.contiguous_format
        )  # (C, *grid, B)
        self.cell = grad_cell.movedim(0, -1).clone(memory_format=torch.contiguous_format)
        self.read_weight = torch.empty_like(block.read_weight)
        self.content = torch.zeros_like(block.content)
        self.factors = [
            f.new_zeros(*f.shape[:2], C, *f.shape[3:]) for f in block.factors
        ]  # (S, M, C, size, B)
        self.mix = request.mix.new_zeros(4 * C, 2 * C)
        self.bias = torch.zeros_like(request.bias)
        self.taps = request.mix.new_zeros(len(block.grid), 3, C)
        self.gates = block.new_volumes(4)
        self.inputs = block.new_volumes(2)
        self.scratch = block.new_volumes(2).split(C)

    def step(self, s: int, record: Tensor) -> None:
        """From the gradient of the state after step s to that of the state before it."""
        block, C = self.block, self.block.C
        hidden = record[:C]
        write = block.writes[s]
        if write is True:
            self._write(s, record)
        elif write is not False:
            kept_hidden = self.hidden.masked_fill(write, 0)
            kept_cell = self.cell.masked_fill(write, 0)
            self.hidden.masked_fill_(~write, 0)
            self.cell.masked_fill_(~write, 0)
            self._write(s, record)
            self.hidden += kept_hidden
            self.cell += kept_cell
        if self.reads.shape[2]:
            self._read(s, hidden)
        _empty(self.hidden, block.resets[s])
        _empty(self.cell, block.resets[s])

    def _write(self, s: int, record: Tensor) -> None:
        block, C = self.block, self.block.C
        hidden, cell, tanh_cell, gates = record.split([C, C, C, 4 * C])
        self._gates(cell, tanh_cell, gates)
        grad_gates = self.gates.flatten(1)
        block.gather_inputs(s, hidden)
        inputs = block.inputs[: 2 * C].flatten(1)
        self.mix.addmm_(grad_gates, inputs.t())
        self.bias += grad_gates.sum(1)
        torch.mm(block.mix[:, : 2 * C].t(), grad_gates, out=self.inputs.flatten(1))
        written, filtered = self.inputs.split(C)
        grad_content, grad_factors = deposit.volume_backward(
            written, block.content[s], [f[s] for f in block.factors]
        )
        self.content[s] = grad_content
        for total, grad in zip(self.factors, grad_factors, strict=True):
            total[s] = grad
        self._filters(hidden, filtered)

    def _gates(self, cell: Tensor, tanh_cell: Tensor, gates: Tensor) -> None:
        """Through h = o·tanh(c′) and c′ = f·c + i·g into the gates' sums and the old cell."""
        C = self.block.C
        i, f, o, g = gates.split(C)
        grad_i, grad_f, grad_o, grad_g = self.gates.split(C)
        through_tanh = self.scratch[0]
        torch.mul(self.hidden, tanh_cell, out=grad_o)
        torch.mul(self.hidden, o, out=through_tanh)
        self.cell += _tanh_backward(through_tanh, tanh_cell, grad_input=through_tanh)
        torch.mul(self.cell, g, out=grad_i)
        torch.mul(self.cell, cell, out=grad_f)
        torch.mul(self.cell, i, out=grad_g)
        self.cell *= f
        sigmoids = self.gates[: 3 * C]
        _sigmoid_backward(sigmoids, gates[: 3 * C], grad_input=sigmoids)
        _tanh_backward(grad_g, g, grad_input=grad_g)

    def _filters(self, hidden: Tensor, grad: Tensor) -> None:
        """Back through the axis filters, last axis first, into the hidden state."""
        block = self.block
        if block.taps is None:
            self.hidden.copy_(grad)
            return
        inputs = [hidden, *block.filtered[:-1]]
        for axis in reversed(range(len(inputs))):
            self._taps(axis, inputs[axis], grad)
            out = self.hidden if axis == 0 else self.scratch[axis % 2]
            axis_filter(grad, block.taps[axis].flip(0), axis, out)  # the transpose: taps reversed
            grad = out

    def _taps(self, axis: int, x: Tensor, grad: Tensor) -> None:
        dim, size = 1 + axis, x.shape[1 + axis]
        others = tuple(range(1, x.ndim))
        total = self.taps[axis]
        total[1] += (grad * x).sum(others)
        total[0] += (grad.narrow(dim, 1, size - 1) * x.narrow(dim, 0, size - 1)).sum(others)
        total[2] += (grad.narrow(dim, 0, size - 1) * x.narrow(dim, 1, size - 1)).sum(others)

    def _read(self, s: int, hidden: Tensor) -> None:
        block, C = self.block, self.block.C
        grad = self.reads[s][:, :, None]  # (C, Q, 1, B)
        torch.sum(block.corner_values(s, hidden) * grad, 0, out=self.read_weight[s])
        index = block.read_index[s].expand(C, -1)
        self.hidden.view(C, -1).scatter_add_(1, index, (grad * block.read_weight[s]).flatten(1))

    def finish(self) -> Request:
        """The gradients, in the places of what they are gradients of."""
        block, request = self.block, self.block.request
        profile_grads, written_taps = [], []
        for axis, (grad, profile) in enumerate(zip(self.factors, block.profiles, strict=True)):
            taps = None if request.taps is None else request.taps[axis, : block.C]
            profile_grad, taps_grad = deposit.filter_profile_backward(grad, profile, taps)
            profile_grads.append(profile_grad)
            written_taps.append(taps_grad)
        write_at, spread = deposit.profiles_backward(
            profile_grads, block.profiles, request.write_at, request.spread, block.grid
        )
        taps = None
        if request.taps is not None:
            taps = torch.cat([torch.stack(written_taps), self.taps.transpose(1, 2)], dim=1)
        return Request(
            read_at=coordinate_gradient(
                self.read_weight.permute(3, 0, 1, 2), block.read_at, block.grid
            ),
            write_at=write_at,
            spread=spread,
            content=self.content.permute(3, 0, 1, 2),
            taps=taps,
            mix=self.mix,
            bias=self.bias,
            hidden=self.hidden.movedim(-1, 0),
            cell=self.cell.movedim(-1, 0),
            writes=None,
            resets=None,
        )


def axis_filter(x: Tensor, taps: Tensor, axis: int, out: Tensor) -> None:
    """Depthwise 3-tap filter along one axis, zero padding: x (C, *grid, B), taps (3, C, 1 .. 1)."""
    dim, size = 1 + axis, x.shape[1 + axis]
    before, centre, after = taps
    torch.mul(x, centre, out=out)
    out.narrow(dim, 1, size - 1).addcmul_(x.narrow(dim, 0, size - 1), before)
    out.narrow(dim, 0, size - 1).addcmul_(x.narrow(dim, 1, size - 1), after)


def _by_step(marks: Tensor | None, steps: int, absent: bool) -> list[Tensor | bool]:
    """marks (B, S) as S entries: (B,) masks, or a bool where the host may know that all agree."""
    if marks is None:
        return [absent] * steps
    columns: list[Tensor | bool] = list(marks.t())
    if marks.device.type != "cpu":  # asking would wait for the device
        return columns
    every, some = marks.all(0).tolist(), marks.any(0).tolist()
    return [e if e == a else column for column, e, a in zip(columns, every, some, strict=True)]


def _empty(volume: Tensor, rows: Tensor | bool) -> None:
    """Zero the volumes of some rows; a product would let what is not finite through."""
    if rows is True:
        volume.zero_()
    elif rows is not False:
        volume.masked_fill_(rows, 0)
