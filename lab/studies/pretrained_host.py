"""A memory on a pretrained host whose attention is cut to a window, streamed over whole novels.

    python lab/studies/pretrained_host.py tokens --host-dir HOST --data-dir NOVELS \\
        --output novels.safetensors
    python lab/studies/pretrained_host.py run --host-dir HOST --tokens novels.safetensors \\
        --record results/host.jsonl                     # 25 minutes on one H200
    python lab/studies/pretrained_host.py time --host-dir HOST --tokens novels.safetensors \\
        --record results/host.jsonl                     # 1 minute, with nothing else on the GPU

HOST is a folder of a Llama as transformers saves it: config.json, model.safetensors and, for
`tokens`, its tokenizer. NOVELS holds train/*.txt and valid/*.txt. The novels of valid are the test;
every ninth one of train is held out to choose rates by.

Books are streamed side by side in segments; a book begins where a segment begins. Every layer keeps
the keys and values of the last `window` tokens and attends to them in the next segment, so a token
sees exactly the window - 1 tokens before it wherever a segment is cut. It also sees the first four
tokens of its book, put right before the window: a pretrained host rests its attention there, and
without them a window of any size breaks it (`no-sinks`; Xiao et al., 2023). The memory's state goes
on from segment to segment too. Gradients stay inside a segment, which is longer than the window, so
that they reach from a read to a write that attention cannot reach.

`full` is the same host with a window of 2,048. `emptied` memories start anew at every window. Each
trained method has the same steps and as many tries of a rate: with seed 0, by the loss on held-out
novels; the runs that count have seeds 1, 2, 3. A run whose record is there is not run again. The
runs that a method is compared with are made before its own: `window` and `full`, and with LoRA
`lora` and `full+lora`.

Needs: pip install tensor-memory-lab 'tensor-memory[hf]' peft

Letters: B books side by side, N tokens of a segment, b queries per block, S blocks, h heads, e a
head's width.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tensor_memory import Attachment, MemoryConfig, PlaceConfig, attach
from tensor_memory_lab.bench.timing import Budget, measure
from tensor_memory_lab.files import write_whole
from tensor_memory_lab.provenance import provenance, write_record
from tensor_memory_lab.records import append, read_records
from tensor_memory_lab.records.config import flatten
from tensor_memory_lab.records.store import check_study, finite, frame
from tensor_memory_lab.records.table import Frame, Table, column, table
from tensor_memory_lab.records.text import measure_text
from tensor_memory_lab.terminal import print_table

HELD_OUT = 9
"""Every so many novels of train one is held out for validation."""
EDGES = [2**power for power in range(8, 18)]
"""Where the distances into a book at which the loss is told are cut."""
NONE = -100
"""The target of a token after which nothing is scored."""
SINKS = 4
"""Tokens at the start of a book that every later one sees."""
CARRIED = "carried_window"


@dataclass(frozen=True)
class Method:
    """What is done to the host."""

    memory: MemoryConfig | PlaceConfig | None = None
    lora: bool = False
    full: bool = False
    emptied: bool = False
    sinks: int = SINKS

    @property
    def trained(self) -> bool:
        """Whether there is anything to train."""
        return self.lora or self.memory is not None


# Both memories keep 32,768 numbers a layer. TensorMemory as published halves a write at every chunk
# and would hold nothing beyond the window: it gets the start that keeps what was written.
PLACE = PlaceConfig.recall(heads=8, channels=64)
TENSOR = MemoryConfig.long_gap(channels=32, grid=(8, 8, 8), chunk_size=16, reads="token")
METHODS = {
    "window": Method(),
    "full": Method(full=True),
    "no-sinks": Method(sinks=0),
    "lora": Method(lora=True),
    "full+lora": Method(lora=True, full=True),
    "place": Method(PLACE),
    "place-emptied": Method(PLACE, emptied=True),
    "place+lora": Method(PLACE, lora=True),
    "tensor": Method(TENSOR),
    "tensor+lora": Method(TENSOR, lora=True),
    "place-emptied+lora": Method(PLACE, lora=True, emptied=True),
    "tensor-emptied": Method(TENSOR, emptied=True),
    "tensor-emptied+lora": Method(TENSOR, lora=True, emptied=True),
}


class Streams(NamedTuple):
    """Books in rows, one after another."""

    tokens: Tensor  # (B, T)
    positions: Tensor  # (B, T) in its book
    targets: Tensor  # (B, T) the next token of the book, NONE where there is none

    def segments(self, length: int) -> Iterator[Streams]:
        """Parts of (B, N)."""
        for part in zip(*(tensor.split(length, dim=1) for tensor in self), strict=True):
            yield Streams(*part)


def in_rows(rows: Sequence[Sequence[Tensor]], segment: int, length: int | None = None) -> Streams:
    """Rows of books, each filled up to whole segments; all cut or filled up to one length."""
    length = length or max(sum(filled(book, segment) for book in books) for books in rows)
    made = []
    for books in rows:
        parts: list[tuple[Tensor, ...]] = []
        for book in (*books, torch.empty(0, dtype=torch.long)):
            size = filled(book, segment) if len(book) else length
            tokens, targets = torch.zeros(size, dtype=torch.long), torch.full((size,), NONE)
            tokens[: len(book)] = book
            targets[: max(len(book) - 1, 0)] = book[1:]
            parts.append((tokens, torch.arange(size), targets))
        made.append([torch.cat(part)[:length] for part in zip(*parts, strict=True)])
    return Streams(*(torch.stack(part) for part in zip(*made, strict=True)))


def filled(book: Tensor, segment: int) -> int:
    """Tokens of the segments that hold a book."""
    return -(-len(book) // segment) * segment


def training_streams(
    books: Sequence[Tensor], rows: int, segment: int, steps: int, seed: int
) -> Streams:
    """Books in an order that the seed draws, dealt out to rows until all are long enough."""
    order = torch.randperm(len(books), generator=torch.Generator().manual_seed(seed)).tolist()
    turns = itertools.cycle(order)
    dealt: list[list[Tensor]] = [[] for _ in range(rows)]
    for row in itertools.cycle(dealt):
        if all(sum(filled(b, segment) for b in row) >= steps * segment for row in dealt):
            break
        row.append(books[next(turns)])
    return in_rows(dealt, segment, steps * segment)


def scored_streams(books: Sequence[Tensor], rows: int, segment: int) -> Streams:
    """Whole books, each of them once, in rows of about the same length."""
    dealt: list[list[Tensor]] = [[] for _ in range(rows)]
    for book in sorted(books, key=len, reverse=True):
        min(dealt, key=lambda row: sum(map(len, row))).append(book)
    return in_rows(dealt, segment)


class Rotary(nn.Module):
    """Cosines and sines of positions by way of float64: a novel has 400,000 of them."""

    def __init__(self, frequencies: Tensor) -> None:
        super().__init__()
        self.frequencies = frequencies.double()  # no buffer, which .to(bfloat16) would round

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(B, N) -> two of (B, N, e)."""
        self.frequencies = self.frequencies.to(x.device)
        angle = position_ids[..., None] * self.frequencies
        angle = torch.cat([angle, angle], -1)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


