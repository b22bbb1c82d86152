"""What overrides say beyond their values: how many jobs they make, and which group is left out."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from hydra.core.override_parser.types import Override, RangeSweep

MAX_JOBS = 1000
"""Most jobs of one sweep: each is composed and checked before the first one starts."""

OPTIONAL_GROUPS = ("experiment",)
"""Groups of which no option need be chosen."""


def count_values(override: Override) -> int:
    """Count what an override sweeps over, without making a list of it."""
    value = override.value()
    if not isinstance(value, RangeSweep):
        return sum(1 for _ in override.sweep_iterator()) if override.is_discrete_sweep() else 1
    assert value.start is not None
    assert value.stop is not None
    try:
        return max(0, ceil((value.stop - value.start) / value.step))
    except (OverflowError, ZeroDivisionError, ValueError):  # up to infinity, or in steps of nothing
        return MAX_JOBS + 1


def spelt_out(overrides: Sequence[str]) -> list[str]:
    """Replace `GROUP=null`, for a group that may be left out, by Hydra's own way to say that."""
    return [
        f"~{text.partition('=')[0]}" if text in [f"{group}=null" for group in OPTIONAL_GROUPS] else text
        for text in overrides
    ]
