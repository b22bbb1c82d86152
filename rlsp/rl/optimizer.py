"""AdamW on float32 masters, written out, and the gradient norm that every rank agrees on to the last bit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlsp import collectives
from rlsp.groups import Group
from rlsp.model.build import PolicyModel
from rlsp.numerics.tree import tree_sum

NORM_ROW = 4096
CLIP_EPSILON = 1e-6


@dataclass(frozen=True)
class Hyperparameters:
    """AdamW's constants (Loshchilov & Hutter, 2019); weight decay acts on matrices only."""

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float


class AdamW:
    """Update float32 masters elementwise and write their rounding into the model.

    Attributes:
        masters: The float32 weights by name.
        first: Their first moments.
        second: Their second moments.
        steps: Steps taken so far.
    """

    def __init__(self, model: PolicyModel, hyper: Hyperparameters) -> None:
        """Start from the model's weights with zero moments."""
        self._hyper, self.steps = hyper, 0
        self._weights = {name: (parameter, sharded) for name, parameter, sharded in model.named_shards()}
        self.masters = {
            name: p.detach().to(torch.float32, copy=True) for name, (p, _) in self._weights.items()
        }
        self.first = {name: torch.zeros_like(x) for name, x in self.masters.items()}
        self.second = {name: torch.zeros_like(x) for name, x in self.masters.items()}

    def fresh(self, model: PolicyModel) -> AdamW:
        """Return an optimizer with the same constants that starts from the model's weights as they are."""
        return AdamW(model, self._hyper)

    def named_state(self) -> Iterator[tuple[str, Tensor, bool]]:
        """Yield (kind/name, tensor, sharded) for both moments and the masters."""
        for kind, tensors in (("exp_avg", self.first), ("exp_avg_sq", self.second), ("master", self.masters)):
            for name, tensor in tensors.items():
                yield f"{kind}/{name}", tensor, self._weights[name][1]

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], learning_rate: float, clip: float) -> None:
        """Take one step with `gradients` (float32, by name) scaled by the clip coefficient `clip`.

        Bias corrections are Python float64; everything else is elementwise float32, in the order written
        here.
        """
        h, self.steps = self._hyper, self.steps + 1
        correction1, correction2 = 1 - h.beta1**self.steps, math.sqrt(1 - h.beta2**self.steps)
        for name, (parameter, sharded) in self._weights.items():
            gradient = gradients[name] * clip
            master, first, second = self.masters[name], self.first[name], self.second[name]
            first.mul_(h.beta1).add_(gradient * (1 - h.beta1))
            second.mul_(h.beta2).add_(gradient * gradient * (1 - h.beta2))
            if sharded:
                master.mul_(1 - learning_rate * h.weight_decay)
            master.sub_(first / (second.sqrt() / correction2 + h.epsilon) * (learning_rate / correction1))
            parameter.copy_(master)


def gradient_norm(gradients: Mapping[str, tuple[Tensor, bool]], tp: Group) -> float:
    """Return the norm of all gradients, one float64 with equal bits on every rank and in every layout.

    Squares in float64, rows of 4,096 elements of one virtual shard summed a row at a time, then the
    balanced tree over a shard's rows and over (name, shard) in order; only one number a shard crosses
    ranks.

    Args:
        gradients: By name, float32 and whether it is sharded [V_local, ...]; a replicated one counts once.
        tp: The group whose ranks hold the shards.
    """
    names = sorted(gradients)
    local = [_shard_squares(*gradients[name]) for name in names]
    every = collectives.gather(torch.cat(local).unsqueeze(0), tp, dim=0)
    table, start = [], 0
    for name, part in zip(names, local, strict=True):
        ranks = tp.size if gradients[name][1] else 1
        table.append(every[:ranks, start : start + part.shape[0]].reshape(-1))
        start += part.shape[0]
    return math.sqrt(float(tree_sum(torch.cat(table))))


def clip_coefficient(norm: float, limit: float) -> float:
    """Return the factor that brings `norm` down to `limit`, at most 1; a limit of 0 means no clipping."""
    return min(1.0, limit / (norm + CLIP_EPSILON)) if limit > 0 else 1.0


def _shard_squares(gradient: Tensor, sharded: bool) -> Tensor:
    """Return the sum of squares of each virtual shard, float64 [V_local] ([1] for a replicated gradient)."""
    shards = gradient.reshape(gradient.shape[0] if sharded else 1, -1)
    squares = shards.to(torch.float64) ** 2
    padded = torch.nn.functional.pad(squares, (0, -squares.shape[1] % NORM_ROW))
    return tree_sum(padded.view(shards.shape[0], -1, NORM_ROW).sum(dim=-1).t().contiguous())
