"""Multi-query associative recall, by the protocol of zoology (Arora et al., 2023).

A row writes P pairs, a key and then its value, and asks for every key once, somewhere in the
tokens that follow; the answer is due at the key. Tokens between the questions are noise. Keys come
from the lower half of the vocabulary, values from the upper. How soon a key is asked for follows a
power law. Training mixes lengths and numbers of pairs, from the shortest rows to the longest in
every epoch; tests go four times beyond the training's longest rows.

Letters: R rows, N tokens, P pairs, Q questions.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from tensor_memory_lab.tasks import Batch, Outputs, Sums, Task
from tensor_memory_lab.tasks.synthetic import DrawnConfig, generator

TRAINED = ((64, 4, 5), (128, 8, 1), (256, 16, 1), (256, 32, 1), (256, 64, 1))
"""Tokens, pairs and how many times `train_rows` rows, in the order of an epoch."""

TESTED = ((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256))
"""Tokens and pairs of the rows of "valid" and "test"."""


@dataclass(frozen=True, kw_only=True)
class MqarConfig(DrawnConfig):
    """Zoology's mixture of lengths."""

    vocabulary: int = 8192
    """Words; the lower half are keys."""
    power: float = 0.01
    """Exponent of the power law of how soon a key is asked for; 1 is uniform."""
    overwrite: bool = False
    """Write a third of the keys twice; a key counts by its last value."""
    train_rows: int = 20_000
    """Rows of each part of the training data; of the shortest part five times as many."""
    valid_rows: int = 250
    """Rows of each part of "valid"."""
    test_rows: int = 1000
    """Rows of each part of "test"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(1, "train_rows")
        pairs = max(pairs for _, pairs in TESTED)
        if self.vocabulary < 2 * pairs + 2:
            raise ValueError(
                f"task.vocabulary: expected {2 * pairs + 2} or more, so that the lower half holds "
                f"{pairs} keys besides 0, got {self.vocabulary}"
            )

    def build(self, seed: int) -> Mqar:
        """The task; `seed` draws the training rows."""
        return Mqar(self, seed)


class Mqar(Task):
    """Answers are words at the positions "ask"; accuracy is the mean over rows."""

    metric = "accuracy"
    higher_is_better = True
    test_splits: tuple[str, ...] = ("test",)
    shapes = len(TESTED)
    """Shapes that batches come in, at most."""
    any_size = ("ask", "target", "twice")
    """Any number of questions: rows of one length share their code."""

    def __init__(self, config: MqarConfig, seed: int) -> None:
        self.config, self._seed = config, seed
        self.name = "mqar-overwrite" if config.overwrite else "mqar"
        self.vocabulary = config.vocabulary
        self.length = max(length for length, _ in TESTED)
        self._device = torch.device("cpu")
        self._drawn: dict[tuple[str, int], Batch] = {}
        trained = [(length, pairs, times * config.train_rows) for length, pairs, times in TRAINED]
        self._parts = {"train": trained} | {
            split: [(length, pairs, rows) for length, pairs in TESTED]
            for split, rows in (("valid", config.valid_rows), ("test", config.test_rows))
        }

    def to(self, device: torch.device) -> Self:
        """The same task, its rows resident on `device`; they are drawn on the CPU everywhere."""
        moved = copy.copy(self)
        moved._device, moved._drawn = torch.device(device), {}
        return moved

    def batch(self, split: str, index: int, size: int) -> Batch:
        """Batch number `index`: rows of one part. In training the parts follow each other.

        The last batch of a part of "train" is filled up with the part's first rows, so that all
        batches of a part have one shape.
        """
        if index < 0 or size < 1:
            raise ValueError(f"batch: expected index >= 0 and size >= 1, got {index} and {size}")
        whole = self.batches(split, size)
        if split != "train" and index >= whole:
            raise IndexError(f"batch {index} of {size} rows: {split} has {whole} batches")
        index %= whole
        for part, (_, _, rows) in enumerate(self._parts[split]):
            inside = -(-rows // size)
            if index < inside:
                return self._rows(split, part, index * size, size)
            index -= inside
        raise AssertionError("unreachable")

    def batches(self, split: str, size: int) -> int:
        """Batches of `size` rows in one pass over a split; of "train" in one epoch."""
        if split not in self._parts:
            raise ValueError(f"split: expected train, valid or test, got {split!r}")
        return sum(-(-rows // size) for _, _, rows in self._parts[split])

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Mean cross-entropy over all answers of the batch, in nats."""
        logits = outputs["logits"].float()  # (B, Q, vocabulary)
        return functional.cross_entropy(logits.flatten(0, 1), batch["target"].flatten())

    def measure(self, outputs: Outputs, batch: Batch) -> Sums:
        """Sums over rows: cross-entropy and the part of the answers that is right.

        `accuracy@64` is over the rows of 64 pairs alone, `accuracy_rewritten` over keys that were
        written twice, `accuracy_once` over the others.
        """
        logits, target = outputs["logits"].float(), batch["target"]
        rows = torch.full((), target.shape[0], device=target.device)
        none = torch.zeros_like(rows)
        hit = logits.argmax(-1) == target
        right = hit.float().mean(1).sum()
        loss = functional.cross_entropy(logits.flatten(0, 1), target.flatten()) * rows
        sums: Sums = {"loss": (loss, rows), "accuracy": (right, rows)}
        if "twice" in batch:
            for name, kind in (("rewritten", batch["twice"]), ("once", ~batch["twice"])):
                sums[f"accuracy_{name}"] = (((hit & kind).sum(1) / kind.sum(1)).sum(), rows)
        for length, pairs in TESTED:
            here = batch["tokens"].shape[1] == length and target.shape[1] == self.asked(pairs)
            sums[f"accuracy@{pairs}"] = (right, rows) if here else (none.float(), none)
        return sums

    def ceiling(self, split: str) -> float:
        """1: looking the keys up among the pairs answers everything."""
        return 1.0

    def facts(self) -> dict[str, Any]:
        """Chance, the mixture and the sizes."""
        return {
            "chance": 2 / self.vocabulary,
            "trained": [list(part) for part in self._parts["train"]],
            "tested": [list(part) for part in self._parts["test"]],
        } | asdict(self.config)

    def asked(self, pairs: int) -> int:
        """Q: different keys among so many pairs."""
        return pairs - pairs // 4 if self.config.overwrite else pairs

    def _rows(self, split: str, part: int, start: int, size: int) -> Batch:
        drawn = self._part(split, part)
        rows = self._parts[split][part][2]
        if split == "train" and start + size > rows:
            at = torch.arange(start, start + size, device=self._device) % rows
            return {name: x[at] for name, x in drawn.items()}
        return {name: x[start : start + size] for name, x in drawn.items()}

    def _part(self, split: str, part: int) -> Batch:
        if (split, part) not in self._drawn:
            length, pairs, rows = self._parts[split][part]
            # Evaluation rows come from one fixed seed: runs of all seeds are scored on the same.
            random = generator(self._seed if split == "train" else 0, self.name, split, part)
            drawn = draw(self.config, rows, length, pairs, self.asked(pairs), random)
            self._drawn[split, part] = {name: x.to(self._device) for name, x in drawn.items()}
        return self._drawn[split, part]


