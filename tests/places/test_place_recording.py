"""What `record` keeps of a place memory: what its tokens did, and enough to compute it again."""

from dataclasses import replace

import numpy as np
import place_oracle
import pytest
import torch
from hosts import ids, llama
from hypothesis import given
from hypothesis import strategies as st
from test_place_memory import DIM, at, calls, marks

from tensor_memory import (
    MemoryConfig,
    MemoryResidual,
    PlaceConfig,
    PlaceMemory,
    PlaceState,
    Recording,
    TensorMemory,
    attach,
    record,
)
from tensor_memory.inspect.place_layer import place_shapes
from tensor_memory.ops.places import reference
from tensor_memory.ops.places.inputs import PlaceInputs

EXACT = 1e-10
SMALL = PlaceConfig(grid=(4, 3), channels=3, heads=2)


def assert_near(one, other):
    assert one.shape == other.shape
    torch.testing.assert_close(one, other, rtol=0, atol=EXACT, equal_nan=True)


@given(call=calls(), residual=st.booleans())
def test_the_recording_agrees_with_the_oracle(call, residual):
    memory, x, where, state = call
    mask, reset = marks(x.shape[:2], 0.8), marks(x.shape[:2], 0.2)
    model = MemoryResidual(memory, gate_init=1.0, norm=False).double() if residual else memory
    with record(model, dtype=torch.float64) as recording:
        model(x, state, where=where, mask=mask, reset=reset)
    layer = recording[0]
    T = len(layer)  # up to the last real token of all rows
    assert torch.equal(layer.present, mask.t()[:T])
    assert not mask[:, T:].any()
    assert layer.seen.tolist() == mask.sum(1).tolist()
    weights = {name: p.detach().numpy() for name, p in memory.state_dict().items()}
    gate = torch.tensor(1.0).sigmoid().item() if residual else 1.0
    for b, t in mask.nonzero().tolist():
        stop = t + 1
        m, values = place_oracle.run(
            weights, memory.config, x[b, :stop].numpy(),
            None if where is None else where[b, :stop].numpy(), state.values[b].numpy(),
            mask[b, :stop].numpy(), reset[b, :stop].numpy(),
        )  # fmt: skip
        token = recording[0, t, b]
        assert token.present
        assert np.abs(np.linalg.norm(values, axis=-1) - token.state_norm.numpy()).max() <= EXACT
        use = gate * np.linalg.norm(m[t]) / x[b, t].norm().item()
        assert abs(use - token.use) <= 1e-6 * (1 + use)  # σ(γ) is kept as a float of the model's
    inputs, _ = memory.steer(x, state, where, mask, reset)
    reads, _ = reference.scan(inputs)
    expected = {
        "write_at": inputs.write_at, "read_at": inputs.asked_at, "rate": inputs.rate,
        "keep": inputs.log_keep.exp(), "content_norm": inputs.content.norm(dim=-1),
        "readout": reads,
    }  # fmt: skip
    missing = ~mask.t()[:T]
    for name, value in expected.items():
        value = value.detach().transpose(0, 1)[:T]
        gone = missing.view(*missing.shape, *[1] * (value.ndim - 2))
        assert_near(getattr(layer, name), value.masked_fill(gone, torch.nan))
    assert {name: a.shape[2:] for name, a in layer.arrays().items() if a.is_floating_point()} == {
        name: torch.Size(shape) for name, shape in place_shapes(memory.config).items()
    }


def replayed(layer, rows):
    """The states of rows of one stream after all of its history, by the equations alone."""
    history, config = layer.history, layer.config
    states = {row: history.content.new_zeros(1, *history.entry_state.shape[1:]) for row in rows}
    first, count = int(history.first[rows[0]]), int(history.count[rows[0]])
    for position in range(first, first + count):
        t = position - first
        sources = {row: source for p, row, source in history.joins.tolist() if p == position}
        states = {row: states[sources.get(row, row)] for row in rows}
        for p, row, empty, *steps in history.moves.tolist():
            if p == position and row in states:
                voxel = torch.tensor([2 / (size - 1) for size in reversed(config.grid)])
                shift = torch.tensor(steps[::-1]) * voxel
                moved = PlaceState(states[row], torch.zeros(1, config.axes).double(), config.wrap)
                states[row] = moved.moved(shift.double(), empty=bool(empty)).values
        for (p, row), state in zip(history.entry_at.tolist(), history.entry_state, strict=True):
            if p == position and row in states:
                states[row] = state[None]
        for row in rows:
            one = {
                name: array[t, row][None, None]
                for name, array in history.arrays().items()
                if name in ("write_at", "read_at", "content", "rate", "log_keep", "reset")
            }
            width = None if history.width is None else history.width[t, row]
            resets = one.pop("reset")
            one.setdefault("read_at", one["write_at"])
            inputs = PlaceInputs(
                **one, width=width, state=states[row], resets=resets, rule=config.rule,
                wrap=config.wrap,
            )  # fmt: skip
            states[row] = reference.scan(inputs)[1]
    return states


