"""The arithmetic of the mismatch measures: importance ratios, probabilities, sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlsp.report.mismatch_records import Mismatch, MismatchSums
from rlsp.report.statistics import Doubles, Floats, Mask, exact_sum

_LN_2 = math.log(2.0)
# A variance below this part of the mean square is mostly rounding: there is nothing to correlate.
_LEAST_VARIANCE = 1e-6
_SMALLEST = frozenset({"log_ratio_min", "sequence_log_ratio_min"})
_LARGEST = frozenset(
    {"log_ratio_max", "probability_abs_max", "sequence_multiplicative_max", "sequence_log_ratio_max"}
)
_WEIGHTS = ("sequence_weight", "sequence_weight_squared")


def mismatch(rollout_logprob: Floats, train_logprob: Floats, active_mask: Mask) -> Mismatch:
    """Measure one rollout.

    Args:
        rollout_logprob: Recorded as the token was drawn, shape [N, S], float32.
        train_logprob: From the differentiated forward pass, shape [N, S], float32.
        active_mask: Tokens that count, shape [N, S], bool.
    """
    rows = [row for row in range(len(active_mask)) if active_mask[row].any()]
    rollout, train = (
        [side[row][active_mask[row]].astype(np.float64) for row in rows]
        for side in (rollout_logprob, train_logprob)
    )
    with np.errstate(invalid="ignore", over="ignore"):
        sequences = [b - a for a, b in zip(rollout, train, strict=True)]
        sums = (
            MismatchSums(
                **_ratio_sums(np.concatenate(sequences)),
                **_probability_sums(np.concatenate(rollout), np.concatenate(train)),
                **_sequence_sums(sequences),
            )
            if rows
            else _nothing()
        )
    return _derived(int(np.count_nonzero(active_mask)), sums)


def combined_mismatch(active: int, parts: Sequence[Mismatch]) -> Mismatch:
    """Combine the measures of rollouts that together have `active` tokens; parts without any are left out."""
    sums = [part.sums for part in parts if part.sums.sequences]
    with np.errstate(invalid="ignore", over="ignore"):
        return _derived(active, _combined(sums) if sums else _nothing())


def _nothing() -> MismatchSums:
    """Return the sums over no token."""
    return MismatchSums(**dict.fromkeys(MismatchSums.model_fields, 0))


def _ratio_sums(d: Doubles) -> dict[str, Any]:
    excess, distance = np.expm1(d), np.abs(d)
    return {
        "multiplicative": exact_sum(np.expm1(distance)),
        "k3_reverse": exact_sum(np.expm1(-d) + d),
        "js": exact_sum(_log_cosh(distance / 2)),
        "ratio": exact_sum(excess),
        "ratio_abs": exact_sum(np.abs(excess)),
        "ratio_squared": exact_sum(excess * excess),
        "log_ratio_min": float(np.min(d)),
        "log_ratio_max": float(np.max(d)),
        # On logarithms, so that no exponential's last bit decides.
        "below_half": int(np.count_nonzero(d < -_LN_2)),
        "above_two": int(np.count_nonzero(d > _LN_2)),
    }


def _log_cosh(x: Doubles) -> Doubles:
    """Compute log cosh of x >= 0: one form loses small values, the other overflows for large ones."""
    small = np.log1p(2.0 * np.square(np.sinh(x / 2)))
    found: Doubles = np.where(x < 1.0, small, x + np.log1p(np.exp(-2.0 * x)) - _LN_2)
    return found


def _probability_sums(a: Doubles, b: Doubles) -> dict[str, Any]:
    p, q = np.exp(a), np.exp(b)
    # q - p would have lost what the probabilities share.
    distance = np.exp(np.maximum(a, b)) * -np.expm1(-np.abs(b - a))
    return {
        "rollout_probability": exact_sum(p),
        "rollout_probability_squared": exact_sum(p * p),
        "train_probability": exact_sum(q),
        "train_probability_squared": exact_sum(q * q),
        "probability_product": exact_sum(p * q),
        "probability_abs": exact_sum(distance),
        "probability_abs_squared": exact_sum(distance * distance),
        "probability_abs_max": float(np.max(distance)),
    }


def _sequence_sums(sequences: Sequence[Doubles]) -> dict[str, Any]:
    length = np.array([d.size for d in sequences], dtype=np.float64)
    log_ratio = np.array([exact_sum(d) for d in sequences])
    distance = np.array([exact_sum(np.abs(d)) for d in sequences]) / length
    multiplicative = np.array([exact_sum(np.expm1(np.abs(d))) for d in sequences]) / length
    largest = float(np.max(log_ratio))
    weight = np.exp(log_ratio - largest)
    return {
        "sequences": len(sequences),
        "sequence_distance": exact_sum(distance),
        "sequence_multiplicative_max": float(np.max(multiplicative)),
        "sequence_k1": 0.0 - exact_sum(log_ratio),
        "sequence_k3": exact_sum(np.expm1(log_ratio) - log_ratio),
        "sequence_chi2": exact_sum(np.expm1(2.0 * log_ratio)),
        "sequence_ppl": exact_sum(np.expm1((0.0 - log_ratio) / length)),
        "sequence_log_ppl_abs": exact_sum(np.abs(log_ratio) / length),
        "sequence_log_ratio_min": float(np.min(log_ratio)),
        "sequence_log_ratio_max": largest,
        "sequence_weight": exact_sum(weight),
        "sequence_weight_squared": exact_sum(weight * weight),
    }


def _combined(parts: Sequence[MismatchSums]) -> MismatchSums:
    """Add sums, take extremes, and rescale the weights to their common largest exponent."""
    found: dict[str, Any] = {}
    for name, field in MismatchSums.model_fields.items():
        values = [getattr(part, name) for part in parts]
        if name in _SMALLEST:
            found[name] = float(np.min(values))
        elif name in _LARGEST:
            found[name] = float(np.max(values))
        elif field.annotation is int:
            found[name] = sum(values)
        else:
            found[name] = exact_sum(np.array(values, dtype=np.float64))
    shift = np.array([part.sequence_log_ratio_max for part in parts]) - found["sequence_log_ratio_max"]
    for power, name in enumerate(_WEIGHTS, start=1):
        found[name] = exact_sum(np.exp(shift) ** power * np.array([getattr(part, name) for part in parts]))
    return MismatchSums(**found)


def _derived(active: int, sums: MismatchSums) -> Mismatch:
    """Turn sums over `active` tokens into the measures."""
    tokens, sequences = max(active, 1), max(sums.sequences, 1)
    extremes = (sums.log_ratio_min, sums.log_ratio_max)
    sequence_extremes = (sums.sequence_log_ratio_min, sums.sequence_log_ratio_max)
    with np.errstate(invalid="ignore", over="ignore"):
        ratio_min, ratio_max = map(float, np.exp(extremes))
        sequence_ratio_min, sequence_ratio_max = map(float, np.exp(sequence_extremes))
    return Mismatch(
        multiplicative_error=1.0 + sums.multiplicative / tokens,
        kl_k3_reverse=sums.k3_reverse / tokens,
        js_divergence=sums.js / tokens,
        ratio_mean=1.0 + sums.ratio / tokens,
        ratio_std=_deviation(sums.ratio / tokens, sums.ratio_squared / tokens),
        ratio_min=ratio_min,
        ratio_max=ratio_max,
        ratio_mean_abs=sums.ratio_abs / tokens,
        chi2=(sums.ratio_squared + 2.0 * sums.ratio) / tokens,
        ratio_below_half=sums.below_half / tokens,
        ratio_above_two=sums.above_two / tokens,
        probability_mean_abs=sums.probability_abs / tokens,
        probability_std_abs=_deviation(sums.probability_abs / tokens, sums.probability_abs_squared / tokens),
        probability_max_abs=sums.probability_abs_max,
        probability_correlation=_correlation(tokens, sums),
        sequences=sums.sequences,
        sequence_mean_abs=sums.sequence_distance / sequences,
        sequence_multiplicative_error_max=1.0 + sums.sequence_multiplicative_max,
        sequence_kl_k1=sums.sequence_k1 / sequences,
        sequence_kl_k3=sums.sequence_k3 / sequences,
        sequence_chi2=sums.sequence_chi2 / sequences,
        sequence_ratio_min=sequence_ratio_min,
        sequence_ratio_max=sequence_ratio_max,
        sequence_ess=_sequence_ess(sums),
        sequence_ppl_ratio=1.0 + sums.sequence_ppl / sequences,
        sequence_log_ppl_abs=sums.sequence_log_ppl_abs / sequences,
        sums=sums,
    )


def _deviation(mean: float, mean_square: float) -> float:
    """Return the population's standard deviation; infinite where the squares are."""
    variance = mean_square if math.isinf(mean_square) else mean_square - mean * mean
    return 0.0 if variance < 0.0 else math.sqrt(variance)


def _sequence_ess(sums: MismatchSums) -> float:
    if sums.sequences == 0:
        return 0.0
    return sums.sequence_weight * sums.sequence_weight / (sums.sequences * sums.sequence_weight_squared)


def _correlation(tokens: int, sums: MismatchSums) -> float:
    """Return Pearson's correlation of both sides' probabilities; NaN where there is none."""
    p, q = sums.rollout_probability, sums.train_probability
    pp, qq, pq = (
        sums.rollout_probability_squared,
        sums.train_probability_squared,
        sums.probability_product,
    )
    if not all(map(math.isfinite, (p, q, pp, qq, pq))):
        return math.nan
    if p == q and pp == qq == pq:
        return 1.0
    rollout, train = tokens * pp - p * p, tokens * qq - q * q
    if rollout <= max(_LEAST_VARIANCE * tokens * pp, 0.0) or train <= max(_LEAST_VARIANCE * tokens * qq, 0.0):
        return math.nan
    found = (tokens * pq - p * q) / (math.sqrt(rollout) * math.sqrt(train))
    # The smaller of a number and NaN is whichever stands first.
    return math.nan if math.isnan(found) else min(1.0, max(-1.0, found))
