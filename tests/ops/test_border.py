"""Places on the border of a grid, with the slope of clamp of every PyTorch."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tensor_memory.ops.places.addresses import voxel_coordinate
from tensor_memory.ops.scan.reference import voxel_position
from tensor_memory.ops.scan.torch.sampling import corners


def meeting_point(at: Tensor) -> Tensor:
    """Where the two voxels of a read meet in proportion to their weights."""
    index, weight = corners(at[:, None], (3,))
    return (index * weight).sum(-1)


@pytest.mark.whole_cross
@pytest.mark.parametrize("since_2_15", [False, True])
@pytest.mark.parametrize(
    "voxels",
    [lambda at: voxel_coordinate(at, 3, False), lambda at: voxel_position(at, 3), meeting_point],
    ids=["place memory", "reference", "reads"],
)
def test_a_place_on_the_border_has_the_slope_of_those_inside(voxels, since_2_15, monkeypatch):
    if since_2_15:  # its clamp has no slope on its bounds; hardtanh never had one
        without_slope = lambda x, min=-math.inf, max=math.inf: F.hardtanh(x, min, max)  # noqa: E731
        monkeypatch.setattr(Tensor, "clamp", without_slope)
    at = torch.tensor([-2.0, -1, 0, 1, 2, math.nan], requires_grad=True)
    found = voxels(at)
    assert found[:5].tolist() == [0, 0, 1, 2, 2]
    assert found[5].isnan()
    (slope,) = torch.autograd.grad(found[:5].sum(), at)
    assert slope[:5].tolist() == [0, 1, 1, 1, 0]
