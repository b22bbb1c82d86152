from __future__ import annotations

import json
import math
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_fixtures import make_digests, make_facts, make_tensors, set_gradient_norm

from rlsp.report.consistency import (
    ConsistencyReport,
    RolloutFacts,
    RolloutRecord,
    TokenEvidence,
    measure,
    total,
)
from rlsp.report.digests import RolloutDigests
from rlsp.report.files import EvidenceError, write_atomically
from rlsp.report.metrics import METRICS
from rlsp.report.recorder import Recorder


def compare(
    rollout: Any, train: Any, active: Any = None, rollout_rows: Any = None, train_rows: Any = None
) -> TokenEvidence:
    rollout, train = np.atleast_2d(np.float32(rollout)), np.atleast_2d(np.float32(train))
    shape = rollout.shape
    active = np.ones(shape, np.bool_) if active is None else np.asarray(active, np.bool_).reshape(shape)
    rows = np.arange(1, rollout.size + 1, dtype=np.int64).reshape(shape)
    rollout_rows = rows if rollout_rows is None else rollout_rows
    return measure(rollout, train, active, rollout_rows, rows if train_rows is None else train_rows)


def sample(count: int, seed: int = 0) -> np.ndarray:
    return -np.random.default_rng(seed).exponential(1.5, count).astype(np.float32)


def record(index: int, evidence: TokenEvidence) -> RolloutRecord:
    facts = RolloutFacts(**make_facts(index, make_tensors(index)))
    return RolloutRecord(index=index, **dict(evidence), **dict(facts))


def strict_json(text: str | bytes) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"bare {constant} in JSON")

    return json.loads(text, parse_constant=refuse)


def test_equal_sides_have_no_distance_at_all():
    evidence = compare(sample(100), sample(100))
    assert (evidence.active_tokens, evidence.mismatched_tokens, evidence.mismatched_rows) == (100, 0, 0)
    assert (evidence.max_abs, evidence.mean_abs, evidence.max_ulp) == (0.0, 0.0, 0)
    assert (evidence.kl_k1, evidence.kl_k3, evidence.ppl_ratio, evidence.ess) == (0.0, 0.0, 1.0, 1.0)
    assert math.copysign(1, evidence.kl_k1) == 1
    assert evidence.ulp_histogram == {"0": 100}
    assert evidence.alignment_shift_suspected is None
    assert evidence.first_mismatch is None


def test_statistics_are_those_of_their_definitions():
    rollout, train = sample(500), sample(500) + np.float32(0.01) * sample(500, seed=1)
    evidence = compare(rollout, train)
    d = train.astype(np.float64) - rollout.astype(np.float64)
    weight = np.exp(d)
    assert evidence.kl_k1 == pytest.approx(np.mean(-d), rel=1e-12)
    assert evidence.kl_k3 == pytest.approx(np.mean(np.exp(d) - 1 - d), rel=1e-9)
    assert evidence.ppl_ratio == pytest.approx(
        np.exp(np.mean(np.float64(rollout)) - np.mean(np.float64(train)))
    )
    assert evidence.ess == pytest.approx(weight.sum() ** 2 / (500 * (weight**2).sum()), rel=1e-12)
    assert evidence.mean_abs == math.fsum(np.abs(d)) / 500
    assert evidence.max_abs == np.max(np.abs(d))


def test_rare_outliers_show_in_the_mean_distance():
    rollout = sample(1000)
    train = rollout.copy()
    train[::200] = rollout[::200] - 50
    evidence = compare(rollout, train)
    assert evidence.mismatched_tokens == 5
    assert evidence.mean_abs == pytest.approx(0.250, abs=5e-4)
    assert evidence.max_abs == pytest.approx(50)


