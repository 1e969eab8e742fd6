"""The hooks on a host: around the modules that hold its blocks, and after each block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tensor_memory.attachment.arguments import Signature, TokenArguments, refuse_4d_mask
from tensor_memory.attachment.blocks import Block
from tensor_memory.attachment.caches import UNTRACED, find_cache, refuse_foreign_cache
from tensor_memory.attachment.causal_hosts import refuse_causal_call
from tensor_memory.attachment.hidden_states import put_hidden, take_hidden
from tensor_memory.attachment.host_call import (
    DEPTH,
    HostCall,
    HostCalls,
    can_go_back,
    tokens_before,
)
from tensor_memory.attachment.overrides import virtual_tokens, warn_if_frozen
from tensor_memory.attachment.recompute import (
    FirstRuns,
    Given,
    Streamed,
    in_backward,
    may_run_again,
)
from tensor_memory.attachment.rollback import run_and_remember
from tensor_memory.build import AnyState
from tensor_memory.config import MemoryConfig
from tensor_memory.residual import MemoryResidual

NAME = "tensor_memory"
"""The host's attribute that holds the attachment, and the prefix of its `state_dict` keys."""


class EntryHook:
    """The hooks around one module that holds blocks; the outermost one opens a call."""

    def __init__(self, calls: HostCalls, module: nn.Module, *, next_to_blocks: bool) -> None:
        self.calls, self.module, self.next_to_blocks = calls, module, next_to_blocks
        self.signature = Signature(module)
        self.streamed = Streamed()
        source = calls.place_source
        self.names = source.names if source else ()
        """The arguments that places are made of."""
        self.unknown = source.unknown_to(module, self.signature) if source else frozenset()
        """Those of them that the module would not understand."""

    def install(self) -> list[RemovableHandle]:
        """Put the hooks on the module."""
        return [
            self.module.register_forward_pre_hook(self.before, with_kwargs=True, prepend=True),
            self.module.register_forward_hook(self.returned),
            self.module.register_forward_hook(self.after, always_call=True),
        ]

    def install_taking(self) -> list[RemovableHandle]:
        """Take what the module would not understand out of its call, and do nothing else."""
        if not self.unknown:
            return []
        return [self.module.register_forward_pre_hook(self.taken, with_kwargs=True, prepend=True)]

    def taken(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The call without the arguments that the module would not understand; None: as it is."""
        if self.unknown.isdisjoint(kwargs):
            return None
        return args, {name: value for name, value in kwargs.items() if name not in self.unknown}

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The module is entered."""
        compiling = torch.compiler.is_compiling()
        stream = self.calls.opened.stream
        call = self.calls.current
        # A call that Ctrl-C cut short never left: hooks run for an Exception, and that is none.
        if call is None or self.module is self.calls.host or call.inside(self):
            if not compiling:
                self._require_registered()
                if in_backward():
                    self.streamed.refuse(args, kwargs, stream_open=stream is not None)
                if module.training and torch.is_grad_enabled():
                    warn_if_frozen(self.calls.memory)
            call = HostCall()
        if not call.levels:
            refuse_4d_mask(self.signature, args, kwargs)
        if stream is None:
            refuse_foreign_cache(self.module, lambda name: self.signature.get(name, args, kwargs))
        cache = find_cache(args, kwargs)
        if cache is not None:
            held = None if compiling else call.held_before(cache)
            # Further out, it may be the cache of blocks without a memory.
            if self.next_to_blocks and not call.admitted(cache):
                UNTRACED.admit(cache, stream, virtual_tokens(self.calls.host), held)
                call.caches.append(cache)
        if not compiling and stream is not None:
            self.streamed.remember(args, kwargs)
        around = call.levels[-1][1] if call.levels else None
        given = TokenArguments.read(self.signature, args, kwargs, around, self.names)
        given.cache = cache if self.next_to_blocks else None
        call.enter(self, given)
        if self.calls.place_source is not None:
            call.make_places(self.calls.place_source)
        self.calls.current = call
        return self.taken(module, args, kwargs)

    def returned(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """The module returned, and did not raise."""
        call = self.calls.current
        if call is not None:
            call.returned = self

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """The module returned or raised; leaving the outermost one ends the call."""
        call = self.calls.current
        if call is not None and call.leave(self) and not call.levels:
            self.calls.current = None
            if call.returned is self:
                call.hand_over()

    def _require_registered(self) -> None:
        """Raise where the host holds something else in this memory's place, which never runs."""
        host = self.calls.host
        found = host._modules.get(NAME)
        if found is not self.calls.memory:
            raise RuntimeError(
                f"attach: expected {type(host).__name__}.{NAME} to be the memory that "
                f"attach() registered there, got {type(found).__name__}, whose weights no call "
                "would use or train; detach, wrap the model first (LoRA and the like), then attach"
            )


class BlockHook:
    """The hook after one block, which runs its memory layer."""

    def __init__(self, calls: HostCalls, block: Block, layer: MemoryResidual) -> None:
        self.calls, self.block, self.layer = calls, block, layer
        self.signature = Signature(block.module)
        self.first_runs = FirstRuns()
        self.chunk = getattr(layer.memory.config, "chunk_size", 1)

    def install(self) -> RemovableHandle:
        """Put the hook on the block."""
        # First in line: hooks that record hidden states then see those with the memory.
        return self.block.module.register_forward_hook(self.after, with_kwargs=True, prepend=True)

    def after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """What the block returned, with what its memory adds."""
        calls, block = self.calls, self.block
        x = take_hidden(output, block)
        call = calls.current
        if call is None and in_backward():
            given = self.first_runs.recall(block.path, args, kwargs)
            return put_hidden(output, block, self.run(x, given)[0])

        call = call or HostCall()
        depth = calls.scope == DEPTH
        if depth and calls.refuse_causal:
            refuse_causal_call(block.path, args, kwargs)
        slot = DEPTH if depth else call.slot(block.path)
        call.require_rows_first(block.path, x)
        cache = find_cache(args, kwargs)
        holder = calls.holder(call, x.shape[1], call.cache_around() if cache is None else cache)
        before = tokens_before(holder, slot)
        mask, reset = call.mask_and_reset(
            block.path, x, before, lambda name: self.signature.get(name, args, kwargs)
        )
        source, where = calls.place_source, None
        if source is not None:
            of_block = self.signature.all_of(source.names, args, kwargs)
            where = call.places(source, of_block, x, mask)
        state = call.states.get(slot) if depth else None
        if state is None and holder is not None:
            state = holder.get(slot, self.run)

        given = Given(state, mask, reset, where)
        if may_run_again(module, args, kwargs):
            self.first_runs.remember(args, kwargs, given)
        keep = calls.rollback if can_go_back(holder, x) else 0
        with call.fixed_weights():
            y, state, seen = run_and_remember(self.run, x, given, chunk=self.chunk, keep=keep)
        if depth:
            call.states[slot] = state
        if holder is not None:
            call.results.append((holder, slot, state, x.shape[1], seen))
            if not call.levels:  # the block was called by itself
                call.hand_over()
        return put_hidden(output, block, y)

    def run(self, x: Tensor, given: Given) -> tuple[Tensor, AnyState]:
        """The memory layer on hidden states x (B, N, d)."""
        held = self.layer.memory.output.weight.dtype
        if x.dtype != held and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(
                f"attach: block '{self.block.path}' returned {x.dtype}, and its memory is in "
                f"{held}, the type of the block's first weight; convert the memory, "
                f"attachment.to({x.dtype}), or the host, or run under torch.autocast"
            )
        options: dict[str, Any] = {"mask": given.mask, "reset": given.reset}
        if self.calls.scope == DEPTH and isinstance(self.layer.memory.config, MemoryConfig):
            options["flush"] = True  # the next layer must find what this one wrote
        if given.where is not None:
            options["where"] = given.where
        return self.layer(x, given.state, **options)


def modules_around(host: nn.Module, paths: Sequence[str]) -> list[tuple[nn.Module, bool]]:
    """The modules on the way from the host to its blocks, outermost first; is a block next?"""
    around, nearest = {"": host}, set()
    for path in paths:
        parts = path.split(".")
        called = ""
        for length in range(1, len(parts)):
            name = ".".join(parts[:length])
            module = host.get_submodule(name)
            if not isinstance(module, nn.ModuleList | nn.ModuleDict) and name not in paths:
                around[name], called = module, name
        nearest.add(called)
    return [(module, name in nearest) for name, module in around.items()]


def refuse_carrying(blocks: Sequence[Block]) -> None:
    """Raise where a block has a memory already, attached to a module around it or a wrapper."""
    for block in blocks:
        for hook in block.module._forward_hooks.values():
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, BlockHook):
                raise ValueError(
                    f"attach: block '{block.path}' already carries a memory, attached to a "
                    f"{type(owner.calls.host).__name__} that holds it too; detach that one "
                    "first"
                )
