"""A pretrained host with a window, streamed over books: what a token sees, losses, the plan."""

import argparse
import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file

import pretrained_host as study
from tensor_memory_lab.records import read_records

WORDS, WINDOW, SEGMENT = 50, 4, 8
SMALL = {
    study.PLACE: study.PlaceConfig(heads=2, channels=4, grid=(3, 3)),
    study.TENSOR: study.MemoryConfig(channels=4, grid=(3, 3), chunk_size=2),
}


@pytest.fixture(autouse=True)
def small_memories(monkeypatch):
    for name, method in study.METHODS.items():
        small = replace(method, memory=SMALL.get(method.memory))
        monkeypatch.setitem(study.METHODS, name, small)


@pytest.fixture(scope="module")
def host_dir(tmp_path_factory):
    """A random Llama as transformers saves it."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=3, vocab_size=WORDS)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2)
    host = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    folder = tmp_path_factory.mktemp("host")
    host.save_pretrained(folder)
    return folder


def book(length, seed):
    return torch.randint(WORDS, (length,), generator=torch.Generator().manual_seed(seed))


def subject(host_dir, method="window", layers=(0, 2), **changes):
    defaults = dict(host_dir=host_dir, window=WINDOW, full_window=16, layers=layers, rank=2)
    options = argparse.Namespace(**defaults | {"device": "cpu", "precision": "float32"} | changes)
    made = study.Subject(study.METHODS[method], options, seed=0)
    with torch.no_grad():  # a memory that has been trained, so that it says something
        for parameter in made.trained:
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


@torch.no_grad()
def losses(made, rows):
    found = [loss for _, loss in made.losses(study.in_rows(rows, SEGMENT), SEGMENT)]
    return torch.cat(found, 1)


def whole_host(made, **changes):
    """The same weights with transformers' own attention."""
    host = made.model
    host.config = copy.deepcopy(host.config)
    for name, value in changes.items():
        setattr(host.config, name, value)
    plain = transformers.MistralForCausalLM(host.config)
    plain.load_state_dict(host.state_dict())
    plain.set_attn_implementation("sdpa")
    return plain.eval()


def test_windows_across_segments_are_those_of_transformers_in_one_call(host_dir):
    made, tokens = subject(host_dir, "no-sinks"), book(40, 1)
    with torch.no_grad():
        logits = whole_host(made)(tokens[None]).logits[0]
    expected = F.cross_entropy(logits[:-1], tokens[1:], reduction="none")
    torch.testing.assert_close(losses(made, [[tokens]])[0, :-1], expected)


def test_a_book_no_longer_than_the_window_is_read_by_plain_attention(host_dir):
    made, tokens = subject(host_dir, "full"), book(16, 1)
    with torch.no_grad():
        logits = whole_host(made, sliding_window=None)(tokens[None]).logits[0]
    expected = F.cross_entropy(logits[:-1], tokens[1:], reduction="none")
    torch.testing.assert_close(losses(made, [[tokens]])[0, :-1], expected)


@pytest.mark.parametrize("position", [5, 11, 30])
def test_the_first_tokens_of_a_book_stand_right_before_the_window(position, host_dir):
    # With one layer, what a token sees is a text of its own: the sinks, then the window.
    made, tokens = subject(host_dir), book(40, 1)
    made.model.model.layers = made.model.model.layers[:1]
    made.model.config.num_hidden_layers = 1
    near = torch.arange(position - WINDOW + 1, position + 1)
    block = position // WINDOW * WINDOW
    sinks = torch.arange(study.SINKS)
    sinks = sinks[sinks <= position - WINDOW]
    seen = torch.cat([tokens[sinks], tokens[near]])[None]
    at = torch.cat([sinks + max(block - WINDOW - study.SINKS, 0), near])[None]
    with torch.no_grad():
        plain = whole_host(made, sliding_window=None)
        logits = plain(seen, position_ids=at, attention_mask=torch.ones_like(seen)).logits[0, -1]
    expected = F.cross_entropy(logits, tokens[position + 1])
    torch.testing.assert_close(losses(made, [[tokens]])[0, position], expected)


