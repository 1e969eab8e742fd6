"""A recording on disk, in a notebook, and taken apart by index."""

import copy
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from memories import DIM, OPTIONS, make_memory, make_tokens
from tensor_memory import MemoryResidual, Recording, record
from tensor_memory.files import save_tensors
from tensor_memory.inspect.annotations import THUMBNAIL

KIND = "tensor-memory recording"


@pytest.fixture
def recording():
    layer = MemoryResidual(make_memory(OPTIONS["paper"])).double()
    with record(layer, every=2) as recording:
        layer(make_tokens(2, 13, DIM))
    texts = [[f"<b>{t}" for t in range(13)], ["é\u2028"] * 13]
    frames = torch.randint(0, 255, (2, 4, 5, 6, 3), dtype=torch.uint8)
    return recording.annotate(texts=texts, frames=frames, tokens_per_frame=4)


def assert_equal(got, expected):
    for name in ("every", "asked_every", "rows_left_out", "texts", "tokens_per_frame", "names"):
        assert getattr(got, name) == getattr(expected, name), name
    assert (got.frames is None) == (expected.frames is None)
    if expected.frames is not None:
        assert torch.equal(got.frames, expected.frames)
    for one, other in zip(got.layers, expected.layers, strict=True):
        assert (one.config, one.gate) == (other.config, other.gate)
        for mine, theirs in ((one, other), (one.history, other.history)):
            assert mine.arrays().keys() == theirs.arrays().keys()
            for name, array in theirs.arrays().items():
                assert mine.arrays()[name].dtype == array.dtype
                torch.testing.assert_close(
                    mine.arrays()[name], array, rtol=0, atol=0, equal_nan=True, msg=name
                )


def test_what_is_saved_comes_back_as_it_was(tmp_path, recording):
    recording.save(tmp_path / "a.safetensors")
    assert_equal(Recording.load(tmp_path / "a.safetensors"), recording)
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize("name", ["nearest", "token reads, heads", "four axes"])
def test_every_kind_of_memory_comes_back(tmp_path, name):
    memory = make_memory(OPTIONS[name])
    for tokens in (0, 7):
        with record(memory, dtype=torch.float32) as recording:
            memory(make_tokens(1, tokens, DIM))
        recording.save(tmp_path / "a")
        assert_equal(Recording.load(tmp_path / "a"), recording)
    assert (recording[0].spread is None) == (name == "nearest")


def test_a_part_of_a_recording_can_be_saved(tmp_path, recording):
    part = Recording([recording[0, 1:]], every=2, frames=recording.frames[:, ::2])
    part.save(tmp_path / "part")
    assert_equal(Recording.load(tmp_path / "part"), part)


