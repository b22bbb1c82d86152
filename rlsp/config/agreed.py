"""What all machines of a run must say alike."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from rlsp.config.plain import to_plain
from rlsp.config.schema import Config

OWN_KEYS = frozenset({"cluster.node", "cluster.host", "resume", "tracker", "launch.progress"})
"""Where a machine stands, how it names the run that it goes on with, and what only the command that owns the
run uses (a section: all of its keys)."""


def agreed(config: Config) -> dict[str, Any]:
    """List the keys in which no two ranks of a run may differ, dotted, with their plain values."""
    return {
        key: value
        for key, value in _leaves(to_plain(config))
        if key not in OWN_KEYS and key.partition(".")[0] not in OWN_KEYS
    }


def agreed_hash(config: Config) -> str:
    """Hash what all ranks must agree on: SHA-256, 64 hex characters."""
    return hashlib.sha256(json.dumps(agreed(config), sort_keys=True).encode()).hexdigest()


def _leaves(plain: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in plain.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
