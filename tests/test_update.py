"""One update in one process: gradients against a float64 oracle, coefficients, and the edges of a batch."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from model_helpers import (
    BF16,
    OBJECTIVE,
    TIED,
    TINY,
    Left,
    alone,
    by_sequence,
    contract_of,
    gradients_of,
    oracle_logits,
    ragged,
    random_state,
    reordered,
    train,
    trainer,
)
from torch import Tensor

from rlsp import bits
from rlsp.config import ModelConfig
from rlsp.layout import Layout
from rlsp.model.hf import logical_weights
from rlsp.model.weights import weights_digest
from rlsp.rl.batch import RolloutBatch
from rlsp.rl.loss import token_loss
from rlsp.rl.update import Objective, Step, Trainer
from rlsp.summation import BoundBreachError, TokenSum

ONE = Layout(dp=1, cp=1, tp=1, sp=1)
LENGTHS, RESPONSES = (34, 70, 12, 33, 31, 5, 6), (30, 20, 8, 1, 16, 1, 0)  # one sequence drew nothing
ADVANTAGES = torch.tensor([1.0, -0.5, 0.7, 2.0, -1.3, 0.4, 1.0])
WITHOUT_CLIPPING = replace(OBJECTIVE, grad_clip=0.0)


def batch() -> RolloutBatch:
    return ragged(LENGTHS, RESPONSES)


def step(objective: Objective, of_batch: RolloutBatch | None = None, advantages: Tensor = ADVANTAGES) -> Step:
    return make(objective).update(of_batch or batch(), advantages)


def make(objective: Objective, shape: ModelConfig = TINY) -> Trainer:
    return trainer(
        alone(),
        ONE,
        objective=objective,
        shape=shape,
        state=random_state(shape),
        reference_state=random_state(shape, seed=1),
    )


# The float64 oracle.


def in_double(shape: ModelConfig, seed: int) -> dict[str, Tensor]:
    """The weights that a model of `shape` holds, in float64."""
    dtype = getattr(torch, shape.dtype.value)
    return {name: x.to(dtype).double() for name, x in random_state(shape, seed).items()}


@cache
def oracle(shape: ModelConfig) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Gradients by Megatron-Core's names, and metrics."""
    objective, data = OBJECTIVE, batch()
    state = {name: x.requires_grad_() for name, x in in_double(shape, 0).items()}

    def scores(of: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = oracle_logits(of, data.tokens.clamp(max=96), shape)[:, :-1] / objective.temperature
        logp = logits.log_softmax(-1)
        chosen = logp.gather(2, data.tokens[:, 1:, None].clamp(max=96))[..., 0]
        return chosen, -(logp.exp() * logp).sum(-1)

    logp, entropy = scores(state)
    active = data.active_mask[:, 1:]
    loss = token_loss(
        logp,
        data.logp[:, 1:].double(),
        scores(in_double(shape, 1))[0].detach(),
        entropy,
        ADVANTAGES.double()[:, None].expand(logp.shape),
        active,
        clip_ratio=objective.clip_ratio,
        kl_coef=objective.kl_coef,
        entropy_coef=objective.entropy_coef,
    )
    count = data.active_tokens
    (loss.loss.sum() / count).backward()
    gradients = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in state.items()}
    metrics = {
        "loss": loss.loss.sum(),
        "policy_loss": loss.policy.sum(),
        "kl": loss.kl.sum(),
        "entropy": entropy[active].sum(),
        "clip_fraction": loss.clipped.sum(),
        "approx_kl": loss.approx_kl.sum(),
    }
    return (
        dict(logical_weights(gradients, shape, contract_of(shape))),
        {name: float(value.detach()) / count for name, value in metrics.items()},
    )


def relative_errors(shape: ModelConfig) -> dict[str, float]:
    of = make(OBJECTIVE, shape)
    of.update(batch(), ADVANTAGES)
    exact, found = oracle(shape)[0], gradients_of(of)
    assert set(found) == set(exact)
    return {name: float((found[name] - g).norm() / g.norm()) for name, g in exact.items()}


