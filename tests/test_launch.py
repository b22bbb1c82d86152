"""A run ends as it must, whatever ends it: in time, with its reason, and with no process left."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from launch_owner import RUN_ID, MakeJob, Owner, job_of_two_ranks, processes_of, run, started

from rlsp import launch
from rlsp.board import Board
from rlsp.config import Config
from rlsp.launch import execute
from rlsp.meeting import meeting_place
from rlsp.report import manifest
from rlsp.report.verdict import verify
from rlsp.worker import RUN_RANK, board_path, error_path, log_path

STOP_LIMIT_S = 10.0


@pytest.fixture
def make_job(compose: Callable[..., Config], tmp_path: Path) -> MakeJob:
    return lambda *overrides: job_of_two_ranks(compose, tmp_path / RUN_ID, *overrides)


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
    assert "time.sleep(60)" in _source_lines(log_path(job.run_dir, 0)), (
        "the stopped rank's stack is in its log"
    )


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
    assert ended.reason.startswith("rank 1 was killed by SIGKILL")


def test_a_rank_killed_in_a_collective_ends_all_and_its_peers_are_not_blamed(make_job: MakeJob) -> None:
    job = make_job()
    owner = Owner(job, "kill_in_collective")
    owner.await_slot(1, lambda slot: slot.sequence >= 0)
    owner.mark()
    ended = owner.end()
    assert processes_of(job) == []
    assert ended.status == 1
    assert ended.seconds < STOP_LIMIT_S
    place = r"rollout 0: generating; collective (\d+) world\(0\.\.1\)#\1 gather float32"
    pattern = rf"rank 1 was killed by SIGKILL \(at: {place}"
    assert re.match(pattern, ended.reason), ended.reason
    assert ended.verdict["verdict"] == "ABORTED"


@pytest.mark.parametrize("phase", ["rollout 1: generating", "rollout 0: update 0, forward and backward"])
def test_a_rank_killed_in_a_real_run_leaves_the_evidence_so_far_intact(make_job: MakeJob, phase: str) -> None:
    job = make_job("num_rollouts=9", "tracker=offline")
    owner = Owner(job, RUN_RANK)
    owner.await_slot(1, lambda slot: slot.phase == phase)
    pid = max(processes_of(job), key=started)  # the rank that was forked last
    owner.mark()
    os.kill(pid, signal.SIGKILL)
    ended = owner.end()
    assert processes_of(job) == []
    assert ended.status == 1
    assert ended.seconds < STOP_LIMIT_S
    assert ended.reason.startswith(f"rank 1 was killed by SIGKILL (at: {phase}; collective ")
    assert ended.verdict["verdict"] == "ABORTED"
    verification = verify(job.run_dir)
    assert verification.damage == ()
    complete = 1 if phase.startswith("rollout 1") else 0
    assert len(list(Path(job.run_dir).glob("rollouts/*.safetensors"))) == complete
    assert ended.output.count("tokens mismatched") == complete
    assert ended.output.count(" 0 mismatched; 0 rows") == complete


def test_a_collective_that_takes_too_long_names_the_rank_that_asks_for_something_else(
    make_job: MakeJob,
) -> None:
    job = make_job("launch.timeout_s=4.0")
    ended = run(job, "ask_for_different_things")
    assert ended.status == 1
    assert "(at: rollout 0: generating; collective 4 world(0..1)#4 " in ended.reason
    assert (
        "rank 0 and rank 1 disagree: rank 0 asks for world(0..1)#4 all_to_all float32[4]; "
        "rank 1 asks for world(0..1)#4 broadcast float32[4]"
    ) in ended.reason


def test_a_collective_that_takes_too_long_names_the_rank_that_did_not_arrive(make_job: MakeJob) -> None:
    job = make_job("launch.timeout_s=4.0")
    ended = run(job, "stay_away")
    assert ended.status == 1
    assert ended.reason.startswith("rank 1 did not arrive (at: rollout 0: scoring; collective 2")
    assert "; rank 0 failed: " in ended.reason


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


def host_of(owner: Owner) -> int:
    """Find the process that hosts the ranks."""
    parents = {
        pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        for pid in processes_of(owner.job)
    }
    return next(pid for pid, parent in parents.items() if parent == owner.process.pid)


def test_a_killed_host_takes_its_ranks_along_and_is_named(make_job: MakeJob) -> None:
    job = make_job()
    owner = Owner(job, "wait_for_the_end")
    owner.await_files("up-0", "up-1")
    host = host_of(owner)
    owner.mark()
    os.kill(host, signal.SIGKILL)
    ended = owner.end()
    assert processes_of(job) == []
    assert ended.status == 1
    assert ended.seconds < STOP_LIMIT_S
    assert ended.reason == "the host of the ranks was killed by SIGKILL"


def test_a_stopped_host_is_found_and_killed_with_its_ranks(make_job: MakeJob) -> None:
    job = make_job("launch.timeout_s=1.0")
    owner = Owner(job, "wait_for_the_end")
    owner.await_files("up-0", "up-1")
    host = host_of(owner)
    owner.mark()
    os.kill(host, signal.SIGSTOP)
    ended = owner.end()
    assert processes_of(job) == []
    assert ended.status == 1
    assert ended.seconds < 1.1 * 1.0 + 2.0 + STOP_LIMIT_S
    assert ended.reason == "the host of the ranks hangs: no sign of life, its process is stopped"


def test_a_host_that_only_waits_is_left_alone(make_job: MakeJob) -> None:
    # Its ranks take longer than the host may be silent: it says that it lives.
    assert run(make_job("launch.timeout_s=1.0"), "compute_silently").verdict["aborted"] is None


@pytest.mark.parametrize("entry", ["finish", "rows"])
def test_a_closed_output_changes_neither_verdict_nor_status(
    make_job: MakeJob, tmp_path: Path, entry: str
) -> None:
    ended = run(make_job("num_rollouts=4"), entry)
    job = dataclasses.replace(make_job("num_rollouts=4"), run_dir=str(tmp_path / "unread"))
    owner = Owner(job, entry)
    owner.process.stdout.close()
    assert owner.process.wait(60) == ended.status
    verdict = json.loads((Path(job.run_dir) / "VERDICT.json").read_text())
    assert (verdict["verdict"], verdict["aborted"]) == (ended.verdict["verdict"], ended.verdict["aborted"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_manifest_is_written_stops_the_run(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    begin = manifest.begin

    def interrupted(*arguments: Any) -> manifest.Manifest:
        os.kill(os.getpid(), number)
        return begin(*arguments)

    monkeypatch.setattr(manifest, "begin", interrupted)
    job = make_job()
    # a shell starts what it puts into the background with SIGINT ignored, the tests included
    before = signal.signal(number, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            execute(job, "launch_entries:finish")
    finally:
        signal.signal(number, before)
    verdict = json.loads((Path(job.run_dir) / "VERDICT.json").read_text())
    assert (verdict["verdict"], verdict["aborted"]) == ("ABORTED", f"stopped by {number.name}")
    assert not log_path(job.run_dir, 0).exists(), "no rank was started"


@pytest.mark.parametrize("broken", ["_prepare", "_follow"])
@pytest.mark.parametrize(
    "error", [MemoryError("no more"), SystemExit(5), OSError(28, "No space left on device")], ids=repr
)
def test_whatever_ends_the_owner_is_sealed_as_an_abort(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, broken: str, error: BaseException
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(launch, broken, fail)
    job = make_job()
    with pytest.raises(type(error)):
        execute(job, "launch_entries:finish")
    assert processes_of(job) == []
    verdict = json.loads((Path(job.run_dir) / "VERDICT.json").read_text())
    assert (verdict["verdict"], verdict["aborted"]) == (
        "ABORTED",
        f"the launcher failed: {type(error).__name__}: {error}",
    )


def test_a_run_can_be_executed_off_the_main_thread(make_job: MakeJob) -> None:
    job = make_job()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(execute, job, "no_such_module:function").result() == 1
    assert "no_such_module" in json.loads((Path(job.run_dir) / "VERDICT.json").read_text())["aborted"]


def test_a_meeting_place_is_gone_afterwards_and_those_of_killed_owners_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    abandoned, foreign = tmp_path / "rlsp-abandoned", tmp_path / "rlsp-of-something-else"
    for folder in (abandoned, foreign):
        folder.mkdir()
    (abandoned / "owner.lock").touch()
    with meeting_place() as outer:
        with meeting_place() as inner:
            assert outer != inner
            places = {Path(place.removeprefix("file://")).parent for place in (outer, inner)}
            assert set(tmp_path.iterdir()) == {foreign, *places}
        assert len(list(tmp_path.iterdir())) == 2
    assert list(tmp_path.iterdir()) == [foreign]


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
