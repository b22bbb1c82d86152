"""The loss is the published one, token by token, and what is masked reaches nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlsp.bits import bit_pattern, same_bits
from rlsp.numerics.hashing import hash_words
from rlsp.rl.loss import TokenLoss, token_loss

COEFFICIENTS = {"clip_ratio": 0.2, "kl_coef": 0.3, "entropy_coef": 0.1}
FIELDS = ("loss", "policy", "kl", "ratio", "approx_kl")


def uniform(low: float, high: float, count: int, stream: int, dtype: torch.dtype) -> Tensor:
    share = (hash_words(stream, torch.arange(count)).double() * 2.0**-64 + 0.5).to(torch.float64)
    return (low + (high - low) * share).to(dtype)


def inputs(count: int = 64, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    logp = uniform(-3.0, -0.1, count, 1, dtype)
    return {
        "logp": logp,
        "old_logp": logp - uniform(-0.5, 0.5, count, 2, dtype),
        "reference_logp": logp + uniform(-0.5, 0.5, count, 3, dtype),
        "entropy": uniform(0.1, 4.0, count, 4, dtype),
        "advantage": uniform(-2.0, 2.0, count, 5, dtype),
        "active_mask": torch.ones(count, dtype=torch.bool),
    }


def loss_of(given: dict[str, Any], **changes: float) -> TokenLoss:
    arguments: dict[str, Any] = {**given, **COEFFICIENTS, **changes}
    return token_loss(**arguments)


def gradients(given: dict[str, Tensor], **changes: float) -> tuple[Tensor, Tensor]:
    logp, entropy = (given[name].clone().requires_grad_() for name in ("logp", "entropy"))
    loss_of({**given, "logp": logp, "entropy": entropy}, **changes).loss.backward(torch.ones_like(logp))
    grad = entropy.grad if entropy.grad is not None else torch.zeros_like(entropy)
    assert logp.grad is not None
    return logp.grad, grad


def test_each_token_has_the_published_loss() -> None:
    given = inputs()
    result = loss_of(given)
    for t in range(64):
        logp, old, ref, entropy, advantage = (float(given[name][t]) for name in list(given)[:5])
        ratio = math.exp(logp - old)
        policy = -min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
        kl = math.exp(ref - logp) - 1 - (ref - logp)
        assert float(result.ratio[t]) == pytest.approx(ratio, rel=1e-12)
        assert float(result.approx_kl[t]) == pytest.approx(ratio - 1 - math.log(ratio), rel=1e-9, abs=1e-15)
        assert float(result.policy[t]) == pytest.approx(policy, rel=1e-12)
        assert float(result.kl[t]) == pytest.approx(kl, rel=1e-9)
        assert float(result.loss[t]) == pytest.approx(policy + 0.3 * kl - 0.1 * entropy, rel=1e-12)
        assert bool(result.clipped[t]) == ((advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.8))
    assert 0 < int(result.clipped.sum()) < 64


def test_gradients_agree_with_finite_differences_in_float64() -> None:
    given, step = inputs(), 1e-6
    by_logp, by_entropy = gradients(given)
    for name, gradient in (("logp", by_logp), ("entropy", by_entropy)):
        higher = loss_of({**given, name: given[name] + step}).loss
        lower = loss_of({**given, name: given[name] - step}).loss
        torch.testing.assert_close(gradient, (higher - lower) / (2 * step), rtol=1e-6, atol=1e-8)


def test_clipped_tokens_pass_no_policy_gradient_and_the_others_pass_all_of_it() -> None:
    given = inputs(dtype=torch.float32)
    result = loss_of(given, kl_coef=0.0, entropy_coef=0.0)
    by_logp, _ = gradients(given, kl_coef=0.0, entropy_coef=0.0)
    assert same_bits(by_logp, torch.where(result.clipped, 0.0, -given["advantage"] * result.ratio))


def test_the_first_update_has_ratio_one_and_the_plain_policy_gradient() -> None:
    given = inputs(dtype=torch.float32)
    given["old_logp"] = given["logp"].clone()
    result = loss_of(given, kl_coef=0.0, entropy_coef=0.0)
    assert result.ratio.tolist() == [1.0] * 64
    assert same_bits(result.loss.detach(), -given["advantage"])
    assert same_bits(gradients(given, kl_coef=0.0, entropy_coef=0.0)[0], -given["advantage"])


def test_the_kl_to_an_equal_reference_is_zero_with_zero_gradient() -> None:
    given = inputs(dtype=torch.float32)
    given["reference_logp"], given["advantage"] = given["logp"].clone(), torch.zeros(64)
    assert loss_of(given).kl.tolist() == [0.0] * 64
    assert gradients(given)[0].tolist() == [0.0] * 64


def test_the_entropy_coefficient_changes_loss_and_gradients() -> None:
    given = inputs(dtype=torch.float32)
    without, with_it = loss_of(given, entropy_coef=0.0), loss_of(given, entropy_coef=0.1)
    assert bool((with_it.loss < without.loss).all())
    assert gradients(given, entropy_coef=0.0)[1].tolist() == [0.0] * 64
    assert same_bits(gradients(given, entropy_coef=0.1)[1], torch.full((64,), -0.1))


def test_the_kl_coefficient_changes_loss_and_gradients() -> None:
    given = inputs(dtype=torch.float32)
    assert not same_bits(loss_of(given, kl_coef=0.0).loss, loss_of(given).loss)
    assert not same_bits(gradients(given, kl_coef=0.0)[0], gradients(given)[0])


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_at_coefficient_zero_a_branch_is_not_built_and_its_input_not_read(poison: float) -> None:
    given = inputs(dtype=torch.float32)
    poisoned = {name: torch.full((64,), poison) for name in ("reference_logp", "entropy")}
    without = {"kl_coef": 0.0, "entropy_coef": 0.0}
    expected = loss_of(given, **without)
    for replaced in (poisoned, {"reference_logp": None, "entropy": None}):
        result = loss_of({**given, **replaced}, **without)
        assert all(same_bits(getattr(result, name), getattr(expected, name)) for name in FIELDS)
    assert expected.kl.tolist() == [0.0] * 64
    entropy = given["entropy"].clone().requires_grad_()
    assert not loss_of({**given, "entropy": entropy}, **without).loss.requires_grad
    assert math.isnan(float(torch.tensor(0.0) * poison))  # what multiplying by the coefficient would give


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e38])
def test_what_inactive_tokens_hold_reaches_neither_values_nor_gradients(poison: float) -> None:
    given = inputs(dtype=torch.float32)
    mask = hash_words(6, torch.arange(64)) > 0
    clean = {**given, "active_mask": mask}
    dirty = {name: x if name == "active_mask" else torch.where(mask, x, poison) for name, x in clean.items()}
    everything_active = loss_of(given)
    result = loss_of(dirty)
    for name in FIELDS:
        x = getattr(result, name)
        assert same_bits(x, getattr(loss_of(clean), name))
        assert bit_pattern(x[~mask]).tolist() == [0] * int((~mask).sum())
        assert same_bits(x[mask], getattr(everything_active, name)[mask])
    assert not bool(result.clipped[~mask].any())
    for gradient, unmasked in zip(gradients(dirty), gradients(given), strict=True):
        assert gradient[~mask].abs().tolist() == [0.0] * int((~mask).sum())
        assert same_bits(gradient[mask], unmasked[mask])


def test_multiplying_by_the_mask_would_let_nan_through() -> None:
    logp = torch.tensor([-math.inf], requires_grad=True)
    loss = (logp - logp.detach()).exp() * torch.tensor([0.0])
    loss.backward()
    assert math.isnan(float(loss.detach()))
    assert logp.grad is not None
    assert math.isnan(float(logp.grad))


def test_all_tokens_masked_give_zero_loss_and_zero_gradients() -> None:
    given = {**inputs(dtype=torch.float32), "active_mask": torch.zeros(64, dtype=torch.bool)}
    result = loss_of(given)
    for name in FIELDS:
        assert bit_pattern(getattr(result, name)).tolist() == [0] * 64
    for gradient in gradients(given):
        assert gradient.abs().tolist() == [0.0] * 64


def test_no_tokens_at_all_give_an_empty_loss() -> None:
    given = {name: x[:0] for name, x in inputs(dtype=torch.float32).items()}
    assert loss_of(given).loss.shape == (0,)


def test_a_clipped_ratio_that_overflows_stays_finite_and_an_unclipped_one_shows() -> None:
    given = inputs(2, torch.float32)
    given["logp"], given["old_logp"] = torch.tensor([-1.0, -1.0]), torch.tensor([-200.0, -200.0])
    given["advantage"] = torch.tensor([1.0, -1.0])
    result = loss_of(given, kl_coef=0.0, entropy_coef=0.0)
    assert result.loss.tolist() == pytest.approx([-1.2, math.inf])
    assert float(gradients(given, kl_coef=0.0, entropy_coef=0.0)[0][0]) == 0.0


def test_a_nan_of_an_active_token_is_not_hidden() -> None:
    for name in ("logp", "old_logp", "reference_logp", "entropy", "advantage"):
        given = inputs(4, torch.float32)
        given[name] = torch.tensor([math.nan, *given[name][1:].tolist()])
        loss = loss_of(given).loss
        assert loss.isnan().tolist() == [True, False, False, False]


def test_a_tokens_loss_does_not_depend_on_how_many_others_there_are() -> None:
    given = inputs(301, torch.float32)
    whole, whole_gradients = loss_of(given).loss, gradients(given)
    for size in (1, 7, 32, 64):
        for first in (0, 5, 300 - size):
            part = {name: x[first : first + size] for name, x in given.items()}
            assert same_bits(loss_of(part).loss, whole[first : first + size])
            for gradient, expected in zip(gradients(part), whole_gradients, strict=True):
                assert same_bits(gradient, expected[first : first + size])


def test_metrics_carry_no_gradient() -> None:
    given = inputs(dtype=torch.float32)
    result = loss_of({**given, "logp": given["logp"].clone().requires_grad_()})
    assert result.loss.requires_grad
    assert not any(getattr(result, name).requires_grad for name in ("policy", "kl", "ratio", "clipped"))


@pytest.mark.parametrize("name", ["clip_ratio", "kl_coef", "entropy_coef"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_a_coefficient_without_meaning_is_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 0 and finite"):
        loss_of(inputs(4), **{name: value})


def test_missing_inputs_and_wrong_shapes_and_dtypes_are_named() -> None:
    given = inputs(4, torch.float32)
    with pytest.raises(ValueError, match=r"kl_coef is 0\.3, but there is no reference_logp"):
        loss_of({**given, "reference_logp": None})
    with pytest.raises(ValueError, match=r"entropy_coef is 0\.1, but there is no entropy"):
        loss_of({**given, "entropy": None})
    with pytest.raises(TypeError, match=r"not in torch\.bfloat16"):
        loss_of({**given, "logp": given["logp"].bfloat16()})
    with pytest.raises(TypeError, match=r"advantage is torch\.float64"):
        loss_of({**given, "advantage": given["advantage"].double()})
