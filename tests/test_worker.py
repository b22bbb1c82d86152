"""A worker is a host of ranks, or a rank that a host executes anew; both say clearly what is missing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launch_owner import RUN_ID, MakeJob, environment, job_of_two_ranks, run

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


def test_a_rank_whose_log_is_on_a_full_disk_ends_at_once_with_its_own_status() -> None:
    """A forked one that raised here instead would go on in its host's place."""
    code = (
        "import os, sys, threading, time\n"
        "from rlsp.worker import _end_process\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n"
        "print('a last word', end='')\n"
        "try:\n"
        "    sys.stdout.flush()\n"
        "    os._exit(9)\n"
        "except OSError:\n"
        "    _end_process(1)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], env=environment(), check=False, timeout=30)
    assert ended.returncode == 1
