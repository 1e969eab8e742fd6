"""Watching a whole model: it computes what it computes alone, and nothing is left behind."""

import copy
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hosts import SMALL, bert, gpt2
from torch import nn

from memories import DIM, OPTIONS, make_memory, make_tokens
from tensor_memory import (
    MemoryConfig,
    MemoryResidual,
    TensorMemory,
    attach,
    detach,
    find_leak,
    record,
)
from tensor_memory.inspect.store import LayerStore


def make_host(**options):
    host = gpt2().double().eval()
    attachment = attach(host, SMALL, **options)
    with torch.no_grad():  # weights that make the memory count
        for parameter in attachment.parameters():
            parameter.normal_(std=0.4)
    return host


def ids(*shape, seed=0):
    return torch.randint(1, 30, shape, generator=torch.Generator().manual_seed(seed))


def hooks_of(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        (path, kind): list(getattr(part, kind))
        for path, part in model.named_modules()
        for kind in kinds
    }


def assert_equal_layers(got, expected):
    for name, array in got.arrays().items():
        torch.testing.assert_close(
            array,
            expected.arrays()[name],
            rtol=0,
            atol=1e-10,
            equal_nan=True,
            msg=lambda message, name=name: f"{name}: {message}",
        )


def test_generating_records_what_one_pass_over_the_same_tokens_records():
    host = make_host()
    prompt = ids(2, 5)
    with record(host, dtype=torch.float64) as streamed:
        out = host.generate(prompt, max_new_tokens=7, do_sample=False)
    with record(host, dtype=torch.float64) as whole:
        host(out[:, :-1])  # the last token was never fed back
    assert streamed.names == ["transformer.h.0", "transformer.h.1"]
    for got, expected in zip(streamed.layers, whole.layers, strict=True):
        assert got.span[:, 0].tolist() == [[0, 3], [3, 6], [6, 9], [9, 11]]
        assert got.written[:, 0].tolist() == [True, True, True, False]
        assert_equal_layers(got, expected)


def test_generating_from_padded_prompts_counts_positions_of_the_padded_row():
    host = make_host()
    prompt, mask = ids(2, 5), torch.ones(2, 5, dtype=torch.long)
    mask[1, :2] = 0
    with record(host, dtype=torch.float64) as recording:
        out = host.generate(prompt, attention_mask=mask, max_new_tokens=4, do_sample=False)
    with record(host, dtype=torch.float64) as alone:
        host.generate(prompt[1:, 2:], max_new_tokens=4, do_sample=False)
    padded, single = recording[0], alone[0]
    assert padded.span[0].tolist() == [[0, 3], [2, 5]]
    assert out.shape == (2, 9)
    assert torch.equal(padded.span[: len(single), 1] - 2, single.span[:, 0])
    for name in ("write_at", "hidden_norm", "readout"):
        torch.testing.assert_close(
            getattr(padded, name)[: len(single), 1],
            getattr(single, name)[:, 0],
            rtol=0,
            atol=1e-10,
            equal_nan=True,
        )
    assert padded.seen.tolist() == [3, 2]


def test_beam_search_is_followed_from_place_to_place():
    host = make_host()
    with record(host, dtype=torch.float64) as recording:
        out = host.generate(ids(1, 4), max_new_tokens=6, num_beams=3, do_sample=False)
    assert recording.rows == 3
    assert out.shape == (1, 10)
    layer = recording[0]
    assert layer.seen.tolist() == [3, 3, 3]
    assert layer.span[0].tolist() == [[0, 3]] * 3
    assert layer.present.all()


def test_recording_changes_no_bit_of_a_training_step():
    host = make_host(dropout=0.3, drop_path=0.2).train()
    gradients = []
    for watched in (False, True):
        torch.manual_seed(5)
        model = copy.deepcopy(host)
        tokens = ids(2, 7)
        if watched:
            with record(model):
                model(tokens, labels=tokens).loss.backward()
        else:
            model(tokens, labels=tokens).loss.backward()
        gradients.append([p.grad for p in model.parameters()] + [torch.rand(3)])
    assert all(map(torch.equal, *gradients))


def test_random_draws_go_on_as_if_nobody_had_watched():
    memory = make_memory(OPTIONS["paper"])
    memory.content = nn.Sequential(memory.content, nn.Dropout(0.5))  # as adapters do
    x = make_tokens(2, 7, DIM)
    torch.manual_seed(1)
    alone = [memory(x)[0], torch.rand(3)]
    torch.manual_seed(1)
    with record(memory):
        watched = [memory(x)[0], torch.rand(3)]
    assert all(map(torch.equal, alone, watched))


