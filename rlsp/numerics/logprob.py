"""Log-probabilities and entropy from per-virtual-shard statistics, merged by the fixed tree.

One code path serves the rollout (as a token is drawn) and training (with its gradient).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlsp.numerics.elementwise import MASKED
from rlsp.numerics.tree import tree_sum

ROW_ELEMENTS = 1 << 15  # a longer row is cut in pieces: beyond it threads may split a row (NUMERICS rule 3)


def tempered(logits: Tensor, temperature: float, valid: Tensor) -> Tensor:
    """Return logits/temperature in float32 with padded columns at a finite constant.

    Args:
        logits: [T, V, n], one virtual shard a row.
        temperature: Positive divisor, the same on both sides of the comparison.
        valid: bool [V, n], False for padded vocabulary.
    """
    return torch.where(valid, logits.float() / temperature, MASKED)


def shard_statistics(x: Tensor, valid: Tensor) -> Tensor:
    """Reduce each virtual shard's row to (m, s, u): max, sum of exp(x−m), sum of (x−m)·exp(x−m).

    Args:
        x: [T, V, n] float32 from `tempered`.
        valid: bool [V, n].

    Returns:
        float32 [T, V, 3]; a shard that is all padding has (MASKED, 0, 0).
    """
    top = x.amax(dim=-1, keepdim=True)
    shifted = torch.where(valid, x - top, 0.0)
    weight = torch.where(valid, torch.exp(shifted), 0.0)
    return torch.cat((top, _row_sum(weight), _row_sum(weight * shifted)), dim=-1)


def merge(statistics: Tensor, target_logit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Merge all virtual shards' statistics into log-probability, entropy and normaliser.

    H = log S − U/S with S = Σ w·s, U = Σ w·(u + (m−M)·s), w = exp(m−M), M the maximum; both sums are taken
    over the tree.

    Args:
        statistics: float32 [T, V, 3] of every virtual shard in order.
        target_logit: float32 [T], the (tempered) logit of the token in question.

    Returns:
        Log-probability and entropy, float32 [T] each, and the normaliser, float32 [T, 2]: M and log S apart,
        since their sum, rounded, would cost the gradient digits.
    """
    tops, sums, moments = statistics.unbind(dim=-1)
    top = tops.amax(dim=-1, keepdim=True)
    shift = tops - top
    weight = torch.exp(shift)
    total = tree_sum((weight * sums).t().contiguous())
    moment = tree_sum((weight * (moments + shift * sums)).t().contiguous())
    log_total, peak = torch.log(total), top.squeeze(-1)
    normaliser = torch.stack((peak, log_total), dim=-1)
    return (target_logit - peak) - log_total, log_total - moment / total, normaliser


def back(
    x: Tensor,
    valid: Tensor,
    normaliser: Tensor,
    entropy: Tensor,
    target: Tensor,
    dlogp: Tensor,
    dentropy: Tensor,
) -> Tensor:
    """Return the gradient with respect to the tempered logits.

    d logp/dx = onehot − p;  dH/dx = −p·(log p + H).

    Args:
        x: [T, V, n] float32 from `tempered`.
        valid: bool [V, n].
        normaliser: float32 [T, 2] from `merge`.
        entropy: float32 [T].
        target: int64 [T], index of the token inside this rank's V·n columns, or −1 where another rank
            owns it.
        dlogp: float32 [T].
        dentropy: float32 [T].

    Returns:
        float32 [T, V, n], exactly 0 in padded columns.
    """
    peak, log_total = normaliser[:, :, None, None].unbind(dim=1)
    log_p = (x - peak).sub_(log_total)
    p = torch.where(valid, torch.exp(log_p), 0.0)
    onehot = (
        torch.arange(x.shape[1] * x.shape[2], device=x.device).view(1, *x.shape[1:]) == target[:, None, None]
    )
    # In place, for a whole vocabulary is large: dlogp·(onehot − p) − dentropy·(p·(log p + H)).
    grad = onehot.to(torch.float32).sub_(p).mul_(dlogp[:, None, None])
    grad.sub_(log_p.add_(entropy[:, None, None]).mul_(p).mul_(dentropy[:, None, None]))
    return grad.masked_fill_(~valid, 0.0)


def _row_sum(x: Tensor) -> Tensor:
    """Sum the last dimension, [T, V, n] → [T, V, 1]: pieces of at most 32,768 elements, then the tree."""
    n = x.shape[-1]
    if n <= ROW_ELEMENTS:
        return x.contiguous().sum(dim=-1, keepdim=True)
    pieces = -(-n // ROW_ELEMENTS)
    padded = torch.nn.functional.pad(x, (0, pieces * ROW_ELEMENTS - n))
    return tree_sum(padded.view(*x.shape[:-1], pieces, ROW_ELEMENTS).sum(dim=-1).movedim(-1, 0)).unsqueeze(-1)