def draw(
    config: MqarConfig, rows: int, length: int, pairs: int, asked: int, random: torch.Generator
) -> Batch:
    """tokens (R, N), ask (R, Q) positions of the questions, target (R, Q) their answers.

    Where keys are written twice also twice (R, Q), the questions for one of these.
    """
    half, first = config.vocabulary // 2, 2 * pairs
    keys = distinct(rows, asked, 1, half, random)
    values = distinct(rows, pairs, half, config.vocabulary, random)
    written = torch.arange(asked).expand(rows, -1)  # which key each pair has
    twice: Batch = {}
    if asked < pairs:
        again = distinct(rows, pairs - asked, 0, asked, random)
        order = torch.rand(rows, pairs, generator=random).argsort(1)
        written = torch.cat([written, again], 1).gather(1, order)
        never = torch.zeros(rows, asked, dtype=torch.bool)
        twice = {"twice": never.scatter(1, again, True)}
    at = torch.arange(pairs).expand(rows, -1)
    last = torch.zeros(rows, asked, dtype=torch.long).scatter_reduce(1, written, at, "amax")
    # Drawing without replacement by weights: the largest of log weight plus Gumbel noise.
    places = (length - first) // 2
    weight = (config.power - 1) * torch.arange(1, places + 1).log()
    noise = -torch.log(-torch.rand(rows, places, generator=random).clamp_min(1e-30).log())
    ask = first + 2 * (weight + noise).topk(asked, 1).indices
    tokens = torch.randint(config.vocabulary, (rows, length), generator=random)
    tokens[:, :first:2], tokens[:, 1:first:2] = keys.gather(1, written), values
    tokens.scatter_(1, ask, keys)
    return {"tokens": tokens.int(), "ask": ask, "target": values.gather(1, last)} | twice


def distinct(rows: int, count: int, low: int, high: int, random: torch.Generator) -> Tensor:
    """(R, count) different integers of low … high - 1 in each row, in random order.

    Floyd's algorithm: one draw per number, whatever the range.
    """
    found = torch.empty(rows, count, dtype=torch.long)
    for i, top in enumerate(range(high - low - count, high - low)):
        drawn = torch.randint(top + 1, (rows,), generator=random)
        taken = (found[:, :i] == drawn[:, None]).any(1)
        found[:, i] = torch.where(taken, top, drawn)
    order = torch.rand(rows, count, generator=random).argsort(1)
    return low + found.gather(1, order)
