"""Methods of a host that must not run as they are while it carries a memory.

Each is replaced on the instance, never on its class, and put back by `remove`.

PEFT writes its adapter alone, and gives back the bare host when it merges: the memory goes along.
Continuous batching runs in a thread that hides errors, so it is refused where it starts. Nothing
here imports peft or transformers: a host of theirs can only come from a caller who has.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

MEMORY_FILE = "memory.json"
"""What a folder with a saved memory holds."""


class MemoryFiles:
    """Writes and reads the memory of a host; `checkpoint` says how."""

    save: Callable[[nn.Module, Path], None]
    load: Callable[[nn.Module, Path], None]


FILES = MemoryFiles()


class Carried(Protocol):
    """What is needed here of an attached memory."""

    told_frozen: bool
    """Whether it has been told, or is known, that the memory is not trained."""

    def parameters(self) -> Iterable[nn.Parameter]:
        """The memory's own."""
        ...

    def move_to(self, host: nn.Module) -> None:
        """Become a part of a module inside the host."""
        ...


class Overrides:
    """Methods replaced on modules, and what they hid."""

    def __init__(self) -> None:
        self._replaced: list[tuple[nn.Module, str]] = []

    def put(self, module: nn.Module, name: str, function: Callable[..., Any], *first: Any) -> None:
        """Let `module.name(...)` call `function(module, *first, ...)`."""
        if name not in module.__dict__:  # something else replaced it already, for its own reasons
            module.__dict__[name] = functools.partial(function, module, *first)
            self._replaced.append((module, name))

    def remove(self) -> None:
        """Put every method back."""
        for module, name in self._replaced:
            module.__dict__.pop(name, None)
        self._replaced = []


def refuse_continuous_batching(host: nn.Module, overrides: Overrides) -> None:
    """Let continuous batching raise where it starts, in the caller's thread."""
    for module in host.modules():
        if hasattr(type(module), "init_continuous_batching"):
            overrides.put(module, "init_continuous_batching", _refuse_continuous_batching)


def _refuse_continuous_batching(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    raise ValueError(
        "attach: continuous batching (generate_batch) packs the requests of many users into one "
        "row and keeps no state per request, so a memory cannot be served there; use generate() "
        "with padded rows, or run it inside memory_disabled(model)"
    )


def go_with_adapters(host: nn.Module, carried: Carried, overrides: Overrides) -> None:
    """Let what PEFT saves, loads, merges and unloads take the memory along."""
    if hasattr(type(host), "save_pretrained"):
        overrides.put(host, "save_pretrained", _save_pretrained)
    peft = sys.modules.get("peft")
    if peft is None:
        return
    if isinstance(host, peft.PeftModel):
        overrides.put(host, "load_adapter", _load_adapter)
    for module in host.modules():
        if isinstance(module, peft.tuners.tuners_utils.BaseTuner):
            for name in ("merge_and_unload", "unload"):
                overrides.put(module, name, _unload, carried, name)


def _save_pretrained(
    model: Any, save_directory: Any, *args: Any, is_main_process: bool = True, **kwargs: Any
) -> Any:
    """`save_pretrained`; where it writes an adapter alone, the memory stands beside it."""
    options = dict(is_main_process=is_main_process, **kwargs)
    result = type(model).save_pretrained(model, save_directory, *args, **options)
    peft = sys.modules.get("peft")
    if not is_main_process:
        return result
    if peft is not None and isinstance(model, peft.PeftModel):
        for name in kwargs.get("selected_adapters") or model.peft_config:
            folder = Path(save_directory)
            FILES.save(model, folder if name == "default" else folder / name)
    elif getattr(model, "_hf_peft_config_loaded", False):  # adapters of transformers itself
        FILES.save(model, Path(save_directory))
    return result


def _load_adapter(model: Any, model_id: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
    """`load_adapter`; an adapter that is read again, as `Trainer` does, has its memory too."""
    known = adapter_name in model.peft_config
    result = type(model).load_adapter(model, model_id, adapter_name, *args, **kwargs)
    folder = Path(model_id)
    if (folder / MEMORY_FILE).is_file():
        if known:
            FILES.load(model, folder)
        else:
            warnings.warn(
                f"load_adapter: {folder} holds a memory beside its adapter, which is not loaded, "
                "as this model has one already; load_memory(model, folder) replaces it",
                stacklevel=2,
            )
    return result


def _unload(tuner: nn.Module, carried: Carried, name: str, *args: Any, **kwargs: Any) -> Any:
    """`merge_and_unload` and `unload`; the host they give back owns the memory."""
    host = getattr(type(tuner), name)(tuner, *args, **kwargs)
    carried.move_to(host)
    return host


def virtual_tokens(host: Any) -> int:
    """Tokens that prefix tuning puts into a cache before the first real one."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(host, peft.PeftModel):
        return 0
    config = host.active_peft_config
    kinds = [getattr(peft.PeftType, name, None) for name in ("PREFIX_TUNING", "CARTRIDGE")]
    return int(config.num_virtual_tokens) if config.peft_type in kinds else 0


def warn_if_frozen(carried: Carried) -> None:
    """Say once that PEFT, wrapped around a host that has a memory, has frozen it."""
    if carried.told_frozen or "peft" not in sys.modules:
        return
    if not any(parameter.requires_grad for parameter in carried.parameters()):
        carried.told_frozen = True
        warnings.warn(
            "attach: no parameter of the memory is trained: PEFT freezes all that a host has when "
            "it wraps it; call attachment.requires_grad_(True), or wrap the host first and attach "
            "to the PEFT model (attachment.requires_grad_(False) says that it is meant)",
            stacklevel=2,
        )


def warn_if_left_out(
    attachment: Any, state: dict[str, Tensor], prefix: str, metadata: dict[str, Any]
) -> None:
    """Say once, when PEFT reads the state of a host inside it, that it will not write the memory.

    A hook of `state_dict`, which is told the path from the outermost module.
    """
    if prefix.startswith("base_model.") and "peft" in sys.modules and not attachment.told_left_out:
        attachment.told_left_out = True
        warnings.warn(
            "attach: the memory sits inside a PEFT model, whose save_pretrained (and so Trainer's "
            "checkpoints) writes the adapter alone; save it with save_memory(model, folder), or "
            "wrap the host first and attach to the PEFT model, which then saves both",
            stacklevel=2,
        )
