"""Generated text is what whole windows predict, at constant memory, from a run's folder alone."""

import io
import itertools
import math
import shutil
import sys
from typing import get_args

import pytest
import torch

from sampled import exhaustive_but
from tensor_memory import MemoryConfig
from tensor_memory_lab.cli import main
from tensor_memory_lab.commands.text_pieces import pieces, prompt_ids
from tensor_memory_lab.language_runs import load_text_run
from tensor_memory_lab.models import generation
from tensor_memory_lab.models.generation import TextStream, generate
from tensor_memory_lab.models.language import (
    LanguageMethod,
    LanguageModel,
    LanguageModelConfig,
)
from tensor_memory_lab.tasks.text import Vocabulary
from tiny_text import loud, write_text
from tolerances import assert_same

METHODS = get_args(LanguageMethod)
CAUSAL = [method for method in METHODS if method != "tensor-depth"]
NOTHING_CARRIED = ("base", "base-sln", "wide", "local", "wide-local")
SAMPLE = ("base", "tensor-local", "place-local", "linear", "xl", "recurrent-slots", "tensor-depth")
SAMPLED = exhaustive_but(SAMPLE, METHODS)
"""A method of each kind of state; what the others make of it they share."""
WORDS, LENGTH = 23, 10


def decoder(method, *, carried, positions=None):
    """Small, with weights large enough for a wrong past to be noticed; chunks cross windows."""
    positions = positions or ("rotary" if method == "window+" else "learned")
    config = LanguageModelConfig(
        method=method,
        dim=8,
        layers=2,
        heads=2,
        dropout=0.2,  # must be off
        window=4,
        memory=MemoryConfig(channels=4, grid=(3, 3), chunk_size=3, reads="token"),
        slots=2 if method == "recurrent-slots" else None,
        segment=4 if method in ("xl", "tensor-xl", "recurrent-slots") else None,
        cache=5 if method == "xl" else None,
        non_causal=method == "tensor-depth",
        positions=positions,
    )
    torch.manual_seed(0)
    model = LanguageModel(config, WORDS, LENGTH, carried)
    return loud(model).double().eval()


def teacher_forced(model, ids):
    """Logits after every id, all windows computed whole, the state carried between them."""
    found, carry = [], None
    for first in range(0, len(ids), LENGTH):
        part = torch.tensor([ids[first : first + LENGTH]])
        outputs, carry = model({"ids": part}, carry, need_logits=True)
        found.append(outputs["logits"][0])
    return torch.cat(found)


@pytest.mark.parametrize("method", [m for m in CAUSAL if m not in NOTHING_CARRIED])
def test_greedy_text_is_what_whole_windows_predict(method):
    model = decoder(method, carried=True)
    prompt = torch.randint(WORDS, (13,)).tolist()
    made = list(itertools.islice(generate(TextStream(model), prompt, temperature=0), 20))
    logits = teacher_forced(model, [*prompt, *made])
    assert logits.argmax(-1)[len(prompt) - 1 : -1].tolist() == made


@pytest.mark.parametrize(
    ("method", "positions"),
    [*((method, None) for method in CAUSAL), ("base", "rotary"), ("tensor-local", "rotary")],
)
@pytest.mark.parametrize("step", [3, 13])
def test_reading_in_parts_gives_the_logits_of_whole_windows(method, positions, step):
    model = decoder(method, carried=True, positions=positions)
    ids = torch.randint(WORDS, (26,)).tolist()
    stream, expected = TextStream(model), teacher_forced(model, ids)
    if not stream.carries:
        ids = ids[:LENGTH]
    for first in range(0, len(ids), step):
        part = ids[first : first + step]
        logits = stream.read(part)
        assert_same(logits, expected[first + len(part) - 1].float())


@pytest.mark.parametrize("method", SAMPLED)
def test_a_model_without_a_carried_state_slides(method):
    model = decoder(method, carried=False)
    ids = torch.randint(WORDS, (2 * LENGTH,)).tolist()
    stream = TextStream(model)
    for place, number in enumerate(ids):
        logits = stream.read([number])
        first = place + 1 - len(stream.window)
        assert stream.window == ids[first : place + 1]
        assert len(stream.window) > LENGTH // 2 or first == 0
        assert_same(logits, teacher_forced(model, stream.window)[-1].float())


