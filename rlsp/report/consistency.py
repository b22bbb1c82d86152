"""How far the log-probabilities that the rollout recorded and those of training agree, token by token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rlsp.report.mismatch import combined_mismatch, mismatch
from rlsp.report.records import (
    ConsistencyReport,
    RolloutFacts,
    RolloutRecord,
    TokenEvidence,
    TokenLocation,
    TotalEvidence,
    float64_bits,
)
from rlsp.report.statistics import (
    Floats,
    Integers,
    Mask,
    combined_sums,
    derived,
    is_fed,
    suspected_shift,
    token_sums,
    ulp_distance,
    ulp_histogram,
)

__all__ = [
    "ConsistencyReport",
    "RolloutFacts",
    "RolloutRecord",
    "TokenEvidence",
    "TokenLocation",
    "TotalEvidence",
    "float64_bits",
    "measure",
    "total",
]


def measure(
    rollout_logprob: Floats,
    train_logprob: Floats,
    active_mask: Mask,
    rollout_row_digest: Integers,
    train_row_digest: Integers,
) -> TokenEvidence:
    """Compare both sides of one rollout, bit pattern by bit pattern and in float64.

    Args:
        rollout_logprob: Recorded as the token was drawn, shape [N, S], float32.
        train_logprob: From the differentiated forward pass, shape [N, S], float32.
        active_mask: Tokens that count, shape [N, S], bool.
        rollout_row_digest: Hash of the token's full-vocabulary logits, shape [N, S], int64.
        train_row_digest: The same from training, shape [N, S], int64.

    Raises:
        ValueError: A shape or dtype is not as above.
    """
    _check_arguments(rollout_logprob, train_logprob, active_mask, rollout_row_digest, train_row_digest)
    rollout, train = rollout_logprob[active_mask], train_logprob[active_mask]
    rollout_rows, train_rows = rollout_row_digest[active_mask], train_row_digest[active_mask]
    ulps = ulp_distance(rollout, train)
    missing = active_mask & ~(np.isfinite(rollout_logprob) & np.isfinite(train_logprob))
    rows_fed = rollout.size == 0 or bool(rollout_rows.any() and train_rows.any())
    # Against rows that nobody recorded nothing was compared.
    rows_differ = (rollout_row_digest != train_row_digest) & active_mask & rows_fed
    bits_differ = (rollout_logprob.view(np.int32) != train_logprob.view(np.int32)) & active_mask
    with np.errstate(invalid="ignore", over="ignore"):
        difference = train.astype(np.float64) - rollout.astype(np.float64)
        sums = token_sums(difference)
        max_abs = float(np.max(np.abs(difference), initial=0.0))
    return TokenEvidence(
        **derived(rollout.size, sums),
        mismatched_tokens=int(np.count_nonzero(bits_differ)),
        mismatched_rows=int(np.count_nonzero(rows_differ)),
        missing_rollout=int(np.count_nonzero(~np.isfinite(rollout))),
        missing_train=int(np.count_nonzero(~np.isfinite(train))),
        max_abs=max_abs,
        max_ulp=int(np.max(ulps, initial=0)),
        ulp_histogram=ulp_histogram(ulps),
        mismatch=mismatch(rollout_logprob, train_logprob, active_mask),
        alignment_shift_suspected=suspected_shift(rollout_logprob, train_logprob, active_mask),
        rollout_fed=is_fed(rollout, rollout_rows),
        train_fed=is_fed(train, train_rows),
        rows_fed=rows_fed,
        first_mismatch=_first(bits_differ, rollout_logprob, train_logprob),
        first_row_mismatch=_first(rows_differ, rollout_row_digest, train_row_digest),
        first_missing=_first(missing, rollout_logprob, train_logprob),
        sums=sums,
    )


def total(records: Sequence[RolloutRecord]) -> TotalEvidence:
    """Combine the evidence of all rollouts, in the order given; `final_weights_digest` is the last one's."""
    active = sum(record.active_tokens for record in records)
    mismatches = [record.mismatch for record in records if record.mismatch is not None]
    histogram: dict[str, int] = {}
    for record in records:
        for bucket, count in record.ulp_histogram.items():
            histogram[bucket] = histogram.get(bucket, 0) + count
    return TotalEvidence(
        **derived(active, combined_sums([record.sums for record in records if record.active_tokens])),
        mismatched_tokens=sum(record.mismatched_tokens for record in records),
        mismatched_rows=sum(record.mismatched_rows for record in records),
        missing_rollout=sum(record.missing_rollout for record in records),
        missing_train=sum(record.missing_train for record in records),
        max_abs=float(np.max([record.max_abs for record in records], initial=0.0)),
        max_ulp=max((record.max_ulp for record in records), default=0),
        ulp_histogram=dict(sorted(histogram.items(), key=lambda item: int(item[0]))),
        # Records of version 2 have none, and a total of some rollouts would be no total.
        mismatch=combined_mismatch(active, mismatches) if len(mismatches) == len(records) else None,
        rollouts=len(records),
        first_mismatched_rollout=next((r.index for r in records if r.mismatched_tokens), None),
        first_row_mismatched_rollout=next((r.index for r in records if r.mismatched_rows), None),
        final_weights_digest=records[-1].weights_digest if records else None,
    )


def _check_arguments(*arrays: npt.NDArray[np.generic]) -> None:
    names = ("rollout_logprob", "train_logprob", "active_mask", "rollout_row_digest", "train_row_digest")
    wanted = (np.float32, np.float32, np.bool_, np.int64, np.int64)
    shape = arrays[2].shape
    for name, array, dtype in zip(names, arrays, wanted, strict=True):
        if array.dtype != dtype or array.ndim != 2 or array.shape != shape:
            raise ValueError(f"{name}: expected {np.dtype(dtype)} {shape}, got {array.dtype} {array.shape}")


def _first(marked: Mask, rollout: Floats | Integers, train: Floats | Integers) -> TokenLocation | None:
    """Name the first marked token in row-major order, with both bit patterns."""
    if not marked.any():
        return None
    sample, position = (int(index) for index in np.unravel_index(int(np.argmax(marked)), marked.shape))
    values = (side[sample, position] for side in (rollout, train))
    patterns = [f"0x{int(value.view(f'u{value.itemsize}')):0{2 * value.itemsize}x}" for value in values]
    return TokenLocation(sample=sample, position=position, rollout=patterns[0], train=patterns[1])