class Carried:
    """The keys and values that every layer keeps, and what a token may attend to.

    Kept are those of the first tokens of a book, its sinks, and of the last tokens, the window.
    """

    def __init__(self, window: int, sinks: int, rotary: Rotary) -> None:
        self.window, self.sinks, self.rotary = window, sinks, rotary
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def enter(self, positions: Tensor) -> None:
        """A segment of (B, N) positions begins; N is a multiple of the window, or less than it."""
        (B, N), device, window = positions.shape, positions.device, self.window
        b = min(window, N)
        query = torch.arange(N, device=device).view(-1, b, 1)  # (S, b, 1)
        key = query[:, :1] + torch.arange(-window, b, device=device)  # (S, 1, window + b)
        near = (key <= query) & (key > query - window)
        at = positions.view(B, -1, b, 1)
        near = near & (key >= query - at)  # nothing from before the token's book
        behind = at - torch.arange(self.sinks, device=device) >= window  # sinks out of the window
        self.sees = torch.cat([behind, near], -1).flatten(0, 1)[:, None]  # (B·S, 1, b, keys)
        # Sinks stand right before the window of a block's first token, as near as in training.
        moved = (at[:, :, 0, 0] - window - self.sinks).clamp(min=0)  # (B, S)
        self.turn = [t[:, :, None, None] for t in self.rotary(torch.empty(0, device=device), moved)]
        self.begins = (positions[:, 0] == 0)[:, None, None, None]

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The keys (B, S, h, sinks + window + b, e) of every block of a segment, and the values."""
        (B, h, N, e), window, sinks = key.shape, self.window, self.sinks
        b = min(window, N)
        kept = self.kept.get(layer, (key.new_zeros(B, h, sinks + window, e),) * 2)
        found, keeps = [], []
        for before, now in zip(kept, (key, value), strict=True):
            first = torch.where(self.begins, now[:, :, :sinks], before[:, :, :sinks])
            row = torch.cat([before[:, :, sinks:], now], 2)
            keeps.append(torch.cat([first, row[:, :, N:]], 2).detach())
            blocks = row.unfold(2, window + b, b).permute(0, 2, 1, 4, 3)
            first = first[:, None].expand(-1, blocks.shape[1], -1, -1, -1)
            if now is key:
                cos, sin = (t.to(key.dtype) for t in self.turn)
                left, right = first.chunk(2, -1)
                first = first * cos + torch.cat([-right, left], -1) * sin
            found.append(torch.cat([first, blocks], 3))
        self.kept[layer] = keeps[0], keeps[1]
        return found[0], found[1]


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: float,
    carried: Carried,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of a window over (B, h, N, e), in blocks that see the window before them."""
    B, h, N, e = query.shape
    q = query.unflatten(2, (-1, min(carried.window, N))).transpose(1, 2).flatten(0, 1)
    k, v = (
        t.flatten(0, 1).repeat_interleave(module.num_key_value_groups, 1)
        for t in carried.extend(module.layer_idx, key, value)
    )  # (B·S, h, keys, e)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=carried.sees, scale=scaling)
    return mixed.transpose(1, 2).reshape(B, N, h, e), None


