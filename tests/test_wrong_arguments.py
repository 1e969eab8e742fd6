"""Thousands of wrong arguments: none passes in silence, every error is of a documented type.

Each argument of each public name is given every value of `wrong_values`, one at a time, beside
arguments that are right. A value that is wrong there must raise one of `DOCUMENTED`, and the error
must name the argument or the function, and say what was expected, what came, and what to do.
"""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tensor_memory import (
    MemoryConfig,
    MemoryResidual,
    MemoryState,
    PlaceConfig,
    PlaceMemory,
    PlaceState,
    TensorMemory,
    attach,
    backends,
    detach,
    find_leak,
    load_memory,
    memory_disabled,
    memory_scan,
    place_scan,
    record,
    save_memory,
)
from wrong_values import (
    CHUNKS,
    DIM,
    PLACES,
    ROWS,
    TOKENS,
    either,
    is_bool,
    is_device,
    is_float_type,
    is_grid,
    is_int,
    is_none,
    is_number,
    is_one_of,
    is_tensor,
    is_type,
    never,
    plain_values,
    tensors,
)

DOCUMENTED = (TypeError, ValueError, OSError, NotImplementedError)
"""In docs/guide/howto.md, "… read an error?"."""

SAYS = re.compile(r"expected .+ got .+; .+", re.DOTALL)

Right = Callable[[Any], bool]
COUNT = is_int(1, 2**31 - 1)
X = torch.randn(ROWS, TOKENS, DIM, generator=torch.Generator().manual_seed(0))


