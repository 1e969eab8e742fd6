"""The places of a host's tokens, taken from the arguments of its call by name.

Letters: B batch, N tokens, H heads, n axes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tensor_memory.attachment.arguments import Signature
from tensor_memory.attachment.recompute import in_backward
from tensor_memory.build import AnyConfig
from tensor_memory.config import PlaceConfig

Where = str | Callable[..., Tensor]
"""An argument's name, or a function whose parameters are named like arguments."""

_SCALED = (
    "scale them with a function, such as "
    "where=lambda position_ids: position_ids[..., None] / 512 * 2 - 1"
)


class PlaceSource:
    """What `attach(..., where=)` says: which arguments are needed, and how they become places."""

    def __init__(self, where: Where, config: PlaceConfig) -> None:
        self.config = config
        self.function = None if isinstance(where, str) else where
        parameters = {where: None} if isinstance(where, str) else _parameters(where)
        self.names = tuple(parameters)
        self.optional = {n for n, p in parameters.items() if p and p.default is not p.empty}
        self.described = (
            f"the argument '{where}'" if isinstance(where, str) else "the function where="
        )

    @classmethod
    def of(cls, where: Any, config: AnyConfig) -> PlaceSource | None:
        """The source that `attach` was given; None where the memory learns its places."""
        if not isinstance(config, PlaceConfig) or config.places == "learned":
            if where is None:
                return None
            raise ValueError(
                "where: expected None, since this memory learns its places from the tokens, got "
                f"{where!r:.80}; leave where out, or choose PlaceConfig(places='given') or "
                "'offset'"
            )
        if where is None:
            raise ValueError(
                f"where: expected the argument of the host's call that holds the places, since "
                f"the config has places={config.places!r}, got None; pass where='pose' (a name) or "
                "where=lambda pose: ... (a function of arguments), or choose places='learned'"
            )
        if not (isinstance(where, str) and where.isidentifier()) and not callable(where):
            raise TypeError(
                "where: expected the name of an argument of the host's call, or a function of "
                f"such arguments, got {where!r:.80}; write where='pose' or where=lambda pose: ..."
            )
        chosen: Any = where
        return cls(chosen, config)

    def unknown_to(self, module: nn.Module, signature: Signature) -> frozenset[str]:
        """The names that `module` cannot be called with: no forward inside it has them."""
        known = set(signature.places)
        if signature.takes_any:  # it may hand on what it does not name itself
            known |= {name for part in module.modules() for name in Signature(part).places}
        return frozenset(self.names) - known

    def missing(self, given: Mapping[str, Any]) -> list[str]:
        """Names of arguments that are needed and not given."""
        return [n for n in self.names if n not in given and n not in self.optional]

    def make(self, given: Mapping[str, Any]) -> Any:
        """What the arguments say, unchecked."""
        for name in self.missing(given):
            again = (
                "; the host runs again in the backward pass, and its caller's arguments are gone: "
                "checkpoint its blocks one by one"
            )
            raise ValueError(
                f"where: expected the argument '{name}' in the call of the host, got none; pass "
                f"{name}=, or attach with another where={again if in_backward() else ''}"
            )
        return given[self.names[0]] if self.function is None else self.function(**given)

    def make_in_block(self, given: Mapping[str, Any]) -> Any:
        """What the arguments say, made while a block runs, which may be checkpointed.

        Run again, the block is given the places of its first run: what was saved to make them
        must not be counted among what the block saves.
        """
        if torch.compiler.is_compiling():
            return self.make(given)
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
            return self.make(given)

    def checked(self, found: Any, x: Tensor, mask: Tensor | None) -> Tensor:
        """Places (B, N, n) or (B, N, H, n) of hidden states x (B, N, d); else an error."""
        self._require_fit(found, x)
        places = found.to(x.device)
        if not torch.compiler.is_compiling():
            self._require_inside(places.detach(), mask)
        return places.expand(x.shape[0], *places.shape[1:])

    def _require_fit(self, found: Any, x: Tensor) -> None:
        if not isinstance(found, Tensor):
            raise TypeError(
                f"where: expected a tensor of places from {self.described}, got "
                f"{type(found).__name__}; give a function that makes one: where=lambda pose: ..."
            )
        if not found.is_floating_point():
            raise TypeError(
                f"where: expected floats in [-1, 1] from {self.described}, got {found.dtype}; "
                + _SCALED
            )
        B, N, (H, n) = *x.shape[:2], (self.config.heads, self.config.axes)
        shape = tuple(found.shape)
        if shape[:1] in ((1,), (B,)) and shape[1:] in ((N, n), (N, H, n)):
            return
        remedy = "give one place per token of the call"
        if len(shape) > 1 and shape[1] > N:
            remedy = (
                "give the places of this call's tokens alone; generate() calls with one token per "
                "step: pick by position, where=lambda pose, position_ids: ..."
            )
        raise ValueError(
            f"where: expected places of shape (B, N, n) = {(B, N, n)}, or one row (1, N, n) for "
            f"all, or (B, N, H, n) = {(B, N, H, n)}, from {self.described}, got {shape}; {remedy}"
        )

    def _require_inside(self, places: Tensor, mask: Tensor | None) -> None:
        """Raise where a real token's place is outside the grid; the CPU waits for the device."""
        if places.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        wraps = torch.tensor(self.config.wrap[::-1], device=places.device)  # type: ignore[index]
        slack = 4 * torch.finfo(places.dtype).eps
        outside = ~torch.where(wraps, places.isfinite(), places.abs() <= 1 + slack)
        if mask is not None:
            outside = outside & mask.view(*mask.shape, *[1] * (places.ndim - 2))
        if bool(outside.any()):
            at = outside.nonzero()[0].tolist()
            row, token, coordinate = at[0], at[1], at[-1]
            value = places.expand(outside.shape)[tuple(at)].item()
            remedy = f"{_SCALED}, or let the axis wrap: PlaceConfig(wrap=True)"
            if math.isnan(value):
                remedy = "mask tokens whose place is not known"
            raise ValueError(
                f"where: expected places in [-1, 1] from {self.described}, got {value:g} (row "
                f"{row}, token {token}, coordinate {coordinate}); {remedy}"
            )


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # functions written in C do not tell
        parameters = None
    if parameters is None or any(
        p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters.values()
    ):
        raise TypeError(
            "where: expected a function whose parameters are named like arguments of the host's "
            f"call, got {function!r}; write where=lambda pose: ..."
        )
    return parameters