def test_gradient_checkpointing_records_each_chunk_once():
    host = make_host().train()
    host.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = ids(2, 6)
    with record(host) as recording:
        host(tokens, labels=tokens, use_cache=False).loss.backward()
    assert recording.rows == 2
    assert recording[0].seen.tolist() == [2, 2]


def test_an_error_inside_leaves_no_hook_and_keeps_what_was_seen():
    host = make_host()
    before = hooks_of(host)
    seen = []

    def fail():
        with record(host) as recording:
            seen.append(recording)
            host(ids(1, 6))
            host(torch.tensor([[99]]))  # no such word

    with pytest.raises(IndexError):
        fail()
    (recording,) = seen
    assert hooks_of(host) == before
    assert recording[0].seen.tolist() == [2]


def test_calls_of_a_copy_are_not_taken_for_those_of_the_model():
    host, tokens = make_host(), ids(1, 6)
    with record(host) as recording:
        copied = copy.deepcopy(host)
        host(tokens)
        assert torch.equal(copied(tokens).logits, host(tokens).logits)
        find_leak(host, tokens)  # runs a copy too
    copied(tokens)
    assert recording.rows == 2
    assert recording[0].seen.tolist() == [2, 2]


def test_a_memory_that_a_layer_owns_is_recorded_through_it_alone():
    memory = make_memory(OPTIONS["paper"])
    layer = MemoryResidual(memory).double()
    with record(layer) as recording:
        with pytest.raises(TypeError, match="expected a MemoryState"):
            layer(make_tokens(1, 4, DIM), "state")
        memory(make_tokens(1, 3, DIM))
        layer(make_tokens(1, 6, DIM))
    assert recording.names == ["memory"]
    assert recording[0].gate == 0.5
    assert recording[0].seen.tolist() == [2]


class TwoLayers(nn.Module):
    def __init__(self, own):
        super().__init__()
        self.shared = TensorMemory(8, SMALL)
        self.blocks = nn.ModuleList(
            MemoryResidual(self.shared, own_memory=own, gate_init=g) for g in (-2.0, 1.0)
        )

    def forward(self, x, states=(None, None)):
        after = []
        for block, state in zip(self.blocks, states, strict=True):
            x, state = block(x, state)
            after.append(state)
        return x, after


@pytest.mark.parametrize("own", [True, False])
def test_layers_that_share_a_memory_are_recorded_apart(own):
    model = TwoLayers(own)
    with record(model) as recording:
        _, states = model(torch.randn(2, 4, 8))
        model(torch.randn(2, 5, 8), states)
    assert recording.names == ["blocks.0", "blocks.1"]
    assert [round(layer.gate, 4) for layer in recording.layers] == [0.1192, 0.7311]
    assert [layer.seen.tolist() for layer in recording.layers] == [[3, 3], [3, 3]]
    assert not torch.equal(recording[0].read_at, recording[1].read_at)


def test_batches_that_start_afresh_become_new_rows_of_every_layer():
    model = TwoLayers(True)
    with record(model) as recording:
        model(torch.randn(2, 6, 8))
        model(torch.randn(3, 9, 8))
    assert recording.rows == 5
    for layer in recording.layers:
        assert layer.seen.tolist() == [2, 2, 3, 3, 3]
        assert layer.present.sum(0).tolist() == [2, 2, 3, 3, 3]
        assert layer.use[2, :2].isnan().all()


def test_a_state_threaded_through_depth_gives_every_layer_the_same_rows():
    host = bert().double().eval()
    attach(host, SMALL, scope="depth")
    with record(host) as recording:
        for _ in range(2):
            host(ids(2, 5))
    assert recording.rows == 4
    assert [layer.seen.tolist() for layer in recording.layers] == [[2] * 4] * 2
    first, second = recording.layers  # what the first left is what the second starts from
    assert (first.readout[0] == 0).all()
    assert (second.readout[0] != 0).any()


def test_a_stream_of_the_host_goes_on_in_its_rows_after_a_detach():
    host = make_host()
    tokens = ids(2, 9)
    with record(host, dtype=torch.float64) as streamed, host.tensor_memory.stream() as stream:
        for start in range(0, 9, 2):
            host(tokens[:, start : start + 2], use_cache=False)
            stream.detach()
    assert streamed.rows == 2
    assert streamed[0].span[:, 0].tolist() == [[0, 3], [3, 6], [6, 9]]


