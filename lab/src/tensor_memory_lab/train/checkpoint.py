"""A run's folder, which one process at a time trains in, and the checkpoints in it.

    config.json                            everything that decides the run's numbers
    metrics.jsonl                          a line now and then
    checkpoints/step-000100.safetensors    weights, optimiser and carry; the journal in the header
    checkpoints/best-000060.safetensors    the best weights
    result.json                            the record of a finished run

A checkpoint is written under a temporary name and renamed, so it is whole or absent. The newest two
stay, with the best weights that each knows. Nothing is a pickle.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tensor_memory_lab.files import read_json, write_text, write_whole
from tensor_memory_lab.models import Model
from tensor_memory_lab.records import config_dict, config_from_dict
from tensor_memory_lab.records.config import UnknownClassError, current, flat, without_places
from tensor_memory_lab.run_config import RunConfig
from tensor_memory_lab.tasks import Task
from tensor_memory_lab.train.record import Journal
from tensor_memory_lab.train.step import trained

FORMAT = "2"
CONFIG = "the config of a run"
NO_CONFIG = "put back the file that the run wrote, or train again into another folder"
ANEW = "start again in another --output"

Tensors = dict[str, Tensor]


class RunFolder:
    """The files of one run. Several processes share it: all read, the first one writes."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.metrics = self.path / "metrics.jsonl"
        self.result = self.path / "result.json"
        self.checkpoints = self.path / "checkpoints"
        self._lock: int | None = None

    def check(self, config: RunConfig[Any, Any], *, resume: bool) -> None:
        """Refuse a folder that holds another run, or this one where nobody said to resume it."""
        parts = (self.config, self.metrics, self.result, self.checkpoints)
        found = [part.name for part in parts if part.exists()]
        if found and not resume:
            raise ValueError(
                f"{self.path}: expected a new or empty folder, got one that holds a run "
                f"({', '.join(found)}); continue it with --resume, or choose another --output"
            )
        if not self.config.exists():
            if self.steps() or self.result.exists():
                raise ValueError(
                    f"{self.config}: no such file; expected the config of the run that "
                    f"{self.path} holds; put it back, or choose another --output"
                )
            return
        before = flat(without_places(current(read_json(self.config, CONFIG, NO_CONFIG))))
        now = flat(without_places(config_dict(config)))
        names = [name for name in before | now if before.get(name) != now.get(name)]
        if names:
            told = "; ".join(f"{n}: {before.get(n)!r} there, {now.get(n)!r} now" for n in names)
            raise ValueError(
                f"{self.config}: expected the config this run was started with, got one that "
                f"differs in {told}. Resume with the same values, or choose another --output"
            )

    def hold(self) -> None:
        """Keep other processes out of a folder that is there, until `release` or until this one
        ends, killed or not."""
        if self._lock is not None or not self.path.exists():
            return
        self._lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"{self.path}: expected a run that nobody is training, got one that another "
                "process has in hand; wait for it or stop it, or choose another --output"
            ) from error
        except OSError:  # a file system without locks
            pass

    def release(self) -> None:
        """Let others train here."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def create(self, config: RunConfig[Any, Any], assets: Mapping[str, str]) -> None:
        """Make the folder, hold it, and write down the config and the task's own files."""
        for name, text in assets.items():
            file = self.path / name
            if file.is_file() and file.read_text(encoding="utf-8", errors="replace") != text:
                raise ValueError(
                    f"{file}: expected what this run's data makes, got that of other data; resume "
                    "with the data it was started with, or choose another --output"
                )
        with writing(self.path, "the run's folder"):
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.hold()
            for left in self.path.rglob(".*.tmp"):  # a killed process was writing these
                left.unlink()
            if not self.config.exists():
                write_text(self.config, json.dumps(config_dict(config), indent=2) + "\n")
            for name, text in assets.items():
                write_text(self.path / name, text)

    def log(self, entry: Mapping[str, Any]) -> None:
        """Add a line to metrics.jsonl."""
        with writing(self.metrics, "metrics"), self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def cut(self, step: int) -> None:
        """Drop lines of metrics and checkpoints beyond `step`, which a resumed run writes again.

        With them goes what a killed process was about to drop.
        """
        with writing(self.path, "the run's folder"):
            known = [other for other in self.steps() if other <= step]
            self._drop_but(known[-2:])
            if self.metrics.exists():
                lines = self.metrics.read_text(encoding="utf-8", errors="replace")
                kept = [line for line in lines.splitlines(True) if _step_of(line) <= step]
                write_text(self.metrics, "".join(kept))

    def steps(self) -> list[int]:
        """The steps there are checkpoints of, in order."""
        found = self.checkpoints.glob("step-*.safetensors")
        return sorted(int(path.stem.removeprefix("step-")) for path in found)

    def save(
        self,
        journal: Journal,
        *,
        model: Tensors,
        optimizer: Tensors,
        carry: Tensors | None,
        best: Tensors | None,
    ) -> None:
        """Write a checkpoint; `best` is None where the best weights are in their file already."""
        path = self._file("step", journal.step)
        with writing(path, f"the checkpoint of step {journal.step}"):
            if self.metrics.exists():  # the lines must outlive what the checkpoint outlives
                with self.metrics.open("rb") as file:
                    os.fsync(file.fileno())
            if best is not None and journal.best_step is not None:
                self._write(self._file("best", journal.best_step), {"model": best}, journal)
            parts = {"model": model, "optimizer": optimizer}
            self._write(path, parts if carry is None else parts | {"carry": carry}, journal)
            self._drop_but(self.steps()[-2:])

    def resume(self, *, from_previous: bool = False) -> tuple[Journal, dict[str, Tensors]] | None:
        """Journal, and tensors as `save` got them, of the last checkpoint or the one before it.

        None where the run left none yet.
        """
        steps = self.steps()
        if from_previous and len(steps) < 2:
            raise ValueError(
                f"{self.checkpoints}: expected two checkpoints, got {len(steps)}; leave "
                f"--from-previous out, or {ANEW}"
            )
        if not steps:
            return None
        step = steps[-2] if from_previous else steps[-1]
        before = "continue from the checkpoint before it with --resume --from-previous, or "
        header, parts = self._read("step", step, ANEW if from_previous else before + ANEW)
        return Journal(**json.loads(header["journal"])), parts

    def weights(self, which: Literal["best", "last"]) -> tuple[int, Tensors]:
        """Step and weights of the best evaluation, or of the last checkpoint."""
        steps = self.steps()
        if not steps:
            raise FileNotFoundError(
                f"{self.checkpoints}: no checkpoints; expected a run that kept them: `sweep` drops "
                "them unless it is told --keep-checkpoints, `run` keeps them"
            )
        step, remedy = steps[-1], "choose the other of 'last' and 'best', or train again"
        header, parts = self._read("step", step, remedy)
        if which == "best":
            step = json.loads(header["journal"])["best_step"]
            if step is None:
                evaluated = json.loads(header["journal"])["curve"]
                why = "the metric had no value on valid" if evaluated else "nothing was evaluated"
                raise FileNotFoundError(
                    f"{self.checkpoints}: no best weights, since {why}; choose 'last'"
                )
            _, parts = self._read("best", step, remedy)
        return step, parts["model"]

    def _file(self, kind: str, step: int) -> Path:
        return self.checkpoints / f"{kind}-{step:06d}.safetensors"

    def _needed_by(self, step: int) -> set[str]:
        """Names of a step's checkpoint and of its best weights; a damaged one names none."""
        path = self._file("step", step)
        try:
            with safe_open(path, framework="pt") as file:
                best = json.loads((file.metadata() or {})["journal"])["best_step"]
        except (OSError, SafetensorError, KeyError, ValueError):
            best = None
        return {path.name} if best is None else {path.name, self._file("best", best).name}

    def _drop_but(self, steps: list[int]) -> None:
        """Keep the checkpoints of these steps and the best weights that they know."""
        needed = set[str]().union(*map(self._needed_by, steps))
        for pattern in ("step-*.safetensors", "best-*.safetensors"):
            for old in self.checkpoints.glob(pattern):
                if old.name not in needed:
                    old.unlink()

    def _fingerprint(self) -> str:
        """A hash of the config as it was written when the run started: a field that it has got
        since is in none of its checkpoints."""
        written = without_places(read_json(self.config, CONFIG, NO_CONFIG))
        return hashlib.sha256(json.dumps(written, sort_keys=True).encode()).hexdigest()

    def _write(self, path: Path, parts: Mapping[str, Tensors], journal: Journal) -> None:
        tensors = {
            f"{part}/{name}": tensor.detach().cpu().contiguous()
            for part, named in parts.items()
            for name, tensor in named.items()
        }
        header = {
            "format": FORMAT,
            "config": self._fingerprint(),
            "journal": json.dumps(asdict(journal)),
        }
        header["sha256"] = _digest(header, tensors)
        try:
            write_whole(path, lambda at: save_file(tensors, at, metadata=header))
        except SafetensorError as error:  # its own name for a disk or a folder that refuses
            raise OSError(str(error)) from error

    def _read(self, kind: str, step: int, remedy: str) -> tuple[dict[str, str], dict[str, Tensors]]:
        """Header, and tensors by part; anything but a whole checkpoint of this run is refused."""
        path = self._file(kind, step)
        try:
            with safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"{path}: expected a whole checkpoint, got a missing, truncated or foreign file "
                f"({error}); {remedy}"
            ) from error
        if header.get("format") != FORMAT:
            raise ValueError(
                f"{path}: expected a checkpoint of format {FORMAT}, got "
                f"{header.get('format')!r}; {remedy}"
            )
        if header["config"] != self._fingerprint():
            raise ValueError(
                f"{path}: expected a checkpoint of this run's config, got one of another: a "
                f"foreign checkpoint; {remedy}"
            )
        if header.pop("sha256") != _digest(header, tensors):
            raise ValueError(
                f"{path}: expected what was written, got other content: a damaged checkpoint; "
                f"{remedy}"
            )
        parts: dict[str, Tensors] = {}
        for key, tensor in tensors.items():
            part, _, name = key.partition("/")
            parts.setdefault(part, {})[name] = tensor
        return header, parts


