"""A long stream through one memory: tokens per second, and that nothing grows.

    python -m tensor_memory_lab.bench stream --tokens 1000000 --output stream.json

Random tokens, made block by block, go through one `TensorMemory` without gradients; only the
state is carried over. The status is 1 if the state's size changed, or if the process's resident
memory grew beyond `--growth-limit` after the warm-up.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from tensor_memory import MemoryConfig, MemoryState, TensorMemory
from tensor_memory_lab.bench.report import Defaults, check_common_options
from tensor_memory_lab.progress import progress
from tensor_memory_lab.provenance import write_record

MIB = 2**20
STATM = Path("/proc/self/statm")


@dataclass(frozen=True)
class StreamResult:
    """What one stream has shown, in tokens, seconds and bytes."""

    tokens: int
    """Per row, the warm-up included."""

    tokens_per_second: float
    """Of all rows together, after the warm-up."""

    seconds: float
    """Those after the warm-up."""

    state_bytes_first: int
    """The state's size before the first token."""

    state_bytes_last: int
    """The state's size after the last token."""

    resident_after_warm_up: int
    """What the process held in RAM when the measuring began."""

    resident_maximum: int
    """The most it held after any block since then."""

    resident_end: int
    """What it held after the last block."""

    growth_limit: int
    """How far `resident_maximum` may exceed `resident_after_warm_up`."""

    @property
    def growth(self) -> int:
        """How far resident memory rose above where the warm-up left it."""
        return self.resident_maximum - self.resident_after_warm_up

    @property
    def complaints(self) -> list[str]:
        """What grew; empty when nothing did."""
        found = []
        if self.state_bytes_last != self.state_bytes_first:
            found.append(
                f"the state grew from {self.state_bytes_first:,} to {self.state_bytes_last:,} bytes"
            )
        if self.growth > self.growth_limit:
            found.append(
                f"resident memory grew by {self.growth / MIB:.1f} MiB after the warm-up, more "
                f"than the {self.growth_limit / MIB:.1f} MiB allowed"
            )
        return found


def resident_bytes() -> int:
    """Memory of this process that is in RAM now; where /proc is missing, the most it ever was."""
    if STATM.is_file():
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource  # Unix only

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@torch.inference_mode()
def run_stream(
    memory: TensorMemory,
    *,
    tokens: int,
    block: int,
    batch: int,
    warm_up: int,
    growth_limit: int,
    seed: int,
) -> StreamResult:
    """Stream `tokens` random tokens per row block by block, measuring after the first `warm_up`."""
    weight = memory.output.weight
    like = {"dtype": weight.dtype, "device": weight.device}
    generator = torch.Generator(weight.device).manual_seed(seed)
    state = MemoryState.zeros(memory.config, memory.dim, batch, **like)
    first, done, began = state.nbytes, 0, 0.0
    held: list[int] = []  # after the warm-up and after every block since
    with progress("stream", tokens, unit="tokens") as advance:
        while done < tokens:
            if done == warm_up:
                held, began = [resident_bytes()], time.perf_counter()
            end = warm_up if done < warm_up else tokens  # no block holds tokens of both
            size = min(block, end - done)
            x = torch.randn(batch, size, memory.dim, generator=generator, **like)
            _, state = memory(x, state)
            if weight.is_cuda:
                torch.cuda.synchronize()
            done += size
            if held:
                held.append(resident_bytes())
            advance(size, f"resident {held[-1] / MIB:.1f} MiB" if held else "warming up")
    seconds = time.perf_counter() - began
    return StreamResult(
        tokens=tokens,
        tokens_per_second=batch * (tokens - warm_up) / seconds,
        seconds=seconds,
        state_bytes_first=first,
        state_bytes_last=state.nbytes,
        resident_after_warm_up=held[0],
        resident_maximum=max(held),
        resident_end=held[-1],
        growth_limit=growth_limit,
    )


def main(argv: list[str]) -> int:
    """Run the benchmark; 0 if nothing grew, 1 if something did."""
    parser = _parser()
    options = parser.parse_args(argv)
    for name in ("tokens", "block", "batch", "dim"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(options, name)}")
    if options.warm_up is None:
        options.warm_up = min(50_000, options.tokens // 10)
    if not 0 <= options.warm_up < options.tokens:
        parser.error(
            f"--warm-up: expected fewer than the {options.tokens} --tokens, got {options.warm_up}"
        )
    device = check_common_options(parser, options)
    names = {field.name for field in fields(MemoryConfig)}
    try:
        config = MemoryConfig(**{k: v for k, v in vars(options).items() if k in names})
        torch.manual_seed(options.seed)
        memory = TensorMemory(options.dim, config).to(device)
    except ValueError as error:
        parser.error(str(error))
    result = run_stream(
        memory,
        tokens=options.tokens,
        block=options.block,
        batch=options.batch,
        warm_up=options.warm_up,
        growth_limit=round(options.growth_limit * MIB),
        seed=options.seed,
    )
    _print(result)
    if options.output is not None:
        ran = {name: getattr(options, name) for name in _RUN_OPTIONS}
        write_record(
            options.output,
            benchmark="stream",
            config=ran | {"memory": config.to_dict()},
            seed=options.seed,
            result=asdict(result) | {"growth": result.growth},
        )
    for complaint in result.complaints:
        print(f"stream: {complaint}", file=sys.stderr)
    return 1 if result.complaints else 0


_RUN_OPTIONS = ("tokens", "block", "batch", "dim", "warm_up", "growth_limit", "device")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tensor-memory bench stream",
        description="Stream random tokens through one memory and watch speed and size.",
        formatter_class=Defaults,
    )
    add = parser.add_argument
    add("--tokens", type=int, default=1_000_000, help="per row")
    add("--block", type=int, default=4096, help="tokens per call")
    add("--batch", type=int, default=1, help="rows")
    add("--dim", type=int, default=64, help="width of the tokens")
    paper = MemoryConfig()
    add("--channels", type=int, default=paper.channels, help="features per voxel")
    add("--grid", type=int, nargs="+", default=paper.grid, help="voxels along each axis")
    add("--chunk-size", type=int, default=paper.chunk_size, help="tokens per write")
    add("--reads", default=paper.reads, help="chunk or token")
    add("--backend", help="implementation of the scan (triton on a GPU, torch on a CPU)")
    add("--device", default="cpu", help="where the memory runs")
    add("--seed", type=int, default=0, help="of the weights and of the tokens")
    add("--warm-up", type=int, help="tokens before measuring begins (a tenth, at most 50,000)")
    add("--growth-limit", type=float, default=16.0, help="MiB of resident memory that may be added")
    add("--output", type=Path, help="write the result, with commit and hardware, as JSON")
    return parser


def _print(result: StreamResult) -> None:
    rows = {
        "tokens per second": f"{result.tokens_per_second:,.0f}",
        "state, first and last": f"{result.state_bytes_first:,} B, {result.state_bytes_last:,} B",
        "resident after warm-up": f"{result.resident_after_warm_up / MIB:.1f} MiB",
        "resident at most": f"{result.resident_maximum / MIB:.1f} MiB",
        "resident at the end": f"{result.resident_end / MIB:.1f} MiB",
        "growth": f"{result.growth / MIB:.1f} MiB of {result.growth_limit / MIB:.1f} MiB allowed",
    }
    for name, value in rows.items():
        print(f"{name:<24}{value}")