@pytest.mark.parametrize("method", ["window", "place", "tensor", "place+lora"])
def test_a_book_is_read_as_if_it_stood_alone_wherever_it_begins(method, host_dir):
    made, first, second = subject(host_dir, method), book(19, 1), book(37, 2)
    rows = losses(made, [[first, second], [second, first]])
    alone = losses(made, [[second]])[0, :37]
    torch.testing.assert_close(rows[0, 24:61], alone)
    torch.testing.assert_close(rows[1, :37], alone)


@pytest.mark.parametrize(
    ("method", "reach"), [("window", WINDOW), ("place-emptied", WINDOW), ("place", 40)]
)
def test_only_a_memory_that_is_not_emptied_reaches_beyond_its_window(method, reach, host_dir):
    # One block with a memory and nothing after it, so that windows do not add up over layers.
    made = subject(host_dir, method, layers=(0,))
    made.model.model.layers = made.model.model.layers[:1]
    tokens, first = book(40, 1), study.SINKS
    changed = tokens.clone()
    changed[first] = (tokens[first] + 1) % WORDS
    moved = losses(made, [[tokens]])[0, first:] != losses(made, [[changed]])[0, first:]
    assert moved[0]
    assert moved.nonzero().max() < reach
    assert moved[WINDOW:].any() == (method == "place")


@pytest.mark.parametrize("method", ["place+lora", "tensor"])
def test_hidden_states_stay_in_bfloat16_beside_a_memory_that_is_trained_in_float32(
    method, host_dir
):
    made = subject(host_dir, method, precision="bfloat16")
    seen = []
    for block in made.attachment.host.modules():
        if type(block).__name__ == "MistralDecoderLayer":
            block.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    rows = [[book(16, 1)]]
    found = [loss for _, loss in made.losses(study.in_rows(rows, SEGMENT), SEGMENT)]
    sum(loss.sum() for loss in found[-1:]).backward()
    assert set(seen) == {torch.bfloat16}
    assert {p.dtype for p in made.trained} == {torch.float32}
    assert all(p.grad is not None for p in made.trained)
    expected = losses(subject(host_dir, method), rows)
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=0.06, atol=0.06)


def test_losses_by_distance_are_those_added_up_by_hand(host_dir, monkeypatch):
    monkeypatch.setattr(study, "EDGES", [4, 10])
    made, books = subject(host_dir), [book(21, 1), book(9, 2), book(12, 3)]
    found = study.evaluate(made, study.scored_streams(books, 2, SEGMENT), SEGMENT)
    by_hand = {"0-4": [], "4-10": [], "10-": []}
    for tokens in books:
        for distance, loss in enumerate(losses(made, [[tokens]])[0, : len(tokens) - 1].tolist(), 1):
            by_hand["0-4" if distance < 4 else "4-10" if distance < 10 else "10-"].append(loss)
    expected = {name: sum(values) / len(values) for name, values in by_hand.items()}
    every = [loss for values in by_hand.values() for loss in values]
    assert found == pytest.approx(expected | {"loss": sum(every) / len(every)}, rel=1e-5)


def test_a_segment_that_holds_nothing_but_the_end_of_a_book_is_no_nan(host_dir):
    options = argparse.Namespace(rows=1, segment=SEGMENT, steps=3)
    made = subject(host_dir, "place")
    steps = list(study.train(made, [book(SEGMENT + 1, 1)], options, rate=1e-3, seed=0))
    assert torch.stack(steps).isfinite().all()


