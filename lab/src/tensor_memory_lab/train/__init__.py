"""One training loop: processes, precision, checkpoints that survive a kill, speed, the record."""

from tensor_memory_lab.train.loop import train
from tensor_memory_lab.train.options import RunOptions
from tensor_memory_lab.train.saved import load_run

__all__ = ["RunOptions", "load_run", "train"]
