"""Text as ids: files found, words or bytes counted, nothing dropped.

Two protocols for WikiText-2. `standard`: one `<eos>` per line and every word of the training part,
33,278 in all. `paper`: no `<eos>` and the 30,000 most frequent words, the others `<unk>`, as the
paper has it, without its two slips (`<unk>` shared an id with "and"; the tail of each split was
never scored).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

SPLITS = ("train", "valid", "test")
END, UNKNOWN = "<eos>", "<unk>"
PAPER_WORDS = 30_000
WIKITEXT_2 = {
    "standard": {"train": 2_088_628, "valid": 217_646, "test": 245_569, "words": 33_278},
    "paper": {"train": 2_051_910, "valid": 213_886, "test": 241_211, "words": PAPER_WORDS},
}
"""Tokens per split and words: what a whole copy of WikiText-2 gives under each protocol."""

Protocol = Literal["standard", "paper"]
Level = Literal["word", "byte"]


@dataclass(frozen=True)
class Vocabulary:
    """Words by id, or the 256 bytes (`words` empty).

    >>> v = Vocabulary.of_words("a b a <eos>".split())
    >>> v.encode(["a", "b", "zebra"])
    [0, 1, 3]
    """

    words: tuple[str, ...] = ()

    @classmethod
    def of_words(cls, tokens: Sequence[str], most: int | None = None) -> Vocabulary:
        """By falling frequency, first seen first; `<unk>` is always among the `most` words."""
        words = [word for word, _ in Counter(tokens).most_common()]
        if UNKNOWN not in words[:most]:
            words = [*words[: None if most is None else most - 1], UNKNOWN]
        return cls(tuple(words[:most]))

    def __len__(self) -> int:
        return len(self.words) or 256

    @property
    def start(self) -> int:
        """What stands before the first token of a text: the end of a line, else `<unk>` or 10."""
        if not self.words:
            return 10  # a new line
        return self._ids[END if END in self._ids else UNKNOWN]

    def encode(self, tokens: Sequence[str] | bytes) -> list[int]:
        """Ids of words, unknown ones as `<unk>`; of bytes, themselves."""
        if isinstance(tokens, bytes):
            return list(tokens)
        unknown = self._ids[UNKNOWN]
        return [self._ids.get(token, unknown) for token in tokens]

    def piece(self, number: int) -> str:
        """One token as it stands in a text: a blank and its word, a line end, or a byte.

        >>> Vocabulary(("<eos>", "a")).piece(1), Vocabulary().piece(65), Vocabulary().piece(200)
        (' a', 'A', '\\\\xc8')
        """
        if self.words:
            return "\n" if self.words[number] == END else f" {self.words[number]}"
        return chr(number) if number < 128 else f"\\x{number:02x}"

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text, with `<eos>` at line ends where the vocabulary has it."""
        if not self.words:
            return self.encode(text.encode("utf-8"))
        return self.encode(_split(text, end=END in self._ids))

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words)}


@dataclass(frozen=True)
class Corpus:
    """Three splits as ids, int32, and the vocabulary of the training part."""

    vocabulary: Vocabulary
    splits: dict[str, Tensor]


def read_corpus(
    folder: str | None,
    *,
    protocol: Protocol = "standard",
    level: Level = "word",
    wikitext: bool = True,
) -> Corpus:
    """Read train, valid and test text from a folder, or WikiText-2 through `datasets`.

    Args:
        folder: holds `train.txt`, `valid.txt`, `test.txt` or `wiki.train.tokens` and so on; None
            asks the `datasets` library, which needs a network once.
        protocol: see the top of this file.
        level: words split at blanks, or bytes.
        wikitext: the text must be WikiText-2, whole: its counts are compared.
    """
    files = [] if folder is None else _files(Path(folder))
    if files:
        raw = {split: file.read_bytes() for split, file in zip(SPLITS, files, strict=True)}
    else:
        raw = {split: text.encode("utf-8") for split, text in _from_datasets().items()}
    if level == "byte":
        vocabulary = Vocabulary()
        ids = {split: vocabulary.encode(part) for split, part in raw.items()}
    else:
        names: Sequence[object] = files or SPLITS
        texts = {
            split: _decoded(part, name)
            for (split, part), name in zip(raw.items(), names, strict=True)
        }
        tokens = {split: _split(text, end=protocol == "standard") for split, text in texts.items()}
        most = PAPER_WORDS if protocol == "paper" else None
        vocabulary = Vocabulary.of_words(tokens["train"], most)
        ids = {split: vocabulary.encode(part) for split, part in tokens.items()}
    if wikitext and level == "word":
        _require_wikitext(ids, len(vocabulary), protocol, folder)
    for split, part in ids.items():
        if not part:
            raise ValueError(f"{folder}: expected text in the {split} part, got an empty file")
    return Corpus(vocabulary, {s: torch.tensor(part, dtype=torch.int32) for s, part in ids.items()})


def _split(text: str, *, end: bool) -> list[str]:
    if not end:
        return text.split()
    return [token for line in text.splitlines() for token in (*line.split(), END)]


def _files(folder: Path) -> list[Path]:
    """The file of each split, in the order of `SPLITS`."""
    layout = "train.txt, valid.txt and test.txt (or wiki.train.tokens, wiki.valid.tokens and so on)"
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder}: no such folder; expected one with {layout}. Name it with --data-dir"
        )
    files = []
    for split in SPLITS:
        names = (f"{split}.txt", f"wiki.{split}.tokens", f"wiki.{split}.raw")
        found = [folder / name for name in names if (folder / name).is_file()]
        if not found:
            present = ", ".join(sorted(p.name for p in folder.iterdir())) or "nothing"
            raise FileNotFoundError(
                f"{folder}: the {split} part is missing; expected {layout}, found {present}"
            )
        files.append(found[0])
    return files


def _decoded(part: bytes, file: object) -> str:
    try:
        return part.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file}: expected text in UTF-8, got byte {error.object[error.start]:#x} at "
            f"{error.start:,}; convert the file, or fetch it again"
        ) from error


def _from_datasets() -> dict[str, str]:
    try:
        from datasets import load_dataset  # type: ignore[import-not-found]
    except ImportError as error:
        raise ImportError(
            "no data folder was given and the `datasets` library is not installed; name a folder "
            "with --task.data-dir (train.txt, valid.txt, test.txt), or pip install datasets"
        ) from error
    parts = load_dataset("Salesforce/wikitext", "wikitext-2-v1")
    names = {"train": "train", "valid": "validation", "test": "test"}
    # A row is a line with its end, but an empty line has come without one.
    return {
        split: "".join(row if row.endswith("\n") else f"{row}\n" for row in parts[name]["text"])
        for split, name in names.items()
    }


def _require_wikitext(
    ids: dict[str, list[int]], words: int, protocol: Protocol, folder: str | None
) -> None:
    expected = WIKITEXT_2[protocol]
    found = {split: len(part) for split, part in ids.items()} | {"words": words}
    wrong = [f"{n} {expected[n]:,}, got {found[n]:,}" for n in expected if found[n] != expected[n]]
    if wrong:
        raise ValueError(
            f"{folder}: not the whole of WikiText-2 under the {protocol} protocol: expected "
            f"{'; '.join(wrong)}. Fetch the files again, or say --task.corpus any for other text"
        )