def test_seeds_deal_whole_books_in_another_order():
    books = [book(length, length) for length in (5, 7, 11)]
    rows = study.training_streams(books, rows=2, segment=4, steps=5, seed=1)
    begins = (rows.positions == 0).nonzero().tolist()
    assert [0, 0] in begins
    assert [1, 0] in begins
    for row, at in begins:
        whole = [b for b in books if torch.equal(rows.tokens[row, at : at + len(b)], b[: 20 - at])]
        assert whole
    others = [study.training_streams(books, 2, 4, 5, seed).tokens for seed in range(2, 6)]
    assert any(not torch.equal(rows.tokens, other) for other in others)


@pytest.fixture
def arguments(host_dir, tmp_path):
    books = {f"{split}/{n}": book(60 + n, n) for n, split in enumerate(("train", "valid", "test"))}
    save_file({name: ids.to(torch.uint16) for name, ids in books.items()}, tmp_path / "novels")
    sizes = "--window 4 --full-window 16 --segment 8 --rows 2 --steps 2 --rank 2 --layers 0 2"
    given = dict(host_dir=host_dir, tokens=tmp_path / "novels", record=tmp_path / "host.jsonl")
    paths = [
        part for name, path in given.items() for part in (f"--{name.replace('_', '-')}", str(path))
    ]
    return ["run", *paths, *sizes.split(), "--device", "cpu"]


@pytest.mark.parametrize(
    "methods",
    [
        ["window", "full", "no-sinks", "place", "tensor+lora", "lora", "full+lora"],
        pytest.param([*study.METHODS], marks=pytest.mark.exhaustive),
    ],
    ids=["some", "all"],
)
def test_every_method_is_tried_chosen_on_valid_and_run_once(methods, arguments, capsys):
    plan = [*arguments, "--rates", "1e-3", "1e-2", "--seeds", "1", "--methods", *methods]
    with pytest.raises(SystemExit, match="--seconds are over; the same command goes on"):
        study.main([*plan, "--seconds", "0"])
    assert study.main([*plan, "--methods", *methods[3::-1]]) == 0
    before = {(r["method"], r["rate"], r["seed"]): r for r in read_records([arguments[6]])}
    assert study.main(plan) == 0
    records = read_records([arguments[6]])
    for record in records:  # what was there was not run again
        key = record["method"], record["rate"], record["seed"]
        assert before.get(key, record)["date"] == record["date"]
    assert len(records) == 3 + 3 * (len(methods) - 3)
    for method in methods:
        *tries, counts = [r for r in records if r["method"] == method]
        assert "test" in counts["test"]
        if not tries:
            continue
        valid = {t["rate"]: t["valid"]["loss"] for t in tries}
        assert list(valid) == [1e-3, 1e-2]
        assert counts["rate"] == min(valid, key=valid.get)
        assert counts["tries"] == {str(rate): loss for rate, loss in valid.items()}
        assert all(t["test"] == {} for t in tries)
        assert (counts["state_bytes"] > 0) == ("place" in method or "tensor" in method)
        assert counts["parameters"] > 0
        assert [point["step"] for point in counts["curve"]] == [1, 2]
    assert {"commit", "versions", "hardware"} <= set(records[0])
    test = {(r["method"], r["seed"]): r["test"]["test"] for r in records if r["test"]}
    for (method, seed), found in test.items():
        pairs = {
            "given_back": ("window", "full", 0),
            "given_back_adapted": ("lora", "full+lora", 1),
        }
        for name, (near, far, of) in pairs.items():
            if name in found:
                wide, narrow = test[far, of]["loss"], test[near, of]["loss"]
                assert found[name] == pytest.approx((narrow - found["loss"]) / (narrow - wide))
        assert ("given_back" in found) == (method not in ("window", "full")), (method, seed)
        adapted = method.endswith("+lora") and method != "full+lora"
        assert ("given_back_adapted" in found) == adapted, (method, seed)
    shown = capsys.readouterr().out.splitlines()[-len(methods) :]
    assert sorted(line.split()[0] for line in shown) == sorted(methods)


def run(arguments, *changes):
    """Run this of the plan; all records so far."""
    assert study.main([*arguments, "--seeds", "1", "--rates", "1e-3", *changes]) == 0
    return read_records([arguments[6]])


