"""Whether a host attends causally: what its modules say, and what a call says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from tensor_memory.attachment.blocks import Block, config_value

LEAK = (
    "scope='depth' starts each layer from the state that the layer before it left after the whole "
    "sequence, so that from the second layer on a token would read what later tokens wrote"
)


def is_causal(model: nn.Module, blocks: Sequence[Block]) -> bool:
    """Whether the host attends causally; what its modules do not say counts as causal.

    Hugging Face attention modules carry `is_causal`, and blocks that can be either carry
    `is_decoder`. In `nn.TransformerEncoder` causality is a fact of the call, so it is unknown here.
    """
    if config_value(model, "is_decoder"):
        return True
    said = [
        flag
        for block in blocks
        for module in block.module.modules()
        for flag in (getattr(module, "is_causal", None), getattr(module, "is_decoder", None))
        if isinstance(flag, bool)
    ]
    return not said or any(said)


def refuse_causal_call(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise where a block is told to attend causally: by `is_causal`, or by its 4-D mask."""
    masks = [value for value in (*args, *kwargs.values()) if _is_causal_mask(value)]
    if kwargs.get("is_causal") is True or masks:
        raise ValueError(
            f"attach: block '{path}' is called with a causal mask, and {LEAK}; use scope='layer'"
        )


def _is_causal_mask(value: Any) -> bool:
    """(B, heads, N, columns): no token sees a later one, and the last sees what the first does not.

    The first may see what the last does not: through a window, or in a document of its own.
    """
    if not isinstance(value, Tensor) or value.ndim != 4 or value.shape[-2] < 2:
        return False
    open_ = value == 0 if value.is_floating_point() else value.bool()
    later = open_.triu(1 + value.shape[-1] - value.shape[-2])  # the last columns are the tokens'
    gained = open_[..., -1, :] & ~open_[..., 0, :]
    return bool(gained.any()) and not bool(later.any())
