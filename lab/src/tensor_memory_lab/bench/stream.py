"""A long stream through one memory: tokens per second, and that nothing grows.

    tensor-memory-lab bench stream --tokens 1000000
    tensor-memory-lab bench stream --memory place

Random tokens, made block by block, go through one memory without gradients; only the state is
carried over. The status is 1 if the state's size changed, or if the process's resident
memory grew beyond `--growth-limit` after the warm-up.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch

from tensor_memory import PlaceMemory, TensorMemory
from tensor_memory_lab.bench import report
from tensor_memory_lab.bench.hosts import MEMORIES, add_memory_options, memory_changes
from tensor_memory_lab.commands.option_types import count
from tensor_memory_lab.progress import progress
from tensor_memory_lab.train.record import peak_memory

STATM = Path("/proc/self/statm")


def held_bytes(device: torch.device) -> int:
    """Memory that this process holds now: in RAM, and where the device is a GPU there too."""
    return resident_bytes() + (torch.cuda.memory_reserved(device) if device.type == "cuda" else 0)


def resident_bytes() -> int:
    """Memory of this process that is in RAM now; where /proc is missing, the most it ever was."""
    if STATM.is_file():
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return peak_memory(torch.device("cpu"))


@torch.inference_mode()
def run_stream(memory: TensorMemory | PlaceMemory, options: argparse.Namespace) -> dict[str, Any]:
    """Stream random tokens block by block; what is measured begins after the warm-up."""
    weight = memory.output.weight
    like = {"dtype": weight.dtype, "device": weight.device}
    generator = torch.Generator(weight.device).manual_seed(options.seed)
    state: Any = memory.empty_state(torch.empty(options.batch, 0, memory.dim, **like))
    first, done, began = state.nbytes, 0, 0.0
    held: list[int] = []  # after the warm-up and after every block since
    with progress("stream", options.tokens, unit="tokens") as advance:
        while done < options.tokens:
            if done == options.warm_up:
                held, began = [held_bytes(weight.device)], time.perf_counter()
            end = options.warm_up if done < options.warm_up else options.tokens
            size = min(options.block, end - done)  # no block holds tokens of both
            x = torch.randn(options.batch, size, memory.dim, generator=generator, **like)
            _, state = memory(x, state)
            if weight.is_cuda:
                torch.cuda.synchronize()
            done += size
            if held:
                held.append(held_bytes(weight.device))
            advance(size, f"resident {held[-1] / report.MIB:.1f} MiB" if held else "warming up")
    seconds = time.perf_counter() - began
    return {
        "tokens": options.tokens,
        "tokens_per_second": options.batch * (options.tokens - options.warm_up) / seconds,
        "seconds": seconds,
        "state_bytes_first": first,
        "state_bytes_last": state.nbytes,
        "resident_after_warm_up": held[0],
        "resident_maximum": max(held),
        "resident_end": held[-1],
        "growth": max(held) - held[0],
        "growth_limit": round(options.growth_limit * report.MIB),
    }


def complaints(result: dict[str, Any]) -> list[str]:
    """What grew."""
    first, last = result["state_bytes_first"], result["state_bytes_last"]
    growth, limit = result["growth"], result["growth_limit"]
    found = []
    if first != last:
        found.append(f"the state grew from {first:,} to {last:,} bytes")
    if growth > limit:
        found.append(
            f"resident memory grew by {report.mib(growth)} MiB after the warm-up, more than the "
            f"{report.mib(limit)} MiB allowed"
        )
    return found


def main(argv: list[str]) -> int:
    """Run the benchmark; 0 if nothing grew, 1 if something did."""
    parser = report.make_parser(
        "stream", "Stream random tokens through one memory and watch speed and size."
    )
    add = parser.add_argument
    parser.set_defaults(device="cpu")
    add("--tokens", type=count, default=1_000_000, help="per row")
    add("--block", type=count, help="tokens per call (4096; of the place memory 1024)")
    add("--batch", type=count, default=1, help="rows")
    add("--dim", type=count, default=64, help="width of the tokens")
    add_memory_options(parser)
    add("--channels", type=int, help="features per voxel (default: the config's, as of all below)")
    add("--grid", type=int, nargs="+", help="voxels along each axis")
    add("--chunk-size", type=int, help="tokens per write of the tensor memory")
    add("--heads", type=int, help="of the place memory")
    add("--kernel", help="of the place memory: gaussian or linear")
    add("--warm-up", type=int, help="tokens before measuring begins (a tenth, at most 50,000)")
    add("--growth-limit", type=float, default=16.0, help="MiB of resident memory that may be added")
    options, device = report.parse(parser, argv)
    if options.block is None:
        # What a call of the place memory needs grows with it. The allocator keeps more or less of
        # that between calls, and with 4096 tokens so much more that it looks like growth.
        options.block = 1024 if options.memory == "place" else 4096
    if options.quick:
        options.tokens = min(options.tokens, 2000)
    if options.warm_up is None:
        options.warm_up = min(50_000, options.tokens // 10)
    if not 0 <= options.warm_up < options.tokens:
        parser.error(
            f"--warm-up: expected fewer than the {options.tokens} --tokens, got {options.warm_up}"
        )
    chosen = memory_changes(parser, options)
    kind, module = MEMORIES[options.memory]
    try:
        config = kind(**chosen)
        torch.manual_seed(options.seed)
        memory = module(options.dim, config).to(device)
    except ValueError as error:
        parser.error(str(error))
    result = run_stream(memory, options)
    shown = {
        "tokens per second": f"{result['tokens_per_second']:,.0f}",
        "state, bytes": f"{result['state_bytes_first']:,} / {result['state_bytes_last']:,}",
        "resident after warm-up, MiB": report.mib(result["resident_after_warm_up"]),
        "at most": report.mib(result["resident_maximum"]),
        "growth, MiB": report.mib(result["growth"]),
    }
    ran = {n: getattr(options, n) for n in ("tokens", "block", "batch", "dim", "warm_up")}
    ran |= {"growth_limit": options.growth_limit, "memory": config.to_dict()}
    return report.finish("stream", options, device, ran, result, [[shown]], complaints(result))
