"""A place memory's state in fewer bytes: how far a long stream gets from one in float32.

    tensor-memory-lab bench quantize

Random tokens go through one `PlaceMemory` without gradients, in calls of several lengths. Each row
of the batch gets the same tokens and holds its state in another way between calls; the first row
in float32, which the others are compared with. No time is measured.

Letters: H heads, C channels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tensor_memory import PlaceConfig, PlaceMemory, PlaceState
from tensor_memory_lab.bench import report
from tensor_memory_lab.commands.option_types import count
from tensor_memory_lab.progress import progress

Round = Callable[[Tensor], Tensor]


def by_library(state: PlaceState, dtype: torch.dtype, values: Tensor) -> Tensor:
    """As `PlaceState.quantized` holds them: a scale per voxel, to the nearest value."""
    return state.with_values(values).quantized(dtype).dequantized().values


def int8_by(dims: tuple[int, ...], round_: Round, values: Tensor) -> Tensor:
    """In int8, with a scale over these dimensions of (1, H, *grid, C)."""
    scale = values.abs().amax(dims, keepdim=True).clamp(min=torch.finfo(values.dtype).tiny) / 127
    return round_(values / scale).clamp(-127, 127) * scale


def stochastic(generator: torch.Generator, values: Tensor) -> Tensor:
    """Up or down at random, right in the mean."""
    return (values + torch.rand(values.shape, generator=generator)).floor()


def ways(config: PlaceConfig, seed: int) -> dict[str, tuple[int, Round]]:
    """Ways to hold a state of one row: its bytes, and the values that come back."""
    state = PlaceState.zeros(config, 1)
    noise = torch.Generator().manual_seed(seed + 1)
    per_head = tuple(range(-1 - config.axes, 0))
    found: dict[str, tuple[int, Round]] = {"float32": (state.nbytes, lambda values: values)}
    for dtype in (torch.float16, torch.bfloat16, torch.int8):
        held = state.quantized(dtype).nbytes
        found[str(dtype)[6:]] = (held, partial(by_library, state, dtype))
    origin, size = state.origin.nbytes, state.values.numel()
    at_random = partial(int8_by, (-1,), partial(stochastic, noise))
    return found | {
        "bfloat16 without a scale": (origin + 2 * size, lambda x: x.bfloat16().float()),
        "int8, a scale per head": (
            origin + size + 4 * config.heads,
            partial(int8_by, per_head, torch.round),
        ),
        "int8, rounded at random": (found["int8"][0], at_random),
    }


@torch.inference_mode()
def measure(config: PlaceConfig, dim: int, tokens: int, call: int, seed: int) -> dict[str, Any]:
    """Relative errors of every way in calls of `call` tokens: of the reads, and of the state."""
    torch.manual_seed(seed)
    memory = PlaceMemory(dim, config)
    generator = torch.Generator().manual_seed(seed)
    held = ways(config, seed)
    state = PlaceState.zeros(config, len(held))
    tenth = [torch.zeros(len(held) + 1, dtype=torch.float64) for _ in range(10)]
    name = f"{config.rule}, {call} a call"
    with progress(name, tokens, unit="tokens") as advance:
        for start in range(0, tokens, call):
            x = torch.randn(1, min(call, tokens - start), dim, generator=generator)
            m, state = memory(x.expand(len(held), -1, -1), state)
            squares = (m - m[:1]).double().square().sum((1, 2))
            sums = tenth[start * 10 // tokens]
            sums[:-1] += squares
            sums[-1] += m[0].double().square().sum()
            rows = zip(held.values(), state.values.split(1), strict=True)
            state = state.with_values(torch.cat([back(values) for (_, back), values in rows]))
            advance(x.shape[1], "")
    reads = [(sums[:-1] / sums[-1]).sqrt() for sums in tenth]
    off = (state.values - state.values[:1]).flatten(1).norm(dim=1) / state.values[0].norm()
    return {
        way: {
            "bytes": size,
            "read_error_first_tenth": reads[0][row].item(),
            "read_error_last_tenth": reads[-1][row].item(),
            "state_error": off[row].item(),
        }
        for row, (way, (size, _)) in enumerate(held.items())
        if row
    }


def main(argv: list[str]) -> int:
    """Run the benchmark; 1 where an error is no number."""
    parser = report.make_parser(
        "quantize", "Stream tokens through states in fewer bytes; compare with float32."
    )
    add, usual = parser.add_argument, PlaceConfig()
    parser.set_defaults(device="cpu")
    add("--tokens", type=count, default=100_000, help="of the stream")
    add("--calls", type=count, nargs="+", default=[1, 64, 512], help="tokens per call")
    add("--keep-biases", type=float, nargs="+", default=[6.0, 10.0], help="how slowly it forgets")
    add("--dim", type=count, default=64, help="width of the tokens")
    add("--grid", type=int, nargs="+", default=usual.grid, help="voxels along each axis")
    options, device = report.parse(parser, argv)
    if device.type != "cpu":
        parser.error("--device: expected cpu: errors are measured, and no times")
    if options.quick:
        options.tokens = min(options.tokens, 200)
    if options.tokens < 10:
        parser.error(f"--tokens: expected 10 or more, got {options.tokens}")
    entries, shown = [], []
    rules: tuple[Any, ...] = ("linear", "delta")
    cases = itertools.product(rules, options.keep_biases, options.calls)
    for rule, keep_bias, call in cases:
        try:
            config = PlaceConfig(
                grid=tuple(options.grid), rule=rule, keep_bias=keep_bias, backend=options.backend
            )
        except ValueError as error:
            parser.error(str(error))
        found = measure(config, options.dim, options.tokens, call, options.seed)
        case = {"rule": rule, "keep_bias": keep_bias, "tokens_per_call": call}
        entries += [case | {"way": way} | row for way, row in found.items()]
        shown += [
            {
                "rule": rule,
                "keep bias": f"{keep_bias:g}",
                "tokens per call": str(call),
                "state": way,
                "bytes": f"{row['bytes']:,}",
                "error of reads": f"{row['read_error_last_tenth']:.2%}".replace("nan%", "–"),
                "error of the state": f"{row['state_error']:.2%}",
            }
            for way, row in found.items()
        ]
    no_numbers = [e for e in entries if not e["state_error"] < float("inf")]
    complaints = [f"{e['rule']}, {e['way']}: the error is {e['state_error']}" for e in no_numbers]
    ran = {name: getattr(options, name) for name in ("tokens", "dim", "grid")}
    return report.finish("quantize", options, device, ran, {"errors": entries}, [shown], complaints)
