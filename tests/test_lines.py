"""Direct lines between ranks: what they carry, who gets one, and how they end."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from rank_data import over, refused, world
from ranks import RankError, run_ranks

from rlsp import collectives, lines
from rlsp.collectives import CollectiveError
from rlsp.groups import build_mesh
from rlsp.layout import Layout, RolloutLayout
from rlsp.lines import LineError, Lines, open_lines
from rlsp.messages import CHECKED_BYTES

PAIR = (0, 1)


def sends(end: Lines, message: bytes, to: int = 0) -> None:
    """Send one message alone, which must fit the socket."""
    peer = next(peer for peer in end._peers if peer.rank == to)
    assert peer.send([lines._PREFIX.pack(len(message)), message]) is None


def pair(timeout_s: float = 20.0) -> tuple[Lines, Lines]:
    """Two ends in one process."""
    a, b = socket.socketpair()
    return Lines(PAIR, 0, {1: a}, timeout_s), Lines(PAIR, 1, {0: b}, timeout_s)


def at_once(*calls: Callable[[], object]) -> list[Any]:
    """Call each in a thread of its own, and return what it returned or raised."""
    found: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            found[index] = calls[index]()
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def exchanged(ends: tuple[Lines, Lines], lengths: tuple[int, int]) -> list[Any]:
    """Let either end send the other `lengths` bytes of its own kind, and take as many as it sends."""

    def one(index: int) -> list[bytes]:
        length = lengths[index]
        message = (b"head", bytes([65 + index]) * (length - 4), b"")
        rows = [bytearray(length), bytearray(length)]
        ends[index].exchange([message, message], [memoryview(row) for row in rows])
        return [bytes(row) for row in rows]

    return at_once(lambda: one(0), lambda: one(1))


@pytest.mark.parametrize("length", [4, 4096, CHECKED_BYTES + 64, 5_000_001])
def test_messages_of_any_length_cross_whole(length: int) -> None:
    """The longest exceed what sockets have room for, on both sides at once."""
    want = [b"head" + letter * (length - 4) for letter in (b"A", b"B")]
    ends = pair()
    assert exchanged(ends, (length, length)) == [want, want]
    assert exchanged(ends, (length, length)) == [want, want]


@pytest.mark.parametrize("lengths", [(4096, 8192), (8192, 64), (100, 3_000_000)])
def test_a_message_of_another_length_fills_a_row_as_far_as_it_goes(lengths: tuple[int, int]) -> None:
    """And the next one is whole again."""
    ends = pair()
    own = [b"head" + letter * (n - 4) for letter, n in zip((b"A", b"B"), lengths, strict=True)]
    short = min(lengths)
    for index, (a, b) in enumerate(exchanged(ends, lengths)):
        theirs = (a, b)[1 - index]
        assert (a, b)[index] == own[index]
        assert theirs[:short] == own[1 - index][:short]
        assert not any(theirs[short:])
    assert exchanged(ends, (70, 70))[0][1] == b"head" + b"B" * 66


def test_a_rank_may_be_one_call_ahead() -> None:
    """It has this rank's message, and sends the next before this rank reads the first."""
    ends = pair()
    rows = [[bytearray(8), bytearray(8)] for _ in range(3)]
    sends(ends[1], b"1st call")
    sends(ends[1], b"2nd call")
    for call in range(2):
        ends[0].exchange([(b"whatever",)] * 2, [memoryview(row) for row in rows[call]])
    assert [bytes(both[1]) for both in rows[:2]] == [b"1st call", b"2nd call"]


def test_a_shorter_message_takes_nothing_of_the_next_one() -> None:
    ends = pair()
    sends(ends[1], b"short")
    sends(ends[1], b"the next")
    rows = [[bytearray(12), bytearray(12)] for _ in range(2)]
    for each in rows:
        ends[0].exchange([(bytes(12),)] * 2, [memoryview(row) for row in each])
    assert [bytes(each[1]).rstrip(b"\0") for each in rows] == [b"short", b"the next"]


def one_sided(end: Lines, length: int, size: int = 2) -> None:
    message = (bytes(length),)
    end.exchange([message] * size, [memoryview(bytearray(length)) for _ in range(size)])


def trio(timeout_s: float) -> tuple[Lines, ...]:
    """Three ends in one process."""
    sockets = {pair: socket.socketpair() for pair in ((0, 1), (0, 2), (1, 2))}
    return tuple(
        Lines(
            (0, 1, 2),
            rank,
            {
                pair[1 - pair.index(rank)]: ends[pair.index(rank)]
                for pair, ends in sockets.items()
                if rank in pair
            },
            timeout_s,
        )
        for rank in range(3)
    )