def selected(state):
    return state.select(torch.arange(state.batch_size).roll(1))


def moved(state, empty=True):
    shift = torch.rand_like(state.origin) * 2 - 1
    return state.moved(shift, empty=empty).moved(shift * -2)  # in another order they empty others


GOES_ON = {
    "nothing": lambda state: state,
    "select": selected,
    "detach": PlaceState.detach,
    "move": moved,
    "move around": lambda state: moved(state, empty=False),
    "move and select": lambda state: selected(moved(state)),
    "select and move": lambda state: moved(selected(state)),
    "move, select and move": lambda state: moved(selected(moved(state))),
}
CHANGES = GOES_ON | {
    "reset": lambda state: state.reset([0]),
    "reset and select": lambda state: selected(state.reset([0])),
    "reset and move": lambda state: moved(state.reset([0])),
    "reset, select and move": lambda state: moved(selected(state.reset([0]))),
    "another state": lambda state: replace(state, values=torch.randn_like(state.values)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_history_knows_what_happened_to_the_state_between_calls(change):
    config = PlaceConfig(grid=(4, 6), channels=2, heads=2, wrap=(True, False), rule="delta")
    memory, x, state = PlaceMemory(DIM, config).double(), torch.randn(3, 9, DIM).double(), None
    with record(memory, dtype=torch.float64) as recording:
        for part in x.split(3, 1):
            _, state = memory(part, state if state is None else CHANGES[change](state))
    assert recording.rows == (9 if change == "another state" else 3)
    states = replayed(recording[0], list(range(recording.rows))[-3:])
    assert_near(torch.cat(list(states.values())), state.values.detach())


@given(call=calls(least=6, most=14), data=st.data())
def test_a_history_of_several_calls_leads_to_the_state_that_they_led_to(call, data):
    """Whatever is done to the state between them, with rows left out and beginnings forgotten."""
    memory, x, where, state = call
    B, N = x.shape[:2]
    state = data.draw(st.sampled_from([state, None]))
    max_rows = data.draw(st.sampled_from([1, 100]))
    changes = GOES_ON if max_rows == 1 else CHANGES
    max_tokens = data.draw(st.sampled_from([1, 2, 5, 1000]))
    every = data.draw(st.integers(1, 3))
    with record(
        memory, dtype=torch.float64, max_rows=max_rows, max_tokens=max_tokens, every=every
    ) as recording:
        start = 0
        while start < N:
            rows = (slice(None), slice(start, start + data.draw(st.integers(1, 4))))
            mask, reset = marks(x[rows].shape[:2], 0.8), marks(x[rows].shape[:2], 0.1)
            _, state = memory(x[rows], state, where=at(where, rows), mask=mask, reset=reset)
            start = rows[1].stop
            if start < N:
                state = changes[data.draw(st.sampled_from(list(changes)))](state)
            if data.draw(st.booleans()):
                nothing = (slice(None), slice(0, 0))
                _, state = memory(x[nothing], state, where=at(where, nothing))
    layer = recording[0]
    assert layer.history.count.max() <= max_tokens
    rows = list(range(recording.rows))[-B:]  # a state of elsewhere starts new rows
    states = replayed(layer, rows)
    for b, row in enumerate(rows):
        assert_near(states[row][0], state.values[b].detach())


def test_calls_that_go_on_from_a_moved_state_stay_in_their_rows():
    """A walk: the agent's frame moves before every token."""
    memory = PlaceMemory(DIM, PlaceConfig.map(2, grid=(5, 5), channels=2, heads=1)).double()
    x, state = torch.randn(2, 12, DIM).double(), None
    here = torch.zeros(2, 1, 2).double()
    with record(memory, dtype=torch.float64) as recording:
        for t in range(12):
            _, state = memory(x[:, t : t + 1], state, where=here)
            state = state.moved(torch.tensor([0.3, -0.2]))
    layer = recording[0]
    assert (recording.rows, len(layer)) == (2, 12)
    assert layer.history.call[:, 0].tolist() == list(range(12))
    assert len(layer.history.moves) > 0
    assert len(layer.history.entry_at) == 0


def test_a_layer_whose_state_moves_takes_no_move_of_another_layer():
    """States of two layers, each selected and then moved."""
    layers = torch.nn.ModuleList(PlaceMemory(DIM, SMALL) for _ in range(2)).double()
    x, states = torch.randn(2, 9, DIM).double(), [None, None]
    with record(layers, dtype=torch.float64) as recording:
        for part in x.split(3, 1):
            for i, layer in enumerate(layers):
                _, states[i] = layer(part, states[i])
            states = [state.select([1, 0]).moved([0.9 - i, 0.4]) for i, state in enumerate(states)]
        for i, layer in enumerate(layers):
            layer(x[:, :1], states[i])
    assert recording.rows == 2
    for i, layer in enumerate(recording):
        assert len(layer.history.entry_at) == 0
        assert set(layer.history.joins[:, 0].tolist()) == {3, 6, 9}
        expected = layers[i](x[:, :1], states[i])[1].values.detach()
        assert_near(torch.cat(list(replayed(layer, [0, 1]).values())), expected)


@pytest.mark.parametrize("shift", [None, [0.9, 0.0]])
def test_an_empty_state_does_not_go_on_in_older_rows_that_ended_empty(shift):
    memory, x = PlaceMemory(DIM, SMALL).double(), torch.randn(1, 4, DIM).double()
    yes = torch.ones(1, 1, dtype=torch.bool)
    with record(memory, dtype=torch.float64) as recording:
        _, state = memory(x[:, :1], mask=~yes, reset=yes)
        _, state = memory(x[:, 1:2], replace(state, values=torch.randn_like(state.values)))
        state = state.reset([0])
        memory(x[:, 2:3], state if shift is None else state.moved(shift))
    assert recording.rows == 3


def test_a_branch_with_another_number_of_rows_starts_from_its_state():
    memory = PlaceMemory(DIM, SMALL).double()
    x = torch.randn(2, 6, DIM).double()
    with record(memory, dtype=torch.float64) as recording:
        _, state = memory(x)
        _, after = memory(x[[0, 0, 1], :3], state.select([0, 0, 1]))
    history = recording[0].history
    assert recording.rows == 5
    assert history.first.tolist() == [0, 0, 6, 6, 6]
    assert history.entry_at.tolist() == [[6, 2], [6, 3], [6, 4]]
    states = replayed(recording[0], [2, 3, 4])
    assert_near(torch.cat(list(states.values())), after.values.detach())


def test_a_long_stream_is_thinned_and_its_history_forgets_the_older_half():
    memory = PlaceMemory(DIM, SMALL).double()
    x, state = torch.randn(1, 100, DIM).double(), None
    with record(memory, max_chunks=8, max_tokens=20, dtype=torch.float64) as recording:
        for part in x.split(7, 1):
            _, state = memory(part, state)
    layer = recording[0]
    assert recording.every == 16
    assert layer.token.tolist() == list(range(0, 100, 16))
    assert layer.seen.tolist() == [100]
    assert (int(layer.history.first), int(layer.history.count)) == (80, 20)
    assert_near(replayed(layer, [0])[0], state.values.detach())
    with record(memory, dtype=torch.float64) as full:
        memory(x)
    assert_near(layer.state_norm, full[0].state_norm[::16])


def test_no_history_is_kept_where_none_is_asked_for():
    memory = PlaceMemory(DIM, SMALL)
    with record(memory, max_tokens=0) as recording:
        memory(torch.randn(1, 5, DIM))
    assert recording[0].history is None
    assert len(recording[0]) == 5


@pytest.mark.parametrize("kernel", ["gaussian", "linear"])
def test_a_recording_comes_back_from_its_file(tmp_path, kernel):
    config = PlaceConfig(grid=(4, 3), channels=3, heads=2, kernel=kernel, share_places=False)
    memory = PlaceMemory(DIM, config)
    with record(memory) as recording:
        _, state = memory(torch.randn(2, 5, DIM))
        _, state = memory(torch.randn(2, 1, DIM), state.moved([0.9, 0.0]).select([1, 0]))
        memory(torch.randn(1, 3, DIM), replace(state, values=state.values + 1).select([0]))
    recording.save(tmp_path / "run.safetensors")
    loaded = Recording.load(tmp_path / "run.safetensors")
    assert loaded[0].config == config
    assert loaded.summary() == recording.summary()
    for one, other in ((loaded[0], recording[0]), (loaded[0].history, recording[0].history)):
        assert one.arrays().keys() == other.arrays().keys()
        for name, array in one.arrays().items():
            assert torch.equal(array.nan_to_num(9), other.arrays()[name].nan_to_num(9)), name


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("joins", lambda a: a + 7, "names rows or tokens that it does not have"),
        ("entry_at", lambda a: a - 9, "names rows or tokens that it does not have"),
        ("count", lambda a: a + 99, "names rows or tokens that it does not have"),
        ("content", lambda a: a[..., :1], "content has shape"),
        ("call", lambda a: a.float(), "call holds torch.float32"),
        ("width", lambda a: None, "one of another memory"),
    ],
)
def test_a_damaged_history_is_refused(tmp_path, name, change, complaint):
    memory = PlaceMemory(DIM, SMALL)
    with record(memory) as recording:
        _, state = memory(torch.randn(2, 5, DIM))
        memory(torch.randn(2, 5, DIM), state.select([1, 0]))
        memory(torch.randn(2, 5, DIM), replace(state, values=state.values + 1))
    layer = recording[0]
    broken = replace(layer.history, **{name: change(getattr(layer.history, name))})
    recording.layers[0] = replace(layer, history=broken)
    recording.save(tmp_path / "run.safetensors")
    with pytest.raises(ValueError, match=complaint):
        Recording.load(tmp_path / "run.safetensors")