@pytest.mark.parametrize("shape", [TINY, TIED], ids=["untied", "tied"])
def test_every_gradient_is_that_of_the_float64_oracle(shape: ModelConfig) -> None:
    errors = relative_errors(shape)
    assert max(errors.values()) < 1e-5, errors
    print("worst relative error", max(errors.values()))


def test_bfloat16_gradients_are_near_those_of_the_float64_oracle() -> None:
    errors = relative_errors(BF16)
    assert max(errors.values()) < 0.05, errors
    print("relative errors: median", sorted(errors.values())[len(errors) // 2], "worst", max(errors.values()))


def test_norm_metrics_and_log_probs_are_those_of_the_float64_oracle() -> None:
    found = step(OBJECTIVE)
    gradients, metrics = oracle(TINY)
    norm = math.sqrt(math.fsum(float((g * g).sum()) for g in gradients.values()))
    assert found.gradient_norm == pytest.approx(norm, rel=1e-6)
    assert found.metrics == pytest.approx(metrics, rel=1e-5)
    assert 0 < metrics["clip_fraction"] < 1  # the case clips some tokens
    assert metrics["kl"] > 0.01


# Coefficients.


@pytest.mark.parametrize("name", ["entropy_coef", "kl_coef", "clip_ratio", "temperature"])
def test_every_coefficient_of_the_loss_changes_the_gradient(name: str) -> None:
    """A9."""
    changed = replace(OBJECTIVE, **{name: getattr(OBJECTIVE, name) + 0.5})
    assert step(changed).gradients != step(OBJECTIVE).gradients


def test_an_entropy_coefficient_raises_the_entropy() -> None:
    objective = replace(OBJECTIVE, kl_coef=0.0, entropy_coef=1.0)
    of = make(objective)
    first, second = (of.update(batch(), torch.zeros(7)).metrics["entropy"] for _ in range(2))
    assert second > first


def test_the_divergence_from_the_policy_itself_is_zero_and_pulls_nowhere() -> None:
    with_kl = trainer(alone(), ONE, objective=OBJECTIVE, state=random_state(TINY))
    without = trainer(alone(), ONE, objective=replace(OBJECTIVE, kl_coef=0.0), state=random_state(TINY))
    first = with_kl.update(batch(), ADVANTAGES)
    assert first.metrics["kl"] == 0.0
    assert first.gradient_norm == without.update(batch(), ADVANTAGES).gradient_norm
    # After the update the policy has moved away from the reference, and the reference has not moved along.
    assert with_kl.update(batch(), ADVANTAGES).metrics["kl"] > 0.0


def test_the_reference_is_never_updated() -> None:
    of = make(OBJECTIVE)
    assert of.reference is not None
    before = weights_digest(of.reference)
    of.update(batch(), ADVANTAGES)
    assert weights_digest(of.reference) == before


def test_clipping_scales_the_gradient_and_leaves_the_norm_that_is_reported() -> None:
    free, clipped = step(WITHOUT_CLIPPING), step(OBJECTIVE)
    assert free.clip == 1.0
    assert clipped.clip == OBJECTIVE.grad_clip / (free.gradient_norm + 1e-6) < 1
    assert clipped.gradient_norm == free.gradient_norm
    assert step(replace(OBJECTIVE, grad_clip=1e6)).clip == 1.0


def test_a_learning_rate_of_zero_leaves_gradients_and_weights() -> None:
    of = make(replace(OBJECTIVE, learning_rate=0.0))
    before = weights_digest(of.model)
    assert of.update(batch(), ADVANTAGES).gradient_norm > 0
    assert weights_digest(of.model) == before


# Edges of a batch.


def masked(rows: slice) -> RolloutBatch:
    full = batch()
    mask = full.active_mask.clone()
    mask[rows] = False
    return replace(full, active_mask=mask)


def test_without_active_tokens_loss_and_gradient_are_zero_and_nothing_is_nan() -> None:
    """B13."""
    found = step(OBJECTIVE, masked(slice(None)))
    assert found.gradient_norm == 0.0
    assert found.clip == 1.0
    assert set(found.metrics.values()) == {0.0}
    assert not bool(found.forward.logp.isnan().any())
    assert found.forward.tokens_by_cp == (0,)


def test_a_sequence_without_active_tokens_adds_nothing() -> None:
    partly = masked(slice(5, 7))
    kept = reordered(partly, range(5))
    assert step(OBJECTIVE, partly).gradients == step(OBJECTIVE, kept, ADVANTAGES[:5]).gradients


def test_what_inactive_tokens_hold_reaches_nothing() -> None:
    full = batch()
    junk = torch.where(full.active_mask, full.logp, torch.nan)
    beyond = torch.arange(full.tokens.shape[1]) >= full.lengths[:, None]
    tokens = torch.where(beyond, 1, full.tokens)
    found = step(OBJECTIVE, replace(full, logp=junk, tokens=tokens))
    assert found.gradients == step(OBJECTIVE).gradients


@pytest.mark.parametrize("value", [math.nan, 1e30])
def test_a_leaf_out_of_bound_aborts_before_the_weights_change_and_names_its_tensors(value: float) -> None:
    of = make(OBJECTIVE)
    before = weights_digest(of.model)
    with pytest.raises(BoundBreachError, match=r"decoder\.layers\.0\.mlp\.linear_fc1\.weight.*output_layer"):
        of.update(batch(), torch.full((7,), value))
    assert weights_digest(of.model) == before
    after = of.update(batch(), ADVANTAGES)  # nothing of the failed step is left
    assert after.gradients == step(OBJECTIVE).gradients


# Micro-batches and order.


@cache
def in_one_micro_batch() -> Left:
    return train(make(OBJECTIVE), batch(), ADVANTAGES)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_micro_batches_change_no_bit(size: int) -> None:
    found = train(make(replace(OBJECTIVE, micro_batch_size=size)), batch(), ADVANTAGES)
    assert found == in_one_micro_batch()


def test_the_order_of_sequences_changes_no_bit() -> None:
    order = [3, 6, 0, 5, 2, 4, 1]
    objective = replace(OBJECTIVE, micro_batch_size=3)
    found = train(make(objective), reordered(batch(), order), ADVANTAGES[order])
    assert found == in_one_micro_batch()


def naive_add(self: TokenSum, leaves: Tensor) -> None:
    """Sum in float32, as frameworks do; keep the result in the integer accumulator's bits."""
    if not hasattr(self, "floats"):
        self.floats = torch.zeros(self.total.shape)
    self.floats += leaves.sum(dim=0)
    self.total.copy_((self.floats.double() * 2.0**self.lsb).round().to(torch.int64))


def test_a_naive_sum_of_tokens_depends_on_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Witness: the same comparison with leaves added in float32 in the order of their coming."""
    monkeypatch.setattr(TokenSum, "add", naive_add)
    steps = [step(replace(OBJECTIVE, micro_batch_size=size)) for size in (1, 2, 3)]
    assert len({bits.digest(one.gradients) for one in steps}) == 3


def test_the_loss_is_a_mean_over_tokens_and_not_of_means() -> None:
    """C6: the naive normaliser, each micro-batch by its own count, gives another loss."""
    data = batch()
    whole = step(OBJECTIVE).metrics["loss"]
    halves = [reordered(data, rows) for rows in ([0, 2, 4, 6], [1, 3, 5])]
    parts = [
        make(OBJECTIVE).update(half, ADVANTAGES[rows]).metrics["loss"]
        for half, rows in zip(halves, ([0, 2, 4, 6], [1, 3, 5]), strict=True)
    ]
    counts = [half.active_tokens for half in halves]
    assert sum(p * c for p, c in zip(parts, counts, strict=True)) / sum(counts) == pytest.approx(whole)
    assert sum(parts) / 2 != pytest.approx(whole, rel=1e-2)


def test_a_step_says_what_its_forward_pass_computed() -> None:
    data = batch()
    forward = step(OBJECTIVE).forward
    assert bool((forward.logp[data.active_mask] < 0).all())
    assert bool((forward.logp[~data.active_mask] == 0).all())
    assert bool((forward.row_digest[~data.active_mask] == 0).all())
    assert forward.tokens_by_cp == (data.active_tokens,)
    assert by_sequence(forward.logp, data) == by_sequence(step(OBJECTIVE).forward.logp, data)
    assert not bits.same_bits(forward.logp, step(replace(OBJECTIVE, temperature=1.0)).forward.logp)
