"""Next-token prediction: windows that start empty, or streams whose state is carried.

Every token of a split is scored exactly once, the first from the start token alone. A window is N
tokens long; what a model may know of the text before it is what it carries.

A model that sees the future can only be caught by taking the future away: the splits WINDOW and
PREFIX score the same tokens, once in their whole windows and once as the last token of a window
that ends with them. For a causal model the two agree.

Letters: B rows, N tokens.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tensor_memory_lab.choices import check_choices
from tensor_memory_lab.tasks import Annotations, Batch, Outputs, Sums, Task
from tensor_memory_lab.tasks.text import Corpus, Level, Protocol, read_corpus

PLACES = 16
"""Tokens of a window that WINDOW and PREFIX score."""

WINDOW, PREFIX = "test@window", "test@prefix"
"""Splits: the same tokens in their whole windows, and from what is before them alone."""


@dataclass(frozen=True)
class LanguageTaskConfig:
    """Text to predict, cut into windows."""

    data_dir: str | None = None
    """Folder with train.txt, valid.txt, test.txt; None: WikiText-2 by the `datasets` library."""
    corpus: Literal["wikitext-2", "any"] = "wikitext-2"
    """wikitext-2: token counts must be those of the whole corpus. any: whatever is there."""
    protocol: Protocol = "standard"
    """standard: `<eos>` per line, every training word. paper: no `<eos>`, 30,000 words."""
    level: Level = "word"
    """What a token is: a word between spaces, or a byte (no vocabulary, no <unk>)."""
    length: int = 512
    """Tokens per window."""
    order: Literal["random", "streams"] = "random"
    """Windows of a training batch: drawn from all of the text, or as many streams of it as there
    are rows, each read in order."""
    carried: bool = False
    """Whether the state is carried from window to window; training then reads streams."""
    leak: bool = False
    """For models that see the future: the measure is called a score and not a perplexity, and
    tests also predict single tokens from what is before them alone."""

    def __post_init__(self) -> None:
        check_choices(self, "task")
        if self.length < 1:
            raise ValueError(f"task.length: expected 1 or more tokens, got {self.length}")
        if self.leak and self.carried:
            raise ValueError(
                "task.leak: expected windows that start empty, so that what is cut off is gone, "
                "got carried=True; set one of them to False"
            )

    def build(self, seed: int) -> LanguageTask:
        """Read the text and count it."""
        corpus = read_corpus(
            self.data_dir,
            protocol=self.protocol,
            level=self.level,
            wikitext=self.corpus == "wikitext-2",
        )
        return LanguageTask(self, corpus, seed)


class ScoredTokens(Task):
    """What tasks share whose models give the loss of every token, of which some are scored."""

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Mean negative log-likelihood over scored tokens, in nats."""
        scored = batch["scored"]
        return (outputs["nll"] * scored).sum() / scored.sum()

    def measure(self, outputs: Outputs, batch: Batch) -> Sums:
        """The same as a sum and a count, in float64: WikiText-2 has 245,569 terms."""
        scored = batch["scored"]
        return {"loss": ((outputs["nll"].double() * scored).sum(), scored.sum())}