def test_both_memories_in_one_model_are_recorded_side_by_side(tmp_path):
    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.places = MemoryResidual(PlaceMemory(DIM, SMALL))
            self.chunks = MemoryResidual(TensorMemory(DIM, MemoryConfig(grid=(3, 3), channels=2)))

        def forward(self, x):
            return self.chunks(self.places(x)[0])[0]

    model, x = Both(), torch.randn(2, 20, DIM)
    alone = model(x)
    with record(model) as recording:
        assert torch.equal(model(x), alone)
    assert recording.names == ["places", "chunks"]
    assert [len(layer) for layer in recording] == [20, 2]
    head, places, chunks, _ = recording.summary().splitlines()
    assert head.split() == [
        "layer", "grid", "kept", "seen", "gate", "use", "rate", "keep", "width", "i", "f", "o",
        "sigma",
    ]  # fmt: skip
    assert places.split()[-4:] == ["-"] * 4
    assert chunks.split()[6:9] == ["-"] * 3
    recording.save(tmp_path / "run.safetensors")
    assert Recording.load(tmp_path / "run.safetensors").names == recording.names
    recording.save_page(tmp_path / "page.html")


def test_generating_records_what_one_pass_over_the_same_tokens_records():
    host = llama().double().eval()
    line = PlaceConfig.map(1, grid=(5,), channels=3, heads=2)
    attach(host, line, where=lambda position_ids: position_ids[..., None] / 16 - 1, gate_init=3.0)
    prompt = ids(2, 5)
    with record(host, dtype=torch.float64) as streamed:
        out = host.generate(prompt, max_new_tokens=7, do_sample=False, pad_token_id=0)
    with record(host, dtype=torch.float64) as whole:
        host(out[:, :-1])
    assert streamed.names == ["model.layers.0", "model.layers.1"]
    for got, expected in zip(streamed, whole, strict=True):
        for name, array in got.arrays().items():
            assert_near(array.double(), expected.arrays()[name].double())
        assert got.history.call[:, 0].tolist() == [0] * 5 + list(range(1, 7))
    with record(host, dtype=torch.float64) as beams:
        host.generate(prompt[:1], max_new_tokens=6, num_beams=3, do_sample=False, pad_token_id=0)
    assert beams.rows == 3
    assert len(beams[0].history.joins) > 0
    assert len(beams[0].history.entry_at) == 0


