"""Direct lines between ranks: what they carry, who gets one, and how they end."""

from __future__ import annotations

import os
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
    ends[1]._peers[0].send([b"1st call"])
    ends[1]._peers[0].send([b"2nd call"])
    for call in range(2):
        ends[0].exchange([(b"whatever",)] * 2, [memoryview(row) for row in rows[call]])
    assert [bytes(both[1]) for both in rows[:2]] == [b"1st call", b"2nd call"]


def one_sided(end: Lines, length: int) -> None:
    message = (bytes(length),)
    end.exchange([message, message], [memoryview(bytearray(length)) for _ in PAIR])


@pytest.mark.parametrize("length", [64, 5_000_000])
def test_silence_is_an_error_that_names_the_rank_or_the_time(length: int) -> None:
    ends = pair(timeout_s=0.3)
    started = time.monotonic()
    with pytest.raises(LineError, match=r"rank 1 sent nothing for 0\.3 s|nothing moved for 0\.3 s"):
        one_sided(ends[0], length)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("length", [64, 5_000_000])
def test_a_closed_line_is_an_error_that_names_the_rank(length: int) -> None:
    ends = pair()
    ends[1].close()
    with pytest.raises(LineError, match="rank 1 closed its line"):
        one_sided(ends[0], length)


def test_what_was_sent_before_a_line_was_closed_arrives() -> None:
    ends = pair()
    ends[1]._peers[0].send([b"last"])
    ends[1].close()
    rows = [bytearray(4), bytearray(4)]
    with pytest.raises(LineError):  # it takes nothing any more
        ends[0].exchange([(b"late",)] * 2, [memoryview(row) for row in rows])
    message = lines._Incoming(memoryview(rows[1]))
    while not message.whole:
        ends[0]._peers[0].receive(message, 1.0)
    assert bytes(rows[1]) == b"last"


def test_lines_close_with_their_last_user() -> None:
    first, second = pair()
    stream = first._peers[0].stream
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


def test_a_stranger_is_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of another user that knows the name gets no line, and no rank waits for it."""
    names: list[bytes] = []
    asked = iter([b"\2", *[os.getuid().to_bytes(4, "little")] * 9])

    class Listener(socket.socket):
        def accept(self) -> tuple[socket.socket, Any]:
            stream, address = super().accept()
            return Stranger(stream) if next(asked) == b"\2" else stream, address

    class Stranger(socket.socket):
        def __init__(self, stream: socket.socket) -> None:
            super().__init__(fileno=stream.detach())

        def getsockopt(self, *_: Any) -> bytes:  # type: ignore[override]
            return lines._CREDENTIALS.pack(1, os.getuid() + 1, 0)

    meeting = threading.Barrier(2)
    said: dict[tuple[int, int], bytes] = {}
    turns = [0, 0]

    def meet(rank: int, own: bytes) -> list[bytes]:
        turn = turns[rank]
        turns[rank] += 1
        said[turn, rank] = own
        if turn == 0 and rank == 1:
            names.append(own[16:])
            caller = socket.socket(socket.AF_UNIX)
            caller.connect(lines._address(own[16:]))  # before rank 0 does
            callers.append(caller)
        meeting.wait(20)
        return [said[turn, 0], said[turn, 1]]

    callers: list[socket.socket] = []
    monkeypatch.setattr(lines.socket, "socket", Listener)
    opened = at_once(
        *(lambda rank=rank: open_lines(rank, [PAIR], lambda own: meet(rank, own), 20.0) for rank in PAIR)
    )
    monkeypatch.undo()
    ends = (opened[0][PAIR], opened[1][PAIR])
    assert exchanged(ends, (64, 64))[0][1] == b"head" + b"B" * 60
    assert callers[0].recv(1) == b""
    callers[0].close()


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