def load_run(
    folder: str | os.PathLike[str],
    which: Literal["best", "last"] = "best",
    *,
    device: torch.device | str = "cpu",
    data_dir: str | os.PathLike[str] | None = None,
) -> tuple[RunConfig[Any, Any], Task, Model]:
    """The config, the task and the model of a run, with its best or its last weights.

    The model is on `device` and in evaluation mode. `data_dir` names the data where they have moved
    since training. A config class that is not of this package must have been registered
    (`records.register_config`).
    """
    if which not in ("best", "last"):
        raise ValueError(f"which: expected 'best' or 'last', got {which!r}")
    config = read_config(folder)
    _, weights = RunFolder(folder).weights(which)
    given = config.task
    if data_dir is not None:
        if not hasattr(given, "data_dir"):
            raise ValueError(
                f"data_dir: expected none for {type(given).__name__}, whose data are drawn, "
                f"got {os.fspath(data_dir)!r}"
            )
        given = replace(given, data_dir=os.fspath(data_dir))
    task = given.build(config.seed).to(torch.device(device))
    with torch.random.fork_rng():
        model = config.model.build(task)
    load_weights(model, weights, str(folder))
    return config, task, model.to(device).eval()


def read_config(folder: str | os.PathLike[str]) -> RunConfig[Any, Any]:
    """The config of a run, or an error that names the file."""
    path = RunFolder(folder).config
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such file; expected the folder of a run, with config.json in it"
        )
    values = read_json(path, CONFIG, NO_CONFIG)
    try:
        return config_from_dict(values)
    except UnknownClassError as error:
        raise ValueError(f"{path}: {error}") from error
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path}: expected {CONFIG}, got one that cannot be built: {error}; {NO_CONFIG}"
        ) from error


