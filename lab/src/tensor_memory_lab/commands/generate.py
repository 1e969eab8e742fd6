"""`tensor-memory generate RUN_FOLDER`: text from a trained decoder, printed as it comes."""

from __future__ import annotations

import argparse
import codecs
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from tensor_memory_lab.language_runs import load_text_run
from tensor_memory_lab.models.generation import TextStream, generate
from tensor_memory_lab.tasks.text import END, UNKNOWN, Vocabulary
from tensor_memory_lab.train.processes import find_device

SHOWN_WORDS = 5
"""Unknown words that are named."""


def generate_command(arguments: Sequence[str]) -> int:
    """Print what a model goes on with; 130 when interrupted."""
    options = _parser().parse_args(arguments)
    if options.tokens < 0:
        raise ValueError(f"--tokens: expected 0 (without end) or more, got {options.tokens}")
    prompt = _read_prompt(options.prompt)
    device = find_device(options.device)
    _, vocabulary, model, _ = load_text_run(options.folder, options.which, device=device)
    if model.config.non_causal:
        _say(f"{model.config.method} was trained seeing the future; here it has none to see")
    ids = generate(
        TextStream(model),
        prompt_ids(vocabulary, prompt),
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
    )
    begins_line = not prompt or prompt[-1].isspace()
    try:
        for piece in written(vocabulary, islice(ids, options.tokens or None), begins_line):
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        print()
        return 130
    except BrokenPipeError:  # whoever was reading has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    print()
    return 0


def prompt_ids(vocabulary: Vocabulary, prompt: str) -> list[int]:
    """The start token and the prompt; a last line without an end is to be gone on with."""
    ids = vocabulary.tokenize(prompt)
    if vocabulary.words and END in vocabulary.words and prompt and not prompt.endswith("\n"):
        ids = ids[:-1]
    if vocabulary.words:
        known = set(vocabulary.words)
        foreign = [word for word in prompt.split() if word not in known]
        if foreign:
            shown = ", ".join(list(dict.fromkeys(foreign))[:SHOWN_WORDS])
            _say(
                f"{len(foreign)} of {len(prompt.split())} words of the prompt are not in the "
                f"vocabulary and are read as {UNKNOWN}: {shown}"
            )
    return [vocabulary.start, *ids]


def written(vocabulary: Vocabulary, ids: Iterable[int], begins_line: bool) -> Iterator[str]:
    """The pieces of text that ids make, one for each: words with blanks between, or bytes.

    >>> words = Vocabulary(("<eos>", "a", "b", "<unk>"))
    >>> "".join(written(words, [1, 2, 0, 1], begins_line=True))
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


def _read_prompt(given: str | None) -> str:
    """The text of a file, of stdin for "-", or none."""
    if given is None:
        return ""
    if given == "-":
        if sys.stdin is None:
            raise ValueError("--prompt -: expected text from stdin, which is closed")
        text, where = sys.stdin.read(), "stdin"
    else:
        path = Path(given)
        if not path.exists() or path.is_dir():
            what = "is a folder" if path.is_dir() else "no such file"
            raise FileNotFoundError(
                f"--prompt {path}: {what}; expected a text file, or - for stdin"
            )
        try:
            text, where = path.read_text(encoding="utf-8"), given
        except UnicodeDecodeError as error:
            raise ValueError(f"--prompt {path}: expected text in UTF-8, got {error}") from error
    if not text.strip():
        raise ValueError(
            f"--prompt: expected text, got none from {where}; leave --prompt out to start anew"
        )
    return text


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tensor-memory generate",
        description="Print text from a trained language model as it is drawn, at constant memory: "
        "windows as long as in training, the state carried from each to the next.",
    )
    parser.add_argument("folder", type=Path, help="folder of a language run, with its checkpoints")
    parser.add_argument("--prompt", metavar="FILE", help="text to go on with; - reads stdin")
    parser.add_argument(
        "--tokens", type=int, default=200, help="how many (default 200); 0 goes on until Ctrl-C"
    )
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="0 is greedy, 1 as the model says (default)"
    )
    parser.add_argument("--top-k", type=int, help="draw among so many of the most probable")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default 0)")
    parser.add_argument(
        "--which", choices=("best", "last"), default="best", help="checkpoint (default best)"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, …")
    return parser
