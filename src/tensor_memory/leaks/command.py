"""`tensor-memory leak-check`: find_leak on a model named on the command line."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tensor_memory.leaks.find import find_leak


def run_leak_check(options: argparse.Namespace) -> int:
    """Build the model, draw an example, print the report.

    Returns:
        1 where the model leaks and never otherwise, 0 where it does not, 2 where nothing is shown.
    """
    if options.dim is not None and options.vocab_size is not None:
        raise ValueError(
            "leak-check: expected --dim or --vocab-size, got both; --dim draws embeddings, "
            "--vocab-size ids: leave out what the model does not take"
        )
    factory = load_factory(options.factory)
    with _told_of_crashes(f"{options.factory} raised"):
        made = factory()
    model, example = made if isinstance(made, tuple) else (made, None)
    if not callable(model):
        raise TypeError(
            f"{options.factory}: expected a factory that returns a model or (model, example), "
            f"got {type(made).__name__}"
        )
    if example is None:
        example = draw_example(model, options)
    with _told_of_crashes(f"the model of {options.factory} could not be checked:"):
        report = find_leak(model, example, vocab_size=options.vocab_size, seed=options.seed)
    print(report)
    if report:
        return 1
    if not any(cut.later for cut in report.cuts):
        raise ValueError(
            "leak-check: no output moved when its inputs did, so nothing is shown either way; "
            "give an example that the model reads (let the factory return (model, example))"
        )
    return 0


@contextmanager
def _told_of_crashes(what: str) -> Iterator[None]:
    """Anything may go wrong in a user's code, and none of it may pass for a leak (status 1)."""
    try:
        yield
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(
            f"leak-check: {what} {type(error).__name__}: {error} ({last.filename}:{last.lineno})"
        ) from error


def load_factory(name: str) -> Callable[[], Any]:
    """The object behind 'package.module:factory', the current folder on the path."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ValueError(
            f"leak-check: expected package.module:factory, got {name!r}; "
            "the part after the colon is a function without arguments"
        )
    here = os.getcwd()
    if here not in sys.path:  # `python -m` puts it there, an installed command does not
        sys.path.insert(0, here)  # and it stays: the module may import its neighbours late
    with _told_of_crashes(f"{module_name} cannot be imported:"):
        module = importlib.import_module(module_name)
    factory = module
    for part in attribute.split("."):
        if not hasattr(factory, part):
            raise ValueError(f"leak-check: module {module_name} has no {attribute}; check the name")
        factory = getattr(factory, part)
    if not callable(factory):
        raise TypeError(
            f"leak-check: expected {name} to be a function that returns a model, "
            f"got {type(factory).__name__}"
        )
    return factory


def draw_example(model: Any, options: argparse.Namespace) -> Tensor:
    """Random ids where the model embeds ids, random embeddings where a width was given."""
    shape = (options.batch, options.length)
    with _told_of_crashes("no example can be drawn:"):
        generator = torch.Generator().manual_seed(options.seed)
        if options.dim is not None:
            return torch.randn(*shape, options.dim, generator=generator)
        size = options.vocab_size or _vocabulary(model)
        if size is not None:
            return torch.randint(size, shape, generator=generator)
    raise ValueError(
        "leak-check: the model does not say what it takes; pass --vocab-size for ids or "
        "--dim for embeddings, or let the factory return (model, example)"
    )


def _vocabulary(model: Any) -> int | None:
    if isinstance(model, torch.nn.Module):
        for part in model.modules():
            if isinstance(part, torch.nn.Embedding):
                return part.num_embeddings
    return None
