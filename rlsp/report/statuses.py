"""Exit statuses of the `rlsp` command, and which one stands for several."""

from __future__ import annotations

from collections.abc import Iterable

PASSED, CRASHED, REFUSED, FAILED, INCONCLUSIVE = range(5)

_WORST_FIRST = (CRASHED, REFUSED, FAILED, INCONCLUSIVE, PASSED)


def worst(statuses: Iterable[int]) -> int:
    """Return the status that stands for several: the first of 1, 2, 3, 4, 0 among them; others count as 1."""
    seen = {status if status in _WORST_FIRST else CRASHED for status in statuses}
    return next((status for status in _WORST_FIRST if status in seen), PASSED)
