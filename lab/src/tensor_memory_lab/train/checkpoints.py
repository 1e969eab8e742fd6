"""Checkpoints that are whole or absent: safetensors and JSON, never pickle.

A checkpoint is a folder `checkpoints/step-000100`: model.safetensors, optimizer.safetensors,
carry.safetensors where the task carries, and state.json with the journal and the size and hash
of the others. It is filled under a temporary name and renamed; the pointer file `last` is
replaced after that. So at any moment `last` names a whole checkpoint, and the one before it is
still there. The best weights, where they are older than the last checkpoint, lie in a step folder
of their own without optimiser.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tensor_memory_lab.files import load_tensors, read_json, save_tensors
from tensor_memory_lab.train.folder import RunFolder, write_json, writing
from tensor_memory_lab.train.journal import Journal
from tensor_memory_lab.train.schedule import trained

FORMAT = 1
"""Version of the layout."""


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds, read back and checked."""

    journal: Journal
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    carry: dict[str, Tensor] | None


class Checkpoints:
    """Writes and reads the checkpoints of one run.

    Args:
        folder: the run's folder.
        fingerprint: hash of the run's config; a checkpoint with another one is foreign.
    """

    def __init__(self, folder: RunFolder, fingerprint: str) -> None:
        self.folder, self.fingerprint = folder, fingerprint
        self._current: dict[str, Any] | None = None  # the entry of `last` that the run stands on

    def save(
        self,
        journal: Journal,
        model: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor],
        carry: Mapping[str, Tensor] | None,
        best: Mapping[str, Tensor] | None,
    ) -> None:
        """Write a checkpoint, and the best weights first where they are new and of another step.

        `best` is None where the best weights lie in a checkpoint already.
        """
        name = _name(journal.step)
        best_name = None if journal.best_step is None else _name(journal.best_step)
        with writing(self.folder.checkpoints / name, f"the checkpoint of step {journal.step}"):
            if best is not None and best_name not in (None, name):
                self._write(str(best_name), {"model": best}, journal=None)
            parts = {"model": model, "optimizer": optimizer}
            self._write(name, parts | ({} if carry is None else {"carry": carry}), journal)
            entry = {"checkpoint": name, "best": best_name}
            write_json(self.folder.last, {"format": FORMAT} | entry | {"previous": self._current})
            if best_name is not None:
                write_json(self.folder.best, {"format": FORMAT, "checkpoint": best_name})
            _sync(self.folder.path)
            self._prune(entry)
        self._current = entry

    def resume(self, *, from_previous: bool = False) -> Checkpoint | None:
        """The last checkpoint, or the one before it; None where the run left none yet."""
        if not self.folder.last.exists():
            if from_previous:
                raise ValueError(
                    f"{self.folder.last}: no such file; expected a run with two checkpoints, got "
                    "one with none; leave --from-previous out"
                )
            return None
        entry = self._pointer(self.folder.last)
        if from_previous:
            if not entry.get("previous"):
                raise ValueError(
                    f"{self.folder.last}: expected a checkpoint before {entry['checkpoint']}, got "
                    "none; start again in another --output"
                )
            entry = entry["previous"]
        hint = (
            "start again in another --output"
            if from_previous
            else "continue from the checkpoint before it with --resume --from-previous, or start "
            "again in another --output"
        )
        checkpoint = self._read(entry["checkpoint"], hint)
        self._current = {"checkpoint": entry["checkpoint"], "best": entry.get("best")}
        return checkpoint

    def point_best(self) -> None:
        """Let `best` name what the resumed checkpoint calls its best."""
        with writing(self.folder.best, "the pointer to the best checkpoint"):
            if self._current is None or self._current["best"] is None:
                self.folder.best.unlink(missing_ok=True)
            else:
                entry = {"format": FORMAT, "checkpoint": self._current["best"]}
                write_json(self.folder.best, entry)

    def weights(self, which: str) -> tuple[int, dict[str, Tensor]]:
        """Step and weights that the pointer `which` ("last" or "best") names."""
        name = self._pointer(self.folder.path / which)["checkpoint"]
        hint = "choose the other of 'last' and 'best' where that is another step, or train again"
        checkpoint = self._read(name, hint, weights_only=True)
        return _step(name), checkpoint.model

    def _pointer(self, path: Path) -> dict[str, Any]:
        if not path.exists():
            raise FileNotFoundError(
                f"{path}: no such file; expected the pointer to a checkpoint of a run that kept "
                "them: `sweep` drops them unless it is told --keep-checkpoints, `run` keeps them"
            )
        remedy = "train again into another folder"
        entry = read_json(path, "the pointer to a checkpoint", remedy)
        if not (_is_pointer(entry) and _is_pointer(entry.get("previous") or entry)):
            raise ValueError(
                f"{path}: expected the pointer to a checkpoint such as step-000100, got "
                f"{entry!r:.80}; {remedy}"
            )
        return entry

    def _write(
        self, name: str, parts: Mapping[str, Mapping[str, Tensor]], journal: Journal | None
    ) -> None:
        """Fill a step folder under a temporary name, then rename it into place."""
        there = self.folder.checkpoints / name
        temporary = there.with_name(f".{name}.{uuid.uuid4().hex}.tmp")
        try:
            temporary.mkdir(parents=True)
            for part, tensors in parts.items():
                save_tensors(temporary / f"{part}.safetensors", tensors, kind=_kind(part))
            state = {
                "format": FORMAT,
                "config": self.fingerprint,
                "step": _step(name),
                "files": {file.name: _digest(file) for file in sorted(temporary.iterdir())},
                "journal": None if journal is None else journal.to_dict(),
            }
            write_json(temporary / "state.json", state)
            _sync(temporary)
            if there.exists():  # left by a run that was killed before it pointed here
                shutil.rmtree(there)
            temporary.rename(there)
            _sync(there.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _read(self, name: str, hint: str, *, weights_only: bool = False) -> Checkpoint:
        folder = self.folder.checkpoints / name
        path = folder / "state.json"
        if not path.is_file():
            raise ValueError(f"{path}: no such file; expected a whole checkpoint; {hint}")
        state = read_json(path, "the state of a checkpoint", hint)
        if state.get("format") != FORMAT:
            raise ValueError(
                f"{path}: expected format {FORMAT}, got {state.get('format')!r}; {hint}"
            )
        missing = [name for name in ("config", "step", "files", "journal") if name not in state]
        if missing:
            raise ValueError(
                f"{path}: expected the state of a checkpoint, got one without "
                f"{', '.join(missing)}; {hint}"
            )
        if state["config"] != self.fingerprint or state["step"] != _step(name):
            raise ValueError(
                f"{path}: expected step {_step(name)} of this run's config, got step "
                f"{state['step']} of {'this' if state['config'] == self.fingerprint else 'another'}"
                f" one: a foreign checkpoint; {hint}"
            )
        tensors = {}
        for file, digest in state["files"].items():
            if not weights_only or file == "model.safetensors":
                _check_digest(folder / file, digest, hint)
                part = file.removesuffix(".safetensors")
                tensors[part] = load_tensors(folder / file, kind=_kind(part))
        return Checkpoint(
            journal=Journal.from_dict(state["journal"] or {}),
            model=tensors["model"],
            optimizer=tensors.get("optimizer", {}),
            carry=tensors.get("carry"),
        )

    def _prune(self, entry: dict[str, Any]) -> None:
        """Drop every step folder but the last, the one before it, and their best.

        Of what else lies there (a .DS_Store, a note) nothing is touched.
        """
        kept = set(entry.values()) | set((self._current or {}).values())
        for folder in self.folder.checkpoints.iterdir():
            ours = folder.is_dir() and folder.name.startswith(("step-", ".step-"))
            if ours and folder.name not in kept:
                shutil.rmtree(folder)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers by name, a tensor with several names once."""
    found, seen = {}, set()
    for name, tensor in model.state_dict().items():
        where = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else name
        if where not in seen:
            seen.add(where)
            found[name] = tensor
    return found


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Put weights into a model, in place; an error where they are another model's."""
    needed = {name: tensor.shape for name, tensor in weights_of(model).items()}
    wrong = sorted(
        name
        for name in needed.keys() | tensors.keys()
        if name not in tensors or needed.get(name) != tensors[name].shape
    )
    if wrong:
        raise ValueError(
            f"{where}: expected the weights of {type(model).__name__}, got some that differ in "
            f"{', '.join(wrong[:5])}{' …' if len(wrong) > 5 else ''}: a foreign checkpoint, or "
            "one of another version of the model"
        )
    model.load_state_dict(tensors, strict=False)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """An optimiser's state, each tensor as `<parameter>.<what>`."""
    return {
        f"{name}.{what}": value
        for name, parameter in trained(model)
        for what, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    """The inverse of `optimizer_tensors`; parameters that were never updated stay so."""
    parameters = dict(trained(model))
    for key, value in tensors.items():
        name, _, what = key.rpartition(".")
        parameter = parameters[name]
        alike = value.shape == parameter.shape and value.dtype == parameter.dtype
        there = torch.empty_like(parameter) if alike else torch.empty_like(value)
        kept = there.to(parameter.device).copy_(value)
        optimizer.state[parameter][what] = kept.detach()


def _is_pointer(entry: Any) -> bool:
    return isinstance(entry, dict) and bool(re.fullmatch(r"step-\d+", str(entry.get("checkpoint"))))


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _step(name: str) -> int:
    return int(name.removeprefix("step-"))


def _kind(part: str) -> str:
    return f"{part} tensors"


def _digest(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {
            "bytes": path.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def _check_digest(path: Path, expected: dict[str, Any], hint: str) -> None:
    if not path.is_file():
        raise ValueError(f"{path}: no such file; expected a whole checkpoint; {hint}")
    found = _digest(path)
    if found["bytes"] != expected["bytes"]:
        raise ValueError(
            f"{path}: expected {expected['bytes']:,} bytes, got {found['bytes']:,}: a truncated "
            f"or foreign checkpoint; {hint}"
        )
    if found != expected:
        raise ValueError(
            f"{path}: expected what was written at step {path.parent.name.removeprefix('step-')}, "
            f"got other content: a damaged or foreign checkpoint; {hint}"
        )


def _sync(folder: Path) -> None:
    """Have a folder's entries on the disk: a rename alone may not be."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
