"""`resume=auto`: the same command line begins a run, goes on with it, and says that it is done."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest
from command import Console
from test_resume_command import NOW, cut_off

from rlsp.config import Job, Resumption
from rlsp.report import manifest, verdict
from rlsp.report.manifest import Status

FIXED = ("resume=auto", "hydra.run.dir=run", "tracker=none")


def test_one_command_line_begins_a_run_and_goes_on_with_it(rlsp_command: Console) -> None:
    rlsp_command.outcome = cut_off
    assert rlsp_command(*FIXED, "entropy_coef=0.01") == 1
    assert rlsp_command(*FIXED, "entropy_coef=0.01") == 1
    first, then = rlsp_command.jobs
    assert (first.resumed, then.resumed) == (None, Resumption(0, None, None))
    assert (then.run_id, then.run_dir, then.config) == (first.run_id, first.run_dir, first.config)
    assert first.overrides == then.overrides


def test_what_would_change_the_results_is_refused(rlsp_command: Console) -> None:
    rlsp_command.outcome = cut_off
    rlsp_command(*FIXED)
    assert rlsp_command(*FIXED, "seed=3") == 2
    assert "seed=3: legal: 0, which the run has: it decides the results" in rlsp_command.errors


def test_a_finished_run_is_done(rlsp_command: Console) -> None:
    def finish(job: Job) -> int:
        manifest.begin(job, {})
        manifest.finish(job.run_dir, NOW, Status.FINISHED)
        return verdict.seal(job.run_dir).exit_status

    rlsp_command.outcome = finish
    status = rlsp_command(*FIXED)
    assert rlsp_command(*FIXED) == status
    assert "nothing to do" in rlsp_command.printed
    assert len(rlsp_command.jobs) == 1


def test_a_start_that_was_cut_off_before_there_was_a_run_is_begun_again(rlsp_command: Console) -> None:
    rlsp_command(*FIXED)  # ends before anything is written
    assert rlsp_command.left() == [
        "run", "run/.hydra", "run/.hydra/config.yaml", "run/.hydra/hydra.yaml", "run/.hydra/overrides.yaml",
        "run/logs", "run/logs/owner.lock",
    ]  # fmt: skip
    assert rlsp_command(*FIXED, "seed=3") == 0
    first, then = rlsp_command.jobs
    assert (then.resumed, then.run_dir, then.config.seed) == (None, first.run_dir, 3)
    assert "seed=3" in (rlsp_command.folder / "run" / ".hydra" / "overrides.yaml").read_text()
    with (rlsp_command.folder / "run" / "logs" / "owner.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert rlsp_command(*FIXED) == 2
    assert "the run is still going on" in rlsp_command.errors


@pytest.mark.parametrize("name", ["notes.txt", "logs"])
def test_a_folder_of_something_else_is_refused(rlsp_command: Console, name: str) -> None:
    other = rlsp_command.folder / "run" / name
    other.mkdir(parents=True)
    assert rlsp_command(*FIXED) == 2
    assert f"run folder {other.parent}: legal: a folder that is absent or empty" in rlsp_command.errors
    assert rlsp_command.left() == ["run", f"run/{name}"]


def test_a_folder_that_is_another_each_time_is_refused(rlsp_command: Console) -> None:
    for given in ((), ("-m", "seed=1,2")):
        assert rlsp_command(*given, "resume=auto") == 2
        assert "resume=auto: legal: " in rlsp_command.errors
    assert rlsp_command.left() == []


def test_all_machines_begin_and_go_on_with_one_command_line(
    rlsp_command: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlsp.node.assist", rlsp_command._execute)
    shared = (*FIXED, "cluster.nodes=2", "cluster.host=127.0.0.1", "cluster.shared_folder=true")

    def node(number: int) -> Job:
        rlsp_command(*shared, f"cluster.node={number}")
        return rlsp_command.jobs[-1]

    early = node(1)  # before there is a run
    rlsp_command.outcome = cut_off
    owner = node(0)
    rlsp_command.outcome = lambda job: 0
    late = node(1)
    assert early.config == late.config
    assert early.run_dir == late.run_dir == f"{Path(owner.run_dir)}.node-1"
    assert (owner.resumed, early.resumed, late.resumed) == (None, None, None)
    assert late.run_id == owner.run_id
