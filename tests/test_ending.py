"""What is said of a run that was aborted: the right rank, its place, and who was waited for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlsp.board import Slot
from rlsp.ending import Abort, HostReport, RankEnd, RankError, explain
from rlsp.host import SilenceWatch
from rlsp.waits import disagreements, last_calls, missing

FOUR = "gather float32[4]"


def slot(rank: int, signature: str, *, sequence: int = 9, chain: str = "00", at_s: float = 1.0) -> Slot:
    return Slot(rank, "training", sequence, signature, chain, at_s, generation=3)


def killed(rank: int, number: int, *, asked: bool = False) -> RankEnd:
    return RankEnd(rank, None, number, asked, False)


def failed(rank: int, *, asked: bool = False) -> RankEnd:
    return RankEnd(rank, 1, None, asked, False)


def error(rank: int, message: str, at_s: float = 0.0) -> RankError:
    return RankError(rank, "rollout 1: scoring", "ValueError", message, "Traceback …", at_s)


def explained(report: HostReport, *errors: RankError, slots: list[Slot] | None = None) -> Abort:
    slots = slots or [slot(rank, f"world(0..2)#9 {FOUR}") for rank in range(3)]
    return explain(report, {each.rank: each for each in errors}, slots, "exited with status 1")


def test_a_killed_rank_is_the_cause_although_its_peers_failed_before_it_was_seen() -> None:
    report = HostReport(ends=[failed(0), killed(1, 9), failed(2)])
    abort = explained(report, error(0, "Connection closed by peer"), error(2, "Connection closed by peer"))
    assert abort.reason == f"rank 1 was killed by SIGKILL (at: training; collective 9 world(0..2)#9 {FOUR})"


def test_of_several_exceptions_the_earliest_is_the_cause() -> None:
    report = HostReport(ends=[failed(0), failed(1), failed(2)])
    abort = explained(report, error(0, "peer", 7.0), error(1, "no number", 6.0), error(2, "peer", 8.0))
    assert abort.reason.startswith("rank 1 failed: ValueError: no number (at: rollout 1: scoring; ")


def test_an_abort_of_a_library_is_the_cause_only_where_nothing_else_is() -> None:
    assert explained(HostReport(ends=[killed(0, 6), failed(1)]), error(1, "no number")).reason.startswith(
        "rank 1"
    )
    assert explained(HostReport(ends=[killed(0, 6)])).reason.startswith("rank 0 was killed by SIGABRT")
    slots = [slot(0, f"world(0..1)#9 {FOUR}"), slot(1, "world(0..1)#9 gather float32[8]")]
    abort = explained(HostReport(ends=[killed(0, 6)]), slots=slots)
    assert "rank 0 and rank 1 disagree" in abort.reason


@pytest.mark.parametrize(
    ("exception", "message", "passing"),
    [
        ("CollectiveError", "Connection closed by peer", True),
        ("OutOfMemoryError", "CUDA out of memory", True),
        ("MemoryError", "", True),
        ("_ArrayMemoryError", "Unable to allocate 8.00 GiB", True),
        ("RuntimeError", "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried", True),
        ("OSError", "[Errno 12] Cannot allocate memory", True),
        ("RuntimeError", "the loss is not finite", False),
        ("RewardError", "the reward function raised MemoryErrors", False),
    ],
)
def test_what_memory_or_the_network_fails_may_be_started_again(
    exception: str, message: str, passing: bool
) -> None:
    failure = RankError(0, "rollout 1: scoring", exception, message, "Traceback …", 0.0)
    assert explained(HostReport(ends=[failed(0)]), failure).passing is passing


def test_ranks_that_the_host_stopped_are_no_cause() -> None:
    report = HostReport(ends=[killed(0, 15, asked=True), failed(1), killed(2, 9, asked=True)])
    assert explained(report, error(1, "no number")).reason.startswith("rank 1 failed: ValueError: no number")
    assert explained(HostReport(ends=report.ends[:1])).reason == "the host of the ranks exited with status 1"


def test_the_ranks_are_laid_side_by_side() -> None:
    report = HostReport(ends=[killed(1, 9), failed(0), killed(2, 15, asked=True)])
    lines = explained(report, error(0, "Connection closed by peer")).lines
    assert [line.split()[0] for line in lines] == ["rank", "0", "1", "2"]
    assert "ValueError" in lines[1]
    assert "killed by SIGKILL" in lines[2]
    assert "stopped by SIGTERM" in lines[3]
    assert all(line.endswith(f"9 world(0..2)#9 {FOUR}") for line in lines[1:])


@pytest.mark.parametrize(
    "line", ["", "no json", "[1]", "3", "null", '{"rank": 1}', '{"event": "unknown"}', '{"event": null}']
)
def test_a_line_that_is_no_event_is_left_alone(line: str) -> None:
    report = HostReport()
    report.hear(line)
    assert report == HostReport()


def test_a_report_is_good_only_if_the_host_saw_every_rank_finish() -> None:
    end = {"event": "end", "rank": 0, "code": 0, "signal": None, "asked": False, "finished": True}
    report = HostReport()
    report.hear(json.dumps(end))
    assert not report.good
    report.hear('{"event": "finished"}')
    assert report.good
    report.hear(json.dumps({**end, "rank": 1, "finished": False}))
    assert not report.good


def test_an_error_file_that_is_damaged_is_none(tmp_path: Path) -> None:
    (tmp_path / "half").write_text('{"rank": 1, "ph')
    assert RankError.read(tmp_path / "half") is None
    assert RankError.read(tmp_path / "absent") is None


def test_last_calls_read_ranks_and_number_from_the_signature() -> None:
    slots = [
        slot(0, f"tp(0..3)#17 {FOUR}"),
        slot(1, f"cp(1,5)#4 {FOUR}"),
        slot(2, f"dp(2)#0 {FOUR}"),
        slot(3, "other"),
    ]
    calls = last_calls(slots)
    assert [calls[rank].key for rank in range(4)] == [
        ((0, 1, 2, 3), 17),
        ((1, 5), 4),
        ((2,), 0),
        ((0, 1, 2, 3), 9),
    ]


def test_the_rank_that_two_groups_wait_for_is_named_and_not_those_that_wait() -> None:
    """Ranks 0 and 1 share tp, 2 and 3 too, 1 and 3 share cp: 3 waits for 1, 2 for 3; 0 and 1 have met."""
    slots = [
        slot(0, f"tp(0..1)#5 {FOUR}"),
        slot(1, f"tp(0..1)#5 {FOUR}"),
        slot(2, f"tp(2..3)#6 {FOUR}"),
        slot(3, f"cp(1,3)#2 {FOUR}"),
    ]
    assert missing(slots, {}) == [f"rank 1 did not arrive (at: training; collective 9 tp(0..1)#5 {FOUR})"]


def test_a_stopped_process_explains_every_wait() -> None:
    slots = [slot(0, f"world(0..1)#5 {FOUR}"), slot(1, f"world(0..1)#4 {FOUR}")]
    assert missing(slots, {0: "waiting", 1: "stopped"})[0].startswith(
        "rank 1 did not arrive: its process is stopped"
    )
    assert missing(slots, {})[0].startswith("rank 1 did not arrive (at: ")


def test_ranks_that_wait_for_each_other_are_listed_the_longest_quiet_first() -> None:
    said = [f"tp(0..1)#5 {FOUR}", f"cp(1,3)#2 {FOUR}", f"cp(0,2)#1 {FOUR}", f"tp(2..3)#9 {FOUR}"]
    slots = [slot(rank, signature, at_s=10.0 - rank) for rank, signature in enumerate(said)]
    (sentence,) = missing(slots, {})
    assert sentence.startswith(
        "the ranks wait for each other, the longest quiet first: rank 3 (at: training;"
    )
    assert [sentence.index(signature) for signature in reversed(said)] == sorted(map(sentence.index, said))


def test_a_minority_in_one_call_is_named_with_what_each_asks_for() -> None:
    slots = [slot(rank, f"world(0..2)#9 {FOUR}") for rank in range(3)]
    assert disagreements(slots) == []
    slots[1] = slot(1, "world(0..2)#9 broadcast float32[4]")
    assert disagreements(slots) == [
        f"rank 1 disagrees: rank 0 asks for world(0..2)#9 {FOUR}; "
        f"rank 1 asks for world(0..2)#9 broadcast float32[4]; rank 2 asks for world(0..2)#9 {FOUR}"
    ]


def test_an_earlier_disagreement_shows_in_the_chain() -> None:
    slots = [slot(0, f"world(0..1)#9 {FOUR}", chain="aa"), slot(1, f"world(0..1)#9 {FOUR}", chain="bb")]
    assert disagreements(slots) == ["ranks 0, 1 agree on their call 9 and disagree on an earlier one"]


def test_a_rank_is_silent_when_neither_its_slot_nor_its_cpu_time_moves() -> None:
    watch = SilenceWatch(limit_s=10.0)
    slots = [slot(0, ""), slot(1, ""), Slot(2, generation=3, done=True)]
    assert watch.silent(0.0, slots, {0: 1.0, 1: 1.0, 2: 1.0}, {}) == ()
    assert watch.silent(9.0, slots, {0: 1.0, 1: 1.0, 2: 1.0}, {}) == ()
    assert watch.silent(11.0, slots, {0: 1.0, 1: 5.0, 2: 1.0}, {0: "waiting"}) == (0,)
    slots[0] = Slot(0, generation=4)
    assert watch.silent(12.0, slots, {0: 1.0, 1: 5.0}, {}) == ()
    assert watch.silent(22.5, slots, {0: 1.1, 1: 5.0}, {}) == (0, 1)
    assert watch.silent(23.0, slots, {1: 5.0}, {}) == (1,)


def test_a_rank_that_would_run_if_the_machine_had_time_is_not_silent() -> None:
    watch = SilenceWatch(limit_s=10.0)
    assert watch.silent(0.0, [slot(0, "")], {0: 1.0}, {}) == ()
    assert watch.silent(11.0, [slot(0, "")], {0: 1.0}, {0: "running"}) == ()
    assert watch.silent(20.0, [slot(0, "")], {0: 1.0}, {0: "stopped"}) == ()
    assert watch.silent(22.0, [slot(0, "")], {0: 1.0}, {0: "stopped"}) == (0,)
