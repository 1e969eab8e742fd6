"""Runs as rows of a table: what a run leaves behind, and what is made of many of them.

config → a config as JSON, a run's name; store → files and the data frame; table and figure → what
a reader sees; evidence → the tables of the documentation.

A study is a file of JSON lines under `results/`, a line per run. A record of kind "run" has

    kind, recipe, task, method   "run"; names of the recipe, the task and the method
    variant    fields of the config that depart from the recipe and make the method another one
    settings   the other fields that depart from it: what methods are compared under
    config, seed   everything that decides the numbers
    parameters, state_bytes, steps, step_ms, steps_per_second, peak_memory_bytes, wall_seconds
    metric, higher_is_better, ceiling   the task's own measure, and the best that can be scored
    valid, test   measures on "valid" and on every test split, with the best weights
    memory     gate and use of every layer, and the first test split without memory
    curve      step, training loss and measures on "valid" at every evaluation
    facts, labels   what the task and the model say about themselves
    speed, backend, shared_device, best_step, finished, stopped_early
    commit, dirty, date, versions, hardware

Kinds "benchmark" (benchmark, config, result), "positions" (loss against position) and "paper"
(published numbers) have what `store.NEEDED` says. `read` makes a data frame of them, in which
nested names are joined by dots: `task.writes` and `model.memory.grid` of the config, `test.loss`
and `valid.loss`, `off.test.loss` without memory, `ceiling.test`, `facts.chance`. Added are `study`
(the file's name), `label` (method and variant as text), `rate` (of learning) and `record` (all of
it). `step_ms` is missing where the device was shared. A measure that is None diverged; one that
is NaN had no case in its split, whose loss is a number.
"""

from tensor_memory_lab.records.config import (
    config_dict,
    config_from_dict,
    config_hash,
    declared,
    register_config,
    run_name,
)
from tensor_memory_lab.records.store import (
    append,
    read,
    read_records,
    read_result,
    write_result,
)

__all__ = [
    "append",
    "config_dict",
    "config_from_dict",
    "config_hash",
    "declared",
    "read",
    "read_records",
    "read_result",
    "register_config",
    "run_name",
    "write_result",
]
