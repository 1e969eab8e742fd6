"""Put the memory on an existing Transformer, take it off, switch it off for a while."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal

from torch import nn

from tensor_memory.attachment.attachment import Attachment
from tensor_memory.attachment.blocks import Block, Layers, find_blocks, placement
from tensor_memory.attachment.causal_hosts import LEAK, is_causal
from tensor_memory.attachment.compiled import refuse_compiled
from tensor_memory.attachment.hooks import NAME, refuse_carrying
from tensor_memory.attachment.memory_layers import memory_layers, parts
from tensor_memory.attachment.places import PlaceSource, Where
from tensor_memory.build import AnyConfig
from tensor_memory.config import MemoryConfig, PlaceConfig
from tensor_memory.residual import MemoryResidual


def attach(
    model: nn.Module,
    config: AnyConfig | None = None,
    *,
    where: Where | None = None,
    layers: Layers = "auto",
    every: int = 1,
    dim: int | None = None,
    batch_first: bool | None = None,
    share_weights: bool = True,
    scope: Literal["layer", "depth"] = "layer",
    causal: bool | Literal["auto"] = "auto",
    zero_init: bool = False,
    freeze_host: bool = False,
    gate_init: float = 0.0,
    norm: bool = True,
    dropout: float = 0.0,
    drop_path: float = 0.0,
) -> Attachment:
    """Put a memory after the blocks of `model`, which stays the object it was.

    Args:
        model: the host, any module with Transformer blocks.
        config: what the memory is: a `MemoryConfig` (the paper's, by default) or a `PlaceConfig`.
        where: for a `PlaceConfig` whose places are given or offset: the name of the argument of
            the host's call that holds them, (B, N, n) in [-1, 1], or a function of arguments,
            which are known by the names of its parameters: `lambda position_ids: ...`. An
            argument that the host does not know is taken out of the call. One that the caller
            does not give is taken from the modules inside that are given it.
        layers: "auto" finds the host's row of blocks; otherwise a module path, a list of them, a
            glob such as "encoder.layer.*", or a predicate (path, module) -> bool.
        every: use every Nth of those blocks only.
        dim: width of the blocks, where it cannot be inferred.
        batch_first: whether blocks return (B, N, d) or (N, B, d), where it cannot be inferred.
        share_weights: one memory for all layers (the paper's parameter count), or one each.
        scope: "layer": each layer owns its state. "depth": one state is threaded through the
            layers and flushed after each, on bidirectional hosts only.
        causal: whether the host attends causally; "auto" asks its modules, and what they do not
            say counts as causal.
        zero_init: the host's outputs stay as they are until the memory has been trained.
        freeze_host: train the memory alone; `detach` gives the host its gradients back.
        gate_init: initial γ of every layer, as are the following of `MemoryResidual`.
        norm: LayerNorm before the memory.
        dropout: probability of dropping single features of the readout.
        drop_path: probability of dropping a row's whole readout.

    Raises:
        NoBlocksFoundError: no blocks found, or `layers` matches nothing.
        ValueError: already attached, a memory built in by hand, a width or an order of axes that
            cannot be inferred or differs, scope="depth" on a causal host, or a host that is
            distributed already (attach first, then wrap). The host is then left as it was.

    >>> host = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 2,
    ...                              enable_nested_tensor=False)
    >>> attachment = attach(host, MemoryConfig(channels=4, grid=(3, 3, 3), chunk_size=2))
    >>> attachment.paths, attachment.num_parameters()
    (['layers.0', 'layers.1'], 987)
    >>> detach(host)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"attach: expected a model (torch.nn.Module) first, got {type(model).__name__}; "
            "call attach(model, config)"
        )
    config = MemoryConfig() if config is None else config
    if not isinstance(config, MemoryConfig | PlaceConfig):
        raise TypeError(
            f"config: expected a MemoryConfig or a PlaceConfig, got {type(config).__name__}; "
            "MemoryConfig.from_dict() makes one of a dictionary"
        )
    place_source = PlaceSource.of(where, config)
    for name, choice in (
        ("batch_first", True if batch_first is None else batch_first),
        ("share_weights", share_weights),
        ("zero_init", zero_init),
        ("freeze_host", freeze_host),
    ):
        if not isinstance(choice, bool):
            raise TypeError(
                f"{name}: expected True or False, got {choice!r:.80}; leave it out for the default"
            )
    if not isinstance(scope, str) or scope not in ("layer", "depth"):
        raise ValueError(
            f"scope: expected 'layer' or 'depth', got {scope!r:.80}; leave it out for 'layer'"
        )
    if not isinstance(causal, bool) and not (isinstance(causal, str) and causal == "auto"):
        raise ValueError(
            f"causal: expected True, False or 'auto', got {causal!r:.80}; leave it out for 'auto'"
        )
    refuse_compiled(model)
    _require_unwrapped(model)
    for path, part in model.named_modules():
        if isinstance(part, Attachment):
            owner = path.removesuffix(NAME).removesuffix(".")
            inner = f"its part '{owner}' has, so detach the inner one: detach(model.{owner})"
            raise ValueError(
                f"attach: {type(model).__name__} already has a memory attached; "
                + (f"{inner} first" if owner else "detach(model) first")
            )
    built_in = [path for path, _ in parts(model, MemoryResidual)]
    if built_in:
        raise ValueError(
            f"attach: expected a model without a memory, got {type(model).__name__} with one "
            f"built in at {', '.join(repr(path) for path in built_in[:3])}; use that one, or take "
            "it out first"
        )
    if hasattr(model, NAME):
        raise ValueError(
            f"attach: {type(model).__name__} already has an attribute '{NAME}', where the memory "
            "would be registered; rename it"
        )
    blocks = find_blocks(model, layers, every=every, dim=dim, batch_first=batch_first)
    refuse_carrying(blocks)
    if scope == "depth" and (is_causal(model, blocks) if causal == "auto" else causal):
        known = "counts as causal" if causal == "auto" else "is causal"
        raise ValueError(
            f"attach: {type(model).__name__} {known}, and {LEAK}; use scope='layer', or pass "
            "causal=False if its tokens attend to later ones too"
        )
    if share_weights:
        _require_shareable(blocks)
    attachment = Attachment(
        model,
        blocks,
        config,
        share_weights=share_weights,
        scope=scope,
        refuse_causal=causal == "auto",
        place_source=place_source,
        zero_init=zero_init,
        residual={
            "gate_init": gate_init,
            "norm": norm,
            "dropout": dropout,
            "drop_path": drop_path,
        },
    )
    with ExitStack() as undo:  # a host that refuses half-way is left as it was
        undo.callback(_unfreeze, attachment)
        undo.callback(attachment.retire)
        if freeze_host:
            attachment.frozen = [p for p in model.parameters() if p.requires_grad]
            for parameter in attachment.frozen:
                parameter.requires_grad_(False)
        attachment.install()
        model.add_module(NAME, attachment)
        undo.pop_all()
    return attachment


