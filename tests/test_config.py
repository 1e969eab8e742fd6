"""MemoryConfig: a frozen value that checks itself and survives JSON."""

import dataclasses
import itertools
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


COUNTS = ("channels", "chunk_size", "read_heads", "write_heads")
NUMBERS = ("sigma_scale", "spread_bias", "forget_bias", "input_bias", "feedback", "gain")
CHOICES = {"reads": "chunk, token", "write": "gaussian, nearest", "mixing": "factorized, pointwise"}
REFUSED = [
    (COUNTS, (0, -3, 10**30), ValueError, "expected at least 1 and at most .*, got {}; leave it"),
    (["checkpoint_every"], (float("nan"), 2.0), TypeError, "expected an integer, got {}; convert"),
    (COUNTS, (2.0, "2", True, None), TypeError, "expected an integer, got {}; convert"),
    (["grid"], ((4, 1), (4, 0), (4, -2)), ValueError, "expected at least 2 voxels .*; drop the ax"),
    (["grid"], ((), (2,) * 5), ValueError, r"expected 1 to 4 axes, got [05]; give the voxels of e"),
    (["grid"], ((10**6, 10**6),), ValueError, "expected at most 2,147,483,647 voxels, got"),
    (
        ["grid"],
        (8, (8.0, 8), ("8",), "88", (True, 4), None, b"88"),
        TypeError,
        "expected a tuple of int",
    ),
    (
        NUMBERS,
        (float("nan"), float("inf"), "1", None, True, 10**30, -(10**400)),
        ValueError,
        r"expected a number from -1e\+06 to 1e\+06, got .*; leave it out for the default",
    ),
    (["sigma_scale", "gain"], (0.0, -1.0), ValueError, "expected a positive number, got {}; leave"),
    *(
        (
            [name],
            ["other"],
            ValueError,
            f"expected one of {known}, got {{}}; leave it out for the d",
        )
        for name, known in CHOICES.items()
    ),
    (["backend"], [None], TypeError, "expected a backend's name, got None; leave it"),
    (["share_coordinates"], ["no"], TypeError, "expected True or False, got 'no'"),
]


@pytest.mark.parametrize(("names", "values", "error", "message"), REFUSED)
def test_a_value_that_makes_no_memory_is_refused_by_its_field(names, values, error, message):
    for name, value in itertools.product(names, values):
        with pytest.raises(error, match=f"^{name}: {message.format(repr(value))}"):
            MemoryConfig(**{name: value})


def test_what_is_no_dictionary_is_refused():
    message = r"^MemoryConfig.from_dict: expected a dictionary of fields, got list; pass what to_di"
    with pytest.raises(TypeError, match=message):
        MemoryConfig.from_dict([32])


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
