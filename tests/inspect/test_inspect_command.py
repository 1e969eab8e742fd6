"""tensor-memory inspect: a recording as a table, as figures, as a page."""

import importlib
from pathlib import Path

import pytest
import torch

from memories import DIM, OPTIONS, make_memory, make_tokens
from tensor_memory import MemoryResidual, Recording, record
from tensor_memory.cli import main
from tensor_memory.inspect import command, figure_files

ROOT = Path(__file__).parents[2]


def make_layer():
    return MemoryResidual(make_memory(OPTIONS["paper"], dtype=torch.float32))


def parsed(*arguments):
    parser = command.argparse.ArgumentParser()
    command.add_options(parser)
    return parser.parse_args(arguments)


@pytest.fixture
def saved(tmp_path):
    layer = make_layer()
    with record(layer, every=2) as recording:
        layer(make_tokens(2, 14, DIM, dtype=torch.float32))
    path = tmp_path / "a.safetensors"
    recording.save(path)
    return path


def test_a_table_says_what_a_recording_holds(saved, capsys):
    assert main(["inspect", str(saved)]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == [
        "layer",
        "grid",
        "kept",
        "seen",
        "gate",
        "use",
        "i",
        "f",
        "o",
        "sigma",
    ]
    name, grid, kept, seen, gate, *rest = table[1].split()
    assert (name, grid, kept, seen, gate) == ("memory", "2x3x2", "6", "10", "0.500")
    layer = Recording.load(saved)[0]
    means = [layer.use, *layer.gates.unbind(-1), layer.spread]
    assert rest == [f"{values.double().nanmean():.3f}" for values in means]
    assert table[2].startswith("2 rows, 1 layer,")
    assert table[3] == "one chunk in 2 was kept, 4 were not"


def test_figures_and_a_page_are_written_and_named(saved, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(figure_files, "DPI", 30)
    page, folder = tmp_path / "page.html", tmp_path / "figures"
    options = ["--html", str(page), "--figures", str(folder), "--layer", "0", "--row", "1"]
    assert main(["inspect", str(saved), *options, "--chunks", "0:2", "--theme", "dark"]) == 0
    out = capsys.readouterr().out
    assert f"figures: 9 in {folder}" in out
    assert f"page: {page}" in out
    assert len(list(folder.glob("*-dark.png"))) == 9
    assert page.read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html>")


def test_an_empty_recording_is_shown_too(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(figure_files, "DPI", 30)
    with record(make_layer()) as recording:
        pass
    recording.save(tmp_path / "a")
    assert main(["inspect", str(tmp_path / "a"), "--figures", str(tmp_path / "f")]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1].split() == ["memory", "2x3x2", "0", "0", *"------"]
    Recording().save(tmp_path / "b")
    assert main(["inspect", str(tmp_path / "b"), "--figures", str(tmp_path / "g")]) == 0
    assert "0 rows, 0 layers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"no recording at all", "truncated or foreign file"),
        (b"{}", "; of a run, give the folder with its config.json"),
        (None, "no such file or folder; expected a recording, or the folder of a run"),
    ],
)
def test_what_is_no_recording_is_told_without_a_traceback(tmp_path, capsys, content, complaint):
    path = tmp_path / "x"
    if content is not None:
        path.write_bytes(content)
    assert main(["inspect", str(path)]) == 2
    err = capsys.readouterr().err
    assert complaint in err
    assert "Traceback" not in err


@pytest.mark.parametrize("option", ["--html", "--save"])
def test_a_folder_that_is_not_there_is_told_first(saved, tmp_path, capsys, option):
    where = tmp_path / "nowhere" / "file"
    assert main(["inspect", str(saved), option, str(where)]) == 2
    told = capsys.readouterr()
    assert f"{where}: expected a file in an existing folder, and {where.parent} is none" in told.err
    assert told.out == ""


def test_a_row_that_is_not_there_is_told(saved, tmp_path, capsys):
    options = ["--figures", str(tmp_path / "f"), "--row", "7"]
    assert main(["inspect", str(saved), *options]) == 2
    assert "row: expected one of 0 to 1, got 7" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["5", "a:b", "1:2:3"])
def test_chunks_are_a_start_and_a_stop(saved, capsys, text):
    with pytest.raises(SystemExit):
        main(["inspect", str(saved), "--chunks", text])
    assert f"expected START:STOP, such as 0:12, got '{text}'" in capsys.readouterr().err


