"""What fills the cells of a memory whose forget gate starts open, and what keeps them free."""

import pytest
import torch

import saturation
from tensor_memory_lab.records import read_records


@pytest.mark.parametrize(
    ("start", "fills"),
    [
        ("as published", False),
        ("forget 5", True),
        ("forget 5, spread -1", True),
        ("forget 5, spread -1, blanks write nothing", True),
        ("forget 5, spread -1, feedback 0", False),
        ("forget 5, spread -1, input -3", False),
    ],
)
def test_an_open_cell_fills_through_its_own_feedback_and_by_nothing_else(start, fills):
    saturated = saturation.measure(start, rows=2).saturated
    assert saturated > 0.5 if fills else saturated < 0.1


@pytest.mark.exhaustive
def test_without_feedback_what_was_written_stays_readable_and_gain_makes_it_loud():
    narrow = "forget 5, spread -1"
    fed, shut, blind, loud = (
        saturation.measure(narrow + start, rows=96)
        for start in ("", ", input -3", ", feedback 0", ", feedback 0, gain 4")
    )
    assert min(shut.explained, blind.explained, loud.explained) > 0.4
    assert fed.explained < blind.explained / 2
    assert shut.loudness < blind.loudness / 2  # what a closed gate keeps out is also the content
    assert loud.loudness > 4 * blind.loudness


def test_a_linear_map_explains_nothing_of_noise():
    draw = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(400, 3, generator=draw), torch.randn(400, 2, generator=draw)
    assert abs(saturation.r_squared(inputs, targets)) < 0.1


def test_every_start_is_printed_and_written_down_with_its_commit(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(saturation, "measure", lambda *_: saturation.Kept(0.25, 0.5, 0.125))
    study = tmp_path / "saturation.jsonl"
    assert saturation.main(["--seeds", "2", "--record", str(study)]) == 0
    shown = capsys.readouterr().out.splitlines()[1:]
    assert [line.split("  ")[0] for line in shown] == list(saturation.STARTS)
    assert {tuple(line.split()[-3:]) for line in shown} == {("25%", "0.50", "0.1250")}
    (record,) = read_records([study])
    assert record["result"]["forget 5"] == {"saturated": 0.25, "explained": 0.5, "loudness": 0.125}
    assert record["config"] == {"seeds": 2, "rows": 320}
    assert {"commit", "hardware", "versions"} <= set(record)


@pytest.mark.parametrize("flag", ["--seeds", "--rows"])
def test_an_average_over_nothing_is_refused(flag, capsys):
    with pytest.raises(SystemExit):
        saturation.main([flag, "0"])
    assert f"{flag}: expected 1 or more, got 0" in capsys.readouterr().err
