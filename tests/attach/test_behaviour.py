"""What attaching and detaching must do on every host alike."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from hosts import HOSTS, SMALL, Host, for_hosts, read
from torch import Tensor, nn

from tensor_memory import (
    attach,
    detach,
    load_memory,
    memory_disabled,
    save_memory,
)

every_host = for_hosts(HOSTS)


def outputs(model: nn.Module, example: Tensor) -> Tensor:
    return read(model(example)).detach()


def traces(model: nn.Module) -> list[tuple[str, list[str], list[str], int]]:
    """All an attachment could leave behind: attributes, flags and hooks of every module."""
    return [
        (
            path,
            sorted(vars(m)),
            sorted(name for name, value in vars(m).items() if value is True),
            len(m._forward_hooks) + len(m._forward_pre_hooks),
        )
        for path, m in model.named_modules()
    ]


@for_hosts(HOSTS, sample=tuple(HOSTS))
def test_the_repeated_blocks_are_found_by_themselves(host: Host) -> None:
    model = host()
    assert tuple(attach(model, SMALL).paths) == host.blocks


@every_host
def test_zero_init_leaves_the_outputs_bit_identical(host: Host) -> None:
    model, example = host(), host.example()
    before = outputs(model, example)
    attach(model, SMALL, zero_init=True)
    assert torch.equal(outputs(model, example), before)


@pytest.mark.whole_cross
@every_host
@pytest.mark.parametrize("freeze", [False, True], ids=["trained", "frozen"])
def test_detaching_leaves_no_trace(host: Host, freeze: bool) -> None:
    model, example = host(), host.example()
    before, keys, left = outputs(model, example), list(model.state_dict()), traces(model)
    attach(model, SMALL, freeze_host=freeze)
    outputs(model, example)
    detach(model)
    assert torch.equal(outputs(model, example), before)
    assert list(model.state_dict()) == keys
    assert traces(model) == left
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_detaching_gives_back_no_more_than_attaching_froze() -> None:
    model = HOSTS["llama"]()
    name, parameter = next(iter(model.named_parameters()))
    parameter.requires_grad_(False)
    attach(model, SMALL, freeze_host=True)
    detach(model)
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == [name]


def test_a_memory_taken_off_while_it_is_disabled_stays_off() -> None:
    model, example = HOSTS["llama"](), HOSTS["llama"].example()
    before, left = outputs(model, example), traces(model)
    attach(model, SMALL)
    with memory_disabled(model):
        detach(model)
    assert torch.equal(outputs(model, example), before)
    assert traces(model) == left


def test_a_host_in_eval_mode_has_its_memory_in_eval_mode() -> None:
    model, example = HOSTS["llama"](), HOSTS["llama"].example()
    attach(model, SMALL, dropout=0.5)
    assert torch.equal(outputs(model, example), outputs(model, example))


@every_host
def test_disabled_equals_detached(host: Host) -> None:
    model, example = host(), host.example()
    before = outputs(model, example)
    attach(model, SMALL)
    attached = outputs(model, example)
    assert not torch.equal(attached, before)
    with memory_disabled(model), memory_disabled(model):
        assert torch.equal(outputs(model, example), before)
    assert torch.equal(outputs(model, example), attached)


@every_host
@pytest.mark.parametrize("share", [True, False], ids=["shared", "each"])
def test_a_saved_memory_restores_the_outputs_exactly(
    host: Host, share: bool, tmp_path: Path
) -> None:
    model, example = host(), host.example()
    attach(model, SMALL, share_weights=share, gate_init=-1.0)
    before = outputs(model, example)
    save_memory(model, tmp_path)
    detach(model)
    attach(model, SMALL, share_weights=share)
    assert not torch.equal(outputs(model, example), before)
    load_memory(model, tmp_path)
    assert torch.equal(outputs(model, example), before)


@every_host
@pytest.mark.parametrize("share", [True, False], ids=["shared", "each"])
def test_gradients_reach_every_memory_parameter(host: Host, share: bool) -> None:
    model = host()
    attachment = attach(model, SMALL, share_weights=share)
    read(model(host.example())).square().sum().backward()
    missing = [
        name
        for name, parameter in attachment.named_parameters()
        if parameter.grad is None or not parameter.grad.any()
    ]
    assert missing == []


def test_freezing_the_host_leaves_the_memory_to_train() -> None:
    model = HOSTS["llama"]()
    attachment = attach(model, SMALL, freeze_host=True)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {f"tensor_memory.{name}" for name, _ in attachment.named_parameters()}


@every_host
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.exhaustive)], ids=str
)
def test_a_host_in_half_precision_works(host: Host, dtype: torch.dtype) -> None:
    model, example = host().to(dtype), host.example()
    example = example.to(dtype) if example.is_floating_point() else example
    attachment = attach(model, SMALL)
    assert {p.dtype for p in attachment.parameters()} == {dtype}
    output = outputs(model, example)
    assert output.dtype == dtype
    assert output.isfinite().all()


@every_host
def test_a_copied_model_carries_its_own_memory(host: Host) -> None:
    model, example = host(), host.example()
    bare = outputs(model, example)
    attach(model, SMALL)
    before = outputs(model, example)
    copied = copy.deepcopy(model)
    assert torch.equal(outputs(copied, example), before)
    with torch.no_grad():
        copied.get_parameter("tensor_memory.memory.output.weight").zero_()
    assert torch.equal(outputs(copied, example), bare)
    detach(copied)
    assert torch.equal(outputs(copied, example), bare)
    assert torch.equal(outputs(model, example), before)
