"""The remembered maze: layouts, walks and questions; every method in tiny mazes."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import nn

from maze_data import scattered, write_layouts
from sampled import exhaustive_but
from small_models import small
from tensor_memory import PlaceConfig, find_leak
from tensor_memory_lab.models.maze import MazeModel, MazeModelConfig
from tensor_memory_lab.models.world import METHODS
from tensor_memory_lab.recipes.maze import maze
from tensor_memory_lab.tasks.maze import FAR, FREE, OBJECT, SETTINGS, WALL, Maze, MazeConfig, main
from tensor_memory_lab.train import RunOptions, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Layouts of 9 × 9 and what other sizes there are of it."""
    made = tmp_path_factory.mktemp("mazes")
    for side, count in ((9, 26), (11, 26), (7, 8), (17, 2), (25, 1)):
        write_layouts(made, side, count)
    return made


def config_for(folder, **changes) -> MazeConfig:
    small = {"side": 9, "steps": 90, "layouts": 12, "valid_rows": 6, "test_rows": 8}
    return MazeConfig(cache_dir=str(folder), **small | changes)


@pytest.fixture(scope="module")
def task(folder) -> Maze:
    return config_for(folder).build(0)


def test_layouts_of_splits_are_different_and_kept(folder, task):
    known = task.layouts("train")
    assert len({layout.tobytes() for layout in known}) == len(known) == 8 + 6 + 12
    assert known[:, [0, -1]].all()
    assert known[:, :, [0, -1]].all()
    # Opened once more, with no generator at hand.
    assert np.array_equal(config_for(folder).build(3).layouts("test"), known)


def test_without_layouts_and_without_labmaze_the_error_names_both(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "labmaze", None)
    complaint = "expected layouts of {0} × {0} cells .* or the package labmaze.*pip install labmaze"
    with pytest.raises(ModuleNotFoundError, match=complaint.format(9)):
        config_for(tmp_path).build(0)
    assert not list(tmp_path.glob("*.npy"))
    write_layouts(tmp_path, 9, 26)
    with pytest.raises(ModuleNotFoundError, match=complaint.format(17)):  # not after training
        config_for(tmp_path, tests=("test@large",)).build(0)


def test_more_layouts_than_there_are_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("tensor_memory_lab.tasks.maze._labmaze", lambda *_: scattered)
    with pytest.raises(ValueError, match=r"task.layouts: expected at most 16 different ones of 7"):
        config_for(tmp_path, side=7, layouts=30).build(0)


