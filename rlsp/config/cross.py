"""A rule over several keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlsp.config.schema import Config

WORLD = ("parallel.dp", "parallel.cp", "parallel.tp")
"""What the number of ranks is made of."""


@dataclass(frozen=True)
class CrossRule:
    """Relate several keys: the first is the one that a violation names, `legal` says what it may be."""

    keys: tuple[str, ...]
    holds: Callable[[Config], bool]
    legal: Callable[[Config], str]


def divisors(number: int) -> str:
    """List the divisors of a number, for people."""
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
