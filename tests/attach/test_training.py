"""Training around an attached memory: checkpointing, autocast, compilation, Trainer, PEFT."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from hosts import SMALL, WIDTH, TimmViT, bert, encoder, gpt2, ids, llama, trainer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tensor_memory import attach, detach
from tolerances import assert_same


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def assert_same_gradients(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert_same(one[name], other[name])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("build", [pytest.param(gpt2, marks=pytest.mark.exhaustive), llama, bert])
def test_gradient_checkpointing_changes_no_gradient(
    build: Callable[[], Any], reentrant: bool
) -> None:
    model = build().double().train()
    attach(model, SMALL)
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    tokens, mask = ids(2, 10), torch.ones(2, 10, dtype=torch.long)
    mask[1, :4] = 0

    def step() -> dict[str, Tensor]:
        model(tokens, attention_mask=mask)[0].square().sum().backward()
        return gradients(model)

    plain = step()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same_gradients(step(), plain)


def test_a_checkpointed_stream_advances_once_per_call() -> None:
    model: Any = llama().double().train()
    attachment = attach(model, SMALL)
    first, second = ids(2, 10), ids(2, 10)

    def step() -> tuple[list[Tensor], dict[str, Tensor]]:
        with attachment.stream() as s:
            loss = model(first, use_cache=False).logits.square().sum()
            loss = loss + model(second, use_cache=False).logits.square().sum()
            before = [state.hidden.detach().clone() for state in s.state.values()]
            fills = [state.fill.tolist() for state in s.state.values()]
            loss.backward()
            after = [state.hidden.detach() for state in s.state.values()]
        assert fills == [[2, 2], [2, 2]]  # 20 tokens in chunks of 3
        assert all(map(torch.equal, before, after))
        return before, gradients(model)

    plain_state, plain = step()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    state, checkpointed = step()
    for one, other in zip(state, plain_state, strict=True):
        assert_same(one, other)
    assert_same_gradients(checkpointed, plain)


class CheckpointedViT(TimmViT):
    """Checkpoints its blocks by hand, as timm does."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)  # type: ignore[assignment]
        return self.head(self.norm(x).mean(1))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("scope", ["layer", "depth"])
def test_blocks_checkpointed_by_hand_have_the_same_gradients(scope: Any, training: bool) -> None:
    model = CheckpointedViT().double().train(training)
    attach(model, SMALL, scope=scope, causal=False)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    model(x).square().sum().backward()
    checkpointed = gradients(model)
    model.__class__ = TimmViT
    model(x).square().sum().backward()
    assert_same_gradients(checkpointed, gradients(model))


@pytest.mark.parametrize("later", [0, 2])
def test_one_tensor_checkpointed_in_two_calls_of_a_stream_cannot_be_told_apart(later: int) -> None:
    """Nor where later calls, outside it, agree with each other."""
    model: Any = encoder()

    def run(block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False)  # type: ignore[return-value]

    attachment = attach(model, SMALL)
    x = torch.randn(1, 6, WIDTH, requires_grad=True)
    with attachment.stream():
        loss = run(model.layers[0], x).sum() + run(model.layers[0], x).sum()
    for _ in range(later):
        loss = loss + run(model.layers[0], x).sum()
    with pytest.raises(RuntimeError, match="one and the same tensor in several calls"):
        loss.backward()


def test_an_input_moved_to_where_another_call_s_lay_is_not_taken_for_that_one() -> None:
    """Hooks that save elsewhere let inputs go, and an allocator gives their place out again."""
    model: Any = encoder()
    place = np.zeros((1, 6, WIDTH), dtype=np.float32)

    def at_the_place(x: Tensor) -> Tensor:
        np.copyto(place, x.numpy())
        return torch.from_numpy(place)

    attachment = attach(model, SMALL)
    loss = torch.zeros(())
    with attachment.stream():
        for _ in range(2):
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, at_the_place):
                x = at_the_place(torch.randn(1, 6, WIDTH))
                y: Any = checkpoint(model.layers[0], x, use_reentrant=False)
            loss = loss + y.sum()
            del x
        with pytest.raises(RuntimeError, match="an input that its memory has not seen"):
            loss.backward()


def test_autocast_runs_the_memory_in_bfloat16_near_float32() -> None:
    model: Any = llama().eval()
    attachment = attach(model, SMALL)
    tokens = ids(2, 10)
    exact = model(tokens).logits
    with torch.autocast("cpu", torch.bfloat16):
        output = model(tokens)
        output.logits.float().square().sum().backward()
    assert_same(output.logits, exact, torch.bfloat16)
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in attachment.parameters())


