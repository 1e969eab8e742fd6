"""Finding the repeated blocks of a Transformer by their structure; their width and their place.

A block is one of a row of siblings that each mix tokens: by attention (a module with query, key and
value projections inside) with weights beside it (a feed-forward part), or by a recurrence or a
short convolution (Mamba and its kin), alone too. In a row of one class some may hold another part
in its place, as NemotronH's do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from tensor_memory.config import is_int

Layers = str | Sequence[str] | Callable[[str, nn.Module], bool]

_FUSED = ("qkv", "wqkv", "c_attn", "in_proj", "query_key_value", "qkv_proj")
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)
_RECURRENT = ("mixer", "mamba", "mamba2", "deltanet", "rglru", "ssm", "lstm", "lstmlayer")
"""How the names of classes end that mix tokens without attention."""

_STREAMS = ("hyperconnection", "hyper_connection", "altup")
"""Names of the parts with which a block mixes several residual streams."""

_TOKENS_FIRST = frozenset({"xlnet", "fsmt"})
"""Hosts of transformers, by their `model_type`, whose blocks return (N, B, d)."""


class NoBlocksFoundError(ValueError):
    """The host holds nothing that looks like a row of Transformer blocks, or nothing matched."""


@dataclass(frozen=True)
class Block:
    """One place where a memory goes: after this module of the host."""

    path: str
    module: nn.Module
    dim: int
    """d, width of the hidden states the block returns."""

    sequence_first: bool
    """Hidden states are (N, B, d), as `nn.MultiheadAttention` has them by default."""


def find_blocks(
    model: nn.Module,
    layers: Layers = "auto",
    *,
    every: int = 1,
    dim: int | None = None,
    batch_first: bool | None = None,
) -> list[Block]:
    """The blocks of `model` named by `layers`, every Nth of them, with their widths.

    Raises:
        NoBlocksFoundError: nothing found; lists what could have been meant.
        ValueError: several rows of blocks, a width that cannot be inferred or is another one, or
            an order of axes that cannot be inferred.
    """
    if not is_int(every):
        raise TypeError(
            f"every: expected a whole number (every Nth block), got {every!r:.80}; 1 takes all"
        )
    if every < 1:
        raise ValueError(f"every: expected at least 1 (every Nth block), got {every}; 1 takes all")
    if dim is not None and (not is_int(dim) or dim < 1):
        raise TypeError(
            f"dim: expected a positive whole number or None, got {dim!r:.80}; leave it out where "
            "the width can be inferred"
        )
    found = _auto(model) if isinstance(layers, str) and layers == "auto" else _named(model, layers)
    blocks = []
    for path, module in found[::every]:
        _require_one_stream(path, module)
        inferred = _width(module, config_value(model, "hidden_size"))
        if inferred is None and dim is None:
            raise ValueError(
                f"attach: the width of block '{path}' ({type(module).__name__}) cannot be "
                "inferred from its norms and projections; pass dim="
            )
        if dim is not None and inferred is not None and dim != inferred:
            raise ValueError(
                f"dim: expected {inferred}, the width of block '{path}' "
                f"({type(module).__name__}), got {dim}; leave dim out or pass {inferred}"
            )
        width = inferred or dim
        assert width is not None
        if batch_first is None:
            _refuse_tokens_first(model, path)
            sequence_first = _is_sequence_first(path, module)
        else:
            sequence_first = not batch_first
        blocks.append(Block(path, module, width, sequence_first))
    return blocks


def placement(block: Block) -> Tensor:
    """An empty tensor on the device and of the type that the memory takes after the block's.

    Weights of one byte are stored in that type and never computed with.
    """
    like = torch.empty(0)
    for parameter in block.module.parameters():
        if parameter.is_floating_point() and parameter.element_size() > 1:
            like = parameter.new_empty(0)
            break
    return like.new_empty(0, device=_offloaded_to(block)) if like.is_meta else like


def _offloaded_to(block: Block) -> Any:
    """Where accelerate runs a block whose weights it keeps elsewhere; else where they are."""
    for part in block.module.modules():
        hook: Any = getattr(part, "_hf_hook", None)
        for one in getattr(hook, "hooks", (hook,)):
            if getattr(one, "offload", False):
                return one.execution_device
    return "meta"


def _auto(model: nn.Module) -> list[tuple[str, nn.Module]]:
    rows = {
        path: container
        for path, container in _containers(model)
        if _is_row(list(container.children()))
    }
    outermost = {
        path: row
        for path, row in rows.items()
        if not any(path != other and path.startswith(f"{other}.") for other in rows)
    }
    if not outermost:
        raise NoBlocksFoundError(
            f"attach: expected a row of Transformer blocks in {type(model).__name__}, got none; "
            + _candidates(model)
        )
    if len(outermost) > 1:
        choices = ", ".join(f"'{_join(path, '*')}'" for path in outermost)
        raise ValueError(
            f"attach: {type(model).__name__} has several rows of Transformer blocks; "
            f"choose with layers= one of {choices}, or a list of paths"
        )
    ((path, row),) = outermost.items()
    return [(_join(path, name), child) for name, child in row.named_children()]


def _named(model: nn.Module, layers: Layers) -> list[tuple[str, nn.Module]]:
    modules = [(path, module) for path, module in model.named_modules() if path]
    if callable(layers):
        found = [(path, module) for path, module in modules if layers(path, module)]
        asked = "the predicate given as layers="
    else:
        found, asked = [], f"layers={layers!r}"
        for pattern in _patterns(layers):
            matched = [(path, module) for path, module in modules if _matches(path, pattern)]
            if not matched:
                raise NoBlocksFoundError(
                    f"attach: expected modules of {type(model).__name__} that {pattern!r} matches, "
                    f"got none; {_candidates(model)}"
                )
            found += [item for item in matched if item not in found]
    if not found:
        raise NoBlocksFoundError(
            f"attach: expected modules of {type(model).__name__} that {asked} matches, got none; "
            + _candidates(model)
        )
    for path, module in found:
        if isinstance(module, _NEVER_CALLED):
            raise ValueError(
                f"attach: '{path}' is a {type(module).__name__}, which is never called itself; "
                f"name its blocks, as in layers='{path}.*'"
            )
    return found


def _patterns(layers: object) -> list[str]:
    patterns = [layers] if isinstance(layers, str) else layers
    if not isinstance(patterns, Sequence) or not all(isinstance(p, str) for p in patterns):
        raise TypeError(
            "layers: expected 'auto', a module path, a glob such as 'encoder.layer.*', a list of "
            f"those, or a predicate (path, module) -> bool, got {layers!r}; number 3 of a row is "
            "named by its path, as in 'encoder.layer.3'"
        )
    return [str(pattern) for pattern in patterns]


def _matches(path: str, pattern: str) -> bool:
    """Glob by segments: `*` never crosses a dot, so 'h.*' does not mean 'h.0.attn'."""
    parts, wanted = path.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _containers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module):
            yield path, module


def _candidates(model: nn.Module) -> str:
    lines = []
    for path, container in _containers(model):
        for inner, row in _rows_in(container):
            kinds = {type(part).__name__ for part in row}
            if len(kinds) == 1 and len(row) > 1:
                lines.append(f"'{_join(path, inner)}' ({len(row)} × {kinds.pop()})")
    if not lines:
        top = ", ".join(f"'{n}' ({type(m).__name__})" for n, m in model.named_children())
        return f"name blocks with layers=; its parts are {top or 'none'}"
    return "name blocks with layers=; its repeated modules are " + ", ".join(lines)


def _rows_in(container: nn.Module) -> list[tuple[str, list[nn.Module]]]:
    """What may repeat in a container, with its glob: its children, or the parts of their lists."""
    children = list(container.children())
    if not all(isinstance(child, _NEVER_CALLED) for child in children):
        return [("*", children)]
    parts = [dict(child.named_children()) for child in children]
    names = [name for name in parts[0] if all(name in others for others in parts)]
    return [(f"*.{name}", [those[name] for those in parts]) for name in names]


def _is_row(children: list[nn.Module]) -> bool:
    """Whether all are blocks, or of the class of one."""
    kinds = {type(child) for child in children if _is_block(child)} - {nn.Sequential}
    return all(_is_block(child) or type(child) in kinds for child in children)


def _is_block(module: nn.Module) -> bool:
    if isinstance(module, _NEVER_CALLED):
        return False
    parts = [part for part in module.modules() if part is not module]
    if any(_recurs(part) for part in parts):
        return True
    attention = [part for part in parts if _attends(part)]
    inside = {id(part) for top in attention for part in top.modules()}
    return bool(attention) and any(
        id(part) not in inside and len(_weight_shape(part)) == 2 for part in module.modules()
    )


def _recurs(module: nn.Module) -> bool:
    """Whether it mixes tokens without attention; a short convolution per channel tells too.

    Long ones are those of audio codecs, 7 and more.
    """
    if isinstance(module, nn.Conv1d):
        return module.groups == module.in_channels > 1 and module.kernel_size[0] <= 4
    return type(module).__name__.lower().endswith(_RECURRENT)


def _attends(module: nn.Module) -> bool:
    kind = type(module).__name__.lower()
    if isinstance(module, nn.MultiheadAttention) or "attention" in kind or kind.endswith("attn"):
        return True
    names = [name.lower() for name, _ in module.named_children()]
    if any(name in _FUSED for name in names):
        return True
    # q_proj k_proj v_proj, query key value, to_q to_k to_v, wq wk wv, q k v: three names that
    # differ in one letter, or the words themselves
    if {"query", "key", "value"} <= set(names):
        return True
    return any(
        name.replace("q", "k", 1) in names and name.replace("q", "v", 1) in names
        for name in names
        if "q" in name
    )


def _width(block: nn.Module, hint: object) -> int | None:
    """d, from the block's norms: its own first, then those of its parts, the host's word last."""
    own = [_norm_width(child) for child in block.children()]
    deeper = [_norm_width(part) for part in block.modules()]
    for widths in (own, deeper):
        counted = Counter(width for width in widths if width is not None)
        if len(counted) == 1:
            return next(iter(counted))
        if isinstance(hint, int) and hint in counted:
            return hint
    attention = {m.embed_dim for m in block.modules() if isinstance(m, nn.MultiheadAttention)}
    if len(attention) == 1:
        return attention.pop()
    shapes = [_weight_shape(part) for part in block.modules()]
    square = {shape[0] for shape in shapes if len(shape) == 2 and shape[0] == shape[1]}
    if len(square) == 1:
        return square.pop()
    # A feed-forward part has no norm of its own; that it returns another width shows in a call.
    known = isinstance(hint, int) and any(hint in p.shape for p in block.parameters())
    return hint if known else None  # type: ignore[return-value]


def _norm_width(module: nn.Module) -> int | None:
    """Width of a leaf that scales each feature: LayerNorm and RMSNorm of any make."""
    shape = _weight_shape(module)
    return shape[0] if len(shape) == 1 and shape[0] > 1 and not any(module.children()) else None


def _weight_shape(module: nn.Module) -> tuple[int, ...]:
    weight = getattr(module, "weight", None)
    return tuple(weight.shape) if isinstance(weight, nn.Parameter) else ()


def _is_sequence_first(path: str, block: nn.Module) -> bool:
    """Whether a block returns (N, B, d): torch's own layers tell, others may transpose inside."""
    found = any(
        isinstance(part, nn.MultiheadAttention) and not part.batch_first for part in block.modules()
    )
    own = isinstance(block, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer)
    if found and not own:
        raise ValueError(
            f"attach: block '{path}' ({type(block).__name__}) holds an nn.MultiheadAttention with "
            "batch_first=False, and whether it transposes around it cannot be seen from outside; "
            "pass batch_first=True if the block returns (B, N, d), False if (N, B, d)"
        )
    return found


