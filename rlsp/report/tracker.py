"""The mirror of a run on Weights & Biases; the files are the truth, and the composing process owns it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rlsp.config import Job, TrackerMode
from rlsp.report import mirror
from rlsp.report.follow import Follower
from rlsp.report.manifest import Manifest
from rlsp.report.verdict import Judgement

if TYPE_CHECKING:
    import wandb

_LOG = logging.getLogger(__name__)
_POLL_S = 0.5
# Importing wandb holds this process's one lock: the ranks are started first.
_HEAD_START_S = 0.5
# An upload that takes longer than this after the end of a run is announced.
_PATIENCE_S = 3.0
# wandb's own limit ends an upload; this comes on top of it before the mirror is left behind.
_MARGIN_S = 3.0

Say = Callable[[str], None]


class Tracker:
    """A mirror that keeps nothing: `tracker=none`."""

    @property
    def warning(self) -> str | None:
        """Say what went wrong with the mirror, if anything did."""
        return None

    @property
    def url(self) -> str | None:
        """Return the address of the run, where it has one."""
        return None

    def finish(self, judgement: Judgement) -> None:
        """Hand over the verdict of a run whose files are sealed, and close the mirror."""

    def close(self) -> None:
        """Close the mirror; without a verdict before, the run counts as failed."""


@contextmanager
def open_tracker(job: Job, manifest: Manifest, say: Say = _LOG.info) -> Iterator[Tracker]:
    """Mirror a run on Weights & Biases for as long as the context lasts.

    Nothing that goes wrong there raises here: W&B runs on a thread of its own, a failure is one warning, and
    `online` falls back to `offline`. Everything it writes lies in the run folder's wandb/. After the end of
    the run an upload may take `tracker.finish_timeout_s` more, and where the run is still being opened
    `tracker.init_timeout_s` on top.

    Args:
        job: The run.
        manifest: As `manifest.begin` returned it.
        say: Tells the user that the end of the run waits for an upload.
    """
    tracker = Tracker() if job.config.tracker.mode is TrackerMode.none else WandbTracker(job, manifest, say)
    try:
        yield tracker
    finally:
        tracker.close()


class WandbTracker(Tracker):
    """Forwards the rows of metrics.jsonl, then verdict, totals and files, from its own thread."""

    def __init__(self, job: Job, manifest: Manifest, say: Say = _LOG.info) -> None:
        self._job = job
        self._manifest = manifest
        self._say = say
        self._run_dir = Path(job.run_dir)
        self._warning: str | None = None
        self._url: str | None = None
        self._folder: Path | None = None
        self._judgement: Judgement | None = None
        self._ending = threading.Event()
        # A daemon: an upload that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._mirror, name="rlsp-tracker", daemon=True)
        self._thread.start()

    @property
    def warning(self) -> str | None:
        """Say what went wrong with the mirror first, if anything did."""
        return self._warning

    @property
    def url(self) -> str | None:
        """Return the address of an online run; None before it is open, and offline."""
        return self._url

    def finish(self, judgement: Judgement) -> None:
        """Hand over the verdict of a run whose files are sealed, and close the mirror."""
        self._judgement = judgement
        self.close()

    def close(self) -> None:
        """Close the mirror; without a verdict before, the run counts as failed."""
        if self._ending.is_set():
            return
        tracker = self._job.config.tracker
        limit_s = tracker.finish_timeout_s + _MARGIN_S
        if self._folder is None:
            limit_s += tracker.init_timeout_s
        self._ending.set()
        try:
            self._wait(limit_s)
        except KeyboardInterrupt:
            # The user does not wait for the upload; else this process would, at its exit and without a limit.
            mirror.end_service()
            raise
        if self._thread.is_alive():
            self._warn(f"W&B did not end within {limit_s:.0f} s and was left behind{self._hint()}")
            mirror.end_service()

    def _wait(self, limit_s: float) -> None:
        """Wait for the thread's end, and say so where it takes a while."""
        until_s = time.monotonic() + limit_s
        self._thread.join(min(_PATIENCE_S, limit_s))
        if self._thread.is_alive():
            left_s = max(0.0, until_s - time.monotonic())
            self._say(f"W&B is still sending, for at most {left_s:.0f} s more (tracker.finish_timeout_s)")
            self._thread.join(left_s)

    def _warn(self, message: str) -> None:
        """Warn once; what follows from the first failure is only noted."""
        if self._warning is None:
            self._warning = message
            _LOG.warning(message)
        else:
            _LOG.info(message)

    def _hint(self) -> str:
        """Name the command that sends what was not sent."""
        return f"; send it later: wandb sync --include-online {self._folder}" if self._url else ""

    def _mirror(self) -> None:
        self._ending.wait(_HEAD_START_S)
        try:
            run = self._open()
        except Exception as error:
            self._excuse(error)
            mirror.end_service()
            return
        self._url = None if run.offline else run.url
        self._folder = Path(run.dir).parent
        # Whatever W&B raises, the run goes on, and what comes after is still sent.
        with self._excused():
            self._follow(run)
        self._ending.wait()
        with self._excused():
            mirror.send_summary(run, self._run_dir, self._judgement)
        with self._excused():
            mirror.send_files(run, self._run_dir, self._job.run_id)
        try:
            run.finish(exit_code=self._judgement.exit_status if self._judgement else 1)
        except TimeoutError:
            limit_s = self._job.config.tracker.finish_timeout_s
            self._warn(f"W&B did not take everything within {limit_s:.0f} s after the end{self._hint()}")
            mirror.end_service()
        except Exception as error:
            self._excuse(error)
            mirror.end_service()

    @contextmanager
    def _excused(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._excuse(error)

    def _excuse(self, error: Exception) -> None:
        self._warn(f"W&B failed, the run's files are not affected: {_in_a_line(error)}")

    def _open(self) -> wandb.Run:
        """Open the run; where `online` cannot be had, offline."""
        mode = self._job.config.tracker.mode
        if mode is TrackerMode.online:
            try:
                return mirror.open_run(self._job, self._manifest, mode)
            except Exception as error:
                self._warn(f"W&B cannot be reached, this run is kept offline: {_in_a_line(error)}")
                # wandb 0.31's service goes on holding the id of a run that it could not open.
                mirror.end_service()
        return mirror.open_run(self._job, self._manifest, TrackerMode.offline)

    def _follow(self, run: wandb.Run) -> None:
        """Send the rows as they are written, until the run ends; those that W&B has already are left out."""
        had = mirror.rows_kept_offline(run, self._run_dir) if run.offline else run.starting_step
        follower = Follower(self._run_dir, first=had)
        while not self._ending.wait(_POLL_S):
            mirror.forward(run, follower)
        mirror.forward(run, follower)


def _in_a_line(error: Exception) -> str:
    """Name an exception and its message in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
