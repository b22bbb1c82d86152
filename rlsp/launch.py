"""One run from its composed job to its verdict; the process that composed it executes it, without torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.text import Text

from rlsp import progress
from rlsp.board import Board, Slot
from rlsp.config import JOB_PATH, Job
from rlsp.ending import Abort, HostReport, RankError, conclude, explain, signal_name
from rlsp.host import SilenceWatch, Wake, cpu_s, process_state, silence_limit_s, waking
from rlsp.network import environment_of, meeting_of
from rlsp.report.files import EvidenceError
from rlsp.report.findings import Verdict
from rlsp.report.follow import Follower
from rlsp.report.recorder import CONSISTENCY_NAME
from rlsp.report.records import ConsistencyReport, TotalEvidence
from rlsp.report.tracker import open_tracker
from rlsp.report.warmup import read_warmup
from rlsp.segments import Patience, Say, begin, hint, stopped_early, supervise_all
from rlsp.worker import RUN_RANK, board_path, error_path, host_log_path

_TICK_S = 0.25
# What a host needs on top of the grace it gives its ranks; after that the kernel ends it and them.
_HOST_GRACE_S = 2.0
_ORPHANS_S = 2.0


def execute(job: Job, entry: str = RUN_RANK) -> int:
    """Run a job: start its ranks, mirror and show what they record, judge, and return the exit status.

    Args:
        job: The run; its folder holds at most what Hydra wrote, or the run that it goes on with.
        entry: The function that each rank runs, as module:function.

    Returns:
        0 PASS, 1 ABORTED, 3 FAIL, 4 INCONCLUSIVE.

    Raises:
        KeyboardInterrupt: SIGINT, SIGTERM or SIGHUP stopped the run; its files are sealed as ABORTED.
        EvidenceError: The run folder cannot be written.
    """
    environment = environment_of(job.config)
    with waking(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as wake:
        begun = begin(job, environment)
        # The ranks' imports take seconds; W&B comes up on a thread of its own meanwhile.
        console = Console(highlight=False)
        say = partial(_say, console)
        with open_tracker(job, begun, say) as tracker:
            attempt = partial(_supervise, environment=environment, entry=entry, wake=wake)
            abort, failure = supervise_all(job, environment, wake, partial(_tell, console), attempt)
            judgement = conclude(job.run_dir, abort)
            stopped = wake.received is not None and abort is not None
            wake.release()  # from here on the user may break off at once
            details = abort.lines if abort else ()
            how = hint(job) if judgement.verdict is Verdict.ABORTED else None
            progress.show(console, progress.summary(job, judgement, _total(job), details, how))
            tracker.finish(judgement)
    if said := tracker.warning or tracker.url:
        say(said)
    if failure is not None:
        raise failure
    if abort is not None and stopped:
        raise KeyboardInterrupt(abort.reason)
    return judgement.exit_status


def _supervise(
    job: Job, environment: Mapping[str, str], entry: str, wake: Wake
) -> tuple[Abort | None, BaseException | None]:
    """Run the ranks to their end.

    Returns:
        Why the run was aborted, if it was, and what went wrong in this process itself, if anything did:
        whatever that is, the run is to be sealed first.
    """
    if wake.received is not None:
        return Abort(f"stopped by {wake.received.name}", ()), None
    try:
        board = _prepare(job)
        with meeting_of(job.config) as meeting, Ranks(job, board, environment, entry, meeting) as ranks:
            failure: BaseException | None = None
            try:
                with progress.open_display(job, Console(highlight=False)) as display:
                    patience = Patience(job.config, board, display.note)
                    _follow(ranks, display, wake, patience, Follower(job.run_dir, job.first_rollout), job)
            except BaseException as error:
                failure = error
            stopped_by = wake.received.name if wake.received else None
            abort = ranks.end(stopped_by, failure) or stopped_early(job, stopped_by, _total(job))
            return abort, failure
    except BaseException as error:
        return launcher_failed(error), error


def compute(job: Job, entry: str, say: Say | None = None) -> Abort | None:
    """Start the ranks of a job that is no run, wait for them, and say why they did not end well.

    Nothing is judged, mirrored or shown: what the ranks leave in the job's folder is the caller's.

    Args:
        job: Names config and folder, which may hold what the ranks are to read.
        entry: The function that each rank runs, as module:function.
        say: Tells the user what a signal waits for, where it lets the ranks finish their rollout and save it;
            None: it stops them at once.

    Raises:
        KeyboardInterrupt: SIGINT, SIGTERM or SIGHUP came; no rank is left.
    """
    environment, board = environment_of(job.config), _prepare(job)
    patience = None if say is None else Patience(job.config, board, say)
    with (
        waking(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as wake,
        meeting_of(job.config) as meeting,
        Ranks(job, board, environment, entry, meeting) as ranks,
    ):
        running = True
        while running:
            running = ranks.listen(wake, _TICK_S)
            if patience.is_over(wake.signals) if patience else wake.signals:
                ranks.stop()
        abort = ranks.end(wake.received.name if wake.received else None, None)
    if wake.received is not None:
        raise KeyboardInterrupt(wake.received.name)
    return abort


class Ranks:
    """The host process and what it says; leaving the context ends it and every rank."""

    def __init__(
        self, job: Job, board: Board, environment: Mapping[str, str], entry: str, meeting: str
    ) -> None:
        """Start the host.

        Args:
            job: The run, written to its folder already.
            board: Its status board.
            environment: The ranks' environment.
            entry: The function that each rank runs, as module:function.
            meeting: Where the ranks meet, as torch.distributed takes it.
        """
        self.report = HostReport()
        self._job = job
        self.board = board
        self._grace_s = job.config.launch.grace_s + _HOST_GRACE_S
        self._deadline_s: float | None = None
        self._pending = b""
        self._open = True
        self._silence = SilenceWatch(silence_limit_s(job.config.launch.timeout_s))
        self._heard = 0
        self._hang = ""
        where = ["--init-method", meeting, "--parent", str(os.getpid())]
        arguments = ["--host", str(job_path(job)), *where, "--entry", entry]
        with host_log_path(job.run_dir).open("ab") as log:
            # A session of its own: a terminal's Ctrl-C reaches the owner only, which stops ranks in order.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rlsp.worker", *arguments],
                env=_with_this_code(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        self._pipe = self._process.stdout
        os.set_blocking(self._pipe.fileno(), False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kill()
        self._pipe.close()

    def listen(self, wake: Wake, timeout_s: float) -> bool:
        """Take in what the host says, for at most `timeout_s` seconds; return whether it still runs."""
        if self._open and wake.wait(timeout_s, self._pipe.fileno()):
            self._read()
        if self.report.cause is not None:
            self._limit()
        if self._deadline_s is not None and time.monotonic() > self._deadline_s:
            self._kill()
        elif self._deadline_s is None and self._host_is_silent():
            self._hang = f"hangs: no sign of life, its process is {process_state(self._process.pid)}"
            self._kill()
        return self._open

    def stop(self) -> None:
        """Ask the host to stop the ranks."""
        if self._deadline_s is None and self._process.poll() is None:
            self._process.terminate()
        self._limit()

    def end(self, stopped_by: str | None, failure: BaseException | None) -> Abort | None:
        """End what still runs, and say why the run was aborted, if it was.

        Args:
            stopped_by: The signal that the owner was stopped by, if any.
            failure: What went wrong in the owner itself, if anything did.
        """
        if failure is not None:
            self._kill()
            return launcher_failed(failure)
        try:
            self._process.wait(_HOST_GRACE_S)
        except subprocess.TimeoutExpired:
            self._kill()
        if self.report.good and self._process.returncode == 0:
            return None
        self._await_orphans()
        size = self._job.config.world_size
        found = [RankError.read(error_path(self._job.run_dir, rank)) for rank in range(size)]
        errors = {error.rank: error for error in found if error is not None}
        return explain(self.report, errors, self.board.read(), self._how_host_ended(), stopped_by)

    def _read(self) -> None:
        while True:
            try:
                chunk = os.read(self._pipe.fileno(), 65536)
            except BlockingIOError:
                return
            self._heard += 1
            *lines, self._pending = (self._pending + chunk).split(b"\n")
            for line in lines:
                self.report.hear(line)
            if not chunk:
                self._open = False
                return

    def _host_is_silent(self) -> bool:
        """Tell whether the host neither speaks nor works, as one that was stopped."""
        host = Slot(rank=0, generation=self._heard)
        spent_s = cpu_s(self._process.pid)
        if not self._open or spent_s is None:
            return False
        state = {0: process_state(self._process.pid)}
        return bool(self._silence.silent(time.monotonic(), [host], {0: spent_s}, state))

    def _limit(self) -> None:
        if self._deadline_s is None:
            self._deadline_s = time.monotonic() + self._grace_s

    def _kill(self) -> None:
        """Kill the host; the kernel kills its ranks."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._open = False
        self._await_orphans()

    def _await_orphans(self) -> None:
        """Wait until the ranks of a host that was killed are gone, too."""
        until_s = time.monotonic() + _ORPHANS_S
        while time.monotonic() < until_s and any(
            process_state(pid) not in ("", "ended") for pid in self.report.pids
        ):
            time.sleep(0.02)

    def _how_host_ended(self) -> str:
        code = self._process.returncode
        if self._hang:
            return self._hang
        if code is not None and code < 0:
            return f"was killed by {signal_name(-code)}"
        log = host_log_path(self._job.run_dir)
        lines = log.read_text(errors="replace").strip().splitlines()[-1:] if log.is_file() else []
        return f"exited with status {code}" + "".join(f": {line}" for line in lines)


