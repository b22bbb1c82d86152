"""The arithmetic of the comparison: distances in float64 and in float32 steps, KL estimators, sample size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlsp.report.records import TokenSums

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

# Below this many overlapping tokens a shifted match may be chance.
_SHIFT_MIN_TOKENS = 4
# A shift is suspected where it brings the mean |delta| below this part of the unshifted one.
_SHIFT_RATIO = 0.1


def ulp_distance(a: Floats, b: Floats) -> Integers:
    """Count float32 steps between two arrays; 0 only for equal bit patterns (-0.0 is one step below 0.0)."""

    def ordered(x: Floats) -> Integers:
        bits = np.ascontiguousarray(x).view(np.int32).astype(np.int64)
        return np.where(bits < 0, -1 - (bits & 0x7FFFFFFF), bits)

    distance: Integers = np.abs(ordered(a) - ordered(b))
    return distance


def ulp_histogram(ulps: Integers) -> dict[str, int]:
    """Count distances in buckets named by their lower bound: 0 and the powers of two."""
    # frexp is exact here: distances stay below 2^33, and float64 holds those.
    exponents = np.where(ulps == 0, -1, np.frexp(ulps.astype(np.float64))[1] - 1)
    values, counts = np.unique(exponents, return_counts=True)
    return {
        str(0 if exponent < 0 else 1 << int(exponent)): int(count)
        for exponent, count in zip(values, counts, strict=True)
    }


def exact_sum(x: Doubles) -> float:
    """Sum exactly and round once, so that no order enters; non-finite addends give NaN or an infinity."""
    if np.isfinite(x).all():
        try:
            return math.fsum(x.tolist())
        except OverflowError:
            pass
    return float(np.sum(x))


def token_sums(difference: Doubles) -> TokenSums:
    """Sum what the statistics need over d = train - rollout, shape [T]."""
    largest = float(np.max(difference)) if difference.size else 0.0
    weight = np.exp(difference - largest)
    return TokenSums(
        absolute=exact_sum(np.abs(difference)),
        difference=exact_sum(difference),
        k3=exact_sum(np.expm1(difference) - difference),
        log_weight_max=largest,
        weight=exact_sum(weight),
        weight_squared=exact_sum(weight * weight),
    )


def combined_sums(parts: Sequence[TokenSums]) -> TokenSums:
    """Add the sums of several rollouts, weights rescaled to their common largest exponent."""

    def added(values: list[float]) -> float:
        return exact_sum(np.asarray(values, dtype=np.float64))

    with np.errstate(invalid="ignore", over="ignore"):
        largest = float(np.max([part.log_weight_max for part in parts])) if parts else 0.0
        scale = [float(np.exp(np.float64(part.log_weight_max) - largest)) for part in parts]
        return TokenSums(
            absolute=added([part.absolute for part in parts]),
            difference=added([part.difference for part in parts]),
            k3=added([part.k3 for part in parts]),
            log_weight_max=largest,
            weight=added([s * part.weight for s, part in zip(scale, parts, strict=True)]),
            weight_squared=added([s * s * part.weight_squared for s, part in zip(scale, parts, strict=True)]),
        )


def derived(active: int, sums: TokenSums) -> dict[str, Any]:
    """Turn sums over `active` tokens into the means and ratios that are reported."""
    if active == 0:
        return {"active_tokens": 0, "mean_abs": 0.0, "kl_k1": 0.0, "kl_k3": 0.0, "ppl_ratio": 1.0, "ess": 0.0}
    # Negating a sum of zero would report a KL of -0.0.
    k1 = 0.0 - sums.difference / active
    with np.errstate(over="ignore", invalid="ignore"):
        ppl_ratio = float(np.exp(np.float64(k1)))
    return {
        "active_tokens": active,
        "mean_abs": sums.absolute / active,
        "kl_k1": k1,
        "kl_k3": sums.k3 / active,
        "ppl_ratio": ppl_ratio,
        "ess": sums.weight * sums.weight / (active * sums.weight_squared),
    }


def suspected_shift(rollout: Floats, train: Floats, active: Mask) -> int | None:
    """Find the shift by one position that explains a mismatch, if any."""
    unshifted = _mean_distance(rollout, train, active)
    if unshifted is None or unshifted == 0.0:
        return None
    for shift in (1, -1):
        ahead, behind = (slice(1, None), slice(None, -1)) if shift == 1 else (slice(None, -1), slice(1, None))
        both = active[:, ahead] & active[:, behind]
        distance = _mean_distance(rollout[:, ahead], train[:, behind], both)
        if distance is not None and distance < _SHIFT_RATIO * unshifted:
            return shift
    return None


def _mean_distance(a: Floats, b: Floats, mask: Mask) -> float | None:
    """Return the mean |a - b| over tokens finite on both sides, or None where they are too few to tell."""
    finite = mask & np.isfinite(a) & np.isfinite(b)
    if np.count_nonzero(finite) < _SHIFT_MIN_TOKENS:
        return None
    return float(np.mean(np.abs(a[finite].astype(np.float64) - b[finite].astype(np.float64))))


def is_fed(logprob: Floats, row_digest: Integers) -> bool:
    """Tell whether anything was computed for a side: a log-probability or a row digest."""
    return logprob.size == 0 or bool((np.isfinite(logprob) & (logprob != 0)).any() or (row_digest != 0).any())
