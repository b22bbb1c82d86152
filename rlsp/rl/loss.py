"""The loss of one token: clipped policy gradient, optional KL to a reference, optional entropy bonus."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class TokenLoss:
    """The loss of each token and what it is made of; inactive tokens are exactly 0 (False) throughout.

    Attributes:
        loss: policy + kl_coef * kl - entropy_coef * entropy; the only member that carries a gradient.
        policy: The clipped surrogate.
        kl: The k3 estimate of KL(policy || reference), not weighted; 0 where kl_coef is 0.
        ratio: exp(logp - old_logp).
        approx_kl: The k3 estimate of KL(old policy || policy), ratio - 1 - log(ratio).
        clipped: Whether the clip holds the token's policy gradient at 0.
    """

    loss: Float[Tensor, "*tokens"]
    policy: Float[Tensor, "*tokens"]
    kl: Float[Tensor, "*tokens"]
    ratio: Float[Tensor, "*tokens"]
    approx_kl: Float[Tensor, "*tokens"]
    clipped: Bool[Tensor, "*tokens"]


def token_loss(
    logp: Float[Tensor, "*tokens"],
    old_logp: Float[Tensor, "*tokens"],
    reference_logp: Float[Tensor, "*tokens"] | None,
    entropy: Float[Tensor, "*tokens"] | None,
    advantage: Float[Tensor, "*tokens"],
    active_mask: Bool[Tensor, "*tokens"],
    *,
    clip_ratio: float,
    kl_coef: float,
    entropy_coef: float,
) -> TokenLoss:
    """Compute the loss of every token, elementwise; the sum and its normaliser are the caller's.

    Args:
        logp: Log-probabilities of the tokens under the policy that is trained, float32 (float64 in tests).
        old_logp: The same under the policy that drew them.
        reference_logp: The same under the reference policy; needed if kl_coef is above 0.
        entropy: Entropy of the policy's distribution at each token; needed if entropy_coef is above 0.
        advantage: Advantage of the sequence that each token belongs to.
        active_mask: Which tokens count. What the others hold, NaN included, reaches neither values nor
            gradients.
        clip_ratio: Half-width of the interval around 1 beyond which a ratio earns nothing more.
        kl_coef: Weight of the KL; at exactly 0 the branch is not built.
        entropy_coef: Weight of the entropy; at exactly 0 the branch is not built.

    Returns:
        The loss, differentiable through `logp` and `entropy`. PPO's clipped surrogate (Schulman et al.,
        arXiv:1707.06347, eq. 7) and the k3 estimator exp(d) - 1 - d with d = reference - logp (Schulman
        2020; GRPO's eq. 4, arXiv:2402.03300).

    Raises:
        ValueError: If a coefficient is negative or not finite, shapes differ, or an input that is needed is
            None.
        TypeError: If a dtype is neither float32 nor float64, or dtypes differ.
    """
    _check_coefficients(clip_ratio=clip_ratio, kl_coef=kl_coef, entropy_coef=entropy_coef)
    _check_tensors(logp, old_logp, reference_logp, entropy, advantage, active_mask)

    def kept(x: Tensor) -> Tensor:
        # Before any arithmetic, so that backward multiplies no infinity by an inactive token's zero gradient.
        return torch.where(active_mask, x, 0.0)

    logp, advantage, old_logp = kept(logp), kept(advantage), kept(old_logp.detach())
    ratio, clipped, policy = _surrogate(logp, old_logp, advantage, clip_ratio)
    loss = policy
    kl = torch.zeros_like(policy)
    if kl_coef > 0.0:
        if reference_logp is None:
            raise ValueError(f"kl_coef is {kl_coef}, but there is no reference_logp")
        difference = kept(reference_logp.detach()) - logp
        kl = torch.exp(difference) - 1.0 - difference
        loss = loss + kl_coef * kl
    if entropy_coef > 0.0:
        if entropy is None:
            raise ValueError(f"entropy_coef is {entropy_coef}, but there is no entropy")
        loss = loss - entropy_coef * kept(entropy)
    return TokenLoss(
        loss=kept(loss),
        policy=kept(policy.detach()),
        kl=kept(kl.detach()),
        ratio=kept(ratio),
        approx_kl=kept(ratio - 1.0 - (logp.detach() - old_logp)),
        clipped=clipped,
    )


def _surrogate(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, clip_ratio: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ratio, where it is clipped, and -min(ratio * A, clip(ratio, 1 - c, 1 + c) * A)."""
    ratio = torch.exp(logp.detach() - old_logp)
    gains, loses = advantage > 0.0, advantage < 0.0
    clipped = (gains & (ratio > 1.0 + clip_ratio)) | (loses & (ratio < 1.0 - clip_ratio))
    bound = torch.where(gains, torch.full_like(ratio, 1.0 + clip_ratio), 1.0 - clip_ratio)
    # Cases instead of a minimum: a minimum halves its gradient at ties, which every unclipped token is, and a
    # clipped ratio that overflowed would meet its zero gradient in exp's backward.
    difference = torch.where(clipped, 0.0, logp - old_logp)
    return ratio, clipped, -torch.where(clipped, bound * advantage, torch.exp(difference) * advantage)


def _check_coefficients(**coefficients: float) -> None:
    for name, value in coefficients.items():
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name} must be at least 0 and finite, not {value}")


def _check_tensors(
    logp: Tensor,
    old_logp: Tensor,
    reference_logp: Tensor | None,
    entropy: Tensor | None,
    advantage: Tensor,
    active_mask: Tensor,
) -> None:
    if logp.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"the loss is computed in float32 or float64, not in {logp.dtype}")
    others = {"old_logp": old_logp, "reference_logp": reference_logp, "entropy": entropy}
    for name, x in {**others, "advantage": advantage}.items():
        if x is not None and x.dtype != logp.dtype:
            raise TypeError(f"{name} is {x.dtype}, logp is {logp.dtype}")
        if x is not None and x.shape != logp.shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, logp has {tuple(logp.shape)}")
    if active_mask.dtype != torch.bool or active_mask.shape != logp.shape:
        raise ValueError(f"active_mask must be bool of shape {tuple(logp.shape)}")
