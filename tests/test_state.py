"""MemoryState: a value of constant size that can be cut off, reordered, emptied, moved, saved."""

import errno
import os
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from memories import (
    DIM,
    OPTIONS,
    SEEDS,
    assert_identical_state,
    assert_same_state,
    calls,
    make_memory,
    make_state,
    make_tokens,
)
from tensor_memory import MemoryConfig, MemoryResidual, MemoryState, TensorMemory, files
from tolerances import assert_same

FLOATS = ("hidden", "cell", "tokens", "readout")


def test_an_empty_state_is_zero_everywhere():
    config = MemoryConfig(channels=4, grid=(3, 5), chunk_size=2, read_heads=2, write_heads=2)
    state = MemoryState.zeros(config, dim=7, batch_size=3, dtype=torch.bfloat16)
    expected = {
        "hidden": ((3, 4, 3, 5), torch.float32),
        "cell": ((3, 4, 3, 5), torch.float32),
        "tokens": ((3, 2, 7), torch.bfloat16),
        "fill": ((3,), torch.long),
        "readout": ((3, 8), torch.float32),
    }
    for name, (shape, dtype) in expected.items():
        tensor = getattr(state, name)
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
        assert tensor.eq(0).all()
    assert state.batch_size == 3


def test_hidden_and_cell_of_an_empty_state_share_nothing():
    state = MemoryState.zeros(OPTIONS["paper"], DIM, 1)
    assert state.hidden.data_ptr() != state.cell.data_ptr()


def test_a_state_counts_its_bytes():
    state = MemoryState.zeros(OPTIONS["paper"], DIM, 2, dtype=torch.float64)
    volume = 2 * 2 * 12 * 8  # rows, channels, voxels, bytes
    assert state.nbytes == 2 * volume + 2 * 3 * DIM * 8 + 2 * 8 + 2 * 2 * 8


@settings(max_examples=2 * settings.default.max_examples)
@given(data=st.data(), option=st.sampled_from(sorted(OPTIONS)), seed=SEEDS)
def test_the_size_never_depends_on_what_has_been_seen(data, option, seed):
    memory = make_memory(OPTIONS[option], seed=seed)
    state = MemoryState.zeros(OPTIONS[option], DIM, 2, dtype=torch.float64)
    nbytes = state.nbytes
    for call in data.draw(st.lists(calls(2, st.integers(0, 9)), min_size=1, max_size=4)):
        _, state = memory(call.x, state, **call.marks)
        assert state.nbytes == nbytes


@pytest.mark.parametrize("option", OPTIONS)
def test_the_size_is_the_same_wherever_a_call_without_marks_ends(option):
    memory = make_memory(OPTIONS[option])
    sizes = {memory(make_tokens(2, length, DIM))[1].nbytes for length in range(8)}
    assert sizes == {MemoryState.zeros(OPTIONS[option], DIM, 2, dtype=torch.float64).nbytes}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("masked", [False, True])
def test_a_state_holds_no_larger_buffer_through_a_view(option, masked):
    x = make_tokens(2, 8, DIM)  # ends inside a chunk of 3
    mask = torch.ones(2, 8, dtype=torch.bool) if masked else None
    with torch.no_grad():
        _, state = make_memory(OPTIONS[option])(x, mask=mask)
    for name in (*FLOATS, "fill"):
        tensor = getattr(state, name)
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name


def test_detach_cuts_the_graph_and_keeps_the_values():
    _, state = make_memory(OPTIONS["paper"])(make_tokens(2, 4, DIM).requires_grad_())
    assert state.hidden.requires_grad
    detached = state.detach()
    assert_identical_state(detached, state)
    assert not any(getattr(detached, name).requires_grad for name in FLOATS)
    assert detached.aligned == state.aligned