def read_host(folder: Path, window: int, device: torch.device, dtype: torch.dtype) -> Any:
    """A Llama with a window, which is a Mistral with its weights."""
    from transformers import AttentionInterface, AutoConfig, MistralConfig, MistralForCausalLM

    AttentionInterface.register(CARRIED, attend)
    if not (folder / "config.json").is_file():
        raise SystemExit(
            f"{folder}: expected config.json and model.safetensors of a Llama, as transformers "
            "saves them, got no config.json; pass --host-dir"
        )
    values = AutoConfig.from_pretrained(folder).to_dict()
    if values["model_type"] != "llama":
        raise SystemExit(f"{folder}: expected a Llama, got {values['model_type']!r}; pass another")
    values |= {"model_type": "mistral", "architectures": None, "sliding_window": window}
    host: Any = MistralForCausalLM.from_pretrained(
        folder,
        config=MistralConfig.from_dict(values),
        dtype=torch.float32,
        attn_implementation=CARRIED,
    )
    host.model.rotary_emb = Rotary(host.model.rotary_emb.inv_freq)
    return host.to(device, dtype).eval()


class Subject:
    """A host with what a method adds to it."""

    def __init__(self, method: Method, options: argparse.Namespace, seed: int) -> None:
        self.method, self.device = method, torch.device(options.device)
        self.window = options.full_window if method.full else options.window
        self.empty_every = options.window
        self.dtype: torch.dtype = getattr(torch, options.precision)
        self.model: Any = read_host(options.host_dir, self.window, self.device, self.dtype)
        self.model.requires_grad_(False)
        self.rotary: Rotary = self.model.model.rotary_emb
        torch.manual_seed(seed)
        if method.lora:
            import peft

            config = peft.LoraConfig(
                r=options.rank,
                lora_alpha=2 * options.rank,
                target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
                task_type=peft.TaskType.CAUSAL_LM,
            )
            self.model = peft.get_peft_model(self.model, config)
        self.attachment: Attachment | None = None
        if method.memory is not None:
            ends = tuple(f"layers.{number}" for number in options.layers)
            self.attachment = attach(
                self.model,
                method.memory,
                layers=lambda path, _: path.endswith(ends),
                share_weights=isinstance(method.memory, MemoryConfig),  # as published
                zero_init=True,
            ).float()

    def call(self, **arguments: Any) -> Any:
        """Call the model. What is trained is in float32, so autocast converts it where needed."""
        lower = self.dtype != torch.float32
        with torch.autocast(self.device.type, self.dtype, enabled=lower):
            return self.model(**arguments)

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that are trained; in float32."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def losses(self, streams: Streams, segment: int) -> Iterator[tuple[Streams, Tensor]]:
        """Every segment with the loss (B, N) of its targets. Gradients end where it begins."""
        carried = Carried(self.window, self.method.sinks, self.rotary)
        with nullcontext() if self.attachment is None else self.attachment.stream() as stream:
            for part in streams.segments(segment):
                part = Streams(*(tensor.to(self.device) for tensor in part))
                marks = {}
                if stream is not None:
                    stream.detach()
                    stream.reset(part.positions[:, 0] == 0)
                    if self.method.emptied:
                        stream.reset()
                        number = torch.arange(part.tokens.shape[1], device=self.device)
                        marks["seq_idx"] = (number // self.empty_every).expand_as(part.tokens)
                carried.enter(part.positions)
                logits = self.call(
                    input_ids=part.tokens,
                    position_ids=part.positions,
                    use_cache=False,
                    carried=carried,
                    **marks,
                ).logits  # (B, N, words)
                flat = logits.flatten(0, 1).float()
                loss = F.cross_entropy(
                    flat, part.targets.flatten(), ignore_index=NONE, reduction="none"
                )
                yield part, loss.view_as(part.targets)

    def state_bytes(self) -> int:
        """Bytes of all memory layers of one row."""
        if self.attachment is None:
            return 0
        token = torch.zeros(1, 1, self.attachment.dims[0], device=self.device)
        layers: Any = self.attachment.layers
        return sum(layer.memory.empty_state(token).nbytes for layer in layers)


def train(
    subject: Subject, books: Sequence[Tensor], options: argparse.Namespace, rate: float, seed: int
) -> Iterator[Tensor]:
    """Stream the books once; the loss at every step."""
    streams = training_streams(books, options.rows, options.segment, options.steps, seed)
    parameters = subject.trained
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01)
    warmup = max(options.steps // 10, 1)

    def factor(step: int) -> float:
        return min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / options.steps))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for part, losses in subject.losses(streams, options.segment):
        loss = losses.sum() / (part.targets != NONE).sum().clamp(min=1)  # a book's last token alone
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        yield loss.detach()


