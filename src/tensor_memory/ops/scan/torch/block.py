"""One block of rows through the recurrence and back, one step at a time.

Volumes are (C, *grid, B), rows innermost, so that the gates' mix is one product (4C, 2C + 1) ×
(2C + 1, V·B) whose four blocks of rows are i, f, o, g, and everything between products runs over
long contiguous memory. The mix's last input is a channel of ones, whose weights are the bias.

All steps work in the same few buffers, which stay in cache, through views made once: making views
would cost as much as using them.

Letters: B rows of the block, S steps, n axes, V voxels, C channels, Q reads and M writes per step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tensor_memory.ops.scan.inputs import ScanInputs
from tensor_memory.ops.scan.torch.axis_filter import AxisFilter, TapGradient
from tensor_memory.ops.scan.torch.gaussian_write import (
    drop_tails,
    filter_profile,
    filter_profile_backward,
    profiles,
    profiles_backward,
    volume_halves,
    volume_halves_backward,
)
from tensor_memory.ops.scan.torch.sampling import coordinate_gradient, corners

_sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
_tanh_backward = torch.ops.aten.tanh_backward.grad_input
_hardshrink = torch.ops.aten.hardshrink.out


class Block:
    """A block's state, its reads and writes of the steps at hand, and the buffers of a step."""

    def __init__(self, inputs: ScanInputs) -> None:
        B, C, *grid = inputs.hidden.shape
        self.inputs, self.C, self.grid = inputs, C, tuple(grid)
        self.mix_inputs = self.new_volumes(2, extra=1)  # [U; h; 1], U and h filtered
        self.mix_inputs[-1] = 1
        self.written = self.mix_inputs[:C].view(C, grid[0], -1, B)
        filtered = self.mix_inputs[C : 2 * C]
        self.filter_buffers, self.filters = [filtered], []
        if inputs.taps is not None:
            self.filter_buffers = [*(self.new_volumes() for _ in grid), filtered]
            for axis, axis_taps in enumerate(inputs.taps[:, C:]):
                x, y = self.filter_buffers[axis : axis + 2]
                self.filters.append(AxisFilter(axis_taps, axis, x, y))
        self.hidden, self.cell = self.filter_buffers[0], self.new_volumes()
        self.gates = self.new_volumes(4)
        self.tanh_cell, self.scratch = self.new_volumes(), self.new_volumes()

        self.mix = torch.cat([inputs.mix, inputs.bias[:, None]], dim=1)  # (4C, 2C + 1)
        self.flat_inputs, self.flat_gates = self.mix_inputs.flatten(1), self.gates.flatten(1)
        self.flat_hidden = self.hidden.flatten(1)
        self.sigmoids = self.gates[: 3 * C]
        self.i, self.f, self.o, self.g = self.gates.split(C)
        self.hidden.copy_(inputs.hidden.movedim(0, -1))
        self.cell.copy_(inputs.cell.movedim(0, -1))
        # What fades without end becomes denormal, and everything fifteen times slower: a cell
        # below 4e-12 and a gradient below 2e-21 (in float32) count as zero.
        tiny = torch.finfo(self.cell.dtype).tiny
        self.least_cell, self.least_gradient = tiny**0.3, tiny**0.55

    def prepare_steps(self, start: int, stop: int) -> None:
        """Compute what does not depend on the state, for some steps; they count from 0 then."""
        inputs, C = self.inputs.steps(start, stop), self.C
        B, S = inputs.write_at.shape[:2]
        assert inputs.read_at is not None
        self.read_at = inputs.read_at
        index, weight = corners(self.read_at, self.grid)  # (B, S, Q, 2ⁿ)
        row = torch.arange(B, device=index.device)
        index = (index.permute(1, 2, 3, 0) * B + row).flatten(1)
        self.read_index = index.unbind()  # (Q·2ⁿ·B) each
        self.read_weight = weight.permute(1, 2, 3, 0)[:, None].contiguous()  # (S, 1, Q, 2ⁿ, B)
        self.corner_values = inputs.content.new_empty(S, C, index.shape[1])
        self.corner_steps = self.corner_values.unbind()

        self.content = inputs.content.permute(1, 2, 3, 0).contiguous()  # (S, M, C, B)
        self.profiles = profiles(inputs.write_at, inputs.spread, self.grid)
        self.factors = []  # (S, M, C or 1, size, B)
        for axis, profile in enumerate(self.profiles):
            taps = None if inputs.taps is None else inputs.taps[axis, :C]
            factor = filter_profile(profile, taps)
            self.factors.append(drop_tails(factor))
        first, rest = volume_halves(self.content, self.factors)
        self.first, self.rest = _each(first), _each(rest)
        self.writes = _by_step(inputs.writes, S, absent=True)
        self.resets = _by_step(inputs.resets, S, absent=False)

    def new_volumes(self, count: int = 1, extra: int = 0) -> Tensor:
        """Uninitialised (count · C + extra, *grid, B)."""
        B = self.inputs.hidden.shape[0]
        return self.inputs.content.new_empty(count * self.C + extra, *self.grid, B)

    def run(self, states: list[Tensor], reads: Tensor) -> None:
        """The prepared steps. Each reads, and keeps its state where `states` has room for it."""
        for s in range(reads.shape[1]):
            _zero_rows(self.hidden, self.resets[s])
            _zero_rows(self.cell, self.resets[s])
            if states:
                states[s][: self.C].copy_(self.hidden)
                states[s][self.C :].copy_(self.cell)
            self.gather_corners(s)
            self._write(s)
        values = self.corner_values.unflatten(2, self.read_weight.shape[2:]) * self.read_weight
        reads.copy_(values.sum(3).permute(3, 0, 2, 1))

    def restore(self, state: Tensor) -> None:
        """Set the state to the one before a step."""
        self.hidden.copy_(state[: self.C])
        self.cell.copy_(state[self.C :])

    def gather_corners(self, s: int) -> None:
        """Fetch what lies at the corners around step s' reads."""
        torch.index_select(self.flat_hidden, 1, self.read_index[s], out=self.corner_steps[s])

    def update(self, s: int, new_cell: Tensor) -> None:
        """The gates, c′ = σ(f)·c + σ(i)·tanh(g) and tanh(c′), each into its buffer."""
        for m, (first, rest) in enumerate(zip(self.first[s], self.rest[s], strict=True)):
            if m == 0:
                torch.mul(first, rest, out=self.written)
            else:
                self.written.addcmul_(first, rest)
        for axis_filter in self.filters:
            axis_filter.apply()
        torch.mm(self.mix, self.flat_inputs, out=self.flat_gates)
        self.sigmoids.sigmoid_()
        self.g.tanh_()
        torch.mul(self.f, self.cell, out=new_cell).addcmul_(self.i, self.g)
        _hardshrink(new_cell, self.least_cell, out=new_cell)
        torch.tanh(new_cell, out=self.tanh_cell)

    def _write(self, s: int) -> None:
        """h ← σ(o)·tanh(c′) and c ← c′, where the step writes."""
        write = self.writes[s]
        if write is True:
            self.update(s, self.cell)
            torch.mul(self.o, self.tanh_cell, out=self.hidden)
        elif write is not False:
            self.update(s, self.scratch)
            torch.where(write, self.scratch, self.cell, out=self.cell)
            torch.mul(self.o, self.tanh_cell, out=self.scratch)
            torch.where(write, self.scratch, self.hidden, out=self.hidden)