def test_what_a_method_is_compared_with_is_run_and_has_its_plan(arguments):
    run(arguments, "--methods", "lora", "full+lora")
    run(arguments, "--methods", "lora", "full+lora", "--rates", "1e-2")
    run(arguments, "--methods", "window", "full", "--segment", "16")
    found = {
        r["method"]: r["test"]["test"]
        for r in run(arguments, "--methods", "place+lora")
        if r["test"] and r["config"]["segment"] == 8 and r["rate"] in (None, 1e-3)
    }
    window, full, lora, wide, place = (
        found[name]["loss"] for name in ("window", "full", "lora", "full+lora", "place+lora")
    )
    shares = found["place+lora"]
    assert shares["given_back"] == pytest.approx((window - place) / (window - full))
    assert shares["given_back_adapted"] == pytest.approx((lora - place) / (lora - wide))


def test_where_a_wider_window_is_no_better_nothing_is_given_back(arguments, capsys):
    records = run(arguments, "--methods", "no-sinks", "--full-window", "4")
    assert [record["method"] for record in records] == ["window", "full", "no-sinks"]
    assert list(records[-1]["test"]["test"]) == ["loss"]
    assert "no-sinks" in capsys.readouterr().out


def test_a_rate_that_diverges_is_not_chosen_and_a_run_that_diverges_is_told(arguments, capsys):
    records = run(arguments, "--methods", "lora", "--rates", "1e30", "1e-3")
    assert [(r["rate"], bool(r["test"])) for r in records if r["method"] == "lora"] == [
        (1e30, False),
        (1e-3, False),
        (1e-3, True),
    ]
    assert records[-1]["tries"]["1e+30"] is None
    assert "lora, seed 0, rate 1e+30: valid diverged" in capsys.readouterr().out
    before = len(records)
    assert len(run(arguments, "--methods", "full+lora", "--rates", "1e30")) == before + 1
    assert "full+lora: diverged at every rate" in capsys.readouterr().out
    *_, counts = records
    test = counts["test"] | {"test": {"loss": None}}
    (row,) = study.results_table([counts, counts | {"seed": 2, "test": test}])
    assert (row["seeds"], row["test"]) == ("2", "diverged")


