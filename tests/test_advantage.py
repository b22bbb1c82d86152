"""Advantages are exact where exactness is promised, and GRPO's everywhere else."""

from __future__ import annotations

import math
from functools import reduce
from operator import add

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsp.bits import bit_pattern, same_bits
from rlsp.rl.advantage import group_advantages
from rlsp.standardise import STD_EPSILON

rewards = st.floats(-1e3, 1e3, allow_subnormal=False)


@settings(deadline=None)
@given(st.lists(rewards, min_size=4, max_size=4), st.lists(rewards, min_size=4, max_size=4))
def test_advantages_follow_the_formula_in_float64(first: list[float], second: list[float]) -> None:
    groups = torch.tensor([first, second], dtype=torch.float64)
    oracle = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + STD_EPSILON)
    advantages = group_advantages(first + second, 4)
    assert advantages.dtype == torch.float32
    torch.testing.assert_close(advantages.double(), oracle.flatten(), rtol=1e-6, atol=1e-6)


@settings(deadline=None)
@given(st.lists(rewards, min_size=2, max_size=9), st.data())
def test_the_order_of_a_groups_samples_permutes_the_advantages_bit_for_bit(
    group: list[float], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(list(range(len(group)))))
    shuffled = group_advantages([group[i] for i in order], len(group))
    assert same_bits(shuffled, group_advantages(group, len(group))[order])


@settings(deadline=None)
@given(st.lists(rewards, min_size=3, max_size=3), st.lists(rewards, min_size=3, max_size=3))
def test_a_group_does_not_see_the_others(first: list[float], second: list[float]) -> None:
    together = group_advantages(first + second, 3)
    assert same_bits(together, torch.cat((group_advantages(first, 3), group_advantages(second, 3))))


@pytest.mark.parametrize("value", [0.0, -0.0, 0.1, 1 / 3, -7.3, 1e300])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 10])
def test_equal_rewards_give_positive_zeros(value: float, size: int) -> None:
    assert bit_pattern(group_advantages([value] * size, size)).tolist() == [0] * size


def test_the_formula_alone_would_not_give_zeros_for_equal_rewards() -> None:
    group = [0.1] * 10
    assert reduce(add, group) / 10 != 0.1  # Python 3.12's sum() compensates


def test_a_group_of_one_gives_zero() -> None:
    assert group_advantages([0.3, 0.9, -2.0], 1).tolist() == [0.0, 0.0, 0.0]


def test_the_better_of_two_samples_gets_the_positive_share() -> None:
    # std with n - 1 of (0, 1) is sqrt(1/2): 0.5 / sqrt(0.5).
    assert group_advantages([0.0, 1.0], 2).tolist() == pytest.approx(
        [-math.sqrt(0.5), math.sqrt(0.5)], rel=1e-5
    )


def test_epsilon_damps_a_spread_of_its_own_size() -> None:
    small = group_advantages([0.0, 1e-6], 2)
    assert float(small[1]) == pytest.approx(0.5 / (math.sqrt(0.5) + 1), rel=1e-5)
    assert float(group_advantages([0.0, 1e-6], 2, epsilon=1.0)[1]) < 1e-6


def test_no_rewards_give_no_advantages() -> None:
    assert group_advantages([], 4).shape == (0,)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_named(value: float) -> None:
    with pytest.raises(ValueError, match="reward of sequence 2 is"):
        group_advantages([0.0, 1.0, value, 0.0], 2)


def test_broken_groups_and_epsilons_are_refused() -> None:
    with pytest.raises(ValueError, match="3 rewards are not whole groups of 2"):
        group_advantages([0.0, 1.0, 2.0], 2)
    with pytest.raises(ValueError, match="whole groups of 0"):
        group_advantages([0.0], 0)
    for epsilon in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="epsilon must be positive"):
            group_advantages([0.0, 1.0], 2, epsilon)