def detach(model: nn.Module) -> None:
    """Take the memory off: the host is what it was before `attach`, bit for bit."""
    attachment = attachment_of(model, "detach")
    delattr(attachment.host, NAME)  # `model` may be a wrapper that hands on what it is asked for
    attachment.retire()
    _unfreeze(attachment)


@contextmanager
def memory_disabled(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes what it computes without its memories, attached or built in.

    They neither read nor write. A cache filled inside cannot be continued outside: the memory has
    not seen its tokens. A `MemoryResidual` built in by hand returns x and the state that it was
    given.
    """
    layers = memory_layers(model, "memory_disabled")
    attachments = [attachment for _, attachment in parts(model, Attachment)]
    attached = {layer for attachment in attachments for layer in attachment.layers}
    built_in = []
    for path, layer in layers:
        if not isinstance(layer, MemoryResidual):
            raise ValueError(
                f"memory_disabled: expected memories inside a MemoryResidual, got a "
                f"{type(layer).__name__} by itself at {path!r}: what the model would do without it "
                "is not known; put it into a MemoryResidual"
            )
        if layer not in attached:
            built_in.append((layer, layer.disabled))
    switched_off = [attachment for attachment in attachments if attachment.disable()]
    for layer, _ in built_in:
        layer.disabled = True
    try:
        yield
    finally:
        for layer, before in built_in:
            layer.disabled = before
        for attachment in switched_off:
            if any(attachment is part for part in model.modules()):
                attachment.enable()


def attachment_of(model: nn.Module, asker: str = "attachment_of") -> Attachment:
    """The attachment of a host; an error where there is none."""
    attachment = getattr(model, NAME, None)
    if not isinstance(model, nn.Module) or isinstance(model, Attachment):
        raise TypeError(
            f"{asker}: expected the model that attach(model, ...) was called on, "
            f"got {type(model).__name__}; pass that model"
        )
    if not isinstance(attachment, Attachment):
        raise ValueError(
            f"{asker}: expected a model with a memory attached, got {type(model).__name__} without "
            "one; call attach(model, ...) first"
        )
    return attachment


def _unfreeze(attachment: Attachment) -> None:
    for parameter in attachment.frozen:
        parameter.requires_grad_(True)
    attachment.frozen = []


def _require_unwrapped(model: nn.Module) -> None:
    """Raise where gradients are exchanged by a wrapper that would not know the memory's."""
    sharded = sys.modules.get("torch.distributed.fsdp")  # importing it takes seconds
    wrappers = (
        nn.DataParallel,
        nn.parallel.DistributedDataParallel,
        *((sharded.FullyShardedDataParallel, sharded.FSDPModule) if sharded is not None else ()),
    )
    for part in model.modules():
        if isinstance(part, wrappers):
            raise ValueError(
                f"attach: expected a model that is not distributed yet, got "
                f"{type(part).__name__}, which would leave the memory's gradients out of its "
                "exchange; attach first, then wrap"
            )


def _require_shareable(blocks: list[Block]) -> None:
    for what, values in (
        ("widths", {block.dim for block in blocks}),
        ("devices", {str(placement(block).device) for block in blocks}),
    ):
        if len(values) > 1:
            raise ValueError(
                f"attach: one memory cannot be shared by blocks of several {what} "
                f"({', '.join(map(str, sorted(values)))}); pass share_weights=False, or name "
                "blocks that agree with layers="
            )