class BlockGradients:
    """A block's way back: the gradient of its state, and what its steps have added up so far.

    Each gradient overwrites what it is the gradient of in the block's buffers as soon as that has
    served, so that a step backward needs little more room, and cache, than one forward.
    """

    def __init__(
        self, block: Block, grad_reads: Tensor, grad_hidden: Tensor, grad_cell: Tensor
    ) -> None:
        self.block = block
        inputs, C = block.inputs, block.C
        S, M, _, B = block.content.shape
        self.hidden, self.cell, self.scratch = (block.new_volumes() for _ in range(3))
        self.hidden.copy_(grad_hidden.movedim(0, -1))
        self.cell.copy_(grad_cell.movedim(0, -1))
        self.flat_hidden = self.hidden.flatten(1)
        self.scratch_written = self.scratch.view_as(block.written)

        self.reads = grad_reads.permute(1, 3, 2, 0)[:, :, :, None].contiguous()  # (S, C, Q, 1, B)
        corner_values = (self.reads * block.read_weight).flatten(2)
        self.corner_values = corner_values.unbind()  # (C, Q·2ⁿ·B) each
        self.first = inputs.content.new_zeros(S, M, C, block.grid[0], B)
        self.rest = inputs.content.new_zeros(S, M, C, block.written.shape[2], B)
        self.first_steps, self.rest_steps = _each(self.first), _each(self.rest)
        self.mix = torch.zeros_like(inputs.mix)
        self.bias = torch.zeros_like(inputs.bias)
        self.mix_transposed = inputs.mix.t()
        self.grad_mix_inputs = block.flat_inputs[: 2 * C]

        self.filters: list[AxisFilter] = []
        self.tap_gradients: list[TapGradient] = []
        if inputs.taps is not None:
            for axis, taps in enumerate(inputs.taps[:, C:].flip(2)):
                x, grad = block.filter_buffers[axis : axis + 2]
                self.tap_gradients.append(TapGradient(axis, x, grad, self.scratch))
                into = self.hidden if axis == 0 else x
                self.filters.append(AxisFilter(taps, axis, grad, into))

    def step(self, s: int, state: Tensor) -> None:
        """From the gradient of the state after step s to that of the state before it."""
        block = self.block
        block.restore(state)
        block.gather_corners(s)
        write = block.writes[s]
        if write is True:
            self._write(s)
        elif write is not False:
            stay_hidden = self.hidden.masked_fill(write, 0)
            stay_cell = self.cell.masked_fill(write, 0)
            self.hidden.masked_fill_(~write, 0)
            self.cell.masked_fill_(~write, 0)
            self._write(s)
            self.hidden += stay_hidden
            self.cell += stay_cell
        index = block.read_index[s].expand(block.C, -1)
        self.flat_hidden.scatter_add_(1, index, self.corner_values[s])
        _zero_rows(self.hidden, block.resets[s])
        _zero_rows(self.cell, block.resets[s])

    def _write(self, s: int) -> None:
        block = self.block
        block.update(s, block.scratch)
        self._gates()
        self.mix.addmm_(block.flat_gates, self.grad_mix_inputs.t())
        self.bias += block.flat_gates.sum(1)
        torch.mm(self.mix_transposed, block.flat_gates, out=self.grad_mix_inputs)
        steps = zip(
            block.first[s], block.rest[s], self.first_steps[s], self.rest_steps[s], strict=True
        )
        for first, rest, grad_first, grad_rest in steps:
            torch.mul(block.written, rest, out=self.scratch_written)
            torch.sum(self.scratch_written, 2, out=grad_first)
            torch.mul(block.written, first, out=self.scratch_written)
            torch.sum(self.scratch_written, 1, out=grad_rest)
        if not self.filters:
            self.hidden.copy_(block.hidden)  # the mix's input itself
        for axis_filter, taps in zip(self.filters[::-1], self.tap_gradients[::-1], strict=True):
            taps.add()
            axis_filter.apply()

    def _gates(self) -> None:
        """Through h = o·tanh(c′) and c′ = f·c + i·g into the gates' sums and the old cell."""
        block = self.block
        one, two = self.scratch, block.scratch
        torch.mul(self.hidden, block.o, out=one)
        self.cell += _tanh_backward(one, block.tanh_cell, grad_input=one)
        _hardshrink(self.cell, block.least_gradient, out=self.cell)
        torch.mul(self.hidden, block.tanh_cell, out=one)
        _sigmoid_backward(one, block.o, grad_input=block.o)
        torch.mul(self.cell, block.g, out=one)
        torch.mul(self.cell, block.i, out=two)
        _sigmoid_backward(one, block.i, grad_input=block.i)
        _tanh_backward(two, block.g, grad_input=block.g)
        torch.mul(self.cell, block.cell, out=one)
        self.cell *= block.f
        _sigmoid_backward(one, block.f, grad_input=block.f)

    def finish(self) -> ScanInputs:
        """The gradients in the places of the inputs."""
        block, inputs, C = self.block, self.block.inputs, self.block.C
        content, factors = volume_halves_backward(
            self.first, self.rest, block.content, block.factors
        )
        grad_profiles, written_taps = [], []
        for axis, (grad, profile) in enumerate(zip(factors, block.profiles, strict=True)):
            taps = None if inputs.taps is None else inputs.taps[axis, :C]
            grad_profile, grad_taps = filter_profile_backward(grad, profile, taps)
            grad_profiles.append(grad_profile)
            written_taps.append(grad_taps)
        write_at, spread = profiles_backward(
            grad_profiles, block.profiles, inputs.write_at, inputs.spread, block.grid
        )
        taps = None
        if inputs.taps is not None:
            hidden_taps = torch.stack([gradient.total() for gradient in self.tap_gradients])
            taps = torch.cat([torch.stack(written_taps), hidden_taps], dim=1)
        values = block.corner_values.unflatten(2, block.read_weight.shape[2:])
        weight = (values * self.reads).sum(1).permute(3, 0, 1, 2).contiguous()
        return ScanInputs(
            read_at=coordinate_gradient(weight, block.read_at, block.grid),
            write_at=write_at,
            spread=spread,
            content=content.permute(3, 0, 1, 2),
            taps=taps,
            mix=self.mix,
            bias=self.bias,
            hidden=self.hidden.movedim(-1, 0),
            cell=self.cell.movedim(-1, 0),
        )


def _each(steps: Tensor) -> list[tuple[Tensor, ...]]:
    """(S, M, ...) as one tensor per step and write."""
    return [step.unbind() for step in steps.unbind()]


def _by_step(marks: Tensor | None, steps: int, absent: bool) -> list[Tensor | bool]:
    """marks (B, S) as S entries: (B,) masks, or a bool where the host may know that all agree."""
    if marks is None:
        return [absent] * steps
    columns: list[Tensor | bool] = list(marks.t())
    if marks.device.type != "cpu":  # asking would wait for the device
        return columns
    every, some = marks.all(0).tolist(), marks.any(0).tolist()
    return [e if e == a else column for column, e, a in zip(columns, every, some, strict=True)]


def _zero_rows(volume: Tensor, rows: Tensor | bool) -> None:
    """Zero the volumes of some rows; a product would let what is not finite through."""
    if rows is True:
        volume.zero_()
    elif rows is not False:
        volume.masked_fill_(rows, 0)
