"""The digest that is shown, from the hashes of virtual shards: integers only, no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable


def as_int64(word: int) -> int:
    """Reinterpret an integer of 64 bits, signed or unsigned, as the signed one with the same bits.

    Raises:
        ValueError: If `word` does not fit in 64 bits.
    """
    if not -(1 << 63) <= word < 1 << 64:
        raise ValueError(f"{word} does not fit in 64 bits")
    return word - (1 << 64) if word >= 1 << 63 else word


def digest(entries: Iterable[tuple[str, int, int, int]]) -> str:
    """Digest the hashes of named shards into the 64 hex characters that are shown.

    Args:
        entries: (name, index of the virtual shard, high hash, low hash), in any order; the hashes as in
            `rlsp.bits.shard_hashes`, signed or unsigned. Names may repeat, pairs of name and shard may not.

    Returns:
        The SHA-256 over the entries in order of name and shard.

    Raises:
        ValueError: If there is no entry (nothing would equal nothing) or a shard stands twice.
    """
    ordered = sorted(entries)
    if not ordered:
        raise ValueError("a digest of no shards proves nothing")
    state = hashlib.sha256()
    previous: tuple[str, int] | None = None
    for name, shard, high, low in ordered:
        if (name, shard) == previous:
            raise ValueError(f"shard {shard} of {name!r} stands twice in one digest")
        previous = (name, shard)
        state.update(json.dumps([name, shard, as_int64(high), as_int64(low)]).encode() + b"\n")
    return state.hexdigest()
