"""Lay the captures of training and rollout together, boundary by boundary, and find the first difference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from rlsp.report.diagnose_records import BoundaryResult, FirstDifference, Side, State

Words = npt.NDArray[np.unsignedinteger[Any]]
Positions = npt.NDArray[np.int64]
Marks = npt.NDArray[np.bool_]

_UNSIGNED = {
    "bfloat16": np.uint16,
    "float16": np.uint16,
    "float32": np.uint32,
    "float64": np.uint64,
    "int64": np.uint64,
}


class CoverageError(RuntimeError):
    """A side of a replay left positions or elements out, so that nothing can be concluded."""


@dataclass(frozen=True)
class Piece:
    """What one rank holds of a boundary.

    Attributes:
        rank: The rank.
        positions: int64 [p], which positions of the sequence.
        first: Index of the first of its adjacent features among all.
        dtype: torch's name of the dtype, without `torch.`.
        words: Bit patterns, unsigned [p, n].
    """

    rank: int
    positions: Positions
    first: int
    dtype: str
    words: Words

    @classmethod
    def of_bytes(
        cls, rank: int, positions: Positions, first: int, dtype: str, content: bytes, features: int
    ) -> Self:
        """Read [p, features] values of a dtype from their bytes."""
        words = np.frombuffer(content, dtype=_UNSIGNED[dtype]).reshape(len(positions), features)
        return cls(rank, positions, first, dtype, words)

    def at(self, position: int, element: int) -> int | None:
        """Return the bit pattern at a place, or None where this rank holds nothing of it."""
        row = np.flatnonzero(self.positions == position)
        column = element - self.first
        inside = row.size and 0 <= column < self.words.shape[1]
        return int(self.words[row[0], column]) if inside else None


def in_order(results: Iterable[BoundaryResult]) -> tuple[BoundaryResult, ...]:
    """Mark the first of the boundaries that differ; they come in the order of a forward pass."""
    marked: list[BoundaryResult] = []
    for result in results:
        found = any(earlier.state is State.FIRST for earlier in marked)
        late = found and result.state is State.FIRST
        marked.append(result.model_copy(update={"state": State.AFTER}) if late else result)
    return tuple(marked)


def compare_boundary(
    boundary: str,
    layer: int | None,
    train: Sequence[Piece],
    rollout: Sequence[Piece],
    positions: range,
    features: int | None = None,
) -> BoundaryResult:
    """Lay both sides of one boundary together by (position, element), every rank's copy included.

    Where the sides have different dtypes, both are widened to one that holds either exactly.

    Args:
        boundary: Its name.
        layer: Its layer, or None outside of the layers.
        train: What the ranks of training hold.
        rollout: What the ranks of the engine hold.
        positions: The positions that both sides must have; others are left out.
        features: How many features count, from the first on; all if None.

    Raises:
        CoverageError: A side lacks a position or an element of the other.
    """
    if not train or not rollout:
        return BoundaryResult(
            boundary=boundary,
            layer=layer,
            state=State.UNSEEN,
            dtype=None,
            positions=0,
            elements=0,
            differing_positions=0,
            differing_elements=0,
            first=None,
        )
    dtype = _common(piece.dtype for piece in (*train, *rollout))
    sides = [[_widened(piece, dtype) for piece in side] for side in (train, rollout)]
    whole = max(piece.first + piece.words.shape[1] for side in sides for piece in side)
    width = min(whole, features or whole)
    marks = _differing(sides, positions, width, f"{boundary}{'' if layer is None else f' of layer {layer}'}")
    first = None
    if marks.any():
        row = int(np.argmax(marks.any(axis=1)))
        position, element = positions[row], int(np.argmax(marks[row]))
        a, b = _parted(_held(sides[0], position, element), _held(sides[1], position, element), dtype)
        first = FirstDifference(
            boundary=boundary,
            layer=layer,
            position=position,
            element=element,
            dtype=dtype,
            train=a,
            rollout=b,
        )
    return BoundaryResult(
        boundary=boundary,
        layer=layer,
        state=State.EQUAL if first is None else State.FIRST,
        dtype=dtype,
        positions=len(positions),
        elements=marks.size,
        differing_positions=int(marks.any(axis=1).sum()),
        differing_elements=int(marks.sum()),
        first=first,
    )


def by_position(pieces: Sequence[Piece], positions: range) -> Words:
    """Return what has one value a position, each from the lowest rank that holds it.

    Raises:
        CoverageError: A position is held by no rank.
    """
    if not pieces:
        raise CoverageError("a side was not replayed by any rank")
    found = np.zeros(len(positions), dtype=pieces[0].words.dtype)
    covered = np.zeros(len(positions), dtype=np.bool_)
    for piece in pieces:
        rows, held = _rows(piece, positions)
        new = ~covered[rows]
        found[rows[new]] = piece.words[held, 0][new]
        covered[rows] = True
    if not covered.all():
        raise CoverageError(f"position {positions[int(np.argmin(covered))]} was replayed by no rank")
    return found


def _differing(sides: Sequence[Sequence[Piece]], positions: range, width: int, what: str) -> Marks:
    """Mark where any two copies differ, [positions, width]."""
    shape = (len(positions), width)
    reference: Words = np.zeros(shape, dtype=sides[0][0].words.dtype)
    known, marks = np.zeros(shape, dtype=np.bool_), np.zeros(shape, dtype=np.bool_)
    for name, side in zip(("training", "the rollout"), sides, strict=True):
        covered = np.zeros(shape, dtype=np.bool_)
        for piece in side:
            rows, held = _rows(piece, positions)
            end = min(piece.first + piece.words.shape[1], width)
            if end <= piece.first:
                continue
            place = np.ix_(rows, np.arange(piece.first, end))
            words = piece.words[held, : end - piece.first]
            marks[place] |= known[place] & (reference[place] != words)
            reference[place] = np.where(known[place], reference[place], words)
            known[place] = covered[place] = True
        if not covered.all():
            row, element = np.argwhere(~covered)[0]
            raise CoverageError(f"{what}: {name} has nothing at position {positions[row]}, element {element}")
    return marks


def _rows(piece: Piece, positions: range) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return which rows of `positions` a piece has, and where in the piece they stand."""
    held = np.flatnonzero((piece.positions >= positions.start) & (piece.positions < positions.stop))
    return (piece.positions[held] - positions.start).astype(np.intp), held


