"""Tensors and products that the tests of the numeric contract share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlsp.numerics.products import Product, Products, Shape

TILE = 32
LEAF = Products(TILE)


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def mixed(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of mixed size and sign: sums of three or more of them depend on the order."""
    scale = torch.exp2(draw(seed + 1, *shape, dtype=torch.float64) * 6)
    return (draw(seed, *shape, dtype=torch.float64) * scale).to(dtype)


def wide(*shapes: tuple[Product, int, int]) -> Products:
    return LEAF.certified(frozenset(Shape(*shape) for shape in shapes))


def one_after_the_other(x: Tensor) -> Tensor:
    """Sum the leading dimension in the naive order."""
    total = x[0]
    for addend in x[1:]:
        total = total + addend
    return total


def gradients(function: Callable[..., Tensor], dy: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Differentiate in float64."""
    leaves = [x.double().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*leaves), leaves, dy.double())


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())