@pytest.mark.parametrize("rows", [[2, 0, 0, 1], torch.tensor([2, 0, 0, 1]), (2, 0, 0, 1)])
def test_select_reorders_and_repeats_rows(rows):
    state = make_state(OPTIONS["paper"], 3)
    chosen = state.select(rows)
    for name in (*FLOATS, "fill"):
        assert torch.equal(getattr(chosen, name), getattr(state, name)[[2, 0, 0, 1]])


def test_selected_rows_go_on_as_the_rows_they_came_from():
    memory = make_memory(OPTIONS["paper"])
    _, state = memory(make_tokens(3, 7, DIM))
    x = make_tokens(3, 5, DIM, seed=1)
    beams = [2, 0, 0, 1]
    m, end = memory(x, state)
    chosen_m, chosen_end = memory(x[beams], state.select(beams))
    assert_same(chosen_m, m[beams])
    assert_same_state(chosen_end, end.select(beams))


def test_select_of_no_rows_is_an_empty_batch():
    memory = make_memory(OPTIONS["paper"])
    state = make_state(OPTIONS["paper"], 3).select([])
    m, end = memory(make_tokens(0, 5, DIM), state)
    assert m.shape == (0, 5, DIM)
    assert end.batch_size == 0


def test_select_refuses_a_mask():
    with pytest.raises(TypeError, match=r"expected row indices, got a bool mask; pass mask\.nonz"):
        make_state(OPTIONS["paper"], 2).select(torch.tensor([True, False]))


@pytest.mark.parametrize(
    "rows", [[0, 2], torch.tensor([0, 2]), [True, False, True], torch.tensor([True, False, True])]
)
def test_reset_empties_the_rows_named_and_no_other(rows):
    state = make_state(OPTIONS["paper"], 3, seed=1)
    emptied = state.reset(rows)
    assert_identical_state(emptied.select([1]), state.select([1]))
    nothing = MemoryState.zeros(OPTIONS["paper"], DIM, 2, dtype=torch.float64)
    assert_identical_state(emptied.select([0, 2]), nothing)


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        (torch.tensor([0.0, 1.0, 0.0]), TypeError, r"got torch.float32; .* marks .* \.bool\("),
        (torch.tensor([0, 1, 0]), ValueError, r"got \[0, 1, 0\]; convert marks .* \.bool\(\)"),
        (torch.tensor([0], dtype=torch.uint8), TypeError, r"got torch.uint8; .* \.bool\("),
        ([2, 2], ValueError, r"got \[2, 2\]; convert marks"),
    ],
    ids=["floats", "whole numbers", "bytes", "a row twice"],
)
def test_marks_of_ended_episodes_are_not_taken_for_row_indices(rows, error, message):
    with pytest.raises(error, match=rf"^MemoryState.reset: expected .*{message}"):
        make_state(OPTIONS["paper"], 3).reset(rows)


def test_reset_of_all_rows_is_a_fresh_state():
    fresh = MemoryState.zeros(OPTIONS["paper"], DIM, 3, dtype=torch.float64)
    assert_identical_state(make_state(OPTIONS["paper"], 3).reset(), fresh)


def test_reset_removes_what_is_not_a_number():
    state = make_state(OPTIONS["paper"], 2)
    state = MemoryState(
        *(torch.full_like(getattr(state, name), torch.nan) for name in FLOATS[:3]),
        fill=state.fill,
        readout=torch.full_like(state.readout, torch.nan),
    )
    assert state.reset([0]).hidden[0].eq(0).all()
    assert state.reset().cell.eq(0).all()


def test_rows_go_on_after_a_reset_of_some():
    memory = make_memory(OPTIONS["paper"])
    _, state = memory(make_tokens(2, 7, DIM))
    x = make_tokens(2, 5, DIM, seed=1)
    m, _ = memory(x, state.reset([0]))
    assert_same(m[:1], memory(x[:1])[0])
    assert_same(m[1:], memory(x[1:], state.select([1]))[0])


