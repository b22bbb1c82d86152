"""The hash is splitmix64's finaliser, bit for bit, and tuples of words hash apart."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsp.bits import same_bits
from rlsp.numerics.hashing import as_int64, hash_words, mix64, mix64_, shift_right

MASK = (1 << 64) - 1
EXTREMES = [0, 1, -1, 2**63 - 1, -(2**63), -(2**63) + 1, 0x5555555555555555, as_int64(0xAAAAAAAAAAAAAAAA)]
words = st.integers(-(2**63), 2**63 - 1)


def reference_mix(word: int) -> int:
    z = word & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def reference_hash(*parts: int) -> int:
    state = len(parts)
    for part in parts:
        state = reference_mix(((state ^ part) + 0x9E3779B97F4A7C15) & MASK)
    return state


@settings(deadline=None)
@given(st.lists(words, min_size=1, max_size=70))
def test_mix64_equals_pure_integers(values: list[int]) -> None:
    mixed = mix64(torch.tensor(values + EXTREMES)).tolist()
    assert [word & MASK for word in mixed] == [reference_mix(word) for word in values + EXTREMES]


def test_mix64_reproduces_the_published_sequence_of_splitmix64() -> None:
    state = 1234567 + 0x9E3779B97F4A7C15 * torch.arange(1, 4).numpy().astype(object)
    mixed = mix64(torch.tensor([as_int64(int(word) & MASK) for word in state]))
    assert [word & MASK for word in mixed.tolist()] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_an_arithmetic_shift_would_not_give_these_bits() -> None:
    x = torch.tensor([-1])
    assert shift_right(x, 30).item() == MASK >> 30
    assert (x >> 30).item() != MASK >> 30


def test_mix64_leaves_its_argument_alone_and_its_in_place_form_does_not() -> None:
    x = torch.tensor(EXTREMES)
    mixed = mix64(x)
    assert x.tolist() == EXTREMES
    assert mix64_(x) is x
    assert same_bits(x, mixed)


@settings(deadline=None)
@given(st.lists(words | st.integers(0, MASK), min_size=1, max_size=5))
def test_hash_words_equals_pure_integers_for_ints_and_tensors_in_any_mixture(parts: list[int]) -> None:
    expected = reference_hash(*parts)
    assert int(hash_words(*parts)) & MASK == expected
    tensors = [torch.tensor([as_int64(part)]) if i % 2 else part for i, part in enumerate(parts)]
    assert int(hash_words(*tensors)) & MASK == expected


def test_hash_words_broadcasts_like_a_loop() -> None:
    rows, columns = torch.arange(-2, 3)[:, None], torch.arange(4)
    table = hash_words(7, rows, columns)
    assert table.shape == (5, 4)
    for i, row in enumerate(rows[:, 0].tolist()):
        for j, column in enumerate(columns.tolist()):
            assert int(table[i, j]) == int(hash_words(7, row, column))


def test_order_number_and_value_of_the_words_matter() -> None:
    tuples = [(1, 2), (2, 1), (1,), (2,), (1, 2, 0), (0, 1, 2), (0,), (0, 0), (0, 0, 0), (-1, 2)]
    assert len({int(hash_words(*parts)) for parts in tuples}) == len(tuples)


def test_a_small_grid_of_words_has_no_collision_and_balanced_bits() -> None:
    axis = torch.arange(64)
    grid = hash_words(axis[:, None, None], axis[:, None], axis[:16]).flatten()
    assert grid.unique().numel() == grid.numel() == 2**16
    ones = torch.stack([(grid >> bit) & 1 for bit in range(64)]).sum(-1)
    # Binomial(2^16, 1/2) has a standard deviation of 128: five of them.
    assert int((ones - 2**15).abs().max()) < 640


@pytest.mark.parametrize("word", [1 << 64, -(1 << 63) - 1])
def test_integers_of_more_than_64_bits_are_refused(word: int) -> None:
    with pytest.raises(ValueError, match="does not fit in 64 bits"):
        hash_words(word)


def test_words_of_other_dtypes_and_no_words_are_refused() -> None:
    with pytest.raises(TypeError, match=r"torch\.float32"):
        hash_words(1, torch.ones(2))
    with pytest.raises(ValueError, match="at least one word"):
        hash_words()