@pytest.mark.parametrize("length", [64, 5_000_000])
def test_silence_is_an_error_that_names_the_rank(length: int) -> None:
    ends = pair(timeout_s=0.3)
    started = time.monotonic()
    with pytest.raises(LineError, match=r"rank 1: nothing more came or went within 0\.3 s"):
        one_sided(ends[0], length)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("timeout_s", [1e-9, 1e300])
def test_no_timeout_is_too_short_or_too_long(timeout_s: float) -> None:
    ends = pair(timeout_s)
    if timeout_s < 1:
        with pytest.raises(LineError):
            one_sided(ends[0], 64)
    else:
        assert exchanged(ends, (5_000_000, 64))[1][1] == b"head" + b"B" * 60


@pytest.mark.parametrize("length", [64, 1_000_000])
def test_the_time_is_up_where_one_rank_has_left_and_another_is_silent(length: int) -> None:
    """The one that left has done its part; nobody spins over its closed end."""
    ends = trio(timeout_s=1.0)

    def leave() -> None:
        to_first = next(peer for peer in ends[1]._peers if peer.rank == 0)
        turn = lines._Turn(to_first, [bytes(length)], memoryview(bytearray(length)))
        while turn.wanted:
            turn.serve(turn.wanted)
        ends[1].close()

    used = time.process_time()
    failed, _ = at_once(lambda: one_sided(ends[0], length, 3), leave)
    assert str(failed) == "rank 2: nothing more came or went within 1 s"
    assert time.process_time() - used < 0.8


def test_a_rank_that_is_gone_is_named_while_another_is_only_slow() -> None:
    ends = trio(timeout_s=30.0)
    ends[2].close()
    started = time.monotonic()
    with pytest.raises(LineError, match="rank 2 closed its line"):
        one_sided(ends[0], 64, 3)
    assert time.monotonic() - started < 10


def test_signals_do_not_put_the_end_off() -> None:
    """Python takes up an interrupted call again; its time must not begin anew."""
    ends = pair(timeout_s=0.5)
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    started = time.monotonic()
    try:
        with pytest.raises(LineError):
            one_sided(ends[0], 64)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - started < 5


class InterruptionError(Exception):
    """What a signal handler raises."""


def test_an_exchange_that_is_interrupted_closes_the_lines() -> None:
    """What was on its way would be taken for the next message; and the others hear of it at once."""

    def interrupt(*_: object) -> None:
        raise InterruptionError

    ends = pair(timeout_s=30.0)
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(InterruptionError):
            one_sided(ends[0], 64)
    finally:
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(LineError, match="closed when an earlier exchange failed"):
        one_sided(ends[0], 64)
    with pytest.raises(LineError, match="rank 0 closed its line"):
        one_sided(ends[1], 64)


@pytest.mark.parametrize("length", [64, 5_000_000])
def test_a_closed_line_is_an_error_that_names_the_rank(length: int) -> None:
    ends = pair()
    ends[1].close()
    with pytest.raises(LineError, match="rank 1 closed its line"):
        one_sided(ends[0], length)


def test_lines_close_with_their_last_user() -> None:
    first, second = pair()
    stream = first._peers[0]._stream
    del first
    assert stream.fileno() == -1
    second.close()


# Between ranks.


def mesh_lines(rank: int, n: int) -> list[tuple[str, bool]]:
    mesh = build_mesh(Layout(dp=1, cp=2, tp=2, sp=2), RolloutLayout(1, n, n), rank, 30.0)
    shared = {group.ranks: group.lines for group in mesh.groups}
    assert all(shared[group.ranks] is group.lines for group in (mesh.tp, mesh.cp, mesh.token, mesh.world))
    return [(group.axis, group.lines is not None) for group in (*mesh.groups, mesh.dp)]


def test_every_group_of_one_machine_has_lines_and_groups_of_one_have_none() -> None:
    want = [("world", True), ("tp", True), ("cp", True), ("dp", False)]
    assert run_ranks(4, mesh_lines) == [want] * 4


def test_ranks_of_several_machines_have_none() -> None:
    with over("gloo"):
        assert all(not any(has for _, has in found) for found in run_ranks(4, mesh_lines))