@torch.no_grad()
def evaluate(subject: Subject, streams: Streams, segment: int) -> dict[str, float]:
    """Mean loss of all tokens, and by the distance of a token from the start of its book."""
    edges = torch.tensor(EDGES, device=subject.device)
    total = torch.zeros(len(EDGES) + 1, 2, dtype=torch.float64, device=subject.device)
    for part, losses in subject.losses(streams, segment):
        scored = part.targets != NONE
        bucket = torch.bucketize(part.positions[scored] + 1, edges, right=True)
        values = losses[scored].double()
        total.index_add_(0, bucket, torch.stack([values, torch.ones_like(values)], 1))
    names = [f"{low}-{high}" for low, high in itertools.pairwise([0, *EDGES])] + [f"{EDGES[-1]}-"]
    found = {n: s / c for n, (s, c) in zip(names, total.tolist(), strict=True) if c}
    return {"loss": (total[:, 0].sum() / total[:, 1].sum()).item(), **found}


@torch.no_grad()
def decode_ms(subject: Subject, book: Tensor, rows: int, prompt: int, budget: Budget) -> Any:
    """Milliseconds of one more token for every row, with transformers' own cache."""
    from transformers import DynamicCache

    host: Any = subject.model.get_base_model() if subject.method.lora else subject.model
    host.set_attn_implementation("sdpa")
    tokens = book[:prompt].to(subject.device).expand(rows, -1)
    cache = DynamicCache(config=host.config)

    def step(given: Tensor) -> None:
        subject.call(input_ids=given, past_key_values=cache, use_cache=True, logits_to_keep=1)

    step(tokens)
    taken = measure(lambda: step(tokens[:, :1]), subject.device, budget)
    host.set_attn_implementation(CARRIED)
    return taken


