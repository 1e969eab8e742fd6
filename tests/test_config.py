"""MemoryConfig: a frozen value that checks itself and survives JSON."""

import dataclasses
import json

import pytest
from hypothesis import given

from memories import configs
from tensor_memory import MemoryConfig


@given(config=configs())
def test_a_config_survives_json(config):
    assert MemoryConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_config_cannot_be_changed_and_can_be_a_key():
    config = MemoryConfig(grid=(4, 4))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.channels = 3
    assert {config: 1}[MemoryConfig(grid=(4, 4))] == 1


def test_a_grid_given_as_a_list_becomes_a_tuple():
    assert MemoryConfig(grid=[2, 3]) == MemoryConfig(grid=(2, 3))


@pytest.mark.parametrize(
    ("grid", "axes", "voxels"), [((5,), 1, 5), ((2, 3, 4), 3, 24), ((2, 2, 2, 3), 4, 24)]
)
def test_derived_sizes(grid, axes, voxels):
    config = MemoryConfig(channels=3, grid=grid)
    assert (config.axes, config.voxels, config.state_values) == (axes, voxels, 6 * voxels)


def test_a_partial_dictionary_takes_the_papers_defaults():
    assert MemoryConfig.from_dict({"channels": 8}) == MemoryConfig(channels=8)


def test_an_unknown_field_is_named_beside_the_known():
    with pytest.raises(ValueError, match=r"unknown field chanels, depth; known are channels, grid"):
        MemoryConfig.from_dict({"chanels": 8, "depth": 2})


@pytest.mark.parametrize("name", ["channels", "chunk_size", "read_heads", "write_heads"])
@pytest.mark.parametrize("value", [0, -3])
def test_counts_below_one_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"^{name}: expected at least 1, got {value}; leave it"):
        MemoryConfig(**{name: value})


@pytest.mark.parametrize("name", ["channels", "chunk_size", "read_heads", "write_heads"])
@pytest.mark.parametrize("value", [2.0, "2", True, None])
def test_counts_that_are_no_integers_are_refused(name, value):
    with pytest.raises(TypeError, match=rf"^{name}: expected an integer, got {value!r}; convert"):
        MemoryConfig(**{name: value})


@pytest.mark.parametrize("size", [1, 0, -2])
def test_an_axis_below_two_voxels_is_refused(size):
    message = rf"^grid: expected at least 2 voxels .*, got \(4, {size}\); drop the axis instead"
    with pytest.raises(ValueError, match=message):
        MemoryConfig(grid=(4, size))


@pytest.mark.parametrize("grid", [(), (2,) * 5])
def test_a_grid_of_no_or_too_many_axes_is_refused(grid):
    message = rf"^grid: expected 1 to 4 axes, got {len(grid)}; give the voxels of each axis"
    with pytest.raises(ValueError, match=message):
        MemoryConfig(grid=grid)


@pytest.mark.parametrize("grid", [8, (8.0, 8), ("8",), "88", (True, 4), None])
def test_a_grid_that_is_no_tuple_of_integers_is_refused(grid):
    with pytest.raises(TypeError, match=r"^grid: expected a tuple of integers, got .*; write it"):
        MemoryConfig(grid=grid)


NUMBERS = ["sigma_scale", "spread_bias", "forget_bias", "input_bias", "feedback", "gain"]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", None, True])
def test_numbers_that_are_not_finite_are_refused(name, value):
    message = rf"^{name}: expected a finite number, got {value!r}; leave it out for the default"
    with pytest.raises(ValueError, match=message):
        MemoryConfig(**{name: value})


@pytest.mark.parametrize("value", [0.0, -1.0])
@pytest.mark.parametrize("name", ["sigma_scale", "gain"])
def test_a_scale_that_is_not_positive_is_refused(name, value):
    message = rf"^{name}: expected a positive number, got {value}; leave it out"
    with pytest.raises(ValueError, match=message):
        MemoryConfig(**{name: value})


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("reads", "chunk, token"),
        ("write", "gaussian, nearest"),
        ("mixing", "factorized, pointwise"),
    ],
)
def test_an_unknown_choice_is_named_beside_the_known(name, allowed):
    message = rf"^{name}: expected one of {allowed}, got 'other'; leave it out for the default"
    with pytest.raises(ValueError, match=message):
        MemoryConfig(**{name: "other"})


def test_a_backend_that_is_no_name_and_a_choice_that_is_no_bool_are_refused():
    with pytest.raises(TypeError, match=r"^backend: expected a backend's name, got None; leave it"):
        MemoryConfig(backend=None)
    with pytest.raises(TypeError, match=r"^share_coordinates: expected True or False, got 'no'"):
        MemoryConfig(share_coordinates="no")


def test_what_is_no_dictionary_is_refused():
    message = r"^MemoryConfig.from_dict: expected a dictionary of fields, got list; pass what to_di"
    with pytest.raises(TypeError, match=message):
        MemoryConfig.from_dict([32])


def test_shared_coordinates_need_as_many_reads_as_writes():
    message = r"need as many read heads as write heads, got 2 and 1; set share_coordinates=False"
    with pytest.raises(ValueError, match=message):
        MemoryConfig(read_heads=2)
    assert MemoryConfig(read_heads=2, share_coordinates=False).read_heads == 2


def test_the_presets_are_complete_and_take_changes():
    assert MemoryConfig.paper() == MemoryConfig()
    assert MemoryConfig.paper(channels=64, chunk_size=8) == MemoryConfig(channels=64, chunk_size=8)
    assert MemoryConfig.long_gap() == MemoryConfig(
        channels=16,
        grid=(6, 6, 6),
        chunk_size=1,
        forget_bias=5.0,
        spread_bias=-1.0,
        feedback=0.0,
        gain=4.0,
    )
    assert MemoryConfig.long_gap(grid=(4, 4), gain=1.0).grid == (4, 4)
    with pytest.raises(TypeError, match="chanels"):
        MemoryConfig.long_gap(chanels=3)
