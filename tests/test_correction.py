"""Importance weights are what their formulas say, bounded or dropped, and 1 where nothing differs."""

from __future__ import annotations

import math

import pytest
import torch

from rlsp import bits
from rlsp.config import CorrectionKind
from rlsp.rl.correction import Correction, importance_weights
from rlsp.rl.loss import token_loss

OLD = torch.tensor([[0.0, -1.0, -2.0, -0.5], [0.0, -3.0, -1.0, -7.0]])
ROLLOUT = torch.tensor([[0.0, -1.0, -3.0, -0.1], [0.0, -2.0, -1.5, -9.0]])
MASK = torch.tensor([[False, True, True, True], [False, True, True, False]])


def expected(kind: Correction, upper: float, lower: float) -> list[list[float]]:
    rows = []
    for old, rollout, mask in zip(OLD.tolist(), ROLLOUT.tolist(), MASK.tolist(), strict=True):
        logs = [a - b for a, b, m in zip(old, rollout, mask, strict=True) if m]
        ratios = [math.exp(sum(logs))] * len(logs) if kind.over_sequences else [math.exp(x) for x in logs]
        kept = [(x if lower <= x <= upper else 0.0) if kind.masks else min(x, upper) for x in ratios]
        rows.append([kept.pop(0) if m else 0.0 for m in mask])
    return rows


@pytest.mark.parametrize("kind", Correction)
@pytest.mark.parametrize(("upper", "lower"), [(2.0, 0.5), (1.2, 0.4), (100.0, 0.0)])
def test_weights_are_what_the_formula_says(kind: Correction, upper: float, lower: float) -> None:
    found = importance_weights(OLD, ROLLOUT, MASK, kind, upper=upper, lower=lower)
    assert found.weight.tolist() == [pytest.approx(row, rel=1e-6) for row in expected(kind, upper, lower)]
    assert not found.cut[~MASK].any()


def test_every_kind_cuts_something_of_the_data_at_the_default_bounds() -> None:
    for kind in Correction:
        assert importance_weights(OLD, ROLLOUT, MASK, kind, upper=1.4, lower=0.5).cut.any()


@pytest.mark.parametrize("kind", Correction)
def test_equal_log_probabilities_weigh_exactly_one(kind: Correction) -> None:
    found = importance_weights(OLD, OLD, MASK, kind, upper=2.0, lower=0.5)
    assert torch.equal(found.weight, MASK.float())
    assert not found.cut.any()


def test_a_token_weight_has_the_bits_of_the_ratio_that_the_loss_would_have_taken() -> None:
    old, rollout = (-torch.rand(64, 32, generator=torch.Generator().manual_seed(n)) * 3 for n in (0, 1))
    mask = torch.ones(64, 32, dtype=torch.bool)
    weight = importance_weights(old, rollout, mask, Correction.TOKEN_TIS, upper=100.0, lower=0.0).weight
    held = token_loss(
        old, rollout, None, None, torch.ones_like(old), mask, clip_ratio=1e9, kl_coef=0.0, entropy_coef=0.0
    )
    assert bits.same_bits(weight, held.ratio)
    assert bits.same_bits(weight, -held.policy)
    # The witness: rounding a float64 exponential gives other bits.
    assert not bits.same_bits(weight, torch.exp((old - rollout).double()).float())


def test_values_of_inactive_tokens_never_enter() -> None:
    poisoned = torch.where(MASK, OLD, torch.nan)
    for kind in Correction:
        found = importance_weights(poisoned, ROLLOUT, MASK, kind, upper=2.0, lower=0.5)
        assert found.weight.isfinite().all()


def test_the_kinds_are_those_of_the_configuration() -> None:
    assert {kind.name for kind in CorrectionKind} - {"none"} == {kind.value for kind in Correction}
