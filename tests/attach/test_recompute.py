"""A block that runs again in the backward pass repeats its own first run, and nobody else's."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from hosts import SMALL, WIDTH, encoder
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tensor_memory import MemoryState, attach
from tolerances import assert_same


class Checkpointed(nn.Module):
    """One block that runs again in the backward pass, and what a caller may say of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.block = encoder().layers[0]

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)  # type: ignore[return-value]


def host() -> Any:
    model = Checkpointed().double().eval()
    attach(model, SMALL, layers="block", gate_init=3.0)
    return model


def tokens(length: int = 9) -> Tensor:
    return torch.randn(1, length, WIDTH, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    "said",
    [
        dict(attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1]])),
        dict(position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])),
    ],
    ids=["mask", "documents"],
)
def test_one_tensor_of_which_two_things_are_said_cannot_be_told_apart(said: Any) -> None:
    for other in ({}, {name: value.roll(3) for name, value in said.items()}):
        model, x = host(), tokens()
        loss = model(x, **said).sum() + model(x, **other).sum()
        with pytest.raises(RuntimeError, match="one and the same tensor in several calls"):
            loss.backward()


def test_the_same_padded_tensor_can_be_learned_from_again_and_again() -> None:
    """Its mask is another object in every call, of the same values."""
    model, x = host(), tokens()
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1]])
    (first,), (second,) = (
        torch.autograd.grad(model(x, attention_mask=mask).square().sum(), x) for _ in range(2)
    )
    assert torch.equal(first, second)
    model.forward = lambda x, attention_mask: model.block(x)
    plain = torch.autograd.grad(model(x, attention_mask=mask).square().sum(), x)[0]
    assert_same(second, plain)


def test_the_first_tokens_of_a_tensor_are_not_taken_for_all_of_it() -> None:
    """Both start at the same address."""
    model, x = host(), tokens()

    def gradient() -> Tensor:
        with model.tensor_memory.stream():
            loss = model(x[:, :5]).square().sum() + model(x).square().sum()
            return torch.autograd.grad(loss, x)[0]

    checkpointed = gradient()
    model.forward = lambda x: model.block(x)
    assert_same(checkpointed, gradient())


def test_a_copy_of_the_host_has_runs_of_its_own() -> None:
    model, x = host(), tokens()
    copied = copy.deepcopy(model)
    with model.tensor_memory.stream():
        model(tokens())
        loss = model(x).sum() + copied(x).sum()
    loss.backward()
    assert x.grad is not None


def test_a_copy_of_the_host_may_repeat_a_call_that_the_host_made_in_a_stream() -> None:
    model, x = encoder().double().eval(), tokens()
    attachment = attach(model, SMALL)
    with attachment.stream():
        model(x)
        copied = copy.deepcopy(model)
    loss: Any = checkpoint(copied, x, use_reentrant=False)
    loss.sum().backward()
    assert x.grad is not None


def test_a_host_whose_runs_are_still_alive_can_be_pickled() -> None:
    model, x = host(), tokens()
    before = pickle.dumps(model)
    with model.tensor_memory.stream():
        y = model(x)
        after = pickle.dumps(model)
    assert len(after) == len(before)  # the runs stay here: elsewhere their addresses mean nothing
    assert torch.equal(pickle.loads(after)(x), y)


def test_calls_that_are_over_leave_no_state_behind() -> None:
    model = host()

    def states() -> int:
        gc.collect()
        return sum(isinstance(found, MemoryState) for found in gc.get_objects())

    held = []
    with model.tensor_memory.stream() as s:
        for _ in range(4):
            model(tokens()).sum().backward()
            s.detach()
            held.append(states())
    assert held[1] == held[3]


def test_a_call_that_failed_does_not_stand_in_for_the_run_that_is_repeated() -> None:
    model, x = host(), tokens()

    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    def gradient(*, failing: bool) -> Tensor:
        with model.tensor_memory.stream():
            loss = model(x).square().sum()
            if failing:
                handle = model.block.register_forward_pre_hook(fail)
                with pytest.raises(RuntimeError, match="planted"):
                    model(tokens())
                handle.remove()
            return torch.autograd.grad(loss, x)[0]

    assert torch.equal(gradient(failing=True), gradient(failing=False))


def test_a_whole_call_is_not_repeated_inside_a_stream_that_it_was_not_part_of() -> None:
    model = encoder().double().eval()
    attachment = attach(model, SMALL)
    loss: Any = checkpoint(model, tokens(), use_reentrant=False)
    with attachment.stream(), pytest.raises(RuntimeError, match="runs again in the backward pass"):
        loss.sum().backward()


def test_a_reentrant_checkpoint_repeats_its_own_run_in_eval_mode_too() -> None:
    """Its first run has gradients off, so only the input tells that it will run again."""
    model, x = host(), tokens()
    memory = model.tensor_memory.memory.content.weight

    def gradient(reentrant: bool) -> Tensor:
        memory.grad = None
        loss: Any = checkpoint(model.block, x, use_reentrant=reentrant)
        loss.square().sum().backward()
        return memory.grad

    assert_same(gradient(True), gradient(False), torch.float64)


def test_torch_func_sees_through_an_attached_host() -> None:
    model = encoder().double().eval()
    x = torch.randn(3, 9, WIDTH, dtype=torch.float64)
    attach(model, SMALL, gate_init=3.0)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights: dict[str, Tensor], row: Tensor, hidden: Tensor) -> Tensor:
        said = dict(src_key_padding_mask=hidden[None])
        return functional_call(model, weights, (row[None],), said).square().sum()

    hidden = torch.zeros(3, 9, dtype=torch.bool)
    hidden[1, :2] = True
    with sdpa_kernel(SDPBackend.MATH):  # others have no rule for a batch of batches
        found = vmap(grad(loss), in_dims=(None, 0, 0))(weights, x, hidden)
    for row in range(3):
        expected = grad(loss)(weights, x[row], hidden[row])
        for name, value in expected.items():
            assert_same(found[name][row], value, torch.float64)
