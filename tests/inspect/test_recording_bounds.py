"""However long the stream, what is kept has a bound, and the recording says what is missing."""

import pytest
import torch

from memories import DIM, OPTIONS, make_memory, make_tokens
from tensor_memory import MemoryConfig, record

ONE = MemoryConfig(channels=2, grid=(3, 2), chunk_size=1)


@pytest.mark.parametrize("pieces", [1, 100], ids=["one call", "chunk by chunk"])
def test_a_stream_longer_than_the_bound_is_thinned_out(pieces):
    memory = make_memory(ONE)
    x, state = make_tokens(1, 100, DIM), None
    with record(memory, max_chunks=8, dtype=torch.float64) as recording:
        for part in x.chunk(pieces, dim=1):
            _, state = memory(part, state)
    layer = recording[0]
    assert (recording.asked_every, recording.every) == (1, 16)
    assert layer.chunk.tolist() == list(range(0, 100, 16))
    assert layer.span[:, 0, 0].tolist() == list(range(0, 100, 16))
    assert recording.dropped == 100 - 7
    with record(memory, dtype=torch.float64) as full:
        memory(x)
    torch.testing.assert_close(layer.hidden_norm, full[0].hidden_norm[::16], rtol=0, atol=1e-10)


def test_rows_beyond_the_bound_are_counted_not_kept():
    memory = make_memory(OPTIONS["paper"])
    with record(memory, max_rows=3, dtype=torch.float64) as recording:
        for seed in range(3):
            x = make_tokens(2, 8, DIM, seed=seed)
            _, state = memory(x[:, :4])
            memory(x[:, 4:], state)
    assert recording.rows == 3
    assert recording.rows_left_out == 3
    x = make_tokens(2, 8, DIM, seed=1)
    with record(memory, dtype=torch.float64) as second:
        memory(x)
    torch.testing.assert_close(
        recording[0].hidden_norm[:, 2], second[0].hidden_norm[:, 0], rtol=0, atol=1e-10
    )


def test_masks_resets_and_flushes_of_rows_beyond_the_bound_are_left_out():
    memory = make_memory(OPTIONS["paper"])
    x = make_tokens(3, 8, DIM)
    marks = [torch.zeros(3, 8, dtype=torch.bool) for _ in range(3)]
    mask, reset, flush = marks
    mask[:2, :7] = True
    reset[:, 4] = flush[:, 2] = True
    state = memory(x, flush=True)[1]
    with record(memory, max_rows=2) as recording:
        memory(x, state, mask=mask, reset=reset, flush=flush)
    assert recording.rows == 2
    assert recording[0].seen.tolist() == [3, 3]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"every": 0}, "every: expected an integer of at least 1, got 0"),
        ({"max_chunks": 0}, "max_chunks: expected an integer of at least 1"),
        ({"max_rows": True}, "max_rows: expected an integer of at least 1"),
        ({"dtype": torch.bfloat16}, "dtype: expected one of torch.float16"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(options, complaint):
    memory = make_memory(ONE)
    with pytest.raises(ValueError, match=complaint), record(memory, **options):
        pass


@pytest.mark.parametrize(
    ("options", "error", "complaint"),
    [
        ({"texts": 5}, TypeError, "texts: expected a list of token texts per row, got 5; give"),
        ({"texts": [iter(["a"])]}, TypeError, "texts: expected .* got .<list_iterator"),
        ({"frames": 5}, TypeError, "frames: expected a uint8 tensor"),
        (
            {"frames": torch.zeros(2, 3, 4, 4, dtype=torch.uint8)},
            ValueError,
            r"frames: expected shape \(B, F, h, w, 3\), got \(2, 3, 4, 4\); colours",
        ),
        ({"tokens_per_frame": 0}, ValueError, "tokens_per_frame: expected an integer of at least"),
    ],
)
def test_annotations_that_cannot_be_are_refused_before_anything_runs(options, error, complaint):
    with pytest.raises(error, match=complaint):
        record(make_memory(ONE), **options).__enter__()


def test_large_frames_and_texts_that_grow_are_taken_at_the_start():
    memory, texts = make_memory(ONE), []
    frames = torch.zeros(1, 1, 400, 200, 3, dtype=torch.uint8)
    with record(memory, texts=texts, frames=frames) as recording:
        memory(make_tokens(1, 2, DIM))
        texts.append(["a", "b"])
    assert recording.text(0, 1) == "b"
    assert recording.frame(0, 0).shape == (96, 48, 3)


def test_a_call_of_no_rows_or_no_tokens_records_nothing():
    memory = make_memory(ONE)
    with record(memory) as recording:
        memory(make_tokens(0, 4, DIM))
        memory(make_tokens(2, 0, DIM))
    assert len(recording[0]) == 0