def test_uniform_drift_shows_in_k3():
    rollout = sample(1000)
    evidence = compare(rollout, rollout - np.float32(0.5))
    assert evidence.kl_k3 == pytest.approx(0.107, abs=5e-4)
    assert evidence.mean_abs == pytest.approx(0.5)
    assert evidence.ess == pytest.approx(1.0)
    assert evidence.alignment_shift_suspected is None


def test_negative_zero_is_not_zero():
    evidence = compare([-1.0, -0.0, -2.0], [-1.0, 0.0, -2.0])
    assert (evidence.mismatched_tokens, evidence.max_ulp, evidence.max_abs) == (1, 1, 0.0)
    assert evidence.first_mismatch is not None
    assert (evidence.first_mismatch.position, evidence.first_mismatch.rollout) == (1, "0x80000000")


@pytest.mark.parametrize("side", ["rollout", "train"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_counted_and_never_dropped(side, value):
    sides = {"rollout": sample(10), "train": sample(10)}
    sides[side][3] = value
    evidence = compare(sides["rollout"], sides["train"])
    assert evidence.active_tokens == 10
    assert evidence.mismatched_tokens == 1
    assert getattr(evidence, f"missing_{side}") == 1
    assert evidence.first_missing is not None
    assert evidence.first_missing.position == 3
    assert not math.isfinite(evidence.max_abs)


def test_the_same_nan_on_both_sides_is_missing_although_its_bits_agree():
    both = sample(10)
    both[4] = np.nan
    evidence = compare(both, both.copy())
    assert (evidence.mismatched_tokens, evidence.missing_rollout, evidence.missing_train) == (0, 1, 1)
    assert math.isnan(evidence.max_abs)


def test_nan_with_other_payload_differs():
    bits = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    assert compare(bits[:1], bits[1:]).mismatched_tokens == 1


def test_inactive_entries_are_never_compared():
    rollout, train = sample(6), sample(6)
    train[:3] = [np.nan, np.inf, 7.0]
    evidence = compare(rollout, train, active=[0, 0, 0, 1, 1, 1])
    assert (evidence.active_tokens, evidence.mismatched_tokens, evidence.missing_train) == (3, 0, 0)
    # The witness: they would have counted.
    assert compare(rollout, train).mismatched_tokens == 3


@given(
    value=st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**99), max_value=2.0**99),
    steps=st.integers(0, 40),
)
def test_ulp_distance_counts_the_steps_between_neighbours(value, steps):
    other = np.float32(value)
    for _ in range(steps):
        other = np.nextafter(other, np.float32(np.inf))
    crossed_zero = value < 0 <= other or (value == 0 and math.copysign(1, value) < 0)
    distance = compare([value], [other]).max_ulp
    # nextafter knows one zero only, bit patterns have two.
    assert distance in ({steps, steps + 1} if crossed_zero else {steps})


def test_a_pass_through_bf16_shows_in_the_ulp_histogram():
    rollout = sample(400)
    bits = rollout.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    histogram = compare(rounded, rollout).ulp_histogram
    assert sum(count for bucket, count in histogram.items() if int(bucket) >= 1 << 12) > 300
    assert max(map(int, histogram)) <= 1 << 15


@pytest.mark.parametrize("shift", [1, -1])
def test_log_probabilities_shifted_by_one_are_an_alignment_fault(shift):
    train = np.stack([sample(16, seed=s) for s in range(4)])
    active = np.zeros(train.shape, np.bool_)
    active[:, 5:14] = True
    train[~active] = 0
    rollout = np.where(active, np.roll(train, shift, axis=1), 0).astype(np.float32)
    assert compare(rollout, train, active).alignment_shift_suspected == shift


def test_a_flipped_ulp_and_constant_values_are_no_alignment_fault():
    train = sample(64)
    rollout = train.copy()
    rollout[10] = np.nextafter(rollout[10], np.float32(0))
    assert compare(rollout, train).alignment_shift_suspected is None
    assert compare(np.full(64, -1.0), np.full(64, -1.5)).alignment_shift_suspected is None
    assert compare(sample(64), sample(64, seed=9)).alignment_shift_suspected is None


