"""A worker is a host of ranks, or a rank that a host executes anew; both say clearly what is missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from launch_owner import RUN_ID, MakeJob, job_of_two_ranks, run

from rlsp.config import Config
from rlsp.worker import log_path, main


@pytest.fixture
def make_job(compose: Callable[..., Config], tmp_path: Path) -> MakeJob:
    return lambda *overrides: job_of_two_ranks(compose, tmp_path / RUN_ID, *overrides)


def test_what_is_no_job_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.json").write_text('{"config": 3}')
    for name in ("job.json", "absent.json"):
        assert main(["--host", "--parent", "1", "--init-method", "file:///x", str(tmp_path / name)]) == 2
        assert "not a job: " in capsys.readouterr().err


def test_ranks_of_cuda_are_executed_anew_and_supervised_like_forked_ones(make_job: MakeJob) -> None:
    job = make_job("device=cuda")
    ended = run(job, "raise_on_one")
    assert ended.status == 1
    assert ended.reason.startswith("rank 1 failed: ValueError: the reward of prompt 5 is no number")
    assert "raise ValueError" in log_path(job.run_dir, 1).read_text()
