"""Hosts that are compiled: what `torch.compile` has traced must notice hooks that come and go."""

from __future__ import annotations

import sys

from torch import nn


def refuse_compiled(model: nn.Module) -> None:
    """Raise for the wrapper that `torch.compile` returns, which hands on what it is asked for."""
    dynamo = sys.modules.get("torch._dynamo")  # importing it takes seconds
    if dynamo is not None and isinstance(model, dynamo.OptimizedModule):
        raise ValueError(
            f"attach: expected the model itself, got a compiled {type(model._orig_mod).__name__}; "
            "attach to the model it was compiled from (model._orig_mod), before or after"
        )


def guard_hooks() -> None:
    """Let compiled code be traced anew where hooks have changed since.

    Dynamo assumes that hooks never change once a module has run. A host compiled and run before
    `attach` would go on without its memory, and after `memory_disabled` with the trace that has
    none. What was traced under that assumption is forgotten, once.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and dynamo.config.skip_nnmodule_hook_guards:
        dynamo.config.skip_nnmodule_hook_guards = False
        dynamo.reset()
