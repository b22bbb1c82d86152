"""Rotary positions: one table, one home for the inverse frequencies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlsp.model.gradients import Differentiable
from rlsp.numerics.elementwise import rotate


def rotary_table(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, float32 [..., head_dim/2], for int64 positions [...].

    The inverse frequency of pair i is base^(−2i/head_dim), taken in Python's float64 and rounded once; the
    angle is a float32 product. Source: RoFormer (Su et al., 2021).
    """
    inverse = [base ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    angles = positions.to(torch.float32).unsqueeze(-1) * torch.tensor(
        inverse, dtype=torch.float32, device=positions.device
    )
    return torch.cos(angles), torch.sin(angles)


class Rotate(Differentiable):
    """Rotate heads by their positions; the gradient is the inverse rotation.

    The output has the values of the model's dtype and is carried in float32, so that autograd brings its
    gradient back unrounded.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor, dtype: torch.dtype) -> Tensor:
        """Rotate x [..., D] by a table that broadcasts to [..., D/2] and round once to `dtype`."""
        ctx.save_for_backward(cosine, sine)
        ctx.dtype = x.dtype
        return rotate(x.float(), cosine, sine).to(dtype).float()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        """Rotate back."""
        cosine, sine = ctx.saved_tensors
        return rotate(dy, cosine, -sine).to(ctx.dtype), None, None, None
