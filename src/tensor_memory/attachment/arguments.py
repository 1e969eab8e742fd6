"""What the arguments of a host's modules say about its tokens: which are real, where one starts.

The 2-D mask and the position ids are taken from the arguments of the host and of the modules
between it and its blocks. Some hosts change them on the way: a speech encoder makes one token of
many samples, a vision tower puts all images into one row. Then the arguments of the block tell.

Letters: B batch, N tokens, W columns of a mask, A axes of position ids.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tensor_memory.attachment.caches import find_cache, is_static, real_tokens

ArgumentOf = Callable[[str], Any]
"""An argument of one call by its name, None where it was not given."""


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
    """(B, N) or (N,) position ids, or (A, B, N) of several axes, as Qwen2-VL has them."""

    lengths: Tensor | None = None
    """Tokens of each document, or image, of one row: they follow each other."""

    documents: Tensor | None = None
    """(B, N), the number of each token's document, as Mamba-2 takes it."""

    tokens: tuple[int, ...] | None = None
    """B and N in either order, of the ids or hidden states given; None for another input."""

    ids: tuple[int, ...] | None = None
    """(B, N), shape of the token ids given."""

    images: int = 0
    """How many images it was given as its input."""

    holds_tokens: bool = True
    """False where it was given an input of its own that is no row of tokens: pixels, say."""

    additive: bool = False
    """Whether `attention_mask` may be what is added to scores: 0 where a token is real."""

    two_sided: bool = False
    """Whether the module holds an encoder and a decoder, so that its parts speak for themselves."""

    cache: Any = None
    """The cache it was given, where blocks are its parts."""

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

        def given(name: str) -> Any:
            return signature.get(name, args, kwargs)

        mask, pixels = given("attention_mask"), _tensor(given("pixel_values"), (4,))
        cache = _static_cache(args, kwargs) if _is_of_pairs(mask) else None
        # With a static cache generate() makes a 4-D mask, which tells too.
        mask = _tensor(mask, (2,)) if cache is None else real_tokens(mask, cache)
        additive = around is not None and mask is not None and mask.is_floating_point()
        if around is not None and mask is around.attention_mask:
            additive = around.additive
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
        tokens = _tokens((given("input_ids"), given("inputs_embeds"), *tensors))
        ids = _tensor(given("input_ids"), (2,))
        return cls(
            mask,
            _padding(given),
            _tensor(given("position_ids"), (1, 2, 3, 4)),
            lengths_of(given),
            _tensor(given("seq_idx"), (2,)),
            tokens,
            None if ids is None else tuple(ids.shape),
            0 if pixels is None else len(pixels),
            tokens is not None or not tensors,
            additive,
            signature.two_sided,
            named=signature.all_of(names, args, kwargs),
        )

    @property
    def mask(self) -> Tensor | None:
        """(B, W) bool, true where a token is real."""
        given = self.attention_mask
        if given is not None:
            return _marks(given) if self.additive else given != 0
        if self.padding is not None:
            return (self.padding == 0).reshape(-1, self.padding.shape[-1])
        return None


def refuse_4d_mask(signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise where the caller's own mask does not tell padding from what is not attended to."""
    mask = signature.get("attention_mask", args, kwargs)
    readable = isinstance(mask, Mapping | Tensor) and _static_cache(args, kwargs) is not None
    if _is_of_pairs(mask) and not readable:
        got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask: expected shape (B, W), not zero where a token is real, got {got}, "
            "from which the memory cannot tell which tokens are padding; pass the 2-D mask (packed "
            "rows are told apart by position_ids)"
        )


def _is_of_pairs(mask: Any) -> bool:
    """Whether it says what attends to what: of more axes, one per kind of layer, or of blocks."""
    return mask is not None and not (isinstance(mask, Tensor) and mask.ndim <= 2)


def _static_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any | None:
    cache = find_cache(args, kwargs)
    return cache if cache is not None and is_static(cache) else None


def columns_of_call(mask: Tensor, B: int, N: int, before: int | None) -> Tensor | None:
    """The mask (B, N) of this call's tokens; None where `mask` is of other tokens.

    It has a column for each token of the call, or for the `before` tokens of the cache too. Where
    `before` is not known the call's tokens are the last ones.
    """
    W = mask.shape[1]
    fits = W >= N if before is None else W in (N, before + N)
    return mask[:, W - N :].expand(B, N) if fits and mask.shape[0] in (1, B) else None


def mask_of_block(given: ArgumentOf, B: int, N: int) -> Tensor | None:
    """The mask (B, N) that a block is given, where its host made one of the caller's.

    A token is real where another one sees it.
    """
    mask = _tensor(given("attention_mask"), (2, 4))
    if mask is None or mask.shape[-1] != N or mask.shape[0] not in (1, B):
        return None
    sees = _marks(mask)
    return (sees if mask.ndim == 2 else sees.flatten(1, 2).any(1)).expand(B, N)


def refuse_mask(mask: Tensor, path: str, B: int, N: int, before: int | None) -> None:
    """Raise where a caller's mask is not that of a block's tokens; a longer one may be all true."""
    if not torch.compiler.is_compiling() and mask.shape[1] > N and bool(mask.all()):
        return
    cached = f", or {before + N} with those of the cache" if before else ""
    raise ValueError(
        f"attention_mask: expected {N} columns, one for each token that block '{path}' "
        f"sees{cached}, and {B} rows or one, got {tuple(mask.shape)}; the host may drop or add "
        "tokens inside and hand the block no mask of them. Pass a mask of these tokens, or none; a "
        "mask of pairs must go by another name"
    )


