"""What ranks that made different calls are told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class History:
    """What one rank says it called on a group.

    Attributes:
        rank: The rank, globally.
        chain: Hash of all its calls, in order.
        recent: Number and signature of the last few.
    """

    rank: int
    chain: str
    recent: tuple[tuple[int, str], ...]


def compare(label: str, histories: Sequence[History]) -> str:
    """Name the ranks that differ from the rest, the first call where they do, and every rank's last calls.

    Args:
        label: The group.
        histories: One for each of its ranks, with at least one call each.
    """
    kept = [dict(history.recent) for history in histories]
    oldest = max(min(calls) for calls in kept)  # before that, some rank has forgotten what it called
    for number in range(oldest, max(max(calls) for calls in kept) + 1):
        said = [calls.get(number, "not there yet") for calls in kept]
        if len(set(said)) > 1:
            when = f"first at call {number}"
            break
    else:
        said = [history.chain for history in histories]
        when = f"before call {oldest}, the oldest that all of them remember"
    usual = max(said, key=said.count)  # of equally many, what the lowest rank said
    differing = [str(history.rank) for history, each in zip(histories, said, strict=True) if each != usual]
    lines = [
        f"the ranks of {label} made different calls, {when}: {', '.join(differing)} differ from the rest"
    ]
    lines += [f"rank {history.rank}: {listed(history.recent)}" for history in histories]
    return "\n  ".join(lines)


def listed(calls: Iterable[tuple[int, str]]) -> str:
    """Write calls in one line."""
    return "; ".join(f"{number} {signature}" for number, signature in calls)
