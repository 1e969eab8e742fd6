"""PEFT around or under an attached memory: what it saves, merges and trains."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from hosts import SMALL, ids, llama, trainer
from torch import Tensor, nn

from tensor_memory import attach, detach, load_memory, memory_disabled, save_memory
from tolerances import assert_same

CAUSAL = peft.TaskType.CAUSAL_LM
ADAPTERS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(
        r=2, target_modules=["q_proj"], init_lora_weights=False, task_type=CAUSAL
    ),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type=CAUSAL
    ),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, task_type=CAUSAL),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, task_type=CAUSAL),
    "modules_to_save": lambda: peft.LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type=CAUSAL
    ),
}
every_adapter = pytest.mark.parametrize("kind", ADAPTERS)
unloadable = pytest.mark.parametrize("kind", ["lora", "ia3", "modules_to_save"])


def base(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return llama().double().eval()


def adapted(kind: str, host: nn.Module | None = None) -> Any:
    host = base() if host is None else host
    return peft.get_peft_model(host, ADAPTERS[kind](), autocast_adapter_dtype=False).eval()


def memory_tensors(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.tensor_memory.named_parameters()}


def disturb(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.tensor_memory.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


def learn(model: Any, tokens: Tensor) -> None:
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    model.eval()


@every_adapter
def test_a_memory_on_an_adapted_host_is_saved_with_the_adapter(kind: str, tmp_path: Path) -> None:
    model, tokens = adapted(kind), ids(1, 7)
    attach(model, SMALL)
    disturb(model)
    expected = model(tokens).logits
    model.save_pretrained(tmp_path)
    again: Any = peft.PeftModel.from_pretrained(
        base(), tmp_path, autocast_adapter_dtype=False
    ).eval()
    attach(again, SMALL)
    load_memory(again, tmp_path)
    assert torch.equal(again(tokens).logits, expected)
    detach(model)
    assert "save_pretrained" not in vars(model)
    model.save_pretrained(tmp_path / "bare")
    assert not list((tmp_path / "bare").glob("memory.*"))


def test_every_selected_adapter_has_the_memory_beside_it(tmp_path: Path) -> None:
    model = adapted("lora")
    model.add_adapter("other", ADAPTERS["lora"]())
    attach(model, SMALL)
    model.save_pretrained(tmp_path, selected_adapters=["other"])
    assert not (tmp_path / "memory.json").exists()
    assert (tmp_path / "other" / "memory.json").exists()
    model.save_pretrained(tmp_path, is_main_process=False)
    assert not (tmp_path / "memory.json").exists()


def test_an_adapter_that_is_read_again_has_its_memory_again(tmp_path: Path) -> None:
    model = adapted("lora")
    attach(model, SMALL)
    saved = memory_tensors(model)
    model.save_pretrained(tmp_path)
    disturb(model)
    with pytest.warns(UserWarning, match=r"holds a memory beside its adapter, which is not loaded"):
        model.load_adapter(tmp_path, "second")
    model.load_adapter(tmp_path, "default")
    for name, tensor in memory_tensors(model).items():
        assert torch.equal(tensor, saved[name])


def test_trainer_resumes_adapter_and_memory(tmp_path: Path) -> None:
    start = adapted("lora")
    attach(start, SMALL)
    whole, resumed = copy.deepcopy(start), copy.deepcopy(start)
    trainer(whole, tmp_path / "whole").train()
    gates = [model.tensor_memory.layers[0].gate for model in (start, whole)]
    assert not torch.equal(*gates)
    half_way = str(tmp_path / "whole" / "checkpoint-2")
    trainer(resumed, tmp_path / "resumed").train(resume_from_checkpoint=half_way)
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, resumed.get_parameter(name)), name


def test_adapters_of_transformers_itself_are_saved_with_the_memory(tmp_path: Path) -> None:
    model, tokens = base(), ids(1, 7)
    model.add_adapter(ADAPTERS["lora"]())
    attach(model, SMALL)
    expected = model(tokens).logits
    model.save_pretrained(tmp_path)
    again = base()
    again.load_adapter(str(tmp_path))
    attach(again.double().eval(), SMALL)
    load_memory(again, tmp_path)
    assert torch.equal(again(tokens).logits, expected)


@unloadable
@pytest.mark.parametrize("method", ["merge_and_unload", "unload"])
def test_the_host_that_comes_out_of_its_adapter_owns_the_memory(
    kind: str, method: str, tmp_path: Path
) -> None:
    model, tokens = adapted(kind), ids(1, 7)
    attachment = attach(model, SMALL)
    expected = model(tokens).logits
    host = getattr(model, method)()
    assert host.tensor_memory is attachment
    assert attachment.host is host
    assert attachment.paths == ["model.layers.0", "model.layers.1"]
    assert not hasattr(nn.Module.__getattribute__(model, "_modules"), "tensor_memory")
    owned = {name for name, _ in host.named_parameters() if name.startswith("tensor_memory.")}
    assert len(owned) == len(memory_tensors(host))
    if method == "merge_and_unload":
        assert_same(host(tokens).logits, expected)
    learn(host, tokens)
    after = host(tokens).logits
    save_memory(host, tmp_path)
    plain = base()
    attach(plain, SMALL)
    load_memory(plain, tmp_path)
    made = host.generate(tokens, max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert torch.equal(made[:, 7:], host(made).logits.argmax(-1)[:, 6:-1])
    bare = copy.deepcopy(host)
    detach(bare)
    with memory_disabled(host):
        assert torch.equal(host(tokens).logits, bare(tokens).logits)
    assert not torch.equal(after, bare(tokens).logits)


def test_a_copy_of_an_adapted_host_saves_and_merges_its_own_memory(tmp_path: Path) -> None:
    model, tokens = adapted("lora"), ids(1, 7)
    attach(model, SMALL)
    copied = copy.deepcopy(model)
    disturb(copied)
    expected = copied(tokens).logits
    merged = copied.merge_and_unload()
    assert_same(merged(tokens).logits, expected)
    assert merged.tensor_memory is not model.tensor_memory
    assert model.tensor_memory.host is model
    model(tokens)


@every_adapter
def test_an_adapted_host_trains_memory_and_adapter(kind: str) -> None:
    model, tokens = adapted(kind), ids(2, 7)
    adapter = {name for name, p in model.named_parameters() if p.requires_grad}
    attach(model, SMALL)
    memory = memory_tensors(model)
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    before = {name: model.get_parameter(name).clone() for name in adapter}
    learn(model, tokens)
    moved = memory_tensors(model)
    assert any(not torch.equal(moved[name], tensor) for name, tensor in memory.items())
    assert any(not torch.equal(model.get_parameter(n), tensor) for n, tensor in before.items())
    assert all(torch.equal(model.get_parameter(n), tensor) for n, tensor in frozen.items())


@every_adapter
def test_a_memory_that_an_adapter_froze_is_told_once(kind: str) -> None:
    host, tokens = base(), ids(2, 7)
    attachment = attach(host, SMALL)
    model = adapted(kind, host)
    before = memory_tensors(host)
    if kind == "prefix":
        with pytest.raises(ValueError, match=r"prefix tuning around the host \(attach to the PEFT"):
            model(input_ids=tokens)
        return
    model.train()
    with pytest.warns(UserWarning, match=r"no parameter of the memory is trained: PEFT freezes"):
        model(input_ids=tokens, labels=tokens)
    learn(model, tokens)  # a second warning would be an error
    attachment.requires_grad_(True)
    learn(model, tokens)
    moved = memory_tensors(host)
    assert any(not torch.equal(moved[name], tensor) for name, tensor in before.items())


def test_a_memory_frozen_on_purpose_is_not_told() -> None:
    model = adapted("lora")
    attach(model, SMALL).requires_grad_(False)
    learn(model, ids(2, 7))


def test_a_memory_that_an_adapter_around_its_host_leaves_out_is_told(tmp_path: Path) -> None:
    host = base()
    attach(host, SMALL)
    model = adapted("lora", host)
    with pytest.warns(UserWarning, match=r"writes the adapter alone; save it with save_memory"):
        model.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.save_pretrained(tmp_path)
        host.state_dict()
    merged = model.merge_and_unload()
    assert merged is host
    assert merged.tensor_memory.host is host


@every_adapter
@pytest.mark.filterwarnings("ignore:Position ids are not supported")  # PEFT's own, in generate()
def test_an_adapted_host_generates_as_by_full_recomputation_until_it_is_detached(kind: str) -> None:
    model, tokens = adapted(kind), ids(2, 6)
    bare = model(tokens).logits
    attach(model, SMALL, gate_init=3.0)
    options = dict(attention_mask=torch.ones_like(tokens), max_new_tokens=12, do_sample=False)
    made = model.generate(input_ids=tokens, pad_token_id=0, **options)
    chosen = model(made).logits.argmax(-1)[:, -made.shape[1] :]  # virtual tokens come before
    assert torch.equal(made[:, 6:], chosen[:, 5:-1])
    detach(model)
    assert torch.equal(model(tokens).logits, bare)
