from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numeric_data import mixed, one_after_the_other
from torch import Tensor

from rlsp.bits import same_bits
from rlsp.numerics.tree import tree_sum

SIZES = range(1, 65)


def by_definition(x: Tensor) -> Tensor:
    """The largest power of two of leaves that leaves some for the right goes to the left."""
    if x.shape[0] == 1:
        return x[0]
    left = 1 << (x.shape[0] - 1).bit_length() - 1
    return by_definition(x[:left]) + by_definition(x[left:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tree_sum_is_the_balanced_tree_over_adjacent_leaves(dtype: torch.dtype) -> None:
    for n in SIZES:
        x = mixed(n, n, 16, dtype=dtype)
        assert tree_sum(x).dtype == dtype
        assert same_bits(tree_sum(x), by_definition(x)), n


def test_the_naive_order_leaves_other_bits() -> None:
    """The witness: without it the tests of this file would prove nothing."""
    for n in SIZES:
        x = mixed(n, n, 64)
        assert same_bits(tree_sum(x), one_after_the_other(x)) == (n <= 3), n


def test_every_aligned_run_of_leaves_is_a_subtree() -> None:
    """Ranks that hold such runs sum them alone; the tree over the ranks' sums is the whole tree."""
    for n in SIZES:
        x = mixed(n, n, 16)
        for run in (1, 2, 4, 8, 16, 32, 64):
            parts = torch.stack([tree_sum(part) for part in x.split(run)])
            assert same_bits(tree_sum(parts), tree_sum(x)), (n, run)


def test_a_run_that_is_not_aligned_is_no_subtree() -> None:
    x = mixed(8, 8, 64)
    parts = torch.stack([tree_sum(part) for part in x.split(3)])
    assert not same_bits(tree_sum(parts), tree_sum(x))


@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 1 << 20))
def test_a_placement_over_ranks_changes_no_bit(virtual: int, ranks: int, seed: int) -> None:
    shards = mixed(seed, 1 << virtual, 4)
    held = shards.chunk(min(1 << ranks, 1 << virtual))
    assert same_bits(tree_sum(torch.stack([tree_sum(x) for x in held])), tree_sum(shards))


def test_zero_leaves_at_the_end_change_no_bit_of_a_sum_that_is_not_zero() -> None:
    for n in SIZES:
        x = mixed(n, n, 16)
        padded = torch.cat((x, torch.zeros(64 - n, 16)))
        assert same_bits(tree_sum(padded), tree_sum(x)), n


def test_a_single_leaf_is_returned_as_it_is() -> None:
    x = torch.tensor([[-0.0, torch.nan, torch.inf, 1e-45]])
    assert same_bits(tree_sum(x), x[0])


def test_summing_does_not_touch_the_addends() -> None:
    x = mixed(1, 5, 8)
    before = x.clone()
    tree_sum(x)
    assert same_bits(x, before)
