"""What the paper reports, to stand beside our numbers.

An entry names the task's config class, the fields that must agree and the method. The paper has
one seed and no intervals; where its protocol is not ours, the note says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tensor_memory_lab.records.records import CLASS

FUTURE = "and its memory sees later tokens"
PROTOCOL = "without `<eos>`, 30,000 words, not annealed"
SOLVABLE = "solvable from the last frame"
LEAKED = "224 px; true mean and deviation of each hidden patch given to the prediction"
ALL: dict[str, Any] = {"task.classes": []}
SPLIT = "224 px; random split of clips, best epoch chosen on the test split"


@dataclass(frozen=True)
class Published:
    """One number of the paper, or the range it gives."""

    task: str
    """Name of the task's config class."""
    method: str
    value: float
    high: float | None = None
    """Upper end where the paper gives a range over settings."""
    split: str = "test"
    measure: str = "accuracy"
    where: Mapping[str, Any] = field(default_factory=dict)
    """Fields of task and model that must agree, as `task.writes`."""
    note: str = ""


def _toys() -> list[Published]:
    entries = []
    budget = "one seed, {} steps of {} rows at 3e-4"
    binding, map_note = budget.format("2,000", 128), budget.format("1,500", 64)
    whole = {"task.gap": 0, "model.window": None}
    bindings = whole | {"task.values": 32, "task.queries": 4} | _sized(64, 2)
    methods = ("base", "wide", "slots", "tensor")
    for method, value in zip(methods, (0.908, 0.910, 0.904, 0.948), strict=True):
        where = bindings | {"task.writes": 20, "task.noise": 0.1}
        entries.append(Published("BindingConfig", method, value, where=where, note=binding))
    for writes, attention, tensor in ((100, (0.07, 0.14), (0.75, 0.91)),
                                      (200, (0.03, 0.03), (0.55, 0.72))):  # fmt: skip
        for method in methods:
            low, high = tensor if method == "tensor" else attention
            where = bindings | {"task.writes": writes}
            top = high if high > low else None
            entries.append(Published("BindingConfig", method, low, top, where=where,
                                     note=f"{binding}; range over σ and methods"))  # fmt: skip
    for method, value in zip(methods, (0.506, 0.510, 0.502, 0.585), strict=True):
        where = whole | _sized(96, 3) | {"task.observations": 32}
        entries.append(Published("MapConfig", method, value, where=where, note=map_note))
    where = whole | _sized(96, 3) | {"task.observations": 64}
    entries.append(Published("MapConfig", "tensor", 0.619, where=where, note=map_note))
    published = {"task.protocol": "published", "task.hidden": 4, "model.window": None}
    published |= _sized(96, 3)
    for method, value in zip(methods, (1.0, 0.995, 1.0, 1.0), strict=True):
        entries.append(Published("OcclusionConfig", method, value, where=published,
                                 note=f"{map_note}; {SOLVABLE}"))  # fmt: skip
    where = {"task.lag": 1, "task.symbols": 16, "model.window": None} | _sized(64, 2)
    entries += [
        Published("NoHarmConfig", method, 1.0, where=where, note=budget.format("1,500", 128))
        for method in methods
    ]
    return entries


def _sized(dim: int, layers: int) -> dict[str, Any]:
    """Of the models that the paper's toys were run with."""
    return {"model.dim": dim, "model.layers": layers}


def _language() -> list[Published]:
    perplexities = {
        "base": 130.30, "base-sln": 135.74, "local": 153.57, "xl": 144.05, "linear": 153.38,
        "tensor": 100.07, "tensor-depth": 100.07,
    }  # fmt: skip
    return [
        Published(
            "LanguageTaskConfig",
            method,
            value,
            measure="perplexity",
            where={"task.level": "word", "task.carried": False},
            note=f"{PROTOCOL}, {FUTURE}" if method.startswith("tensor") else PROTOCOL,
        )
        for method, value in perplexities.items()
    ]


def _vision() -> list[Published]:
    psnr = {
        "base": (24.73, 21.77, 20.07),
        "local": (24.79, 21.80, 20.03),
        "registers": (24.71, 21.75, 20.08),
        "spatial": (24.85, 21.90, 20.19),
    }
    images = [
        Published("MaskedImagesConfig", method, value, split=f"test@{percent}%",
                  measure="published_psnr", where={"task.layout": "cub"}, note=LEAKED)
        for method, values in psnr.items()
        for percent, value in zip((25, 50, 75), values, strict=True)
    ]  # fmt: skip
    top = {"joint": (0.8212, 0.9322), "registers": (0.8834, 0.9493), "spatial": (0.8921, 0.9598)}
    video = [
        Published("VideoTaskConfig", method, value, measure=measure, where=ALL, note=SPLIT)
        for method, values in top.items()
        for measure, value in zip(("accuracy", "top5"), values, strict=True)
    ]
    return images + video


PUBLISHED = (*_toys(), *_language(), *_vision())


def published(record: Mapping[str, Any], split: str, measure: str) -> Published | None:
    """The paper's number for a run's task, setting and method; None where it has none."""
    config = record["config"]
    task = str(config["task"].get(CLASS, "")).rpartition(":")[2]
    for entry in PUBLISHED:
        same = (entry.task, entry.method, entry.split, entry.measure) == (
            task, record["method"], split, measure,
        )  # fmt: skip
        if same and all(_field(config, name) == value for name, value in entry.where.items()):
            return entry
    return None


def _field(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = config.get(part) if isinstance(config, Mapping) else None
    return config