def job_path(job: Job) -> Path:
    """Return where a run folder keeps its job."""
    return Path(job.run_dir) / JOB_PATH


def launcher_failed(error: BaseException) -> Abort:
    """Say that this process, and no rank, ended a run."""
    return Abort(f"the launcher failed: {type(error).__name__}: {error}", ())


def _follow(
    ranks: Ranks, display: progress.Display, wake: Wake, patience: Patience, follower: Follower, job: Job
) -> None:
    """Show the warm-up, rows and phases until the host has ended; pass a signal on once patience is over."""
    running, warming = True, job.config.warmup.steps > 0 and not job.first_rollout
    while running:
        running = ranks.listen(wake, _TICK_S)
        if patience.is_over(wake.signals):
            ranks.stop()
        if warming and (warmup := read_warmup(Path(job.run_dir))):
            display.note(warmup.text)
            warming = False
        for row in follower.new_rows():
            display.row(row)
        display.tick(ranks.board.read())


def _prepare(job: Job) -> Board:
    """Lay out the run folder: the job for the ranks, the status board, no error of an earlier launch."""
    path = job_path(job)
    for folder in (path.parent, board_path(job.run_dir).parent):
        folder.mkdir(parents=True, exist_ok=True)
    path.write_text(job.to_json())
    for rank in range(job.config.world_size):
        error_path(job.run_dir, rank).unlink(missing_ok=True)
    board = Board.create(board_path(job.run_dir), job.config.world_size)
    for rank in set(range(board.world_size)).difference(job.config.local_ranks):
        board.writer(rank).phase("on another machine, in its own logs")
    return board


def _with_this_code(environment: Mapping[str, str]) -> dict[str, str]:
    """Let the ranks import the very package that runs here, however it was found."""
    root = str(Path(__file__).resolve().parents[1])
    known = environment.get("PYTHONPATH")
    return {**environment, "PYTHONPATH": os.pathsep.join([root, known] if known else [root])}


def _tell(console: Console, text: str) -> None:
    """Print what happens to the run."""
    progress.show(console, Text(text))


def _say(console: Console, text: str) -> None:
    """Print what the tracker has to say."""
    progress.show(console, Text(f"  tracker: {text}"))


def _total(job: Job) -> TotalEvidence | None:
    try:
        return ConsistencyReport.read(Path(job.run_dir) / CONSISTENCY_NAME).total
    except EvidenceError:
        return None
