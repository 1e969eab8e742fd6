"""TensorMemory as a module: how it starts, what types it keeps, and what it does not do."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memories import DIM, OPTIONS, make_marks, make_memory, make_tokens
from tensor_memory import MemoryConfig, TensorMemory
from tensor_memory import tensor as module_under_test
from tensor_memory_lab.train.graph import no_waiting
from tolerances import assert_same

HALVES = [torch.float16, torch.bfloat16]


def test_the_defaults_are_the_papers():
    config = TensorMemory(DIM).config
    assert config == MemoryConfig(
        channels=32,
        grid=(8, 8, 8),
        chunk_size=16,
        reads="chunk",
        read_heads=1,
        write_heads=1,
        write="gaussian",
        share_coordinates=True,
        mixing="factorized",
        sigma_scale=1.0,
        spread_bias=1.0,
        forget_bias=0.0,
        input_bias=0.0,
        feedback=1.0,
        gain=1.0,
        backend="auto",
    )


def test_weights_start_as_the_paper_says():
    memory = TensorMemory(DIM, MemoryConfig(channels=64, grid=(2, 2), chunk_size=2))
    assert torch.equal(memory.taps, torch.tensor([0.0, 1.0, 0.0]).expand(2, 128, 3))
    assert memory.spread.bias.tolist() == [1.0]
    assert memory.mix.bias.eq(0).all()
    bound = (6 / (128 + 256)) ** 0.5  # Xavier-uniform of a (256, 128) product
    assert bound * 0.99 < memory.mix.weight.abs().max() <= bound


def test_initial_biases_follow_the_config():
    biases = {"spread_bias": -1.5, "forget_bias": 3.0, "input_bias": -2.0}
    config = MemoryConfig(channels=2, grid=(2,), **biases)
    memory = TensorMemory(DIM, config)
    assert memory.spread.bias.tolist() == [-1.5]
    assert memory.mix.bias.tolist() == [-2, -2, 3, 3, 0, 0, 0, 0]  # i, f, o, g, two channels each


def test_initial_feedback_and_gain_scale_what_the_paper_starts_with():
    usual = MemoryConfig(channels=4, grid=(3, 3), chunk_size=1)
    paper, scaled = (
        (torch.manual_seed(0), TensorMemory(DIM, config))[1]
        for config in (usual, replace(usual, feedback=0.5, gain=4.0))
    )
    expected = {name: value.clone() for name, value in paper.state_dict().items()}
    expected["mix.weight"][:, 4:] *= 0.5  # the written half comes first
    expected["content.weight"] *= 4
    expected["output.weight"] *= 4
    found = scaled.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_gates_without_feedback_start_blind_to_the_hidden_state():
    config = MemoryConfig(channels=4, grid=(3, 3), chunk_size=1, forget_bias=5.0, feedback=0.0)
    memory, x = TensorMemory(DIM, config), torch.randn(2, 3, DIM)
    empty = memory(x[:, :1])[1]
    filled = replace(empty, hidden=torch.randn_like(empty.hidden))
    assert torch.equal(memory(x[:, 1:], empty)[1].cell, memory(x[:, 1:], filled)[1].cell)


@pytest.mark.parametrize("option", OPTIONS)
def test_resetting_parameters_leaves_nothing_of_before(option):
    memory = TensorMemory(DIM, OPTIONS[option], zero_init=True)
    torch.manual_seed(1)
    memory.reset_parameters()
    first = {name: value.clone() for name, value in memory.state_dict().items()}
    for parameter in memory.parameters():
        parameter.data.fill_(torch.nan)
    torch.manual_seed(1)
    memory.reset_parameters()
    assert all(first[name].equal(value) for name, value in memory.state_dict().items())
    assert memory.output.weight.eq(0).all()


@pytest.mark.parametrize("option", OPTIONS)
def test_an_empty_memory_reads_exactly_zero(option):
    memory = make_memory(OPTIONS[option])
    first_chunk = make_tokens(2, memory.config.chunk_size, DIM)
    assert memory(first_chunk)[0].eq(0).all()


def test_zero_init_reads_zero_and_learns_from_the_first_step():
    memory = TensorMemory(DIM, OPTIONS["paper"], zero_init=True).double()
    m, _ = memory(make_tokens(2, 9, DIM))
    assert m.eq(0).all()
    m.sum().backward()
    assert memory.output.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_every_float_type_follows_float64(option, dtype):
    config = OPTIONS[option]
    memory, x = make_memory(config, dtype=dtype), make_tokens(2, 8, DIM, dtype=dtype)
    m, state = memory(x)
    exact_m, exact = make_memory(config, dtype=dtype).double()(x.double())
    assert m.dtype == x.dtype
    assert state.hidden.dtype == state.cell.dtype == torch.float32
    assert state.tokens.dtype == dtype
    if config.write == "gaussian":  # a rounded coordinate may name another nearest voxel
        assert_same(m, exact_m, dtype)
        assert_same(state.cell, exact.cell, dtype)


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_can_be_cut_and_masked(dtype):
    memory = make_memory(OPTIONS["paper"], dtype=dtype)
    x, mask = make_tokens(2, 9, DIM, dtype=dtype), make_marks(2, 9, 0.7, seed=1)
    whole, end = memory(x, mask=mask)
    first, state = memory(x[:, :4], mask=mask[:, :4])
    second, state = memory(x[:, 4:], state, mask=mask[:, 4:])
    assert_same(torch.cat([first, second], dim=1), whole)
    assert_same(state.cell, end.cell, dtype)
    whole.sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.dtype == dtype for p in memory.parameters())


@pytest.mark.parametrize("tokens", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_autocast_keeps_hidden_and_cell_in_float32(tokens, masked):
    memory = make_memory(OPTIONS["paper"], dtype=torch.float32)
    x = make_tokens(2, 8, DIM, dtype=tokens)
    mask = make_marks(2, 8, 0.7, seed=1) if masked else None
    with torch.autocast("cpu", torch.bfloat16):
        m, state = memory(x, mask=mask)
        m, state = memory(x, state, mask=mask)
    assert m.dtype == state.tokens.dtype == tokens
    assert state.hidden.dtype == state.cell.dtype == state.readout.dtype == torch.float32
    exact = make_memory(OPTIONS["paper"])
    _, half_way = exact(x.double(), mask=mask)
    exact_m, exact_state = exact(x.double(), half_way, mask=mask)
    assert_same(m, exact_m, torch.bfloat16)
    assert_same(state.cell, exact_state.cell, torch.bfloat16)
    m.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in memory.parameters())


@pytest.mark.parametrize("option", OPTIONS)
def test_the_same_call_twice_gives_the_same_bits(option):
    memory = make_memory(OPTIONS[option], dtype=torch.float32)
    x = make_tokens(2, 8, DIM, dtype=torch.float32)
    assert torch.equal(memory(x)[0], memory(x)[0])


def test_the_final_state_is_differentiable_until_detached():
    memory = make_memory(OPTIONS["paper"])
    x = make_tokens(1, 7, DIM).requires_grad_()
    _, state = memory(x[:, :4])
    memory(x[:, 4:], state)[0].sum().backward()
    assert x.grad[:, :3].abs().sum() > 0
    x.grad = None
    memory(x[:, 4:], state.detach())[0].sum().backward()
    assert x.grad[:, :4].eq(0).all()


def test_without_marks_no_tokens_are_sorted_into_rows(monkeypatch):
    def refuse(*_):
        raise AssertionError("the aligned path must not ask where tokens belong")

    monkeypatch.setattr(module_under_test, "assign", refuse)
    memory = make_memory(OPTIONS["paper"])
    x, state = make_tokens(2, 5, DIM), None
    for _ in range(3):  # in and out of chunks
        _, state = memory(x, state)
    memory(x, state, flush=True)
    memory(x[:, :0], state, flush=True)
    with pytest.raises(AssertionError, match="aligned path"):
        memory(x, state, mask=torch.ones(2, 5, dtype=torch.bool))


def test_without_marks_the_scan_takes_one_plain_step_per_completed_chunk(monkeypatch):
    steps = []
    scan = module_under_test.memory_scan

    def count(read_at, write_at, *others, writes, resets, **options):
        steps.append(write_at.shape[1])
        assert writes is None
        assert resets is None
        return scan(read_at, write_at, *others, **options)

    monkeypatch.setattr(module_under_test, "memory_scan", count)
    memory = make_memory(OPTIONS["paper"])  # chunks of 3
    _, state = memory(make_tokens(2, 8, DIM))
    assert steps == [2]
    _, state = memory(make_tokens(2, 1, DIM), state)
    assert steps == [2, 1]
    memory(make_tokens(2, 1, DIM), state)
    assert steps == [2, 1]  # a chunk that only waits is read without a scan


class NoQuestions(TorchDispatchMode):
    """Fails on every operation whose result the host must wait for."""

    ASKING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert not name.startswith(self.ASKING), f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("option", sorted(OPTIONS.keys() - {"nearest"}))  # one_hot asks, on CPUs
@pytest.mark.parametrize(("masked", "flush"), [(False, True), (True, False)])
def test_nothing_is_asked_of_the_device_without_documents(option, masked, flush, monkeypatch):
    memory = make_memory(replace(OPTIONS[option], backend="reference"))
    x = make_tokens(2, 7, DIM)
    mask = make_marks(2, 7, 0.7, seed=1) if masked else None

    def refuse(*_, **__):
        raise AssertionError("data would travel to the device")

    monkeypatch.setattr(torch, "tensor", refuse)
    monkeypatch.setattr(torch, "as_tensor", refuse)
    with NoQuestions():
        m, state = memory(x, mask=mask, flush=flush)
        m, state = memory(x, state, mask=mask, flush=flush)
    assert m.shape == x.shape


def test_the_watch_for_questions_notices_one():
    with NoQuestions(), pytest.raises(AssertionError, match="waits for the device"):
        torch.ones(1).sum().item()


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("flush", [False, True])
def test_no_call_waits_for_a_gpu_without_documents(masked, flush):
    memory = make_memory(OPTIONS["paper"], dtype=torch.float32).cuda()
    x = make_tokens(2, 7, DIM, dtype=torch.float32).cuda()
    mask = make_marks(2, 7, 0.7, seed=1).cuda() if masked else None
    memory(x, mask=mask, flush=flush)  # loads and compiles what it needs
    with no_waiting():
        m, state = memory(x, mask=mask, flush=flush)
        m, state = memory(x, state, mask=mask, flush=flush)
    assert m.isfinite().all()
