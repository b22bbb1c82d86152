"""Start a job as the console script does, in a process of its own, and see how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlsp.board import Board, Slot
from rlsp.config import Config, Job
from rlsp.determinism import rank_environment
from rlsp.launch import job_path
from rlsp.worker import board_path

HERE = Path(__file__).resolve().parent
RUN_ID = "20260101-000000-abcdef"

MakeJob = Callable[..., Job]


def job_of_two_ranks(compose: Callable[..., Config], run_dir: Path, *overrides: str) -> Job:
    """Compose a job of two ranks; its folder need not exist."""
    config = compose(
        "tracker=none", "parallel=cp1_tp2_sp2", "launch.grace_s=2.0", "checkpoint.every=0", *overrides
    )
    return Job(config, RUN_ID, str(run_dir), overrides, ("rlsp", *overrides), "2026-01-01T00:00:00.000+00:00")


def write_job(job: Job) -> Path:
    """Write a job into its folder and return the file."""
    path = job_path(job)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(job.to_json())
    return path


@dataclass(frozen=True)
class Ended:
    """How an owner ended: exit status, what it printed, its verdict, and how long it took, in seconds."""

    status: int
    output: str
    verdict: Mapping[str, object]
    seconds: float

    @property
    def reason(self) -> str:
        return str(self.verdict["aborted"])


class Owner:
    """A process that executes a job, as the console script does."""

    def __init__(self, job: Job, entry: str) -> None:
        self.job = job
        path = write_job(job)
        code = (
            # a shell starts what it puts into the background with SIGINT ignored, the tests included
            "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "import sys; from pathlib import Path\n"
            "from rlsp.config import Job; from rlsp.launch import execute; from rlsp.node import assist\n"
            "job = Job.from_json(Path(sys.argv[1]).read_text())\n"
            "try: status = (assist if job.config.cluster.node else execute)(job, sys.argv[2])\n"
            "except KeyboardInterrupt as stop: print(stop); status = 1\n"
            "assert 'torch' not in sys.modules, 'the owner imported torch'\n"
            "sys.exit(status)"
        )
        self.started_s = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(path), entry if ":" in entry else f"launch_entries:{entry}"],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def await_that(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds, as long as the owner lives."""
        while not holds():
            assert self.process.poll() is None, self.process.stdout.read()
            time.sleep(0.02)

    def await_files(self, *names: str) -> None:
        """Wait until the ranks have made files in the run folder."""
        self.await_that(lambda: all((Path(self.job.run_dir) / name).exists() for name in names))

    def await_slot(self, rank: int, holds: Callable[[Slot], bool]) -> None:
        """Wait until something holds of a rank's slot."""
        path = board_path(self.job.run_dir)
        self.await_that(lambda: path.exists() and holds(Board.open(path).slot(rank)))

    def end(self) -> Ended:
        """Wait for the end; seconds count from the last `mark`, or the start."""
        output, _ = self.process.communicate(timeout=60)
        seconds = time.monotonic() - self.started_s
        path = Path(self.job.run_dir) / "VERDICT.json"
        return Ended(
            self.process.returncode, output, json.loads(path.read_text()) if path.exists() else {}, seconds
        )

    def mark(self) -> None:
        """Count seconds from here."""
        self.started_s = time.monotonic()


def environment() -> dict[str, str]:
    """Return an environment in which rlsp and the entries of the tests can be imported."""
    return {**rank_environment(1), "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}


def processes_of(job: Job) -> list[int]:
    """Find living processes whose command line names the job's folder; forked ranks bear their host's."""
    return processes_naming(job.run_dir)


def processes_naming(text: str) -> list[int]:
    """Find other living processes with some text in their command line."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                line = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if text.encode() in line:
                found.append(int(folder.name))
    return found


def started(pid: int) -> tuple[int, int]:
    """Order processes by their start; ids alone begin anew now and then."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]), pid


def run(job: Job, entry: str) -> Ended:
    ended = Owner(job, entry).end()
    assert processes_of(job) == []
    return ended
