"""Weights by name and virtual shard: their digest, and the way from training's layout to the rollout's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from rlsp import bits, collectives
from rlsp.digest import digest
from rlsp.groups import Group
from rlsp.messages import BUCKET_BYTES
from rlsp.model.build import PolicyModel

Named = tuple[str, Tensor, bool]
"""A tensor by name, and whether it is sharded [V_local, ...] or every rank has a copy."""

Entry = tuple[str, int, int, int]
"""(name, virtual shard, high hash, low hash), as `rlsp.digest.digest` takes them."""


class ReplicaDriftError(RuntimeError):
    """Ranks that each hold a copy of a tensor hold different bits; the message names tensors and ranks."""


def weights_digest(model: PolicyModel) -> str:
    """Return the layout-free digest of a model's weights, 64 hex characters; its whole TP group calls it.

    Raises:
        ReplicaDriftError: The ranks hold different bits of a weight that each should have a copy of.
    """
    return digest(weight_entries(model))


def weight_entries(model: PolicyModel) -> list[Entry]:
    """Hash a model's weights by name and virtual shard; its whole TP group calls it.

    Raises:
        ReplicaDriftError: The ranks hold different bits of a weight that each should have a copy of.
    """
    named = ((name, parameter.detach(), sharded) for name, parameter, sharded in model.named_shards())
    return shard_entries(named, model.wiring.tp)


def digest_of(logical: Iterable[tuple[str, Tensor]]) -> str:
    """Return the digest that a model has which holds these weights, `weights_digest`'s.

    Args:
        logical: Each by name, whole: a matrix as all its virtual shards [V, N, K], a norm's weight as [n].
    """
    alone = Group("alone", (0,), 0)
    # One at a time in memory.
    return digest(entry for name, x in logical for entry in shard_entries([(name, x, x.dim() > 1)], alone))


def shard_entries(tensors: Iterable[Named], tp: Group) -> list[Entry]:
    """Hash tensors that `tp` holds as virtual shards, or as copies: in place, then gather 16 bytes a shard.

    Args:
        tensors: By name, each with its place.
        tp: The group whose ranks hold the shards.

    Returns:
        Every shard's entry on every rank; a copy has one.

    Raises:
        ReplicaDriftError: On every rank of `tp`, naming each tensor whose copies differ, and the ranks.
    """
    tensors = list(tensors)
    hashes = [bits.shard_hashes(x if sharded else x.unsqueeze(0)) for _, x, sharded in tensors]
    every = collectives.gather(torch.cat(hashes).unsqueeze(0), tp, dim=0)
    entries: list[Entry] = []
    drifted: list[str] = []
    parts = every.split([local.shape[0] for local in hashes], dim=1)
    for (name, _, sharded), part in zip(tensors, parts, strict=True):
        odd = [tp.ranks[i] for i in range(tp.size) if not sharded and not bits.same_bits(part[i], part[0])]
        drifted += [f"{name} (ranks {odd})"] if odd else []
        distinct = part if sharded else part[:1]
        hashed = enumerate(distinct.reshape(-1, 2).tolist())
        entries += [(name, shard, high, low) for shard, (high, low) in hashed]
    if drifted:
        raise ReplicaDriftError(f"copies differ from those on rank {tp.ranks[0]}: " + ", ".join(drifted))
    return entries


def hand_over(trainer: PolicyModel, engine: PolicyModel | None, rollout_tp: int) -> None:
    """Copy the trainer's weights into the rollout's layout, moving bits only; every rank calls it.

    Where both layouts have one TP size every rank already holds its shards (both number TP fastest) and
    nothing is sent. Otherwise the shards are gathered over the trainer's TP group, a bounded bucket of
    parameters at a time, and the engine's own are cut out; a rank without an engine (None) only sends.
    """
    source = trainer.wiring.tp
    alike = source.size == rollout_tp
    targets = {} if engine is None else {name: parameter for name, parameter, _ in engine.named_shards()}
    moved: list[tuple[str, Tensor]] = [
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