class Study:
    """The plan, and the records of what has been run of it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.path = options, options.record
        try:
            read = load_file(options.tokens)
        except (OSError, SafetensorError) as error:
            raise SystemExit(
                f"{options.tokens}: expected novels in the safetensors that `tokens` writes, got "
                f"none ({error}); make the file first, or pass another --tokens"
            ) from error
        books = {name: tokens.long() for name, tokens in read.items()}
        self.books = {
            split: [tokens for name, tokens in sorted(books.items()) if name.startswith(split)]
            for split in ("train", "valid", "test")
        }
        if not all(self.books.values()):
            raise SystemExit(
                f"{options.tokens}: expected novels of train, valid and test, as `tokens` writes "
                f"them, got {', '.join(sorted(books)) or 'none'}; make the file again"
            )
        self.checksum = hashlib.sha256(options.tokens.read_bytes()).hexdigest()[:16]
        self.until = time.monotonic() + options.seconds

    def records(self) -> list[dict[str, Any]]:
        """Of all runs so far."""
        found = read_records([self.path]) if self.path.exists() else []
        return [record for record in found if record["kind"] == "run"]

    def recorded(self, config: dict[str, Any], seed: int) -> dict[str, Any] | None:
        """The record of a run, None where there is none."""
        found = (r for r in self.records() if r["config"] == config and r["seed"] == seed)
        return next(found, None)

    def config(self, method: str, rate: float | None, *, counts: bool) -> dict[str, Any]:
        """All that decides the numbers of a run but its seed."""
        options = self.options
        names = ("window", "full_window", "segment", "precision", "valid_tokens")
        if rate is not None:
            names += ("rows", "steps", "rank", "layers")
        memory = METHODS[method].memory
        return {
            "host": options.host_dir.name,
            "tokens": self.checksum,
            "method": method,
            "test": counts,
            "sinks": METHODS[method].sinks,
            "memory": None if memory is None else memory.to_dict(),
            **({} if rate is None else {"optimizer": {"lr": rate}}),
            **{name: getattr(options, name) for name in names},
        }

    def run(self, method: str, rate: float | None, seed: int, tries: Any = None) -> dict[str, Any]:
        """The record of a run, which is made where there is none."""
        options, counts = self.options, tries is not None
        config = self.config(method, rate, counts=counts)
        if known := self.recorded(config, seed):
            return known
        if time.monotonic() > self.until:
            raise SystemExit(f"{method}: not run, --seconds are over; the same command goes on")
        compared = self.compared(method, seed) if counts else {}
        began = time.perf_counter()
        subject = Subject(METHODS[method], options, seed)
        parameters = sum(p.numel() for p in subject.trained)
        curve: list[dict[str, float]] = []
        if rate is not None:
            every = max(options.steps // 10, 1)
            steps = train(subject, self.books["train"], options, rate, seed)
            for step, loss in enumerate(steps, 1):
                if step % every == 0:
                    curve.append({"step": step, "train_loss": loss.item()})
        result: dict[str, Any] = {"valid": self.score(subject, "valid"), "test": {}}
        if counts:
            scores = self.score(subject, "test")
            loss = scores.pop("loss")
            shares = {n: (near - loss) / (near - far) for n, (near, far) in compared.items()}
            result["test"] = {"test": {"loss": loss, **shares}}
            result["test"] |= {f"test@{name}": {"loss": loss} for name, loss in scores.items()}
        record = {
            "kind": "run",
            "recipe": "pretrained-host",
            "task": "novels",
            "method": method,
            "variant": {},
            "settings": {},
            "config": config,
            "seed": seed,
            "rate": rate,
            "tries": tries or {},
            "parameters": parameters,
            "state_bytes": subject.state_bytes(),
            "steps": 0 if rate is None else options.steps,
            "metric": "loss",
            "higher_is_better": False,
            "facts": {"tokens": {name: sum(map(len, b)) for name, b in self.books.items()}},
            "labels": {},
            "ceiling": {},
            "memory": None,
            "finished": True,
            "wall_seconds": time.perf_counter() - began,
            "curve": curve,
            **result,
            **provenance(subject.device),
        }
        record = finite(record)  # as it is read back: what diverged is None
        if known := self.recorded(config, seed):  # another process was faster
            return known
        append(self.path, record)
        scored = (record["test"].get("test") or record["valid"])["loss"]
        print(
            f"{method}, seed {seed}, rate {rate}: {'test' if counts else 'valid'} "
            f"{measure_text(scored)}, {record['wall_seconds']:.0f} s",
            flush=True,
        )
        return record

    def compared(self, method: str, seed: int) -> dict[str, tuple[float, float]]:
        """The loss with the window and with a wider one, without LoRA and with it."""
        pairs = {"given_back": ("window", "full")}
        if METHODS[method].lora:
            pairs["given_back_adapted"] = ("lora", "full+lora")
        found = {}
        for name, pair in pairs.items():
            runs = [self.chosen(end, seed) for end in pair] if method not in pair else []
            losses = [run["test"]["test"]["loss"] for run in runs if run]
            if len(losses) == 2 and None not in losses and losses[0] != losses[1]:
                found[name] = losses[0], losses[1]
        return found

    def score(self, subject: Subject, split: str) -> dict[str, float]:
        """The losses on a split."""
        options = self.options
        books = self.books[split]
        if split == "valid":
            books = [book[: options.valid_tokens] for book in books]
        streams = scored_streams(books, min(options.scored_rows, len(books)), options.segment)
        return evaluate(subject, streams, options.segment)

    def chosen(self, method: str, seed: int) -> dict[str, Any] | None:
        """The run that counts, at the rate that seed 0 chooses; None if all rates diverge."""
        if not METHODS[method].trained:
            return self.run(method, None, 0, tries={})
        losses = {r: self.run(method, r, 0)["valid"]["loss"] for r in self.options.rates}
        ordered = {r: loss for r, loss in losses.items() if loss is not None}
        if not ordered:
            return None
        best = min(ordered, key=lambda r: ordered[r])
        return self.run(method, best, seed, tries={str(r): loss for r, loss in losses.items()})

    def measure_times(self) -> list[dict[str, str]]:
        """Add a record of the milliseconds of a step and of one more token to the study's file."""
        options, found, rows = self.options, {}, []
        budget = Budget(seconds=options.time_seconds, least=4, most=20)
        options.steps = budget.warm_up + budget.most
        for method in options.methods:
            subject = Subject(METHODS[method], options, seed=0)
            taken = {
                f"token of {many}": decode_ms(
                    subject, self.books["test"][0], many, options.segment, budget
                )
                for many in (1, 8)
            }
            if subject.trained:
                steps = train(subject, self.books["train"], options, rate=1e-4, seed=0)
                taken["step"] = measure(lambda s=steps: next(s), subject.device, budget)
            found[method] = taken
            rows.append({"method": method, **{n: f"{t['median']:.1f}" for n, t in taken.items()}})
        names = ("rows", "window", "full_window", "segment", "precision", "rank", "layers")
        config = {"host": options.host_dir.name} | {n: getattr(options, n) for n in names}
        measured = {"seed": 0, "result": {"ms": found}, "device": torch.device(options.device)}
        write_record(self.path, benchmark="pretrained-host", config=config, **measured)
        return rows


