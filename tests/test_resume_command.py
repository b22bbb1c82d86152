"""`rlsp resume=RUN`: which run is meant, what may change, and what is refused by name."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest
from command import LIGHT, Console

from rlsp.config import Job, Resumption
from rlsp.report import manifest, verdict
from rlsp.report.manifest import Status

NOW = "2026-01-01T00:00:00+00:00"


def cut_off(job: Job) -> int:
    """Begin a run that is aborted before its first rollout."""
    if job.resumed is None:
        manifest.begin(job, {})
        manifest.finish(job.run_dir, NOW, Status.ABORTED, "killed")
    return verdict.seal(job.run_dir).exit_status


@pytest.fixture
def run(rlsp_command: Console) -> Path:
    """A run in cp1_tp2_sp2 with overrides of its own."""
    rlsp_command.outcome = cut_off
    given = ("entropy_coef=0.01", "parallel.dp=2", "tracker=none", "name=mine")
    assert rlsp_command(*given, "hydra.run.dir=run") == 1
    return rlsp_command.folder / "run"


def test_a_run_goes_on_in_its_folder_under_its_id_with_its_own_overrides(
    rlsp_command: Console, run: Path
) -> None:
    assert rlsp_command("resume=run", "micro_batch_size=3", "num_rollouts=9") == 1
    first, then = rlsp_command.jobs
    assert (then.run_dir, then.run_id) == (first.run_dir, first.run_id)
    assert then.resumed == Resumption(0, None, None)
    assert (then.config.entropy_coef, then.config.parallel.dp, then.config.micro_batch_size) == (0.01, 2, 3)
    assert then.config.resume == "run"
    kept = ("entropy_coef=0.01", "parallel.dp=2", "tracker=none", "name=mine")
    assert then.overrides == (*kept, "resume=run", "micro_batch_size=3", "num_rollouts=9", LIGHT)
    assert "micro_batch_size=3" in (run / ".hydra" / "overrides.yaml").read_text()


def test_what_is_given_replaces_what_the_run_was_given(rlsp_command: Console, run: Path) -> None:
    """A group takes the fields of the old choice with it."""
    assert rlsp_command("resume=run", "parallel=cp2_tp1_sp1", "name=other") == 1
    then = rlsp_command.jobs[-1]
    assert (then.config.parallel.cp, then.config.parallel.dp) == (2, 1)
    assert then.overrides == (
        "entropy_coef=0.01",
        "tracker=none",
        "resume=run",
        "parallel=cp2_tp1_sp1",
        "name=other",
        LIGHT,
    )


def test_a_run_is_found_by_its_id(rlsp_command: Console) -> None:
    rlsp_command.outcome = cut_off
    rlsp_command("tracker=none", "name=mine")
    first = rlsp_command.jobs[0]
    rlsp_command(f"resume={first.run_id}")
    assert rlsp_command.jobs[1].run_dir == first.run_dir
    assert rlsp_command("resume=20260101-000000-abcdef") == 2
    assert "resume=20260101-000000-abcdef: legal: a run folder; 0 match" in rlsp_command.errors


def test_every_value_that_would_change_the_results_is_named_and_nothing_is_touched(
    rlsp_command: Console, run: Path
) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    given = ("seed=3", "kl_coef=0.1", "num_rollouts=2", "model.dtype=float32", "numerics=native")
    assert rlsp_command("resume=run", *given) == 2
    assert rlsp_command.errors.splitlines() == [
        "rlsp: refused, nothing was started:",
        "  kl_coef=0.1: legal: 0.0, which the run has: it decides the results",
        "  model.dtype=float32: legal: bfloat16, which the run has: it decides the results",
        "  numerics.routes.attention=native: legal: strict, which the run has: it decides the results",
        "  numerics.routes.ffn=native: legal: strict, which the run has: it decides the results",
        "  numerics.routes.logp=native: legal: strict, which the run has: it decides the results",
        "  seed=3: legal: 0, which the run has: it decides the results",
        "  num_rollouts=2: legal: at least 5, which the run has",
    ]
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_native_run_keeps_its_layout(rlsp_command: Console) -> None:
    """There, the bits may depend on it."""
    rlsp_command.outcome = cut_off
    rlsp_command("numerics=native", "tracker=none", "hydra.run.dir=run")
    assert rlsp_command("resume=run", "parallel=cp1_tp1_sp1", "micro_batch_size=2") == 2
    assert "  parallel.tp=1: legal: 2, which the run has" in rlsp_command.errors
    assert "  micro_batch_size=2: legal: 8, which the run has" in rlsp_command.errors
    assert rlsp_command("resume=run", "num_rollouts=7") == 1


def test_a_finished_run_is_said_to_be_finished_with_its_own_status(rlsp_command: Console, run: Path) -> None:
    manifest.finish(run, NOW, Status.FINISHED)
    status = verdict.seal(run).exit_status
    assert status in (3, 4)
    assert rlsp_command("resume=run") == status
    assert (
        "all 5 rollouts are there: nothing to do; a larger num_rollouts extends the run"
        in rlsp_command.printed
    )
    assert len(rlsp_command.jobs) == 1
    rlsp_command("resume=run", "num_rollouts=6")
    assert rlsp_command.jobs[-1].config.num_rollouts == 6


def test_a_run_that_still_goes_on_is_not_resumed(rlsp_command: Console, run: Path) -> None:
    with (run / "logs" / "owner.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert rlsp_command("resume=run") == 2
    assert "the run is still going on" in rlsp_command.errors
    assert len(rlsp_command.jobs) == 1


def test_what_is_no_run_is_refused(rlsp_command: Console, run: Path) -> None:
    (rlsp_command.folder / "empty").mkdir()
    for value in ("empty", "absent", "run/manifest.json"):
        assert rlsp_command(f"resume={value}") == 2
        assert f"resume={value}: legal: a run folder or the id of a run" in rlsp_command.errors
    (run / "manifest.json").write_text("{}")
    assert rlsp_command("resume=run") == 2
    assert "resume=run: manifest.json is damaged" in rlsp_command.errors
    assert rlsp_command("resume=run", "seed=") == 2
    assert len(rlsp_command.jobs) == 1


def test_resume_belongs_to_the_command_line_of_one_run(rlsp_command: Console, run: Path) -> None:
    assert rlsp_command("-m", "resume=run", "seed=1,2", "hydra.sweep.dir=sweep") == 2
    assert "resume=run: legal: on the command line of one run" in rlsp_command.errors
    assert len(rlsp_command.jobs) == 1


def test_code_that_changed_is_said(rlsp_command: Console, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlsp.cli.resume.source_hash", lambda: "0" * 64)
    rlsp_command("resume=run")
    assert "rlsp: other code than before goes on with this run" in rlsp_command.errors