def test_rows_differ_where_no_sampled_token_does():
    rows = np.arange(1, 13, dtype=np.int64).reshape(3, 4)
    other = rows.copy()
    other[1, 2] ^= 1 << 62
    logprob = sample(12).reshape(3, 4)
    evidence = compare(logprob, logprob.copy(), rollout_rows=rows, train_rows=other)
    assert (evidence.mismatched_tokens, evidence.mismatched_rows) == (0, 1)
    assert evidence.first_row_mismatch is not None
    assert (evidence.first_row_mismatch.sample, evidence.first_row_mismatch.position) == (1, 2)
    assert evidence.first_row_mismatch.rollout == "0x0000000000000007"
    assert evidence.first_row_mismatch.train == "0x4000000000000007"


def test_a_side_that_nothing_feeds_is_told_from_one_that_computed():
    zeros = np.zeros((1, 8), np.int64)
    for nothing in (np.zeros(8), np.full(8, np.nan)):
        evidence = compare(nothing, sample(8), rollout_rows=zeros)
        assert (evidence.rollout_fed, evidence.train_fed, evidence.rows_fed) == (False, True, False)
    # An engine that computed NaN has row digests: that is a divergence, not an absence.
    assert compare(np.full(8, np.nan), sample(8)).rollout_fed


def test_without_active_tokens_nothing_is_nan():
    evidence = compare(sample(8), sample(8), active=np.zeros(8))
    assert (evidence.active_tokens, evidence.mean_abs, evidence.kl_k3, evidence.ess) == (0, 0.0, 0.0, 0.0)
    assert "NaN" not in evidence.model_dump_json()


def test_an_overflow_is_infinite_and_not_an_exception():
    evidence = compare([-5000.0, -1.0, -2.0, -3.0], [-1.0, -1.0, -2.0, -3.0])
    assert evidence.kl_k3 == math.inf
    assert evidence.ess == pytest.approx(0.25)
    again = TokenEvidence.model_validate_json(evidence.model_dump_json())
    assert again == evidence
    assert strict_json(evidence.model_dump_json())["kl_k3"] == "Infinity"


def test_a_wrong_dtype_or_shape_is_refused():
    with pytest.raises(ValueError, match="train_logprob: expected float32"):
        measure(*_arguments(train_logprob=np.zeros((2, 3), np.float64)))
    with pytest.raises(ValueError, match="rollout_row_digest: expected int64"):
        measure(*_arguments(rollout_row_digest=np.zeros((2, 4), np.int64)))


def _arguments(**changes: np.ndarray) -> list[np.ndarray]:
    arguments = {
        "rollout_logprob": np.zeros((2, 3), np.float32),
        "train_logprob": np.zeros((2, 3), np.float32),
        "active_mask": np.ones((2, 3), np.bool_),
        "rollout_row_digest": np.zeros((2, 3), np.int64),
        "train_row_digest": np.zeros((2, 3), np.int64),
    }
    return list({**arguments, **changes}.values())


def test_the_total_is_what_measuring_everything_at_once_gives():
    rollouts = [sample(40, seed=s) for s in range(3)]
    trains = [r + np.float32(0.01) * sample(40, seed=9 + s) for s, r in enumerate(rollouts)]
    trains[0] = rollouts[0].copy()
    together = compare(np.stack(rollouts), np.stack(trains))
    summed = total([record(i, compare(r, t)) for i, (r, t) in enumerate(zip(rollouts, trains, strict=True))])
    for name in ("active_tokens", "mismatched_tokens", "max_abs", "max_ulp", "ulp_histogram"):
        assert getattr(summed, name) == getattr(together, name)
    for name in ("mean_abs", "kl_k1", "kl_k3", "ppl_ratio", "ess"):
        assert getattr(summed, name) == pytest.approx(getattr(together, name), rel=1e-12)
    assert summed.first_mismatched_rollout == 1


