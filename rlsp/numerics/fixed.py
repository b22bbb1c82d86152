"""Exact sums: floating-point leaves become integers of a fixed unit, and integers add in any order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rlsp.numerics import compiled

HEADROOM_BITS = 62
PIECE_ELEMENTS = 1 << 15  # of the leaves that are added at a time: what they pass through fits a core's cache
_FLOAT64_UNITS = 2.0**53  # float64 adds whole numbers exactly up to here


def leaf_bound(lsb: int, leaves: int) -> float:
    """Return the magnitude below which `leaves` addends in units of 2^-lsb cannot overflow (NUMERICS rule 6).

    Args:
        lsb: Unit of the sum, 2^-lsb.
        leaves: Addends of one element over all ranks; fewer than 1 counts as 1.

    Returns:
        2^(62 − lsb − ceil(log2 leaves)): the sum of the rounded addends stays within 62 bits and a sign.
    """
    return 2.0 ** (HEADROOM_BITS - lsb - math.ceil(math.log2(max(leaves, 1))))


def reach(leaves: Tensor, bound: float) -> Tensor:
    """Return a float scalar: the largest magnitude over `bound`; from 1 on is a breach, NaN where one is."""
    if not leaves.numel():
        return torch.zeros((), device=leaves.device)
    return leaves.abs().amax() / bound


def within(leaves: Tensor, bound: float) -> Tensor:
    """Return a bool scalar: every element is finite and smaller than `bound` in magnitude (NaN fails)."""
    return reach(leaves, bound) < 1


def to_fixed(x: Tensor, lsb: int) -> Tensor:
    """Round `x` half to even to int64 units of 2^-lsb; float64 holds the product exactly, so it rounds once.

    What is not finite or does not fit becomes some integer, silently: ask `within` first.
    """
    return torch.round(x.to(torch.float64) * 2.0**lsb).to(torch.int64)


def add_leaves(total: Tensor, leaves: Tensor, lsb: int, bound: float) -> tuple[Tensor, Tensor]:
    """Add leaves exactly, as `to_fixed(leaves, lsb).sum(dim=0)` would, a piece at a time.

    Args:
        total: int64 units of 2^-lsb [...], contiguous; changed in place.
        leaves: float32 or float64 [L, ...].
        lsb: The unit is 2^-lsb.
        bound: Magnitude below which every element must stay.

    Returns:
        Their `reach`; and int64 [2], as `vanished` counts.
    """
    if (done := compiled.add_leaves(total, leaves, 0, 2.0**lsb)) is not None:
        return done[0] / bound, done[1]
    flat = leaves.reshape(leaves.shape[0], total.numel())
    extents, counts = [flat.new_zeros(())], [torch.zeros(2, dtype=torch.int64, device=flat.device)]
    scratch = Scratch(flat.device)
    parts = zip(flat.split(PIECE_ELEMENTS, 1), total.view(-1).split(PIECE_ELEMENTS), strict=True)
    for columns, sums in parts:
        if not columns.numel():
            continue
        adder = UnitAdder(sums.shape, lsb, scratch)
        for piece in columns.split(max(1, PIECE_ELEMENTS // sums.numel())):
            largest, units = adder.add_units(piece, 0)
            extents.append(largest)
            counts.append(vanished(piece, units))
        sums.add_(adder.total())
    return reach(torch.stack(extents), bound), torch.stack(counts).sum(dim=0)


class Scratch:
    """Hand out the same memory at every call: new memory costs page faults."""

    def __init__(self, device: torch.device) -> None:
        """Start without any."""
        self.device = device
        self._held: dict[torch.dtype, Tensor] = {}
        self._views: dict[tuple[torch.dtype, torch.Size], Tensor] = {}

    def room(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return uninitialised memory, valid until the next call with this dtype."""
        if (view := self._views.get((dtype, shape))) is not None:
            return view
        held = self._held.get(dtype)
        if held is None or held.numel() < shape.numel():
            held = self._held[dtype] = torch.empty(shape.numel(), dtype=dtype, device=self.device)
        view = self._views[dtype, shape] = held[: shape.numel()].view(shape)
        return view


class UnitAdder:
    """Round leaves to whole units of 2^-lsb and add them exactly.

    Whole numbers are exact in float64, too, as long as their sum stays below 2^53 (NUMERICS section 7), and
    that is faster on a CPU; where it is not known, they are added as int64. On other devices asking waits.
    """

    def __init__(self, shape: Sequence[int], lsb: int, scratch: Scratch) -> None:
        """Start from zeros of `shape`; several may share the memory of their intermediate results."""
        device = scratch.device
        self._unit, self._asks, self._scratch = 2.0**lsb, device.type == "cpu", scratch
        self._integers = torch.zeros(tuple(shape), dtype=torch.int64, device=device)
        self._floats = torch.zeros(tuple(shape), dtype=torch.float64, device=device)
        self._held = 0.0  # no element of `_floats` is larger

    def add(self, leaves: Tensor, dim: int) -> Tensor:
        """Add leaves, which have one dimension more than the sum, at `dim`.

        Returns:
            Their largest magnitude, NaN where one is.
        """
        done = compiled.add_leaves(self._integers, leaves, dim, self._unit)
        return self.add_units(leaves, dim)[0] if done is None else done[0]

    def add_units(self, leaves: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """Add leaves as `add` does, in torch.

        Returns:
            Their largest magnitude, NaN where one is, and the leaves in units, in their own dtype: valid
            until the next call.
        """
        low, high = torch.aminmax(leaves)
        largest = torch.maximum(-low, high)
        most = float(largest) if self._asks else math.inf
        if most == 0:
            return largest, leaves  # zeros, as padding leaves them
        reach = leaves.shape[dim] * (most * self._unit + 1)
        # Exact: the unit is a power of 2, and within any bound the product is far from overflow.
        units = torch.mul(leaves, self._unit, out=self._scratch.room(leaves.shape, leaves.dtype)).round_()
        if not reach < _FLOAT64_UNITS:
            self._integers += units.to(torch.int64).sum(dim=dim)
            return largest, units
        if self._held + reach >= _FLOAT64_UNITS:
            self._flush()
        wide = self._scratch.room(leaves.shape, torch.float64).copy_(units)
        self._floats += wide.squeeze(dim) if leaves.shape[dim] == 1 else wide.sum(dim=dim)
        self._held += reach
        return largest, units

    def total(self) -> Tensor:
        """Return the sum, int64."""
        self._flush()
        return self._integers

    def _flush(self) -> None:
        self._integers += self._floats.to(torch.int64)
        self._floats.zero_()
        self._held = 0.0


def from_fixed(total: Tensor, lsb: int, divisor: int = 1) -> Tensor:
    """Return total·2^-lsb / divisor: one float64 division after the sum, then one rounding to float32."""
    return (total.to(torch.float64) * 2.0**-lsb / divisor).to(torch.float32)


def vanished(leaves: Tensor, fixed: Tensor) -> Tensor:
    """Count nonzero leaf elements, and those of them that rounded to zero in `fixed`: int64 [2]."""
    nonzero = torch.count_nonzero(leaves)
    return torch.stack((nonzero, nonzero - torch.count_nonzero(fixed)))
