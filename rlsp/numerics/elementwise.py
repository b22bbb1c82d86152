"""Elementwise operators composed in float32 from a safe list: bits ignore length, offset and stride."""

from __future__ import annotations

import torch
from torch import Tensor

from rlsp.numerics import decoding

MASKED = -1.0e30
"""A masked logit or score. Finite: exp(MASKED − m) is 0 and 0·MASKED is 0, where −inf would leave NaN."""


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate)·up, computed in float32 and rounded once.

    Args:
        x: [..., V, 2, F], gate and up of each virtual shard.

    Returns:
        [..., V, F] in x's dtype.
    """
    gate, up = x.float().unbind(dim=-2)
    return (gate / (1 + torch.exp(-gate)) * up).to(x.dtype)


def swiglu_back(dy: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of `swiglu` at `x`, in x's shape and dtype.

    d silu(g)/dg = s·(1 + g·(1 − s)) with s = 1/(1+exp(−g)).

    Args:
        dy: [..., V, F].
        x: [..., V, 2, F].
    """
    gate, up = x.float().unbind(dim=-2)
    grad = dy.float()
    sigmoid = 1 / (1 + torch.exp(-gate))
    dgate = grad * up * (sigmoid * (1 + gate * (1 - sigmoid)))
    return torch.stack((dgate, grad * (gate * sigmoid)), dim=-2).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Normalise the last dimension by its root mean square (Zhang & Sennrich, 2019), in float32.

    Args:
        x: [..., H].
        weight: [H].
        epsilon: Added to the mean square.

    Returns:
        x/rms(x)·weight in x's dtype, and the reciprocal rms, float32 [..., 1].
    """
    wide = x.float().contiguous()
    if (done := decoding.rms_norm(wide, weight.float().contiguous(), epsilon)) is not None:
        return done[0].to(x.dtype), done[1]
    reciprocal = torch.rsqrt((wide * wide).sum(dim=-1, keepdim=True) / x.shape[-1] + epsilon)
    return (wide * reciprocal * weight.float()).to(x.dtype), reciprocal


def rms_norm_back(dy: Tensor, x: Tensor, weight: Tensor, reciprocal: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `rms_norm`.

    Args:
        dy: [..., H].
        x: [..., H], as given.
        weight: [H].
        reciprocal: float32 [..., 1], as returned.

    Returns:
        The input's gradient in x's dtype, and the weight gradient's leaves, one a row, float32 [..., H].
    """
    grad = dy.float()
    normed = x.float() * reciprocal
    inner = grad * weight.float()
    mean = (inner * normed).contiguous().sum(dim=-1, keepdim=True) / x.shape[-1]
    return (reciprocal * (inner - normed * mean)).to(x.dtype), grad * normed


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the two halves of the last dimension (RoPE as in GPT-NeoX and Qwen), rounded once.

    The gradient of a rotation is the rotation by −sine.

    Args:
        x: [..., D].
        cosine: float32, broadcasts to [..., D/2].
        sine: Likewise.

    Returns:
        [..., D] in x's dtype.
    """
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(x.dtype)