def test_a_nan_in_one_rollout_reaches_the_total():
    broken = sample(5)
    broken[0] = np.nan
    summed = total([record(0, compare(sample(5), sample(5))), record(1, compare(broken, sample(5)))])
    assert math.isnan(summed.max_abs)
    assert math.isnan(summed.mean_abs)


def test_a_gradient_norm_must_be_its_bits():
    said = make_facts(0, make_tensors(0))
    with pytest.raises(ValueError, match="is not the bit pattern"):
        RolloutFacts(**{**said, "gradient_norm_bits": "0" * 16})
    with pytest.raises(ValueError, match="is not the last of"):
        RolloutFacts(**{**said, "gradient_norms": (1.0, 2.0)})


# The recorder -----------------------------------------------------------------


def write_one(recorder: Recorder, index: int, **metrics: float) -> RolloutRecord:
    tensors = make_tensors(index)
    said = make_facts(index, tensors)
    return recorder.rollout(index, tensors, RolloutFacts(**said), metrics, digests=digests_for(index, said))


def digests_for(index: int, said: dict[str, Any]) -> RolloutDigests:
    return RolloutDigests(**make_digests(index, said))


def test_consistency_json_has_the_keys_that_others_read(tmp_path):
    with Recorder(tmp_path) as recorder:
        write_one(recorder, 0)
        write_one(recorder, 1)
    report = strict_json((tmp_path / "consistency.json").read_bytes())
    shared = {
        "active_tokens",
        "mismatched_tokens",
        "max_abs",
        "mean_abs",
        "max_ulp",
        "kl_k1",
        "kl_k3",
        "ppl_ratio",
    }
    shared |= {"ess"}
    assert shared | {"final_weights_digest"} <= report["total"].keys()
    own = {
        "gradient_norm",
        "gradient_norm_bits",
        "gradient_digest",
        "weights_digest",
        "weight_version_rollout",
    }
    own |= {"weight_version_train", "routes"}
    assert len(report["rollouts"]) == 2
    assert all(shared | own <= entry.keys() for entry in report["rollouts"])
    assert report["total"]["final_weights_digest"] == report["rollouts"][1]["weights_digest"]


def test_rows_carry_the_index_the_given_metrics_and_the_measured_ones(tmp_path):
    with Recorder(tmp_path) as recorder:
        evidence = write_one(recorder, 0, **{"train/loss": np.float32(0.5), "reward/mean": math.nan})
    row = strict_json((tmp_path / "metrics.jsonl").read_text())
    assert (row["rollout"], row["train/loss"], row["reward/mean"]) == (0, 0.5, "NaN")
    assert row["consistency/active_tokens"] == evidence.active_tokens
    assert row.keys() - {"rollout"} <= METRICS.keys()


def test_an_unknown_metric_is_refused_before_anything_is_written(tmp_path):
    with Recorder(tmp_path) as recorder:
        with pytest.raises(EvidenceError, match="unknown metric train/los; consistency/ess is filled in"):
            write_one(recorder, 0, **{"train/los": 1.0, "consistency/ess": 1.0})
        assert not list((tmp_path / "rollouts").iterdir())
        write_one(recorder, 0)


def test_malformed_tensors_are_refused_and_all_named(tmp_path):
    tensors = make_tensors(0)
    said = make_facts(0, tensors)
    tensors["tokens"] = tensors["tokens"].astype(np.int32)
    tensors["rewards"] = tensors["rewards"][:-1]
    del tensors["lengths"]
    tensors["extra"] = np.zeros(1)
    with Recorder(tmp_path) as recorder, pytest.raises(EvidenceError) as refusal:
        recorder.rollout(0, tensors, RolloutFacts(**said), {}, digests=digests_for(0, said))
    for name in ("tokens is int32", "rewards is", "lengths is missing", "extra is not a tensor"):
        assert name in str(refusal.value)


