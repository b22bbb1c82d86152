"""Elementwise operators whose bits do not depend on length, offset or stride: composed in float32 from a safe list."""

from __future__ import annotations

import torch
from torch import Tensor


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate)·up for `x` [..., V, 2, F] = (gate, up), in float32, rounded once to x's dtype: [..., V, F]."""
    gate, up = x.float().unbind(dim=-2)
    return (gate / (1 + torch.exp(-gate)) * up).to(x.dtype)


def swiglu_back(dy: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of `swiglu` at `x` [..., V, 2, F] for `dy` [..., V, F], in x's dtype.

    d silu(g)/dg = s·(1 + g·(1 − s)) with s = 1/(1+exp(−g)).
    """
    gate, up = x.float().unbind(dim=-2)
    grad = dy.float()
    sigmoid = 1 / (1 + torch.exp(-gate))
    dgate = grad * up * (sigmoid * (1 + gate * (1 - sigmoid)))
    return torch.stack((dgate, grad * (gate * sigmoid)), dim=-2).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return x/rms(x)·weight over the last dimension in x's dtype, and the float32 reciprocal rms [..., 1]."""
    wide = x.float().contiguous()
    reciprocal = torch.rsqrt((wide * wide).sum(dim=-1, keepdim=True) / x.shape[-1] + epsilon)
    return (wide * reciprocal * weight.float()).to(x.dtype), reciprocal


def rms_norm_back(dy: Tensor, x: Tensor, weight: Tensor, reciprocal: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input gradient in x's dtype and the weight gradient's elementwise token leaves, float32, x's shape."""
    grad = dy.float()
    normed = x.float() * reciprocal
    inner = grad * weight.float()
    mean = (inner * normed).contiguous().sum(dim=-1, keepdim=True) / x.shape[-1]
    return (reciprocal * (inner - normed * mean)).to(x.dtype), grad * normed


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate halves (RoPE as in GPT-NeoX and Qwen): x [..., D], cosine and sine float32 [..., D/2], rounded once.

    The gradient of a rotation is the rotation by −sine.
    """
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(x.dtype)
