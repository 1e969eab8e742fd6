"""What a run leaves behind, and what is made of many of them.

records → a run's config and outcome as JSON; intervals → means over seeds; tables, plots and
report → what a reader sees; paper → the published numbers to stand beside ours.
"""

from tensor_memory_lab.records.records import (
    config_dict,
    config_from_dict,
    config_hash,
    read_results,
    register_config,
    run_name,
    write_result,
)

__all__ = [
    "config_dict",
    "config_from_dict",
    "config_hash",
    "read_results",
    "register_config",
    "run_name",
    "write_result",
]
