"""The mismatch measures are those of other frameworks' formulas, exact where nothing differs, and add up."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_fixtures import write_run
from test_consistency import record, sample, write_one

from rlsp.report import verdict
from rlsp.report.consistency import ConsistencyReport, TokenEvidence, measure, total
from rlsp.report.files import EvidenceError
from rlsp.report.metrics import METRICS
from rlsp.report.mismatch import mismatch
from rlsp.report.mismatch_records import MEASURES, Mismatch
from rlsp.report.recorder import Recorder

SHAPE = (6, 40)
DOCS = Path(__file__).parents[1] / "docs"
# What equal log-probabilities must give, to the last bit.
ONE = {name for name in MEASURES if "ratio" in name or "multiplicative" in name} - {
    "ratio_std",
    "ratio_mean_abs",
    "ratio_below_half",
    "ratio_above_two",
} | {"probability_correlation", "sequence_ess"}


def ragged(rows: int = SHAPE[0]) -> np.ndarray:
    """Return a mask with lengths 0, 1, 8, 15, ...: one sequence is empty, one has a single token."""
    lengths = np.array([0, *range(1, 7 * rows, 7)])[:rows]
    return np.arange(SHAPE[1])[None, :] < lengths[:, None]


def sides(scale: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rollout = sample(math.prod(SHAPE), seed).reshape(SHAPE)
    noise = np.random.default_rng(seed + 1).normal(0, scale, SHAPE).astype(np.float32)
    return rollout, np.minimum(rollout + noise, 0), ragged()


def plain(rollout: np.ndarray, train: np.ndarray, mask: np.ndarray) -> dict[str, float]:
    """Compute every measure as the other frameworks do: means over masks, in float64."""
    a, b = rollout[mask].astype(np.float64), train[mask].astype(np.float64)
    p, q, r = np.exp(a), np.exp(b), np.exp(b - a)
    mixture = np.log(0.5 * p + 0.5 * q)
    halves = [np.exp(x - mixture) - (x - mixture) - 1 for x in (a, b)]
    gaps = [(train[i] - rollout[i].astype(np.float64))[row] for i, row in enumerate(mask) if row.any()]
    sums, means = np.array([g.sum() for g in gaps]), np.array([g.mean() for g in gaps])
    whole = np.exp(sums)
    return {
        "multiplicative_error": np.exp(np.abs(b - a)).mean(),
        "kl_k3_reverse": (np.exp(a - b) - (a - b) - 1).mean(),
        "js_divergence": (0.5 * halves[0] + 0.5 * halves[1]).mean(),
        "ratio_mean": r.mean(),
        "ratio_std": r.std(),
        "ratio_min": r.min(),
        "ratio_max": r.max(),
        "ratio_mean_abs": np.abs(r - 1).mean(),
        "chi2": (r**2).mean() - 1,
        "ratio_below_half": (r < 0.5).mean(),
        "ratio_above_two": (r > 2).mean(),
        "probability_mean_abs": np.abs(p - q).mean(),
        "probability_std_abs": np.abs(p - q).std(),
        "probability_max_abs": np.abs(p - q).max(),
        "probability_correlation": np.corrcoef(np.stack([p, q]))[0, 1],
        "sequences": len(gaps),
        "sequence_mean_abs": np.mean([np.abs(g).mean() for g in gaps]),
        "sequence_multiplicative_error_max": max(np.exp(np.abs(g)).mean() for g in gaps),
        "sequence_kl_k1": -sums.mean(),
        "sequence_kl_k3": (whole - 1 - sums).mean(),
        "sequence_chi2": (whole**2).mean() - 1,
        "sequence_ratio_min": whole.min(),
        "sequence_ratio_max": whole.max(),
        "sequence_ess": whole.sum() ** 2 / (len(gaps) * (whole**2).sum()),
        "sequence_ppl_ratio": np.exp(-means).mean(),
        "sequence_log_ppl_abs": np.abs(means).mean(),
    }


@pytest.mark.parametrize("scale", [1.0, 0.1, 1e-3])
def test_every_measure_is_what_its_plain_formula_gives(scale: float) -> None:
    rollout, train, mask = sides(scale)
    found, expected = mismatch(rollout, train, mask), plain(rollout, train, mask)
    assert expected.keys() == set(MEASURES)
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-8, abs=1e-12), name
    assert found.sequences == SHAPE[0] - 1
    assert scale < 1 or found.ratio_below_half > 0 < found.ratio_above_two


def test_distances_that_the_plain_formulas_lose_are_still_there() -> None:
    """One float32 step: naive differences from 1 and of probabilities drown in float64's own rounding."""
    rollout = -np.linspace(1.3e-4, 2.3e-4, 8, dtype=np.float32).reshape(1, 8)  # one ulp for all
    train = np.nextafter(rollout, np.float32(-1))
    d = float(train[0, 0]) - float(rollout[0, 0])
    found = mismatch(rollout, train, np.ones((1, 8), np.bool_))
    assert found.js_divergence == pytest.approx(d * d / 8, rel=1e-6, abs=0)
    assert found.kl_k3_reverse == pytest.approx(d * d / 2, rel=1e-3, abs=1e-26)
    assert found.ratio_mean_abs == pytest.approx(-d, rel=1e-9, abs=0)
    assert found.ratio_std < 1e-6 * abs(d)
    # The witness.
    naive = plain(rollout, train, np.ones((1, 8), np.bool_))["js_divergence"]
    assert abs(naive - d * d / 8) > d * d / 8


