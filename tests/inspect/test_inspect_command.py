"""tensor-memory inspect: a recording as a table, as figures, as a page."""

import pytest
import torch

from memories import DIM, OPTIONS, make_memory, make_tokens
from tensor_memory import MemoryResidual, Recording, record
from tensor_memory.cli import main
from tensor_memory.inspect import figure_files


@pytest.fixture
def saved(tmp_path):
    layer = MemoryResidual(make_memory(OPTIONS["paper"], dtype=torch.float32))
    with record(layer, every=2) as recording:
        layer(make_tokens(2, 14, DIM, dtype=torch.float32))
    path = tmp_path / "a.safetensors"
    recording.save(path)
    return path


def refused(capsys, *arguments):
    assert main(["inspect", *map(str, arguments)]) == 2
    told = capsys.readouterr()
    assert "Traceback" not in told.err
    return told.err


def test_a_table_says_what_a_recording_holds(saved, capsys):
    assert main(["inspect", str(saved)]) == 0
    head, line, *rest = capsys.readouterr().out.splitlines()
    assert head.split() == ["layer", "grid", "kept", "seen", "gate", "use", "i", "f", "o", "sigma"]
    name, grid, kept, seen, gate, *means = line.split()
    assert (name, grid, kept, seen, gate) == ("memory", "2x3x2", "6", "10", "0.500")
    layer = Recording.load(saved)[0]
    expected = [layer.use, *layer.gates.unbind(-1), layer.spread]
    assert means == [f"{values.double().nanmean():.3f}" for values in expected]
    assert rest == ["2 rows, 1 layer, 0.0 MiB", "one chunk in 2 was kept, 4 were not"]


def test_figures_and_a_page_are_written_and_named(saved, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(figure_files, "DPI", 30)
    page, folder = tmp_path / "page.html", tmp_path / "figures"
    options = ["--html", str(page), "--figures", str(folder), "--layer", "0", "--row", "1"]
    options += ["--chunks", "0:2", "--theme", "both", "--only", "gates", "--only", "use"]
    assert main(["inspect", str(saved), *options]) == 0
    out = capsys.readouterr().out
    assert f"figures: 4 in {folder}" in out
    assert f"page: {page}" in out
    written = {path.name for path in folder.iterdir()}
    assert written == {
        f"{figure}-{theme}.png" for figure in ("gates-0", "use") for theme in ("light", "dark")
    }
    assert page.read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html>")


def test_what_is_no_recording_is_told_without_a_traceback(tmp_path, capsys):
    (tmp_path / "x").write_text("no recording at all")
    assert "truncated or foreign file" in refused(capsys, tmp_path / "x")
    assert "expected a tensor-memory recording in safetensors format, got no such file" in refused(
        capsys, tmp_path / "y"
    )
    assert "got a folder; `tensor-memory-lab inspect` records" in refused(capsys, tmp_path)


def test_a_page_that_is_too_large_can_be_made_smaller_as_the_message_says(saved, tmp_path, capsys):
    page = tmp_path / "page.html"
    arguments = ["inspect", str(saved), "--html", str(page), "--limit-mb", "0.04"]
    complaint = refused(capsys, *arguments[1:])
    assert "(--every, --rows, --limit-mb of `tensor-memory inspect`)" in complaint
    assert not page.exists()
    assert main([*arguments, "--limit-mb", "1", "--every", "2", "--rows", "1"]) == 0
    assert "One recorded chunk in 2 is on this page: 2 of 3." in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--every 2 --limit-mb 9", "--every, --limit-mb: expected --html FILE beside it"),
        ("--only gates --layer 0", "--only, --layer: expected --figures FOLDER beside it"),
        ("--figures {folder} --row 7", "row: expected one of 0 to 1, got 7"),
        ("--figures {folder} --chunks 50:99", "START:STOP with some of the 3 kept, 0:3, got 50:99"),
        ("--figures {recording}", "expected a folder for the figures, got a file; name a folder"),
    ],
)
def test_options_that_change_nothing_or_ask_for_nothing_are_refused(
    saved, tmp_path, capsys, options, complaint
):
    options = options.format(folder=tmp_path / "f", recording=saved).split()
    assert complaint in refused(capsys, saved, *options)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--html {folder}/a.safetensors", "which would be lost; name another file"),
        ("--html {folder}/../{name}/link", "the recording, which would be lost; name another file"),
        ("--html {folder}/new --figures {folder}/new", "the folder of --figures too; name another"),
    ],
)
def test_the_page_replaces_neither_the_recording_nor_the_figures(
    saved, tmp_path, capsys, options, complaint
):
    (tmp_path / "link").symlink_to(saved)
    kept = saved.read_bytes()
    told = refused(capsys, saved, *options.format(folder=tmp_path, name=tmp_path.name).split())
    assert "--html: expected a file of its own, got" in told
    assert complaint in told
    assert saved.read_bytes() == kept
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--chunks", "1:2:3"], "expected START:STOP, such as 0:12, got '1:2:3'"),
        (["--chunks", "a:b"], "expected START:STOP, such as 0:12, got 'a:b'"),
        (["--every", "0"], "expected an integer of at least 1, got '0'"),
    ],
)
def test_values_that_make_no_sense_are_refused(saved, capsys, options, complaint):
    with pytest.raises(SystemExit):
        main(["inspect", str(saved), *options])
    assert complaint in capsys.readouterr().err
