"""Faults planted in living ranks, not in their files: what the evidence says of them is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from ranks import run_ranks

from rlsp import run
from rlsp.board import Board, Place
from rlsp.config import Job
from rlsp.evidence import DisagreementError
from rlsp.model.wiring import Operator, Wiring
from rlsp.report import manifest, verdict
from rlsp.report.verdict import Judgement
from rlsp.rl.optimizer import AdamW
from rlsp.rl.update import NonFiniteWeightsError, Trainer

STARTED = "2026-01-01T00:00:00+00:00"
SMALL = (
    "num_rollouts=1",
    "prompts_per_rollout=2",
    "samples_per_prompt=2",
    "max_response_tokens=8",
    "parallel=cp1_tp2_sp2",
    "tracker=none",
)


def judged(
    folder: Path, compose: Any, *overrides: str, plant: Callable[[int], Any] | None = None
) -> Judgement:
    """Run a small experiment, `plant(rank)` in place on every rank, and judge what it leaves."""
    (folder / "logs").mkdir(parents=True)
    config = compose(*SMALL, *overrides)
    job = Job(config, "20260101-000000-abcdef", str(folder), (), ("rlsp",), STARTED)
    manifest.begin(job, {})
    Board.create(folder / "logs" / "board", config.world_size)

    def live(rank: int, world_size: int) -> None:
        board = Board.join(folder / "logs" / "board", world_size).writer(rank)
        place = Place(rank=rank, world_size=world_size, local_rank=rank, init_method="", board=board)
        if plant is None:
            run.live(job, place)
            return
        with plant(rank):
            run.live(job, place)

    run_ranks(config.world_size, live, timeout_s=120)
    manifest.finish(folder, STARTED, manifest.Status.FINISHED)
    return verdict.seal(folder)


def verdicts(judgement: Judgement) -> dict[str, str]:
    """Return every gate's verdict that is not PASS."""
    return {gate.name: gate.verdict.value for gate in judgement.gates if gate.verdict.value != "PASS"}


def test_a_run_without_a_plant_passes_every_gate(tmp_path: Path, compose: Any) -> None:
    assert verdicts(judged(tmp_path / "run", compose)) == {}


def test_a_fallback_that_ran_fails_the_routes_gate(tmp_path: Path, compose: Any) -> None:
    count = Wiring.count

    def falls_back(self: Wiring, operator: Operator, route: str = "strict") -> None:
        count(self, operator, "native" if operator is Operator.FFN else route)

    found = judged(
        tmp_path / "run", compose, plant=lambda rank: mock.patch.object(Wiring, "count", falls_back)
    )
    assert verdicts(found) == {"routes": "FAIL"}
    assert any("train.ffn" in reason and "strict" in reason for reason in found.reasons), found.reasons


def test_a_rank_with_other_advantages_stops_every_rank_before_it_trains(tmp_path: Path, compose: Any) -> None:
    def scaled(rank: int) -> Any:
        exact = run.group_advantages
        factor = 1.0001 if rank else 1.0
        return mock.patch.object(run, "group_advantages", lambda *a: exact(*a) * factor)

    with pytest.raises(DisagreementError, match=r"ranks \[1\] hold another batch or other advantages"):
        judged(tmp_path / "run", compose, plant=scaled)


def test_a_rollout_side_that_training_overwrites_is_refused(tmp_path: Path, compose: Any) -> None:
    update = Trainer.update

    def copies_its_own_side(self: Trainer, batch: Any, *given: Any) -> Any:
        step = update(self, batch, *given)
        batch.row_digest.copy_(step.forward.row_digest + 1)
        return replace(step, forward=replace(step.forward, row_digest=batch.row_digest))

    with pytest.raises(DisagreementError, match="batch or advantages changed while training ran"):
        judged(
            tmp_path / "run",
            compose,
            plant=lambda rank: mock.patch.object(Trainer, "update", copies_its_own_side),
        )


def test_a_rollout_of_empty_responses_alone_is_inconclusive(tmp_path: Path, compose: Any) -> None:
    """FAULTS B13."""
    found = judged(tmp_path / "run", compose, "seed=5", "task.response_limit=3", "prompts_per_rollout=1")
    assert found.verdict.value == "INCONCLUSIVE"
    assert "FAIL" not in verdicts(found).values()


def test_a_step_that_leaves_weights_without_a_value_stops_every_rank(tmp_path: Path, compose: Any) -> None:
    step = AdamW.step

    def overflows_on_one_rank(rank: int) -> Any:
        def stepped(self: AdamW, *arguments: Any) -> None:
            step(self, *arguments)
            if rank:
                self.masters["output_layer.weight"].view(-1)[7] = float("inf")

        return mock.patch.object(AdamW, "step", stepped)

    with pytest.raises(NonFiniteWeightsError, match=r"not finite in: output_layer\.weight"):
        judged(tmp_path / "run", compose, plant=overflows_on_one_rank)


def test_a_recomputed_old_policy_that_is_the_rollouts_all_the_same_fails_the_evidence(
    tmp_path: Path, compose: Any
) -> None:
    native = ("numerics=native", "reuse_rollout_logprob=false")
    reused = mock.patch.object(Trainer, "score", lambda self, batch: batch.logp)
    found = judged(tmp_path / "run", compose, *native, plant=lambda rank: reused)
    assert verdicts(found)["evidence"] == "FAIL"
    assert any("train/old_logprob_mismatched" in reason for reason in found.reasons)
    assert "evidence" not in verdicts(judged(tmp_path / "fair", compose, *native))


def test_an_update_that_steps_twice_fails_the_version_gate(tmp_path: Path, compose: Any) -> None:
    step = AdamW.step

    def twice(self: AdamW, *arguments: Any) -> None:
        step(self, *arguments)
        step(self, *arguments)

    found = judged(
        tmp_path / "run",
        compose,
        "num_rollouts=2",
        plant=lambda rank: mock.patch.object(AdamW, "step", twice),
    )
    assert verdicts(found)["version"] == "FAIL"