def test_a_truncated_or_foreign_file_is_refused(tmp_path, recording):
    path = tmp_path / "a"
    recording.save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"expected a tensor-memory recording .* truncated or"):
        Recording.load(path)
    save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="a tensor-memory recording, got a safetensors file"):
        Recording.load(path)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"format": 99}, "expected format 1, got 99; it was written by another"),
        ({"layers": 3}, "'int' object is not iterable"),
        ({"layers": [{"name": "x"}]}, "missing"),
        ({"layers": [{"name": "x", "gate": 1, "config": {"grid": "x"}}]}, "grid: expected"),
        ({"layers": [{"name": [], "gate": 1, "config": {}}]}, r"layer is named \[\]"),
        ({"layers": [{"name": "x", "gate": "1", "config": {}}]}, "gate of x is '1'"),
        ({"every": None}, "int"),
        ({"texts": ["ab"]}, "token texts per row"),
        ({"texts": [["a"]]}, "2 of them, got 1"),
    ],
)
def test_a_damaged_description_is_refused(tmp_path, recording, changes, complaint):
    path = tmp_path / "a"
    recording.save(path)
    tensors = load_file(path)
    described = json.loads(bytes(tensors["description"].tolist()))
    text = bytearray(json.dumps(described | changes).encode())
    tensors["description"] = torch.frombuffer(text, dtype=torch.uint8)
    save_tensors(path, tensors, kind=KIND)
    with pytest.raises(ValueError, match=complaint):
        Recording.load(path)


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("description", lambda array: array[:9], "expected a description in JSON"),
        ("description", None, "expected a description in JSON"),
        ("description", lambda array: array.double(), "expected a description in JSON"),
        ("layers.0.gates", lambda array: array[:, :, :2], "gates of memory has shape"),
        ("layers.0.use", lambda array: array.long(), r"use of memory holds torch\.int64"),
        ("layers.0.present", lambda array: array.byte(), r"present of memory holds torch\.uint8"),
        ("layers.0.span", None, r"layers\.0\.span"),
        ("frames", lambda array: array[:1], r"frames: expected shape .* B = 2 rows"),
        ("layers.0.other", lambda _: torch.zeros(1), r"unknown tensors layers\.0\.other"),
        ("layers.0.history.content", lambda array: array[..., :1], "history: content has shape"),
        ("layers.0.history.writes", lambda array: array.byte(), "history: writes holds"),
        ("layers.0.history.count", lambda array: array + 99, "rows or chunks that it does not"),
        ("layers.0.history.taps", None, "history: it is one of another memory"),
        ("layers.0.history.mix", None, "a damaged one .*mix"),
    ],
)
def test_damaged_arrays_are_refused(tmp_path, recording, name, change, complaint):
    path = tmp_path / "a"
    recording.save(path)
    tensors = load_file(path)
    stored = tensors.pop(name, None)
    if change is not None:
        tensors[name] = change(stored)
    save_tensors(path, tensors, kind=KIND)
    with pytest.raises(ValueError, match=complaint):
        Recording.load(path)


def test_layers_of_different_rows_are_refused(tmp_path, recording):
    layer = recording.layers[0]
    Recording([layer, layer[:, :1]]).save(tmp_path / "a")
    with pytest.raises(ValueError, match="its layers differ in their rows"):
        Recording.load(tmp_path / "a")


def test_an_index_finds_a_layer_a_chunk_and_a_row(recording):
    layer = recording[0]
    assert recording["memory"] is layer
    chunk = recording["memory", 1, -1]
    assert (chunk.layer, chunk.chunk, chunk.row) == ("memory", 2, 1)
    assert (chunk.start, chunk.stop) == (6, 9)
    assert torch.equal(chunk.hidden_norm, layer.hidden_norm[1, 1])
    assert torch.equal(chunk.mask, layer.mask(1, 1))
    part = recording[0, 1:, 1:]
    assert (len(part), part.rows) == (len(layer) - 1, 1)
    assert torch.equal(part.readout, layer.readout[1:, 1:])
    assert torch.equal(part.chunk, layer.chunk[1:])
    assert layer[1].gates.shape == (1, 2, 3)


def test_an_index_that_is_not_there_is_named(recording):
    with pytest.raises(KeyError, match="no layer 'x'; there are memory"):
        recording["x"]
    with pytest.raises(IndexError, match=r"layer 1: this recording has 1 layer$"):
        recording[1]
    with pytest.raises(TypeError, match=r"chunk: expected an integer or a slice, got 1\.5"):
        recording[0][1.5, 0]
    for look in (
        lambda chunk, row: recording[0, chunk, row],
        lambda chunk, row: recording.text(0, chunk, row),
        lambda chunk, row: recording[0].mask(chunk, row),
    ):
        with pytest.raises(IndexError, match="chunk 9: this recording has 3 chunks"):
            look(9, 0)
        with pytest.raises(IndexError, match="row 2: this recording has 2 rows"):
            look(0, 2)


def test_a_recording_under_way_says_when_it_is_filled():
    memory = make_memory(OPTIONS["paper"])
    message = "has 0 layers; `record` fills it when its block is left"
    with record(memory) as recording:
        with pytest.raises(IndexError, match=message):
            recording[0]
        memory(make_tokens(1, 4, DIM))


