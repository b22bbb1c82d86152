"""A run that is asked to stop saves first; one whose rank died starts again by itself, if it may."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from launch_owner import RUN_ID, MakeJob, Owner, job_of_two_ranks, processes_of, run, started

from rlsp.board import Board
from rlsp.config import Config, Job
from rlsp.report.checkpoint import numbered
from rlsp.report.compare import compare
from rlsp.report.compare_records import Outcome
from rlsp.report.continuation import continuation
from rlsp.report.manifest import Beginning, Manifest
from rlsp.report.verdict import verify
from rlsp.worker import RUN_RANK, board_path

SMALL = ("prompts_per_rollout=2", "samples_per_prompt=2", "max_response_tokens=8", "entropy_coef=0.01")


@pytest.fixture
def make_job(compose: Callable[..., Config], tmp_path: Path) -> MakeJob:
    return lambda *overrides: job_of_two_ranks(compose, tmp_path / RUN_ID, *SMALL, *overrides)


def segments_of(job: Job) -> list[Beginning]:
    return [segment.begun_by for segment in Manifest.read(Path(job.run_dir) / "manifest.json").segments]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_asked_to_stop_finishes_its_rollout_saves_and_says_how_it_goes_on(
    make_job: MakeJob, number: signal.Signals
) -> None:
    job = make_job("num_rollouts=500", "checkpoint.every=400")
    owner = Owner(job, RUN_RANK)
    owner.await_slot(0, lambda slot: slot.phase.startswith("rollout 2: "))
    owner.process.send_signal(number)
    ended = owner.end()
    assert processes_of(job) == []
    assert ended.status == 1
    (saved,) = numbered(Path(job.run_dir))
    assert saved >= 3
    assert ended.reason == f"stopped by {number.name}, saved after rollout {saved - 1}"
    assert "stopping once this rollout is done and saved, within 60 s" in ended.output
    assert f"resume with: rlsp resume={job.run_dir}  (goes on at rollout {saved})" in ended.output
    found = verify(job.run_dir)
    assert (found.damage, found.judgement.verdict.value) == ((), "ABORTED")
    rows = (Path(job.run_dir) / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == saved
    assert continuation(job.run_dir)[0].rollout == saved


def test_a_run_with_nothing_to_save_stops_at_once(make_job: MakeJob) -> None:
    job = make_job("checkpoint.every=1")
    owner = Owner(job, "certify_for_long")
    owner.await_files("up-0", "up-1")
    owner.mark()
    owner.process.send_signal(signal.SIGTERM)
    ended = owner.end()
    assert ended.reason == "stopped by SIGTERM"
    assert ended.seconds < 10
    assert "stopping once" not in ended.output
    assert f"resume with: rlsp resume={job.run_dir}  (goes on at rollout 0)" in ended.output


@pytest.mark.parametrize(("limit", "signals"), [("60.0", 2), ("1.0", 1)])
def test_a_second_signal_or_the_limit_ends_the_wait_for_a_rollout(
    make_job: MakeJob, limit: str, signals: int
) -> None:
    job = make_job("checkpoint.every=1", f"checkpoint.stop_s={limit}")
    owner = Owner(job, "wait_for_the_end")
    owner.await_files("up-0", "up-1")
    owner.mark()
    owner.process.send_signal(signal.SIGINT)
    owner.await_that(Board.open(board_path(job.run_dir)).stop_asked)
    if signals > 1:
        owner.process.send_signal(signal.SIGINT)
    ended = owner.end()
    assert ended.seconds < 15
    assert (ended.status, ended.reason) == (1, "stopped by SIGINT")
    assert processes_of(job) == []


def test_a_run_whose_rank_is_killed_starts_again_from_its_checkpoint_and_is_the_undisturbed_one(
    make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job("num_rollouts=4", "checkpoint.every=2", "launch.max_restarts=2")
    owner = Owner(job, RUN_RANK)
    owner.await_slot(1, lambda slot: slot.phase.startswith("rollout 3: "))
    os.kill(max(processes_of(job), key=started), signal.SIGKILL)
    ended = owner.end()
    assert ended.status == 0, ended.output
    assert "restart 1 of 2, at rollout 2: rank 1 was killed by SIGKILL" in ended.output
    assert segments_of(job) == [Beginning.STARTED, Beginning.RESTARTED]
    first = Manifest.read(Path(job.run_dir) / "manifest.json").earlier[0]
    assert first.aborted is not None
    assert first.aborted.startswith("rank 1 was killed by SIGKILL")
    alone = replace(job, run_dir=str(tmp_path / "alone"))
    assert run(alone, RUN_RANK).status == 0
    found = compare(job.run_dir, alone.run_dir)
    assert (found.outcome, found.rollouts) == (Outcome.EQUAL, 4)
    for index in range(4):
        name = f"rollouts/{index:05d}.safetensors"
        assert (Path(job.run_dir) / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()


def test_what_comes_again_is_not_tried_again(make_job: MakeJob) -> None:
    job = make_job("launch.max_restarts=3")
    ended = run(job, "raise_on_one")
    assert ended.status == 1
    assert "restart" not in ended.output
    assert segments_of(job) == [Beginning.STARTED]


def test_restarts_come_to_an_end(make_job: MakeJob) -> None:
    job = make_job("launch.max_restarts=2")
    ended = run(job, "leave_early")
    assert (ended.status, ended.verdict["verdict"]) == (1, "ABORTED")
    assert [line.partition(":")[0] for line in ended.output.splitlines() if line.startswith("restart")] == [
        "restart 1 of 2, at rollout 0",
        "restart 2 of 2, at rollout 0",
    ]
    assert segments_of(job) == [Beginning.STARTED, Beginning.RESTARTED, Beginning.RESTARTED]
    reasons = json.loads((Path(job.run_dir) / "manifest.json").read_text())["earlier"]
    assert all(each["aborted"].startswith("rank 1 exited with status 0") for each in reasons)