@pytest.mark.parametrize("moved", ["reset", "select", "detach", "to"])
def test_methods_leave_the_state_they_are_called_on(moved):
    state, before = make_state(OPTIONS["paper"], 2), make_state(OPTIONS["paper"], 2)
    changed = {
        "reset": lambda: state.reset([0]),
        "select": lambda: state.select([1, 0]),
        "detach": state.detach,
        "to": lambda: state.to(torch.float32),
    }[moved]()
    assert changed is not state
    assert_identical_state(state, before)


def test_to_changes_the_token_type_and_keeps_float32_underneath():
    state = make_state(OPTIONS["paper"], 2)
    half = state.to(torch.bfloat16)
    assert half.tokens.dtype == torch.bfloat16
    assert half.hidden.dtype == half.cell.dtype == half.readout.dtype == torch.float32
    assert half.fill.dtype == torch.long
    assert half.to(torch.float64).hidden.dtype == torch.float64
    assert_identical_state(state.to("cpu"), state)
    assert_identical_state(state.to(device="cpu", dtype=torch.float64), state)


def test_to_follows_a_tensor_as_torch_does():
    state = make_state(OPTIONS["paper"], 2)
    for like in (torch.zeros((), dtype=torch.float16), torch.zeros((), device="meta")):
        followed = state.to(like)
        assert (followed.tokens.dtype, followed.tokens.device) == (like.dtype, like.device)
        assert (followed.fill.dtype, followed.hidden.dtype) == (torch.long, torch.float32)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.zeros(2).long(),), TypeError, "the tokens' float type, got torch.int64; pass torc"),
        ((torch.int32,), TypeError, "the tokens' float type, got torch.int32; pass torch.float16"),
        ((torch.float8_e4m3fn,), TypeError, "the tokens' float type, got torch.float8_e4m3fn"),
        (("cpu", "float32"), TypeError, "the tokens' float type, got 'float32'; pass torch.float"),
        ((torch.float32, torch.float32), TypeError, "a device before a type, got torch.float32"),
        ((2.5,), TypeError, "a device, got 2.5; write it as 'cpu' or 'cuda:0'"),
        (("nowhere",), ValueError, "a device that torch knows, got 'nowhere'; write it as 'cpu'"),
    ],
)
def test_to_refuses_the_rest_and_says_what_it_takes(arguments, error, message):
    with pytest.raises(error, match=f"^MemoryState.to: expected {message}"):
        make_state(OPTIONS["paper"], 2).to(*arguments)


def impossible(state):
    """States that no call returns: what is changed, and what is said."""
    return {
        "too full": (replace(state, fill=state.fill + 3), "state.fill: expected 0 to 2 .*, got"),
        "less than empty": (replace(state, fill=state.fill - 3), "state.fill: expected 0 to 2"),
        "not aligned": (replace(state, aligned=0), r"state.aligned: expected None, or .*, got 0"),
        "aligned beyond": (replace(state, aligned=3), r"state.aligned: expected 0 to 2 .*got 3"),
        "aligned by name": (replace(state, aligned="1"), r"state.aligned: expected None or an in"),
    }


@pytest.mark.parametrize("what", impossible(make_state(OPTIONS["paper"], 2, together=True)))
def test_an_impossible_state_is_refused_on_use(what):
    start = make_state(OPTIONS["paper"], 2, together=True)
    assert start.aligned == 2
    memory = make_memory(OPTIONS["paper"])
    changed, message = impossible(start)[what]
    for layer in (memory, MemoryResidual(memory).double()):
        with pytest.raises((TypeError, ValueError), match=message):
            layer(make_tokens(2, 1, DIM), changed)
    _, after = memory(make_tokens(2, 1, DIM), start)
    again = replace(after, fill=changed.fill, aligned=changed.aligned)
    with pytest.raises((TypeError, ValueError), match=message):  # one that came of a call, too
        memory(make_tokens(2, 1, DIM), again)