@pytest.mark.parametrize("constant", [False, True])
def test_equal_sides_give_exactly_0_and_1(constant: bool) -> None:
    rollout, _, mask = sides(0.1)
    rollout = np.full_like(rollout, -1.25) if constant else rollout
    found = mismatch(rollout, rollout.copy(), mask)
    for name in set(MEASURES) - {"sequences"}:
        value = getattr(found, name)
        assert value == (1.0 if name in ONE else 0.0), name
        assert math.copysign(1, value) == 1, name


def test_what_inactive_tokens_hold_never_enters() -> None:
    rollout, train, mask = sides(0.1)
    poisoned = np.where(mask, train, np.nan).astype(np.float32)
    assert mismatch(rollout, poisoned, mask) == mismatch(rollout, train, mask)


def test_without_active_tokens_no_measure_is_nan_and_no_ratio_0() -> None:
    rollout, train, mask = sides(0.1)
    found = mismatch(rollout, train, np.zeros_like(mask))
    assert all(math.isfinite(getattr(found, name)) for name in MEASURES)
    assert (found.sequences, found.sequence_ess, found.ratio_min, found.ratio_mean) == (0, 0.0, 1.0, 1.0)


def test_a_nan_reaches_every_mean_and_an_infinity_stays_one() -> None:
    rollout, train, mask = sides(0.1)
    broken = train.copy()
    broken[3, 2] = np.nan
    assert math.isnan(mismatch(rollout, broken, mask).multiplicative_error)
    assert math.isnan(mismatch(rollout, broken, mask).sequence_kl_k1)
    far = rollout.copy()
    far[3, 2] = -5000.0
    found = mismatch(far, train, mask)
    assert (found.multiplicative_error, found.ratio_std, found.ratio_max) == (math.inf,) * 3
    assert found.probability_max_abs <= 1
    assert Mismatch.model_validate_json(found.model_dump_json()) == found


def test_a_side_that_does_not_vary_correlates_with_nothing() -> None:
    rollout, train, mask = sides(0.1)
    assert math.isnan(mismatch(np.full_like(rollout, -1.25), train, mask).probability_correlation)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e6])
@pytest.mark.parametrize("side", ["rollout", "train", "both"])
def test_probabilities_without_a_value_have_no_correlation(value, side):
    rollout, train, mask = sides(0.1)
    for name, values in (("rollout", rollout), ("train", train)):
        if side in (name, "both"):
            values[-1, 0] = value
    assert math.isnan(mismatch(rollout, train, mask).probability_correlation)


def test_a_long_sequence_overflows_no_weight() -> None:
    rollout, train, mask = sides(0.1)
    shifted = (train + np.float32(100)).astype(np.float32)
    found = mismatch(rollout, shifted, mask)
    assert found.sequence_ratio_max == math.inf
    assert 0 < found.sequence_ess < 1


def evidence(rollout: np.ndarray, train: np.ndarray, mask: np.ndarray) -> TokenEvidence:
    rows = np.arange(1, rollout.size + 1, dtype=np.int64).reshape(rollout.shape)
    return measure(rollout, train, mask, rows, rows)


