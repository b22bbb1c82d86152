"""What consistency.json says of importance ratios and probabilities, in the measures of other frameworks."""

from __future__ import annotations

from rlsp.report.documents import Count, Document


class MismatchSums(Document):
    """Float64 sums, counts and extremes over one rollout, from which those over several follow.

    Over active tokens, with a = rollout's log-probability, b = training's, d = b - a, r = exp(d), p = exp(a),
    q = exp(b): `multiplicative` sums exp|d| - 1, `k3_reverse` exp(-d) - 1 + d, `js` log cosh(d/2),
    `ratio` r - 1, `ratio_abs` |r - 1|, `ratio_squared` (r - 1)^2. Sums of differences from 1 are kept, since
    near 1 the sums of r itself have lost them.

    Over sequences with an active token, with D = the sequence's sum of d, n = its active tokens, R = exp(D):
    `sequence_distance` sums the mean |d|, `sequence_k1` -D, `sequence_k3` R - 1 - D, `sequence_chi2` R^2 - 1,
    `sequence_ppl` exp(-D/n) - 1, `sequence_log_ppl_abs` |D|/n; `sequence_weight` and
    `sequence_weight_squared` sum w and w^2 with w = exp(D - sequence_log_ratio_max).
    """

    multiplicative: float
    k3_reverse: float
    js: float
    ratio: float
    ratio_abs: float
    ratio_squared: float
    log_ratio_min: float
    log_ratio_max: float
    below_half: Count
    above_two: Count
    rollout_probability: float
    rollout_probability_squared: float
    train_probability: float
    train_probability_squared: float
    probability_product: float
    probability_abs: float
    probability_abs_squared: float
    probability_abs_max: float
    sequences: Count
    sequence_distance: float
    sequence_multiplicative_max: float
    sequence_k1: float
    sequence_k3: float
    sequence_chi2: float
    sequence_ppl: float
    sequence_log_ppl_abs: float
    sequence_log_ratio_min: float
    sequence_log_ratio_max: float
    sequence_weight: float
    sequence_weight_squared: float


class Mismatch(Document):
    """Measures of the mismatch beside those of `Statistics`, in the notation of `MismatchSums`.

    multiplicative_error = mean exp|d|; kl_k3_reverse = mean(exp(-d) - 1 + d), the k3 of the other direction
    on the rollout's samples; js_divergence = mean log cosh(d/2), which is the half sum of both sides' k3 to
    their mixture; ratio_mean, _std (population), _min, _max of r, ratio_mean_abs of |r - 1|; chi2 =
    mean(r^2) - 1; ratio_below_half and ratio_above_two: parts of the tokens; probability_mean_abs, _std_abs
    (population) and _max_abs of |q - p|; probability_correlation is Pearson's of p and q, 1 where all sums
    agree, else NaN where a side varies by less than a thousandth of its root mean square.

    sequence_mean_abs = mean over sequences of the mean |d|; sequence_multiplicative_error_max = the largest
    mean exp|d| of a sequence; sequence_kl_k1 = mean(-D); sequence_kl_k3 = mean(R - 1 - D); sequence_chi2 =
    mean(R^2) - 1; sequence_ratio_min, _max of R; sequence_ess = (sum R)^2 / (M sum R^2) over M sequences;
    sequence_ppl_ratio = mean exp(-D/n); sequence_log_ppl_abs = mean |D|/n.

    Without active tokens distances and sequence_ess are 0, ratios and the correlation 1.
    """

    multiplicative_error: float
    kl_k3_reverse: float
    js_divergence: float
    ratio_mean: float
    ratio_std: float
    ratio_min: float
    ratio_max: float
    ratio_mean_abs: float
    chi2: float
    ratio_below_half: float
    ratio_above_two: float
    probability_mean_abs: float
    probability_std_abs: float
    probability_max_abs: float
    probability_correlation: float
    sequences: Count
    sequence_mean_abs: float
    sequence_multiplicative_error_max: float
    sequence_kl_k1: float
    sequence_kl_k3: float
    sequence_chi2: float
    sequence_ratio_min: float
    sequence_ratio_max: float
    sequence_ess: float
    sequence_ppl_ratio: float
    sequence_log_ppl_abs: float
    sums: MismatchSums


MEASURES = tuple(name for name in Mismatch.model_fields if name != "sums")
"""The names that metrics.jsonl has below `mismatch/`."""
