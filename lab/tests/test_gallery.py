"""The gallery of docs/guide/inspect.md: made by one command, shown in full, and true."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gallery
from tensor_memory import Recording
from tensor_memory_lab.commands.arguments import parse_run
from tensor_memory_lab.recipes import find_recipe

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def drawn(images: Path) -> set[str]:
    return {str(path.relative_to(images)) for path in images.rglob("*.png")}


def test_one_command_trains_records_and_draws(tmp_path, monkeypatch, capsys):
    short = "--budget.steps 1 --budget.evaluate-every 1 --task.valid-rows 4 --task.test-rows 8"
    recipe = f"{gallery.RECIPES['binding']} {short} --quiet"
    monkeypatch.setitem(gallery.RECIPES, "binding", recipe)
    monkeypatch.setitem(gallery.FIGURES, "binding", ["gates"])
    monkeypatch.setattr(shutil, "which", lambda name: None)
    options = ["--runs", str(tmp_path / "runs"), "--docs", str(tmp_path / "docs")]
    assert gallery.main(options) == 0
    assert "binding: no chromium" in capsys.readouterr().out
    recording = Recording.load(tmp_path / "docs" / "recordings" / "binding.safetensors")
    assert recording.rows == 2
    assert "? " in recording.text(0, 13)
    images = tmp_path / "docs" / "images" / "inspect"
    assert drawn(images) == {"binding/gates-0-light.png", "binding/gates-0-dark.png"}
    trained = (tmp_path / "runs" / "binding" / "result.json").stat().st_mtime_ns
    assert gallery.main(options) == 0  # what is trained is not trained again
    assert (tmp_path / "runs" / "binding" / "result.json").stat().st_mtime_ns == trained


def test_a_folder_that_is_none_is_told_before_training(tmp_path, capsys):
    with pytest.raises(SystemExit):
        gallery.main(["--data-dir", str(tmp_path / "none"), "--docs", str(tmp_path / "docs")])
    assert "--data-dir: expected a folder of WikiText-2, got " in capsys.readouterr().err
    assert not (tmp_path / "docs").exists()


@pytest.mark.exhaustive
def test_the_recordings_can_be_drawn_again_without_training(tmp_path):
    pytest.importorskip("playwright.sync_api", reason="the viewer needs playwright")
    if not (shutil.which("chromium") or shutil.which("chromium-browser")):
        pytest.skip("no chromium here: the viewer is not photographed (apt-get install chromium)")
    shutil.copytree(DOCS / "recordings", tmp_path / "docs" / "recordings")
    options = ["--draw", "--runs", str(tmp_path / "runs"), "--docs", str(tmp_path / "docs")]
    command = [sys.executable, str(ROOT / "lab" / "studies" / "gallery.py"), *options]
    subprocess.run(command, check=True)  # a process has one browser, which other tests may hold
    images = tmp_path / "docs" / "images" / "inspect"
    assert drawn(images) == drawn(DOCS / "images" / "inspect")


def test_every_committed_picture_is_shown_and_every_shown_one_is_there():
    text = (DOCS / "guide" / "inspect.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"images/inspect/([\w/-]+\.png)", text))
    assert shown == drawn(DOCS / "images" / "inspect")


@pytest.mark.parametrize("name", ["binding", "language"])
def test_the_recordings_are_of_what_the_gallery_trains(name):
    recipe, *flags = gallery.RECIPES[name].split()
    config, _ = parse_run(find_recipe(recipe), flags)
    for layer in Recording.load(DOCS / "recordings" / f"{name}.safetensors").layers:
        assert layer.config == config.model.memory
