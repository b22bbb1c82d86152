"""Sums across ranks: floats in the order of the fixed tree, integers in any. No gradient.

Rounding a rank's partial sum before it is added to the others' breaks the contract, so floating point addends
are float32 or float64 only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlsp.collectives.moves import cut, fresh
from rlsp.collectives.wire import (
    Call,
    add_in_place,
    as_bytes,
    check_dim,
    check_tensor,
    describe,
    enter,
    exchange,
    fault,
    from_bytes,
    gather_bytes,
)
from rlsp.groups import Group
from rlsp.messages import ONE_GATHER_BYTES, OWN_ALL_REDUCE_BYTES
from rlsp.numerics.tree import tree_sum

_FLOATS = (torch.float32, torch.float64)
_INTEGERS = (torch.int32, torch.int64)


def reduce_scatter(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Sum over the ranks, in the tree of their indices, and return this rank's slice of the sum.

    Args:
        x: Addend [..., d, ...] with d divisible by the group's size, float32 or float64.
        group: The ranks.
        dim: Dimension to cut.

    Returns:
        [..., d/n, ...], contiguous, same dtype.
    """
    dim = check_dim("reduce_scatter", x, group, dim, divisible=True)
    _check_addend("reduce_scatter", x, group, _FLOATS)
    call = enter("reduce_scatter", group, f"{describe(x)} dim={dim}")
    if group.size == 1:
        return fresh(x)
    parts = cut(x, group.size, dim)
    rows = exchange(call, as_bytes(parts).view(group.size, -1))
    return tree_sum(from_bytes(rows, x.dtype, parts.shape[1:])).contiguous()


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Sum over the ranks, in the tree of their indices: the same bits on every rank, at every message size.

    Args:
        x: Addend, float32 or float64, the same shape on every rank.
        group: The ranks.

    Returns:
        Same shape and dtype, contiguous.
    """
    _check_addend("all_reduce", x, group, _FLOATS)
    return _reduce(enter("all_reduce", group, describe(x)), x, tree_sum)


def sum_integers(x: Tensor, group: Group) -> Tensor:
    """Sum int32 or int64 over the ranks; the caller has ruled out wrap-around.

    Returns:
        Same shape and dtype, contiguous.
    """
    _check_addend("sum_integers", x, group, _INTEGERS)
    call = enter("sum_integers", group, describe(x))
    if group.size > 1 and x.nbytes > OWN_ALL_REDUCE_BYTES:
        total = fresh(x)
        add_in_place(call, total)
        return total
    return _reduce(call, x, _integer_sum)


def backend_all_reduce(x: Tensor, group: Group) -> Tensor:
    """Sum floats over the ranks by the backend's own all-reduce, in an order that nobody states.

    For native routes alone: the bits depend on the group's size and the backend's algorithm.

    Returns:
        Same shape and dtype, contiguous; the same bits on every rank where the backend keeps to that.
    """
    check_tensor("backend_all_reduce", x, group)
    call = enter("backend_all_reduce", group, describe(x))
    total = fresh(x)
    if group.size > 1:
        add_in_place(call, total)
    return total


def max_integers(x: Tensor, group: Group) -> Tensor:
    """Return the elementwise maximum of int32 or int64 over the ranks: same shape and dtype, contiguous."""
    _check_addend("max_integers", x, group, _INTEGERS)
    return _reduce(enter("max_integers", group, describe(x)), x, _integer_max)


def _reduce(call: Call, x: Tensor, combine: Callable[[Tensor], Tensor]) -> Tensor:
    size = call.group.size
    if size == 1:
        return fresh(x)
    if size * x.nbytes <= ONE_GATHER_BYTES:
        return combine(from_bytes(gather_bytes(call, as_bytes(x)), x.dtype, x.shape)).contiguous()
    share = -(-x.numel() // size)
    flat = x.reshape(-1)
    if flat.numel() < size * share:
        flat = torch.cat((flat, flat.new_zeros(size * share - flat.numel())))
    rows = exchange(call, as_bytes(flat).view(size, -1))
    own = combine(from_bytes(rows, x.dtype, (share,)))
    whole = from_bytes(gather_bytes(call, as_bytes(own)), x.dtype, (share,))
    return whole.reshape(-1)[: x.numel()].view(x.shape)


def _integer_sum(x: Tensor) -> Tensor:
    return x.sum(dim=0, dtype=x.dtype)


def _integer_max(x: Tensor) -> Tensor:
    return x.amax(dim=0)


def _check_addend(operation: str, x: Tensor, group: Group, dtypes: tuple[torch.dtype, ...]) -> None:
    if x.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise fault(operation, x, group, f"addends must be {names}")
    check_tensor(operation, x, group)
