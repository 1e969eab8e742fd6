"""Text becomes ids without loss, and every token of a split is scored exactly once."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensor_memory_lab.commands.arguments import parse_run
from tensor_memory_lab.commands.text_pieces import pieces
from tensor_memory_lab.recipes import find_recipe
from tensor_memory_lab.tasks.text import WIKITEXT_2, Vocabulary, _require_wikitext, read_corpus
from tiny_text import text_task

LINES = " \n = A title = \n \n the cat sat on the <unk> mat . \n"


def write(folder, **parts):
    for name, text in parts.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return str(folder)


def text_of(vocabulary, ids):
    return "".join(pieces(vocabulary, ids, begins_line=True))


def counting_task(count, *, length=4, seed=0, **options):
    """Token number t of every split is t, so that a window shows where it was cut."""
    tokens = torch.arange(count, dtype=torch.int32)
    return text_task(tokens, count, length=length, seed=seed, **options)


def test_the_standard_protocol_ends_every_line_and_the_papers_does_not(tmp_path):
    folder = write(tmp_path, train=LINES, valid=" the dog \n", test=" a \n")
    (tmp_path / "train.txt").rename(tmp_path / "wiki.train.tokens")  # the original release's name
    corpus = read_corpus(folder, wikitext=False)
    assert len(corpus.splits["train"]) == 12 + 4
    assert text_of(corpus.vocabulary, corpus.splits["valid"].tolist()) == "the <unk>\n"
    assert corpus.vocabulary.words[:2] == ("<eos>", "=")
    paper = read_corpus(folder, protocol="paper", wikitext=False)
    assert len(paper.splits["train"]) == 12
    assert "<eos>" not in paper.vocabulary.words


def test_bytes_are_read_as_they_are(tmp_path):
    folder = write(tmp_path, train=LINES, valid=" é \n", test=" a \n")
    corpus = read_corpus(folder, level="byte")
    assert len(corpus.vocabulary) == 256
    assert corpus.splits["train"].tolist() == list(LINES.encode())
    assert corpus.splits["valid"].tolist() == list(b" \xc3\xa9 \n")
    (tmp_path / "test.txt").write_bytes(b"a\r\n\xff\rb")  # ends of lines as they are, and no text
    corpus = read_corpus(folder, level="byte")
    assert corpus.splits["test"].tolist() == list(b"a\r\n\xff\rb")
    ids = corpus.vocabulary.tokenize("é漢\r\n\0")
    assert text_of(corpus.vocabulary, ids) == "é漢\r\n\0"


def test_a_capped_vocabulary_holds_the_most_frequent_words_and_the_unknown():
    vocabulary = Vocabulary.of_words(["a", "a", "a", "b", "b", "c", "and", "and"], most=3)
    assert vocabulary.words == ("a", "b", "<unk>")
    assert vocabulary.encode(["and", "a"]) == [2, 0]


def test_rows_of_the_datasets_library_are_lines_the_empty_ones_too(monkeypatch):
    rows = {"text": ["", " = A title = \n", "", " the cat \n"]}
    asked = []

    def load_dataset(*name):
        asked.append(name)
        return dict.fromkeys(("train", "validation", "test"), rows)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    corpus = read_corpus(None, protocol="standard", wikitext=False)
    assert asked == [("Salesforce/wikitext", "wikitext-2-v1")]
    text = text_of(corpus.vocabulary, corpus.splits["test"].tolist())
    assert len(corpus.splits["test"]) == 6 + 4
    assert text.count("\n") == 4
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"--task.data-dir .*or pip install datasets"):
        read_corpus(None, level="byte")


def test_folder_and_protocol_may_be_named_without_their_group():
    recipe = find_recipe("language")
    short, _ = parse_run(recipe, ["--data-dir", "here", "--protocol", "paper", "--leak"])
    flags = ["--task.data-dir", "here", "--task.protocol", "paper", "--task.leak"]
    assert short == parse_run(recipe, flags)[0]
    assert parse_run(recipe, ["--no-leak", "--seed=3"])[0].seed == 3


def test_a_missing_part_is_named_with_the_layout(tmp_path):
    folder = write(tmp_path, train="a", valid="b")
    with pytest.raises(FileNotFoundError, match=r"test part is missing; expected train.*found"):
        read_corpus(folder)
    with pytest.raises(FileNotFoundError, match="no such folder; expected one with train"):
        read_corpus(str(tmp_path / "nowhere"))


def test_a_file_that_is_no_text_and_one_that_is_empty_are_named(tmp_path):
    folder = write(tmp_path, train="a", valid="", test="b")
    with pytest.raises(ValueError, match="expected text in the valid part, got an empty file"):
        read_corpus(folder, wikitext=False, protocol="paper")
    (tmp_path / "valid.txt").write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match=r"valid.txt: expected text in UTF-8, got byte 0xff at 2"):
        read_corpus(folder, wikitext=False)


def test_a_partial_wikitext_is_refused_with_both_counts(tmp_path):
    folder = write(tmp_path, train=LINES, valid=LINES, test=LINES)
    with pytest.raises(ValueError, match=r"train 2,088,628, got 16;.*--task.corpus any"):
        read_corpus(folder)


@pytest.mark.parametrize("protocol", ["standard", "paper"])
def test_the_whole_of_wikitext_is_recognised_by_its_counts(protocol):
    counts = WIKITEXT_2[protocol]
    ids = {split: range(counts[split]) for split in ("train", "valid", "test")}
    _require_wikitext(ids, counts["words"], protocol, "here")
    with pytest.raises(ValueError, match="not the whole of WikiText-2"):
        _require_wikitext(ids | {"test": range(9)}, counts["words"], protocol, "here")


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(2, 70),
    length=st.integers(1, 9),
    size=st.integers(1, 5),
    carried=st.booleans(),
    split=st.sampled_from(["valid", "test", "test@fresh"]),
)
def test_every_token_is_scored_once_from_the_one_before_it(count, length, size, carried, split):
    task = counting_task(count, carried=carried, length=length)
    seen = []
    for index in range(task.batches(split, size)):
        batch = task.batch(split, index, size)
        scored = batch["scored"]
        seen += batch["targets"][scored].tolist()
        before = torch.where(batch["targets"] == 0, task.vocabulary.start, batch["targets"] - 1)
        assert torch.equal(batch["ids"][scored], before[scored])
    assert sorted(seen) == list(range(count))


@settings(max_examples=40, deadline=None)
@given(length=st.integers(1, 6), size=st.integers(1, 4), index=st.integers(1, 60))
def test_a_carried_row_goes_on_where_it_stopped(length, size, index):
    task = counting_task(60, carried=True, length=length)
    earlier, later = task.batch("train", index - 1, size), task.batch("train", index, size)
    goes_on = later["targets"][:, 0] == earlier["targets"][:, -1] + 1
    assert (goes_on | later["fresh"]).all()
    per_epoch = (60 // size - length + 1) // length
    assert later["fresh"].tolist() == [index % per_epoch == 0] * size


def test_streams_with_nothing_carried_are_the_carried_ones_each_window_empty():
    carried = counting_task(60, carried=True, length=4)
    streams = counting_task(60, order="streams", length=4)
    for index in range(9):
        expected, found = carried.batch("train", index, 3), streams.batch("train", index, 3)
        assert torch.equal(found["ids"], expected["ids"])
        assert found["fresh"].all()
    assert streams.test_splits == ("test",)
    assert not streams.carries


@pytest.mark.parametrize("options", [{}, {"carried": True}, {"order": "streams"}])
def test_an_epoch_shows_every_window_once_and_the_next_cuts_elsewhere(options):
    task = counting_task(203, **options, length=10)
    other = counting_task(203, **options, length=10, seed=1)
    assert not torch.equal(task.batch("train", 0, 2)["ids"], other.batch("train", 0, 2)["ids"])
    size, batches = 2, 9
    epochs = []
    for epoch in range(6):
        parts = [task.batch("train", epoch * batches + i, size)["targets"] for i in range(batches)]
        seen = torch.cat(parts).flatten()
        assert seen.unique().numel() == seen.numel()
        epochs.append(int(seen.min()))
    assert len(set(epochs)) > 1


def test_a_text_too_short_for_the_batch_is_refused():
    with pytest.raises(ValueError, match="at least 9 windows of 4 tokens, got 20 tokens"):
        counting_task(20).batch("train", 0, 9)


def test_perplexity_is_the_exponential_of_the_mean_over_scored_tokens():
    task = counting_task(7, length=4)
    batch = task.batch("test", 0, 2)
    nll = torch.where(batch["scored"], 2.0, 100.0)
    total, count = task.measure({"nll": nll}, batch)["loss"]
    assert task.finish({"loss": (total / count).item()})["perplexity"] == pytest.approx(math.e**2)
    assert task.loss({"nll": nll}, batch).item() == pytest.approx(2.0)
    assert count == 7
    assert math.isfinite(task.finish({"loss": 1e4})["perplexity"])
    told = counting_task(7, level="byte").finish({"loss": math.log(8)})
    assert told == pytest.approx({"loss": math.log(8), "perplexity": 8.0, "bits_per_byte": 3.0})
    large = {"nll": torch.tensor([[2.0**24, 1.0, 5.0]])}  # float32 has no 2²⁴ + 1
    total, count = task.measure(large, {"scored": torch.tensor([[True, True, False]])})["loss"]
    assert (total.item(), count.item()) == (2**24 + 1, 2)
