"""Exact sums: floating-point leaves become integers of a fixed unit, and integers add in any order."""

from __future__ import annotations

import math

import torch
from torch import Tensor

HEADROOM_BITS = 62


def leaf_bound(lsb: int, leaves: int) -> float:
    """Return the magnitude below which `leaves` addends of unit 2^-lsb cannot overflow 62 bits (NUMERICS rule 6)."""
    return 2.0 ** (HEADROOM_BITS - lsb - math.ceil(math.log2(max(leaves, 1))))


def within(leaves: Tensor, bound: float) -> Tensor:
    """Return a bool scalar: every element is finite and smaller than `bound` in magnitude (NaN fails)."""
    return leaves.abs().amax() < bound if leaves.numel() else torch.tensor(True)


def to_fixed(x: Tensor, lsb: int) -> Tensor:
    """Round `x` half to even to int64 units of 2^-lsb, through float64 (exact there but for the one rounding)."""
    return torch.round(x.to(torch.float64) * 2.0**lsb).to(torch.int64)


def from_fixed(total: Tensor, lsb: int, divisor: int = 1) -> Tensor:
    """Return total·2^-lsb / divisor: one float64 division after the sum, then one rounding to float32."""
    return (total.to(torch.float64) * 2.0**-lsb / divisor).to(torch.float32)


def vanished(leaves: Tensor, fixed: Tensor) -> tuple[int, int]:
    """Count nonzero leaf elements and those of them that rounded to zero."""
    nonzero = leaves != 0
    return int(nonzero.sum()), int((nonzero & (fixed == 0)).sum())
