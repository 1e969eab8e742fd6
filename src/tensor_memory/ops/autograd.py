"""Autograd for recurrences whose backward is written by hand.

A `Recurrence` runs a fast backend in one of two ways. Compilers, tracers and exporters need PyTorch
operators with a name: `tensor_memory::NAME` and `tensor_memory::NAME_backward`. Plain eager code
takes a `torch.autograd.Function` around the same two functions: an operator registered from Python
takes longer to dispatch than a short scan takes to run, and its first call loads the compiler.

Both turn autocast off inside, and both can keep the state of every so many steps alone
(`checkpoint_every`) and run the steps between again in the backward. A backward that is to be
differentiated again (`create_graph=True`) is left to autograd, which goes through plain PyTorch.
"""

from __future__ import annotations

import contextlib
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.autograd import forward_ad

from tensor_memory.ops.inputs import is_autocast

PLAIN = (Tensor, torch.nn.Parameter)
_PLAIN_OR_NONE = frozenset({*PLAIN, type(None)})
NO_SECOND_DERIVATIVE = (
    "expected a backward that is not differentiated again, got create_graph=True; a layer fused "
    'into a few launches has no second derivative: choose backend="torch", which has'
)


class Backend(Protocol):
    """A fast implementation of a recurrence: a module with these functions.

    Inputs are a recurrence's named tuple, prepared: contiguous and of one float type.
    """

    def forward(self, inputs: Any, *, keep: bool, products: torch.dtype) -> tuple[Any, ...]:
        """What is read, then the state after the last step, then a list of what `backward` needs.

        That list is empty unless `keep`. `products` is the type to multiply matrices in.
        """
        ...

    def backward(self, *grads_inputs_kept: Any, products: torch.dtype) -> Any:
        """Gradients in the places of the inputs, given those of the results, the inputs and `kept`.

        A gradient of the state may be None: nothing came.
        """
        ...

    def empty_kept(self, inputs: Any, products: torch.dtype) -> list[Tensor]:
        """Uninitialised tensors like those `forward` keeps."""
        ...


class Options(NamedTuple):
    """How a recurrence runs. checkpoint_every is 0 where everything is kept."""

    checkpoint_every: int
    products: torch.dtype
    backend: str


