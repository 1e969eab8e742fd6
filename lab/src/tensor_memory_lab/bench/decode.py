"""One token at a time: what a memory adds to the latency, and what it holds instead of a cache.

    tensor-memory-lab bench decode
    tensor-memory-lab bench decode --memory place
    tensor-memory-lab bench decode --host attached --batches 1

The language model without gradients, each layer attending to a window of fixed size, so that
nothing grows; with and without memory, turn by turn. Or a small model of transformers with the
memory attached, whose cache starts again now and then. First the scan is compared with one in
float64, and one token at a time with the whole sequence at once.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F

from tensor_memory import PlaceConfig, PlaceMemory, TensorMemory
from tensor_memory_lab.bench import report
from tensor_memory_lab.bench.hosts import (
    Host,
    Memory,
    add_memory_options,
    attached_host,
    language_host,
    memory_changes,
)
from tensor_memory_lab.bench.place_shapes import PlaceShape
from tensor_memory_lab.bench.shapes import BOUNDS, ScanShape, Shape, check, rms_ratio
from tensor_memory_lab.bench.timing import QUICK, Budget, timing
from tensor_memory_lab.commands.option_types import count
from tensor_memory_lab.models.attention import SelfAttention, merge_heads, split_heads
from tensor_memory_lab.models.block import Block
from tensor_memory_lab.models.language import LanguageModel
from tensor_memory_lab.progress import progress

WITHOUT, WITH = "base", "memory"
WINDOW = 64
"""Tokens each layer attends to."""

TURN = 16
"""Tokens that a model decodes before the other one's turn, where there are no chunks."""

LENGTHS = (1_000, 10_000, 100_000)
"""Tokens for which the growing key-value cache is counted."""


