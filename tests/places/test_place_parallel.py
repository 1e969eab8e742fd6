"""A sequence cut over processes equals the whole sequence in one."""

import multiprocessing

import place_processes
import pytest
import torch
from torch.multiprocessing.spawn import start_processes

from tensor_memory import MemoryResidual, PlaceConfig, PlaceMemory


def test_parts_in_four_and_in_two_processes_equal_the_whole_in_one(tmp_path):
    multiprocessing.set_forkserver_preload([place_processes.__name__, "torch._dynamo"])
    start_processes(
        place_processes.run, (tmp_path / "meeting",), place_processes.SIZE,
        start_method="forkserver",
    )  # fmt: skip


@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_a_group_of_one_process_changes_nothing(rule, tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1
    )
    layer = MemoryResidual(PlaceMemory(4, PlaceConfig(rule=rule)))
    x = torch.randn(2, 70, 4)
    alone, state = layer(x)
    m, after = layer(x, group=torch.distributed.group.WORLD)
    torch.distributed.destroy_process_group()
    assert torch.equal(m, alone)
    assert torch.equal(after.values, state.values)
