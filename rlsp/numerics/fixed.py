"""Exact sums: floating-point leaves become integers of a fixed unit, and integers add in any order."""

from __future__ import annotations

import math

import torch
from torch import Tensor

HEADROOM_BITS = 62


def leaf_bound(lsb: int, leaves: int) -> float:
    """Return the magnitude below which `leaves` addends in units of 2^-lsb cannot overflow (NUMERICS rule 6).

    Args:
        lsb: Unit of the sum, 2^-lsb.
        leaves: Addends of one element over all ranks; fewer than 1 counts as 1.

    Returns:
        2^(62 − lsb − ceil(log2 leaves)): the sum of the rounded addends stays within 62 bits and a sign.
    """
    return 2.0 ** (HEADROOM_BITS - lsb - math.ceil(math.log2(max(leaves, 1))))


def within(leaves: Tensor, bound: float) -> Tensor:
    """Return a bool scalar: every element is finite and smaller than `bound` in magnitude (NaN fails)."""
    if not leaves.numel():
        return torch.ones((), dtype=torch.bool, device=leaves.device)
    return leaves.abs().amax() < bound


def to_fixed(x: Tensor, lsb: int) -> Tensor:
    """Round `x` half to even to int64 units of 2^-lsb; float64 holds the product exactly, so it rounds once.

    What is not finite or does not fit becomes some integer, silently: ask `within` first.
    """
    return torch.round(x.to(torch.float64) * 2.0**lsb).to(torch.int64)


def from_fixed(total: Tensor, lsb: int, divisor: int = 1) -> Tensor:
    """Return total·2^-lsb / divisor: one float64 division after the sum, then one rounding to float32."""
    return (total.to(torch.float64) * 2.0**-lsb / divisor).to(torch.float32)


def vanished(leaves: Tensor, fixed: Tensor) -> Tensor:
    """Count nonzero leaf elements, and those of them that rounded to zero in `fixed`: int64 [2]."""
    nonzero = torch.count_nonzero(leaves)
    return torch.stack((nonzero, nonzero - torch.count_nonzero(fixed)))
