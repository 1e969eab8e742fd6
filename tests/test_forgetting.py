"""A start that holds nothing over the length of the input is told once, and only in training."""

import warnings

import pytest
import torch

from tensor_memory import ForgettingWarning, MemoryConfig, MemoryResidual, TensorMemory, forgetting

SIZES = {"channels": 2, "grid": (2, 2), "chunk_size": 2}
PAPER = MemoryConfig.paper(**SIZES)
LONG = 2 * 65  # tokens, more than 64 half-lives of the published start


@pytest.fixture(autouse=True)
def _nothing_told_yet(monkeypatch):
    monkeypatch.setattr(forgetting, "_checked", set())


def tokens(length=LONG):
    return torch.randn(1, length, 4)


@pytest.mark.parametrize("layer", [TensorMemory, lambda *of: MemoryResidual(TensorMemory(*of))])
def test_the_published_start_is_told_once_that_it_holds_nothing_over_many_chunks(layer):
    with pytest.warns(ForgettingWarning, match=r"over 65 chunks: .*MemoryConfig\.long_gap\(\)"):
        layer(4, PAPER)(tokens())
    layer(4, PAPER)(tokens())
    with pytest.warns(ForgettingWarning, match=r"forget_bias=1 .* lost every 2\.2 chunks"):
        layer(4, MemoryConfig.paper(**SIZES, forget_bias=1.0))(tokens(400))


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (PAPER, LONG - 2),
        (MemoryConfig.paper(**SIZES, forget_bias=1.0), LONG),
        (MemoryConfig.paper(**SIZES, forget_bias=3.0), 20 * LONG),
        (MemoryConfig.long_gap(**SIZES), 20 * LONG),
    ],
)
def test_an_input_that_the_start_can_hold_is_not_told(config, length):
    TensorMemory(4, config)(tokens(length))


def test_what_is_not_trained_or_not_at_its_start_is_not_told():
    TensorMemory(4, PAPER).eval()(tokens())
    with torch.no_grad():
        TensorMemory(4, PAPER)(tokens())
    starts = torch.zeros(1, LONG, dtype=torch.bool)
    TensorMemory(4, PAPER)(tokens(), reset=starts)  # documents may be short
    trained = TensorMemory(4, PAPER)
    with torch.no_grad():
        trained.mix.bias += 1
    loaded = TensorMemory(4, PAPER)
    loaded.load_state_dict(trained.state_dict())
    loaded(tokens())


def test_a_compiled_memory_is_not_told():
    torch.compile(TensorMemory(4, PAPER), backend="eager")(tokens())


def test_the_warning_can_be_silenced_by_its_category():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ForgettingWarning)
        TensorMemory(4, PAPER)(tokens())