def document_starts(positions: Tensor, mask: Tensor | None, B: int, N: int) -> Tensor | None:
    """(B, N) true where a position is not beyond that of the real token before it.

    Equal ones count: a document of one token and the start of the next are both at position 0.
    Never at column 0: a call that continues another starts wherever it starts.

    Of several axes (A, B, N) the first of four counts the tokens. Three alone (time, height, width)
    may fall inside a document, as between the sound and the pictures of a video, so that only zero
    on all of them starts one and another fall is refused.
    """
    if positions.ndim > 3 or (positions.ndim == 3 and positions.shape[-1] != N):
        raise ValueError(
            f"position_ids: expected shape (B, N) = {(B, N)}, or (3, B, N) or (4, B, N) of several "
            f"axes, got {tuple(positions.shape)}, which does not tell the memory where a document "
            "starts; pass one of those, or cu_seq_lens_q"
        )
    if N < 2 or positions.shape[-1] != N:
        return None
    axes = positions if positions.ndim == 3 else positions.reshape(1, -1, N)
    axes = (axes[:1] if len(axes) == 4 else axes).expand(-1, B, N)
    before, known = _real_before(axes, mask)
    falls, same = torch.zeros_like(known), torch.ones_like(known)
    for now, then in zip(axes, before, strict=True):
        falls, same = falls | (same & (now < then)), same & (now == then)
    starts = known & (falls | same)
    tracing = torch.compiler.is_compiling()
    if len(axes) > 1 and not tracing and bool((starts & (axes != 0).any(0)).any()):
        raise ValueError(
            f"position_ids: expected axes {tuple(positions.shape)} that rise within a document and "
            "are all 0 at the start of the next, got some that fall to another value; pass "
            "(4, B, N), whose first axis counts the tokens of each document, or cu_seq_lens_q"
        )
    return starts


def _real_before(axes: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The positions (A, B, N) of the real token before each, and where (B, N) both are real.

    Padding carries positions of no meaning, so each token looks back at a real one.
    """
    B, N = axes.shape[1:]
    column = torch.arange(N, device=axes.device).expand(B, N)
    if mask is None:
        return torch.cat([axes[..., :1], axes[..., :-1]], dim=2), column > 0
    last = torch.where(mask, column, -1).cummax(1).values
    before = torch.cat([torch.full_like(last[:, :1], -1), last[:, :-1]], dim=1)
    return axes.gather(2, before.clamp(min=0).expand_as(axes)), mask & (before >= 0)


def changes(documents: Tensor, B: int, N: int) -> Tensor | None:
    """(B, N) true where the number of a token's document is not that of the token before."""
    if documents.shape[-1] != N:
        return None
    documents = documents.expand(B, N)
    return documents.diff(dim=1, prepend=documents[:, :1]) != 0


def length_starts(lengths: Tensor, B: int, N: int) -> Tensor | None:
    """(B, N) true where one of the lengths starts, not at column 0; None where they do not fit."""
    ends = lengths.cumsum(0)
    if not torch.compiler.is_compiling() and int(ends[-1]) != B * N:
        return None
    starts = torch.zeros(B * N + 1, dtype=torch.bool, device=ends.device)
    starts[ends] = True
    starts = starts[:-1].view(B, N)
    starts[:, 0] = False
    return starts


def blocked_starts(given: ArgumentOf, N: int) -> Tensor | None:
    """(1, N) true where a token does not see the one before it, by the block's mask of pairs."""
    mask = _tensor(given("attention_mask"), (4,))
    if mask is None or mask.shape[-2:] != (N, N):
        return None
    starts = ~_marks(mask)[:1].any(1).diagonal(-1, 1, 2)
    return torch.cat([torch.zeros_like(starts[:, :1]), starts], dim=1)


def lengths_of(given: ArgumentOf) -> Tensor | None:
    """Tokens of each image of a vision tower, or of each document packed into a row."""
    grid = _tensor(given("grid_thw"), (2,))
    if grid is not None:
        return grid.prod(-1)
    for name in ("cu_seqlens", "cu_seq_lens_q", "cu_seqlens_q"):
        ends = _tensor(given(name), (1,))
        if ends is not None and len(ends) > 1:
            return ends.diff()
    return None


def _marks(mask: Tensor) -> Tensor:
    """Where a mask lets tokens through; one of floats is added to scores, unless it holds ones."""
    if not mask.is_floating_point():
        return mask != 0
    return torch.where((mask == 1).any(), mask != 0, mask >= 0)


def _tokens(values: Iterable[Any]) -> tuple[int, ...] | None:
    first = next((value for value in values if isinstance(value, Tensor)), None)
    if first is None or first.ndim not in (2, 3):
        return None
    return tuple(sorted(first.shape[:2]))


def _padding(given: ArgumentOf) -> Tensor | None:
    """The mask of an encoder of torch.nn, of a decoder, of its attention, or XLNet's."""
    names = ("src_key_padding_mask", "tgt_key_padding_mask", "key_padding_mask", "input_mask")
    return next((mask for mask in map(given, names) if _tensor(mask, (1, 2)) is not None), None)


def _tensor(value: Any, ndims: tuple[int, ...]) -> Tensor | None:
    return value if isinstance(value, Tensor) and value.ndim in ndims else None
