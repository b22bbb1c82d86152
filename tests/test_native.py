"""The native routes are an honest control: near the truth as Megatron-Core is, and free to differ in bits."""

from __future__ import annotations

import itertools
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import oracles
import pytest
import torch
from model_helpers import CPU, HYPER, OBJECTIVE, TIED, TINY, Recording, mesh_of, products, ragged, wiring_of
from ranks import run_ranks
from test_accuracy import draw_batch, float64_gradients, megatron_gradients
from test_live_gates import judged, verdicts

from rlsp import bits
from rlsp.config import Dtype, ModelConfig
from rlsp.groups import Mesh
from rlsp.layout import Layout
from rlsp.model import build
from rlsp.model.attention import Channel
from rlsp.model.build import PolicyModel, build_model, initialize
from rlsp.model.compat import native_layers
from rlsp.model.gradients import NativeParameter
from rlsp.model.linear import RowParallelLinear
from rlsp.model.wiring import Operator, Wiring
from rlsp.rl.update import Trainer

OPERATORS = tuple(operator.value for operator in Operator)
ALL = dict.fromkeys((f"train.{operator}" for operator in OPERATORS), "native")


def model_of(mesh: Mesh, routes: dict[str, str], shape: ModelConfig, *, sp: bool) -> PolicyModel:
    wiring = replace(wiring_of(mesh, sp=sp, shape=shape), routes=routes)
    model = build_model(shape, wiring, CPU)
    initialize(model, 0, shape.init_std, shape.num_layers)
    return model


# Against float64 and Megatron-Core's own model.


def native_gradients(model: PolicyModel, batch: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    tokens, targets, advantage = batch
    for _, parameter, _ in model.named_shards():
        assert isinstance(parameter, NativeParameter)
        parameter.attach()
    channel = Channel(qkv_format="sbhd", positions=torch.arange(tokens.shape[1]).unsqueeze(1))
    scores = model.scores(model.logits(model.hidden(tokens, channel)), targets.t().reshape(-1), 1.0)
    weight = advantage.t().reshape(-1)
    loss = weight * scores.logp - 0.01 * scores.entropy * (weight != 0)
    torch.autograd.backward(loss, torch.ones_like(loss))
    return {n: oracles.in_megatron_layout(n, p.main_grad) for n, p, _ in model.named_shards()}


def errors(rank: int, world_size: int, shape: ModelConfig) -> list[tuple[float, float]]:
    """Relative errors of every gradient against float64: (native route, Megatron-Core's own model)."""
    with oracles.megatron_on_cpu():
        model = model_of(mesh_of(Layout(1, 1, 1, 1)), ALL, shape, sp=False)
        contract = model.wiring.contract
        stock = oracles.megatron_model(shape, contract.padded_vocab, getattr(torch, shape.dtype.value))
        exact = {name: oracles.in_megatron_layout(name, p) for name, p, _ in model.named_shards()}
        batch = draw_batch(0, 48, shape.vocab_size)
        true = float64_gradients(shape, exact, batch)
        pair = [native_gradients(model, batch), megatron_gradients(stock, exact, batch, shape.vocab_size)]
    return [
        tuple(float((g[name].double() - reference).norm() / reference.norm()) for g in pair)  # type: ignore[misc]
        for name, reference in true.items()
    ]


@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16])
@pytest.mark.parametrize("shape", [TINY, TIED], ids=["untied", "tied"])
def test_native_gradients_are_as_near_to_float64_as_megatrons_own(shape: ModelConfig, dtype: Dtype) -> None:
    products()
    found = run_ranks(1, errors, replace(shape, dtype=dtype), timeout_s=120)[0]
    assert 0.5 < statistics.median(mine / theirs for mine, theirs in found) < 2.0
    assert max(mine for mine, _ in found) < 10 * max(theirs for _, theirs in found)
    assert min(theirs for _, theirs in found) > 0


# Every combination of routes, against the strict ones on the same ranks.

LENGTHS, RESPONSES = (70, 33, 12, 64), (30, 33 - 5, 0, 50)
ADVANTAGES = torch.tensor([0.7, -1.1, 0.4, 0.9])


def arm(mesh: Mesh, layout: Layout, routes: dict[str, str], shape: ModelConfig) -> dict[str, torch.Tensor]:
    model = model_of(mesh, routes, shape, sp=layout.sequence_parallel)
    objective = replace(OBJECTIVE, kl_coef=0.0, micro_batch_size=2)
    optimizer = Recording(model, HYPER)
    trainer = Trainer(model, None, optimizer, mesh, layout, objective)
    trainer.update(ragged(LENGTHS, RESPONSES), ADVANTAGES)
    return optimizer.gradients


def distances(
    rank: int, world_size: int, layouts: list[Layout], shape: ModelConfig
) -> dict[str, tuple[float, bool]]:
    """For each layout and combination: the largest relative distance from strict, and whether bits differ."""
    found = {}
    with native_layers(CPU):
        for layout in layouts:
            mesh = mesh_of(layout, rank)
            strict = arm(mesh, layout, {}, shape)
            for chosen in itertools.product((False, True), repeat=len(OPERATORS)):
                native = [f"train.{op}" for op, is_native in zip(OPERATORS, chosen, strict=True) if is_native]
                gradients = arm(mesh, layout, dict.fromkeys(native, "native"), shape)
                far = max(float((gradients[n] - g).norm() / g.norm()) for n, g in strict.items())
                differ = not all(bits.same_bits(gradients[n], g) for n, g in strict.items())
                found[f"{layout} {native}"] = (far, differ)
    return found