def test_layouts_of_every_size_are_listed_when_they_are_made(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tensor_memory_lab.tasks.maze._labmaze", lambda *_: scattered)
    flags = "--side 9 --layouts 3 --valid-rows 1 --test-rows 4 --tests test test@large test@larger"
    main([*flags.split(" "), "--cache-dir", str(tmp_path)])
    said = capsys.readouterr().out
    for count, side in ((8, 9), (1, 17), (1, 25)):
        assert f"{count} layouts of {side} × {side} cells" in said


@pytest.mark.skipif(find_spec("labmaze") is None, reason="labmaze is in the lab's extra [maze]")
def test_labmaze_makes_layouts_whose_free_cells_are_joined(tmp_path, capsys):
    flags = "--side 11 --layouts 3 --valid-rows 1 --test-rows 4 --tests test test@large"
    main([*flags.split(" "), "--cache-dir", str(tmp_path)])
    said = capsys.readouterr().out
    assert "8 layouts of 11 × 11" in said
    assert "1 layouts of 21 × 21" in said
    small = MazeConfig(cache_dir=str(tmp_path), layouts=3, valid_rows=1, test_rows=4)
    for walls in small.build(0).layouts("train"):
        free = {(int(y), int(x)) for y, x in np.argwhere(~walls)}
        reached, edge = set(), [min(free)]
        while edge:
            y, x = edge.pop()
            reached.add((y, x))
            near = {(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)}
            edge += [cell for cell in near if cell in free and cell not in reached]
        assert reached == free
        assert 20 < len(free) < 81


def replayed(actions, first=(0, 0, 0)):
    """Column, row and heading by what an agent did, one step after the other."""
    x, y, heading = first
    for action in actions:
        if action == 1:
            x, y = x + (0, 1, 0, -1)[heading], y + (-1, 0, 1, 0)[heading]
        heading = (heading + {2: 3, 3: 1}.get(action, 0)) % 4
        yield x, y, heading


def remembered(batch, row):
    """What one who writes down every view knows when each question comes, cell by cell."""
    known = {}
    for t, (x, y) in enumerate(batch["at"][row].tolist()):
        heading = batch["heading"][row, t].item()
        ahead = ((0, -1), (1, 0), (0, 1), (-1, 0))[heading]
        right = ((1, 0), (0, 1), (-1, 0), (0, -1))[heading]
        for number, what in enumerate(batch["view"][row, t].tolist()):
            far, side = 2 - number // 5, number % 5 - 2
            cell = (x + far * ahead[0] + side * right[0], y + far * ahead[1] + side * right[1])
            known[cell] = (what, t)
        yield t, known


@pytest.mark.parametrize("pose", ["given", "integrated"])
def test_who_remembers_everything_seen_answers_every_question(folder, pose):
    batch = config_for(folder, pose=pose).build(0).batch("test", 0, 4)
    for row in range(4):
        for t, known in remembered(batch, row):
            what, when = known[tuple(batch["asked"][row, t].tolist())]
            assert what == batch["target"][row, t]
            assert t - when == batch["age"][row, t]
    task = config_for(folder).build(0)
    right = nn.functional.one_hot(batch["target"], task.classes).float()
    sums = task.measure({"logits": right}, batch)
    assert all(s == n for name, (s, n) in sums.items() if name != "loss" and "guess" not in name)
    assert task.ceiling("test") == 1


def test_an_integrated_pose_is_the_sum_of_moves_and_turns(folder):
    told, given = (
        config_for(folder, pose=pose).build(0).batch("test", 0, 3)
        for pose in ("integrated", "given")
    )
    assert torch.equal(told["action"], given["action"])
    for row in range(3):
        start = given["at"][row, 0].tolist()
        for batch, first in (
            (told, (*told["at"][row, 0].tolist(), 0)),
            (given, (*start, given["heading"][row, 0].item())),
        ):
            path = list(replayed(batch["action"][row].tolist(), first))
            assert [[x, y] for x, y, _ in path] == batch["at"][row].tolist()
            assert [h for _, _, h in path] == batch["heading"][row].tolist()


@pytest.mark.parametrize("pose", ["given", "integrated"])
def test_every_cell_has_a_place_of_its_own_on_a_torus_as_wide_as_the_maze(folder, pose):
    told, given = (
        config_for(folder, pose=pose).build(0).batch("test", 0, 8) for pose in (pose, "given")
    )
    for row in range(8):
        turns = (told["where"][row] + 1) * 9 / 2  # of 9 cells
        assert torch.allclose(turns, turns.round(), atol=1e-5)
        places = [tuple(place) for place in (turns.round() % 9).tolist()]
        both = torch.stack([given["at"][row], given["asked"][row]], 1).flatten(0, 1)
        cells = [tuple(cell) for cell in both.tolist()]
        assert len(set(places)) == len(set(cells)) == len(set(zip(places, cells, strict=True)))


def test_a_walk_stays_on_free_cells_and_sees_most_of_a_maze(task):
    batch = task.batch("test", 0, 8)
    assert (batch["view"][..., 12] != WALL).all()  # the agent's own cell
    kinds = batch["view"].unique().tolist()
    assert kinds[:2] == [FREE, WALL]
    assert len(kinds) == 2 + task.config.colours
    assert min(len({tuple(at) for at in row}) for row in batch["at"].tolist()) > 10
    moves = (batch["at"][:, 1:] - batch["at"][:, :-1]).abs().sum(-1)
    assert torch.equal(moves == 1, batch["action"][:, 1:] == 1)


def test_most_questions_are_about_what_was_seen_long_ago(folder):
    batch = config_for(folder, side=11, steps=120).build(0).batch("test", 0, 8)
    late = batch["age"][:, 60:]
    assert (late > FAR).float().mean() > 0.5
    assert not (batch["age"][:, :40] > FAR).any()
    objects = (batch["target"] >= OBJECT).float().mean()
    assert 0.15 < objects < 0.6
    # The walls all around are never asked for: their place tells them.
    asked = ((batch["where"][:, 1::2] + 1) * 11 / 2).round()
    assert (asked.min(), asked.max()) == (1, 9)


def test_answers_are_told_apart_by_how_long_ago_a_cell_was_seen(task):
    batch = task.batch("test", 0, 8)
    wrong = (batch["target"] + (batch["age"] > FAR)) % task.classes
    sums = task.measure({"logits": nn.functional.one_hot(wrong, task.classes).float()}, batch)
    assert sums["accuracy_far"][0] == sums["accuracy_object"][0] == 0 < sums["accuracy_far"][1]
    assert sums["accuracy_near"][0] == sums["accuracy_near"][1] > 0
    assert sums["accuracy"][0] == sums["accuracy_near"][0]


def test_a_guess_knows_row_and_column_alone(task):
    batch = task.batch("test", 0, 8)
    cells = ((batch["where"][:, 1::2] + 1) * 9 / 2).round()
    for (x, y), guess in zip(cells.flatten(0, 1).tolist(), batch["guess"].flatten(), strict=True):
        assert guess == (WALL if x % 2 == y % 2 == 0 else FREE)
    far, right = batch["age"] > FAR, batch["guess"] == batch["target"]
    logits = nn.functional.one_hot(batch["target"], task.classes).float()
    told = task.measure({"logits": logits}, batch)["accuracy_guess_far"]
    assert [x.item() for x in told] == [(far & right).sum().item(), far.sum().item()]
    assert 0.4 < told[0] / told[1] < 0.9


def test_one_answer_to_all_has_a_third_of_the_metric(task):
    batch = task.batch("test", 0, 8)
    free = nn.functional.one_hot(torch.full_like(batch["target"], FREE), task.classes).float()
    sums = task.measure({"logits": free}, batch)
    means = task.finish({name: (s / n).item() for name, (s, n) in sums.items()})
    assert means["accuracy_far"] > 1 / 3
    assert means[task.metric] == pytest.approx(1 / 3)
    assert means["accuracy_guess_balanced"] > means[task.metric]
    assert math.isnan(task.finish({"accuracy_free": 1.0})[task.metric])  # a split without walls


def test_long_walks_are_several_and_a_batch_of_them_fits_beside_other_runs(folder):
    config, task = maze(), config_for(folder, tests=tuple(SETTINGS)).build(0)
    task.config = config.task
    assert min(task.rows(split) for split in SETTINGS) == 16
    tokens = 2 * config.task.steps * max(setting.times for setting in SETTINGS.values())
    # DeltaNet takes 24 kB a token: twelve runs need 75 GB.
    assert tokens * config.budget.evaluation_batch_size <= 2**18


def test_every_setting_is_a_split_of_its_own(folder):
    sizes = {"test": 1, "test@4x": 4, "test@small": 1, "test@large": 4, "test@large-same-grid": 4}
    task = config_for(folder, tests=tuple(sizes)).build(0)
    model = MazeModel(MazeModelConfig(**small("place-given")), task.classes, steps=90)
    memory = model.stack.blocks[1].side.memory
    for split, times in sizes.items():
        batch = task.batch(split, 0, 2)
        assert batch["at"].shape[1] == 90 * times
        assert batch["where"].abs().max() <= 1
        with torch.no_grad(), task.prepared(model, split):
            assert memory.config.grid == ((6, 6) if split == "test@large" else (3, 3))
            sums = task.measure(model(batch)[0], batch)
        assert math.isfinite(sums["loss"][0])
    assert memory.config.grid == (3, 3)
    large, same_grid = (task.batch(split, 0, 2) for split in list(sizes)[-2:])
    assert all(torch.equal(x, same_grid[name]) for name, x in large.items())
    with pytest.raises(ValueError, match=r"split: expected train, valid, test, .*got 'test@far'"):
        task.batch("test@far", 0, 1)
    for index in (-1, 4):
        with pytest.raises(IndexError, match=f"batch {index} of 2 rows: test has 8 rows"):
            task.batch("test", index, 2)


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"side": 10}, "side"),
        ({"side": 7, "tests": ("test@small",)}, "side"),
        ({"tests": ("test@far",)}, "tests"),
        ({"pose": "guessed"}, "pose"),
        ({"colours": 0}, "colours"),
    ],
)
def test_settings_that_make_no_maze_are_refused(wrong, name):
    with pytest.raises(ValueError, match=f"task.{name}: expected"):
        MazeConfig(**wrong)