def test_the_total_over_rollouts_is_what_measuring_everything_at_once_gives() -> None:
    parts = [sides(scale, seed) for scale, seed in ((0.5, 0), (0.001, 7), (0.05, 20))]
    parts.append((parts[0][0], parts[0][1], np.zeros(SHAPE, np.bool_)))
    together = evidence(*(np.concatenate(side) for side in zip(*parts, strict=True))).mismatch
    summed = total([record(i, evidence(*part)) for i, part in enumerate(parts)]).mismatch
    assert together is not None
    assert summed is not None
    for name in MEASURES:
        assert getattr(summed, name) == pytest.approx(getattr(together, name), rel=1e-9, abs=1e-15), name


# In files.


def downgraded(folder: Path) -> None:
    """Make of a run's report what version 2 wrote, and seal the folder again."""
    path = folder / "consistency.json"
    report: dict[str, Any] = json.loads(path.read_bytes())
    report["schema_version"] = 2
    for entry in (report["total"], *report["rollouts"]):
        del entry["mismatch"]
    path.write_text(json.dumps(report))
    verdict.seal(folder)


def test_a_run_of_the_version_before_still_verifies_and_is_not_continued(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    downgraded(tmp_path / "run")
    found = verdict.verify(tmp_path / "run")
    assert (found.exit_status, found.damage) == (0, ())
    with pytest.raises(EvidenceError, match="of an earlier version"):
        Recorder(tmp_path / "run", first=1)


@pytest.mark.parametrize("entry", ["total", "rollouts"])
def test_a_measure_that_the_tensors_do_not_give_fails_the_evidence_gate(tmp_path: Path, entry: str) -> None:
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "consistency.json"
    report = json.loads(path.read_bytes())
    place = report["total"] if entry == "total" else report["rollouts"][1]
    place["mismatch"]["sequence_kl_k3"] += 0.5
    path.write_text(json.dumps(report))
    gate = next(gate for gate in verdict.judge(tmp_path / "run").gates if gate.name == "evidence")
    assert gate.verdict.value == "FAIL"
    assert any("mismatch" in reason for reason in gate.reasons)


def test_a_report_must_state_the_measures_of_its_version(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        write_one(recorder, 0)
    whole = json.loads((tmp_path / "consistency.json").read_bytes())
    del whole["rollouts"][0]["mismatch"]
    with pytest.raises(ValueError, match="version 3"):
        ConsistencyReport.model_validate(whole)


def test_rows_carry_every_measure_and_the_registry_has_no_other(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        found = write_one(recorder, 0).mismatch
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert found is not None
    assert {n for n in METRICS if n.startswith("mismatch/")} == {f"mismatch/{name}" for name in MEASURES}
    assert all(row[f"mismatch/{name}"] == getattr(found, name) for name in MEASURES)
    assert row.keys() - {"rollout"} <= METRICS.keys()


def documented(page: str) -> set[str]:
    """Expand the names of a page: after `section/name`, a bare `name` or `_end` belongs to that section."""
    found: set[str] = set()
    for line in (DOCS / page).read_text().splitlines():
        section = stem = ""
        cell = line.split("|")[1] if line.startswith("|") else line
        for word in re.findall(r"`([a-z0-9_/]+)`", cell):
            if "/" in word:
                section, stem = word.rsplit("/", 1)
                stem = stem.rsplit("_", 1)[0]
            full = (
                word if "/" in word else f"{section}/{stem}{word}" if word[0] == "_" else f"{section}/{word}"
            )
            found.add(full)
    return found


def test_every_metric_of_the_registry_is_documented() -> None:
    missing = METRICS.keys() - documented("metrics.md")
    assert not missing


def test_every_measure_is_in_the_table_of_names() -> None:
    text = (DOCS / "mismatch.md").read_text()
    assert all(f"`mismatch/{name}`" in text for name in MEASURES)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sequence_weight_squared", 0.0),
        ("ratio_squared", -1.0),
        ("rollout_probability_squared", -1.0),
        ("ratio_squared", "-Infinity"),
        ("probability_product", "NaN"),
        ("sequences", (1 << 63) - 1),
    ],
)
def test_sums_that_no_tokens_can_have_are_a_fault_and_stop_no_judgement(
    tmp_path: Path, name: str, value: object
) -> None:
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "consistency.json"
    report = json.loads(path.read_bytes())
    for entry in report["rollouts"]:
        entry["mismatch"]["sums"][name] = value
    path.write_text(json.dumps(report))
    assert "evidence" in [
        gate.name for gate in verdict.judge(tmp_path / "run").gates if gate.verdict.value == "FAIL"
    ]
