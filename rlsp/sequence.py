"""Where a sequence's tokens sit under context parallelism, and how they come back into position order."""

from __future__ import annotations

import torch
from torch import Tensor

from rlsp import collectives
from rlsp.groups import Group
from rlsp.layout import zigzag_chunks, zigzag_positions


def local_positions(length: int, cp: Group, device: torch.device) -> Tensor:
    """Return the positions that this rank owns in Megatron's zigzag, int64 [length / cp], ascending."""
    return torch.tensor(zigzag_positions(length, cp.size, cp.index), dtype=torch.int64, device=device)


def local_blocks(length: int, block: int, cp: Group) -> tuple[int, ...]:
    """Return the positions, in blocks, of this rank's query blocks, ascending."""
    return tuple(p // block for p in zigzag_positions(length, cp.size, cp.index) if p % block == 0)


def gather_positions(x: Tensor, cp: Group) -> Tensor:
    """Gather zigzag shards [s, ...] of every CP rank into position order [s·cp, ...]; moves bits only."""
    if cp.size == 1:
        return x
    half = x.shape[0] // 2
    shards = collectives.gather(x.unsqueeze(0), cp, dim=0).view(cp.size, 2, half, *x.shape[1:])
    order = [(0, 0)] * (2 * cp.size)
    for rank in range(cp.size):
        for part, chunk in enumerate(zigzag_chunks(cp.size, rank)):
            order[chunk] = (rank, part)
    return torch.cat([shards[rank, part] for rank, part in order])


def own_positions(x: Tensor, cp: Group) -> Tensor:
    """Return this rank's zigzag shard [S / cp, ...] of a tensor [S, ...] in position order."""
    return x if cp.size == 1 else x.index_select(0, local_positions(x.shape[0], cp, x.device))
