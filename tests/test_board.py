"""The status board says what every rank last did, whatever ended it."""

from __future__ import annotations

import subprocess
import sys
import time
import timeit
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlsp.board import Board, BoardError, Slot

ROOT = Path(__file__).resolve().parents[1]
CHAIN = bytes(range(32))
HALF_BYTES, FIRST_SLOT = 512, 4096


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board.create(tmp_path / "board", 3)


def test_a_slot_reads_back_what_its_rank_wrote_and_leaves_the_others_alone(board: Board) -> None:
    writer = board.writer(1)
    writer.phase("rollout 2: generating")
    writer.call(17, "tp(0..1)#4 gather float32[4,8]", CHAIN)
    other = Board.open(board.path)
    slot = other.slot(1)
    assert (slot.phase, slot.sequence, slot.signature) == (
        "rollout 2: generating",
        17,
        "tp(0..1)#4 gather float32[4,8]",
    )
    assert slot.chain_hex == CHAIN.hex()
    assert abs(slot.updated_at_s - time.time()) < 60
    assert not slot.done
    assert [other.slot(0), other.slot(2)] == [Slot(0), Slot(2)]
    writer.done()
    assert other.slot(1).done
    assert writer.last() == other.slot(1)
    assert slot.describe() == "rollout 2: generating; collective 17 tp(0..1)#4 gather float32[4,8]"


def test_texts_that_do_not_fit_are_clipped_between_characters(board: Board) -> None:
    writer = board.writer(0)
    writer.phase("é" * 100)
    writer.call(0, "×" * 300, bytes(100))
    slot = board.slot(0)
    assert slot.phase == "é" * 30 + "…"
    assert slot.signature == "×" * 126 + "…"
    assert len(slot.chain_hex) == 64


def test_a_cut_write_is_noticed_and_the_write_before_it_still_stands(board: Board) -> None:
    writer = board.writer(2)
    writer.call(1, "first", CHAIN)
    writer.call(2, "second", CHAIN)
    start = FIRST_SLOT + 2 * 2 * HALF_BYTES
    content = bytearray(board.path.read_bytes())
    halves = [content.find(text, start) for text in (b"first", b"second")]
    content[halves[1]] ^= 1
    board.path.write_bytes(content)
    slot = Board.open(board.path).slot(2)
    assert slot.torn
    assert (slot.sequence, slot.signature) == (1, "first")
    content[halves[0]] ^= 1
    board.path.write_bytes(content)
    assert Board.open(board.path).slot(2) == Slot(2, torn=True)


@contextmanager
def writing(board: Board) -> Iterator[None]:
    """Let another process write to slot 0 without a pause; it is killed in the middle."""
    code = (
        "import sys; from rlsp.board import Board\n"
        "writer = Board.open(sys.argv[1]).writer(0)\n"
        "for number in range(10**9):\n"
        "    writer.call(number, f'call {number} ' + 'x' * (number % 200), number.to_bytes(16))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(board.path)], cwd=ROOT)
    try:
        while board.slot(0).sequence < 0:
            time.sleep(0.01)
        yield
    finally:
        process.kill()
        process.wait()


def is_whole(slot: Slot) -> bool:
    said = f"call {slot.sequence} " + "x" * (slot.sequence % 200)
    return slot.signature == said and int(slot.chain_hex, 16) == slot.sequence


def test_a_rank_killed_at_any_moment_leaves_a_readable_slot(board: Board) -> None:
    for attempt in range(4):
        with writing(board):
            time.sleep(0.01 + 0.001 * attempt)
        assert is_whole(board.slot(0))


def test_a_reader_never_sees_a_mixture_of_two_writes(board: Board) -> None:
    sequences = set()
    with writing(board):
        until_s = time.monotonic() + 30
        while len(sequences) < 20 and time.monotonic() < until_s:
            for _ in range(500):
                slot = board.slot(0)
                assert is_whole(slot)
                sequences.add(slot.sequence)
    assert len(sequences) >= 20


def test_a_call_costs_microseconds(board: Board) -> None:
    writer = board.writer(0)
    seconds = min(
        timeit.repeat(lambda: writer.call(5, "tp(0..3)#5 gather float32[8]", CHAIN), number=500, repeat=9)
    )
    assert seconds / 500 < 20e-6


def test_a_writer_goes_on_counting_where_an_earlier_one_stopped(board: Board) -> None:
    board.writer(0).phase("one")
    writer = board.writer(0)
    writer.phase("two")
    assert (board.slot(0).phase, board.slot(0).generation) == ("two", 2)


def test_ranks_that_join_make_one_board_whoever_comes_first(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "board"
    first = Board.join(path, 2)
    first.writer(0).phase("up")
    second = Board.join(path, 2)
    second.writer(1).phase("up, too")
    assert [slot.phase for slot in first.read()] == ["up", "up, too"]


def test_what_is_no_board_is_refused(tmp_path: Path, board: Board) -> None:
    with pytest.raises(BoardError, match="cannot open the status board"):
        Board.open(tmp_path / "absent")
    (tmp_path / "short").write_bytes(b"x")
    with pytest.raises(BoardError, match="not a status board: 1 bytes"):
        Board.open(tmp_path / "short")
    (tmp_path / "other").write_bytes(bytes(8192))
    with pytest.raises(BoardError, match="not a status board of this version"):
        Board.open(tmp_path / "other")
    with pytest.raises(BoardError, match="no slot for rank 3: the board has 3"):
        board.writer(3)
    with pytest.raises(BoardError, match="not a status board"):
        Board.join(board.path, 2)
