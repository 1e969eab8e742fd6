"""Text from a trained decoder, one token after another, at constant memory.

A text is read as it was in training: in windows of the training length, each token predicted from
its window and from what is carried into it. A model that carries nothing starts a new window with
the last half of the old one instead. Within a window keys and values are kept, where the method
allows it; else the window is computed again for every token.

Letters: N tokens, d width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tensor_memory_lab.models import Carry
from tensor_memory_lab.models.block import LayerState
from tensor_memory_lab.models.language import LanguageModel


class TextStream:
    """A text being read: what the model keeps of it, and what it expects next.

    Args:
        model: in evaluation mode. It carries from window to window if it was built to.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model, self.stack = model, model.stack
        self.carries = bool(model.stack.config.carried and model.empty_carry(1))
        self.window: list[int] = []
        """Ids of the window being read, at most as many as it is long."""
        self._start: Carry | None = None
        self._after: Carry | None = None
        self._states: list[LayerState] | None = None
        self._read = 0  # tokens of the window that the states hold

    @torch.no_grad()
    def read(self, ids: Sequence[int]) -> Tensor:
        """Go on with these ids: logits (words,) in float32 of what follows the last."""
        if not ids:
            raise ValueError("ids: expected at least one to read, got none")
        logits = torch.empty(0)
        left = list(ids)
        while left:
            if len(self.window) == self.model.length:
                self._next_window()
            room = self.model.length - len(self.window)
            self.window += left[:room]
            left = left[room:]
            logits = self._advance() if self.stack.advances else self._compute()
        return logits.float()

    def _next_window(self) -> None:
        """A full window's end: carry, or keep its second half where nothing is carried."""
        if not self.carries:
            self.window = self.window[len(self.window) - self.model.length // 2 :]
            self._states, self._read = None, 0
            return
        if self._states is not None:
            self._states = self.stack.next_window(self._states, self.model.word.weight[None])
        self._start = self._after
        self.window, self._read = [], 0

    def _advance(self) -> Tensor:
        """The window's new tokens, after those that are kept."""
        x = self.model.embed(self._ids(self._read), self._read)
        x, self._states = self.stack.advance(x, self._states)
        self._read = len(self.window)
        return self.model.logits(x[0, -1])

    def _compute(self) -> Tensor:
        """The window again from its start."""
        x, self._after = self.model.hidden(self._ids(0), self._start)
        return self.model.logits(x[0, -1])

    def _ids(self, first: int) -> Tensor:
        return torch.tensor([self.window[first:]], device=self.model.word.weight.device)


def generate(
    stream: TextStream,
    ids: Sequence[int],
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """Ids that follow `ids`, without end; the stream remembers them.

    Args:
        stream: reads the ids and what is drawn.
        ids: the prompt.
        temperature: 0 takes the most probable each time, 1 draws as the model says.
        top_k: draws among so many of the most probable.
        seed: of the draws.
    """
    if not temperature >= 0:  # nor where it is no number
        raise ValueError(f"temperature: expected 0 or more, got {temperature}; 0 is greedy")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k: expected 1 or more, got {top_k}; leave it out for all words")
    random = torch.Generator().manual_seed(seed)
    unread: Sequence[int] = ids
    while True:
        drawn = _draw(stream.read(unread).cpu(), temperature, top_k, random)
        yield drawn
        unread = [drawn]


def _draw(logits: Tensor, temperature: float, top_k: int | None, random: torch.Generator) -> int:
    """One id; logits (words,)."""
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < len(logits):
        least = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probabilities = (logits / temperature).softmax(0)
    return int(torch.multinomial(probabilities, 1, generator=random))