def bytes_in(kept):
    """Of all ids, tensors and states of memories in nested lists and dicts."""
    if isinstance(kept, list | tuple | dict):
        return sum(map(bytes_in, kept.values() if isinstance(kept, dict) else kept))
    return 8 if isinstance(kept, int) else getattr(kept, "nbytes", 0)


@pytest.mark.parametrize("method", SAMPLED)
def test_memory_does_not_grow_with_the_text(method):
    stream = TextStream(decoder(method, carried=method != "base"))
    sizes = []
    for number in torch.randint(WORDS, (5 * LENGTH,)).tolist():
        stream.read([number])
        sizes.append(bytes_in([stream.window, stream._start, stream._after, stream._states]))
    assert max(sizes[2 * LENGTH :]) <= max(sizes[: 2 * LENGTH])
    assert max(sizes[4 * LENGTH :]) == max(sizes[3 * LENGTH : 4 * LENGTH])


def test_local_attention_keeps_what_its_window_can_see():
    stream = TextStream(decoder("tensor-local", carried=True))
    stream.read(list(range(LENGTH)))
    assert [cache["keys"].shape[2] for cache, _ in stream._states] == [3, 3]  # and the next token


def test_a_seed_repeats_and_another_differs():
    model = decoder("tensor-local", carried=True)

    def text(**options):
        return list(itertools.islice(generate(TextStream(model), [1, 2], **options), 30))

    assert text(seed=3) == text(seed=3)
    assert text(seed=3) != text(seed=4)
    assert text(temperature=0, seed=3) == text(temperature=0, seed=4) == text(top_k=1)


