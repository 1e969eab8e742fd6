"""A product that copies transposed matrices is the product, with both derivatives."""

import pytest
import torch

from tensor_memory.ops import products
from tolerances import assert_same


@pytest.fixture(autouse=True)
def _as_on_arm(monkeypatch):
    monkeypatch.setattr(products, "COPY_TRANSPOSED", True)


def drawn():
    a = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    b = torch.randn(2, 3, 2, 5, dtype=torch.float64, requires_grad=True)
    return a, b


def test_it_is_the_product_with_its_first_and_second_derivatives():
    a, b = drawn()
    assert_same(products.product(a, b.mT), a @ b.mT)
    assert torch.autograd.gradcheck(lambda a, b: products.product(a, b.mT), (a, b))
    assert torch.autograd.gradgradcheck(lambda a, b: products.product(a, b.mT), (a, b))


def test_a_transform_sees_a_plain_product():
    a, b = drawn()
    found = torch.func.grad(lambda b: products.product(a.detach(), b.mT).square().sum())(b.detach())
    (expected,) = torch.autograd.grad((a @ b.mT).square().sum(), b)
    assert_same(found, expected)
