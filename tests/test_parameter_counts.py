"""How many weights, under which names: the paper's sizes, and weights that can be exchanged."""

import pytest
from torch import nn

from memories import OPTIONS
from tensor_memory import MemoryConfig, TensorMemory


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def expected_count(d: int, config: MemoryConfig) -> int:
    """Term by term from the equations."""
    C, K, n = config.channels, config.chunk_size, config.axes
    R, M = config.read_heads, config.write_heads
    coordinate_heads = R if config.share_coordinates else R + M
    return (
        d * K * d  # write summary
        + coordinate_heads * n * d
        + M * C * d  # content
        + (M * d + M if config.write == "gaussian" else 0)  # spread, the one head with a bias
        + (n * 2 * C * 3 if config.mixing == "factorized" else 0)  # taps
        + 4 * C * 2 * C  # mix
        + 4 * C
        + d * R * C  # output
    )


@pytest.mark.parametrize(
    ("d", "C", "K", "grid", "expected"),
    [
        (384, 32, 16, (8, 8, 8), 2_394_305),
        (256, 64, 8, (8, 8, 8), 592_257),
        (192, 16, 16, (4, 4, 4), 599_137),
    ],
)
def test_the_papers_memories_have_these_very_counts(d, C, K, grid, expected):
    config = MemoryConfig(channels=C, grid=grid, chunk_size=K)
    assert count(TensorMemory(d, config)) == expected == expected_count(d, config)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_has_the_count_of_its_equations(option):
    config = OPTIONS[option]
    assert count(TensorMemory(7, config)) == expected_count(7, config)


def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in module.state_dict().items()}


def test_names_and_shapes_are_the_fixed_ones():
    d, C, K = 6, 2, 4
    config = MemoryConfig(channels=C, grid=(2, 3, 4), chunk_size=K)
    assert shapes(TensorMemory(d, config)) == {
        "taps": (3, 2 * C, 3),
        "write_proj.weight": (d, K * d),
        "coordinate.weight": (3, d),
        "content.weight": (C, d),
        "spread.weight": (1, d),
        "spread.bias": (1,),
        "mix.weight": (4 * C, 2 * C),
        "mix.bias": (4 * C,),
        "output.weight": (d, C),
    }


@pytest.mark.parametrize(
    ("options", "gone", "there"),
    [
        (
            {"read_heads": 2, "write_heads": 2},
            (),
            {
                "coordinate.weight": (2 * 3, 6),
                "content.weight": (2 * 2, 6),
                "spread.weight": (2, 6),
                "spread.bias": (2,),
                "output.weight": (6, 2 * 2),
            },
        ),
        (
            {"share_coordinates": False, "read_heads": 3, "write_heads": 2},
            ("coordinate.weight",),
            {
                "read_coordinate.weight": (3 * 3, 6),
                "write_coordinate.weight": (2 * 3, 6),
                "content.weight": (2 * 2, 6),
                "spread.weight": (2, 6),
                "spread.bias": (2,),
                "output.weight": (6, 3 * 2),
            },
        ),
        ({"write": "nearest"}, ("spread.weight", "spread.bias"), {}),
        ({"mixing": "pointwise"}, ("taps",), {}),
        ({"reads": "token"}, (), {}),
        ({"grid": (5,)}, (), {"coordinate.weight": (1, 6), "taps": (1, 4, 3)}),
        ({"grid": (2, 2, 2, 2)}, (), {"coordinate.weight": (4, 6), "taps": (4, 4, 3)}),
    ],
)
def test_each_option_changes_only_its_own_names(options, gone, there):
    base = {"channels": 2, "grid": (2, 3, 4), "chunk_size": 4}
    expected = shapes(TensorMemory(6, MemoryConfig(**base)))
    for name in gone:
        del expected[name]
    assert shapes(TensorMemory(6, MemoryConfig(**base | options))) == expected | there
