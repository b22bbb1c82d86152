"""What consistency.json says: statistics, facts and records of rollouts."""

from __future__ import annotations

import math
import struct
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlsp.report.documents import Count, Document
from rlsp.report.mismatch_records import Mismatch

VERSION_WITHOUT_MISMATCH = 2

Bucket = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,18})$")]


def float64_bits(value: float) -> str:
    """Return the bit pattern of a float64 as 16 hex digits."""
    return struct.pack(">d", value).hex()


def bits_fit(bits: str, value: float) -> bool:
    """Tell whether 16 hex digits are the bit pattern of `value`; JSON keeps of a NaN only that it is one."""
    if math.isnan(value):
        return math.isnan(struct.unpack(">d", bytes.fromhex(bits))[0])
    return bits == float64_bits(value)


class TokenLocation(Document):
    """A token of a rollout, with what each side has there as a hexadecimal bit pattern."""

    sample: Count
    position: Count
    rollout: str
    train: str


class TokenSums(Document):
    """Float64 sums over the active tokens of one rollout, from which totals over rollouts follow.

    `weight` and `weight_squared` are sums of w and w^2 with w = exp(train - rollout - log_weight_max), so
    that no exponential overflows.
    """

    absolute: float
    difference: float
    k3: float
    log_weight_max: float
    weight: float
    weight_squared: float


class Statistics(Document):
    """What is reported for a rollout and in total.

    Distances are over active tokens with d = train - rollout in float64: max_abs and mean_abs of |d|;
    `max_ulp` in steps between neighbouring float32 values, where -0.0 and 0.0 are one step apart; kl_k1 =
    mean(-d) and kl_k3 = mean(exp(d) - 1 - d), the estimators of KL(rollout || train) on the rollout's own
    samples (Schulman, "Approximating KL divergence"); ppl_ratio = exp(mean(rollout) - mean(train)), the
    perplexity under training's log-probabilities over that under the rollout's; ess = (sum w)^2 / (N sum w^2)
    with w = exp(d), in (0, 1]. A NaN on either side makes the distances NaN. Without active tokens distances
    and ess are 0, the ratio 1. `mismatch` has further measures; documents of version 2 lack it.
    """

    active_tokens: Count
    mismatched_tokens: Count
    mismatched_rows: Count
    missing_rollout: Count
    missing_train: Count
    max_abs: float
    mean_abs: float
    max_ulp: Count
    kl_k1: float
    kl_k3: float
    ppl_ratio: float
    ess: float
    ulp_histogram: dict[Bucket, Count]
    mismatch: Mismatch | None = None


class TokenEvidence(Statistics):
    """The comparison of one rollout.

    `ulp_histogram` counts tokens by distance: "0", "1", "2" (2 and 3), "4" (4 to 7), "8" and so on. A side is
    fed if anything at all was computed for it, rows if each side has a row digest that is not zero.
    `alignment_shift_suspected` is the s for which rollout[t + s] matches train[t] far better than rollout[t].
    """

    alignment_shift_suspected: int | None
    rollout_fed: bool
    train_fed: bool
    rows_fed: bool
    first_mismatch: TokenLocation | None
    first_row_mismatch: TokenLocation | None
    first_missing: TokenLocation | None
    sums: TokenSums


class RolloutFacts(Document):
    """What rank 0 knows about one rollout besides its tensors.

    The three weight digests are of one kind (the trainer's model weights): `rollout_weights_digest` is what
    the engines hold at dispatch, `trainer_weights_digest` the trainer's at that moment, `weights_digest` the
    trainer's after this rollout's updates. `gradient_norm` and `gradient_digest` are the last update's,
    `gradient_norms` has one per update; `gradient_norm_bits` is the float64's bit pattern, 16 hex digits.
    `optimizer_digest` is that of the optimizer's state after the last update. `routes` counts calls per
    operator and route, `declared_routes` names the route each operator must take. `cp_tokens` are the active
    tokens that each CP shard covered. `sources` says which computation made each side, e.g. {"rollout":
    "decode", "train": "forward"}.
    """

    weight_version_rollout: Count
    weight_version_train: Count
    rollout_weights_digest: str
    trainer_weights_digest: str
    weights_digest: str
    gradient_norm: float
    gradient_norm_bits: str = Field(pattern=r"^[0-9a-f]{16}$")
    gradient_digest: str
    optimizer_digest: str
    gradient_norms: tuple[float, ...]
    updates: Count
    learning_rate: float
    routes: dict[str, dict[str, Count]]
    declared_routes: dict[str, str]
    cp_tokens: tuple[Count, ...]
    tp_replicas_agree: bool
    ranks_agree: bool
    sequences: Count
    sources: dict[str, str]

    @model_validator(mode="after")
    def _bits_belong_to_the_norm(self) -> Self:
        if not bits_fit(self.gradient_norm_bits, self.gradient_norm):
            raise ValueError(
                f"gradient_norm_bits {self.gradient_norm_bits} is not the bit pattern of gradient_norm "
                f"{self.gradient_norm!r} ({float64_bits(self.gradient_norm)})"
            )
        if self.gradient_norms and float64_bits(self.gradient_norms[-1]) != float64_bits(self.gradient_norm):
            raise ValueError(f"gradient_norm {self.gradient_norm!r} is not the last of {self.gradient_norms}")
        return self


class RolloutRecord(TokenEvidence, RolloutFacts):
    """One entry of consistency.json's `rollouts`: the comparison and the facts of one rollout."""

    index: Count


class TotalEvidence(Statistics):
    """consistency.json's `total`: the statistics over all rollouts, and where the run ended."""

    rollouts: Count
    first_mismatched_rollout: Count | None
    first_row_mismatched_rollout: Count | None
    final_weights_digest: str | None


class ConsistencyReport(Document):
    """The file consistency.json; version 2 added the optimizer's digest, version 3 `mismatch`."""

    schema_version: Literal[2, 3] = 3
    total: TotalEvidence
    rollouts: tuple[RolloutRecord, ...]

    @property
    def mismatched_rows(self) -> int | None:
        """Count the rows that differ over all rollouts; None where a side recorded none."""
        return self.total.mismatched_rows if all(one.rows_fed for one in self.rollouts) else None

    @model_validator(mode="after")
    def _mismatch_is_of_the_version(self) -> Self:
        stated = {entry.mismatch is not None for entry in (self.total, *self.rollouts)}
        if stated != {self.schema_version > VERSION_WITHOUT_MISMATCH}:
            raise ValueError(
                f"version {self.schema_version} states mismatch everywhere from 3 on, before nowhere"
            )
        return self
