"""The one registry of metrics: what a run may log, what it means, and which value a summary keeps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from rlsp.report.files import EvidenceError

STEP = "rollout"
RECORDED_PREFIXES = ("consistency/", "mismatch/")


class Keep(Enum):
    """Which value of a metric stands for the whole run."""

    LAST = "last"
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True)
class Metric:
    """One metric: its name `section/name`, what it says, and the value that a summary keeps."""

    name: str
    description: str
    keep: Keep = Keep.LAST


def _registry(*metrics: Metric) -> Mapping[str, Metric]:
    return {metric.name: metric for metric in metrics}


METRICS = _registry(
    Metric("train/loss", "the loss that is differentiated, per active token"),
    Metric("train/policy_loss", "its PPO part"),
    Metric("train/kl", "k3 estimate of the KL to the policy that RL began with, per active token"),
    Metric("train/approx_kl", "k3 estimate of the KL from the old policy, per active token"),
    Metric("train/entropy", "mean entropy over the true vocabulary, nats"),
    Metric("train/gradient_norm", "norm of the last update's gradient, before clipping"),
    Metric("train/clip_coefficient", "what the last update's gradient was multiplied by"),
    Metric("train/learning_rate", "of the last update"),
    Metric("train/clip_fraction", "part of the active tokens whose PPO ratio was clipped"),
    Metric(
        "train/vanished_fraction",
        "part of the nonzero gradient leaf elements that the unit of the exact sums rounded to zero",
        Keep.MAX,
    ),
    Metric(
        "train/old_logprob_mismatched",
        "tokens whose old policy's log-probability is not training's own in every bit: 0 where recomputed",
        Keep.MAX,
    ),
    Metric("train/is_weight_mean", "mean importance weight over active tokens, where correction is on"),
    Metric("train/is_weight_max", "largest importance weight", Keep.MAX),
    Metric("train/is_cut_fraction", "part of the active tokens whose ratio was cut (TIS) or dropped (MIS)"),
    Metric("train/weight_version", "version of the weights after the updates"),
    Metric("rollout/active_tokens", "tokens that the rollout generated and that count"),
    Metric("rollout/sequences", "sequences that the rollout generated"),
    Metric("rollout/response_length_mean", "mean response length, tokens"),
    Metric("rollout/response_length_max", "longest response, tokens", Keep.MAX),
    Metric("rollout/response_length_min", "shortest response, tokens", Keep.MIN),
    Metric("rollout/truncated_fraction", "part of the responses that do not end with the EOS token"),
    Metric("rollout/weight_version", "version of the weights that drew the tokens"),
    Metric(
        "rollout/weights_found_fraction",
        "of an external engine: part of the weights found again in its model with the same bits",
        Keep.MIN,
    ),
    Metric("reward/mean", "mean reward"),
    Metric("reward/std", "standard deviation of the rewards"),
    Metric("reward/min", "smallest reward", Keep.MIN),
    Metric("reward/max", "largest reward", Keep.MAX),
    Metric("reward/solved_fraction", "part of the prompts of which a sample earned 1 or more"),
    Metric(
        "reward/constant_groups_fraction", "part of the prompts whose samples all got one reward: no signal"
    ),
    Metric("reward/advantage_max_abs", "largest |advantage|"),
    Metric("consistency/active_tokens", "tokens compared"),
    Metric("consistency/mismatched_tokens", "tokens whose two log-probabilities differ in any bit", Keep.MAX),
    Metric("consistency/mismatched_rows", "tokens whose full-vocabulary logits differ in any bit", Keep.MAX),
    Metric("consistency/missing_tokens", "active tokens without a finite value on one side", Keep.MAX),
    Metric("consistency/max_abs", "largest |delta log-probability|", Keep.MAX),
    Metric("consistency/mean_abs", "mean |delta log-probability|", Keep.MAX),
    Metric("consistency/max_ulp", "largest distance in float32 steps", Keep.MAX),
    Metric("consistency/kl_k1", "k1 estimate of KL(rollout || train)"),
    Metric("consistency/kl_k3", "k3 estimate of KL(rollout || train)", Keep.MAX),
    Metric("consistency/ppl_ratio", "perplexity of training over that of the rollout"),
    Metric("consistency/ess", "effective sample size over active tokens, 1 is best", Keep.MIN),
    Metric("mismatch/multiplicative_error", "mean exp |delta log-probability|", Keep.MAX),
    Metric(
        "mismatch/kl_k3_reverse", "k3 estimate of KL(train || rollout), on the rollout's samples", Keep.MAX
    ),
    Metric("mismatch/js_divergence", "half sum of both sides' k3 to their mixture", Keep.MAX),
    Metric("mismatch/ratio_mean", "mean ratio of probabilities, training over rollout"),
    Metric("mismatch/ratio_std", "its standard deviation", Keep.MAX),
    Metric("mismatch/ratio_min", "smallest ratio", Keep.MIN),
    Metric("mismatch/ratio_max", "largest ratio", Keep.MAX),
    Metric("mismatch/ratio_mean_abs", "mean |ratio - 1|", Keep.MAX),
    Metric("mismatch/chi2", "mean of the ratio's square, less 1"),
    Metric("mismatch/ratio_below_half", "part of the tokens whose ratio is below 1/2", Keep.MAX),
    Metric("mismatch/ratio_above_two", "part of the tokens whose ratio is above 2", Keep.MAX),
    Metric("mismatch/probability_mean_abs", "mean |delta probability|", Keep.MAX),
    Metric("mismatch/probability_std_abs", "standard deviation of |delta probability|", Keep.MAX),
    Metric("mismatch/probability_max_abs", "largest |delta probability|", Keep.MAX),
    Metric("mismatch/probability_correlation", "Pearson's, of both sides' probabilities", Keep.MIN),
    Metric("mismatch/sequences", "sequences with an active token"),
    Metric("mismatch/sequence_mean_abs", "mean over sequences of the mean |delta log-probability|", Keep.MAX),
    Metric(
        "mismatch/sequence_multiplicative_error_max",
        "largest mean exp |delta log-probability| of a sequence",
        Keep.MAX,
    ),
    Metric("mismatch/sequence_kl_k1", "k1 estimate of KL(rollout || train) over sequences"),
    Metric("mismatch/sequence_kl_k3", "k3 estimate of KL(rollout || train) over sequences", Keep.MAX),
    Metric("mismatch/sequence_chi2", "mean square of the sequences' ratios, less 1"),
    Metric(
        "mismatch/sequence_ratio_min", "smallest ratio of a sequence, the product of its tokens'", Keep.MIN
    ),
    Metric("mismatch/sequence_ratio_max", "largest ratio of a sequence", Keep.MAX),
    Metric("mismatch/sequence_ess", "effective sample size over sequences, 1 is best", Keep.MIN),
    Metric("mismatch/sequence_ppl_ratio", "mean over sequences of training's perplexity over the rollout's"),
    Metric("mismatch/sequence_log_ppl_abs", "mean over sequences of its |logarithm|", Keep.MAX),
    Metric("time/rollout_s", "generating, seconds"),
    Metric("time/sync_s", "handing the weights to the engines and proving them equal, seconds"),
    Metric("time/reward_s", "scoring, seconds"),
    Metric("time/old_logprob_s", "computing the old policy's log-probabilities again, and weights, seconds"),
    Metric("time/train_s", "all updates of the rollout, seconds"),
    Metric("time/evidence_s", "gathering evidence, seconds"),
    Metric("time/total_s", "the whole rollout with its updates, seconds"),
    Metric("time/elapsed_s", "since the run started, seconds"),
    Metric("time/rollout_tokens_per_s", "active tokens generated a second"),
    Metric("time/train_tokens_per_s", "active tokens trained a second"),
    Metric("comm/sync_bytes", "received by rank 0 while weights were handed over and proved"),
    Metric("comm/rollout_bytes", "received by rank 0 while generating, and with the others' sequences"),
    Metric("comm/reward_bytes", "received by rank 0 while scoring"),
    Metric("comm/old_logprob_bytes", "received by rank 0 while the old policy was computed again"),
    Metric("comm/train_bytes", "received by rank 0 in all updates of the rollout"),
    Metric("comm/evidence_bytes", "received by rank 0 while evidence was gathered"),
    Metric("memory/peak_mib", "largest resident size of rank 0 so far, MiB", Keep.MAX),
)


def refuse_unknown(names: Iterable[str]) -> None:
    """Refuse names that are not registered, and those that only the recorder fills in.

    Raises:
        EvidenceError: All such names are listed.
    """
    unknown = sorted(name for name in names if name not in METRICS)
    recorded = sorted(name for name in names if name in METRICS and name.startswith(RECORDED_PREFIXES))
    faults = [f"unknown metric {name}" for name in unknown]
    faults += [f"{name} is filled in by the recorder" for name in recorded]
    if faults:
        raise EvidenceError("; ".join(faults) + " (the registry is rlsp/report/metrics.py)")