def results_table(records: Sequence[dict[str, Any]]) -> Table:
    """Loss by distance and shares given back; a column tells apart what differs in a method."""
    runs: Frame = frame(record for record in records if record["test"])
    if runs.empty:
        return []
    fields = dict.fromkeys(name for record in runs["record"] for name in flatten(record["config"]))
    named = [name for name in fields if name in runs and name not in ("method", "optimizer.lr")]
    values = runs.groupby("method")[named].nunique().max()
    apart = [name for name in named if values[name] > 1]
    splits = dict.fromkeys(split for record in runs["record"] for split in record["test"])
    columns = [
        "seeds",
        *({"value": f"{n}.loss", "title": n.removeprefix("test@"), "digits": 4} for n in splits),
        {"value": "test.given_back", "title": "given_back", "kind": "percent"},
        {"value": "test.given_back_adapted", "title": "given_back_adapted", "kind": "percent"},
    ]
    return table(runs, [column(one) for one in columns], rows=["method", "rate", *apart])


def make_tokens(options: argparse.Namespace) -> None:
    """Write the novels as tokens, a tensor each, named by split and title."""
    from transformers import AutoTokenizer

    folders = {name: sorted((options.data_dir / name).glob("*.txt")) for name in ("train", "valid")}
    for name, novels in folders.items():
        if not novels:
            raise SystemExit(
                f"{options.data_dir / name}: expected novels as *.txt, got none; pass a --data-dir "
                "with the folders train and valid"
            )
    if not any(options.host_dir.glob("tokenizer*")):
        raise SystemExit(
            f"{options.host_dir}: expected a host with its tokenizer, such as tokenizer.json, got "
            "none; put it there, or pass another --host-dir"
        )
    tokenizer = AutoTokenizer.from_pretrained(options.host_dir)
    found = {}
    for name, novels in folders.items():
        for number, novel in enumerate(novels):
            split = "test" if name == "valid" else "train" if number % HELD_OUT else "valid"
            try:
                text = novel.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise SystemExit(f"{novel}: expected UTF-8, got {error}; convert it") from error
            ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
            if len(ids) < 2:
                raise SystemExit(f"{novel}: expected a novel, got {len(ids)} tokens; remove it")
            dtype = torch.uint16 if ids.max() < 2**16 else torch.int32
            found[f"{split}/{novel.stem}"] = ids.to(dtype)
    write_whole(options.output, lambda at: save_file(found, at))
    for name, ids in found.items():
        print(f"{name}: {len(ids):,} tokens")