def _refuse_tokens_first(model: nn.Module, path: str) -> None:
    """Raise for a host that is known to turn its rows around its blocks."""
    parts = path.split(".")
    for length in range(len(parts)):
        config = getattr(model.get_submodule(".".join(parts[:length])), "config", None)
        kind = getattr(config, "model_type", None)
        if kind in _TOKENS_FIRST:
            raise ValueError(
                f"attach: block '{path}' is one of a host ({kind}) that puts tokens first, "
                "expected hidden states (B, N, d) and would get (N, B, d), whose memory would mix "
                "rows; attach with batch_first=False"
            )


def _require_one_stream(path: str, block: nn.Module) -> None:
    """Raise where the block returns several residual streams, which have no one hidden state."""
    for name, part in block.named_modules():
        said = f"{name} {type(part).__name__}".lower()
        if any(word in said for word in _STREAMS):
            raise ValueError(
                f"attach: expected a block with one residual stream, got '{path}' "
                f"({type(block).__name__}), whose '{name}' ({type(part).__name__}) mixes several; "
                "the memory would not know which to read; name a part that sees one stream, as in "
                f"layers='{path.rpartition('.')[0]}.*.mlp'"
            )


def config_value(model: nn.Module, name: str) -> object:
    """A value of the host's own config, or of a wrapped host's (PEFT, DDP)."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, name):
            return getattr(config, name)
    return None


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
