"""A `MemoryResidual` in a few launches, where the fused backend serves it.

Of a `TensorMemory` two calls are fused: one whose rows stand together and whose chunks are all
complete, and one token without gradients. Of a `PlaceMemory` every call without a mask is. On a CPU
one token without gradients takes few operations (`token_layer`). Every other call runs the plain
code around the recurrence.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from tensor_memory.chunking import aligned_calls
from tensor_memory.config import PlaceConfig
from tensor_memory.ops import why_not
from tensor_memory.ops.autograd import is_plain_eager
from tensor_memory.ops.inputs import products_dtype
from tensor_memory.place import PlaceMemory
from tensor_memory.place_state import PlaceState
from tensor_memory.state import MemoryState, trusted
from tensor_memory.tensor import TensorMemory
from tensor_memory.token_layer import place_token, tensor_token, touches_whole_grid


def fused_layer(
    memory: nn.Module,
    norm: nn.Module,
    gate: Tensor,
    drop: tuple[float, float],
    x: Tensor,
    state: Any,
    *,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Any] | None:
    """x + σ(γ)·D(memory(norm(x))) and the state after, or None where plain code must run.

    drop: probabilities of dropping single features and whole rows.
    """
    if mask is not None:
        return None
    if reset is None and isinstance(x, Tensor) and x.is_cpu and x.ndim == 3:
        done = _token_on_cpu(memory, norm, gate, drop, x, state, others)
        if done is not None:
            return done
    if type(memory) is PlaceMemory:
        return _place_layer(memory, norm, gate, drop, x, state, reset=reset, **others)
    if (
        reset is not None
        or not isinstance(memory, TensorMemory)
        or type(memory).forward is not TensorMemory.forward
    ):
        return None
    return _scan_layer(memory, norm, gate, drop, x, state, **others)


def _scan_layer(
    memory: TensorMemory,
    norm: nn.Module,
    gate: Tensor,
    drop: tuple[float, float],
    x: Tensor,
    state: MemoryState | None,
    *,
    flush: Tensor | bool | int = False,
    **others: Any,
) -> tuple[Tensor, MemoryState] | None:
    if isinstance(flush, Tensor) or others:
        return None
    ops = _fused_ops(x, memory.config.backend) if isinstance(x, Tensor) else None
    if ops is None or not _is_plain_norm(norm, memory.dim) or _is_hooked(memory):
        return None
    memory.check(x, state, flush=flush)
    state = memory.empty_state(x) if state is None else state
    if state.aligned is None:
        return None
    calls = aligned_calls(x.shape[1], state.aligned, flush)
    if len(calls) != 1:
        return None
    _, waiting, frame, flushed = calls[0]
    if x.shape[1] == 1 and flush is False and not any(drop):
        done = _token(ops, memory, norm, gate, x, state, waiting)
        if done is not None:
            return done
    if waiting == 0 and (flushed or x.shape[1] % memory.config.chunk_size == 0):
        return _complete_chunks(ops, memory, norm, gate, drop, x, state, frame)
    return None


def _place_layer(
    memory: PlaceMemory,
    norm: nn.Module,
    gate: Tensor,
    drop: tuple[float, float],
    x: Tensor,
    state: PlaceState | None,
    *,
    where: Tensor | None = None,
    reset: Tensor | None = None,
    group: Any = None,
    **others: Any,
) -> tuple[Tensor, PlaceState] | None:
    """A layer around a place memory; one token without gradients in one launch."""
    config, backend = memory.config, memory.config.backend
    if group is not None or others or not isinstance(x, Tensor):
        return None
    if backend not in ("auto", "triton") or not (x.is_cuda or backend == "triton"):
        return None
    weights = _place_weights(memory, norm, gate)
    if weights is None:
        return None
    memory.check(x, state, where, None, reset)
    fresh, held = state is None, None if state is None else state.dequantized().values
    assert isinstance(norm, nn.LayerNorm)
    assert isinstance(config.wrap, tuple)
    tensors = (x, held, where, *weights)
    if x.numel() == 0 or not is_plain_eager(tensors) or why_not("triton", x.device) is not None:
        return None
    if held is not None and held.dtype != torch.float32:
        return None
    if not _is_fused(config, x.device, x.dtype):
        return None
    (rows, tokens, _), (layer, token) = x.shape, _place_ops()
    read_norm: Any = memory._modules["norm"]
    eps, named = (norm.eps, read_norm.eps), token.PlaceWeights(*weights)
    single = (
        tokens == 1 and reset is None and not any(drop) and not any(map(_has_grad, tensors))
    ) and (state is None or not _has_grad(state.origin))
    if single and state is None:
        state = memory.empty_state(x)
        held = state.values
    if held is None or state is None:  # empty; its values are written by nobody
        sizes = config.heads, *config.grid, config.channels
        held = x.new_empty(rows, *sizes, dtype=torch.float32)
        origin = held.new_zeros(rows, len(config.grid))
    else:
        origin = state.origin
    if state is not None and single and token.serves_token(held):
        if where is not None:
            where = where[:, 0] if where.ndim == 4 else where.expand(-1, config.heads, -1)
        choices = config.rule, config.wrap
        out, values = token.token_forward(x, named, *eps, where, origin, held, *choices)
        return out, state.with_values(values)
    if not layer.serves(rows, tokens, config.heads):
        return None
    base = None
    if where is not None or not fresh:
        base = origin[:, None, None].expand(-1, tokens, config.heads, -1)
        if where is not None:
            base = base + (where if where.ndim == 4 else where[:, :, None])
        base = base.float()
    products = products_dtype(x)
    choices = config.rule, config.wrap, layer.Drop(*drop), products, fresh and not single
    options = layer.LayerOptions(*eps, *choices)
    out, values = layer.place_layer(x, base, held, reset, named, options)
    if state is None:
        return out, PlaceState(values, origin, config.wrap)
    return out, state.with_values(values)


@functools.cache
def _place_ops() -> tuple[Any, Any]:
    """A layer around the fused place memory, and its single token; they import triton."""
    from tensor_memory.ops.places.triton import layer, token

    return layer, token


def _place_weights(memory: PlaceMemory, norm: nn.Module, gate: Tensor) -> tuple[Any, ...] | None:
    """Everything the layer learns, in the order of `PlaceWeights`.

    None where a part is not the one it was built with, or has hooks. By name: asked for as an
    attribute, a parameter is searched for, which takes longer.
    """
    if not _is_plain_norm(norm, memory.dim) or _has_hooks(memory):
        return None
    own, of = norm._parameters, {}
    for name, part in memory._modules.items():
        if part is None or type(part) not in _PLACE_PARTS or _has_hooks(part):
            return None
        of[name] = learned = part._parameters
        if (learned.get("bias") is None) is (name in _BIASED):
            return None
    write, read, rate, keep = of.get("write_place"), of.get("read_place"), of["rate"], of["keep"]
    return (
        own["weight"], own["bias"], gate, write and write["weight"], read and read["weight"],
        of["content"]["weight"], rate["weight"], rate["bias"], keep["weight"], keep["bias"],
        memory._parameters.get("log_width"), of["gate"]["weight"], of["norm"]["weight"],
        of["output"]["weight"],
    )  # fmt: skip


def _token_on_cpu(
    memory: nn.Module,
    norm: nn.Module,
    gate: Tensor,
    drop: tuple[float, float],
    x: Tensor,
    state: Any,
    options: dict[str, Any],
) -> tuple[Tensor, Any] | None:
    """One token without gradients; None where anything is unusual, and the plain code says what."""
    if x.shape[1] != 1 or not len(x) or any(drop) or x.dtype not in _CPU_TYPES:
        return None
    if torch.is_autocast_enabled("cpu") or not is_plain_eager((x,)):
        return None
    if type(memory) not in (TensorMemory, PlaceMemory):
        return None
    assert isinstance(memory, TensorMemory | PlaceMemory)
    config: Any = memory.config
    if config.backend not in ("auto", "torch") or not _is_plain_norm(norm, memory.dim):
        return None
    if not _are_plain_and_alike((memory, norm, *memory._modules.values()), gate, x):
        return None
    for name, part in memory._modules.items():
        if part is not None and (part._parameters.get("bias") is None) is (name in _BIASED):
            return None
    if isinstance(memory, PlaceMemory):
        if options.keys() - {"where"} or not touches_whole_grid(config):
            return None
        where = options.get("where")
        memory.check(x, state, where)
        state = memory.empty_state(x) if state is None else state
        if state.scale is not None or state.values.dtype != x.dtype:
            return None
        if any(map(_has_grad, (state.values, state.origin, where))):
            return None
        return place_token(memory, norm, gate, x, state, where)
    if options.keys() - {"flush"} or options.get("flush", False) is not False:
        return None
    memory.check(x, state)
    state = memory.empty_state(x) if state is None else state
    if state.aligned is None or config.write != "gaussian":
        return None
    if any(map(_has_grad, (state.hidden, state.cell, state.tokens, state.readout))):
        return None
    return tensor_token(memory, norm, gate, x, state)


_CPU_TYPES = (torch.float32, torch.float64)
_PLACE_PARTS = (nn.Linear, nn.RMSNorm)
_BIASED = {"rate", "keep", "spread", "mix"}  # the parts of both memories with a bias
_PLAIN_PARTS = {*_PLACE_PARTS, nn.LayerNorm, TensorMemory, PlaceMemory}


def _are_plain_and_alike(parts: Sequence[nn.Module | None], gate: Tensor, x: Tensor) -> bool:
    """Whether parts are those a memory is built with, without hooks, and weights are like x."""
    learning = torch.is_grad_enabled()
    if learning and (x.requires_grad or gate.requires_grad):
        return False
    weights = [gate]
    if _has_any_global_hook():
        return False
    for part in parts:
        if part is None or type(part) not in _PLAIN_PARTS or _has_hooks(part):
            return False
        weights += [weight for weight in part._parameters.values() if weight is not None]
    dtype, device = x.dtype, x.device
    for weight in weights:
        if weight.dtype != dtype or weight.device != device:
            return False
        if learning and weight.requires_grad:
            return False
    return True


def _has_grad(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad and torch.is_grad_enabled()


@functools.lru_cache(maxsize=64)
def _is_fused(config: PlaceConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the fused backend serves a memory, which takes longer to ask than a short call."""
    return PlaceMemory(1, config).backend_on(device, dtype) == "triton"


