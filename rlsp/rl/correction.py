"""Importance weights for rollouts whose engine computed other log-probabilities than training."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class Correction(Enum):
    """How a ratio, training's probability over the rollout's, becomes the weight of a token's policy loss."""

    TOKEN_TIS = "token_tis"
    SEQUENCE_TIS = "sequence_tis"
    TOKEN_MIS = "token_mis"
    SEQUENCE_MIS = "sequence_mis"

    @property
    def over_sequences(self) -> bool:
        """Tell whether a sequence has one ratio, the product of its tokens'."""
        return self in (Correction.SEQUENCE_TIS, Correction.SEQUENCE_MIS)

    @property
    def masks(self) -> bool:
        """Tell whether ratios out of bounds are dropped (MIS) where the others (TIS) cut them."""
        return self in (Correction.TOKEN_MIS, Correction.SEQUENCE_MIS)


@dataclass(frozen=True)
class Weights:
    """The weights of one rollout.

    Attributes:
        weight: float32 [N, S], 0 where inactive or dropped; no gradient flows through it.
        cut: bool [N, S], active tokens whose ratio was out of bounds.
    """

    weight: Float[Tensor, "N S"]
    cut: Bool[Tensor, "N S"]


def importance_weights(
    old_logp: Float[Tensor, "N S"],
    rollout_logp: Float[Tensor, "N S"],
    active_mask: Bool[Tensor, "N S"],
    kind: Correction,
    *,
    upper: float,
    lower: float,
) -> Weights:
    """Weigh each token by exp(old − rollout), in bounds.

    Truncated importance sampling (TIS) takes min(ratio, upper); masked importance sampling (MIS) takes the
    ratio where lower ≤ ratio ≤ upper and 0 elsewhere. A sequence's ratio is the product of its tokens',
    summed as logarithms in float64; a token's is the float32 that the loss computes itself where it divides
    by the rollout's log-probabilities, so that without a cut both have the same bits. Sources: Yao et al.
    2025, "Your efficient RL framework secretly brings you off-policy RL training" (TIS); Liu et al. 2025,
    "When speed kills stability" (MIS).

    Args:
        old_logp: Training's log-probabilities before the update, float32.
        rollout_logp: What the rollout recorded, float32.
        active_mask: Tokens that count.
        kind: Which weights.
        upper: Largest weight.
        lower: Least ratio that MIS keeps.
    """
    log_ratio = torch.where(active_mask, old_logp - rollout_logp, 0.0)
    if kind.over_sequences:
        log_ratio = log_ratio.sum(dim=1, keepdim=True, dtype=torch.float64).expand_as(log_ratio)
    ratio = torch.exp(log_ratio)
    cut = active_mask & ((ratio > upper) | (kind.masks & (ratio < lower)))
    bounded = torch.where(cut, 0.0, ratio) if kind.masks else ratio.clamp(max=upper)
    return Weights(torch.where(active_mask, bounded, 0.0).to(torch.float32), cut)
