"""Bit equality means bits, and the digests catch what sums of patterns miss."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlsp import bits
from rlsp.bits import bit_pattern, differing, digest, row_digest, same_bits, shard_hashes, ulp_distance
from rlsp.numerics.hashing import hash_words

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
TYPES = [*FLOATS, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool]


def words(shape: tuple[int, ...], seed: int = 1) -> Tensor:
    """Return hashed int64 words: test data that no generator's state changes."""
    return hash_words(seed, torch.arange(math.prod(shape))).reshape(shape)


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 1) -> Tensor:
    """Return finite values of every magnitude near 1 and both signs, or integers."""
    if dtype.is_floating_point:
        return (words(shape, seed).double() * 2.0**-62).to(dtype)
    return (words(shape, seed) >> 33).to(dtype)


def flip_last_bit(x: Tensor, *index: int) -> Tensor:
    flipped = x.clone()
    flipped.view(bit_pattern(x).dtype)[index] ^= 1
    return flipped


def swapped(x: Tensor, i: tuple[int, ...], j: tuple[int, ...]) -> Tensor:
    y = x.clone()
    y[i], y[j] = x[j].clone(), x[i].clone()
    return y


class TestEquality:
    @pytest.mark.parametrize("dtype", TYPES)
    def test_a_copy_has_the_same_bits_whatever_its_strides(self, dtype: torch.dtype) -> None:
        x = values((6, 4), dtype)
        assert same_bits(x, x.clone())
        assert same_bits(x.T, x.T.contiguous())
        assert same_bits(x[:, ::2], x[:, ::2].clone())

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_one_ulp_anywhere_is_seen_and_marked(self, dtype: torch.dtype) -> None:
        x = values((6, 4), dtype)
        y = flip_last_bit(x, 5, 2)
        assert not same_bits(x, y)
        assert differing(x, y).nonzero().tolist() == [[5, 2]]

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_zeros_of_different_sign_differ_although_they_compare_equal(self, dtype: torch.dtype) -> None:
        plus, minus = torch.zeros(3, dtype=dtype), -torch.zeros(3, dtype=dtype)
        assert not same_bits(plus, minus)
        assert bool((plus == minus).all())

    def test_nan_equals_the_same_nan_only(self) -> None:
        patterns = torch.tensor([0x7FC00000, 0x7FC00001, 0x7F800001], dtype=torch.int32)
        nans = patterns.view(torch.float32)
        assert bool(nans.isnan().all())
        assert same_bits(nans, nans.clone())
        assert differing(nans, nans.roll(1)).tolist() == [True, True, True]
        assert not bool((nans == nans).any())

    def test_shape_and_dtype_belong_to_the_bits(self) -> None:
        zeros = torch.zeros(4)
        assert not same_bits(zeros, zeros.reshape(2, 2))
        assert not same_bits(zeros, torch.zeros(4, dtype=torch.int32))
        assert not same_bits(zeros, torch.zeros(1))

    def test_differing_refuses_what_broadcasting_would_hide(self) -> None:
        with pytest.raises(ValueError, match=r"torch\.float32 \(4,\) with torch\.float32 \(1,\)"):
            differing(torch.zeros(4), torch.zeros(1))
        with pytest.raises(ValueError, match="bit by bit"):
            differing(torch.zeros(4), torch.zeros(4, dtype=torch.float64))

    def test_patterns_have_no_gradient_and_no_pattern_is_made_up(self) -> None:
        assert bit_pattern(torch.ones(2, requires_grad=True)).tolist() == [0x3F800000] * 2
        assert bit_pattern(torch.ones(1, dtype=torch.bfloat16)).dtype == torch.int16
        assert bit_pattern(torch.ones(1, dtype=torch.float64)).dtype == torch.int64
        with pytest.raises(TypeError, match="complex64"):
            bit_pattern(torch.zeros(1, dtype=torch.complex64))


