"""How much better a sample is than the others of its prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from jaxtyping import Float32
from torch import Tensor

STD_EPSILON: Final = 1e-6
"""Added to a group's standard deviation; small beside any spread of rewards that carries information."""


def group_advantages(
    rewards: Sequence[float], samples_per_prompt: int, epsilon: float = STD_EPSILON
) -> Float32[Tensor, " N"]:
    """Standardise rewards within the group of samples of each prompt.

    (r - mean) / (std + epsilon), std with n - 1 as torch.std has it. Sums are exact (`math.fsum`), so that
    the order of a group's samples changes nothing, and float64 is rounded to float32 once.

    Args:
        rewards: One a sequence; the samples of a prompt are adjacent.
        samples_per_prompt: Size of a group.
        epsilon: Positive.

    Returns:
        One advantage a sequence. A group of equal rewards, or of one sample, gets exactly 0.0. The formula
        is that of GRPO with outcome rewards (DeepSeekMath, arXiv:2402.03300, section 4.1.2).

    Raises:
        ValueError: If the groups are not whole, a reward is not finite, or epsilon is not positive.
    """
    if samples_per_prompt < 1 or len(rewards) % samples_per_prompt:
        raise ValueError(f"{len(rewards)} rewards are not whole groups of {samples_per_prompt} samples")
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon must be positive and finite, not {epsilon}")
    for index, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise ValueError(f"the reward of sequence {index} is {reward}")
    advantages: list[float] = []
    for first in range(0, len(rewards), samples_per_prompt):
        advantages += _standardised(rewards[first : first + samples_per_prompt], epsilon)
    return torch.tensor(advantages, dtype=torch.float32)


def _standardised(group: Sequence[float], epsilon: float) -> list[float]:
    # Not left to the formula: the mean of equal floats may be off by a rounding, and x / epsilon would
    # enlarge that.
    if min(group) == max(group):
        return [0.0] * len(group)
    mean = math.fsum(group) / len(group)
    deviations = [reward - mean for reward in group]
    std = math.sqrt(math.fsum(d * d for d in deviations) / (len(group) - 1))
    return [d / (std + epsilon) for d in deviations]
