"""What the arguments of a module around the blocks say about its tokens.

Blocks see a 4-D attention mask or none, so the 2-D mask and the position ids are taken from the
arguments of the host and of the modules between it and its blocks.

Letters: B batch, N tokens, W columns of a mask, at least N.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tensor_memory.attachment.caches import find_cache


class Signature:
    """Finds arguments by name in a call of one module, positional ones too."""

    def __init__(self, module: nn.Module) -> None:
        parameters = inspect.signature(module.forward).parameters
        self.places = {name: place for place, name in enumerate(parameters)}
        self.takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        config = getattr(module, "config", None)
        self.two_sided = {"src_key_padding_mask", "tgt_key_padding_mask"} <= set(parameters) or (
            getattr(config, "is_encoder_decoder", None) is True
        )
        """An encoder and a decoder: what it is given about one says nothing of the other."""

    def get(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The argument, or None where it was not given."""
        place = self.places.get(name)
        if name in kwargs:
            return kwargs[name]
        return args[place] if place is not None and place < len(args) else None

    def all_of(
        self, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Those of the named arguments that were given."""
        found = {name: self.get(name, args, kwargs) for name in names}
        return {name: value for name, value in found.items() if value is not None}


@dataclass
class TokenArguments:
    """What one level of the call says about its tokens, as the caller gave it."""

    attention_mask: Tensor | None = None
    """(B, W), not zero where a token is real; its last N columns belong to this call."""

    padding: Tensor | None = None
    """(B, N) or (N,): torch.nn's mask, true or not zero where a token is not real."""

    positions: Tensor | None = None
    """(B, N) or (N,) position ids."""

    tokens: tuple[int, ...] | None = None
    """B and N in either order, of the ids or hidden states given; None for another input."""

    ids: tuple[int, ...] | None = None
    """(B, N), shape of the token ids given."""

    holds_tokens: bool = True
    """False where it was given an input of its own that is no row of tokens: pixels, say."""

    additive: bool = False
    """Whether `attention_mask` may be what is added to scores: 0 where a token is real."""

    two_sided: bool = False
    """Whether the module holds an encoder and a decoder, so that its parts speak for themselves."""

    named: dict[str, Any] = field(default_factory=dict)
    """The arguments that places are made of, of those that were given."""

    @classmethod
    def read(
        cls,
        signature: Signature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        around: TokenArguments | None = None,
        names: Sequence[str] = (),
    ) -> TokenArguments:
        """Take the 2-D mask and the position ids out of a module's arguments.

        `around` is what the module outside was given: a mask of floats that a host makes itself, as
        Longformer does, is added to its scores. `names` are kept in `named`.
        """
        mask = _tensor(signature.get("attention_mask", args, kwargs), (2,))
        additive = around is not None and mask is not None and mask.is_floating_point()
        if around is not None and mask is around.attention_mask:
            additive = around.additive
        tokens = _tokens(signature, args, kwargs)
        ids = _tensor(signature.get("input_ids", args, kwargs), (2,))
        return cls(
            mask,
            _padding(signature, args, kwargs),
            _tensor(signature.get("position_ids", args, kwargs), (1, 2)),
            tokens,
            None if ids is None else tuple(ids.shape),
            tokens is not None or not any(isinstance(v, Tensor) for v in (*args, *kwargs.values())),
            additive,
            signature.two_sided,
            signature.all_of(names, args, kwargs),
        )

    @property
    def mask(self) -> Tensor | None:
        """(B, W) bool, true where a token is real."""
        given = self.attention_mask
        if given is not None and self.additive:  # ones tell that it marks tokens after all
            return torch.where((given == 1).any(), given != 0, given >= 0)
        if given is not None:
            return given != 0
        if self.padding is not None:
            return (self.padding == 0).reshape(-1, self.padding.shape[-1])
        return None


def refuse_4d_mask(signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise where the caller's own mask does not tell padding from what is not attended to."""
    mask = signature.get("attention_mask", args, kwargs)
    if isinstance(mask, Mapping) or (isinstance(mask, Tensor) and mask.ndim > 2):
        find_cache(args, kwargs)  # generate() makes such masks for static caches, refused by name
        got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask: expected shape (B, W), not zero where a token is real, got {got}, "
            "from which the memory cannot tell which tokens are padding; pass the 2-D mask (packed "
            "rows are told apart by position_ids)"
        )


def last_columns(mask: Tensor | None, B: int, N: int) -> Tensor | None:
    """The mask (B, N) of this call's tokens, which are the last N columns of (B or 1, W)."""
    if mask is None:
        return None
    if mask.shape[1] < N or mask.shape[0] not in (1, B):
        raise ValueError(
            f"attention_mask: expected shape (B, at least N) = ({B}, {N} or more) like the hidden "
            f"states of the blocks that carry the memory, got {tuple(mask.shape)}; a mask of "
            "pairs, or of fewer tokens than the blocks see, must go by another name, and the "
            "memory then has none"
        )
    return mask[:, mask.shape[1] - N :].expand(B, N)


def document_starts(positions: Tensor | None, mask: Tensor | None, B: int, N: int) -> Tensor | None:
    """(B, N) true where a position is not beyond that of the real token before it.

    Equal ones count: a document of one token and the start of the next are both at position 0.
    Never at column 0: a call that continues another starts wherever it starts.
    """
    if positions is None or N < 2 or positions.shape[-1] != N:
        return None
    positions = positions.reshape(-1, N).expand(B, N)
    if mask is None:
        starts = positions[:, 1:] <= positions[:, :-1]
        starts = torch.cat([torch.zeros_like(starts[:, :1]), starts], dim=1)
    else:  # padding carries positions of no meaning, so each token looks back at a real one
        column = torch.arange(N, device=positions.device).expand(B, N)
        last_real = torch.where(mask, column, -1).cummax(1).values
        before = torch.cat([torch.full_like(last_real[:, :1], -1), last_real[:, :-1]], dim=1)
        earlier = positions.gather(1, before.clamp(min=0))
        starts = mask & (before >= 0) & (positions <= earlier)
    if not torch.compiler.is_compiling() and not bool(starts.any()):
        return None
    return starts


def _tokens(
    signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, ...] | None:
    named = [signature.get(name, args, kwargs) for name in ("input_ids", "inputs_embeds")]
    given = [v for v in (*named, *args, *kwargs.values()) if isinstance(v, Tensor)]
    if not given or given[0].ndim not in (2, 3):
        return None
    return tuple(sorted(given[0].shape[:2]))


def _padding(signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The mask of an encoder of torch.nn, or of a decoder."""
    named = (signature.get(f"{of}_key_padding_mask", args, kwargs) for of in ("src", "tgt"))
    return next((mask for mask in named if _tensor(mask, (1, 2)) is not None), None)


def _tensor(value: Any, ndims: tuple[int, ...]) -> Tensor | None:
    return value if isinstance(value, Tensor) and value.ndim in ndims else None