def test_top_k_draws_among_the_most_probable():
    model = decoder("base", carried=False)
    allowed = set(TextStream(model).read([1, 2]).topk(3).indices.tolist())
    drawn = {next(generate(TextStream(model), [1, 2], top_k=3, seed=s)) for s in range(60)}
    assert drawn == allowed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature: expected 0 or more, got -1.0"),
        ({"temperature": math.nan}, "temperature: expected 0 or more, got nan"),
        ({"top_k": 0}, "top_k: expected 1 or more, got 0"),
    ],
)
def test_senseless_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        next(generate(TextStream(decoder("base", carried=False)), [1], **options))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run whose data is gone."""
    folder = tmp_path_factory.mktemp("language")
    data = write_text(folder / "data")
    flags = (
        f"--task.data-dir {data} --task.corpus any --task.length 16 --model.dim 16 "
        "--model.layers 2 --model.heads 2 --model.memory.grid 3 3 --model.memory.channels 4 "
        "--model.memory.chunk-size 4 --budget.steps 4 --budget.batch-size 4 "
        "--budget.evaluate-every 2 --optimizer.warmup 1 --precision float32 --device cpu --quiet"
    ).split()
    assert main(["run", "language-carried", *flags, "--output", str(folder / "run")]) == 0
    shutil.rmtree(data)
    return folder / "run"


def test_a_run_speaks_without_its_training_data(run, capsys):
    assert main(["generate", str(run), "--tokens", "40", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert set(text.split()) <= {"the", "cat", "sat", "on", "mat", ".", "<unk>"}
    assert main(["generate", str(run), "--tokens", "40", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == text


def test_a_prompt_comes_from_a_file_or_from_stdin(run, tmp_path, capsys, monkeypatch):
    (tmp_path / "prompt.txt").write_text("the cat sat")
    greedy = ["generate", str(run), "--tokens", "9", "--temperature", "0", "--device", "cpu"]
    assert main([*greedy, "--prompt", str(tmp_path / "prompt.txt")]) == 0
    from_file = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat sat"))
    assert main([*greedy, "--prompt", "-"]) == 0
    assert capsys.readouterr().out == from_file
    _, vocabulary, model, _ = load_text_run(run)
    ids = prompt_ids(vocabulary, "the cat sat")
    assert [vocabulary.words[i] for i in ids] == ["<eos>", "the", "cat", "sat"]
    expected = itertools.islice(generate(TextStream(model), ids, temperature=0), 9)
    assert from_file == "".join(pieces(vocabulary, expected, False)) + "\n"


def test_unknown_words_are_named_and_read_as_unknown(run, tmp_path, capsys):
    (tmp_path / "prompt.txt").write_text("the zebra sat\n")
    assert main(["generate", str(run), "--prompt", f"{tmp_path}/prompt.txt", "--tokens", "2"]) == 0
    told = capsys.readouterr().err
    assert "1 word of the prompt not in the vocabulary, read as <unk>: zebra" in told


def test_the_checkpoint_that_is_asked_for_is_read(run, tmp_path, capsys):
    folder = shutil.copytree(run, tmp_path / "run")
    (best,) = folder.glob("checkpoints/best-*.safetensors")
    best.unlink()
    asked = ["generate", str(folder), "--tokens", "1", "--device", "cpu"]
    assert main([*asked, "--which", "last"]) == 0
    assert main([*asked, "--which", "best"]) == 2
    assert best.name in capsys.readouterr().err


def test_mistakes_are_told(run, tmp_path, capsys, monkeypatch):
    def told(*arguments):
        assert main(["generate", *map(str, arguments)]) == 2
        return capsys.readouterr().err

    assert "no such file; expected the folder of a run, with config.json" in told(tmp_path)
    (tmp_path / "empty.txt").write_text(" \n")
    assert "expected text, got none" in told(run, "--prompt", tmp_path / "empty.txt")
    assert "expected a text file, or - for stdin" in told(run, "--prompt", tmp_path / "none")
    assert f"{tmp_path}: is a folder; expected a text file" in told(run, "--prompt", tmp_path)
    with monkeypatch.context() as closed:
        closed.setattr("sys.stdin", None)
        assert "expected text from stdin, which is closed" in told(run, "--prompt", "-")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    assert "picture.png: expected text in UTF-8" in told(run, "--prompt", tmp_path / "picture.png")
    assert "--tokens: expected 0 (without end) or more" in told(run, "--tokens", -1)
    other = tmp_path / "other"
    shutil.copytree(run, other)
    shutil.rmtree(other / "checkpoints")
    assert "no checkpoints; expected a run that kept them" in told(other)
    (other / "vocabulary.txt").unlink()
    assert "expected the words by id that a language run leaves" in told(other)


def test_a_run_of_another_task_is_refused(tmp_path, capsys):
    flags = "--budget.steps 1 --budget.batch-size 2 --task.valid-rows 2 --task.test-rows 2 --quiet"
    assert main(["run", "no-harm", *flags.split(), "--output", str(tmp_path / "toy")]) == 0
    assert main(["generate", str(tmp_path / "toy")]) == 2
    assert "expected a language run, got one of the recipe no-harm" in capsys.readouterr().err


def test_ctrl_c_ends_an_endless_text_cleanly(run, capsys, monkeypatch):
    def interrupted(*arguments, **options):
        yield from (0, 1)
        raise KeyboardInterrupt

    monkeypatch.setattr(generation, "generate", interrupted)
    assert main(["generate", str(run), "--tokens", "0"]) == 130
    captured = capsys.readouterr()
    assert captured.out.endswith("\n")
    assert "Traceback" not in captured.err


def test_bytes_are_decoded_as_they_come():
    ids = list("für".encode())
    found = list(pieces(Vocabulary(), ids, True))
    assert "".join(found) == "für"
    assert found[:3] == ["f", "", "ü"]


def test_words_are_written_with_blanks_between_and_none_at_the_start_of_a_line():
    vocabulary = Vocabulary(("<eos>", "a", "b", "<unk>"))
    ids = [1, 2, 0, 2, 3, 0, 1]
    assert "".join(pieces(vocabulary, ids, True)) == "a b\nb <unk>\na"
    assert "".join(pieces(vocabulary, ids, False)) == " a b\nb <unk>\na"