class TestUlps:
    @settings(deadline=None)
    @given(st.integers(-(2**31), 2**31 - 1), st.integers(-(2**31), 2**31 - 1))
    def test_float32_distance_is_the_difference_of_ranks(self, first: int, second: int) -> None:
        def rank(pattern: int) -> int:
            return pattern if pattern >= 0 else -(pattern + 2**31) - 1

        a = torch.tensor([first], dtype=torch.int32).view(torch.float32)
        b = torch.tensor([second], dtype=torch.int32).view(torch.float32)
        nan = bool(a.isnan() | b.isnan())
        expected = 2**63 - 1 if nan else abs(rank(first) - rank(second))
        assert ulp_distance(a, b).tolist() == ulp_distance(b, a).tolist() == [expected]

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_neighbours_are_one_apart_across_zero_too(self, dtype: torch.dtype) -> None:
        tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        ladder = torch.tensor([-1.0, -tiny, -0.0, 0.0, tiny, 1.0, 1.0 + torch.finfo(dtype).eps], dtype=dtype)
        assert ulp_distance(ladder[1:], ladder[:-1])[1:4].tolist() == [1, 1, 1]
        assert int(ulp_distance(ladder[5], ladder[6])) == 1

    def test_distance_that_does_not_fit_and_nan_saturate(self) -> None:
        huge = torch.tensor([torch.finfo(torch.float64).max, math.nan, 1.0], dtype=torch.float64)
        other = torch.tensor([-huge[0], math.nan, math.inf], dtype=torch.float64)
        distance = ulp_distance(huge, other).tolist()
        assert distance[:2] == [2**63 - 1] * 2
        assert 0 < distance[2] < 2**63 - 1

    def test_integers_and_unequal_shapes_are_refused(self) -> None:
        with pytest.raises(TypeError, match="floating point"):
            ulp_distance(torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
        with pytest.raises(ValueError, match="cannot compare"):
            ulp_distance(torch.zeros(2), torch.zeros(1))


class TestShardHashes:
    @pytest.mark.parametrize("dtype", TYPES)
    @pytest.mark.parametrize("shape", [(8,), (8, 3), (8, 5, 7), (8, 0)])
    def test_a_shard_hashes_alike_alone_in_any_company_and_at_any_strides(
        self, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> None:
        x = values(shape, dtype)
        whole = shard_hashes(x)
        assert whole.shape == (8, 2)
        for count in (1, 2, 4):
            cut = torch.cat([shard_hashes(part) for part in x.split(count)])
            assert same_bits(cut, whole)
        strided = torch.stack((x, x), dim=-1)[..., 0]
        assert same_bits(shard_hashes(strided), whole)

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_one_ulp_in_any_element_changes_its_shard_and_no_other(self, dtype: torch.dtype) -> None:
        x = values((4, 3, 5), dtype)
        whole = shard_hashes(x)
        for shard in range(4):
            for i in range(3):
                for j in range(5):
                    changed = (shard_hashes(flip_last_bit(x, shard, i, j)) != whole).tolist()
                    assert changed == [[row == shard] * 2 for row in range(4)]

    def test_a_swap_is_seen_that_a_sum_of_patterns_misses(self) -> None:
        x = values((2, 9), torch.float32)
        y = swapped(x, (0, 3), (0, 7))
        assert bit_pattern(x).sum(-1).tolist() == bit_pattern(y).sum(-1).tolist()
        assert (shard_hashes(x) != shard_hashes(y)).tolist() == [[True, True], [False, False]]

    def test_two_changes_of_equal_sum_are_seen_that_a_sum_of_patterns_misses(self) -> None:
        x = values((1, 8), torch.float32)
        y = x.clone()
        y.view(torch.int32)[0, 0] += 1
        y.view(torch.int32)[0, 5] -= 1
        assert int(bit_pattern(x).sum()) == int(bit_pattern(y).sum())
        assert bool((shard_hashes(x) != shard_hashes(y)).all())

    def test_the_sign_of_a_zero_is_seen(self) -> None:
        x = torch.zeros(1, 6, dtype=torch.bfloat16)
        y = x.clone()
        y[0, 4] = -0.0
        assert bool((x == y).all())
        assert bool((shard_hashes(x) != shard_hashes(y)).all())

    def test_shards_that_are_exchanged_exchange_their_hashes_and_change_the_digest(self) -> None:
        x = values((4, 6), torch.float32)
        order = [1, 0, 3, 2]
        assert same_bits(shard_hashes(x[order]), shard_hashes(x)[order])

        def shown(x: Tensor) -> str:
            return digest(
                ("w", shard, high, low) for shard, (high, low) in enumerate(shard_hashes(x).tolist())
            )

        assert shown(x) == shown(x.clone())
        assert shown(x) != shown(x[order])

    def test_dtype_and_shape_of_a_shard_are_part_of_its_hash(self) -> None:
        zeros = [
            torch.zeros(1, 6),
            torch.zeros(1, 5),
            torch.zeros(1, 2, 3),
            torch.zeros(1, 6, dtype=torch.int32),
            torch.zeros(1, 12, dtype=torch.bfloat16),
            torch.zeros(1, 0),
        ]
        assert len({tuple(shard_hashes(x)[0].tolist()) for x in zeros}) == len(zeros)

    @pytest.mark.parametrize("chunk", [1, 3, 8, 1 << 20])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
    def test_the_chunk_that_bounds_the_memory_does_not_change_the_hash(
        self, dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        x = values((2, 3, 7), dtype)
        whole = shard_hashes(x)
        monkeypatch.setattr(bits, "_CHUNK", chunk)
        assert same_bits(shard_hashes(x), whole)

    def test_the_two_streams_are_unrelated(self) -> None:
        hashes = shard_hashes(values((512, 3), torch.float32))
        assert hashes.flatten().unique().numel() == 1024

    def test_a_scalar_has_no_shards(self) -> None:
        with pytest.raises(ValueError, match="leading dimension"):
            shard_hashes(torch.tensor(1.0))


class TestDigest:
    def test_it_is_a_sha256_that_no_order_of_entries_changes(self) -> None:
        entries = [("b", 0, 1, 2), ("a", 1, 3, -4), ("a", 0, 5, 6)]
        lines = b'["a", 0, 5, 6]\n["a", 1, 3, -4]\n["b", 0, 1, 2]\n'
        assert digest(entries) == digest(reversed(entries)) == hashlib.sha256(lines).hexdigest()

    def test_signed_and_unsigned_hashes_are_the_same_bits(self) -> None:
        assert digest([("a", 0, -1, 0)]) == digest([("a", 0, 2**64 - 1, 0)])

    @pytest.mark.parametrize(
        "other", [[("b", 0, 1, 2)], [("a", 1, 1, 2)], [("a", 0, 2, 1)], [("a", 0, 1, 2), ("a", 1, 0, 0)]]
    )
    def test_name_shard_hash_and_number_matter(self, other: list[tuple[str, int, int, int]]) -> None:
        assert digest([("a", 0, 1, 2)]) != digest(other)

    def test_nothing_and_a_shard_that_stands_twice_are_refused(self) -> None:
        with pytest.raises(ValueError, match="proves nothing"):
            digest([])
        with pytest.raises(ValueError, match="shard 3 of 'a' stands twice"):
            digest([("a", 3, 1, 2), ("b", 0, 0, 0), ("a", 3, 9, 9)])


class TestRowDigest:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_digests_of_shards_add_up_to_the_digest_of_the_whole(self, dtype: torch.dtype) -> None:
        logits = values((5, 24), dtype)
        whole = row_digest(logits, 0, 19)
        for width in (1, 3, 8, 12):
            parts = [row_digest(part, i * width, 19) for i, part in enumerate(logits.split(width, dim=1))]
            assert same_bits(torch.stack(parts).sum(0), whole)

    def test_padding_does_not_count_and_the_last_true_column_does(self) -> None:
        logits = values((5, 24), torch.float32)
        whole = row_digest(logits, 0, 19)
        padded = logits.clone()
        padded[:, 19:] = math.nan
        assert same_bits(row_digest(padded, 0, 19), whole)
        assert same_bits(row_digest(logits[:, :19], 0, 19), whole)
        assert bool((row_digest(flip_last_bit(logits, 2, 18), 0, 19) != whole)[2])
        assert row_digest(logits, 19, 19).tolist() == [0] * 5

    def test_a_row_has_one_digest_alone_in_any_batch_and_at_any_strides(self) -> None:
        logits = values((40, 24), torch.float32)
        whole = row_digest(logits, 0, 24)
        assert same_bits(torch.cat([row_digest(row[None], 0, 24) for row in logits]), whole)
        assert same_bits(row_digest(logits.flip(0), 0, 24), whole.flip(0))
        assert same_bits(row_digest(logits.T.contiguous().T, 0, 24), whole)

    def test_exchanged_logits_are_seen_where_a_sum_of_patterns_is_blind(self) -> None:
        logits = values((3, 16), torch.float32)
        for i, j in ((2, 5), (2, 11)):
            other = swapped(logits, (1, i), (1, j))
            assert bit_pattern(logits).sum(-1).tolist() == bit_pattern(other).sum(-1).tolist()
            assert (row_digest(other, 0, 16) != row_digest(logits, 0, 16)).tolist() == [False, True, False]

    def test_a_shard_read_at_the_wrong_place_is_seen(self) -> None:
        logits = values((3, 16), torch.float32)
        moved = row_digest(logits[:, 8:], 0, 16) + row_digest(logits[:, :8], 8, 16)
        assert bool((moved != row_digest(logits, 0, 16)).all())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_one_ulp_a_negative_zero_and_a_nan_are_seen(self, dtype: torch.dtype) -> None:
        logits = values((4, 10), dtype)
        logits[1, 3] = 0.0
        logits[2, 3] = math.nan
        whole = row_digest(logits, 0, 10)
        other = flip_last_bit(flip_last_bit(logits, 0, 9), 2, 3)
        other[1, 3] = -0.0
        assert (row_digest(other, 0, 10) != whole).tolist() == [True, True, True, False]

    @pytest.mark.parametrize("chunk", [1, 25, 1 << 20])
    def test_the_chunk_does_not_change_the_digest(self, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
        logits = values((7, 10), torch.float32)
        whole = row_digest(logits, 30, 99)
        monkeypatch.setattr(bits, "_CHUNK", chunk)
        assert same_bits(row_digest(logits, 30, 99), whole)
