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
    with pytest.raises(
        ValueError,
        match=r"expected the fields channels, grid, .* got an unknown field chanels, depth; l",
    ):
        MemoryConfig.from_dict({"chanels": 8, "depth": 2})


@pytest.mark.parametrize(
    ("grid", "bound"),
    [
        ((2,) * 5, "1 to 4 axes"),
        ((4, 1), "at least 2 voxels"),
        ((10**6, 10**6), "at most 2,147,483,647 voxels"),
    ],
)
def test_a_grid_of_too_few_or_too_many_axes_or_voxels_is_refused(grid, bound):
    with pytest.raises(ValueError, match=f"^grid: expected {bound}"):
        MemoryConfig(grid=grid)


def test_shared_coordinates_need_as_many_reads_as_writes():
    message = (
        r"expected as many read heads as write heads, .*, got 2 and 1; set share_coordinates=Fal"
    )
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
