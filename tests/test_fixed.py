from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numeric_data import mixed, one_after_the_other
from torch import Tensor

from rlsp.bits import same_bits
from rlsp.numerics import fixed
from rlsp.numerics.fixed import (
    Scratch,
    UnitAdder,
    add_leaves,
    from_fixed,
    leaf_bound,
    to_fixed,
    vanished,
    within,
)

LSB = 40
seeds = st.integers(0, 1 << 30)


@given(seeds, st.permutations(range(24)), st.integers(1, 23))
def test_exact_sums_ignore_order_and_split(seed: int, order: list[int], cut: int) -> None:
    leaves = mixed(seed, 24, 8)
    whole = to_fixed(leaves, LSB).sum(dim=0)
    shuffled = leaves[order]
    parts = [to_fixed(part, LSB).sum(dim=0) for part in (shuffled[:cut], shuffled[cut:])]
    assert same_bits(parts[0] + parts[1], whole)


def test_float_sums_do_not_ignore_order() -> None:
    """The witness of the test above."""
    leaves = mixed(0, 24, 8)
    assert not same_bits(one_after_the_other(leaves.flip(0)), one_after_the_other(leaves))


@given(st.lists(st.integers(-(1 << 52), 1 << 52), min_size=1, max_size=8), st.integers(0, 48))
def test_whole_units_convert_to_themselves(units: list[int], lsb: int) -> None:
    x = torch.tensor(units, dtype=torch.float64) * 2.0**-lsb
    assert to_fixed(x, lsb).tolist() == units


@given(st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-1e6, max_value=1e6))
def test_a_leaf_is_rounded_once_to_the_nearest_unit(value: float) -> None:
    assert to_fixed(torch.tensor([value]), LSB).item() == round(value * 2.0**LSB)


def test_halves_round_to_even() -> None:
    halves = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5]) * 2.0**-LSB
    assert to_fixed(halves, LSB).tolist() == [0, 2, 2, 0, -2, -2]


@given(st.integers(-(1 << 52), 1 << 52), st.integers(1, 1 << 20))
def test_the_normaliser_divides_the_sum_once(total: int, tokens: int) -> None:
    want = torch.tensor(total * 2.0**-LSB / tokens, dtype=torch.float64).to(torch.float32)
    assert same_bits(from_fixed(torch.tensor(total), LSB, tokens), want)


def test_dividing_every_leaf_instead_loses_small_gradients() -> None:
    leaves, tokens = torch.full((4096,), 1e-9), 4096
    exact = from_fixed(to_fixed(leaves, LSB).sum(), LSB, tokens)
    early = from_fixed(to_fixed(leaves / tokens, LSB).sum(), LSB)
    assert abs(float(exact) - 1e-9) < 1e-12
    assert early == 0


@given(st.integers(0, 48), st.integers(1, 1 << 30))
def test_as_many_leaves_as_were_announced_cannot_overflow(lsb: int, leaves: int) -> None:
    bound = leaf_bound(lsb, leaves)
    assert leaves * round(bound * 2**lsb) < 1 << 63
    assert bound == 2.0 ** (62 - lsb - math.ceil(math.log2(leaves)))


def test_no_leaves_have_the_bound_of_one() -> None:
    assert leaf_bound(LSB, 0) == leaf_bound(LSB, 1) == 2.0**22


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30, -1e30, 4.0, -4.0])
def test_what_is_not_finite_or_too_large_is_outside(value: float) -> None:
    leaves = torch.zeros(3, 5)
    leaves[1, 3] = value
    assert not within(leaves, 4.0)


def test_what_is_below_the_bound_is_within() -> None:
    below = math.nextafter(4.0, 0.0)
    assert within(torch.tensor([below, -below, 0.0], dtype=torch.float64), 4.0)
    assert within(torch.zeros(0, 7), 4.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_conversion_alone_hides_a_breach(value: float) -> None:
    """Why leaves are checked before they are converted: afterwards they are ordinary integers."""
    assert to_fixed(torch.tensor([value]), LSB).dtype == torch.int64


def test_vanished_elements_are_counted() -> None:
    leaves = torch.tensor([[0.0, 1.0, 2.0**-42], [-(2.0**-50), -0.0, 2.0**-40]])
    assert vanished(leaves, to_fixed(leaves, LSB)).tolist() == [4, 2]


def added(leaves: Tensor) -> tuple[Tensor, Tensor, bool]:
    total = torch.zeros(leaves.shape[1:], dtype=torch.int64)
    reached, counts = add_leaves(total, leaves, LSB, 2.0**22)
    return total, counts, bool(reached < 1)


@given(seeds, st.integers(0, 9), st.sampled_from([1, 7, 24, 100]), st.sampled_from([0.0, 11.0, 13.0, 21.0]))
def test_leaves_are_added_as_their_integers_are(seed: int, count: int, width: int, exponent: float) -> None:
    """Small ones in float64, large ones as integers: the bound of 2^53 units is crossed on the way."""
    leaves = (mixed(seed, max(count, 1), width) * 2.0**exponent)[:count]
    with mock.patch.object(fixed, "PIECE_ELEMENTS", 48):
        total, counts, inside = added(leaves)
    units = to_fixed(leaves, LSB)
    assert same_bits(total, units.sum(dim=0))
    assert same_bits(counts, vanished(leaves, units))
    assert inside == bool(within(leaves, 2.0**22))


def test_leaves_far_below_the_unit_vanish_and_are_counted() -> None:
    leaves = torch.tensor([[2.0**-149, 0.0], [-(2.0**-126), -0.0]])
    total, counts, inside = added(leaves)
    assert (total.tolist(), counts.tolist(), inside) == ([0, 0], [2, 2], True)


def test_float64_alone_would_lose_units_of_large_leaves() -> None:
    """The witness: why an adder asks for the largest leaf."""
    leaves = torch.tensor([2.0**21, 2.0**-LSB, 2.0**-LSB])
    exact = to_fixed(leaves, LSB).sum()
    assert int(added(leaves.unsqueeze(1))[0]) == int(exact)
    assert int((leaves.double() * 2.0**LSB).sum()) != int(exact)


def test_an_adder_adds_at_any_dimension_and_over_many_calls() -> None:
    adder = UnitAdder((3, 5), LSB, Scratch(torch.device("cpu")))
    leaves = mixed(3, 3, 4 * 5).view(3, 4, 5) * 2.0**10
    for _ in range(9):
        adder.add(leaves, 1)
    assert same_bits(adder.total(), to_fixed(leaves, LSB).sum(dim=1) * 9)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30, 2.0**22])
def test_a_leaf_out_of_bound_is_seen_in_the_sum_of_leaves(value: float) -> None:
    leaves = torch.zeros(3, 5)
    leaves[1, 3] = value
    assert not added(leaves)[2]