def main(argv: list[str] | None = None) -> int:
    """Make tokens, run what is missing of the plan and show what there is, or time methods."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    tokens = commands.add_parser("tokens", help="write novels as tokens")
    tokens.add_argument("--data-dir", type=Path, required=True, help="folder of train and valid")
    tokens.add_argument("--output", type=Path, required=True, help="file of tokens (.safetensors)")
    run = commands.add_parser("run", help="run what is missing, show all")
    timed = commands.add_parser("time", help="time a step and a token of every method, alone")
    for command in (tokens, run, timed):
        command.add_argument("--host-dir", type=Path, required=True, help="folder of the host")
    for command in (run, timed):
        add = command.add_argument
        add("--tokens", type=Path, required=True, help="what `tokens` wrote")
        add("--record", type=Path, required=True, help="the study's file (.jsonl)")
        add("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="(default all)")
        add("--rows", type=int, default=8, help="books side by side in training")
        add("--segment", type=int, default=2048, help="tokens of a call")
        add("--window", type=int, default=256, help="tokens that attention sees")
        add("--full-window", type=int, default=2048, help="the same for `full`")
        add("--layers", nargs="+", type=int, default=[7, 14, 21], help="with a memory")
        add("--rank", type=int, default=16, help="of LoRA")
        add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        add("--precision", choices=["bfloat16", "float32"], help="(default by device)")
    run.add_argument("--rates", nargs="+", type=float, default=[5e-4, 2e-3])
    run.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="of runs that count")
    run.add_argument("--steps", type=int, default=100, help="of training")
    run.add_argument("--scored-rows", type=int, default=4, help="books side by side in scoring")
    run.add_argument("--valid-tokens", type=int, default=32768, help="of each held-out novel")
    run.add_argument("--seconds", type=float, default=math.inf, help="start no run after these")
    timed.add_argument("--time-seconds", type=float, default=2.0, help="for each time measured")
    timed.set_defaults(seconds=math.inf)
    options = parser.parse_args(argv)
    if options.command == "tokens":
        make_tokens(options)
        return 0
    names = ("steps", "rows", "scored_rows", "valid_tokens", "segment", "window", "full_window")
    for name in names:
        least = {"valid_tokens": 2, "segment": SINKS}.get(name, 1)
        if getattr(options, name, least) < least:
            flag = name.replace("_", "-")
            parser.error(f"--{flag}: expected {least} or more, got {getattr(options, name)}")
    for name in ("window", "full_window"):
        size = getattr(options, name)
        if options.segment > size and options.segment % size:
            parser.error(
                f"--segment: expected a multiple of --{name.replace('_', '-')} {size}, or less, "
                f"got {options.segment}"
            )
    if options.precision is None:
        options.precision = "bfloat16" if options.device.startswith("cuda") else "float32"
    try:
        check_study(options.record)
    except ValueError as error:
        parser.error(f"--record: {error}")
    study = Study(options)
    if options.command == "time":
        print_table(study.measure_times())
        return 0
    try:
        for method in options.methods:
            if not all(study.chosen(method, seed) for seed in options.seeds):
                print(f"{method}: diverged at every rate", flush=True)
    finally:
        print_table(results_table(study.records()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
