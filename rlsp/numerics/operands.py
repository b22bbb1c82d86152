"""Operands for the start-up certificate, counter-based: what differs between machines is the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from rlsp.bits import same_bits
from rlsp.numerics.hashing import hash_words, shift_right

DISTINCT_COLUMNS = 256  # of a weight; a wider one repeats them, which costs no power and draws less
_DENORMAL_ROW, _LARGE_ROW = 2, 3
_DENORMAL_SCALE, _LARGE_SCALE = 2.0**-130, 2.0**60


def noise(seed: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return float32 multiples of 2^-23 in [−1, 1), keyed by `seed` and the index in the flat tensor."""
    words = hash_words(seed, torch.arange(torch.Size(shape).numel(), device=device))
    return (shift_right(words, 40).to(torch.float32) * 2.0**-23 - 1).view(shape)


def cancelling(
    rows: int, columns: int, k: int, seed: int, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Return x [rows, k] and w [columns, k] float32 with x·wᵀ = 0: the product's bits are rounding alone.

    x = [r, −r[p]] and w = [u, u[p]] for a permutation p; an odd k loses the last column, and so cancels but
    for one addend.
    """
    device = torch.device("cpu") if device is None else device
    half = -(-k // 2)
    r, u = noise(seed, (rows, half), device), noise(seed + 1, (min(columns, DISTINCT_COLUMNS), half), device)
    order = noise(seed + 2, (half,), device).argsort(stable=True)
    x, w = torch.cat((r, -r[:, order]), dim=1)[:, :k], torch.cat((u, u[:, order]), dim=1)[:, :k]
    return x.contiguous(), w.repeat(-(-columns // w.shape[0]), 1)[:columns].contiguous()


def with_extremes(x: Tensor) -> Tensor:
    """Scale one row of `x` to denormal numbers and one to large ones, where there are as many rows."""
    x = x.clone()
    x[_DENORMAL_ROW : _DENORMAL_ROW + 1] *= _DENORMAL_SCALE
    x[_LARGE_ROW : _LARGE_ROW + 1] *= _LARGE_SCALE
    return x


def agree(a: Tensor, b: Tensor) -> bool:
    """Tell whether two outputs have the same bits and are not all zero, which would show nothing."""
    return same_bits(a, b) and bool(a.any())