class Recurrence:
    """One recurrence: its inputs, its backends and its operators.

    Args:
        name: of its operators.
        inputs: its named tuple, with STATE, `empty_reads()` and, where it takes checkpoints,
            STEPWISE, SHARED, `steps(start, stop)` and `length`. An optional tensor is annotated
            `Tensor | None`. CHOICES names what is no tensor, which comes last.
        backend: the backend of a name. The fast ones are `Backend`s.
        plain: the recurrence in plain PyTorch, which is differentiable any number of times:
            prepared inputs -> what is read, then the state after the last step.
    """

    def __init__(
        self,
        name: str,
        inputs: type[Any],
        backend: Callable[[str], Any],
        plain: Callable[[Any], tuple[Any, ...]],
    ) -> None:
        self.name, self.inputs, self.backend, self.plain = name, inputs, backend, plain
        self.tensors = len(inputs._fields) - len(getattr(inputs, "CHOICES", ()))
        kinds = typing.get_type_hints(inputs)
        tensors = ", ".join(f"{_schema_type(kinds[field])} {field}" for field in inputs._fields)
        results = ("reads", *inputs.STATE)
        grads = ", ".join(f"Tensor? grad_{result}" for result in results)
        outputs = ", ".join("Tensor" for _ in results)
        options = "int checkpoint_every, ScalarType products, str backend"
        self.operator = torch.library.custom_op(
            f"tensor_memory::{name}",
            self._operator,
            mutates_args=(),
            schema=f"({tensors}, bool keep, {options}) -> ({outputs}, Tensor[])",
        )
        self.backward_operator = torch.library.custom_op(
            f"tensor_memory::{name}_backward",
            self._backward_operator,
            mutates_args=(),
            schema=f"({grads}, {tensors}, Tensor[] kept, {options}) -> Tensor[]",
        )
        self.operator.register_fake(self._fake)
        self.backward_operator.register_fake(self._fake_backward)
        self.operator.register_autograd(self._differentiate, setup_context=self._save)
        self.backward_operator.register_autograd(_refuse_operator)

    def run(self, inputs: Any, options: Options) -> tuple[Tensor, ...]:
        """What is read and the state after the last step, for prepared inputs."""
        tensors = inputs[: self.tensors]
        keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
        if _state(inputs)[0].is_meta or not is_plain_eager(tensors):
            return self.operator(*inputs, keep, *options)[:-1]
        if keep:
            return _Eager.apply(self, options, *inputs)  # type: ignore[return-value]
        return self.run_forward(inputs, False, options)[:-1]

    def run_forward(self, inputs: Any, keep: bool, options: Options) -> tuple[Any, ...]:
        """The results, then what is kept for `run_backward`."""
        backend = self.backend(options.backend)
        with no_autocast(_state(inputs)[0].device):
            if keep and options.checkpoint_every:
                return _checkpointed_forward(backend, inputs, options)
            return backend.forward(inputs, keep=keep, products=options.products)

    def run_backward(
        self, grads: tuple[Tensor | None, ...], inputs: Any, kept: list[Tensor], options: Options
    ) -> Any:
        """The gradients in the places of the inputs. A gradient that never came is None."""
        grad_reads, *grad_state = (g if g is None else g.contiguous() for g in grads)
        if grad_reads is None:
            grad_reads = torch.zeros_like(inputs.empty_reads())
        if any(g is not None for g in grad_state):  # of the state all arrive, or none
            pairs = zip(grad_state, _state(inputs), strict=True)
            grad_state = [torch.zeros_like(t) if g is None else g for g, t in pairs]
        backend = self.backend(options.backend)
        with no_autocast(_state(inputs)[0].device):
            if options.checkpoint_every:
                return _checkpointed_backward(
                    backend, grad_reads, grad_state, inputs, kept, options
                )
            return backend.backward(
                grad_reads, *grad_state, inputs, kept, products=options.products
            )

    def gradients(
        self, grads: tuple[Tensor | None, ...], inputs: Any, kept: list[Tensor], options: Options
    ) -> Any:
        """`run_backward`, or the same by autograd where the results will be differentiated."""
        if not torch.is_grad_enabled():
            return self.run_backward(grads, inputs, kept, options)
        with no_autocast(_state(inputs)[0].device):
            found = differentiable_gradients(
                lambda *values: self.plain(self.inputs._make(values)), inputs, grads
            )
        return self.inputs._make(found)

    def _operator(self, *arguments: Any) -> tuple[Any, ...]:
        inputs, (keep, *options) = by_name(arguments, self.inputs)
        return self.run_forward(inputs, keep, Options._make(options))

    def _backward_operator(self, *arguments: Any) -> list[Tensor]:
        """A gradient of what has none comes back empty: the operator's results are tensors."""
        results = 1 + len(self.inputs.STATE)
        inputs, (kept, *options) = by_name(arguments[results:], self.inputs)
        grads = self.run_backward(arguments[:results], inputs, kept, Options._make(options))
        nothing = _state(inputs)[0].new_empty
        return [nothing(0) if g is None else g.contiguous() for g in grads]

    def _fake(self, *arguments: Any) -> tuple[Any, ...]:
        inputs, (keep, *options) = by_name(arguments, self.inputs)
        every, products, name = options
        kept: list[Tensor] = []
        if keep and every:
            kept = _empty_checkpoints(inputs, every)
        elif keep:
            kept = self.backend(name).empty_kept(inputs, products)
        return inputs.empty_reads(), *(t.new_empty(t.shape) for t in _state(inputs)), kept

    def _fake_backward(self, *arguments: Any) -> list[Tensor]:
        inputs, _ = by_name(arguments[1 + len(self.inputs.STATE) :], self.inputs)
        empty = _state(inputs)[0].new_empty
        return [empty(t.shape if _is_float(t) else 0) for t in inputs]

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        named, (keep, *options) = by_name(inputs, self.inputs)
        *_, kept = output
        self.save(ctx, named, kept)
        ctx.mark_non_differentiable(*kept)
        ctx.keep, ctx.options = keep, options

    def save(self, ctx: Any, inputs: Any, kept: list[Tensor]) -> None:
        """For `saved`."""
        ctx.save_for_backward(*inputs[: self.tensors], *kept)
        ctx.choices = inputs[self.tensors :]
        ctx.set_materialize_grads(False)  # no zeros for all that was kept

    def saved(self, ctx: Any) -> tuple[Any, list[Tensor]]:
        """The inputs, and what was kept."""
        tensors = ctx.saved_tensors
        inputs = self.inputs._make((*tensors[: self.tensors], *ctx.choices))
        return inputs, list(tensors[self.tensors :])

    def _differentiate(self, ctx: Any, *grads: Any) -> Any:
        if not ctx.keep:
            raise RuntimeError(
                f"tensor_memory::{self.name}: a backward needs what a forward with keep=True has "
                "kept"
            )
        inputs, kept = self.saved(ctx)
        *wanted, _ = (g if not isinstance(g, Tensor) else g.contiguous() for g in grads)
        if torch.is_grad_enabled():
            found = self.gradients(tuple(wanted), inputs, kept, Options._make(ctx.options))
        else:
            found = self.backward_operator(*wanted, *inputs, kept, *ctx.options)
        by_input = (g if _is_float(t) else None for g, t in zip(found, inputs, strict=True))
        return *by_input, *[None] * (1 + len(ctx.options))


