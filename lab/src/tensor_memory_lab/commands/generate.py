"""`tensor-memory-lab generate RUN_FOLDER`: text from a trained decoder, printed as it comes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from tensor_memory_lab.wording import counted


def generate_command(arguments: Sequence[str]) -> int:
    """Print what a model goes on with; 130 when interrupted."""
    options = _parser().parse_args(arguments)
    if options.tokens < 0:
        raise ValueError(f"--tokens: expected 0 (without end) or more, got {options.tokens}")
    prompt = _read_prompt(options.prompt)
    # Imported here, since torch takes seconds: --help is told at once.
    from tensor_memory_lab.commands.text_pieces import foreign_words, pieces, prompt_ids
    from tensor_memory_lab.language_runs import load_text_run
    from tensor_memory_lab.models.generation import TextStream, generate
    from tensor_memory_lab.train.processes import find_device

    device = find_device(options.device)
    _, vocabulary, model, _ = load_text_run(options.folder, options.which, device=device)
    if foreign := foreign_words(vocabulary, prompt):
        _say(
            f"{counted(len(foreign), 'word')} of the prompt not in the vocabulary, read as <unk>: "
            + ", ".join(list(dict.fromkeys(foreign))[:5])
        )
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
        for piece in pieces(vocabulary, islice(ids, options.tokens or None), begins_line):
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        print()
        return 130
    print()
    return 0


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
        prog="tensor-memory-lab generate",
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
