"""Tensors and assertions that the tests of collectives share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from torch import Tensor

from rlsp.collectives import CollectiveError
from rlsp.groups import Group, build_mesh
from rlsp.layout import Layout, RolloutLayout

DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
)


PERIOD = 4099  # large tensors repeat that many drawn numbers: drawing them all would take most of the time


# Ranks, and what small messages travel over; the latter is nothing's choice in a group of one.
WIRES = [
    (1, "nothing"),
    *((ranks, "lines") for ranks in (2, 3, 4, 8)),
    *((ranks, "gloo") for ranks in (2, 3, 8)),
]


@contextmanager
def over(wire: str) -> Iterator[None]:
    """Let each of the ranks that are forked meanwhile believe to be on a machine of its own, for `gloo`."""
    with nullcontext() if wire == "lines" else mock.patch("rlsp.lines._machine", a_machine_of_its_own):
        yield


def a_machine_of_its_own() -> bytes:
    return os.urandom(16)


def world(rank: int, world_size: int, timeout_s: float = 30.0) -> Group:
    layout = Layout(dp=1, cp=1, tp=world_size, sp=1)
    return build_mesh(layout, RolloutLayout(1, world_size, world_size), rank, timeout_s).tp


def addend(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of mixed size and sign: sums of three or more of them depend on the order."""
    source = torch.Generator().manual_seed(1000 + rank)
    scale = torch.exp2(torch.randint(-12, 13, (PERIOD,), generator=source).to(torch.float64))
    return tiled((torch.randn(PERIOD, generator=source, dtype=torch.float64) * scale).to(dtype), *shape)


def addends(world_size: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.stack([addend(rank, *shape, dtype=dtype) for rank in range(world_size)])


def patterned(rank: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """Arbitrary bits, so that NaN payloads, -0.0 and denormals occur; bools are true or false."""
    source = torch.Generator().manual_seed(rank)
    bits = torch.randint(0, 256, (PERIOD * dtype.itemsize,), generator=source, dtype=torch.uint8)
    return tiled((bits & 1 if dtype == torch.bool else bits).view(dtype), *shape)


def tiled(x: Tensor, *shape: int) -> Tensor:
    count = torch.Size(shape).numel()
    return x.repeat(-(-count // PERIOD))[:count].view(shape)


def same(a: Tensor, b: Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(*(x.detach().contiguous().view(-1).view(torch.uint8) for x in (a, b)))


def backwards(x: Tensor) -> Tensor:
    """Add one after the other from the last, as a ring may: an order that the tree must not be taken for."""
    total = x[-1]
    for each in x.flip(0)[1:]:
        total = total + each
    return total


def refused(parts: tuple[str, ...], call: Callable[..., object], *args: object) -> None:
    with pytest.raises(CollectiveError) as caught:
        call(*args)
    assert all(part in str(caught.value) for part in parts), caught.value
