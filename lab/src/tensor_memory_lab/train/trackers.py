"""Metrics for trackers that Accelerate knows, such as TensorBoard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensor_memory_lab.records import config_dict, run_name
from tensor_memory_lab.run_config import RunConfig
from tensor_memory_lab.train.folder import flat
from tensor_memory_lab.train.options import RunOptions

if TYPE_CHECKING:
    from accelerate import Accelerator


class Trackers:
    """Passes lines of metrics on; does nothing where no tracker was asked for."""

    def __init__(
        self, accelerator: Accelerator, config: RunConfig[Any, Any], options: RunOptions
    ) -> None:
        self._accelerator = accelerator
        if options.trackers:
            plain = flat(config_dict(config))
            known = {
                name: value if isinstance(value, bool | int | float | str) else str(value)
                for name, value in plain.items()
            }
            accelerator.init_trackers(run_name(config), config=known)

    def log(self, entry: dict[str, Any]) -> None:
        """One line of metrics: `{"step": 10, "loss": 0.5, "valid": {"accuracy": 0.9}}`."""
        if self._accelerator.trackers:
            values = {
                name.replace(".", "/"): value
                for name, value in flat(entry).items()
                if name != "step" and value is not None
            }
            self._accelerator.log(values, step=entry["step"])

    def close(self) -> None:
        """Have everything written."""
        for tracker in self._accelerator.trackers:
            tracker.finish()
        self._accelerator.trackers = []
