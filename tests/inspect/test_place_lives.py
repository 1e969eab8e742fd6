"""Every write followed forward: its shares are those of `trace`, and its life is what u does."""

from dataclasses import replace

import pytest
import torch

from tensor_memory import PlaceConfig, PlaceMemory, PlaceState, record
from tensor_memory.inspect import place_lives
from tensor_memory.inspect.place_lives import follow_writes
from tensor_memory.ops.places.addresses import factors
from tensor_memory.ops.products import outer

SMALL = PlaceConfig(grid=(4, 3), channels=3, heads=2, keep_bias=2.0)


def recorded(config, *, given=False, resets=False, max_tokens=1000):
    """Three calls of one row: the state moves before the second, widths grow before the third."""
    torch.manual_seed(1)
    memory = PlaceMemory(8, config).double()
    state = None
    if given:
        values = torch.randn(1, config.heads, *config.grid, config.channels).double()
        state = PlaceState(values, torch.zeros(1, config.axes).double(), config.wrap)
    reset = torch.zeros(1, 20, dtype=torch.bool)
    reset[0, 9] = resets
    mask = torch.ones(1, 20, dtype=torch.bool)
    mask[0, 4] = False
    with record(memory, max_tokens=max_tokens) as recording:
        _, state = memory(torch.randn(1, 20, 8).double(), state, reset=reset, mask=mask)
        _, state = memory(torch.randn(1, 7, 8).double(), state.moved([0.7, 0.0]))
        memory.log_width.data += 0.4
        memory(torch.randn(1, 6, 8).double(), state)
    return recording[0]


@pytest.mark.parametrize("rule", ["linear", "delta"])
@pytest.mark.parametrize("block", [1, 5, 64])
@pytest.mark.parametrize("given", [False, True])
def test_parts_are_those_of_the_trace_and_sum_to_one(rule, block, given, monkeypatch):
    monkeypatch.setattr(place_lives, "BLOCK", block)
    config = replace(SMALL, rule=rule, share_places=False)
    layer = recorded(config, given=given, resets=not given, max_tokens=1000 if given else 25)
    first, count = int(layer.history.first[0]), int(layer.history.count[0])
    trace = layer.trace(range(first, first + count))
    lives = follow_writes(layer.history, layer.config, 0, top=5)
    size = trace.read.square().sum(-1)  # (R, H)
    for t in range(count):
        content = trace.content(t)  # (W, H, C)
        part = trace.share[t] * (content * trace.read[t]).sum(-1) / size[t]
        at = lives.position[t] - first
        for told, known in ((lives.share[t], trace.share[t]), (lives.part[t], part)):
            expected = known.gather(0, at.clamp(min=0)).masked_fill(at < 0, 0)
            torch.testing.assert_close(told, expected)
        assert int(at.max()) <= t
        largest = part.abs().sort(0, descending=True).values[: min(5, t + 1)]
        torch.testing.assert_close(lives.part[t, : t + 1].abs(), largest)
        rest = (trace.rest[t] * trace.read[t]).sum(-1) / size[t]
        torch.testing.assert_close(lives.rest[t], rest)
    total = lives.part.sum(1) + lives.others + lives.rest
    torch.testing.assert_close(total, torch.ones_like(total))


@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_the_life_of_a_write_is_what_becomes_of_it_in_the_state(rule):
    layer = recorded(replace(SMALL, rule=rule), resets=True)
    history, config = layer.history, layer.config
    lives = follow_writes(history, config, 0, top=5)
    T, w = 20, 11  # of the first call, after its reset
    head = 1
    width = history.width[0, 0].double()
    parts = factors(history.write_at[None, :T, 0], config.grid, width, config.wrap)
    address = outer(parts)[0, :, head]
    u = history.rate[w, 0, head] * address[w]
    born, taken, left = u.norm(), [], []
    for t in range(w + 1, T):
        kept = u * history.log_keep[t, 0, head].exp()
        u = kept - history.rate[t, 0, head] * address[t] * (address[t] @ kept)
        u = u if rule == "delta" else kept
        taken.append(float((kept.norm() ** 2 - u.norm() ** 2).clamp(min=0).sqrt() / born))
        left.append(float(u.norm() / born))
    half = next((w + 1 + i for i, share in enumerate(left) if share < 0.5), T)
    assert (int(lives.half[w, head]) if 0 <= lives.half[w, head] < T else T) == half
    if rule == "linear":
        assert (int(lives.taker[w, head]), float(lives.taken[w, head])) == (-1, 0)
    else:
        taker = int(lives.taker[w, head])
        assert taker >= T or taken[taker - w - 1] == max(taken)
        assert float(lives.taken[w, head]) == pytest.approx(max(taken)) or taker >= T
    assert lives.half[:9].max() <= 9  # the reset ended what had not faded before
    assert not lives.left[:9].any()
