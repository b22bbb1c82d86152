"""Collectives with their gradients: each forward is paired with the move or sum that is its transpose.

A gradient that must be summed is raised to float32 (float64 stays), summed in the tree and rounded once, to
the dtype it came in. It is one addend a rank: where a rank's gradient is itself a partial sum that was
rounded below float32, the layout is already in its bits, and the caller reduces in float32 with the functions
of `sums` instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from rlsp.collectives.moves import fresh, gather, scatter_slice
from rlsp.collectives.sums import all_reduce, reduce_scatter
from rlsp.groups import Group


def gather_rs(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Gather along `dim`; the gradient is reduce-scattered: every rank used the whole in its own way."""
    return _GatherReduceScatter.on(x, group, dim)


def reduce_scatter_g(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Reduce-scatter float32 or float64 along `dim`; the gradient is gathered."""
    return _ReduceScatterGather.on(x, group, dim)


def copy_ar(x: Tensor, group: Group) -> Tensor:
    """Hand on a tensor that every rank holds; its gradient is all-reduced: each used it in its own way."""
    return _CopyAllReduce.on(x, group)


def all_reduce_copy(x: Tensor, group: Group) -> Tensor:
    """All-reduce float32 or float64; the gradient is handed on: all ranks use the sum in the same way."""
    return _AllReduceCopy.on(x, group)


def slice_gather(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Take this rank's slice along `dim` of a tensor that every rank holds; the gradient is gathered."""
    return _SliceGather.on(x, group, dim)


class _Pair(Function):
    @classmethod
    def on(cls, *args: Any) -> Tensor:
        """Apply the function; torch's `apply` is untyped."""
        apply: Callable[..., Tensor] = cls.apply
        return apply(*args)


class _GatherReduceScatter(_Pair):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        """Gather the slices."""
        ctx.group, ctx.dim = group, dim
        return gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Sum every rank's gradient in the tree and return the own slice."""
        return _summed(grads[0], lambda wide: reduce_scatter(wide, ctx.group, ctx.dim)), None, None


class _ReduceScatterGather(_Pair):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        """Sum in the tree and return the own slice."""
        ctx.group, ctx.dim = group, dim
        return reduce_scatter(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Gather the slices' gradients."""
        return gather(grads[0], ctx.group, ctx.dim), None, None


class _CopyAllReduce(_Pair):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        """Copy."""
        ctx.group = group
        return fresh(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Sum every rank's gradient in the tree."""
        return _summed(grads[0], lambda wide: all_reduce(wide, ctx.group)), None


class _AllReduceCopy(_Pair):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        """Sum in the tree."""
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Copy: every rank holds the sum's whole gradient."""
        return fresh(grads[0]), None


class _SliceGather(_Pair):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        """Take the own slice."""
        ctx.group, ctx.dim = group, dim
        return scatter_slice(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Gather the slices' gradients."""
        return gather(grads[0], ctx.group, ctx.dim), None, None


def _summed(gradient: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    wide = gradient if gradient.dtype == torch.float64 else gradient.to(torch.float32)
    return reduce(wide).to(gradient.dtype)
