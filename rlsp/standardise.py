"""The formula of advantages: rewards standardised within their group, in exact sums and without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

STD_EPSILON: Final = 1e-6
"""Added to a group's standard deviation; small beside any spread of rewards that carries information."""


def standardised(rewards: Sequence[float], group_size: int, epsilon: float = STD_EPSILON) -> list[float]:
    """Standardise rewards within groups of `group_size` adjacent ones.

    (r - mean) / (std + epsilon), std with n - 1 as torch.std has it. Sums are exact (`math.fsum`), so that
    the order of a group's samples changes nothing.

    Args:
        rewards: Finite numbers.
        group_size: Samples of one prompt.
        epsilon: Positive.

    Returns:
        One float64 a reward. A group of equal rewards, or of one, gets exactly 0.0.

    Raises:
        ValueError: If the groups are not whole, a reward is not finite, or epsilon is not positive.
    """
    if group_size < 1 or len(rewards) % group_size:
        raise ValueError(f"{len(rewards)} rewards are not whole groups of {group_size} samples")
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon must be positive and finite, not {epsilon}")
    for index, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise ValueError(f"the reward of sequence {index} is {reward}")
    out: list[float] = []
    for first in range(0, len(rewards), group_size):
        out += _within_group(rewards[first : first + group_size], epsilon)
    return out


def _within_group(group: Sequence[float], epsilon: float) -> list[float]:
    # Not left to the formula: the mean of equal floats may be off by a rounding, and x / epsilon would
    # enlarge that.
    if min(group) == max(group):
        return [0.0] * len(group)
    mean = math.fsum(group) / len(group)
    deviations = [reward - mean for reward in group]
    std = math.sqrt(math.fsum(d * d for d in deviations) / (len(group) - 1))
    return [d / (std + epsilon) for d in deviations]
