"""Captures are compared by position and element, whatever ranks hold them and however often."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rlsp.report.diagnose import CoverageError, Piece, by_position, compare_boundary, in_order
from rlsp.report.diagnose_records import BoundaryResult, State

WHOLE = np.arange(1.0, 25.0, dtype=np.float32).reshape(6, 4)  # six positions, four features


def columns(rank: int, positions: list[int], start: int, stop: int, values: np.ndarray = WHOLE) -> Piece:
    words = np.ascontiguousarray(values[positions, start:stop]).view(np.uint32)
    return Piece(rank, np.array(positions), start, "float32", words)


def compared(train: list[Piece], rollout: list[Piece], features: int | None = None) -> BoundaryResult:
    return compare_boundary("fc1", 1, train, rollout, range(6), features)


def zigzag(values: np.ndarray = WHOLE) -> list[Piece]:
    """CP=2 and TP=2: positions in a zigzag, features in halves."""
    places = ([0, 1, 5], [2, 3, 4])
    return [
        columns(2 * cp + tp, positions, 2 * tp, 2 * tp + 2, values)
        for cp, positions in enumerate(places)
        for tp in range(2)
    ]


def test_the_same_values_in_other_pieces_are_equal() -> None:
    result = compared(zigzag(), [columns(0, [3, 4, 5, 0, 1, 2], 0, 4)])
    assert result.state is State.EQUAL
    assert (result.positions, result.elements) == (6, 24)
    assert (result.differing_positions, result.differing_elements, result.first) == (0, 0, None)


def test_the_first_difference_is_the_lowest_position_and_element_with_the_ranks_that_own_it() -> None:
    other = WHOLE.copy()
    other[[4, 3, 3], [0, 3, 1]] += 1.0
    result = compared(zigzag(other), [columns(7, list(range(6)), 0, 4)])
    assert (result.differing_positions, result.differing_elements) == (2, 3)
    first = result.first
    assert first is not None
    assert (first.position, first.element, first.train.ranks, first.rollout.ranks) == (3, 1, (2,), (7,))
    assert (first.train.number, first.rollout.number) == (15.0, 14.0)
    assert (first.train.bits, first.rollout.bits) == ("0x41700000", "0x41600000")


def test_a_copy_that_differs_from_the_other_copies_is_found_on_either_side() -> None:
    other = WHOLE.copy()
    other[2, 2] = 0.0
    good, bad, alone = (
        columns(rank, list(range(6)), 0, 4, v) for rank, v in enumerate((WHOLE, other, WHOLE))
    )
    for train, rollout in (([good, bad], [alone]), ([alone], [good, bad])):
        result = compared(train, rollout)
        assert result.differing_elements == 1
        assert result.first is not None
        sides = {side.number: side.ranks for side in (result.first.train, result.first.rollout)}
        assert sides[0.0] == (1,)
        assert 1 not in sides[11.0]


@pytest.mark.parametrize(("a", "b"), [(0.0, -0.0), (1.0, math.nan), (math.inf, -math.inf)])
def test_bits_are_compared_and_not_numbers(a: float, b: float) -> None:
    x, y = (np.full((6, 4), value, dtype=np.float32) for value in (a, b))
    assert compared([columns(0, list(range(6)), 0, 4, x)], [columns(0, list(range(6)), 0, 4, y)]).first
    same = compared([columns(0, list(range(6)), 0, 4, y)], [columns(1, list(range(6)), 0, 4, y)])
    assert same.state is State.EQUAL


def test_other_dtypes_are_widened_exactly_before_they_are_compared() -> None:
    half = (WHOLE.view(np.uint32) >> 16).astype(np.uint16)  # small integers: exact in bfloat16
    narrow = Piece(0, np.arange(6), 0, "bfloat16", half)
    result = compared([narrow], zigzag())
    assert (result.state, result.dtype) == (State.EQUAL, "float32")
    assert compared([narrow], [narrow]).dtype == "bfloat16"
    other = half.copy()
    other[5, 3] += 1
    first = compared([narrow], [Piece(1, np.arange(6), 0, "bfloat16", other)]).first
    assert first is not None
    assert (first.train.bits, first.rollout.bits) == ("0x41c0", "0x41c1")
    assert (first.train.number, first.rollout.number) == (24.0, 24.125)


def test_features_and_positions_beyond_those_that_count_are_left_out() -> None:
    other = WHOLE.copy()
    other[:, 3] = 0.0
    beyond = np.vstack((other, np.zeros((2, 4), dtype=np.float32)))
    result = compared(zigzag(), [columns(0, list(range(8)), 0, 4, beyond)], features=3)
    assert (result.state, result.elements) == (State.EQUAL, 18)
    assert compared(zigzag(), [columns(0, list(range(8)), 0, 4, beyond)]).differing_positions == 6


def test_what_a_side_left_out_is_named() -> None:
    whole = [columns(0, list(range(6)), 0, 4)]
    with pytest.raises(CoverageError, match="fc1 of layer 1: training has nothing at position 2, element 0"):
        compared(zigzag()[:2], whole)
    with pytest.raises(CoverageError, match="the rollout has nothing at position 0, element 2"):
        compared(whole, zigzag()[::2])


def test_a_boundary_that_a_side_does_not_show_is_not_called_equal() -> None:
    assert compared([], zigzag()).state is State.UNSEEN
    assert compared(zigzag(), []).state is State.UNSEEN


def test_only_the_first_of_the_differing_boundaries_is_called_first() -> None:
    other = WHOLE + 1
    results = [
        compared(zigzag(), zigzag()),
        compared([], zigzag()),
        compared(zigzag(), zigzag(other)),
        compared(zigzag(), zigzag(other)),
        compared(zigzag(), zigzag()),
    ]
    states = [result.state for result in in_order(results)]
    assert states == [State.EQUAL, State.UNSEEN, State.FIRST, State.AFTER, State.EQUAL]


def test_one_value_a_position_comes_from_the_lowest_rank_that_holds_it() -> None:
    low, high = columns(0, [0, 1, 2], 0, 1), columns(1, [2, 3, 4, 5], 0, 1, WHOLE + 1)
    found = by_position([low, high], range(1, 5)).view(np.float32)
    assert found.tolist() == [5.0, 9.0, 14.0, 18.0]
    with pytest.raises(CoverageError, match="position 6"):
        by_position([low, high], range(1, 7))
    with pytest.raises(CoverageError, match="not replayed by any rank"):
        by_position([], range(1))
