"""How closely two computations of the same thing must agree, per float type; the only such table.

float64 is judged absolutely by the project's 1e-10. The others allow a few hundred roundings of
values of order one: the type's machine epsilon times what the longest sums in the tests gather.
"""

import torch
from torch import Tensor

TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 6e-2,
}


def assert_same(got: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """Equal shapes, and values within `dtype`'s tolerance (by default that of `got`)."""
    tolerance = TOLERANCE[dtype or got.dtype]
    torch.testing.assert_close(
        got.double(), expected.double(), rtol=tolerance, atol=tolerance, check_device=False
    )