class Targets:
    """Calls with one argument to get wrong, by name; and which values are right for it."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[Callable[[Any], Any], Right]] = {}

    def add(self, name: str, call: Callable[..., Any], **arguments: Right) -> None:
        for argument, right in arguments.items():
            self.found[f"{name}({argument}=)"] = (
                lambda value, argument=argument: call(**{argument: value}),
                right,
            )


def targets() -> Targets:
    found = Targets()
    add_configs(found)
    add_memories(found)
    add_states(found)
    add_scans(found)
    add_models(found)
    return found


def add_configs(found: Targets) -> None:
    numbers = ("spread_bias", "forget_bias", "input_bias", "feedback")
    found.add(
        "MemoryConfig",
        MemoryConfig,
        channels=COUNT,
        grid=is_grid,
        chunk_size=COUNT,
        reads=is_one_of("chunk", "token"),
        read_heads=is_int(1, 1),
        write_heads=is_int(1, 1),
        write=is_one_of("gaussian", "nearest"),
        share_coordinates=is_bool,
        mixing=is_one_of("factorized", "pointwise"),
        sigma_scale=is_number(1e-300),
        gain=is_number(1e-300),
        backend=lambda v: isinstance(v, str),  # a memory knows which there are
        checkpoint_every=either(is_none, COUNT),
        **dict.fromkeys(numbers, is_number()),
    )
    found.add(
        "PlaceConfig",
        PlaceConfig,
        channels=COUNT,
        grid=is_grid,
        heads=COUNT,
        rule=is_one_of("linear", "delta"),
        kernel=is_one_of("gaussian", "linear"),
        share_places=is_bool,
        places=is_one_of("learned", "given", "offset"),
        wrap=either(is_bool, lambda v: isinstance(v, list) and v == [True, False]),
        keep_bias=is_number(),
        backend=lambda v: isinstance(v, str),
    )
    found.add("PlaceConfig.map", PlaceConfig.map, axes=either(is_none, is_int(1, 4)))
    for config in (MemoryConfig, PlaceConfig):
        empty: Right = lambda v: isinstance(v, dict) and not v  # noqa: E731
        found.add(f"{config.__name__}.from_dict", config.from_dict, values=empty)


def add_memories(found: Targets) -> None:
    chunks, places = TensorMemory(DIM, CHUNKS), PlaceMemory(DIM, PLACES)
    given = PlaceMemory(DIM, PlaceConfig(channels=2, grid=(3, 2), heads=2, places="given"))
    small = is_int(1, 7)
    for kind, config in ((TensorMemory, MemoryConfig), (PlaceMemory, PlaceConfig)):
        right = either(is_none, lambda v, config=config: isinstance(v, config))
        build = lambda kind=kind, **a: kind(**{"dim": DIM} | a)  # noqa: E731
        found.add(kind.__name__, build, dim=small, config=right, zero_init=is_bool)
        named = lambda kind=kind, config=config, **a: kind(DIM, config(**a))  # noqa: E731
        found.add(kind.__name__, named, backend=is_one_of("auto"))
        asks = lambda kind=kind, **a: kind(DIM).backend_on(**{"device": "cpu"} | a)  # noqa: E731
        found.add(f"{kind.__name__}.backend_on", asks, device=is_device, dtype=is_float_type)
    is_memory: Right = lambda v: isinstance(v, TensorMemory | PlaceMemory)  # noqa: E731
    rate = is_number(0, 0.999999)
    found.add(
        "MemoryResidual",
        lambda **a: MemoryResidual(**{"memory": chunks} | a),
        memory=is_memory,
        gate_init=is_number(),
        norm=is_bool,
        dropout=rate,
        drop_path=rate,
        own_memory=is_bool,
    )
    marks = either(is_none, is_tensor((ROWS, TOKENS), dtype=torch.bool))
    common = {"x": is_tensor((-1, -1, DIM)), "mask": marks, "reset": marks}
    cuts = either(is_none, lambda v: isinstance(v, torch.Tensor) and v.tolist() == [0, TOKENS])
    of_chunks: Right = lambda v: isinstance(v, MemoryState) and v.tokens.shape == (2, 3, 3)  # noqa: E731
    of_places: Right = lambda v: isinstance(v, PlaceState) and v.grid == (3, 2)  # noqa: E731
    for name, layer in (("TensorMemory()", chunks), ("residual", MemoryResidual(chunks))):
        found.add(
            name,
            lambda layer=layer, **a: layer(**{"x": X} | a),
            state=either(is_none, of_chunks),
            flush=either(is_bool, is_int(1), is_tensor((ROWS, TOKENS), dtype=torch.bool)),
            **common,
        )
    for name, layer in (("PlaceMemory()", places), ("place residual", MemoryResidual(places))):
        found.add(
            name,
            lambda layer=layer, **a: layer(**{"x": X} | a),
            state=either(is_none, of_places),
            where=is_none,
            group=is_none,
            **common,
        )
    for name, layer in (("TensorMemory()", chunks), ("residual", MemoryResidual(places))):
        packed = lambda layer=layer, **a: layer(X[:1], **a)  # noqa: E731
        found.add(name, packed, cu_seqlens=either(is_none, dense(cuts)))
    at = is_tensor((ROWS, TOKENS, 2), (ROWS, TOKENS, 2, 2), dtype=FLOATS)
    found.add("PlaceMemory()", lambda **a: given(X, **a), where=at)
    found.add("PlaceMemory.trace", lambda **a: places.trace(X, **a), reads=is_indices(TOKENS))
    found.add("PlaceMemory.resized", lambda **a: places.resized(**a), grid=is_plane)


def add_states(found: Targets) -> None:
    chunks, places = MemoryState.zeros(CHUNKS, DIM, ROWS), PlaceState.zeros(PLACES, ROWS)
    device, dtype = either(is_none, is_device), either(is_none, is_float_type)
    follows: Right = lambda v: is_like_tensor(v) and v.dtype in FLOATS  # noqa: E731
    to = either(is_none, is_device, is_float_type, follows)
    kinds = (("MemoryState", chunks, MemoryConfig), ("PlaceState", places, PlaceConfig))
    for name, state, config in kinds:
        zeros: dict[str, Any] = {"config": config(), "batch_size": ROWS}
        more = {"dim": DIM} if config is MemoryConfig else {}
        found.add(
            f"{name}.zeros",
            lambda state=state, zeros=zeros | more, **a: type(state).zeros(**zeros | a),
            config=lambda v, config=config: isinstance(v, config),
            batch_size=is_int(0, 7),
            device=device,
            dtype=dtype,
            **({"dim": is_int(1, 7)} if more else {}),
        )
        found.add(f"{name}.to", state.to, device=to, dtype=dtype)
        found.add(f"{name}.select", state.select, rows=is_indices(ROWS))
        found.add(f"{name}.reset", state.reset, rows=either(is_none, is_rows))
        file = Path(tempfile.mkdtemp()) / "state"
        state.save(file)
        load = lambda state=state, file=file, **a: type(state).load(**{"path": file} | a)  # noqa: E731
        found.add(f"{name}.load", load, path=never, device=is_device)
    found.add("PlaceState.resized", places.resized, grid=is_plane)
    found.add("PlaceState.quantized", places.quantized, dtype=is_type(*QUANTIZED))
    moved = lambda **a: places.moved(**{"shift": [0.1, 0.2]} | a)  # noqa: E731
    found.add("PlaceState.moved", moved, shift=is_shift, empty=is_bool)

    memory, residual = TensorMemory(DIM, CHUNKS), MemoryResidual(TensorMemory(DIM, CHUNKS))
    volume = is_tensor((2, 2, 3, 2))
    fields: dict[str, Right] = {
        "hidden": volume,
        "cell": volume,
        "tokens": is_tensor((2, 3, 3)),
        "fill": lambda v: is_tensor((2,), dtype=torch.long)(v) and not v.any(),
        "readout": is_tensor((2, 2)),
        "aligned": either(is_none, is_int(0, 0)),
    }
    for name, layer in (("TensorMemory()", memory), ("residual", residual)):
        change = lambda layer=layer, **a: layer(X, replace(chunks, **a))  # noqa: E731
        found.add(f"{name} with MemoryState", change, **fields)
    place_layer = PlaceMemory(DIM, PLACES)
    found.add(
        "PlaceMemory() with PlaceState",
        lambda **a: place_layer(X, replace(places, **a)),
        values=is_tensor((2, 2, 3, 2, 2), dtype=(torch.float32, torch.float64)),
        origin=is_tensor((2, 2), dtype=(torch.float32, torch.float64)),
        wrap=never,
        scale=is_none,
    )


def add_scans(found: Targets) -> None:
    B, S, M, C, n = 2, 5, 1, 2, 2
    grid = (3, 2)
    scan: dict[str, Any] = {
        "read_at": torch.zeros(B, S, 1, n),
        "write_at": torch.zeros(B, S, M, n),
        "spread": torch.ones(B, S, M),
        "content": torch.zeros(B, S, M, C),
        "taps": torch.zeros(n, 2 * C, 3),
        "mix": torch.zeros(4 * C, 2 * C),
        "bias": torch.zeros(4 * C),
        "hidden": torch.zeros(B, C, *grid),
        "cell": torch.zeros(B, C, *grid),
    }
    optional = ("read_at", "spread", "taps")
    right: dict[str, Right] = {
        name: is_tensor(tuple(tensor.shape), dtype=FLOATS) for name, tensor in scan.items()
    }
    right["read_at"] = is_tensor((B, S, -1, n), dtype=FLOATS)
    right |= {name: either(is_none, right[name]) for name in optional}
    marks = either(is_none, is_tensor((B, S), dtype=torch.bool))
    found.add(
        "memory_scan",
        lambda **a: memory_scan(**scan | a),
        writes=marks,
        resets=marks,
        backend=is_one_of("auto"),
        checkpoint_every=either(is_none, is_int(1)),
        **right,
    )
    H = 2
    places: dict[str, Any] = {
        "write_at": torch.zeros(B, S, H, n),
        "read_at": torch.zeros(B, S, H, n),
        "content": torch.zeros(B, S, H, C),
        "rate": torch.zeros(B, S, H),
        "log_keep": torch.zeros(B, S, H),
        "width": torch.ones(H),
        "state": torch.zeros(B, H, *grid, C),
    }
    right = {name: is_tensor(tuple(t.shape), dtype=FLOATS) for name, t in places.items()}
    right |= {name: either(is_none, right[name]) for name in ("read_at", "width")}
    found.add(
        "place_scan",
        lambda **a: place_scan(**places | a),
        rule=is_one_of("linear", "delta"),
        wrap=either(is_none, lambda v: isinstance(v, list) and v == [True, False]),
        resets=marks,
        backend=is_one_of("auto"),
        group=is_none,
        **right,
    )
    found.add("backends", backends, device=either(is_none, is_device))


def add_models(found: Targets) -> None:
    def host() -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def put_on(**arguments: Any) -> None:
        model = arguments.pop("model", None) if "model" in arguments else host()
        attach(model, **arguments)
        detach(model)

    config: Right = lambda v: isinstance(v, MemoryConfig | PlaceConfig)  # noqa: E731
    rate = is_number(0, 0.999999)
    found.add(
        "attach",
        put_on,
        model=never,
        config=either(is_none, config),
        layers=either(is_one_of("auto"), callable),  # what a predicate raises is its author's
        every=is_int(1),
        dim=either(is_none, is_int(8, 8)),
        batch_first=either(is_none, is_bool),
        share_weights=is_bool,
        scope=is_one_of("layer"),
        causal=either(is_bool, is_one_of("auto")),
        zero_init=is_bool,
        freeze_host=is_bool,
        where=is_none,
        gate_init=is_number(),
        norm=is_bool,
        dropout=rate,
        drop_path=rate,
    )
    model = nn.Sequential(MemoryResidual(TensorMemory(DIM, CHUNKS)))
    folder = Path(tempfile.mkdtemp())
    save_memory(model, folder)
    holds: Right = lambda v: isinstance(v, TensorMemory | PlaceMemory)  # noqa: E731
    saved = lambda **a: save_memory(**{"model": model, "folder": folder} | a)  # noqa: E731
    found.add("save_memory", saved, model=holds)
    found.add(
        "save_memory", lambda folder: save_memory(model, in_temporary(folder)), folder=is_path
    )
    loaded = lambda **a: load_memory(**{"model": model, "folder": folder} | a)  # noqa: E731
    found.add("load_memory", loaded, model=never, folder=never, same_blocks=is_bool)
    found.add("memory_disabled", entered(memory_disabled), model=never)
    found.add("detach", detach, model=never)
    found.add(
        "record",
        entered(lambda **a: record(**{"model": model} | a)),
        model=holds,
        every=is_int(1),
        max_chunks=is_int(1),
        max_rows=is_int(1),
        max_tokens=is_int(0),
        dtype=is_type(torch.float16, torch.float32, torch.float64),
    )
    causal = nn.Linear(DIM, DIM)
    found.add(
        "find_leak",
        lambda **a: find_leak(**{"model": causal, "example": X} | a),
        model=lambda v: callable(v),
        example=is_tensor((-1, -1, -1), dtype=FLOATS),  # of another width: the model's own error
        cuts=either(is_none, is_cuts),
        seed=either(is_int(-(2**63), 2**63 - 1), is_numpy),
    )
    ids = torch.tensor([[0, 1, 2, 0, 1]])
    words = nn.Embedding(2**10, DIM)
    found.add(
        "find_leak",
        lambda **a: find_leak(words, ids, **a),
        vocab_size=either(is_none, is_int(3, 2**10), is_numpy),
    )


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
QUANTIZED = (torch.bfloat16, torch.float16, torch.int8)


def is_like_tensor(v: Any) -> bool:
    return isinstance(v, torch.Tensor)


def is_numpy(v: Any) -> bool:
    return isinstance(v, np.int64)


def dense(right: Right) -> Right:
    return lambda v: (
        v is None or (is_tensor((-1,), dtype=(torch.int32, torch.int64))(v) and right(v))
    )


def is_indices(size: int) -> Right:
    """A list or tensor of whole numbers below a size."""

    def fits(v: Any) -> bool:
        if isinstance(v, torch.Tensor):
            whole = v.dtype in (torch.int32, torch.int64, torch.uint8) or not v.numel()
            if not whole or v.dtype == torch.bool or v.is_nested or v.layout != torch.strided:
                return False
            return v.ndim < 2 and (v.is_meta or all(0 <= i < size for i in v.flatten().tolist()))
        if isinstance(v, list | tuple | range | torch.Size):
            return all(is_int(0, size - 1)(i) for i in v)
        return is_int(0, size - 1)(v) or (is_numpy(v) and 0 <= v < size)

    return fits


def is_rows(v: Any) -> bool:
    if isinstance(v, list) and v == [True, False]:
        return True
    return is_indices(ROWS)(v) or is_tensor((ROWS,), dtype=torch.bool)(v)


def is_plane(v: Any) -> bool:
    return is_grid(v) and len(v) == 2


def is_shift(v: Any) -> bool:
    if isinstance(v, torch.Tensor):
        types = (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool)
        return is_tensor((2,), (2, 2), dtype=types)(v)
    listed = isinstance(v, list | tuple) or (isinstance(v, np.ndarray) and v.shape == (2,))
    return listed and len(v) == 2 and all(is_number()(i * 1) for i in v)


def is_cuts(v: Any) -> bool:
    listed = isinstance(v, list | tuple | range) and len(v) > 0
    return listed and all(is_int(1, TOKENS - 1)(i) for i in v)


def is_path(v: Any) -> bool:
    return isinstance(v, str) and v not in ("", "\0")


def in_temporary(folder: Any) -> Any:
    """A folder with a name of its own where that is one, so that nothing is left behind here."""
    return Path(tempfile.mkdtemp()) / folder if is_path(folder) else folder


def entered(manager: Callable[..., Any]) -> Callable[..., None]:
    def enter(**arguments: Any) -> None:
        with manager(**arguments):
            pass

    return enter


def is_named(name: str, value: Any, said: str) -> bool:
    """Whether an error has the name of the argument, of the function, or of the file to be read."""
    function, argument = name.removesuffix("=)").rsplit("(", 1)
    prefixes = [f"{function.split('.')[-1]}: "]
    if argument == "path" and isinstance(value, str) and value:
        prefixes.append(f"{value}: ")
    word = re.search(rf"\b{argument.replace('_', '[_ ]')}\b", said)
    return word is not None or any(prefix in said for prefix in prefixes)


def complaint(name: str, call: Callable[[Any], Any], value: Any) -> str | None:
    """What is wrong with how a wrong value is met, or None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call(value)
    except DOCUMENTED as error:
        said = str(error)
        fine = SAYS.search(said) and is_named(name, value, said)
        return None if fine else f"says {type(error).__name__}: {said:.200}"
    except Exception as error:
        return f"raises {type(error).__name__}: {error!s:.200}"
    return "passes"


