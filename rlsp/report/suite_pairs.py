"""Two arms of a published suite against each other, and every reason why they cannot be."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rlsp.report.compare_rules import LENGTH_KEY, unequal
from rlsp.report.suite_arms import Arm, mean, median

# What a suite's arms vary; anything else that differed might be what makes the difference.
_VARIED = frozenset({LENGTH_KEY, "reuse_rollout_logprob"})
_VARIED_SECTIONS = ("numerics.routes.", "correction.")


class UnlikePairError(ValueError):
    """Two arms that differ in more than what a suite varies; the message lists in what."""


@dataclass(frozen=True)
class Pair:
    """Two arms on the same prompts and seeds, rollout by rollout.

    Attributes:
        first: Name of one arm.
        second: Name of the other.
        rollouts: Rollouts that both have.
        reward_difference: Mean of second − first.
        reward_error: Its standard error over rollouts.
        step_ratio: Median of second / first of a rollout's seconds.
    """

    first: str
    second: str
    rollouts: int
    reward_difference: float
    reward_error: float
    step_ratio: float


def pair(first: Arm, second: Arm) -> Pair:
    """Compare two arms rollout by rollout.

    Raises:
        UnlikePairError: They differ in more than a suite varies, or have no rollout in common.
    """
    if found := list(_differences(first, second)):
        raise UnlikePairError(f"{first.name} and {second.name} are no pair: {'; '.join(found)}")
    one, other = (dict(arm.curves["reward/mean"]) for arm in (first, second))
    common = sorted(one.keys() & other.keys())
    differences = [other[at] - one[at] for at in common]
    slow, fast = (dict(arm.curves["time/total_s"]) for arm in (first, second))
    return Pair(
        first=first.name,
        second=second.name,
        rollouts=len(common),
        reward_difference=mean(differences),
        reward_error=_error(differences),
        step_ratio=median([fast[at] / slow[at] for at in sorted(slow.keys() & fast.keys())]),
    )


def _error(values: list[float]) -> float:
    """Return the standard error of a mean; NaN where a value is not finite."""
    if not all(map(math.isfinite, values)):
        return math.nan
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def _differences(a: Arm, b: Arm) -> Iterator[str]:
    """Yield what two arms must have in common and do not."""
    for what, of in (("code", "source_hash"), ("data", "data_hash"), ("processor", "processor")):
        yield from unequal(what, getattr(a, of), getattr(b, of))
    yield from _of_keys(a.packages, b.packages)
    yield from _of_keys(a.placement, b.placement)
    yield from _of_keys(a.settings, b.settings)
    for metric in ("reward/mean", "time/total_s"):
        if not {at for at, _ in a.curves[metric]} & {at for at, _ in b.curves[metric]}:
            yield f"no rollout of both has {metric}"


def _of_keys(a: Mapping[str, object], b: Mapping[str, object]) -> Iterator[str]:
    for key in sorted(a.keys() | b.keys()):
        if key not in _VARIED and not key.startswith(_VARIED_SECTIONS):
            yield from unequal(key, a.get(key), b.get(key))