def test_a_page_that_is_too_large_can_be_made_smaller_as_the_message_says(tmp_path, capsys):
    layer = make_layer()
    with record(layer) as recording:
        layer(make_tokens(2, 3 * 400, DIM, dtype=torch.float32))
    recording.save(tmp_path / "a")
    page = tmp_path / "page.html"
    command_line = ["inspect", str(tmp_path / "a"), "--html", str(page), "--limit-mb", "0.13"]
    assert main(command_line) == 2
    complaint = capsys.readouterr().err
    assert "(--every, --rows, --limit-mb on the command line)" in complaint
    every = complaint.split("every=")[1].split(",")[0]
    for advice in (["--every", every], ["--rows", "1"], ["--limit-mb", "1"]):
        assert main([*command_line, *advice]) == 0
        assert f"page: {page}" in capsys.readouterr().out
        page.unlink()


@pytest.mark.parametrize("option", ["--every", "--rows"])
def test_a_count_is_at_least_one(saved, capsys, option):
    with pytest.raises(SystemExit):
        main(["inspect", str(saved), option, "0"])
    assert "expected an integer of at least 1, got '0'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--every 2 --limit-mb 9", "--every, --limit-mb: expected --html FILE"),
        ("--rows 1", "--rows: expected --html FILE"),
        ("--row 0", "--row: expected --figures FOLDER"),
        ("--only gates --layer 0 --chunks 0:2", "--only, --layer, --chunks: expected --figures"),
        ("--theme light --html {page}", "--theme: expected --figures FOLDER"),
        ("--windows 1 --which best", "--windows, --which: expected the folder of a run to record"),
        ("--split test --data-dir .", "--split, --data-dir: expected the folder of a run"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(saved, tmp_path, capsys, options, told):
    options = options.format(page=tmp_path / "page.html").split()
    (tmp_path / "run").mkdir()
    saved.rename(tmp_path / "run" / command.IN_A_RUN)
    for source in (tmp_path / "run", tmp_path / "run" / command.IN_A_RUN):
        assert main(["inspect", str(source), *options]) == 2
        said = capsys.readouterr()
        assert told in said.err
        assert said.err.rstrip().endswith(f"or leave {told.split(':')[0]} out")
        assert said.out == ""
    assert not (tmp_path / "page.html").exists()


def test_a_recording_can_be_saved_under_another_name(saved, tmp_path):
    assert main(["inspect", str(saved), "--save", str(tmp_path / "b")]) == 0
    assert Recording.load(tmp_path / "b").names == Recording.load(saved).names


def test_a_folder_is_shown_by_the_recording_it_holds(saved, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(ValueError, match=f"holds no {command.IN_A_RUN}; save one there with"):
        command.open_recording(parsed(str(run)))
    saved.rename(run / command.IN_A_RUN)
    assert main(["inspect", str(run)]) == 0


def test_a_run_is_recorded_by_whoever_can_open_it(tmp_path):
    layer = make_layer().train()
    x = make_tokens(1, 6, DIM, dtype=torch.float32)
    modes = []

    def call():
        modes.append((layer.training, torch.is_grad_enabled()))
        layer(x)

    texts = [[str(token) for token in range(6)]]
    options = parsed(str(tmp_path))
    recording = command.open_recording(
        options, lambda given: command.OpenedRun(layer, call, {"texts": texts})
    )
    assert recording.texts == texts
    assert recording[0].seen.tolist() == [2]
    assert modes == [(False, False)]
    assert layer.training
    assert layer.memory.training


def test_a_run_that_fails_leaves_the_model_in_its_mode(tmp_path):
    layer = make_layer().train()
    with pytest.raises(ZeroDivisionError):
        command.record_call(layer, lambda: 1 / 0)
    assert layer.training
    assert not layer._forward_hooks


def test_a_recorded_run_can_be_kept(tmp_path, capsys):
    layer = make_layer()
    run = tmp_path / "run"
    run.mkdir()
    options = parsed(str(run), "--save", str(tmp_path / "kept"))
    x = make_tokens(1, 6, DIM, dtype=torch.float32)
    opened = command.OpenedRun(layer, lambda: layer(x))
    assert command.run_inspect(options, lambda given: opened) == 0
    assert Recording.load(tmp_path / "kept")[0].seen.tolist() == [2]


def test_the_streaming_example_ends_with_a_page_of_its_memory(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "examples")
    streaming = importlib.import_module("streaming")
    page = tmp_path / "runs" / "demo.html"
    options = ["--steps", "1", "--tokens", "30", "--memory", "--page", str(page)]
    assert streaming.main(options) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"See inside the memory: open {page} in a browser."
    assert "what is at" in page.read_text(encoding="utf-8")