def _fused_ops(x: Tensor, backend: str) -> Any | None:
    """The fused functions where they can take tokens like x; they import triton."""
    if backend not in ("auto", "triton") or not (x.is_cuda or backend == "triton"):
        return None
    if not is_plain_eager((x,)) or why_not("triton", x.device) is not None:
        return None
    from tensor_memory.ops.scan import layer

    return layer if layer.serves(x) else None


def _complete_chunks(
    ops: Any,
    memory: TensorMemory,
    norm: nn.LayerNorm,
    gate: Tensor,
    drop: tuple[float, float],
    x: Tensor,
    state: MemoryState,
    frame: int,
) -> tuple[Tensor, MemoryState] | None:
    """A call that leaves no chunk unfinished, in frames of `frame` tokens."""
    config = memory.config
    heads = (memory.write_proj, memory.read_head, memory.write_head, memory.content, memory.output)
    spread = memory.spread if config.write == "gaussian" else None
    if not _are_plain_heads(heads, spread):
        return None
    weights = _weights(ops, memory, norm, gate)
    if not ops.serves_state(state.hidden, state.cell, weights):
        return None
    options = ops.LayerOptions(
        epsilon=norm.eps,
        chunk_size=config.chunk_size,
        frame=frame,
        every_token=config.reads == "token",
        sigma_scale=float(config.sigma_scale),
        checkpoint_every=config.checkpoint_every or 0,
        drop=ops.Drop(*drop),
    )
    out, hidden, cell = ops.fused_layer_forward(x, state.hidden, state.cell, weights, options)
    kept = (state.tokens, state.fill, state.readout)
    return out, trusted(MemoryState(hidden, cell, *kept, aligned=0))


