"""A prompt as ids, and ids as pieces of text that can be printed as they come."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator

from tensor_memory_lab.tasks.text import END, Vocabulary


def foreign_words(vocabulary: Vocabulary, prompt: str) -> list[str]:
    """The words of a prompt that the vocabulary does not have; bytes have none."""
    known = set(vocabulary.words)
    return [word for word in prompt.split() if word not in known] if known else []


def prompt_ids(vocabulary: Vocabulary, prompt: str) -> list[int]:
    """The start token and the prompt; a last line without an end is to be gone on with."""
    ids = vocabulary.tokenize(prompt)
    if vocabulary.words and END in vocabulary.words and prompt and not prompt.endswith("\n"):
        ids = ids[:-1]
    return [vocabulary.start, *ids]


def pieces(vocabulary: Vocabulary, ids: Iterable[int], begins_line: bool) -> Iterator[str]:
    """The pieces of text that ids make, one for each: words with blanks between, or bytes.

    >>> words = Vocabulary(("<eos>", "a", "b", "<unk>"))
    >>> "".join(pieces(words, [1, 2, 0, 1], begins_line=True))
    'a b\\na'
    """
    if not vocabulary.words:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for number in ids:
            yield decoder.decode(bytes([number]))
        yield decoder.decode(b"", final=True)
        return
    for number in ids:
        word = vocabulary.words[number]
        yield "\n" if word == END else word if begins_line else f" {word}"
        begins_line = word == END