def by_name(values: Iterable[Any], *kinds: type[Any]) -> tuple[Any, ...]:
    """Values in a row as the named tuples that they were, and a list of the rest."""
    rest, found = list(values), []
    for kind in kinds:
        count = len(kind._fields)
        found.append(kind._make(rest[:count]))
        rest = rest[count:]
    return *found, rest


def _state(inputs: Any) -> list[Any]:
    """The state among the inputs, or its gradient among theirs."""
    return [getattr(inputs, name) for name in inputs.STATE]


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _schema_type(kind: Any) -> str:
    """A field's type in the language of operators."""
    if kind is Tensor:
        return "Tensor"
    if kind == Tensor | None:
        return "Tensor?"
    return "bool[]" if kind == tuple[bool, ...] else "str"


class _Eager(torch.autograd.Function):
    """A recurrence without what compilers need to know of it."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        recurrence, options, *tensors = arguments
        inputs = recurrence.inputs._make(tensors)
        *results, kept = recurrence.run_forward(inputs, True, options)
        recurrence.save(ctx, inputs, kept)
        ctx.recurrence, ctx.options = recurrence, options
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        inputs, kept = ctx.recurrence.saved(ctx)
        return None, None, *ctx.recurrence.gradients(grads, inputs, kept, ctx.options)


def differentiable_gradients(
    function: Callable[..., tuple[Any, ...]], inputs: Sequence[Any], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients of `function(*inputs)`, which can be differentiated again.

    Args:
        function: plain PyTorch, to a tuple of tensors.
        inputs: tensors as they were given, with the graph before them, and anything else.
        grads: of each result, or None.

    Returns:
        A gradient for every input that needs one, else None.
    """
    # Views: an input may be computed from another, whose gradient must not hold it twice.
    own = [t.view_as(t) if _is_float(t) and t.requires_grad else t for t in inputs]
    places = [i for i, t in enumerate(own) if _is_float(t) and t.requires_grad]
    pairs = zip(function(*own), grads, strict=True)
    used = [(result, g) for result, g in pairs if g is not None and result.requires_grad]
    found: list[Tensor | None] = [None] * len(own)
    if used and places:
        results, given = zip(*used, strict=True)
        wanted = [own[i] for i in places]
        by_input = torch.autograd.grad(results, wanted, given, create_graph=True, allow_unused=True)
        for i, grad in zip(places, by_input, strict=True):
            found[i] = grad
    return found