def _held(side: Sequence[Piece], position: int, element: int) -> dict[int, list[int]]:
    """Return the ranks that hold each bit pattern of one place."""
    found: dict[int, list[int]] = {}
    for piece in side:
        if (word := piece.at(position, element)) is not None:
            found.setdefault(word, []).append(piece.rank)
    return found


def _parted(train: dict[int, list[int]], rollout: dict[int, list[int]], dtype: str) -> tuple[Side, Side]:
    """Pick a value of each side such that they differ; copies on one side may differ, too."""
    a, b = next((a, b) for a in train for b in rollout if a != b)
    return _side(a, train[a], dtype), _side(b, rollout[b], dtype)


def _side(word: int, ranks: Sequence[int], dtype: str) -> Side:
    words = np.array([word], dtype=_UNSIGNED[dtype])
    digits = 2 * words.itemsize
    return Side(ranks=tuple(ranks), bits=f"0x{word:0{digits}x}", number=float(_numbers(words, dtype)[0]))


def _common(dtypes: Iterable[str]) -> str:
    """Return a dtype that holds every value of `dtypes`."""
    distinct = set(dtypes)
    if len(distinct) == 1:
        return distinct.pop()
    return "float64" if "float64" in distinct else "float32"


def _widened(piece: Piece, dtype: str) -> Piece:
    if piece.dtype == dtype:
        return piece
    wide = _numbers(piece.words, piece.dtype).astype(np.dtype(dtype))
    return Piece(piece.rank, piece.positions, piece.first, dtype, wide.view(_UNSIGNED[dtype]))


def _numbers(words: Words, dtype: str) -> npt.NDArray[np.floating[Any]]:
    """Return the numbers of bit patterns, exactly."""
    if dtype == "bfloat16":
        wide: npt.NDArray[np.floating[Any]] = (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return wide
    return words.view(np.dtype(dtype))