class InTurn(nn.Module):
    """Two memories; the thread that comes first to one comes second to the other."""

    def __init__(self):
        super().__init__()
        self.near, self.far = TensorMemory(8, SMALL), TensorMemory(8, SMALL)
        self.second_is_near, self.second_is_through = threading.Event(), threading.Event()

    def forward(self, x, *, first):
        if not first:
            assert self.second_is_near.wait(60)
        x = x + self.near(x)[0]
        self.second_is_near.set()
        if first:
            assert self.second_is_through.wait(60)
        y = self.far(x)[0]
        if not first:
            self.second_is_through.set()
        return y


def test_calls_from_two_threads_keep_their_rows_apart_in_every_layer():
    model = InTurn()
    with record(model) as recording, ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(model, torch.randn(1, length, 8), first=first)
            for length, first in ((6, True), (15, False))
        ]
        for call in calls:
            call.result()
    near, far = recording.layers
    assert near.seen.tolist() == far.seen.tolist() == [2, 5]


def test_calls_from_several_threads_are_kept_one_at_a_time(monkeypatch):
    inside, overlaps, put = [], [], LayerStore.put

    def watched(self, *args):
        inside.append(None)
        time.sleep(0.01)
        overlaps.append(len(inside) > 1)
        put(self, *args)
        inside.pop()

    monkeypatch.setattr(LayerStore, "put", watched)
    memory = TensorMemory(8, SMALL)
    with record(memory) as recording, ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(memory, torch.randn(1, 6, 8)) for _ in range(4)]
        for call in calls:
            call.result()
    assert recording[0].seen.tolist() == [2] * 4
    assert overlaps == [False] * 8


def test_what_cannot_be_recorded_is_refused():
    host = make_host()
    detach(host)
    compiled, compiled_in_place = make_memory(OPTIONS["paper"]), make_memory(OPTIONS["paper"])
    compiled_in_place.compile(backend="eager")
    for model, error, complaint in (
        (host, ValueError, "got GPT2LMHeadModel without one; call attach"),
        (torch.compile(compiled, backend="eager"), ValueError, "compiled calls run past"),
        (compiled_in_place, ValueError, "compiled calls run past"),
        ("model", TypeError, r"expected a model .* got str"),
    ):
        with pytest.raises(error, match=complaint), record(model):
            pass


@pytest.mark.skipif(
    not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a CUDA device or triton's interpreter",
)
@pytest.mark.parametrize("pieces", [1, 8], ids=["whole", "token by token"])
def test_a_fused_layer_computes_the_same_bits_while_it_is_recorded(pieces):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = MemoryConfig(channels=8, grid=(3, 3, 3), chunk_size=3, backend="triton")
    layer = MemoryResidual(TensorMemory(16, config)).to(device)
    plain = MemoryResidual(TensorMemory(16, replace(config, backend="reference"))).to(device)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, 8, 16, device=device)

    def stream(layer):
        outputs, state = [], None
        with torch.no_grad():
            for part in x.chunk(pieces, dim=1):
                y, state = layer(part, state)
                outputs.append(y)
        return torch.cat(outputs, dim=1)

    with record(layer, dtype=torch.float32) as recording:
        watched = stream(layer)
    assert torch.equal(stream(layer), watched)
    with record(plain, dtype=torch.float32) as expected:
        stream(plain)
    for name, array in expected[0].arrays().items():
        torch.testing.assert_close(
            recording[0].arrays()[name], array, rtol=1e-4, atol=1e-4, equal_nan=True
        )


@pytest.mark.gpu
def test_a_memory_on_a_gpu_is_recorded_on_the_cpu():
    memory = make_memory(OPTIONS["paper"], dtype=torch.float32).cuda()
    x = make_tokens(2, 8, DIM, dtype=torch.float32)
    with record(memory, dtype=torch.float32) as recording:
        _, state = memory(x.cuda())
    with record(memory.cpu(), dtype=torch.float32) as expected:
        memory(x)
    for name, array in recording[0].arrays().items():
        assert array.device.type == "cpu"
        torch.testing.assert_close(
            array, expected[0].arrays()[name], rtol=1e-4, atol=1e-4, equal_nan=True
        )
    assert state.hidden.is_cuda