def test_rollouts_come_in_order(tmp_path):
    with Recorder(tmp_path) as recorder:
        with pytest.raises(EvidenceError, match="rollout 0 comes next"):
            write_one(recorder, 1)
        write_one(recorder, 0)
        with pytest.raises(EvidenceError, match="rollout 1 comes next"):
            write_one(recorder, 0)


def test_evidence_of_another_run_is_not_continued_by_accident(tmp_path):
    with Recorder(tmp_path) as recorder:
        write_one(recorder, 0)
    with pytest.raises(EvidenceError, match="already holds evidence"):
        Recorder(tmp_path)
    with pytest.raises(EvidenceError, match="cannot go on at rollout 2"):
        Recorder(tmp_path, first=2)


def test_a_resumed_run_goes_on_and_makes_later_evidence_again(tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    for folder in (whole, resumed):
        with Recorder(folder) as recorder:
            for index in range(3):
                write_one(recorder, index)
    # The owner was killed within a row.
    with (resumed / "metrics.jsonl").open("ab") as file:
        file.write(b'{"rollout": 3, "tra')
    with Recorder(resumed, first=1) as recorder:
        assert len(list((resumed / "rollouts").iterdir())) == 1
        for index in (1, 2):
            write_one(recorder, index)
    names = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(resumed) for path in resumed.rglob("*") if path.is_file())
    assert all((whole / name).read_bytes() == (resumed / name).read_bytes() for name in names)


class FileSizeLimit:
    """Make the kernel refuse to write files beyond a size, as a full disk does."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __enter__(self) -> None:
        self._kept = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self._size, self._kept[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._kept)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def test_a_full_disk_is_an_error_and_leaves_earlier_evidence_whole(tmp_path):
    with Recorder(tmp_path) as recorder:
        write_one(recorder, 0)
        before = contents(tmp_path)
        with FileSizeLimit(100), pytest.raises(EvidenceError, match=r"cannot write .*00001\.safetensors"):
            write_one(recorder, 1)
        assert contents(tmp_path) == before
        # With room again the run could go on.
        write_one(recorder, 1)
    assert len(ConsistencyReport.read(tmp_path / "consistency.json").rollouts) == 2


def test_a_row_that_does_not_fit_is_taken_back(tmp_path):
    padding = json.dumps({"padding": "x" * 100_000}).encode() + b"\n"
    (tmp_path / "metrics.jsonl").write_bytes(padding)
    with Recorder(tmp_path) as recorder:
        limit = FileSizeLimit(len(padding) + 10)
        with limit, pytest.raises(EvidenceError, match=r"cannot write .*metrics\.jsonl"):
            write_one(recorder, 0)
    assert (tmp_path / "metrics.jsonl").read_bytes() == padding


def test_an_atomic_write_that_fails_keeps_the_old_file(tmp_path):
    path = tmp_path / "evidence.json"
    write_atomically(path, b"old")
    with FileSizeLimit(10), pytest.raises(EvidenceError, match="cannot write"):
        write_atomically(path, b"new" * 100)
    assert contents(tmp_path) == {"evidence.json": b"old"}


def test_infinite_gradients_survive_the_round_trip(tmp_path):
    tensors = make_tensors(0)
    said = make_facts(0, tensors)
    set_gradient_norm(said, math.inf)
    with Recorder(tmp_path) as recorder:
        recorder.rollout(0, tensors, RolloutFacts(**said), {}, digests=digests_for(0, said))
    strict_json((tmp_path / "consistency.json").read_bytes())
    assert ConsistencyReport.read(tmp_path / "consistency.json").rollouts[0].gradient_norm == math.inf


def test_metric_names_have_a_known_section_and_a_description():
    sections = {"train", "rollout", "reward", "consistency", "mismatch", "time", "memory", "comm"}
    assert {name.split("/")[0] for name in METRICS} == sections
    assert all(metric.description for metric in METRICS.values())
