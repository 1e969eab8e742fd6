"""The diagnostics are what they say: targets, ceilings and distances recomputed in NumPy."""

import itertools

import numpy as np
import pytest
import torch

from tensor_memory_lab.tasks import occlusion
from tensor_memory_lab.tasks.binding import BindingConfig
from tensor_memory_lab.tasks.map_building import MapConfig
from tensor_memory_lab.tasks.no_harm import NoHarmConfig
from tensor_memory_lab.tasks.occlusion import OcclusionConfig


def rows_of(config, count=200, split="test"):
    """The rows of a split as NumPy arrays, one dict per row."""
    batch = {name: x.numpy() for name, x in config.build(0).batch(split, 0, count).items()}
    for row in range(count):
        yield {name: array[row] for name, array in batch.items()}


def nearest_write(row, at):
    writes = np.flatnonzero(row["kind"] == 0)
    return min(writes, key=lambda i: np.sum((row["place"][i] - row["place"][at]) ** 2))


@pytest.mark.parametrize("gap", [0, 5])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_binding_asks_for_the_value_written_nearest(noise, gap):
    config = BindingConfig(writes=20, noise=noise, gap=gap)
    distance = config.build(0).distance
    for row in rows_of(config):
        assert row["kind"].tolist() == [0] * 20 + [2] * gap + [1] * 4
        assert not row["value"][20:].any()
        assert not row["place"][20 : 20 + gap].any()
        for at, target in zip(row["ask"], row["target"], strict=True):
            nearest = nearest_write(row, at)
            assert row["value"][nearest] == target
            assert at - nearest >= distance == gap + 1
            if noise == 0:
                assert (row["place"][nearest] == row["place"][at]).all()


def test_places_are_drawn_from_all_of_the_cube_around_zero():
    places = BindingConfig(writes=20).build(0).batch("test", 0, 512)["place"][:, :20]
    low, high = places.amin((0, 1)), places.amax((0, 1))
    assert ((low >= -1) & (low < -0.99)).all()
    assert ((high <= 1) & (high > 0.99)).all()
    assert (places.mean((0, 1)).abs() < 0.02).all()


def test_noise_on_a_query_has_the_stated_spread():
    config = BindingConfig(writes=1, noise=0.05)
    batch = config.build(0).batch("test", 0, 4096)
    moved = batch["place"][:, 1:] - batch["place"][:, :1]
    assert float(moved.std()) == pytest.approx(0.05, rel=0.02)
    assert float(moved.mean()) == pytest.approx(0, abs=0.001)


def test_the_source_of_a_query_is_ambiguous_and_its_ceiling_is_the_posterior_mode():
    config = BindingConfig(writes=20, noise=0.1, target="source")
    assert BindingConfig(writes=20, noise=0.1).build(0).ceiling("test") == 1.0
    assert BindingConfig(noise=0.0, target="source").build(0).ceiling("test") == 1.0
    right = nearest = total = 0
    for row in rows_of(config, 1500):
        places, values = row["place"][:20].astype(np.float64), row["value"][:20]
        for at, target in zip(row["ask"], row["target"], strict=True):
            squared = np.sum((places - row["place"][at]) ** 2, axis=1)
            weights = np.exp(-squared / (2 * 0.1**2))
            best = max(set(values.tolist()), key=lambda v: weights[values == v].sum())
            right += int(best == target)
            nearest += int(values[squared.argmin()] == target)
            total += 1
    assert config.build(0).ceiling("test") == pytest.approx(right / total, abs=0.015)
    assert 0.93 < nearest / total <= right / total + 0.005 < 0.98


@pytest.mark.parametrize("gap", [0, 4])
def test_map_patches_show_one_grid_and_the_answer_is_its_cell(gap):
    config = MapConfig(observations=32, queries=3, gap=gap)
    seen_right = seen_total = 0
    for row in rows_of(config, 300):
        grid, last_seen = {}, {}
        for t, token in enumerate(row["features"][:32]):
            top, left = np.rint((token[4:6] + 1) * 3.5).astype(int)
            assert token[6] == 0
            for cell, (down, right) in zip(
                token[:4], itertools.product((0, 1), (0, 1)), strict=True
            ):
                where = (top + down, left + right)
                assert grid.setdefault(where, cell) == cell  # patches never contradict each other
                last_seen[where] = t
        for blank in row["features"][32 : 32 + gap]:
            assert blank.tolist() == [0, 0, 0, 0, 0, 0, -1]
        for at, target in zip(row["ask"], row["target"], strict=True):
            token = row["features"][at]
            assert token[6] == 1
            assert not token[:4].any()
            where = tuple(np.rint((token[4:6] + 1) * 3.5).astype(int).tolist())
            assert set(where) <= set(range(8))
            if where in grid:
                assert grid[where] == target
                assert at - last_seen[where] >= config.build(0).distance == gap + 1
            seen_right += int(where in grid)
            seen_total += 1
    ceiling = config.build(0).ceiling("test")
    assert seen_right / seen_total == pytest.approx(2 * ceiling - 1, abs=0.05)


@pytest.mark.parametrize(
    ("observations", "published"), [(8, 0.696), (16, 0.808), (32, 0.917), (64, 0.979), (128, 0.997)]
)
def test_the_map_ceiling_is_what_a_simulation_gives(observations, published):
    ceiling = MapConfig(observations=observations).build(0).ceiling("test")
    rng = np.random.default_rng(0)
    corners = rng.integers(7, size=(40_000, observations, 2), dtype=np.int8)
    cells = rng.integers(8, size=(40_000, 1, 2), dtype=np.int8)
    seen = ((cells - corners >= 0) & (cells - corners <= 1)).all(-1).any(-1)
    assert ceiling == pytest.approx(1 - (~seen).mean() / 2, abs=0.005)
    assert ceiling == pytest.approx(published, abs=0.002)