def wrong_arguments() -> Iterator[tuple[str, Callable[[Any], Any], Any]]:
    values = [*plain_values(), *tensors()]
    for name, (call, right) in targets().found.items():
        for value in values:
            if not right(value):
                yield name, call, value


@pytest.mark.parametrize(
    "one_in", [7, pytest.param(1, marks=[pytest.mark.exhaustive, pytest.mark.timeout(1200)])]
)
def test_no_wrong_argument_passes_and_every_error_says_what_to_do(one_in):
    cases = list(wrong_arguments())
    assert len(cases) > 5000
    found = []
    for name, call, value in cases[::one_in]:
        said = complaint(name, call, value)
        if said is not None:
            found.append(f"{name} {value!r:.80} {said}")
    assert not found, f"{len(found)} of {len(cases[::one_in])}:\n" + "\n".join(found)


def test_a_hole_is_found():
    assert complaint("f(x=)", lambda value: None, 3) == "passes"
    assert complaint("f(x=)", lambda value: value.shape, 3) is not None
    assert complaint("f(x=)", int, "a") is not None

    def refuse(value: Any) -> None:
        raise ValueError(f"y: expected a word, got {value}; leave it out")

    assert complaint("f(x=)", refuse, 3) is not None
    assert complaint("f(y=)", refuse, 3) is None