def two_machines(rank: int, n: int) -> list[tuple[str, bool]]:
    with mock.patch.object(lines, "_machine", return_value=bytes([1 + rank // 2]) * 16):
        return mesh_lines(rank, n)


def test_a_group_has_lines_where_its_own_ranks_share_a_machine() -> None:
    want = [("world", False), ("tp", True), ("cp", False), ("dp", False)]
    assert run_ranks(4, two_machines) == [want] * 4


def broken_on_one_rank(rank: int, n: int, name: str) -> tuple[bool, list[float]]:
    refusal = mock.Mock(side_effect=OSError(24, "Too many open files"))
    planted = (
        mock.patch.object(lines, name, refusal) if rank == 1 else mock.patch.object(lines, "_ANSWER_S", 0.5)
    )
    with planted:
        group = world(rank, n)
    return group.lines is None, collectives.all_reduce(torch.tensor([float(rank)]), group).tolist()


@pytest.mark.parametrize("name", ["_machine", "_connect", "_answer"])
def test_what_one_rank_cannot_open_no_rank_uses(name: str) -> None:
    """No file to spare, no listener: the backend's way stays, on all ranks."""
    assert run_ranks(3, broken_on_one_rank, name) == [(True, [3.0])] * 3


STRANGERS: dict[str, Callable[[bytes], bytes | None]] = {
    "says nothing": lambda _: None,
    "leaves": lambda _: b"",
    "guesses the secret": lambda secret: lines._GREETING.pack(0, 0, bytes(len(secret))),
    "calls for another group": lambda secret: lines._GREETING.pack(99, 0, secret),
    "is another rank": lambda secret: lines._GREETING.pack(0, 77, secret),
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_stranger_is_not_let_in(kind: str) -> None:
    """Whoever reads the listener's name, which the system shows, gets no line and keeps nobody waiting."""
    meeting = threading.Barrier(2)
    said: dict[tuple[int, int], bytes] = {}
    callers: list[socket.socket] = []

    def met(rank: int) -> Callable[[bytes], list[bytes]]:
        turns = iter(range(2))

        def meet(own: bytes) -> list[bytes]:
            turn = next(turns)
            said[turn, rank] = own
            if turn == 0 and rank == 1:  # before rank 0 calls
                name, secret = lines._name_and_secret(own)
                caller = socket.socket(socket.AF_UNIX)
                caller.connect(lines._address(name))
                greeting = STRANGERS[kind](secret)
                if greeting is not None:
                    caller.sendall(greeting)
                if greeting == b"":
                    caller.shutdown(socket.SHUT_WR)
                callers.append(caller)
            meeting.wait(20)
            return [said[turn, 0], said[turn, 1]]

        return meet

    opened = at_once(*(lambda rank=rank: open_lines(rank, [PAIR], met(rank), 20.0) for rank in PAIR))
    ends = (opened[0][PAIR], opened[1][PAIR])
    assert exchanged(ends, (64, 64))[0][1] == b"head" + b"B" * 60
    with callers[0] as caller:
        assert caller.recv(1) == b""


def test_another_users_process_is_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(lines._GREETING.pack(0, 0, bytes(16)) * 2)
        assert lines._greeting(ours, bytes(16)) == (0, 0)
        monkeypatch.setattr(lines.os, "getuid", lambda: os.geteuid() + 1)
        assert lines._greeting(ours, bytes(16)) is None


def unlike_lengths(rank: int, n: int) -> None:
    group = world(rank, n)
    refused(("float32[4096]", "float32[8192]"), collectives.gather, torch.ones(4096 * (rank + 1)), group)
    collectives.check_agreement(world(rank, n))


def test_messages_of_different_lengths_are_named_on_every_rank() -> None:
    """gloo ends the process that receives more than it expected."""
    run_ranks(2, unlike_lengths)
    with over("gloo"), pytest.raises((RankError, CollectiveError, AssertionError)):
        run_ranks(2, unlike_lengths)


def a_death_in_a_collective(rank: int, n: int) -> str:
    group = world(rank, n, timeout_s=60.0)
    collectives.gather(torch.ones(5), group)
    if rank == 0:
        group.lines.close()
        return ""
    started = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        collectives.all_reduce(torch.ones(7), group)
    assert time.monotonic() - started < 30
    return str(caught.value)


def test_the_end_of_a_rank_is_a_collectives_error_at_once() -> None:
    message = run_ranks(2, a_death_in_a_collective)[1]
    assert "rank 1: all_reduce float32[7] over tp(0..1), call 1 of this group, failed after" in message
    assert "rank 0 closed its line" in message


def sums(rank: int, n: int) -> list[float]:
    group = world(rank, n)
    source = torch.Generator().manual_seed(rank)
    sizes = [
        n,
        1000 * n,
        (CHECKED_BYTES // 4 - 16) * n,
        (CHECKED_BYTES // 4) * n,
        (CHECKED_BYTES // 4 + 1) * n,
    ]
    return [
        collectives.reduce_scatter(torch.randn(size, generator=source), group).view(torch.int32).sum().item()
        for size in sizes
    ]


def test_both_ways_leave_the_same_bits() -> None:
    over_lines = run_ranks(3, sums)
    with over("gloo"):
        assert run_ranks(3, sums) == over_lines
