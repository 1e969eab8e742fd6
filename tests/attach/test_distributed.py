"""Hosts whose gradients are exchanged between processes: attach first, then wrap."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hosts import SMALL, WIDTH, bert, encoder
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tensor_memory import attach


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    where = f"file://{tmp_path / 'meeting'}"
    torch.distributed.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("wrap", [DistributedDataParallel, nn.DataParallel])
@pytest.mark.parametrize("deeper", [False, True])
def test_a_host_that_is_distributed_already_is_refused(wrap: Any, deeper: bool) -> None:
    wrapped = wrap(bert())
    model = nn.Sequential(wrapped) if deeper else wrapped
    match = rf"not distributed yet, got {wrap.__name__}, .*; attach first, then wrap"
    with pytest.raises(ValueError, match=match):
        attach(model, SMALL)
    assert not hasattr(model, "tensor_memory")


def test_a_sharded_host_is_refused(group: None) -> None:
    from torch.distributed.fsdp import fully_shard

    model = encoder()
    fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match=r"not distributed yet, got FSDP.*; attach first, then"):
        attach(model, SMALL)


@pytest.mark.usefixtures("group")
def test_every_gradient_of_a_memory_attached_first_is_exchanged() -> None:
    model = encoder()
    attachment = attach(model, SMALL)
    wrapped = DistributedDataParallel(model)
    exchanged: set[int] = set()

    def exchange(state, bucket):  # torch refuses annotations that are strings
        exchanged.update(map(id, bucket.parameters()))
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    wrapped.register_comm_hook(None, exchange)
    with attachment.stream() as s:
        for _ in range(2):  # the second call raises where a weight got no gradient in the first
            wrapped(torch.randn(1, 7, WIDTH)).sum().backward()
            s.detach()
    assert {id(parameter) for parameter in attachment.parameters()} <= exchanged