def _token(
    ops: Any,
    memory: TensorMemory,
    norm: nn.LayerNorm,
    gate: Tensor,
    x: Tensor,
    state: MemoryState,
    waiting: int,
) -> tuple[Tensor, MemoryState] | None:
    """One token in one launch, and a write where it completes its chunk."""
    weights = _weights(ops, memory, norm, gate)
    if torch.is_grad_enabled():
        tensors = (x, state.hidden, state.tokens, *weights)
        if any(t is not None and t.requires_grad for t in tensors):
            return None
    if not _are_plain_heads((memory.output, memory.read_head)):
        return None
    if not ops.serves_token(state.hidden, weights.output):
        return None
    every_token = memory.config.reads == "token"
    waits = (state.hidden, state.tokens, state.fill, state.readout)
    after = ops.token_forward(x, weights, norm.eps, *waits, waiting, every_token)
    hidden, cell, aligned = state.hidden, state.cell, waiting + 1
    if after.chunk is not None:
        _, hidden, cell = memory.scan(after.chunk[:, None], hidden, cell)
        aligned = 0
    state = MemoryState(hidden, cell, after.tokens, after.fill, after.readout, aligned=aligned)
    return after.out, trusted(state)


def _weights(ops: Any, memory: TensorMemory, norm: nn.LayerNorm, gate: Tensor) -> Any:
    """Everything the layer learns."""
    config = memory.config
    spread = memory.spread if config.write == "gaussian" else None
    return ops.LayerWeights(
        norm=norm.weight,
        norm_bias=norm.bias,
        gate=gate,
        write_proj=memory.write_proj.weight,
        read_coordinate=memory.read_head.weight,
        write_coordinate=memory.write_head.weight,
        content=memory.content.weight,
        spread=None if spread is None else spread.weight,
        spread_bias=None if spread is None else spread.bias,
        taps=memory.taps if config.mixing == "factorized" else None,
        mix=memory.mix.weight,
        bias=memory.mix.bias,
        output=memory.output.weight,
    )


