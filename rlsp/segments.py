"""How a run gets several segments: asked to stop, started again after a failure, resumed. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from rlsp.board import Board
from rlsp.config import Config, Job
from rlsp.determinism import environment_switches
from rlsp.ending import Abort
from rlsp.host import Wake
from rlsp.progress import short
from rlsp.report import manifest
from rlsp.report.continuation import continuation
from rlsp.report.files import EvidenceError
from rlsp.report.manifest import Beginning, Manifest
from rlsp.report.records import TotalEvidence
from rlsp.report.rewind import rewind

Say = Callable[[str], object]
Outcome = tuple[Abort | None, BaseException | None]

_AT_WORK = "rollout"  # what a rank's phase begins with once there is something to save


class Patience:
    """Decide when the ranks of a run that is to stop are stopped: after the rollout is saved, or at once."""

    def __init__(self, config: Config, board: Board, say: Say) -> None:
        """Serve one launch.

        Args:
            config: The run's.
            board: Where the ranks are told, and say what they are at.
            say: Tells the user what is waited for.
        """
        self._config, self._board, self._say = config, board, say
        self._until_s: float | None = None

    def is_over(self, signals: int) -> bool:
        """Tell whether the ranks are to be stopped now.

        Args:
            signals: How many times the run was asked to stop.
        """
        if not signals:
            return False
        if self._until_s is None:
            self._until_s = time.monotonic() + self._grant_s()
        return signals > 1 or time.monotonic() >= self._until_s

    def _grant_s(self) -> float:
        checkpoint = self._config.checkpoint
        first = self._config.local_ranks[0]
        if not checkpoint.every or not self._board.slot(first).phase.startswith(_AT_WORK):
            return 0.0
        self._board.ask_to_stop()
        self._say(
            f"stopping once this rollout is done and saved, within {checkpoint.stop_s:.0f} s "
            "(checkpoint.stop_s); a second signal stops at once"
        )
        return checkpoint.stop_s


def supervise_all(
    job: Job, environment: Mapping[str, str], wake: Wake, say: Say, attempt: Callable[[Job], Outcome]
) -> Outcome:
    """Run a job to its end, again from the newest checkpoint where that may help.

    Args:
        job: The run.
        environment: Its ranks'.
        wake: Whether somebody asked to stop: nothing starts again then.
        say: Tells the user of a restart.
        attempt: Runs the ranks to their end.

    Returns:
        Why the run was aborted, if it was, and what went wrong in this process itself, if anything did.
    """
    abort, failure = attempt(job)
    limit = job.config.launch.max_restarts
    for number in range(1, limit + 1):
        if abort is None or failure is not None or wake.received is not None or not abort.passing:
            break
        try:
            job = start_again(job, abort, environment)
        except EvidenceError as error:
            return replace(abort, reason=f"{abort.reason}; and no restart: {error}"), None
        say(f"restart {number} of {limit}, at rollout {job.first_rollout}: {abort.reason}")
        abort, failure = attempt(job)
    return abort, failure


def stopped_early(job: Job, stopped_by: str | None, total: TotalEvidence | None) -> Abort | None:
    """Say so where the ranks ended well and early, with their state saved, because a signal asked for it.

    Args:
        job: The run.
        stopped_by: The signal, if one came; where none did, it came to another machine.
        total: The totals of the run's consistency report, if any rollout was recorded.
    """
    if stopped_by is None and job.config.cluster.nodes > 1:
        stopped_by = "another machine"
    if stopped_by is None or total is None or total.rollouts >= job.config.num_rollouts:
        return None
    return Abort(f"stopped by {stopped_by}, saved after rollout {total.rollouts - 1}", ())


def start_again(job: Job, abort: Abort, environment: Mapping[str, str]) -> Job:
    """End the segment that failed and begin the next at the newest checkpoint; return its job.

    Raises:
        EvidenceError: There is nothing to go on from, or the folder cannot be written.
    """
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    manifest.finish(job.run_dir, now, manifest.Status.ABORTED, abort.reason)
    resumed, _ = continuation(job.run_dir)
    again = replace(job, resumed=resumed, started_at=now)
    begin(again, environment, Beginning.RESTARTED)
    return again


def begin(job: Job, environment: Mapping[str, str], begun_by: Beginning | None = None) -> Manifest:
    """Bring the folder to where the job goes on, if it does, and write its manifest.

    Raises:
        EvidenceError: The folder cannot be written.
    """
    if job.resumed is not None:
        rewind(job.run_dir, job.resumed.rollout)
    return manifest.begin(job, environment_switches(environment), begun_by)


def hint(job: Job) -> str:
    """Say how a run that was aborted goes on."""
    cluster, run_dir = job.config.cluster, Path(job.run_dir)
    try:
        resumed, _ = continuation(run_dir)
    except EvidenceError as error:
        return f"it cannot be resumed: {'; '.join(str(error).splitlines())}"
    together = cluster.nodes > 1 and cluster.shared_folder
    given = " cluster.nodes=1" if cluster.nodes > 1 and not together else ""
    where = "on every machine; " if together else ""
    return f"resume with: rlsp resume={short(run_dir)}{given}  ({where}goes on at rollout {resumed.rollout})"