class LanguageTask(ScoredTokens):
    """A corpus, its windows and their perplexity."""

    higher_is_better = False

    def __init__(self, config: LanguageTaskConfig, corpus: Corpus, seed: int) -> None:
        self.config, self.seed = config, seed
        self.vocabulary = corpus.vocabulary
        self.splits = corpus.splits
        self.carries = config.carried
        self.metric = "score" if config.leak else "perplexity"
        # A carried run is also measured without what it carries, in the windows of a fresh one.
        self.test_splits: tuple[str, ...] = ("test",)
        if config.carried:
            self.test_splits = ("test", "test@fresh")
        elif config.leak:
            self.test_splits = ("test", WINDOW, PREFIX)
        unit = "bytes" if config.level == "byte" else config.protocol
        self.name = f"{config.corpus if config.corpus != 'any' else 'text'}/{unit}"
        shortest = min(len(part) for part in self.splits.values())
        if shortest < 2:
            raise ValueError(f"expected at least 2 tokens in every split, got {shortest}")

    def to(self, device: torch.device) -> LanguageTask:
        """The same task with its tokens on `device`: 8 MB for WikiText-2."""
        moved = {split: part.to(device) for split, part in self.splits.items()}
        return LanguageTask(self.config, Corpus(self.vocabulary, moved), self.seed)

    def batch(self, split: str, index: int, size: int) -> Batch:
        """Rows of `ids`, the tokens before, and `targets`, both (B, N); `scored` where real."""
        tokens = self._tokens(split)
        if split == WINDOW:
            return scored_at_places(self.batch("test", index, size))
        if split == PREFIX:
            ends = places(self.config.length)
            return cut_after(self.batch("test", index // len(ends), size), ends[index % len(ends)])
        if split == "train":
            starts, fresh = self._training_starts(len(tokens), index, size)
            end = len(tokens)
        elif self._is_carried(split):
            starts, fresh, end = self._stream_starts(len(tokens), index, size)
        else:
            N, windows = self.config.length, self._windows(len(tokens))
            starts = torch.arange(index * size, min((index + 1) * size, windows)) * N
            fresh, end = torch.ones(len(starts), dtype=torch.bool), len(tokens)
        return self._cut(tokens, starts, fresh, end)

    def batches(self, split: str, size: int) -> int:
        """Batches of one pass; carried ones are `size` streams side by side."""
        count = len(self._tokens(split))
        if self._is_carried(split):
            return self._windows(-(-count // size))
        cuts = len(places(self.config.length)) if split == PREFIX else 1
        return -(-self._windows(count) // size) * cuts

    def finish(self, means: dict[str, float]) -> dict[str, float]:
        """Perplexity (or a score, see `leak`), and bits per byte where bytes are predicted."""
        extra = {self.metric: math.exp(min(means["loss"], 50.0))}
        if self.config.level == "byte":
            extra["bits_per_byte"] = means["loss"] / math.log(2)
        return means | extra

    def facts(self) -> dict[str, Any]:
        """The protocol that a perplexity cannot be read without."""
        N = self.config.length
        context = (
            f"windows of {N} in order, state carried between them"
            if self.carries
            else f"windows of {N}, each from an empty state"
        )
        return {
            "protocol": self.config.protocol if self.config.level == "word" else "bytes",
            "vocabulary": len(self.vocabulary),
            "tokens": {split: len(part) for split, part in self.splits.items()},
            "window": N,
            "carried": self.carries,
            "evaluation": f"{context}; every token scored once",
            "chance": float(len(self.vocabulary)),
        }

    def describe(self, batch: Batch) -> Annotations:
        """The tokens read, with the blanks and line ends between them."""
        piece = self.vocabulary.piece
        return {"texts": [[piece(number) for number in row] for row in batch["ids"].tolist()]}

    def assets(self) -> dict[str, str]:
        """Text files that a run keeps beside its weights: the words by id, one per line."""
        return {"vocabulary.txt": "\n".join(self.vocabulary.words)}

    def _tokens(self, split: str) -> Tensor:
        name = split.partition("@")[0]
        if name not in self.splits or split not in (name, "test@fresh", WINDOW, PREFIX):
            raise ValueError(
                f"split: expected train, valid, test, test@fresh, {WINDOW} or {PREFIX}, "
                f"got {split!r}"
            )
        return self.splits[name]

    def _is_carried(self, split: str) -> bool:
        return self.carries and not split.endswith("@fresh")

    def _windows(self, count: int) -> int:
        return -(-count // self.config.length)

    def _training_starts(self, count: int, index: int, size: int) -> tuple[Tensor, Tensor]:
        """Where the rows of a training batch start, and which start empty; each epoch cuts at
        another offset.

        The windows of an epoch in random order, or the text cut into `size` streams that are read
        in order, side by side.
        """
        N = self.config.length
        streams = self.carries or self.config.order == "streams"
        stream = count // size if streams else count
        windows = (stream - N + 1) // N  # that fit wherever the first one starts
        if windows < 1 or (not streams and windows < size):
            raise ValueError(
                f"training text: expected at least {size} windows of {N} tokens, got {count:,} "
                "tokens; lower --budget.batch-size or --task.length"
            )
        per_epoch = windows if streams else windows // size
        epoch, place = divmod(index, per_epoch)
        draw = torch.Generator().manual_seed(self.seed * 100_003 + epoch)
        offset = int(torch.randint(N, (), generator=draw))
        if streams:
            starts = torch.arange(size) * stream + offset + place * N
            return starts, torch.full((size,), place == 0 or not self.carries)
        chosen = torch.randperm(windows, generator=draw)[place * size : (place + 1) * size]
        return chosen * N + offset, torch.ones(size, dtype=torch.bool)

    def _stream_starts(self, count: int, index: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """The same place in each of `size` streams, and where each stream ends."""
        stream = -(-count // size)
        first = torch.arange(size) * stream
        starts = first + index * self.config.length
        return starts, torch.full((size,), index == 0), (first + stream).clamp(max=count)

    def _cut(self, tokens: Tensor, starts: Tensor, fresh: Tensor, end: int | Tensor) -> Batch:
        N, device = self.config.length, tokens.device
        # Without waiting, so that a GPU is at work on one step while the next is made ready.
        starts, fresh = (x.to(device, non_blocking=True) for x in (starts, fresh))
        if isinstance(end, Tensor):
            end = end.to(device, non_blocking=True)[:, None]
        at = starts[:, None] + torch.arange(N, device=device)  # (B, N)
        scored = at < end
        at = at.clamp(max=len(tokens) - 1)
        before = tokens[(at - 1).clamp(min=0)].long()
        return {
            "ids": torch.where(at == 0, self.vocabulary.start, before),
            "targets": tokens[at].long(),
            "scored": scored,
            "fresh": fresh,
        }


def places(length: int) -> list[int]:
    """The scored places of a window, one drawn from each of 16 equal parts: never at a chunk's
    border by rule.

    >>> places(4), len(places(512)), max(places(512)) < 512
    ([0, 1, 2, 3], 16, True)
    """
    count = min(PLACES, length)
    draw = torch.Generator().manual_seed(length)
    edges = [length * part // count for part in range(count + 1)]
    return [
        int(torch.randint(first, last, (), generator=draw))
        for first, last in itertools.pairwise(edges)
    ]


def scored_at_places(batch: Batch) -> Batch:
    """The batch with the tokens at `places` alone scored, in their whole windows."""
    chosen = torch.zeros_like(batch["scored"])
    chosen[:, places(chosen.shape[1])] = True
    return batch | {"scored": batch["scored"] & chosen}


def cut_after(batch: Batch, place: int) -> Batch:
    """The batch up to and with a place, where it scores its last token: nothing later exists."""
    cut = {name: x[:, : place + 1] if x.ndim > 1 else x for name, x in batch.items()}
    last = torch.zeros_like(cut["scored"])
    last[:, -1] = True
    return cut | {"scored": cut["scored"] & last}
