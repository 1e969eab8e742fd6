"""How far a write reaches before training, and the figure of it."""

import pytest

import decay
from tensor_memory_lab.recipes import find_recipe
from tensor_memory_lab.records import read_records


def test_a_write_fades_with_the_starting_forget_gate(monkeypatch):
    monkeypatch.setattr(decay, "ROWS", 4)
    half = decay.influence(0.0, (1, 9, 17, 33), seeds=1)
    assert half[1] < half[0] / 10  # σ(0) = 1/2 at every token
    assert half[2] < half[0] / 1e2
    assert half[3] < half[0] / 1e5
    wide = decay.influence(3.0, (1, 33), seeds=1)
    assert wide[1] > wide[0] / 3  # σ(3)³² = 0.21, and more through the gates


@pytest.mark.parametrize("name", decay.ASKED)
def test_the_distances_drawn_are_those_of_the_recipes(name):
    task = find_recipe(name)().task.build(0)
    asked = task.batch("valid", 0, 1)["ask"][0]
    assert decay.ASKED[name] == (task.distance, int(asked[-1]))  # the first token may answer
    assert int(asked[0]) - task.distance > 0


def test_the_figure_is_drawn_and_the_numbers_are_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(decay, "DISTANCES", (1, 2, 4))
    made, study = tmp_path / "made", tmp_path / "decay.jsonl"
    assert decay.main(["--seeds", "1", "--output", str(made), "--record", str(study)]) == 0
    assert all((made / f"decay-{t}.png").stat().st_size > 10_000 for t in ("light", "dark"))
    shown = capsys.readouterr().out
    assert [line.split()[1] for line in shown.splitlines()[1:5]] == ["0", "1", "3", "5"]
    (record,) = read_records([study])
    assert record["result"]["0"].keys() == {"1", "2", "4"}


def test_no_memory_to_average_over_is_refused_and_draws_nothing(tmp_path, capsys):
    with pytest.raises(SystemExit):
        decay.main(["--seeds", "0", "--output", str(tmp_path / "made")])
    assert "--seeds: expected 1 or more, got 0" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()
