"""Where a memory stands: the hook after one block of the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tensor_memory.attachment.blocks import Block
from tensor_memory.attachment.caches import find_cache
from tensor_memory.attachment.causal_hosts import refuse_causal_call
from tensor_memory.attachment.hidden_states import put_hidden, take_hidden
from tensor_memory.attachment.host_call import Call
from tensor_memory.attachment.recompute import FirstRuns, Given, in_backward
from tensor_memory.state import MemoryState

if TYPE_CHECKING:
    from tensor_memory.attachment.attachment import Attachment

DEPTH = "depth"
"""The scope in which one state goes through all sites."""


class Site:
    """The hook after one block."""

    def __init__(self, attachment: Attachment, block: Block, layer: Any) -> None:
        self.attachment, self.block, self.layer = attachment, block, layer
        self.first_runs = FirstRuns()

    def install(self) -> RemovableHandle:
        """Put the hook on the block."""
        # First in line: hooks that record hidden states then see those with the memory.
        return self.block.module.register_forward_hook(self.after, with_kwargs=True, prepend=True)

    def after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """What the block returned, with what its memory adds."""
        attachment, block = self.attachment, self.block
        x = take_hidden(output, block)
        call = attachment.call()
        if call is None and in_backward():
            given = self.first_runs.recall(block.path, args, kwargs)
            return put_hidden(output, block, self._run(x, given)[0])

        call = call or Call()
        depth = attachment.scope == DEPTH
        if depth and attachment.refuse_causal:
            refuse_causal_call(block.path, args, kwargs)
        slot = DEPTH if depth else call.slot(block.path)
        call.require_rows_first(block.path, x)
        mask, reset = call.marks(x)
        cache = find_cache(args, kwargs)
        holder = attachment.holder(call, x.shape[1], cache)
        state = call.states.get(slot) if depth else None
        if state is None and holder is not None:
            state = holder.get(slot)

        given = Given(state, mask, reset)
        if not torch.compiler.is_compiling() and (torch.is_grad_enabled() or module.training):
            self.first_runs.remember(args, kwargs, given)
        y, state = self._run(x, given)
        if depth:
            call.states[slot] = state
        if holder is not None:
            call.results.append((holder, slot, state, x.shape[1]))
            if not call.levels:  # the block was called by itself
                call.hand_over()
        return put_hidden(output, block, y)

    def _run(self, x: Tensor, given: Given) -> tuple[Tensor, MemoryState]:
        held = self.layer.memory.output.weight.dtype
        if x.dtype != held and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(
                f"attach: block '{self.block.path}' returned {x.dtype}, and its memory is in "
                f"{held}, the type of the block's first weight; convert the memory, "
                f"attachment.to({x.dtype}), or the host, or run under torch.autocast"
            )
        return self.layer(
            x,
            given.state,
            mask=given.mask,
            reset=given.reset,
            flush=self.attachment.scope == DEPTH,
        )


def refuse_carrying(blocks: Sequence[Block]) -> None:
    """Raise where a block has a memory already, attached to a module around it or a wrapper."""
    for block in blocks:
        for hook in block.module._forward_hooks.values():
            site = getattr(hook, "__self__", None)
            if isinstance(site, Site):
                raise ValueError(
                    f"attach: block '{block.path}' already carries a memory, attached to a "
                    f"{type(site.attachment.host).__name__} that holds it too; detach that one "
                    "first"
                )