def test_arrays_come_out_for_a_notebook(recording):
    arrays = recording.to_numpy()["memory"]
    assert arrays["hidden_norm"].shape == (3, 2, 2, 3, 2)
    assert arrays["present"].dtype == np.bool_
    assert set(arrays) == set(recording[0].arrays())


def test_texts_and_frames_are_found_by_the_span_of_a_chunk(recording):
    assert recording.text(0, 1, 0) == "<b>6<b>7<b>8"
    assert torch.equal(recording.frame(0, 1, 1), recording.frames[1, 6 // 4])
    recording.annotate(texts=[["a"], ["b"]], frames=recording.frames[:, :1])
    assert recording.text(0, 1, 0) == ""
    assert recording.frame(0, 1, 0) is None


def test_large_frames_are_kept_as_thumbnails(recording):
    frames = torch.zeros(2, 1, 400, 200, 3, dtype=torch.uint8)
    frames[:, :, :, 100:] = 200
    recording.annotate(frames=frames)
    assert recording.frames.shape == (2, 1, THUMBNAIL, THUMBNAIL // 2, 3)
    assert recording.frames[0, 0, 0, 0].tolist() == [0, 0, 0]
    assert recording.frames[0, 0, -1, -1].tolist() == [200, 200, 200]


@pytest.mark.parametrize(
    ("annotation", "error", "complaint"),
    [
        ({"texts": ["ab", "cd"]}, TypeError, "token texts per row, got one string for a row"),
        ({"texts": 5}, TypeError, "token texts per row, got 5; give a list"),
        ({"texts": [["a"], 5]}, TypeError, "token texts per row, got .*5.; give a list"),
        ({"texts": [[1], [2]]}, TypeError, "every token's text as a string; decode"),
        ({"texts": [["a"]]}, ValueError, "one list per row, 2 of them, got 1"),
        ({"frames": torch.zeros(2, 1, 4, 4, 3)}, TypeError, "uint8 tensor .* got torch.float32"),
        (
            {"frames": torch.zeros(2, 1, 3, 4, 4, dtype=torch.uint8)},
            ValueError,
            r"expected shape \(B, F, h, w, 3\) with B = 2 rows, got \(2, 1, 3, 4, 4\)",
        ),
        (
            {"frames": torch.zeros(2, 1, 4, 4, 3, dtype=torch.uint8), "tokens_per_frame": 2.5},
            ValueError,
            "tokens_per_frame: expected an integer of at least 1, got 2.5",
        ),
    ],
)
def test_annotations_that_do_not_fit_are_refused(recording, annotation, error, complaint):
    before = recording.frames
    with pytest.raises(error, match=complaint):
        recording.annotate(**annotation)
    assert recording.frames is before


def test_the_table_of_a_notebook_escapes_every_name(recording):
    object.__setattr__(recording.layers[0], "name", "<script>alert(1)</script>")
    html = recording._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert "one chunk in 2 was kept" in html


def test_an_empty_recording_is_told_and_has_a_table_too():
    memory = make_memory(OPTIONS["paper"])
    copied = copy.deepcopy(memory)
    told = r"expected calls of the memories of TensorMemory inside, got none; .* or in a copy"
    with pytest.warns(UserWarning, match=told), record(memory) as recording:
        copied(make_tokens(1, 4, DIM))
    assert recording.rows == recording.dropped == 0
    assert recording[0].hidden_norm.shape == (0, 0, 2, 3, 2)
    assert recording.summary().splitlines()[1].split() == ["memory", "2x3x2", "0", "0", *"------"]
    assert repr(recording) == "Recording(1 layer, 0 rows, 0 chunks kept)"
    assert Recording().summary().splitlines()[1] == "0 rows, 0 layers, 0.0 MiB"