def test_a_field_that_is_not_read_is_told_from_the_default_of_a_maze():
    with pytest.raises(ValueError, match=r"wrap: expected the default, \(True, True\), for win"):
        MazeModelConfig(method="window", place=PlaceConfig())  # a maze's is a torus


class Answers(nn.Module):
    """From what the tokens of a walk tell, side by side, to answers at every step."""

    def __init__(self, model, batch):
        super().__init__()
        self.model, self.batch = model, batch

    def forward(self, x):
        at, asked = x[..., :2], x[..., 2:]
        where = torch.stack([at, asked], 2).flatten(1, 2).tanh()
        return self.model(self.batch | {"at": at, "asked": asked, "where": where})[0]["logits"]


@pytest.mark.parametrize("method", exhaustive_but(("window", "place-given-delta", "gla"), METHODS))
def test_no_answer_depends_on_what_comes_later(method):
    model = MazeModel(MazeModelConfig(**small(method)), classes=4, steps=14)
    batch = {
        "view": torch.randint(4, (2, 14, 25), dtype=torch.uint8),
        "heading": torch.randint(4, (2, 14)),
        "action": torch.randint(4, (2, 14)),
    }
    report = find_leak(Answers(model, batch), torch.randn(2, 14, 4))
    assert not report, str(report)
    model = model.eval()
    told = torch.randn(2, 14, 4)
    later = batch | {"view": batch["view"].clone()}
    later["view"][:, 9:] = (later["view"][:, 9:] + 1) % 4
    with torch.no_grad():
        before, after = (Answers(model, b)(told) for b in (batch, later))
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9], after[:, 9])


