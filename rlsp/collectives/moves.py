"""Moves of bits between ranks: exact for every dtype, no arithmetic, no gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlsp.collectives.wire import (
    as_bytes,
    broadcast_bytes,
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
from rlsp.messages import aligned


def gather(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Concatenate every rank's tensor along `dim`, in the order of the group's indices.

    Args:
        x: [..., d, ...], any dtype, the same shape on every rank.
        group: The ranks.
        dim: Dimension to join.

    Returns:
        [..., n·d, ...], contiguous, same bits.
    """
    dim = check_dim("gather", x, group, dim, divisible=False)
    check_tensor("gather", x, group)
    call = enter("gather", group, f"{describe(x)} dim={dim}")
    if group.size == 1:
        return fresh(x)
    stacked = from_bytes(gather_bytes(call, as_bytes(x)), x.dtype, x.shape)
    return stacked.movedim(0, dim).flatten(dim, dim + 1).contiguous()


def gather_many(tensors: Sequence[Tensor], group: Group) -> tuple[Tensor, ...]:
    """Gather several tensors of any dtypes and shapes in one message.

    Args:
        tensors: Each [*shape], the same list of shapes and dtypes on every rank; scalars are fine.
        group: The ranks.

    Returns:
        For each, [n, *shape]: row j from rank j; contiguous, same bits.
    """
    for x in tensors:
        check_tensor("gather_many", x, group)
    if len({x.device for x in tensors}) > 1:
        raise fault("gather_many", None, group, "the tensors lie on different devices")
    call = enter("gather_many", group, " ".join(describe(x) for x in tensors))
    if group.size == 1 or not tensors:
        return tuple(fresh(x).unsqueeze(0) for x in tensors)
    offsets = [0]
    for x in tensors:
        offsets.append(offsets[-1] + aligned(x.nbytes))
    packed = torch.zeros(offsets[-1], dtype=torch.uint8, device=tensors[0].device)
    for x, offset in zip(tensors, offsets, strict=False):
        packed[offset : offset + x.nbytes] = as_bytes(x)
    rows = gather_bytes(call, packed)
    return tuple(
        fresh(from_bytes(rows[:, offset : offset + x.nbytes], x.dtype, x.shape))
        for x, offset in zip(tensors, offsets, strict=False)
    )


def scatter_slice(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Return this rank's slice of a tensor that every rank holds; nothing is communicated.

    Args:
        x: [..., d, ...] with d divisible by the group's size.
        group: The ranks.
        dim: Dimension to cut.

    Returns:
        [..., d/n, ...], contiguous.
    """
    dim = check_dim("scatter_slice", x, group, dim, divisible=True)
    check_tensor("scatter_slice", x, group)
    return fresh(cut(x, group.size, dim)[group.index])


def all_to_all(x: Tensor, group: Group) -> Tensor:
    """Send slice i of the leading dimension to rank i, and return the slices received, in rank order.

    Args:
        x: [d, ...] with d divisible by the group's size, any dtype, the same shape on every rank.
        group: The ranks.

    Returns:
        [d, ...], contiguous, same bits: slice j from rank j.
    """
    check_dim("all_to_all", x, group, 0, divisible=True)
    check_tensor("all_to_all", x, group)
    call = enter("all_to_all", group, describe(x))
    if group.size == 1:
        return fresh(x)
    parts = cut(x, group.size, 0)
    rows = exchange(call, as_bytes(parts).view(group.size, -1))
    return from_bytes(rows, x.dtype, parts.shape[1:]).flatten(0, 1).contiguous()


def broadcast(x: Tensor, group: Group, source: int) -> Tensor:
    """Return the tensor of one rank on every rank.

    Args:
        x: [*shape], any dtype; only the source's values matter, the others' give shape and dtype.
        group: The ranks.
        source: Index of the source in the group (not its global rank).

    Returns:
        [*shape], contiguous, same bits.
    """
    if not 0 <= source < group.size:
        raise fault("broadcast", x, group, f"there is no source {source} among {group.size} ranks")
    check_tensor("broadcast", x, group)
    call = enter("broadcast", group, f"{describe(x)} source={source}")
    if group.size == 1:
        return fresh(x)
    return broadcast_bytes(call, as_bytes(x), source).view(x.dtype).view(x.shape)


def fresh(x: Tensor) -> Tensor:
    """Copy into own, contiguous memory."""
    return x.detach().clone(memory_format=torch.contiguous_format)


def cut(x: Tensor, size: int, dim: int) -> Tensor:
    """View [..., d, ...] as [size, ..., d/size, ...]: the slices along `dim`, in order."""
    parts: Tensor = x.unflatten(dim, (size, x.shape[dim] // size))
    return parts.movedim(dim, 0)
