"""The example streams what it computes in one pass, and reports what it measured."""

import importlib.util
import itertools
import re
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


streaming = load("streaming")


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_help_says_what_an_example_does_what_it_needs_and_what_it_takes(name, capsys):
    module = load(name)
    with pytest.raises(SystemExit) as stopped:
        module.main(["--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert module.__doc__.strip() in out
    assert "Needs: pip install 'tensor-memory[" in out
    lines = out.partition("show this help message and exit\n")[2].splitlines()
    for line, below in itertools.pairwise([*lines, ""]):
        if line.startswith("  --"):
            assert re.search(r"\S  +\S", line) or below.startswith(" " * 20), f"{line}: no help"


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def make_model(memory, seed=0):
    torch.manual_seed(seed)
    return streaming.Model(memory).double().eval()


def make_stream(tokens):
    row = streaming.one_stream(tokens, generator())
    return row._replace(point=row.point.double())


@pytest.mark.parametrize("memory", [None, streaming.MEMORY], ids=["without", "with"])
@pytest.mark.parametrize("largest", [1, 5, 30])
def test_streaming_in_uneven_blocks_equals_one_pass(memory, largest):
    model, row = make_model(memory), make_stream(50)
    whole, final = model(row)
    state, parts = model.start(1), []
    for block in streaming.uneven_blocks(50, generator(), largest):
        logits, state = model(row[block], state)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-10)
    assert torch.equal(state.episode, final.episode)
    for window, expected in zip(state.windows, final.windows, strict=True):
        torch.testing.assert_close(window.keys, expected.keys, rtol=0, atol=1e-10)
        torch.testing.assert_close(window.values, expected.values, rtol=0, atol=1e-10)
        assert torch.equal(window.episode, expected.episode)
    if memory is not None:
        torch.testing.assert_close(
            state.memories[0].cell, final.memories[0].cell, rtol=0, atol=1e-10
        )


@pytest.mark.parametrize("memory", [None, streaming.MEMORY], ids=["without", "with"])
def test_nothing_crosses_from_one_episode_to_the_next(memory):
    model, row = make_model(memory), make_stream(3 * streaming.EPISODE)
    changed = row._replace(symbol=row.symbol.clone(), point=row.point.clone())
    changed.symbol[:, : streaming.EPISODE] = 3
    changed.point[:, : streaming.EPISODE] *= -1
    before, after = model(row)[0], model(changed)[0]
    assert not torch.equal(before[:, : streaming.EPISODE], after[:, : streaming.EPISODE])
    assert torch.equal(before[:, streaming.EPISODE :], after[:, streaming.EPISODE :])


def test_only_the_memory_reaches_beyond_the_attention_window():
    row = make_stream(streaming.EPISODE)
    changed = row._replace(symbol=row.symbol.clone())
    changed.symbol[:, 0] = (row.symbol[:, 0] + 1) % streaming.VALUES
    moved = {}
    for memory in (None, streaming.MEMORY):
        model = make_model(memory)
        difference = (model(row)[0] - model(changed)[0]).abs().amax(-1)[0]
        moved[memory] = (difference > 0).nonzero().flatten().tolist()
    assert moved[None] == [0, 1, 2]  # two layers, one token back each
    assert moved[streaming.MEMORY] == list(range(streaming.EPISODE))


def test_the_two_models_start_as_the_same_host():
    with_memory = make_model(streaming.MEMORY).state_dict()
    without = make_model(None).state_dict()
    assert without.keys() < with_memory.keys()
    assert all(torch.equal(with_memory[name], tensor) for name, tensor in without.items())


def test_every_answer_is_the_value_written_at_the_asked_point():
    tokens = streaming.episodes(5, generator())
    written = slice(0, streaming.WRITES)
    for row in range(5):
        for position in range(streaming.WRITES, streaming.EPISODE):
            same = (tokens.point[row, written] == tokens.point[row, position]).all(-1)
            assert tokens.symbol[row, written][same].tolist() == [tokens.answer[row, position]]
            assert tokens.symbol[row, position] == streaming.ASK
    assert (tokens.answer[:, written] == -100).all()


def test_uneven_blocks_cover_every_token_once():
    row = torch.arange(1000)
    parts = [row[block] for block in streaming.uneven_blocks(1000, generator(), 70)]
    assert torch.equal(torch.cat(parts), row)
    assert len({len(part) for part in parts}) > 5


def test_the_demo_reports_accuracy_and_a_constant_state(capsys):
    assert streaming.main(["--steps", "2", "--tokens", "150"]) == 0
    out, err = capsys.readouterr()
    assert "150 tokens in one stream" in out
    for label in ("without memory", "with memory"):
        assert label in out
        assert f"train {label}: 2 of 2 steps, 100 %" in err
        assert f"stream {label}: 150 of 150 tokens, 100 %" in err
    rows = {
        line.split("│")[1].strip(): line.split("│")[2:4] for line in out.splitlines() if "│" in line
    }
    assert rows["state before the first token"] == rows["state after the last token"]
    assert "12.5%" in rows["chance, 1 of 8"][0]
    cache = 150 * 2 * 2 * 64 * 4  # tokens, keys and values, layers, width, bytes
    assert f"{cache:,} B" in rows["key-value cache of every token (computed)"][0]


def test_one_of_the_two_models_can_be_left_out(capsys):
    assert streaming.main(["--steps", "1", "--tokens", "30", "--no-memory"]) == 0
    out, err = capsys.readouterr()
    assert "without memory" in out
    assert "train with memory" not in err


def test_an_interrupt_ends_the_demo_with_one_line(capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(streaming, "train", interrupted)
    assert streaming.main(["--steps", "1", "--tokens", "30"]) == 130
    assert capsys.readouterr().err.strip() == "stopped before the end; nothing to report"


def test_a_stream_of_no_tokens_is_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        streaming.main(["--tokens", "0"])
    assert stopped.value.code == 2
    assert "--steps and --tokens: expected at least 1, got" in capsys.readouterr().err