def _is_plain_norm(norm: nn.Module, width: int) -> TypeGuard[nn.LayerNorm]:
    """Whether this is PyTorch's LayerNorm of single tokens with weight and bias, without hooks."""
    return (
        type(norm) is nn.LayerNorm
        and norm.normalized_shape == (width,)
        and norm._parameters.get("weight") is not None
        and norm._parameters.get("bias") is not None
        and not _is_hooked(norm)
    )


def _are_plain_heads(heads: Sequence[nn.Module], spread: nn.Module | None = None) -> bool:
    """Whether these are PyTorch's linear maps without hooks, the spread's alone with a bias."""
    for head in heads if spread is None else (*heads, spread):
        # Asked for as an attribute, a parameter is searched for, which takes longer than all else.
        biased = head._parameters.get("bias") is not None
        if type(head) is not nn.Linear or biased != (head is spread) or _is_hooked(head):
            return False
    return True


def _is_hooked(module: nn.Module) -> bool:
    """Whether a call of this module is waited for: by a hook, or by a forward of its own."""
    return _has_hooks(module) or _has_any_global_hook()


def _has_any_global_hook() -> bool:
    """As PyTorch's own function of that name, which 2.6 has not."""
    return bool(
        modules._global_forward_pre_hooks
        or modules._global_forward_hooks
        or modules._global_backward_pre_hooks
        or modules._global_backward_hooks
    )


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )
