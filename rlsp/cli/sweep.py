"""A sweep from its plan to its table: every job through one of Hydra's launchers, and what became of each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus
from hydra.types import RunMode
from omegaconf import DictConfig

from rlsp.cli.compose import Composer
from rlsp.cli.folders import await_owner, is_taken, made, refusing, taken_sweep
from rlsp.cli.jobs import PlannedJob, announcement, plan_jobs
from rlsp.cli.launchers import HERE, JOBLIB, Submitted, noted_submissions
from rlsp.cli.refusal import COMPOSITION_ERRORS, RefusalError, first_line
from rlsp.cli.sweep_table import show
from rlsp.ending import Abort, conclude
from rlsp.report.files import VERDICT_NAME, EvidenceError
from rlsp.report.statuses import CRASHED, FAILED, REFUSED, worst
from rlsp.report.sweep import JobOutcome, SweepSummary, summarise
from rlsp.report.verdict import Judgement, VerdictDocument

# What joblib's plugin has where nobody says anything: one job a processor.
_JOBLIB_DEFAULT = -1
# What a launcher that was broken off needs to end its jobs: they stop their ranks, and seal.
_OWNER_LIMIT_S = 15.0

Task = Callable[[DictConfig], int]


class Sweep:
    """The jobs of one `rlsp -m`."""

    def __init__(self, composer: Composer, overrides: Sequence[str], sweep_dir: Path) -> None:
        """Compose and check every job.

        Args:
            composer: The command line's.
            overrides: The command line's, swept ones included.
            sweep_dir: The sweep's folder.

        Raises:
            RefusalError: No job may run, or the sweep itself is wrong.
        """
        self._composer = composer
        self._overrides = list(overrides)
        self._dir = sweep_dir
        try:
            master = composer.compose(self._overrides, RunMode.MULTIRUN)
            # Each job's ranks want every core already: what runs out of time on a crowded machine is aborted.
            if _is_crowded(master.hydra.launcher) and not self._states("hydra.launcher.n_jobs"):
                self._overrides.append("hydra.launcher.n_jobs=1")
                master = composer.compose(self._overrides, RunMode.MULTIRUN)
        except COMPOSITION_ERRORS as error:
            raise RefusalError([first_line(error)]) from error
        self._launcher = str(master.hydra.launcher._target_)
        self._plan = plan_jobs(composer, master, sweep_dir, here=self._launcher in HERE)

    def announcement(self) -> list[str]:
        """Say which jobs will be refused and why, one line a reason."""
        return announcement(self._plan)

    def run(self, task: Task) -> int:
        """Run the jobs, write sweep.json, show the table and return the worst status.

        Raises:
            RefusalError: Nothing could be started.
            KeyboardInterrupt: A signal asked to stop before anything was started.
        """
        with made(self._dir), refusing(self._dir), taken_sweep(self._dir):
            statuses: tuple[int, ...] = ()
            returned: list[JobReturn] = []
            try:
                with noted_submissions(self._launcher) as submitted:
                    try:
                        returned = self._launch(task)
                    except Exception as error:
                        statuses = (CRASHED,)
                        returned = self._others(submitted, error)
                outcomes = self._outcomes(returned, None)
            except KeyboardInterrupt:
                if not self._begun():
                    raise
                print("rlsp: interrupted", file=sys.stderr)
                statuses = (CRASHED,)
                outcomes = self._outcomes(returned, _OWNER_LIMIT_S)
            return worst([*statuses, *_known(outcomes), *self._conclude(outcomes)])

    def _states(self, key: str) -> bool:
        return any(text.lstrip("+").startswith(f"{key}=") for text in self._overrides)

    def _launch(self, task: Task) -> list[JobReturn]:
        batches = self._composer.hydra.multirun(
            config_name=self._composer.config_name, task_function=task, overrides=self._overrides
        )
        return [job for batch in batches for job in batch]

    def _others(self, submitted: Submitted, error: Exception) -> list[JobReturn]:
        """Wait for the jobs that go on after the launcher gave up, and return what came back from them.

        Raises:
            RefusalError: Nothing was started.
        """
        said = f"rlsp: the sweep broke off: {type(error).__name__}: {error}"
        if submitted.jobs:
            print(f"{said}\nrlsp: waiting for the other jobs", file=sys.stderr)
            return submitted.returned()
        if not self._begun():
            raise RefusalError([first_line(error)]) from error
        print(said, file=sys.stderr)
        return []

    def _begun(self) -> bool:
        """Tell whether any job left something in the sweep's folder."""
        return any(job.run_dir.is_dir() and any(job.run_dir.iterdir()) for job in self._plan)

    def _outcomes(self, returned: Sequence[JobReturn], limit_s: float | None) -> list[JobOutcome]:
        """Tell what became of each job: what it returned, or else what its folder says.

        Args:
            returned: What came back.
            limit_s: How long to wait for each job that goes on, seconds; None: until it ends.
        """
        whole = [job for job in returned if job.status is JobStatus.COMPLETED]
        said = {outcome.number: outcome for outcome in map(_outcome, whole)}
        planned = {job.number: job for job in self._plan}
        return [
            said[number] if number in said else _found(planned[number], limit_s)
            for number in sorted({*said, *planned})
        ]

    def _conclude(self, outcomes: Sequence[JobOutcome]) -> tuple[int, ...]:
        """Write sweep.json, show it, and return the statuses that it adds to those of the jobs.

        Returns:
            3 where jobs that promise the same bits ended with others, 1 where sweep.json cannot be written.
        """
        if all(outcome.status == REFUSED for outcome in outcomes):
            return ()
        try:
            summary: SweepSummary = summarise(self._dir, outcomes)
        except EvidenceError as error:
            print(f"rlsp: {error}", file=sys.stderr)
            return (CRASHED,)
        show(summary)
        return (FAILED,) if summary.disagrees else ()


def _is_crowded(launcher: DictConfig) -> bool:
    return bool(launcher._target_ == JOBLIB and launcher.n_jobs == _JOBLIB_DEFAULT)


def _outcome(job: JobReturn) -> JobOutcome:
    assert job.hydra_cfg is not None
    hydra = job.hydra_cfg.hydra
    status, run_dir = int(job.return_value), Path(hydra.runtime.output_dir)
    return JobOutcome(int(hydra.job.num), tuple(job.overrides or ()), status, run_dir)


def _found(job: PlannedJob, limit_s: float | None) -> JobOutcome:
    """Read how a job ended that did not come back: sealed, cut off, refused, never started, not at all."""
    status: int | None = REFUSED if job.refusal else None
    if not job.refusal and is_taken(job.run_dir):
        if await_owner(job.run_dir, limit_s):
            status = _sealed(job.run_dir)
        else:
            print(f"rlsp: job {job.number} goes on; {job.run_dir} will say how it ends", file=sys.stderr)
    return JobOutcome(job.number, job.overrides, status, job.run_dir)


def _sealed(run_dir: Path) -> int:
    """Return the status of a run whose owner is gone; one that was killed before it could is sealed here."""
    try:
        if not (run_dir / VERDICT_NAME).exists():
            return conclude(run_dir, Abort("the process that owned the run was killed", ())).exit_status
        return Judgement(VerdictDocument.read(run_dir / VERDICT_NAME).verdict, (), ()).exit_status
    except (EvidenceError, OSError):
        return CRASHED


def _known(outcomes: Sequence[JobOutcome]) -> list[int]:
    return [outcome.status for outcome in outcomes if outcome.status is not None]