class Decoder:
    """Feeds a model its own choices; keeps a window of keys and values, and the memory's states."""

    def __init__(self, model: LanguageModel, batch: int) -> None:
        self.model = model.eval()
        weight = model.word.weight
        self.blocks = [block for block in model.stack.blocks if isinstance(block, Block)]
        heads = model.config.heads
        size = (batch, heads, WINDOW, weight.shape[1] // heads)
        self.keys = [weight.new_zeros(size) for _ in self.blocks]
        self.values = [weight.new_zeros(size) for _ in self.blocks]
        self.states: dict[int, Any] = {
            index: None for index, block in enumerate(self.blocks) if block.side is not None
        }
        self.ids = torch.zeros(batch, 1, dtype=torch.long, device=weight.device)
        self.slots = cycle(range(WINDOW))

    @torch.inference_mode()
    def step(self) -> None:
        """One token for every row."""
        slot, model = next(self.slots), self.model
        x = model.embed(self.ids, slot % model.length)
        for index, block in enumerate(self.blocks):
            attention = block.attention
            assert isinstance(attention, SelfAttention)
            q, k, v = split_heads(attention.qkv(block.attention_norm(x)), 3, attention.heads)
            self.keys[index][:, :, slot] = k[:, :, 0]
            self.values[index][:, :, slot] = v[:, :, 0]
            mixed = F.scaled_dot_product_attention(q, self.keys[index], self.values[index])
            x = block.transform(x + attention.project(merge_heads(mixed)))
            if index in self.states:
                x, self.states[index] = block.remember(x, self.states[index])
        self.ids = model.logits(x).argmax(-1)


class AttachedDecoder:
    """Feeds a host of transformers its own choices; the cache carries the memory's states."""

    def __init__(self, model: Any, batch: int) -> None:
        self.model, self.rows = model, batch
        self._restart()

    def _restart(self) -> None:
        self.cache, self.tokens = None, 0
        self.ids = torch.zeros(self.rows, 1, dtype=torch.long, device=self.model.device)

    @torch.inference_mode()
    def step(self) -> None:
        """One token for every row."""
        if self.tokens == 4 * WINDOW:
            self._restart()
        output = self.model(self.ids, past_key_values=self.cache, use_cache=True)
        self.cache, self.ids = output.past_key_values, output.logits[:, -1:].argmax(-1)
        self.tokens += 1

    @property
    def states(self) -> dict[str, Any]:
        """The memory's states by layer."""
        attachment = getattr(self.model, "tensor_memory", None)
        return {} if attachment is None else attachment.state_on(self.cache)


def build(host: Host, device: torch.device, seed: int, *, memory: bool) -> Any:
    """The model in the type it is served in: bfloat16 on a GPU."""
    torch.manual_seed(seed)
    model = host.build(host.memory if memory else None, range(host.layers))
    return model.to(device, _dtype(device)).eval()


def decoder_of(model: Any, batch: int) -> Decoder | AttachedDecoder:
    """Who feeds a model of this kind."""
    return (Decoder if isinstance(model, LanguageModel) else AttachedDecoder)(model, batch)


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def cutting_error(host: Host, device: torch.device, seed: int, batch: int) -> float:
    """RMS error of one token at a time against all at once, as a share of the readout.

    The memory alone in float32, over two chunks and a half.
    """
    torch.manual_seed(seed)
    config = host.memory
    if isinstance(config, PlaceConfig):
        memory = PlaceMemory(host.dim, config).to(device)
    else:
        memory = TensorMemory(host.dim, config).to(device)
    x = torch.randn(batch, 5 * _tokens_per_turn(config) // 2, host.dim).to(device)
    with torch.inference_mode():
        whole, _ = memory(x)
        state: Any = None
        parts = []
        for token in x.split(1, dim=1):
            m, state = memory(token, state)
            parts.append(m)
    return rms_ratio(torch.cat(parts, dim=1), whole)


def measure_batch(
    host: Host, batch: int, device: torch.device, budget: Budget, seed: int
) -> dict[str, Any]:
    """Both comparisons first; then latency, launches and bytes. Plain values for JSON."""
    memory = host.memory
    row: dict[str, Any] = {"batch": batch, "memory": memory.to_dict(), "layers": host.layers}
    shape: Shape
    if isinstance(memory, PlaceConfig):
        shape = PlaceShape(batch, 1, memory, _dtype(device))
    else:
        shape = ScanShape(batch, 1, memory.channels, memory.grid, _dtype(device))
    row["agreement"] = check(shape, shape.scan(memory.backend), device, seed)
    cut = cutting_error(host, device, seed, batch)
    bound = BOUNDS[torch.float32]["outputs"]
    row["agreement"]["one_token_at_a_time"] = cut
    if not cut <= bound:
        row["agreement"]["passed"] = False
        row["agreement"]["failures"].append(
            f"one token at a time: error {cut:.1e} of the readout, allowed {bound:.0e}"
        )
    if row["agreement"]["failures"]:
        return row

    decoders = {
        name: decoder_of(build(host, device, seed, memory=name == WITH), batch)
        for name in (WITHOUT, WITH)
    }
    row |= _latency(decoders, memory, device, budget)
    row["state_bytes"] = sum(state.nbytes for state in decoders[WITH].states.values())
    per_token = 2 * host.layers * host.dim * batch * _dtype(device).itemsize
    row["key_value_bytes"] = {str(length): per_token * length for length in LENGTHS}
    row["errors"] = {}
    if device.type == "cuda":
        # A machine may forbid profiling; the latencies stand without it.
        with report.recorded(row["errors"], "launches"):
            row["launches"] = _launches(decoders, memory)
    return row


def _tokens_per_turn(memory: Memory) -> int:
    return TURN if isinstance(memory, PlaceConfig) else memory.chunk_size


def _places_in_chunk(memory: Memory) -> dict[str, slice]:
    """Tokens of a turn that cost the same, by name."""
    if isinstance(memory, PlaceConfig):
        return {"every": slice(0, TURN)}
    K = memory.chunk_size
    return {
        "first": slice(0, 1),  # reads
        "middle": slice(1, K - 1),  # waits
        "last": slice(K - 1, K),  # writes
    }


def _latency(
    decoders: dict[str, Decoder | AttachedDecoder],
    memory: Memory,
    device: torch.device,
    budget: Budget,
) -> dict[str, Any]:
    """Milliseconds per token, waited for one by one as a sampler does; chunks take turns."""
    K = _tokens_per_turn(memory)
    taken: dict[str, list[list[float]]] = {name: [] for name in decoders}  # K times per chunk
    for decoder in decoders.values():
        for _ in range(budget.warm_up * K):
            decoder.step()
    began, rounds = time.perf_counter(), 0
    while budget.goes_on(rounds, began):
        for name, decoder in decoders.items():
            taken[name].append([_wait(decoder, device) for _ in range(K)])
        rounds += 1
    chunk = {name: timing([sum(c) / K for c in chunks]) for name, chunks in taken.items()}
    without, with_memory = chunk[WITHOUT]["median"], chunk[WITH]["median"]
    return {
        "ms_per_token": chunk,
        "added_ms": with_memory - without,
        "ratio": with_memory / without,
        "ms_by_place_in_chunk": {
            name: {
                place: timing([t for c in chunks for t in c[part]])
                for place, part in _places_in_chunk(memory).items()
                if chunks[0][part]
            }
            for name, chunks in taken.items()
        },
    }


def _wait(decoder: Decoder | AttachedDecoder, device: torch.device) -> float:
    start = time.perf_counter()
    decoder.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) * 1e3


def _launches(decoders: dict[str, Decoder | AttachedDecoder], memory: Memory) -> dict[str, Any]:
    """Kernels run for a token of each place in a chunk, all rows together."""
    K, parts = _tokens_per_turn(memory), _places_in_chunk(memory)
    firsts = {part.start: place for place, part in parts.items()}
    counts = {name: _launches_by_place(decoder, firsts, K) for name, decoder in decoders.items()}
    layers = len(decoders[WITH].states)
    added = {
        place: (counts[WITH][place] - counts[WITHOUT][place]) / layers for place in counts[WITH]
    }
    mean = sum(added[place] * (part.stop - part.start) for place, part in parts.items()) / K
    return {
        "per_token": counts,
        "by_memory_per_layer": added,
        "by_memory_per_layer_mean": mean,
    }


def _launches_by_place(
    decoder: Decoder | AttachedDecoder, named: dict[int, str], K: int
) -> dict[str, int]:
    from torch.profiler import ProfilerActivity, profile

    counts = {}
    for at in range(K):
        if at not in named:
            decoder.step()
            continue
        torch.cuda.synchronize()
        # Events are kept: torch 2.10 and 2.11 warn that they would go, though there is one cycle.
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with profile(activities=activities, acc_events=True) as seen:
            decoder.step()
            torch.cuda.synchronize()
        counts[named[at]] = sum(
            event.device_type.name == "CUDA" and not event.name.startswith(("Memcpy", "Memset"))
            for event in seen.events() or ()
        )
    return counts


def run(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Every batch size asked for; one that fails is recorded and the others go on."""
    budget = QUICK if options.quick else Budget(seconds=4.0, least=5, most=60, warm_up=2)
    make = {"language": language_host, "attached": attached_host}[options.host]
    host = make(quick=options.quick, memory=options.memory)
    host = replace(host, memory=replace(host.memory, **options.changes))
    rows: dict[str, Any] = {}
    with progress("decode", len(options.batches), unit="batch sizes") as advance:
        for batch in options.batches:
            rows[str(batch)] = {"errors": {}}
            # Out of memory, or a shape that the backend refuses, costs this batch size alone.
            with report.recorded(rows[str(batch)]["errors"], "all"):
                rows[str(batch)] |= measure_batch(host, batch, device, budget, options.seed)
            advance(note=f"batch {batch}")
    return {"batches": rows}


def table(result: dict[str, Any]) -> report.Rows:
    """A line per batch size."""
    number, mib = report.number, report.mib
    return [
        {
            "batch": name,
            "base, ms per token": number(row["ms_per_token"][WITHOUT]["median"]),
            "with memory": number(row["ms_per_token"][WITH]["median"]),
            "added": number(row["added_ms"]),
            "ratio": number(row["ratio"]),
            "launches per token and layer": number(
                row.get("launches", {}).get("by_memory_per_layer_mean")
            ),
            "state, MiB": mib(row["state_bytes"]),
        }
        | {
            f"cache at {int(length):,}, MiB": mib(size)
            for length, size in row["key_value_bytes"].items()
        }
        for name, row in result["batches"].items()
        if "ms_per_token" in row
    ]


def main(argv: list[str]) -> int:
    """Run the benchmark; 1 where something disagreed or died."""
    parser = report.make_parser("decode", "Time one token at a time with and without memory.")
    add = parser.add_argument
    add("--batches", type=count, nargs="+", default=[1, 32], help="rows decoded together")
    add("--host", choices=("language", "attached"), default="language", help="the model decoded")
    add_memory_options(parser)
    options, device = report.parse(parser, argv)
    options.changes = memory_changes(parser, options)
    result = run(options, device)
    config = {"dtype": str(_dtype(device)).removeprefix("torch."), "window": WINDOW}
    config |= {"memory": options.memory, "host": options.host}
    complaints = report.failures({f"batch {n}": row for n, row in result["batches"].items()})
    return report.finish("decode", options, device, config, result, [table(result)], complaints)