def test_a_state_threaded_through_depth_enters_each_layer_from_elsewhere():
    encoder = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
    )
    encoder = encoder.double().eval()
    attachment = attach(encoder, SMALL, scope="depth", causal=False)
    with record(encoder, dtype=torch.float64) as recording, attachment.stream() as stream:
        for _ in range(2):
            encoder(torch.randn(2, 4, 8).double())
    first, second = (layer.history.entry_at.tolist() for layer in recording)
    assert first == [[4, 0], [4, 1]]  # the second call goes on from the other layer's state
    assert second == [[0, 0], [0, 1], [4, 0], [4, 1]]
    states = replayed(recording[1], [0, 1])
    assert_near(torch.cat(list(states.values())), stream.state["depth"].values.detach())


def test_a_sequence_cut_over_processes_is_not_recorded():
    memory, x = PlaceMemory(DIM, SMALL), torch.randn(1, 3, DIM)
    with record(memory):
        hook = next(iter(memory._forward_hooks.values()))
        with pytest.raises(ValueError, match=r"got group=, which cuts one over processes"):
            hook(memory, (x,), {"group": object()}, memory.forward(x))
        memory(x)


def test_recording_leaves_nothing_behind():
    from tensor_memory.place_state import watching_moves

    memory = PlaceMemory(DIM, SMALL)
    with record(memory):
        assert len(watching_moves) == 1
        memory(torch.randn(1, 3, DIM))
    assert watching_moves == []
    assert not memory._forward_hooks
