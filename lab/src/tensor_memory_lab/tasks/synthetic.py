"""What the drawn tasks share: rows by number, splits, loss, accuracy.

Row r of a split is the same row whoever asks and in batches of whatever size. Rows are drawn in
blocks, each from a generator of its own, so that a batch costs a slice and a block a few
milliseconds (clips of the occlusion task thirty), and what is asked next needs no history. For a
GPU the next block is drawn by a thread while this one is used.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from tensor_memory_lab.choices import check_choices
from tensor_memory_lab.tasks import Batch, Outputs, Sums, Task


@dataclass(frozen=True, kw_only=True)
class DrawnConfig:
    """What every drawn task can be told."""

    valid_rows: int = 2048
    """Rows of "valid", the same for every method, seed and budget."""
    test_rows: int = 8192
    """Rows of "test", the same for every method, seed and budget."""

    def __post_init__(self) -> None:
        check_choices(self, "task")
        self._at_least(1, "valid_rows", "test_rows")

    def _at_least(self, least: int, *names: str) -> None:
        for name in names:
            if getattr(self, name) < least:
                raise ValueError(
                    f"task.{name}: expected {least} or more, got {getattr(self, name)}"
                )

    def _check_tests(self, tests: Sequence[str], known: Iterable[str]) -> None:
        """Raise unless there are test splits, and all of them are known."""
        wrong = [name for name in tests if name not in known]
        if wrong or not tests:
            raise ValueError(
                f"task.tests: expected some of {', '.join(known)}, got {', '.join(wrong) or 'none'}"
                "; --budget.no-test measures none"
            )


def generator(seed: int, *what: str | int) -> torch.Generator:
    """A generator of its own for (seed, what …); neighbours share nothing.

    >>> a, b = generator(0, "train", 1), generator(0, "train", 1)
    >>> bool(torch.equal(torch.rand(3, generator=a), torch.rand(3, generator=b)))
    True
    """
    text = "/".join(str(part) for part in (seed, *what)).encode()
    number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    return torch.Generator().manual_seed(number % 2**63)


class DrawnTask(Task):
    """A task whose rows are drawn, and whose answers are classes at the positions "ask".

    Subclasses set the attributes below and write `draw`. `loss` is the cross-entropy over all
    answers, `accuracy` the part of them that is right.
    """

    metric = "accuracy"
    higher_is_better = True
    test_splits: tuple[str, ...] = ("test",)

    inputs: str
    """How a row is to be embedded: "binding", "map", "occlusion" or "no-harm"."""
    classes: int
    """Answers to choose from; with all of them equally likely, 1 / classes is chance."""
    length: int
    """Tokens per row."""
    positions: int
    """Positions a model must tell apart; 0 where a token carries its own place."""
    distance: int
    """Tokens from an answer's question back to the nearest one that may hold the answer. Stacked
    windows of w tokens reach layers × (w - 1) back: further away is out of reach."""

    block_rows = 1024
    """Rows drawn at once; part of the definition of the data."""
    draws_ahead = False
    """Whether a thread draws the next block of "train"; for a CPU it would only be in the way."""

    def __init__(self, config: DrawnConfig, seed: int) -> None:
        self._sizes = {"train": None, "valid": config.valid_rows, "test": config.test_rows}
        self._described = asdict(config)
        self._seed = seed
        self._device = torch.device("cpu")
        self._blocks: dict[tuple[str, int], Batch] = {}
        self._coming: dict[int, Future[Batch]] = {}
        self._thread: ThreadPoolExecutor | None = None

    def draw(self, rows: int, random: torch.Generator) -> Batch:
        """`rows` rows on the CPU, from this generator alone."""
        raise NotImplementedError

    def to(self, device: torch.device) -> Self:
        """The same task, its batches on `device`; the numbers are drawn on the CPU everywhere."""
        moved = copy.copy(self)
        moved._device = torch.device(device)
        moved.draws_ahead = moved._device.type == "cuda"
        moved._blocks, moved._coming, moved._thread = {}, {}, None
        return moved

    def rows(self, split: str) -> int | None:
        """Rows of a split; None for "train", which has no end."""
        if split not in self._sizes:
            raise ValueError(f"split: expected train, valid or test, got {split!r}")
        return self._sizes[split]

    def batch(self, split: str, index: int, size: int) -> Batch:
        """Rows `index * size` to `(index + 1) * size` of the split."""
        if index < 0 or size < 1:
            raise ValueError(f"batch: expected index >= 0 and size >= 1, got {index} and {size}")
        start, stop, end = index * size, (index + 1) * size, self.rows(split)
        if end is not None:
            if start >= end:
                raise IndexError(f"batch {index} of {size} rows: {split} has {end} rows")
            stop = min(stop, end)
        parts = []
        for number in range(start // self.block_rows, (stop - 1) // self.block_rows + 1):
            first = number * self.block_rows
            rows = slice(max(start - first, 0), stop - first)
            parts.append({name: x[rows] for name, x in self._block(split, number).items()})
        if len(parts) == 1:
            return parts[0]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def batches(self, split: str, size: int) -> int:
        """Batches of `size` rows in one pass over an evaluation split."""
        rows = self.rows(split)
        if rows is None:
            raise ValueError("batches: expected an evaluation split, got 'train', which never ends")
        return -(-rows // size)

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Mean cross-entropy over all answers of the batch, in nats."""
        return functional.cross_entropy(
            outputs["logits"].float().flatten(0, 1), batch["target"].flatten()
        )

    def measure(self, outputs: Outputs, batch: Batch) -> Sums:
        """Sums over answers: cross-entropy and right answers."""
        logits, target = outputs["logits"].float(), batch["target"]  # (B, Q, classes), (B, Q)
        count = torch.full((), target.numel(), device=target.device)  # made where it is needed
        loss = functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
        return {
            "loss": (loss, count),
            "accuracy": ((logits.argmax(-1) == target).sum(), count),
        }

    def facts(self) -> dict[str, Any]:
        """Chance, length and how far back the answers lie, beside the config."""
        return {
            "chance": 1 / self.classes,
            "length": self.length,
            "answer_distance": self.distance,
        } | self._described

    def _block(self, split: str, number: int) -> Batch:
        """Block `number` of a split; training keeps the latest two, evaluation all of them."""
        key = (split, number)
        block = self._blocks.get(key)
        if block is None:
            coming = self._coming.pop(number, None) if split == "train" else None
            drawn = self._drawn(split, number) if coming is None else coming.result()
            block = {name: x.to(self._device, non_blocking=True) for name, x in drawn.items()}
            if split == "train":
                for old in [k for k in self._blocks if k[0] == split and abs(k[1] - number) > 1]:
                    del self._blocks[old]
                self._draw_next(number + 1)
            self._blocks[key] = block
        return block

    def _draw_next(self, number: int) -> None:
        """Let the thread draw a block of "train"."""
        if not self.draws_ahead:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="drawing")
        self._coming = {number: self._thread.submit(self._drawn, "train", number)}

    def _drawn(self, split: str, number: int) -> Batch:
        """A block as drawn on the CPU, in memory that a GPU can fetch by itself."""
        # Evaluation rows come from one fixed seed: runs of all seeds are scored on the same.
        seed = self._seed if split == "train" else 0
        drawn = self.draw(self.block_rows, generator(seed, self.inputs, split, number))
        for name, x in drawn.items():
            if x.shape[:1] != (self.block_rows,):
                raise ValueError(
                    f"{type(self).__name__}.draw: expected {self.block_rows} rows of {name!r}, as "
                    f"many as were asked for, got shape {tuple(x.shape)}"
                )
        if self._device.type != "cuda":
            return drawn
        return {name: x.pin_memory() for name, x in drawn.items()}
