"""The memory as a part of a host: its parameters, the hooks on the blocks, who holds the state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tensor_memory.attachment.blocks import Block, placement
from tensor_memory.attachment.caches import (
    WAYS,
    find_cache,
    memory_of,
    refuse_foreign_cache,
    stay_out_of_graphs,
)
from tensor_memory.attachment.compiled import guard_hooks
from tensor_memory.attachment.hooks import DEPTH, Site
from tensor_memory.attachment.host_call import Call, Marks, OpenCall, Signature, refuse_4d_mask
from tensor_memory.attachment.recompute import Streamed, in_backward
from tensor_memory.attachment.stream import Stream
from tensor_memory.config import MemoryConfig
from tensor_memory.module import TensorMemory
from tensor_memory.residual import MemoryResidual
from tensor_memory.state import MemoryState
from tensor_memory.wording import counted

NAME = "tensor_memory"
"""The host's attribute that holds the attachment, and the prefix of its `state_dict` keys."""

_NESTED = "use_nested_tensor"  # of nn.TransformerEncoder


class Attachment(nn.Module):
    """The memory attached to a host, registered there as `tensor_memory`.

    Returned by `attach`; never built by hand. `memory` is the `TensorMemory` shared by all layers
    (None where each has its own), `layers` the `MemoryResidual` of each block in order, `paths`
    the blocks they follow. `parameters()` are the memory's alone.
    """

    def __init__(
        self,
        host: nn.Module,
        blocks: Sequence[Block],
        config: MemoryConfig,
        *,
        share_weights: bool,
        scope: str,
        refuse_causal: bool,
        zero_init: bool,
        residual: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.config, self.scope, self.refuse_causal = config, scope, refuse_causal
        self.paths = [block.path for block in blocks]
        self.dims = [block.dim for block in blocks]
        self.memory = (
            TensorMemory(self.dims[0], config, zero_init=zero_init) if share_weights else None
        )
        self.layers = nn.ModuleList(
            MemoryResidual(
                self.memory or TensorMemory(dim, config, zero_init=zero_init),
                **residual,
                own_memory=not share_weights,
            )
            for dim in self.dims
        )
        for block, layer in zip(blocks, self.layers, strict=True):
            like = placement(block)
            layer.to(like.device, like.dtype)
            if self.memory is not None:
                self.memory.to(like.device, like.dtype)
        self.train(host.training)

        self._open = OpenCall()
        self._stream: Stream | None = None
        self._handles: list[RemovableHandle] = []
        self._unnested: list[nn.Module] = []
        self.detached = False
        self.frozen: list[nn.Parameter] = []
        """The host's parameters that `attach` froze and `detach` gives back."""
        self._sites = [
            Site(self, block, layer) for block, layer in zip(blocks, self.layers, strict=True)
        ]
        self._entries = [
            _Entry(self, module, next_to_blocks=next_to_blocks)
            for module, next_to_blocks in _around(host, self.paths)
        ]

    @property
    def host(self) -> nn.Module:
        """The model that `attach` was called on."""
        return self._entries[0].module

    @property
    def shared(self) -> bool:
        """Whether all layers share one set of memory weights."""
        return self.memory is not None

    def num_parameters(self) -> int:
        """Numbers the memory adds to the host."""
        return sum(p.numel() for p in self.parameters())

    def stream(self, state: Mapping[str, MemoryState] | None = None) -> Stream:
        """Calls that belong together: `with attachment.stream() as s:`, see `Stream`."""
        if state is not None:
            self._require_states(state)
        return Stream(self, state)

    def _require_states(self, state: Mapping[str, MemoryState]) -> None:
        if not isinstance(state, Mapping):
            raise TypeError(
                "stream: expected the states by the path of their blocks, got "
                f"{type(state).__name__}; pass those of an earlier stream: "
                "attachment.stream(s.state)"
            )
        known = [DEPTH] if self.scope == DEPTH else self.paths
        # A block that runs twice in depth has a second state, named by its path and "#1".
        unknown = [slot for slot in state if slot.partition("#")[0] not in known]
        if unknown:
            raise ValueError(
                f"stream: expected states for {', '.join(known)}, got one for "
                f"{', '.join(unknown)}; pass the state of an earlier stream of this model"
            )

    def state_on(self, cache: Any) -> dict[str, MemoryState]:
        """The states a Hugging Face cache carries, by the path of their block."""
        memory = memory_of(cache)
        return dict(memory.states) if memory is not None else {}

    def extra_repr(self) -> str:  # noqa: D102
        kind = "one memory shared" if self.shared else "one memory each"
        return f"{counted(len(self.paths), 'layer')}, {kind}, scope={self.scope!r}"

    def forward(self, x: Any) -> Any:
        """x, unchanged: a host that is an `nn.Sequential` calls whatever is registered on it."""
        return x

    def __getstate__(self) -> dict[str, Any]:
        """What a copy starts from: a copied or unpickled model is inside no stream."""
        return {**vars(self), "_stream": None}

    def open_stream(self, stream: Stream) -> None:
        """Give the state to `stream`; one at a time."""
        if self._stream is not None:
            raise RuntimeError("stream: another stream of this model is open; close it first")
        if self.detached:
            raise RuntimeError(
                "stream: this memory has been taken off its model, whose calls no longer reach "
                "it; open a stream of what attach(model, ...) returned last"
            )
        self._stream = stream

    def close_stream(self) -> None:
        """Take the state from the open stream."""
        self._stream = None

    def install(self) -> None:
        """Put the hooks on the host."""
        stay_out_of_graphs()
        guard_hooks()
        for entry in self._entries:
            self._handles += entry.install()
            if getattr(entry.module, _NESTED, False) is True:
                # nn.TransformerEncoder packs padded rows for a fused kernel that hooks switch off
                setattr(entry.module, _NESTED, False)
                self._unnested.append(entry.module)
        self._handles += [site.install() for site in self._sites]

    def uninstall(self) -> bool:
        """Take the hooks off; whether there were any."""
        guard_hooks()
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        for module in self._unnested:
            setattr(module, _NESTED, True)
        self._unnested = []
        return bool(handles)

    def call(self) -> Call | None:
        """The call of the host under way."""
        return self._open.slot.call

    def enter(self, entry: _Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module around the blocks is entered; the outermost opens the call."""
        compiling = torch.compiler.is_compiling()
        call = self._open.slot.call
        # A call that Ctrl-C cut short never left: hooks run for an Exception, and that is none.
        if call is None or entry.module is self._entries[0].module or call.inside(entry):
            if not compiling:
                self._require_registered()
                if in_backward():
                    entry.streamed.refuse(args, kwargs, stream_open=self._stream is not None)
            call = Call()
        if not call.levels:
            refuse_4d_mask(entry.signature, args, kwargs)
        if self._stream is None:
            refuse_foreign_cache(entry.module, lambda name: entry.signature.get(name, args, kwargs))
        if entry.next_to_blocks:  # further out, it may be the cache of blocks without a memory
            cache = find_cache(args, kwargs)
            if cache is not None:
                WAYS.admit(cache, self._stream)
                call.caches.append(cache)
        if not compiling and self._stream is not None:
            entry.streamed.remember(args, kwargs)
        around = call.levels[-1][1] if call.levels else None
        call.enter(entry, Marks.read(entry.signature, args, kwargs, around))
        self._open.slot.call = call

    def _require_registered(self) -> None:
        """Raise where the host holds something else in this memory's place, which never runs."""
        found = self.host._modules.get(NAME)
        if found is not self:
            raise RuntimeError(
                f"attach: expected {type(self.host).__name__}.{NAME} to be the memory that "
                f"attach() registered there, got {type(found).__name__}, whose weights no call "
                "would use or train; detach, wrap the model first (LoRA and the like), then attach"
            )

    def leave(self, entry: _Entry) -> None:
        """It returned, or raised."""
        call = self._open.slot.call
        if call is not None and call.leave(entry) and not call.levels:
            self._open.slot.call = None
            if call.returned is entry:
                call.hand_over()

    def holder(self, call: Call, tokens: int, cache: Any | None) -> Any:
        """Who keeps the state from call to call: the open stream, else the cache, else nobody."""
        if cache is None:
            return self._stream
        if self._stream is None and self.scope == DEPTH:
            raise ValueError(
                "attach: scope='depth' has no state to keep on a cache: a host that generates "
                "with one attends causally; use scope='layer'"
            )
        return WAYS.hold(cache, self._stream, tokens, call.caches)


class _Entry:
    """The hooks around one module that holds the blocks."""

    def __init__(self, attachment: Attachment, module: nn.Module, *, next_to_blocks: bool) -> None:
        self.attachment, self.module, self.next_to_blocks = attachment, module, next_to_blocks
        self.signature = Signature(module)
        self.streamed = Streamed()

    def install(self) -> list[RemovableHandle]:
        return [
            self.module.register_forward_pre_hook(self.before, with_kwargs=True, prepend=True),
            self.module.register_forward_hook(self.returned),
            self.module.register_forward_hook(self.after, always_call=True),
        ]

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.attachment.enter(self, args, kwargs)

    def returned(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        call = self.attachment.call()
        if call is not None:
            call.returned = self

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.attachment.leave(self)


def _around(host: nn.Module, paths: Sequence[str]) -> list[tuple[nn.Module, bool]]:
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
