"""How much better a sample is than the others of its prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float32
from torch import Tensor

from rlsp.standardise import STD_EPSILON, standardised


def group_advantages(
    rewards: Sequence[float], samples_per_prompt: int, epsilon: float = STD_EPSILON
) -> Float32[Tensor, " N"]:
    """Standardise rewards within the group of samples of each prompt (`rlsp.standardise`).

    Float64 is rounded to float32 once, at the end.

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
    return torch.tensor(standardised(rewards, samples_per_prompt, epsilon), dtype=torch.float32)