@pytest.mark.parametrize("what", ["too full", "less than empty"])
def test_an_impossible_state_is_refused_by_load(tmp_path, what):
    state, message = impossible(make_state(OPTIONS["paper"], 2, together=True))[what]
    state.save(tmp_path / "state")
    with pytest.raises(ValueError, match=f"state: {message}"):
        MemoryState.load(tmp_path / "state")


def test_a_state_that_a_call_returned_is_not_looked_at_again(monkeypatch):
    memory, x = make_memory(OPTIONS["paper"]), make_tokens(2, 4, DIM)
    mine = make_state(OPTIONS["paper"], 2)
    memory(x, mine)
    monkeypatch.setattr(MemoryState, "_require_possible", lambda self: pytest.fail("asked again"))
    memory(x, mine)
    mask = torch.tensor([[True] * 4, [True] * 3 + [False]])
    state = MemoryState.zeros(OPTIONS["paper"], DIM, 2, dtype=torch.float64)
    for change in (
        lambda state: state.select([1, 0]),
        lambda state: state.reset([0]),
        lambda state: state.to("cpu"),
        lambda state: replace(state.detach(), hidden=state.hidden * 2),
    ):
        _, state = memory(x, change(state), mask=mask)
        _, state = memory(x, state)


def test_to_moves_everything():
    moved = make_state(OPTIONS["paper"], 2).to("meta")
    assert all(getattr(moved, name).device.type == "meta" for name in (*FLOATS, "fill"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("option", ["paper", "token reads"])
def test_a_saved_state_comes_back_bit_for_bit(tmp_path, option, dtype):
    state = make_state(OPTIONS[option], 3).to(dtype)
    state.save(tmp_path / "state.safetensors")
    loaded = MemoryState.load(tmp_path / "state.safetensors")
    assert_identical_state(loaded, state)
    assert loaded.tokens.dtype == dtype


@pytest.mark.parametrize("masked", [False, True])
def test_a_loaded_state_goes_on_as_if_never_saved(tmp_path, masked):
    memory = make_memory(OPTIONS["paper"])
    mask = torch.tensor([[True] * 7, [True] * 5 + [False] * 2]) if masked else None
    _, state = memory(make_tokens(2, 7, DIM), mask=mask)
    state.save(tmp_path / "state.safetensors")
    loaded = MemoryState.load(tmp_path / "state.safetensors")
    x = make_tokens(2, 5, DIM, seed=1)
    m, end = memory(x, state)
    loaded_m, loaded_end = memory(x, loaded)
    assert torch.equal(loaded_m, m)
    assert_identical_state(loaded_end, end)


def test_a_state_is_loaded_onto_any_device_of_torch(tmp_path):
    state = make_state(OPTIONS["paper"], 2)
    state.save(tmp_path / "state")
    loaded = MemoryState.load(tmp_path / "state", device="meta")
    assert loaded.hidden.is_meta
    assert loaded.fill.is_meta
    assert loaded.tokens.shape == state.tokens.shape


def test_saving_overwrites_and_leaves_nothing_else_behind(tmp_path):
    path = tmp_path / "state.safetensors"
    for seed in range(2):
        make_state(OPTIONS["paper"], 2, seed=seed).save(path)
    assert_identical_state(MemoryState.load(path), make_state(OPTIONS["paper"], 2, seed=1))
    assert os.listdir(tmp_path) == ["state.safetensors"]


@pytest.mark.parametrize("kept", [0, 4, 40, 0.5, -1])
def test_a_truncated_file_is_refused(tmp_path, kept):
    path = tmp_path / "state.safetensors"
    make_state(OPTIONS["paper"], 2).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * kept) if isinstance(kept, float) else kept])
    with pytest.raises(ValueError, match=r"expected a tensor-memory state .* truncated or foreign"):
        MemoryState.load(path)


@pytest.mark.parametrize("where", [-1, -90, -700])
def test_a_changed_byte_is_found(tmp_path, where):
    path = tmp_path / "state.safetensors"
    make_state(OPTIONS["paper"], 2).save(path)
    content = bytearray(path.read_bytes())
    content[where] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"expected what was written, got other content: a damaged"
    ):
        MemoryState.load(path)


