"""The memory as a part of a host: its parameters and the hooks that run it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from tensor_memory.attachment.blocks import Block, placement
from tensor_memory.attachment.caches import UNTRACED, memory_of
from tensor_memory.attachment.compiled import guard_hooks
from tensor_memory.attachment.hooks import NAME, BlockHook, EntryHook, modules_around
from tensor_memory.attachment.host_call import DEPTH, HostCalls
from tensor_memory.attachment.overrides import (
    Overrides,
    go_with_adapters,
    refuse_continuous_batching,
    warn_if_left_out,
)
from tensor_memory.attachment.places import PlaceSource
from tensor_memory.attachment.stream import Stream
from tensor_memory.build import AnyConfig, AnyState, build_memory
from tensor_memory.config import is_int
from tensor_memory.residual import MemoryResidual
from tensor_memory.wording import counted

_NESTED = "use_nested_tensor"  # of nn.TransformerEncoder


class Attachment(nn.Module):
    """The memory attached to a host, registered there as `tensor_memory`.

    Returned by `attach`; never built by hand. `memory` is the one shared by all layers
    (None where each has its own), `layers` the `MemoryResidual` of each block in order, `paths`
    the blocks they follow. `parameters()` are the memory's alone.
    """

    def __init__(
        self,
        host: nn.Module,
        blocks: Sequence[Block],
        config: AnyConfig,
        *,
        share_weights: bool,
        scope: str,
        refuse_causal: bool,
        place_source: PlaceSource | None,
        zero_init: bool,
        residual: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.config, self.scope = config, scope
        self.paths = [block.path for block in blocks]
        self.dims = [block.dim for block in blocks]
        self.memory = (
            build_memory(self.dims[0], config, zero_init=zero_init) if share_weights else None
        )
        layers = [
            MemoryResidual(
                self.memory or build_memory(dim, config, zero_init=zero_init),
                **residual,
                own_memory=not share_weights,
            )
            for dim in self.dims
        ]
        self.layers = nn.ModuleList(layers)
        for block, layer in zip(blocks, layers, strict=True):
            like = placement(block)
            layer.to(like.device, like.dtype)
            if self.memory is not None:
                self.memory.to(like.device, like.dtype)
        self.train(host.training)

        self.frozen: list[nn.Parameter] = []
        """The host's parameters that `attach` froze and `detach` gives back."""
        self._handles: list[RemovableHandle] = []
        self._taking: list[RemovableHandle] = []
        self._unnested: list[nn.Module] = []
        self._calls = HostCalls(
            host, self, scope=scope, refuse_causal=refuse_causal, place_source=place_source
        )
        self._refusals, self._companions = Overrides(), Overrides()
        self.told_frozen = self.told_left_out = False
        """What has been said about PEFT, which is said once."""
        self.register_state_dict_post_hook(warn_if_left_out)
        self._make_hooks(blocks, layers)

    def _make_hooks(self, blocks: Sequence[Block], layers: Sequence[MemoryResidual]) -> None:
        self._entries = [
            EntryHook(self._calls, module, next_to_blocks=next_to_blocks)
            for module, next_to_blocks in modules_around(self.host, self.paths)
        ]
        self._block_hooks = [
            BlockHook(self._calls, block, layer)
            for block, layer in zip(blocks, layers, strict=True)
        ]

    @property
    def host(self) -> nn.Module:
        """The model that `attach` was called on."""
        return self._calls.host

    @property
    def shared(self) -> bool:
        """Whether all layers share one set of memory weights."""
        return self.memory is not None

    @property
    def rollback(self) -> int:
        """Tokens that can be taken back out of a cache: `crop`, and so assisted decoding.

        64 at first. The hidden states of so many tokens, at most of twice as many, are kept for
        every layer of a cache, and two states beside the one in use. It grows by itself with the
        drafts that are seen. 0 keeps nothing.
        """
        return self._calls.rollback

    @rollback.setter
    def rollback(self, tokens: int) -> None:
        if not is_int(tokens) or tokens < 0:
            raise ValueError(
                f"rollback: expected a number of tokens, 0 or more, got {tokens!r}; 64 is enough "
                "for drafts of about 20"
            )
        self._calls.rollback = tokens

    def num_parameters(self) -> int:
        """Numbers the memory adds to the host."""
        return sum(p.numel() for p in self.parameters())

    def stream(self, state: Mapping[str, AnyState] | None = None) -> Stream:
        """Calls that belong together: `with attachment.stream() as s:`, see `Stream`.

        `state` has the states of an earlier stream by the path of their blocks; a block that is not
        in it starts empty.
        """
        return Stream(self._calls.opened, state, require=self._require_states)

    def _require_states(self, state: Mapping[str, AnyState]) -> None:
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

    def state_on(self, cache: Any) -> dict[str, AnyState]:
        """The states a Hugging Face cache carries, by the path of their block."""
        memory = memory_of(cache)
        if memory is None:
            return {}
        runs = {hook.block.path: hook.run for hook in self._block_hooks}
        for slot in list(memory.to_read):  # after tokens were taken back
            memory.get(slot, runs[slot.partition("#")[0]])
        return dict(memory.states)

    def extra_repr(self) -> str:  # noqa: D102
        kind = "one memory shared" if self.shared else "one memory each"
        return f"{counted(len(self.paths), 'layer')}, {kind}, scope={self.scope!r}"

    def forward(self, x: Any) -> Any:
        """x, unchanged: a host that is an `nn.Sequential` calls whatever is registered on it."""
        return x

    def requires_grad_(self, requires_grad: bool = True) -> Attachment:
        """Train the memory, or do not; saying so here spares a warning that PEFT has frozen it."""
        self.told_frozen = not requires_grad
        return super().requires_grad_(requires_grad)

    def move_to(self, host: nn.Module) -> None:
        """Become a part of `host`, a module inside the one that has the memory now.

        For a host that comes out of its PEFT wrapper; blocks are known by their paths in it then.
        """
        around = self.host
        inside = [path for path, module in around.named_modules() if module is host and path]
        if not inside:
            return
        was_on = self.uninstall()
        self._companions.remove()
        delattr(around, NAME)
        self.paths = [path.removeprefix(f"{inside[0]}.") for path in self.paths]
        blocks = [
            replace(hook.block, path=path, module=host.get_submodule(path))
            for path, hook in zip(self.paths, self._block_hooks, strict=True)
        ]
        self._calls.host = host
        self._make_hooks(blocks, [hook.layer for hook in self._block_hooks])
        host.add_module(NAME, self)
        if was_on:
            self.install()
        else:
            self.disable()

    def install(self) -> None:
        """Put the hooks on the host."""
        UNTRACED.update()
        guard_hooks()
        refuse_continuous_batching(self.host, self._refusals)
        go_with_adapters(self.host, self, self._companions)
        for entry in self._entries:
            self._handles += entry.install()
            if getattr(entry.module, _NESTED, False) is True:
                # nn.TransformerEncoder packs padded rows for a fused kernel that hooks switch off
                setattr(entry.module, _NESTED, False)
                self._unnested.append(entry.module)
        self._handles += [hook.install() for hook in self._block_hooks]

    def uninstall(self) -> bool:
        """Take the hooks off; whether there were any."""
        guard_hooks()
        handles, self._handles = self._handles, []
        for handle in (*handles, *self._taking):
            handle.remove()
        self._taking = []
        self._refusals.remove()
        for module in self._unnested:
            setattr(module, _NESTED, True)
        self._unnested = []
        return bool(handles)

    def disable(self) -> bool:
        """Let the host run as if detached; whether it ran with the memory before.

        Arguments that the host would not understand are still taken out of its calls.
        """
        was_on = self.uninstall()
        for entry in self._entries:
            self._taking += entry.install_taking()
        return was_on

    def enable(self) -> None:
        """Undo `disable`."""
        self.uninstall()
        self.install()

    def retire(self) -> None:
        """Take the hooks off for good: no stream of this memory opens any more."""
        self.uninstall()
        self._companions.remove()
        self._calls.opened.detached = True
