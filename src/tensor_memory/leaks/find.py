"""Does a model look ahead? Change its late inputs and watch its early outputs.

Two witnesses, because each is blind where the other sees. Replacing the inputs from a cut on shows
every dependence large enough to change a bit, through roundings, sorts and detached tensors too.
The gradient of the outputs before the cut shows every differentiable one, however small.

Letters: B batch, N tokens, d width.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from tensor_memory.config import MAX_COUNT
from tensor_memory.leaks.report import NOISE_MARGIN, CutReport, LeakReport
from tensor_memory.ops.inputs import is_dense

REPEATS = 2  # runs of the same input beyond the first, to measure what changes by itself


def find_leak(
    model: Callable[..., Any],
    example: Tensor,
    *,
    cuts: Sequence[int] | None = None,
    vocab_size: int | None = None,
    seed: int = 0,
) -> LeakReport:
    """Look for outputs that depend on later inputs, in any model that should be causal.

    For each cut, every input from the cut on is replaced and the outputs before it are compared;
    where the model can be differentiated, their gradient with respect to the inputs from the cut
    on must be exactly zero as well. A module runs in eval mode, in float64 on a deep copy where it
    allows that and else as it is; its modes and torch's random state are left as they were. A
    plain callable runs as it is, so put what it wraps into eval mode first.

    Args:
        model: a module or callable on `example`. It returns a tensor (B, N, ...), a tuple or list
            whose first such tensor is looked at, or an object with `logits` or
            `last_hidden_state`.
        example: (B, N) integer ids, or (B, N, d) float embeddings, N at least 2.
        cuts: positions 1 ... N - 1 to cut at; by default the ends and a few between.
        vocab_size: ids are replaced by others below it; by default the size of
            `model.get_input_embeddings()`, else the ids seen in `example` are exchanged.
        seed: of the replacements.

    Returns:
        A `LeakReport`, true when the model leaks. It is false also where no output moved at all,
        which shows nothing; its text says so.

    >>> x = torch.randn(2, 9, 4)
    >>> report = find_leak(lambda x: x.cumsum(1), x)
    >>> print(str(report).splitlines()[-1])
    no leak at 6 cuts
    >>> report = find_leak(lambda x: x - x.mean(1, keepdim=True), x, cuts=[4])
    >>> bool(report), report.cuts[0].earliest, report.cuts[0].moved
    (True, 0, 4)
    """
    if not callable(model):
        raise TypeError(
            f"model: expected a module or a function of the example, got {type(model).__name__}; "
            "call find_leak(model, example)"
        )
    _check_example(example)
    if not _is_whole(seed) or not -(2**63) <= seed < 2**63:
        raise ValueError(
            f"seed: expected a whole number of 64 bits, got {seed!r:.80}; leave it out for 0"
        )
    seed = int(seed)
    places = _checked_cuts(cuts, example.shape[1])
    ids = None if example.is_floating_point() else _vocabulary(model, example, vocab_size)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices), torch.inference_mode(False), _eval_mode(model):
        subject, given, precision = _choose_precision(model, example)

        def fresh() -> Callable[..., Any]:
            """A copy for one call: a state that the call leaves in it reaches no other call."""
            return subject if subject is model else copy.deepcopy(subject)

        gradients, gradient_note = _gradients(fresh(), given, places, seed)
        with torch.no_grad():
            base = _run(fresh(), given, seed)
            if base.isnan().any():
                raise ValueError(
                    "model: expected outputs that are numbers, got NaN, which cannot be seen to "
                    "move; give an example on which the model works"
                )
            noise = max(
                _change(_run(fresh(), given, seed), base).max().item() for _ in range(REPEATS)
            )
            generator = torch.Generator().manual_seed(seed)
            changes = [
                _change(_run(fresh(), _replaced(given, cut, ids, generator), seed), base)
                for cut in places
            ]
    reports = map(_report, places, changes, gradients, [noise] * len(places))
    return LeakReport(tuple(reports), noise, precision, gradient_note)


def _report(cut: int, change: Tensor, gradient: float | None, noise: float) -> CutReport:
    """What the largest changes per position (N,) say about one cut."""
    moved = (change[:cut] > NOISE_MARGIN * noise).nonzero().flatten().tolist()
    return CutReport(
        cut=cut,
        earliest=moved[0] if moved else None,
        moved=len(moved),
        change=change[:cut].max().item(),
        gradient=gradient,
        later=change[cut:].max().item(),
    )


@contextmanager
def _eval_mode(model: Callable[..., Any]) -> Iterator[None]:
    """Eval mode for a while; every submodule gets back the mode it had."""
    modes = [(m, m.training) for m in model.modules()] if isinstance(model, nn.Module) else []
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, training in modes:
            module.training = training


def _choose_precision(
    model: Callable[..., Any], example: Tensor
) -> tuple[Callable[..., Any], Tensor, str]:
    """A float64 copy with its input where the model allows one, else both as they came."""
    if not isinstance(model, nn.Module):
        return model, example, "as given (a plain callable)"
    double = example.double() if example.is_floating_point() else example
    try:
        subject = copy.deepcopy(model).double()
        with torch.no_grad():
            copy.deepcopy(subject)(double)
    except Exception as error:  # kernels refuse a type in many ways, by an assertion too
        # What fails for another reason fails again below, on the model as it came.
        reason = str(error).partition("\n")[0]
        return model, example, f"as given (no float64 copy: {type(error).__name__}: {reason})"
    return subject, double, "in float64 on a copy"


def _run(model: Callable[..., Any], inputs: Tensor, seed: int) -> Tensor:
    """The model's output for these inputs, from the same random state each time."""
    torch.manual_seed(seed)
    # Cloned, as models may change their input in place or hand out a buffer of their own.
    return _output(model(inputs.clone()), tuple(inputs.shape[:2])).clone()


