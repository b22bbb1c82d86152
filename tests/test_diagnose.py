"""A replay names the boundary in which one ulp was planted, on either side, and nothing where nothing was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from model_helpers import alone, wiring_of
from planted_boundaries import Place as Planted
from planted_boundaries import planted
from ranks import run_ranks

from rlsp import rederive, run
from rlsp.board import Board, Place
from rlsp.capture import sites
from rlsp.config import Job
from rlsp.layout import assign_prompts
from rlsp.model.wiring import Boundary, Site
from rlsp.replay import Record, Replayer
from rlsp.report import manifest
from rlsp.report.diagnose_records import Answer, Diagnosis, Outcome, Request, State, answer_path, request_path

STARTED = "2026-01-01T00:00:00+00:00"
SMALL = (
    "num_rollouts=2",
    "prompts_per_rollout=2",
    "samples_per_prompt=2",
    "max_response_tokens=16",
    "model.head_dim=32",
    "numerics.q_block=16",
    "numerics.k_block=16",
    "numerics.token_block=16",
    "rollout.ignore_eos=true",
    "entropy_coef=0.01",
    "tracker=none",
)
LAYOUTS = {
    "TP=1": ("parallel=cp1_tp1_sp1",),
    "TP=2, CP=2, SP=2": ("parallel=cp2_tp2_sp2", "rollout.tp=2"),
}
SAMPLE = 3  # drawn by the second engine, where there are two
POSITION = 18  # in the second of the four chunks of 16 that CP=2 deals out, and predicting in every sequence
SITES = tuple(sites(2))


class Sides:
    """What was replayed without a plant: a plant on one side leaves the other as it is."""

    def __init__(self, replayer: Replayer, record: Record) -> None:
        self.training = replayer._train_again(record, SAMPLE)
        self.generating = replayer._draw_again(record, SAMPLE)


def plant_of(site: Site, replayer: Replayer, record: Record, training: bool) -> tuple[int, Any, Planted]:
    """Return the rank that plants, the model, and the place: a sharded boundary's on the last TP rank."""
    config, rank = replayer._config, replayer._mesh.world.rank
    if training:
        tp, cp = config.parallel.tp, config.parallel.cp
        local, sharded = POSITION - 16 * (cp - 1), site.boundary.sharded or site.boundary is Boundary.LOGP
        rows = 32
        if not sharded and config.parallel.sp > 1:
            rows //= tp
        planter = config.layout.rank(dp=0, cp=cp - 1, tp=tp - 1 if sharded else 0)
        return planter, replayer._trainer.model, Planted(rows, local, len(record.sequences), SAMPLE)
    layout = config.rollout_layout
    share = assign_prompts(len(record.sequences), layout.engines)[-1]
    planter = layout.engines * layout.tp - 1
    model = replayer._engine.model if replayer._engine else None
    assert rank != planter or model is not None
    return planter, model, Planted(1, 0, len(share), share.index(SAMPLE))


def replay_with_plants(rank: int, world_size: int, job: Job, scratch: str) -> dict[str, Any]:
    """Live a run, then re-derive its second rollout and replay it, once for each plant."""
    board = Board.join(Path(job.run_dir) / "logs" / "board", world_size).writer(rank)
    place = Place(rank=rank, world_size=world_size, local_rank=rank, init_method="", board=board)
    run.live(job, place)
    found: dict[str, Any] = {}
    replay = Replayer.replay

    def every(self: Replayer, record: Record, sample: int, notes: tuple[str, ...]) -> Diagnosis | None:
        clean = Sides(self, record)
        for training in (True, False):
            kept = {"_draw_again": clean.generating} if training else {"_train_again": clean.training}
            for site in SITES:
                planter, model, where = plant_of(site, self, record, training)
                with keeping(kept):
                    if rank == planter:
                        with planted(site, model, where, training=training):
                            found[f"{site} {training}"] = planter, replay(self, record, sample)
                    else:
                        found[f"{site} {training}"] = planter, replay(self, record, sample)
        return replay(self, record, sample, notes)

    with mock.patch.object(Replayer, "replay", every):
        rederive.live(Job(job.config, job.run_id, scratch, (), (), STARTED), place)
    return found


