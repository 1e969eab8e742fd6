"""One training loop: processes, precision, checkpoints that survive a kill, speed, the record."""

from tensor_memory_lab.train.checkpoint import load_run
from tensor_memory_lab.train.loop import RunOptions, train

__all__ = ["RunOptions", "load_run", "train"]