def _output(result: Any, shape: tuple[int, ...]) -> Tensor:
    """The tensor (B, N, ...) among what a model returned."""
    for name in ("logits", "last_hidden_state"):
        if isinstance(getattr(result, name, None), Tensor):
            result = getattr(result, name)
    candidates = result if isinstance(result, tuple | list) else (result,)
    tensors = [tensor for tensor in candidates if isinstance(tensor, Tensor)]
    if not tensors:
        raise TypeError(
            "model: expected a tensor, a tuple or list with one, or an object with logits or "
            f"last_hidden_state, got {type(result).__name__}; wrap the model in a function that "
            "returns its output tensor"
        )
    for tensor in tensors:
        if tensor.shape[:2] == shape:
            return tensor
    got = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
    raise ValueError(
        f"model: expected one output per input, shape (B, N, ...) = ({shape[0]}, {shape[1]}, ...), "
        f"got {got}; wrap the model in a function that returns it so"
    )


def _change(output: Tensor, base: Tensor) -> Tensor:
    """(N,) the largest change at each position, over rows and features."""
    change = (output.double() - base.double()).abs().masked_fill(output == base, 0)
    return change.nan_to_num(nan=torch.inf, posinf=torch.inf).transpose(0, 1).flatten(1).amax(1)


def _replaced(example: Tensor, cut: int, ids: Tensor | None, generator: torch.Generator) -> Tensor:
    """The example with every input from the cut on replaced by a different one."""
    late = example[:, cut:]
    if ids is None:
        new = torch.randn(late.shape, generator=generator) * (example.float().std().item() or 1.0)
    else:
        step = torch.randint(1, len(ids), late.shape, generator=generator)
        new = ids[(torch.searchsorted(ids, late.cpu().contiguous()) + step) % len(ids)]
    return torch.cat([example[:, :cut], new.to(example)], dim=1)


def _gradients(
    model: Callable[..., Any], example: Tensor, cuts: Sequence[int], seed: int
) -> tuple[Sequence[float | None], str]:
    """Per cut: the largest gradient of a random projection of the outputs before it."""
    none = [None] * len(cuts)
    leaves: list[Tensor] = []
    generator = torch.Generator().manual_seed(seed)
    try:
        with torch.enable_grad(), _embeddings_as_leaves(model, example, leaves):
            inputs = example
            if example.is_floating_point():
                leaves.append(example.detach().clone().requires_grad_())
                inputs = leaves[0]
            output = _run(model, inputs, seed)
            if not leaves:
                return none, "not taken: no embedding module was called with these ids"
            if not output.requires_grad:
                return none, "not taken: the output carries none"
            weighted = output * torch.randn(output.shape, generator=generator).to(output)
            largest = []
            for cut in cuts:
                found = torch.autograd.grad(
                    weighted[:, :cut].sum(), leaves, retain_graph=True, allow_unused=True
                )
                late = [grad[:, cut:].abs().max().item() for grad in found if grad is not None]
                if any(map(math.isnan, late)):
                    return none, "not taken: it is NaN"
                largest.append(max(late, default=0.0))
    except RuntimeError as error:
        return none, f"not taken: {str(error).partition(chr(10))[0]}"
    source = "inputs" if example.is_floating_point() else "embedded ids"
    return largest, f"with respect to the {source}"


