"""RMSNorm on sequence shards and on heads, with exact weight gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rlsp.model.gradients import Differentiable, exact_parameter
from rlsp.model.wiring import STRICT, Site, Wiring
from rlsp.numerics.elementwise import rms_norm, rms_norm_back
from rlsp.summation import Rule, Span


class RMSNorm(nn.Module):
    """Normalise each token over the hidden size.

    Under SP the ranks of TP hold different tokens, and their leaves add up.
    """

    route = STRICT

    def __init__(self, *, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        """Take Megatron-Core's constructor arguments."""
        super().__init__()
        wiring: Wiring = config.wiring
        self.wiring = wiring
        self.site: Site | None = None
        self.epsilon = eps
        rule = self._rule(wiring, config.num_attention_heads)
        self.weight = exact_parameter((hidden_size,), config.params_dtype, rule)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised `x` [..., hidden_size]."""
        normed: Tensor = _Norm.on(x, self.weight, self.epsilon, x.dtype)
        self.wiring.capture(self.site, normed)
        return normed

    @staticmethod
    def _rule(wiring: Wiring, _heads: int) -> Rule:
        return Rule(Span.WORLD if wiring.sequence_parallel else Span.TOKENS, block=1)


class HeadRMSNorm(RMSNorm):
    """Normalise each head (QK-norm): heads are sharded over TP whether or not SP is on.

    The output stays float32: it is rounded once, after the rotation, and its gradient arrives unrounded.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised heads of `x` [..., D], float32."""
        normed: Tensor = _Norm.on(x, self.weight, self.epsilon, torch.float32)
        return normed

    @staticmethod
    def _rule(_wiring: Wiring, heads: int) -> Rule:
        return Rule(Span.WORLD, block=1, copies=heads)


class _Norm(Differentiable):
    """Apply `numerics.elementwise.rms_norm`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
        """Keep the input and the reciprocal rms; widening the input to the output's dtype is exact."""
        y, reciprocal = rms_norm(x.to(dtype), weight, epsilon)
        ctx.save_for_backward(x, weight, reciprocal)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the input's gradient; add one leaf a token (and head) to the weight's exact sum."""
        x, weight, reciprocal = ctx.saved_tensors
        dx, leaves = rms_norm_back(dy, x, weight, reciprocal)
        weight.token_sum.add(leaves.reshape(-1, weight.numel()))
        return dx, None, None, None
