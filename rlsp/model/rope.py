"""Rotary positions: one table, one home for the inverse frequencies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlsp.model.gradients import Differentiable
from rlsp.numerics.elementwise import rotate


def inverse_frequencies(head_dim: int, base: float, scaling: Mapping[str, Any]) -> Tensor:
    """Return the inverse frequency of each pair of a head, float32 [head_dim/2], made on the processor.

    Without a scaling it is base^(−2i/head_dim), taken in Python's float64 and rounded once (RoFormer, Su et
    al., 2021). With one it has the bits of transformers, whose float32 arithmetic is written out here
    (modeling_rope_utils.py, 5.24): pair i turns by 1/base^(2i/head_dim), `linear` divides that by a factor,
    `llama3` does so for long wavelengths and blends in between.

    Args:
        head_dim: Elements of a head, even.
        base: The base of the frequencies.
        scaling: Empty, or `rope_type` with the numbers of that type by their names in config.json.
    """
    if not scaling:
        return torch.tensor([base ** (-2 * i / head_dim) for i in range(head_dim // 2)], dtype=torch.float32)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    plain = torch.reciprocal(torch.pow(base, exponents))
    match scaling["rope_type"]:
        case "linear":
            return torch.div(plain, scaling["factor"])
        case "llama3":
            return _llama3(plain, **{key: value for key, value in scaling.items() if key != "rope_type"})
        case _:
            return plain


def _llama3(
    plain: Tensor,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: float,
) -> Tensor:
    context = original_max_position_embeddings
    longest, shortest = context / low_freq_factor, context / high_freq_factor
    wavelength = 2 * math.pi / plain
    scaled = torch.where(wavelength > longest, plain / factor, plain)
    smooth = (context / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
    blended = (1 - smooth) * scaled / factor + smooth * scaled
    between = ~(wavelength < shortest) & ~(wavelength > longest)
    return torch.where(between, blended, scaled)


def rotary_table(positions: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, float32 [..., head_dim/2], for int64 positions [...].

    The angle is the float32 product of the position and the inverse frequency of its pair.
    """
    angles = positions.to(torch.float32).unsqueeze(-1) * inverse.to(positions.device)
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