@pytest.mark.parametrize("shape", [TINY, TIED], ids=["untied", "tied"])
def test_every_combination_of_routes_has_the_gradients_of_the_strict_ones_up_to_rounding(
    shape: ModelConfig,
) -> None:
    products()
    layouts = [Layout(1, 2, 2, 2), Layout(2, 1, 2, 1), Layout(1, 1, 4, 4)]
    for found in run_ranks(4, distances, layouts, shape, timeout_s=240):
        assert len(found) == len(layouts) * 8
        for name, (far, differ) in found.items():
            assert far < 2e-4, f"{name}: {far}"
            assert differ == ("train" in name), name


# Routes are declared, executed and counted.


def test_a_strict_module_in_a_native_operator_is_refused_as_the_model_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "NativeRowParallelLinear", RowParallelLinear)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.linear_fc2 is strict, declared is native"):
        model_of(mesh_of(Layout(1, 1, 1, 1)), {"train.ffn": "native"}, TINY, sp=False)


def test_a_native_layer_where_strict_was_declared_fails_the_routes_gate(tmp_path: Path, compose: Any) -> None:
    for planted, overrides in ((True, ()), (False, ("numerics.routes.ffn=native",))):

        def decides(self: Wiring, operator: Operator, always: bool = planted) -> bool:
            return always and operator is Operator.FFN

        found = judged(
            tmp_path / str(planted),
            compose,
            "parallel=cp1_tp1_sp1",
            *overrides,
            plant=lambda rank, decides=decides: mock.patch.object(Wiring, "native", decides),
        )
        assert verdicts(found)["routes"] == "FAIL"
        assert any("train.ffn" in reason and "routes:" in reason for reason in found.reasons)


def test_native_routes_are_counted_as_native_and_their_differences_are_reported(
    tmp_path: Path, compose: Any
) -> None:
    found = judged(tmp_path / "run", compose, "numerics=native", "parallel=cp2_tp2_sp2")
    assert found.verdict.value == "PASS"
    assert {gate.name for gate in found.gates if not gate.judged} == {"bits", "rows"}
    record = json.loads((tmp_path / "run" / "consistency.json").read_text())["rollouts"][0]
    assert set(record["declared_routes"].values()) == {"native"}
    assert all(set(calls) == {"native"} for calls in record["routes"].values())
    assert record["mismatched_tokens"] > 0


# The old policy: the rollout's log-probabilities, or training's own of a further forward pass.


def weights_after(folder: Path, compose: Any, *overrides: str) -> str:
    judged(folder, compose, "entropy_coef=0.01", "task=constant", *overrides)
    report = json.loads((folder / "consistency.json").read_text())
    digest: str = report["rollouts"][-1]["weights_digest"]
    return digest


def test_recomputing_the_old_policy_changes_no_bit_of_a_strict_run(tmp_path: Path, compose: Any) -> None:
    ends = {
        reuse: weights_after(
            tmp_path / reuse, compose, f"reuse_rollout_logprob={reuse}", "task=arithmetic", "num_rollouts=2"
        )
        for reuse in ("true", "false")
    }
    assert ends["true"] == ends["false"]


def test_native_runs_depend_on_whose_old_log_probabilities_they_use(tmp_path: Path, compose: Any) -> None:
    """The witness of the test before, and every correction is another run again."""
    ends = [
        weights_after(
            tmp_path / str(number), compose, "numerics=native", "task=arithmetic", "num_rollouts=1", *how
        )
        for number, how in enumerate(
            [
                ("reuse_rollout_logprob=true",),
                ("reuse_rollout_logprob=false",),
                ("reuse_rollout_logprob=false", "correction.kind=token_tis", "correction.upper=1.0"),
                ("reuse_rollout_logprob=false", "correction.kind=sequence_mis"),
            ]
        )
    ]
    assert len(set(ends)) == len(ends), ends
    row = json.loads((tmp_path / "3" / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["train/is_weight_mean"] == pytest.approx(1.0, abs=0.5)
    assert "train/is_weight_mean" not in (tmp_path / "0" / "metrics.jsonl").read_text()


def test_token_weights_without_a_cut_end_where_reusing_the_rollouts_log_probabilities_does(
    tmp_path: Path, compose: Any
) -> None:
    """With one update both weigh a token by exp(train − rollout); the witness is the test before."""
    ends = [
        weights_after(
            tmp_path / str(number),
            compose,
            "numerics=native",
            "task=arithmetic",
            "num_rollouts=1",
            "clip_ratio=10",
            *how,
        )
        for number, how in enumerate(
            [
                ("reuse_rollout_logprob=true",),
                (
                    "reuse_rollout_logprob=false",
                    "correction.kind=token_tis",
                    "correction.upper=100",
                ),
            ]
        )
    ]
    assert ends[0] == ends[1]
    gradients = [
        json.loads((tmp_path / n / "consistency.json").read_text())["rollouts"][0]["gradient_digest"]
        for n in ("0", "1")
    ]
    assert gradients[0] == gradients[1]