def bounce(place, velocity):
    """One frame of one ball along one axis, walls by hand."""
    place += velocity
    if place > occlusion.HIGH:
        return 2 * occlusion.HIGH - place, -velocity
    if place < occlusion.LOW:
        return 2 * occlusion.LOW - place, -velocity
    return place, velocity


def test_a_ball_moves_straight_and_bounces_at_the_walls():
    task = OcclusionConfig().build(0)
    paths = task.paths(300, torch.Generator().manual_seed(0)).double().numpy()
    turned = 0
    for path in paths:
        for axis in (0, 1):
            steps = np.diff(path[:, axis])
            # The speed of the only steps that no wall cuts short is the speed of all.
            speed = np.abs(steps).max()
            assert occlusion.SPEED[0] - 1e-5 <= speed <= occlusion.SPEED[1] + 1e-5
            fits = False
            for sign in (1, -1):
                place, velocity, ok = path[0, axis], sign * speed, True
                for t in range(1, 8):
                    place, velocity = bounce(place, velocity)
                    ok = ok and abs(place - path[t, axis]) < 1e-4
                fits = fits or ok
            assert fits
            turned += int(len(set(np.sign(steps))) > 1)
    assert turned > 100  # walls matter: a third of the paths turn


def test_the_drawn_ball_keeps_its_centre_and_its_quadrant():
    config = OcclusionConfig(hidden=0)
    for row in rows_of(config, 100):
        frame = row["frames"][-1].astype(np.float64)
        down, right = np.mgrid[0:16, 0:16]
        centre = (frame * down).sum() / frame.sum(), (frame * right).sum() / frame.sum()
        assert row["target"][0] == 2 * int(centre[0] >= 7.5) + int(centre[1] >= 7.5)
        assert frame.max() <= 1


@pytest.mark.parametrize("hidden", range(9))
def test_published_occlusion_shows_the_answer_in_its_last_frame_below_eight(hidden):
    config = OcclusionConfig("published", hidden=hidden, test_rows=2048)
    task = config.build(0)
    assert task.facts()["solvable_from_last_frame"] is (hidden < 8)
    right = 0
    for row in rows_of(config, 200):
        assert (row["frames"].sum((1, 2)) == 0).sum() == hidden
        last = row["frames"][-1]
        halves = last[8:].sum() > last[:8].sum(), last[:, 8:].sum() > last[:, :8].sum()
        right += int(row["target"][0] == 2 * int(halves[0]) + int(halves[1]))
    assert right == 200 if hidden < 8 else right < 100
    assert task.ceiling("test") == (1.0 if hidden < 8 else pytest.approx(0.25, abs=0.02))


@pytest.mark.parametrize("hidden", [1, 4, 7])
def test_valid_occlusion_draws_the_same_occluder_over_the_last_frames_of_every_clip(hidden):
    config = OcclusionConfig("valid", hidden=hidden)
    task = config.build(0)
    assert task.distance == 16 * hidden
    assert task.facts()["solvable_from_last_frame"] is False
    for row in rows_of(config, 50):
        assert (row["frames"][8 - hidden :] == occlusion.OCCLUDER).all()
        assert (row["frames"][: 8 - hidden].max((1, 2)) > occlusion.OCCLUDER).all()


def test_extrapolation_from_the_visible_frames_alone_ends_where_the_ball_ends():
    for hidden in range(1, 6):
        assert (
            OcclusionConfig("valid", hidden=hidden, test_rows=2048).build(0).ceiling("test") == 1.0
        )
    # Two frames cannot always tell a bounce from a slower flight; one tells no velocity at all.
    assert 0.9 < OcclusionConfig("valid", hidden=6, test_rows=2048).build(0).ceiling("test") < 1.0
    assert 0.4 < OcclusionConfig("valid", hidden=7, test_rows=2048).build(0).ceiling("test") < 0.6
    assert OcclusionConfig("valid", hidden=8, test_rows=2048).build(0).ceiling(
        "test"
    ) == pytest.approx(0.25, abs=0.02)


def test_one_visible_frame_is_worth_what_trying_all_velocities_gives():
    rng = np.random.default_rng(0)
    place = rng.uniform(occlusion.LOW, occlusion.HIGH, size=400)
    speed = rng.uniform(*occlusion.SPEED, size=4000) * rng.choice([-1, 1], size=4000)
    width = occlusion.HIGH - occlusion.LOW
    phase = np.mod(place[:, None] + 7 * speed - occlusion.LOW, 2 * width)
    end = np.where(phase > width, 2 * width - phase, phase) + occlusion.LOW
    high = (end >= 7.5).mean(1)
    one_axis = np.maximum(high, 1 - high).mean()
    ceiling = OcclusionConfig("valid", hidden=7, test_rows=2048).build(0).ceiling("test")
    assert ceiling == pytest.approx(one_axis**2, abs=0.02)


@pytest.mark.parametrize("lag", [0, 1, 8])
def test_no_harm_asks_for_the_symbol_that_lag_says(lag):
    config = NoHarmConfig(lag=lag)
    task = config.build(0)
    assert (task.distance, task.ceiling("test")) == (lag, 1.0)
    for row in rows_of(config, 100):
        assert row["ask"].tolist() == list(range(lag, 32))
        for at, target in zip(row["ask"], row["target"], strict=True):
            assert row["symbols"][at - lag] == target
