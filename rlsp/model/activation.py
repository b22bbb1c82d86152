"""SwiGLU and the residual addition, as Megatron-Core's specs want them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from rlsp.model.gradients import Differentiable
from rlsp.model.wiring import STRICT, Operator, Site, Wiring
from rlsp.numerics.elementwise import swiglu, swiglu_back


class SwiGLU(nn.Module):
    """Gate each virtual shard: FC1 leaves [gate, up] a shard, so that a shard never depends on TP."""

    route = STRICT

    def __init__(self, *, config: Any, **_: Any) -> None:
        """Take Megatron-Core's constructor arguments."""
        super().__init__()
        self.wiring: Wiring = config.wiring
        self.site: Site | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return [s, b, V_local·F] for x [s, b, V_local·2·F]."""
        self.wiring.count(Operator.FFN, self.route)
        shards = self.wiring.contract.virtual_tp // self.wiring.tp.size
        gated: Tensor = _SwiGLU.on(x.view(*x.shape[:2], shards, 2, -1)).flatten(2)
        self.wiring.capture(self.site, gated)
        return gated

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Return nothing: Megatron-Core 0.16's MLP asks every child."""
        return {}


class _SwiGLU(Differentiable):
    """Apply `numerics.elementwise.swiglu`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Keep the input."""
        ctx.save_for_backward(x)
        return swiglu(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        """Recompute from the input."""
        return swiglu_back(dy, ctx.saved_tensors[0])


def residual_add(_training: bool, _fused: bool) -> Callable[[tuple[Tensor, None], Tensor, float], Tensor]:
    """Return Megatron-Core's bias-dropout-add without bias and dropout: x + residual."""

    def add(x_and_bias: tuple[Tensor, None], residual: Tensor, _probability: float) -> Tensor:
        return x_and_bias[0] + residual

    return add