def test_a_file_without_a_checksum_is_read_with_a_warning(tmp_path):
    state = make_state(OPTIONS["paper"], 2)
    save_file(state._tensors(), tmp_path / "old", metadata={"kind": "tensor-memory state"})
    with pytest.warns(UserWarning, match=r"old: expected a checksum, got .*; save it again"):
        loaded = MemoryState.load(tmp_path / "old")
    assert_identical_state(loaded, state)


def test_foreign_files_are_refused(tmp_path):
    path = tmp_path / "other"
    path.write_text("a letter to a friend, long enough to hold a header")
    with pytest.raises(ValueError, match=r"got a truncated or foreign file .*; write it again"):
        MemoryState.load(path)
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="state, got a safetensors file of another program; pass"):
        MemoryState.load(path)
    files.save_tensors(path, {"weight": torch.zeros(2)}, kind="tensor-memory state")
    with pytest.raises(ValueError, match=r"expected the tensors hidden, cell, .*, got weight; sav"):
        MemoryState.load(path)
    with pytest.raises(FileNotFoundError, match=r"a tensor-memory state .*got no such file; pass"):
        MemoryState.load(tmp_path / "missing")


def test_a_folder_in_place_of_a_file_is_told(tmp_path):
    with pytest.raises(
        IsADirectoryError, match=r"expected the name of a file .*, got a folder; name"
    ):
        make_state(OPTIONS["paper"], 2).save(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"a tensor-memory state .*, got a folder; pass"):
        MemoryState.load(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_named(tmp_path):
    path = tmp_path / "missing" / "state.safetensors"
    told = f"^{re.escape(str(path))}: expected a file in a folder that is there, .*/missing first"
    with pytest.raises(FileNotFoundError, match=told):
        make_state(OPTIONS["paper"], 2).save(path)


@pytest.mark.parametrize("fails", ["writing", "renaming"])
def test_a_failed_save_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, fails):
    path = tmp_path / "state.safetensors"
    make_state(OPTIONS["paper"], 2).save(path)
    old = path.read_bytes()

    def write_half(tensors, at, metadata):
        at.write_bytes(old[: len(old) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    def refuse(self, target):
        raise PermissionError(errno.EACCES, "Permission denied")

    if fails == "writing":
        monkeypatch.setattr(files, "save_file", write_half)
    else:
        monkeypatch.setattr(files.Path, "replace", refuse)
    with pytest.raises(OSError, match=r"No space left|Permission denied"):
        make_state(OPTIONS["paper"], 2, seed=1).save(path)
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["state.safetensors"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_folder_leaves_the_old_file(tmp_path):
    path = tmp_path / "state.safetensors"
    make_state(OPTIONS["paper"], 2).save(path)
    old = path.read_bytes()
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match="cannot write the tensor-memory state"):
        make_state(OPTIONS["paper"], 2, seed=1).save(path)
    tmp_path.chmod(0o700)
    assert path.read_bytes() == old


def test_a_state_prints_in_one_line_and_shows_no_numbers_of_its_tensors():
    config = MemoryConfig(channels=16, grid=(6, 6, 6), chunk_size=8)
    memory = TensorMemory(4, config)
    _, state = memory(torch.randn(2, 3, 4))
    told = "MemoryState(rows=2, grid=6x6x6, channels=16, chunk 3/8 filled, 54.4 KiB, cpu)"
    assert str(state) == repr(state) == told
    _, state = memory(torch.randn(2, 3, 4), mask=torch.tensor([[1, 1, 1], [1, 0, 0]]).bool())
    assert "chunk 1-3/8 filled" in str(state)
    assert "chunk 0/8" in str(state.reset())
    assert "rows=0, " in str(MemoryState.zeros(config, 4, 0))
    assert "chunk 0/8 filled, 27.2 KiB, meta" in str(MemoryState.zeros(config, 4, 1, device="meta"))