def refuse_second_derivative(why: str = NO_SECOND_DERIVATIVE) -> None:
    """Raise in a backward that is to be differentiated again.

    Later is too late: autograd leaves out what nobody asked for, a node that refuses too.
    """
    if torch.is_grad_enabled():
        raise NotImplementedError(why)


def _refuse_operator(*_: Any) -> Any:
    raise NotImplementedError(NO_SECOND_DERIVATIVE)


def is_plain_eager(tensors: Iterable[Tensor | None]) -> bool:
    """Whether these are plain tensors, and neither a compiler, a tracer nor a transform is on."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or not _PLAIN_OR_NONE.issuperset(map(type, tensors))
    )


def can_ask(tensor: Tensor) -> bool:
    """Whether values of a tensor can be looked at: not in a trace, a captured graph or on meta."""
    return not (
        torch.compiler.is_compiling()
        or tensor.is_meta
        or type(tensor) not in PLAIN
        or torch._C._are_functorch_transforms_active()
        or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def is_transformed() -> bool:
    """Whether torch.func (grad, vmap, jvp) or forward-mode differentiation is on.

    These take for a constant what neither autograd nor an operator tells them about.
    """
    if torch.compiler.is_compiling():
        return False
    if forward_ad._current_level >= 0:
        return True
    if not torch._C._are_functorch_transforms_active():
        return False
    levels = get_interpreter_stack() or []
    return any(level.key() != TransformType.Functionalize for level in levels)


_AS_IT_IS = contextlib.nullcontext()


def no_autocast(device: torch.device) -> Any:
    """A context without autocast. Asking takes less time than entering one that changes nothing."""
    if is_autocast(device):
        return torch.autocast(device.type, enabled=False)
    return _AS_IT_IS


def _empty_checkpoints(inputs: Any, every: int) -> list[Tensor]:
    """Uninitialised state before each segment of `every` steps: (segments, *state) each."""
    segments = -(-inputs.length // every)
    return [tensor.new_empty(segments, *tensor.shape) for tensor in _state(inputs)]


def _checkpointed_forward(backend: Backend, inputs: Any, options: Options) -> tuple[Any, ...]:
    """Run in segments and keep the state before each of them."""
    every, reads = options.checkpoint_every, inputs.empty_reads()
    checkpoints = _empty_checkpoints(inputs, every)
    state = [tensor.clone() for tensor in _state(inputs)]
    for segment, start in enumerate(range(0, inputs.length, every)):
        for kept, tensor in zip(checkpoints, state, strict=True):
            kept[segment] = tensor
        part = inputs.steps(start, start + every)._replace(
            **dict(zip(inputs.STATE, state, strict=True))
        )
        reads[:, start : start + every], *state, _ = backend.forward(
            part, keep=False, products=options.products
        )
    return reads, *state, checkpoints


def _checkpointed_backward(
    backend: Backend,
    grad_reads: Tensor,
    grad_state: Sequence[Tensor | None],
    inputs: Any,
    checkpoints: list[Tensor],
    options: Options,
) -> Any:
    """Run each segment forward again, then backward, from the last to the first."""
    every, products = options.checkpoint_every, options.products
    total = {n: torch.zeros_like(t) for n, t in inputs._asdict().items() if _is_float(t)}
    for segment, start in reversed(list(enumerate(range(0, inputs.length, every)))):
        stop = start + every
        state = {n: kept[segment] for n, kept in zip(inputs.STATE, checkpoints, strict=True)}
        part = inputs.steps(start, stop)._replace(**state)
        *_, kept = backend.forward(part, keep=True, products=products)
        grads = backend.backward(
            grad_reads[:, start:stop].contiguous(), *grad_state, part, kept, products=products
        )
        grad_state = _state(grads)
        for name in total.keys() & set(inputs.STEPWISE):
            total[name][:, start:stop] = getattr(grads, name)
        for name in total.keys() & set(inputs.SHARED):
            total[name] += getattr(grads, name)
    for name, grad in zip(inputs.STATE, grad_state, strict=True):
        if grad is not None:
            total[name] = grad.clone()
    return inputs._make(total.get(name) for name in inputs._fields)