@contextmanager
def keeping(sides: dict[str, Any]) -> Iterator[None]:
    """Let a side be the one that was replayed before."""
    with mock.patch.multiple(Replayer, **{name: lambda *_, side=side: side for name, side in sides.items()}):
        yield


@pytest.fixture(scope="module", params=LAYOUTS)
def replayed(
    request: pytest.FixtureRequest, compose: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Answer]:
    """Run, seal and replay in one layout; return rank 0's diagnoses and the clean answer."""
    folder, scratch = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("scratch")
    config = compose(*SMALL, *LAYOUTS[request.param])
    job = Job(config, "20260101-000000-abcdef", str(folder), (), ("rlsp",), STARTED)
    (folder / "logs").mkdir()
    manifest.begin(job, {})
    Board.create(folder / "logs" / "board", config.world_size)
    asked = Request(run_dir=str(folder), rollout=1, sample=SAMPLE, notes=())
    asked.write(request_path(scratch))
    found = run_ranks(config.world_size, replay_with_plants, job, str(scratch), timeout_s=240)
    return found[0], Answer.read(answer_path(scratch))


def test_a_clean_replay_is_equal_and_gives_what_the_run_recorded(replayed: Any) -> None:
    _, answer = replayed
    diagnosis = answer.diagnosis
    assert answer.refusal is None
    assert diagnosis is not None
    assert diagnosis.outcome is Outcome.EQUAL
    assert diagnosis.first is None
    assert [(b.boundary, b.layer) for b in diagnosis.boundaries] == [
        (s.boundary.value, s.layer) for s in SITES
    ]
    assert {b.state for b in diagnosis.boundaries} == {State.EQUAL}
    assert all(b.elements and not b.differing_elements for b in diagnosis.boundaries)
    recorded = diagnosis.recorded
    assert recorded.tokens == diagnosis.response_tokens == 16
    assert set(recorded.model_dump(exclude={"tokens"}).values()) == {0}


def test_recorders_nest_and_hear_nothing_once_they_were_taken_away() -> None:
    wiring = wiring_of(alone())
    outer, inner = mock.Mock(), mock.Mock()
    site, tensor = Site(Boundary.FC1, 0), torch.ones(1, requires_grad=True)
    wiring.capture(site, tensor)
    with wiring.recording(outer):
        with suppress(KeyError), wiring.with_products(wiring.products).recording(inner):
            wiring.capture(site, tensor)
            raise KeyError
        wiring.capture(site, tensor)
        wiring.capture(None, tensor)
    wiring.capture(site, tensor)
    for recorder in (outer, inner):
        recorder.record.assert_called_once()
        assert not recorder.record.call_args.args[1].requires_grad


@pytest.mark.parametrize("training", [True, False], ids=["training", "rollout"])
def test_the_boundary_named_first_is_the_planted_one(replayed: Any, training: bool) -> None:
    diagnoses, answer = replayed
    wrong = {}
    for site in SITES:
        planter, diagnosis = diagnoses[f"{site} {training}"]
        first = diagnosis.first
        assert first is not None, site
        side = first.train if training else first.rollout
        other = first.rollout if training else first.train
        start = POSITION if training else answer.diagnosis.prompt_tokens
        if not training and site.boundary in (Boundary.LOGITS, Boundary.LOGP):
            start -= 1  # the prompt's last row comes first
        got = (first.boundary, first.layer, first.position, side.ranks)
        if got != (site.boundary.value, site.layer, start, (planter,)):
            wrong[site] = got
        states = [b.state for b in diagnosis.boundaries]
        assert states.index(State.FIRST) == SITES.index(site)
        assert State.FIRST not in states[states.index(State.FIRST) + 1 :]
        assert int(side.bits, 16) ^ int(other.bits, 16) == 1
        assert side.number != other.number
    assert not wrong