def weights_of(model: nn.Module) -> Tensors:
    """Weights and buffers by name, a tensor with several names once."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (name, tensor.detach()))
    return dict(found.values())


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Put weights into a model, in place; an error where they are another model's."""
    needed = {name: tensor.shape for name, tensor in weights_of(model).items()}
    given = {name: tensor.shape for name, tensor in tensors.items()}
    wrong = sorted(name for name in needed | given if needed.get(name) != given.get(name))
    if wrong:
        raise ValueError(
            f"{where}: expected the weights of {type(model).__name__}, got some that differ in "
            f"{', '.join(wrong[:5])}{' …' if len(wrong) > 5 else ''}: a foreign checkpoint, or "
            "one of another version of the model"
        )
    model.load_state_dict(tensors, strict=False)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
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
        kept = value.to(parameter.device)
        if value.shape == parameter.shape:  # with its strides, which the fused update asks for
            kept = torch.empty_like(parameter).copy_(kept)
        optimizer.state[parameter][what] = kept.detach()


@contextmanager
def writing(path: Path, what: str) -> Iterator[None]:
    """Say what a refusing disk or folder means for the run."""
    try:
        yield
    except OSError as error:
        told = OSError(
            f"{path}: cannot write {what} ({error.strerror or error}); expected a folder that may "
            "be written to and has room. Checkpoints written before are intact: make room or mend "
            "the folder, then continue with --resume"
        )
        told.errno = error.errno
        raise told from error


def _step_of(line: str) -> float:
    """The step of a line of metrics; a line torn by a kill lies beyond every step."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _digest(header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