def test_a_question_tells_the_place_alone(task):
    """Nothing that is told to a model says what is asked for but views, which are of before."""
    model = MazeModel(MazeModelConfig(**small("place-given")), task.classes, steps=90).eval()
    batch = task.batch("test", 0, 3)
    answers = {"target", "age", "guess"}
    other = batch | {name: (batch[name] + 1) % 8 for name in answers}
    with torch.no_grad():
        assert torch.equal(model(batch)[0]["logits"], model(other)[0]["logits"])
    # Of all that is told, the views alone change with what is in the cells.
    told = set(batch) - answers - {"view"}
    assert told == {"at", "asked", "where", "heading", "action"}


def test_given_places_are_the_agents_and_the_one_asked_for(task):
    model = MazeModel(MazeModelConfig(**small("place-given")), task.classes, steps=90)
    told = []
    memory = model.stack.blocks[1].side.memory
    memory.register_forward_pre_hook(lambda _, args, kw: told.append(kw["where"]), with_kwargs=True)
    batch = task.batch("test", 0, 2)
    model(batch)
    assert torch.allclose(told[0], batch["where"], atol=1e-6)
    between = (batch["asked"] - batch["at"]) * (2 / 9)
    assert torch.allclose(told[0][:, 1::2] - told[0][:, ::2], between, atol=1e-6)


def test_a_view_starts_as_loud_as_a_layer_whose_inputs_are_all_there(task):
    model = MazeModel(MazeModelConfig(**small("window")), task.classes, steps=90)
    with torch.no_grad():
        seen = model._viewed(task.batch("test", 0, 8))
    assert seen.std().item() == pytest.approx(3**-0.5, rel=0.2)  # as of N(0, 1) by nn.Linear


@pytest.mark.parametrize("pose", ["given", "integrated"])
def test_the_grid_goes_once_around_and_a_cell_has_as_many_voxels_in_a_larger_maze(folder, pose):
    task = config_for(folder, pose=pose, tests=("test", "test@large")).build(0)
    place = PlaceConfig(grid=(4, 6), channels=2, heads=1, wrap=True)
    config = MazeModelConfig(**small("place-given") | {"place": place})
    model, told = MazeModel(config, task.classes, steps=90), []
    memory = model.stack.blocks[1].side.memory
    memory.register_forward_pre_hook(lambda _, args, kw: told.append(kw["where"]), with_kwargs=True)
    for split, scale in {"test": 1, "test@large": 2}.items():
        batch = task.batch(split, 0, 2)
        with torch.no_grad(), task.prepared(model, split):
            model(batch)
        size = torch.tensor((6 * scale, 4 * scale))
        voxel = (told.pop() + 1) / 2 * (size - 1)  # a place of -1 is the first, of 1 the last
        around = (batch["where"] + 1) / 2
        assert torch.allclose(voxel, around * size, atol=1e-4)
        cells = 9 * scale * around
        assert torch.allclose(cells, cells.round(), atol=1e-4)


@pytest.mark.filterwarnings("ignore::tensor_memory.ForgettingWarning")  # the published start
@pytest.mark.parametrize("method", exhaustive_but(("place-given-delta",), METHODS))
def test_two_steps_of_every_method(folder, tmp_path, method):
    config = maze()
    config = replace(
        config,
        task=config_for(folder, tests=("test", "test@large")),
        model=MazeModelConfig(**small(method)),
        budget=replace(config.budget, steps=2, batch_size=2, evaluate_every=2),
        precision="float32",
    )
    record = train(config, RunOptions(tmp_path, quiet=True, device="cpu"))
    assert record["task"] == "maze 9x9"
    assert record["ceiling"] == {"test": 1.0, "test@large": 1.0}
    for split in ("test", "test@large"):
        assert 0 <= record["test"][split]["accuracy_far"] <= 1
    assert "cache_dir" not in record["facts"]
    assert record["finished"]