@contextmanager
def _embeddings_as_leaves(
    model: Callable[..., Any], example: Tensor, leaves: list[Tensor]
) -> Iterator[None]:
    """Gather what embedding modules make of the example's ids, as leaves of the graph."""
    modules = []
    if isinstance(model, nn.Module) and not example.is_floating_point():
        declared = _input_embeddings(model)
        modules = [m for m in model.modules() if isinstance(m, nn.Embedding) or m is declared]

    def capture(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Tensor | None:
        # Positions may be embedded by a module that is given the ids, and have no rows: (N, d).
        if not isinstance(output, Tensor) or output.shape[:2] != example.shape:
            return None
        given = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
        if not any(v.shape == example.shape and torch.equal(v.cpu(), example.cpu()) for v in given):
            return None
        leaves.append(output.detach().requires_grad_())
        return leaves[-1].clone()

    handles = [module.register_forward_hook(capture, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _input_embeddings(model: Callable[..., Any]) -> nn.Module | None:
    declared = getattr(model, "get_input_embeddings", None)
    if declared is None:
        return None
    try:
        return declared()
    except NotImplementedError:  # how transformers says that a model has none
        return None


def _vocabulary(model: Callable[..., Any], example: Tensor, vocab_size: int | None) -> Tensor:
    """The ids that may stand in for others, ascending."""
    if vocab_size is None:
        vocab_size = getattr(_input_embeddings(model), "num_embeddings", None)
    if vocab_size is None:
        ids = example.cpu().unique()
        if len(ids) < 2:
            raise ValueError(
                f"example: expected at least two different ids to exchange, got only {ids[0]}; "
                "pass vocab_size, so that ids outside the example can be used"
            )
        return ids
    if not _is_whole(vocab_size):
        raise TypeError(
            f"vocab_size: expected a whole number, got {vocab_size!r:.80}; leave it out to "
            "exchange ids of the example"
        )
    if not 2 <= vocab_size <= MAX_COUNT:
        raise ValueError(
            f"vocab_size: expected at least 2, so that an id can be replaced, got {vocab_size}; "
            "it is the number of ids that the model knows"
        )
    lowest, highest = int(example.min()), int(example.max())
    if lowest < 0 or highest >= vocab_size:
        raise ValueError(
            f"example: expected ids from 0 to {vocab_size - 1}, got {lowest} to {highest}; "
            "pass valid ids, or the right vocab_size"
        )
    return torch.arange(vocab_size, dtype=example.dtype)


def _check_example(example: Tensor) -> None:
    kind = example.dtype if isinstance(example, Tensor) else type(example).__name__
    if not isinstance(kind, torch.dtype) or kind == torch.bool or kind.is_complex:
        remedy = "convert it with .long() or .float()"
        if not isinstance(example, Tensor):
            remedy = "where a model takes more, call find_leak(lambda x: model(x, ...), x)"
        raise TypeError(
            f"example: expected a tensor of integer ids (B, N) or float embeddings (B, N, d), "
            f"got {kind}; {remedy}"
        )
    if example.is_meta or not is_dense(example):
        raise ValueError(
            "example: expected a dense tensor whose values are known, got one that is "
            f"{'on meta' if example.is_meta else 'sparse or nested'}; move or convert it"
        )
    letters = "embeddings (B, N, d)" if kind.is_floating_point else "ids (B, N)"
    if example.ndim != letters.count(",") + 1:
        raise ValueError(
            f"example: expected {letters} for {kind}, got {tuple(example.shape)}; "
            "ids are integers with two axes, embeddings floats with three"
        )
    if example.shape[1] < 2 or example.numel() == 0:
        raise ValueError(
            f"example: expected at least one row and two positions, got {tuple(example.shape)}; "
            "with fewer there is nothing to look ahead to"
        )


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _checked_cuts(cuts: Sequence[int] | None, length: int) -> list[int]:
    """Ascending; by default the ends, the quarters and a neighbour, as all may be chunk borders."""
    if cuts is None:
        inside = (1, length // 4, length // 2, length // 2 + 1, 3 * length // 4, length - 1)
        return sorted({cut for cut in inside if 1 <= cut < length})
    if not isinstance(cuts, Sequence) or isinstance(cuts, bytes) or not all(map(_is_whole, cuts)):
        raise TypeError(
            f"cuts: expected a list of whole numbers such as [4, 8], got {cuts!r:.80}; leave it "
            "out for a few of them"
        )
    outside = [cut for cut in cuts if not 1 <= cut < length]
    if outside or not cuts:
        raise ValueError(
            f"cuts: expected positions from 1 to {length - 1} for an example of length {length}, "
            f"got {outside or 'none'}; something must lie on both sides of a cut"
        )
    return sorted(set(cuts))