@pytest.mark.parametrize(
    ("flag", "value"),
    [("segment", "16"), ("valid-tokens", "20"), ("host-dir", "other"), ("precision", "bfloat16")],
)
def test_plans_that_differ_are_run_and_told_apart(
    flag, value, arguments, host_dir, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").symlink_to(host_dir)
    run(arguments, "--methods", "window")
    capsys.readouterr()
    first, second = run(arguments, "--methods", "window", f"--{flag}", value)
    assert first["config"] != second["config"]
    head, _, *rows = capsys.readouterr().out.splitlines()[-4:]
    name = {"host-dir": "host"}.get(flag, flag.replace("-", "_"))
    assert name.replace("_", " ") in head
    assert {row.split()[2] for row in rows} == {str(r["config"][name]) for r in (first, second)}


def test_of_two_processes_that_make_the_same_run_one_records_it(arguments, monkeypatch):
    provenance = study.provenance

    def other_process(device):
        monkeypatch.setattr(study, "provenance", provenance)
        run(arguments, "--methods", "window")
        return provenance(device)

    monkeypatch.setattr(study, "provenance", other_process)
    assert len(run(arguments, "--methods", "window")) == 1


def test_times_of_steps_and_tokens_are_added_beside_the_runs(arguments, capsys):
    assert study.main([*arguments, "--methods", "window"]) == 0
    steps = arguments.index("--steps")
    given = [*arguments[1:steps], *arguments[steps + 2 :], "--time-seconds", "0"]
    assert study.main(["time", *given, "--methods", "window", "place+lora"]) == 0
    run, times = read_records([arguments[6]])
    assert (run["kind"], times["kind"]) == ("run", "benchmark")
    assert set(times["result"]["ms"]["window"]) == {"token of 1", "token of 8"}
    assert set(times["result"]["ms"]["place+lora"]) == {"token of 1", "token of 8", "step"}
    assert all(t["median"] > 0 for ms in times["result"]["ms"].values() for t in ms.values())
    assert study.main([*arguments, "--methods", "window"]) == 0  # beside times nothing is lost
    assert len(read_records([arguments[6]])) == 2


def test_what_is_no_host_no_novel_or_no_plan_is_told(arguments, tmp_path, capsys):
    with pytest.raises(SystemExit, match=r"expected config.json and model.safetensors of a Llama"):
        study.main([*arguments, "--host-dir", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"train: expected novels as \*\.txt, got none"):
        study.main(
            ["tokens", "--host-dir", arguments[2], "--data-dir", str(tmp_path), "--output", "x"]
        )
    (tmp_path / "torn").write_text("no safetensors")
    for name in ("missing", "torn"):
        with pytest.raises(SystemExit, match=f"{name}: expected novels in the safetensors that"):
            study.main([*arguments, "--tokens", str(tmp_path / name)])
    for flag, value, told in (
        ("--segment", "10", "expected a multiple of --window 4"),
        ("--segment", "3", "expected 4 or more, got 3"),
        ("--full-window", "0", "expected 1 or more, got 0"),
        ("--valid-tokens", "1", "expected 2 or more, got 1"),
        ("--record", str(tmp_path / "torn"), f"{tmp_path}/torn: expected a study to add records"),
    ):
        with pytest.raises(SystemExit):
            study.main([*arguments, flag, value])
        assert f"{flag}: {told}" in capsys.readouterr().err
    assert len(run(arguments, "--segment", "4", "--methods", "window")) == 1


@pytest.fixture
def make_tokens(host_dir, tmp_path):
    """Write novels by the numbers of their words; what `tokens` makes of them."""
    import tokenizers

    words = {"[UNK]": 0, "many": 70_000} | {f"w{n}": n + 1 for n in range(9)}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]")
    fast.save_pretrained(tmp_path / "host")
    for folder, count in (("train", 10), ("valid", 1)):
        (tmp_path / folder).mkdir()
        for number in range(count):
            (tmp_path / folder / f"{number}.txt").write_text(f"w{number % 9} w3\nw1")

    def make():
        paths = {"host-dir": "host", "data-dir": "", "output": "novels.safetensors"}
        given = [part for n, at in paths.items() for part in (f"--{n}", str(tmp_path / at))]
        assert study.main(["tokens", *given]) == 0
        return study.load_file(tmp_path / "novels.safetensors")

    return make


def test_novels_become_tokens_of_their_splits(make_tokens):
    found = make_tokens()
    assert sorted(found)[:2] == ["test/0", "train/1"]
    assert [name for name in found if name.startswith("valid")] == ["valid/0", "valid/9"]
    assert found["train/1"].tolist() == [2, 4, 2]
    assert found["train/1"].dtype == torch.uint16


def test_tokens_above_65535_are_kept(make_tokens, tmp_path):
    (tmp_path / "train" / "1.txt").write_text("w1 many")
    assert make_tokens()["train/1"].tolist() == [2, 70_000]


def test_a_host_without_a_tokenizer_is_told(make_tokens, tmp_path):
    for file in (tmp_path / "host").iterdir():
        file.unlink()
    with pytest.raises(SystemExit, match=r"host: expected a host with its tokenizer, .*, got none"):
        make_tokens()


@pytest.mark.parametrize(
    ("novel", "told"),
    [(b"caf\xe9", "expected UTF-8, got"), (b"", "expected a novel, got 0 tokens")],
)
def test_what_is_no_text_is_told_with_its_file(novel, told, make_tokens, tmp_path):
    (tmp_path / "train" / "3.txt").write_bytes(novel)
    with pytest.raises(SystemExit, match=rf"train/3\.txt: {told}"):
        make_tokens()