@pytest.mark.exhaustive  # that it is one graph is also seen in test_compiled.py, on a smaller host
@pytest.mark.parametrize("build", [llama, bert])
def test_a_compiled_host_is_one_graph_and_computes_the_same(build: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    model = build(num_hidden_layers=1).double().eval()  # tracing takes seconds a layer
    model.config.use_cache = False
    attach(model, SMALL)
    tokens = ids(2, 10)
    expected = model(tokens)[0]
    compiled: Any = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    output = compiled(tokens)[0]
    assert_same(output, expected)
    output.square().sum().backward()
    expected.square().sum().backward()
    got = {name.removeprefix("_orig_mod."): g for name, g in gradients(compiled).items()}
    assert_same_gradients(got, gradients(model))
    torch._dynamo.reset()


@pytest.mark.exhaustive
@pytest.mark.parametrize("owner", [pytest.param("stream", marks=pytest.mark.exhaustive), "cache"])
def test_a_compiled_host_follows_the_mask_and_carries_its_state(owner: str) -> None:
    torch._dynamo.reset()
    model: Any = llama(num_hidden_layers=1).double().eval()
    attachment = attach(model, SMALL)
    tokens, mask = ids(2, 10), torch.ones(2, 10, dtype=torch.long)
    mask[0, :3] = 0

    def run(model: Any) -> list[Tensor]:
        if owner == "stream":
            with attachment.stream():
                return [model(tokens, attention_mask=mask, use_cache=False)[0] for _ in range(2)]
        first = model(tokens, attention_mask=mask, use_cache=True)
        longer = torch.cat([mask, torch.ones_like(mask)], dim=1)
        second = model(tokens, attention_mask=longer, past_key_values=first.past_key_values)
        return [first[0], second[0]]

    with torch.no_grad():
        expected = run(model.model)  # the host below its head: half of the tracing
        got = run(torch.compile(model.model, backend="eager"))
    for one, other in zip(got, expected, strict=True):
        assert_same(one, other)
    torch._dynamo.reset()


def test_the_trainer_trains_saves_and_resumes_an_attached_host(tmp_path: Path) -> None:
    start: Any = llama()
    attach(start, SMALL, freeze_host=True)
    host = {name: p.clone() for name, p in start.named_parameters() if not p.requires_grad}

    whole = copy.deepcopy(start)
    trainer(whole, tmp_path / "whole").train()
    assert not torch.equal(whole.tensor_memory.layers[0].gate, start.tensor_memory.layers[0].gate)
    for name, before in host.items():
        assert torch.equal(whole.get_parameter(name), before)

    resumed = copy.deepcopy(start)
    checkpoint_2 = tmp_path / "whole" / "checkpoint-2"
    trainer(resumed, tmp_path / "resumed").train(resume_from_checkpoint=str(checkpoint_2))
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, resumed.get_parameter(name)), name


def test_a_host_saved_with_its_memory_loads_without_it(tmp_path: Path) -> None:
    model: Any = llama().eval()
    tokens = ids(2, 10)
    bare = model(tokens).logits
    attach(model, SMALL)
    with_memory = model(tokens).logits
    model.save_pretrained(tmp_path)
    loaded: Any = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(tokens).logits, bare)
    attach(loaded, SMALL)
    loaded.load_state_dict(model.state_dict())
    assert torch.equal(loaded(tokens).logits, with_memory)


def test_a_memory_that_peft_replaced_by_a_copy_is_told() -> None:
    base: Any = llama().eval()
    attach(base, SMALL)
    copied = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["tensor_memory"])
    model: Any = peft.get_peft_model(base, copied)
    with pytest.raises(
        RuntimeError,
        match=r"LlamaForCausalLM.tensor_memory .* got ModulesToSaveWrapper, whose weights no call"
        r" would use or train; detach, wrap the model first",
    ):
        model(ids(1, 6))


def test_an_adapter_that_the_recurrence_would_pass_over_is_refused() -> None:
    base: Any = llama().eval()
    attach(base, SMALL)
    everything = peft.LoraConfig(r=2, target_modules="all-linear", exclude_modules=".*mix")
    model: Any = peft.get_peft_model(base, everything)
    model(ids(1, 6)).logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)

    base = llama().eval()
    attach(base, SMALL)
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules="all-linear"))
    with pytest.raises(TypeError, match=r"mix: expected an nn.Linear, .*; leave 'mix' out of"):
        model(ids(1, 6))


def test_a_host_wrapped_since_can_be_detached_through_its_wrapper() -> None:
    base: Any = llama().double().eval()
    tokens = ids(1, 6)
    bare = base(tokens).logits
    attach(base, SMALL)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    model: Any = peft.get_peft_model(base, config).eval()
    detach(model)
    assert torch.equal(model(tokens).logits, bare)
    assert not hasattr(base, "tensor_memory")


def test_hidden_states_asked_for_include_the_memory() -> None:
    model: Any = llama().double().eval()
    tokens = ids(2, 10)
    model(tokens, output_hidden_states=True)
    attach(model, SMALL)
    seen = []
    model.model.layers[1].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    hidden = model(tokens, output_hidden_states=True).hidden_states
    assert torch.equal(hidden[1], seen[0])
