"""What a run is told besides its config: where it is kept, where it runs, how it is shown."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunOptions:
    """What does not decide a number."""

    output: Path
    """The run's folder: config.json, metrics.jsonl, checkpoints/, last, best, result.json."""
    resume: bool = False
    """Continue what the folder holds; on a CPU the numbers are those of a run never interrupted."""
    from_previous: bool = False
    """With `resume`: continue from the checkpoint before the last one, when that is broken."""
    trackers: tuple[str, ...] = ()
    """Also log to these: "tensorboard", or any tracker that Accelerate knows and that is there."""
    device: str = "auto"
    """auto (a GPU where there is one), cpu, cuda or cuda:N."""
    shared_device: bool = False
    """Other runs share the device: the record says so, and tables leave its timings out."""
    keep_checkpoints: bool = True
    """False drops the checkpoints of a run that has finished."""
    quiet: bool = False
    """Show no progress and say nothing."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "output", Path(self.output))
        object.__setattr__(self, "trackers", tuple(self.trackers))
        if self.from_previous and not self.resume:
            raise ValueError(
                "from_previous: expected resume=True beside it (--resume --from-previous), "
                "since only a resumed run reads a checkpoint"
            )
