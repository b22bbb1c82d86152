"""A worker is a rank of torchrun, or one that a host executes anew; both say clearly what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launch_owner import RUN_ID, MakeJob, environment, job_of_two_ranks, processes_of, run, write_job

from rlsp.board import Board
from rlsp.config import Config
from rlsp.worker import board_path, log_path, main

TORCHRUN = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.fixture
def make_job(compose: Callable[..., Config], tmp_path: Path) -> MakeJob:
    return lambda *overrides: job_of_two_ranks(compose, tmp_path / RUN_ID, *overrides)


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        (
            dict.fromkeys(TORCHRUN),
            ["RANK is not set: legal: an integer in 0..1", "MASTER_ADDR is not set: legal: a host name"],
        ),
        ({"RANK": "2"}, ["RANK=2: legal: an integer in 0..1"]),
        (
            {"RANK": "-1", "MASTER_PORT": "x"},
            ["RANK=-1: legal: an integer in 0..1", "MASTER_PORT=x: legal: an integer in 1..65535"],
        ),
        ({"WORLD_SIZE": "4"}, ["WORLD_SIZE=4: legal: 2 (the job's layout)"]),
    ],
)
def test_a_torchrun_environment_that_does_not_fit_is_one_refusal(
    make_job: MakeJob,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, str | None],
    faults: list[str],
) -> None:
    job = make_job()
    for name, value in {**TORCHRUN, **changes}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert main([str(write_job(job))]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "rlsp.worker: this is no torchrun environment for the job:"
    assert [line for line in faults if f"  {line}" not in said] == []
    assert not board_path(job.run_dir).exists()


def test_what_is_no_job_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.json").write_text('{"config": 3}')
    assert main([str(tmp_path / "job.json")]) == 2
    assert "not a job: " in capsys.readouterr().err
    assert main([str(tmp_path / "absent.json")]) == 2


@pytest.mark.parametrize("held", ["VERDICT.json", "consistency.json"])
def test_torchrun_never_replaces_a_runs_evidence(
    make_job: MakeJob, capsys: pytest.CaptureFixture[str], held: str
) -> None:
    job = make_job()
    path = write_job(job)
    (Path(job.run_dir) / held).write_text("sealed")
    before = sorted(Path(job.run_dir).rglob("*"))
    assert main([str(path)]) == 2
    assert f"already holds a run's {held}" in capsys.readouterr().err
    assert (sorted(Path(job.run_dir).rglob("*")), (Path(job.run_dir) / held).read_text()) == (
        before,
        "sealed",
    )


def test_torchrun_runs_the_ranks_and_rank_0_writes_manifest_and_verdict(make_job: MakeJob) -> None:
    job = make_job()
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "rlsp.worker"]
    done = subprocess.run(
        [sys.executable, *command, str(write_job(job)), "--entry", "launch_entries:two_exchanges"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert processes_of(job) == []
    verdict = json.loads((Path(job.run_dir) / "VERDICT.json").read_text())
    assert verdict["aborted"] is None, done.stderr
    assert f"folder: {job.run_dir}" in done.stdout
    assert [(slot.sequence, slot.done) for slot in Board.open(board_path(job.run_dir)).read()] == [
        (1, True)
    ] * 2


def test_ranks_of_cuda_are_executed_anew_and_supervised_like_forked_ones(make_job: MakeJob) -> None:
    job = make_job("device=cuda")
    ended = run(job, "raise_on_one")
    assert ended.status == 1
    assert ended.reason.startswith("rank 1 failed: ValueError: the reward of prompt 5 is no number")
    assert "raise ValueError" in log_path(job.run_dir, 1).read_text()
