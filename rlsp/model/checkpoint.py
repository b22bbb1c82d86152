"""Tensors of a checkpoint: each TP rank's virtual shards in a safetensors file, read back by any layout.

A tensor stands under its name; the file says which virtual shards it has. A tensor of which every rank has a
copy stands in the file of virtual shard 0 alone. Nothing but safetensors is read: no pickle, no code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rlsp.model.weights import Named

RANGE_KEY = "virtual_shards"


class CheckpointError(RuntimeError):
    """State that cannot be read back as it was saved; the message names file and tensor."""


@dataclass(frozen=True)
class ShardFile:
    """A file with the virtual shards `first` to `end` - 1 of every tensor."""

    path: Path
    first: int
    end: int


def write_shards(path: Path, named: Iterable[Named], shards: range) -> None:
    """Write what one TP rank holds of some tensors.

    Args:
        path: The file.
        named: Tensors [V_local, …] of the virtual shards `shards`, or copies.
        shards: Adjacent; the file of shard 0 has the copies.

    Raises:
        CheckpointError: The file cannot be written.
    """
    held = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor, sharded in named
        if sharded or shards.start == 0
    }
    try:
        save_file(held, path, metadata={RANGE_KEY: f"{shards.start}:{shards.stop}"})
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error


def read_shards(files: Sequence[ShardFile], named: Iterable[Named], shards: range) -> None:
    """Fill tensors with what a checkpoint has of them, reading no other shards than theirs.

    Args:
        files: The checkpoint's, whose ranges together make up all virtual shards.
        named: Tensors [V_local, …] of the virtual shards `shards`, or copies; overwritten.
        shards: Adjacent, as any layout cuts them.

    Raises:
        CheckpointError: A file cannot be read, has other shards than it should, or lacks a tensor, or a
            tensor has another dtype or shape.
    """
    wanted = list(named)
    every = range(max(file.end for file in files))
    with torch.no_grad():
        for file in sorted(files, key=lambda each: each.first):
            # A copy is read as the one shard that the first file has of it.
            own = range(max(shards.start, file.first), min(shards.stop, file.end))
            chosen = [entry for entry in wanted if (own if entry[2] else file.first == every.start)]
            if chosen:
                _read(file, chosen, own, shards)


def _read(file: ShardFile, named: Iterable[Named], own: range, shards: range) -> None:
    try:
        with safe_open(file.path, framework="pt") as opened:
            said = (opened.metadata() or {}).get(RANGE_KEY)
            if said != f"{file.first}:{file.end}":
                raise CheckpointError(
                    f"{file.path.name} has the virtual shards {said}, not {file.first}:{file.end}"
                )
            known = set(opened.keys())
            for name, target, sharded in named:
                if name not in known:
                    raise CheckpointError(f"{file.path.name} lacks {name}")
                found = opened.get_slice(name)
                part = slice(own.start - file.first, own.stop - file.first) if sharded else slice(None)
                into = target.detach()
                into = into[own.start - shards.start : own.stop - shards.start] if sharded else into
                read = found[part]
                if read.dtype != into.dtype or read.shape != into.shape:
                    what = f"{read.dtype} {list(read.shape)}, not {into.dtype} {list(into.shape)}"
                    raise CheckpointError(f"{file.path.name}: {name} is {what}")
                into.copy_(read)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file.path.name} cannot be read: {error}") from error
