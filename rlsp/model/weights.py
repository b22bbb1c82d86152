"""Weights by name and virtual shard: their digest, and their way from the training layout to the rollout's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from rlsp import bits, collectives
from rlsp.groups import Group
from rlsp.model.build import PolicyModel

BUCKET_BYTES = 64 << 20


def weights_digest(model: PolicyModel) -> str:
    """Return the layout-free digest of a model's weights, 64 hex characters; every rank of its TP group calls it."""
    return tensors_digest(
        [(name, parameter.detach(), sharded) for name, parameter, sharded in model.named_shards()],
        model.wiring.tp,
    )


def tensors_digest(tensors: Iterable[tuple[str, Tensor, bool]], tp: Group) -> str:
    """Digest tensors held as virtual shards (or replicated) over `tp`: hash in place, gather 16 bytes a shard.

    Args:
        tensors: (name, tensor, sharded); a sharded tensor is [V_local, ...].
        tp: The group whose ranks hold the shards.
    """
    tensors = list(tensors)
    hashes = [bits.shard_hashes(x if sharded else x.unsqueeze(0)) for _, x, sharded in tensors]
    every = collectives.gather(torch.cat(hashes).unsqueeze(0), tp, dim=0)
    entries, start = [], 0
    for (name, _, sharded), local in zip(tensors, hashes, strict=True):
        part = every[: tp.size if sharded else 1, start : start + local.shape[0]].reshape(-1, 2).tolist()
        entries += [(name, shard, high, low) for shard, (high, low) in enumerate(part)]
        start += local.shape[0]
    return bits.digest(entries)


def hand_over(trainer: PolicyModel, engine: PolicyModel | None, rollout_tp: int) -> None:
    """Copy the trainer's weights into the rollout's layout, moving bits only; every rank calls it.

    Where both layouts have one TP size every rank already holds its shards (both number TP fastest) and nothing is sent.
    Otherwise the shards are gathered over the trainer's TP group, a bounded bucket of parameters at a time, and the
    engine's own are cut out; a rank without an engine (None) only sends.
    """
    source = trainer.wiring.tp
    alike = source.size == rollout_tp
    targets = {} if engine is None else {name: parameter for name, parameter, _ in engine.named_shards()}
    moved = [
        (name, parameter) for name, parameter, sharded in trainer.named_shards() if sharded and not alike
    ]
    with torch.no_grad():
        for name, parameter, sharded in trainer.named_shards():
            if targets and (alike or not sharded):
                targets[name].copy_(parameter)
        for bucket in _buckets(moved, source.size):
            every = collectives.gather(
                torch.cat([x.detach().view(-1) for _, x in bucket]).unsqueeze(0), source, dim=0
            )
            for (name, x), part in zip(
                bucket, every.split([x.numel() for _, x in bucket], dim=1), strict=True
            ):
                if engine is not None:
                    own, index = targets[name], engine.wiring.tp.index
                    own.copy_(
                        part.reshape(-1, *x.shape[1:])[index * own.shape[0] : (index + 1) * own.shape[0]]
                    )


def _buckets(parameters: list[tuple[str, Tensor]], ranks: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Group parameters so that a gathered bucket stays near BUCKET_BYTES."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, x in parameters:
        bucket.append((name, x))
        size += x.numel() * x.element_size() * ranks
        if size >= BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket
