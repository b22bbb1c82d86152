"""A run ends as it must, whatever ends it: in time, with its reason, and with no process left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from rlsp.board import Board, Slot
from rlsp.config import Config, Job
from rlsp.determinism import rank_environment
from rlsp.host import SilenceWatch, process_state
from rlsp.launch import execute, job_path
from rlsp.worker import board_path, error_path, log_path
from rlsp.worker import main as worker_main

HERE = Path(__file__).resolve().parent
STOP_LIMIT_S = 10.0
RUN_ID = "20260101-000000-abcdef"

MakeJob = Callable[..., Job]


@pytest.fixture
def make_job(compose: Callable[..., Config], tmp_path: Path) -> MakeJob:
    """Compose a job of two ranks in a fresh folder."""

    def made(*overrides: str) -> Job:
        config = compose("tracker=none", "parallel=cp1_tp2_sp2", "launch.grace_s=2.0", *overrides)
        return Job(config, RUN_ID, str(tmp_path / RUN_ID), overrides, ("rlsp", *overrides), "2026-01-01T00:00:00.000+00:00")

    return made


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
        Path(job.run_dir).mkdir(parents=True, exist_ok=True)
        job_path(job).parent.mkdir(exist_ok=True)
        job_path(job).write_text(job.to_json())
        code = (
            "import sys; from pathlib import Path; from rlsp.config import Job; from rlsp.launch import execute\n"
            "try: status = execute(Job.from_json(Path(sys.argv[1]).read_text()), sys.argv[2])\n"
            "except KeyboardInterrupt as stop: print(stop); status = 1\n"
            "assert 'torch' not in sys.modules, 'the owner imported torch'\n"
            "sys.exit(status)"
        )
        self.started_s = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(job_path(job)), f"launch_entries:{entry}"],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def await_files(self, *names: str) -> None:
        """Wait until the ranks have made files in the run folder."""
        while not all((Path(self.job.run_dir) / name).exists() for name in names):
            assert self.process.poll() is None, self.process.stdout.read()
            time.sleep(0.05)

    def end(self) -> Ended:
        """Wait for the end; seconds count from the last `mark`, or the start."""
        output, _ = self.process.communicate(timeout=60)
        seconds = time.monotonic() - self.started_s
        path = Path(self.job.run_dir) / "VERDICT.json"
        return Ended(self.process.returncode, output, json.loads(path.read_text()) if path.exists() else {}, seconds)

    def mark(self) -> None:
        """Count seconds from here."""
        self.started_s = time.monotonic()


def environment() -> dict[str, str]:
    """Return an environment in which rlsp and the entries of the tests can be imported."""
    return {**rank_environment(1), "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}


def processes_of(job: Job) -> list[int]:
    """Find living processes whose command line names the job's folder; forked ranks bear their host's."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                line = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if job.run_dir.encode() in line:
                found.append(int(folder.name))
    return found


def run(job: Job, entry: str) -> Ended:
    ended = Owner(job, entry).end()
    assert processes_of(job) == []
    return ended


def test_a_run_whose_ranks_finish_is_judged_and_not_aborted(make_job: MakeJob) -> None:
    job = make_job()
    ended = run(job, "finish")
    assert ended.verdict["aborted"] is None
    assert ended.status in (3, 4), "nothing was recorded, so it cannot pass"
    assert f"{ended.verdict['verdict']}  default  {RUN_ID}" in ended.output
    assert json.loads((Path(job.run_dir) / "manifest.json").read_text())["status"] == "finished"
    assert [slot.done for slot in Board.open(board_path(job.run_dir)).read()] == [True, True]


def test_what_libraries_print_is_logged_and_never_taken_for_an_event(make_job: MakeJob) -> None:
    job = make_job()
    ended = run(job, "chatter")
    assert ended.verdict["aborted"] is None
    text = log_path(job.run_dir, 1).read_text()
    assert text.count('"code": 7') == 3
    assert "a warning of a library" in text
    assert text.endswith("no newline at the end")


def test_an_exception_on_one_rank_ends_all_and_names_rank_place_and_message(make_job: MakeJob) -> None:
    job = make_job()
    ended = run(job, "raise_on_one")
    assert ended.status == 1
    assert ended.seconds < STOP_LIMIT_S
    assert ended.verdict["verdict"] == "ABORTED"
    assert ended.reason == (
        "rank 1 failed: ValueError: the reward of prompt 5 is no number "
        "(at: rollout 3: scoring; collective 17 world(0..1)#18 gather float32[4])"
    )
    assert ended.reason in ended.output
    assert "and a second line" in ended.output
    error = json.loads(error_path(job.run_dir, 1).read_text())
    assert (error["rank"], error["phase"], error["exception"]) == (1, "rollout 3: scoring", "ValueError")
    assert "raise ValueError" in error["traceback"]
    assert "raise ValueError" in log_path(job.run_dir, 1).read_text()
    assert "time.sleep(60)" in _source_lines(log_path(job.run_dir, 0)), "the stopped rank's stack is in its log"


def test_rows_that_were_written_before_a_failure_are_shown_and_kept(make_job: MakeJob) -> None:
    job = make_job("num_rollouts=4")
    ended = run(job, "rows")
    assert ended.status == 1
    assert "rollout 1/4: 0 of 32 tokens mismatched, reward 0.25" in ended.output
    assert "rollout 2/4" in ended.output
    assert len((Path(job.run_dir) / "metrics.jsonl").read_text().splitlines()) == 2
    assert "metrics.jsonl" in ended.verdict["artifacts"]


def test_a_rank_that_exits_with_status_0_before_its_work_is_done_aborts_the_run(make_job: MakeJob) -> None:
    ended = run(make_job(), "leave_early")
    assert ended.status == 1
    assert ended.reason.startswith("rank 1 exited with status 0 before its work was done")


def test_ranks_that_ignore_sigterm_are_killed_after_the_grace(make_job: MakeJob) -> None:
    ended = run(make_job(), "ignore_sigterm")
    assert ended.status == 1
    assert ended.seconds < STOP_LIMIT_S
    assert ended.reason.startswith("rank 1 killed by SIGKILL")


def test_a_rank_killed_in_a_collective_ends_all_and_its_peers_are_not_blamed(make_job: MakeJob) -> None:
    job = make_job()
    owner = Owner(job, "kill_in_collective")
    while not (board_path(job.run_dir).exists() and Board.open(board_path(job.run_dir)).slot(1).sequence >= 0):
        time.sleep(0.05)
    owner.mark()
    ended = owner.end()
    assert processes_of(job) == []
    assert ended.status == 1
    assert ended.seconds < STOP_LIMIT_S
    pattern = r"rank 1 killed by SIGKILL \(at: rollout 0: generating; collective (\d+) world\(0..1\)#\1 gather float32"
    assert re.match(pattern, ended.reason), ended.reason
    assert ended.verdict["verdict"] == "ABORTED"


def test_a_collective_that_takes_too_long_names_the_rank_that_asks_for_something_else(make_job: MakeJob) -> None:
    job = make_job("launch.timeout_s=1.0")
    ended = run(job, "ask_for_different_things")
    assert ended.status == 1
    assert "(at: rollout 0: generating; collective 4 world(0..1)#4 " in ended.reason
    assert (
        "rank 0 and rank 1 disagree: rank 0 asks for world(0..1)#4 all_to_all float32[4]; "
        "rank 1 asks for world(0..1)#4 broadcast float32[4]"
    ) in ended.reason


def test_a_collective_that_takes_too_long_names_the_rank_that_did_not_arrive(make_job: MakeJob) -> None:
    job = make_job("launch.timeout_s=1.0")
    ended = run(job, "stay_away")
    assert ended.status == 1
    assert ended.reason.startswith("rank 0 failed: ")
    assert "rank 1 did not arrive (at: rollout 0: scoring; collective 2" in ended.reason


def test_a_stopped_rank_is_found_although_nobody_waits_for_it_in_a_collective(make_job: MakeJob) -> None:
    job = make_job("launch.timeout_s=1.0")
    ended = run(job, "stop_self")
    assert ended.status == 1
    assert ended.seconds < 1.1 * 1.0 + 2.0 + STOP_LIMIT_S
    assert ended.reason == (
        "rank 1 hangs: no sign of life, its process is stopped (at: rollout 0: generating; no collective yet)"
    )


def test_a_rank_that_computes_for_longer_than_the_timeout_is_left_alone(make_job: MakeJob) -> None:
    ended = run(make_job("launch.timeout_s=1.0"), "compute_silently")
    assert ended.verdict["aborted"] is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_owner_stops_the_ranks_and_seals_the_run_as_aborted(
    make_job: MakeJob, number: signal.Signals
) -> None:
    job = make_job()
    owner = Owner(job, "wait_for_the_end")
    owner.await_files("up-0", "up-1")
    owner.mark()
    owner.process.send_signal(number)
    ended = owner.end()
    assert processes_of(job) == []
    assert ended.status == 1
    assert ended.seconds < STOP_LIMIT_S
    assert ended.verdict["verdict"] == "ABORTED"
    assert ended.reason == f"stopped by {number.name}"


def test_nothing_outlives_an_owner_that_is_killed(make_job: MakeJob) -> None:
    job = make_job()
    owner = Owner(job, "wait_for_the_end")
    owner.await_files("up-0", "up-1")
    assert len(processes_of(job)) == 4, "owner, host and two ranks"
    owner.process.kill()
    owner.process.communicate()
    until_s = time.monotonic() + STOP_LIMIT_S
    while processes_of(job) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert processes_of(job) == []


def test_a_killed_host_takes_its_ranks_along_and_is_named(make_job: MakeJob) -> None:
    job = make_job()
    owner = Owner(job, "wait_for_the_end")
    owner.await_files("up-0", "up-1")
    parents = {pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in processes_of(job)}
    host = next(pid for pid, parent in parents.items() if parent == owner.process.pid)
    owner.mark()
    os.kill(host, signal.SIGKILL)
    ended = owner.end()
    assert processes_of(job) == []
    assert ended.status == 1
    assert ended.seconds < STOP_LIMIT_S
    assert ended.reason == "the host of the ranks was killed by SIGKILL"


def test_a_host_that_cannot_import_its_entry_says_so(make_job: MakeJob) -> None:
    job = make_job()
    assert execute(job, "no_such_module:function") == 1
    verdict = json.loads((Path(job.run_dir) / "VERDICT.json").read_text())
    assert "ModuleNotFoundError: No module named 'no_such_module'" in verdict["aborted"]


def _source_lines(log: Path) -> str:
    """Return the source lines that a stack in a log points at."""
    found = []
    for line in log.read_text().splitlines():
        if line.strip().startswith('File "') and "launch_entries" in line:
            path, _, rest = line.strip().removeprefix('File "').partition('", line ')
            found.append(Path(path).read_text().splitlines()[int(rest.split()[0]) - 1])
    return "\n".join(found)
