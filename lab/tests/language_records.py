"""Records of language runs that were never run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tensor_memory_lab.recipes.language import language_carried
from tensor_memory_lab.records import config_dict


def record(
    method: str,
    perplexity: float,
    *,
    seed: int = 0,
    step_ms: float = 20.0,
    shared: bool = False,
    labels: dict[str, Any] | None = None,
    **model: Any,
) -> dict[str, Any]:
    """A run of language-carried that was never run."""
    config = language_carried()
    config = replace(config, seed=seed, model=replace(config.model, method=method, **model))
    return {
        "kind": "run",
        "recipe": config.recipe,
        "config": config_dict(config),
        "task": "wikitext-2/standard",
        "method": method,
        "seed": seed,
        "metric": "perplexity",
        "labels": labels or {},
        "parameters": 25_912_704,
        "state_bytes": 0,
        "steps_per_second": 50.0,
        "step_ms": step_ms,
        "shared_device": shared,
        "peak_memory_bytes": 4 * 2**30,
        "curve": [],
        "valid": {"perplexity": perplexity + 5},
        "test": {s: {"perplexity": perplexity, "loss": 4.7} for s in ("test", "test@fresh")},
        "ceiling": {"test": None, "test@fresh": None},
        "memory": None,
        "finished": True,
        "hardware": {"gpu": "H200", "cpu": "x"},
        "commit": "0123456789abcdef",
    }
