"""A draw depends on what is drawn and on nothing else, and draws follow the softmax."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlsp.bits import same_bits
from rlsp.numerics.hashing import hash_words
from rlsp.rl.sampling import Candidates, candidates, choose, draw_keys, gumbel

PADDING = -1e30


def keys(count: int, seed: int = 1, rollout: int = 0) -> Tensor:
    index = torch.arange(count)
    return draw_keys(seed, rollout, index // 8, index % 8, index + 3)


def some_logits(rows: int, columns: int, valid: int) -> Tensor:
    logits = hash_words(5, torch.arange(rows)[:, None], torch.arange(columns)).double().mul(2.0**-61).float()
    return torch.where(torch.arange(columns) < valid, logits, PADDING)


def draw(logits: Tensor, key: Tensor, shards: int, ranks: int = 1) -> Tensor:
    """Draw one token a row with the vocabulary in `shards` virtual shards on `ranks` ranks."""
    rows, columns = logits.shape
    local, width = columns // ranks, columns // shards
    found: list[Candidates] = []
    for rank in range(ranks):
        part = logits[:, rank * local : (rank + 1) * local].reshape(rows, -1, width)
        noise = gumbel(key, rank * local, local).view_as(part)
        found.append(candidates(part, noise, rank * local))
    return choose(torch.cat([c.scores for c in found], 1), torch.cat([c.indices for c in found], 1))


class TestKeys:
    def test_every_word_of_a_draw_changes_its_key(self) -> None:
        zero, one = torch.tensor([0]), torch.tensor([1])
        base = draw_keys(7, 0, zero, zero, zero)
        others = [
            draw_keys(8, 0, zero, zero, zero),
            draw_keys(7, 1, zero, zero, zero),
            draw_keys(7, 0, one, zero, zero),
            draw_keys(7, 0, zero, one, zero),
            draw_keys(7, 0, zero, zero, one),
        ]
        assert len({int(key) for key in [base, *others]}) == 6
        assert same_bits(base, draw_keys(7, 0, zero, zero, zero))

    def test_keys_of_a_large_rollout_are_distinct(self) -> None:
        prompt, sample, position = torch.meshgrid(
            torch.arange(16), torch.arange(8), torch.arange(512), indexing="ij"
        )
        table = draw_keys(0, 0, prompt.flatten(), sample.flatten(), position.flatten())
        assert table.unique().numel() == 16 * 8 * 512


class TestNoise:
    def test_an_element_does_not_depend_on_batch_or_cut(self) -> None:
        key = keys(12)
        whole = gumbel(key, 0, 40)
        assert same_bits(torch.cat([gumbel(key, first, 5) for first in range(0, 40, 5)], 1), whole)
        assert same_bits(torch.cat([gumbel(key, 0, 37), gumbel(key, 37, 3)], 1), whole)
        assert same_bits(torch.cat([gumbel(one[None], 0, 40) for one in key]), whole)
        order = [3, 11, 0, 7]
        assert same_bits(gumbel(key[order], 0, 40), whole[order])

    def test_a_generator_with_a_state_would_depend_on_the_batch(self) -> None:
        def stateful(rows: int) -> Tensor:
            return torch.rand(rows, 40, generator=torch.Generator().manual_seed(1))

        assert not same_bits(torch.cat([stateful(1) for _ in range(12)]), stateful(12))

    def test_noise_is_finite_even_where_every_random_bit_is_equal(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for word, bound in ((0, -2.8115), (-1, 16.6356)):

            def stuck(x: Tensor, word: int = word) -> Tensor:
                return torch.full_like(x, word)

            monkeypatch.setattr("rlsp.numerics.hashing.mix64_", stuck)
            assert float(gumbel(torch.tensor([5]), 0, 1)) == pytest.approx(bound, abs=1e-3)

    def test_an_even_numerator_of_24_bits_would_reach_one_or_infinite_noise(self) -> None:
        highest = torch.tensor([2**24 - 1], dtype=torch.int64).to(torch.float32)
        assert float((highest + 0.5) * 2.0**-24) == 1.0
        assert math.isinf(float(-torch.log(-torch.log((highest + 0.5) * 2.0**-24))))

    def test_noise_has_the_moments_of_the_gumbel_distribution(self) -> None:
        noise = gumbel(keys(512), 0, 512).double()
        mean, variance = float(noise.mean()), float(noise.var())
        assert mean == pytest.approx(0.57722, abs=0.0125)  # five standard errors
        assert variance == pytest.approx(math.pi**2 / 6, abs=0.035)
        neighbours = torch.corrcoef(torch.stack((noise[:, :-1].flatten(), noise[:, 1:].flatten())))[0, 1]
        rows = torch.corrcoef(torch.stack((noise[:-1].flatten(), noise[1:].flatten())))[0, 1]
        assert abs(float(neighbours)) < 0.01
        assert abs(float(rows)) < 0.01


class TestChoice:
    @settings(deadline=None, max_examples=25)
    @given(st.integers(1, 9), st.integers(1, 64), st.integers(-(2**63), 2**64 - 1))
    def test_the_cut_of_the_vocabulary_and_the_ranks_do_not_change_a_draw(
        self, rows: int, valid: int, seed: int
    ) -> None:
        logits, key = some_logits(rows, 64, valid), keys(rows, seed)
        whole = draw(logits, key, shards=1)
        assert bool((whole < valid).all())
        for shards in (2, 8, 64):
            for ranks in (1, 2):
                assert same_bits(draw(logits, key, shards, ranks), whole)

    @settings(deadline=None, max_examples=25)
    @given(st.permutations(list(range(9))), st.integers(1, 9))
    def test_the_batch_and_its_order_do_not_change_a_draw(self, order: list[int], size: int) -> None:
        logits, key = some_logits(9, 32, 29), keys(9)
        whole = draw(logits, key, shards=8)
        parts = [torch.tensor(order[i : i + size]) for i in range(0, 9, size)]
        drawn = torch.cat([draw(logits[part], key[part], shards=8) for part in parts])
        assert same_bits(drawn, whole[order])

    def test_a_candidate_is_its_shards_best_score_with_its_index_and_logit(self) -> None:
        logits, noise = some_logits(4, 24, 20).view(4, 3, 8), gumbel(keys(4), 48, 24).view(4, 3, 8)
        found = candidates(logits, noise, 48)
        for row in range(4):
            for shard in range(3):
                scores = (logits + noise)[row, shard].tolist()
                column = scores.index(max(scores))
                assert float(found.scores[row, shard]) == scores[column]
                assert int(found.indices[row, shard]) == 48 + 8 * shard + column
                assert float(found.logits[row, shard]) == float(logits[row, shard, column])

    def test_ties_go_to_the_lowest_index_within_and_across_shards_in_any_order(self) -> None:
        zeros = torch.zeros(2, 4, 8)
        zeros[1, :3] = -1.0
        zeros[1, 3, :5] = -1.0
        found = candidates(zeros, torch.zeros_like(zeros), 0)
        assert found.indices.tolist() == [[0, 8, 16, 24], [0, 8, 16, 29]]
        assert choose(found.scores, found.indices).tolist() == [0, 29]
        assert choose(found.scores.flip(1), found.indices.flip(1)).tolist() == [0, 29]

    def test_a_shard_of_padding_alone_is_never_chosen(self) -> None:
        assert bool((draw(some_logits(64, 64, 3), keys(64), shards=8) < 3).all())

    @pytest.mark.parametrize("column", [0, 5, 31])
    def test_nan_is_refused_by_row_and_never_drawn_around(self, column: int) -> None:
        logits = some_logits(4, 32, 32)
        logits[2, column] = math.nan
        with pytest.raises(ValueError, match=r"NaN among the logits of rows \[2\]"):
            draw(logits, keys(4), shards=4, ranks=2)


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    expected = probabilities.double() * int(counts.sum())
    return float(((counts - expected) ** 2 / expected).sum())


def sample_counts(logits: Tensor, temperature: float, seed: int, draws: int = 20_000) -> Tensor:
    rows = (logits / temperature).expand(draws, -1)
    return draw(rows, keys(draws, seed), shards=4).bincount(minlength=logits.numel())


class TestDistribution:
    LOGITS = torch.tensor([2.0, -1.0, 0.5, 0.0, 1.5, -2.0, 1.0, -0.5])
    CRITICAL = 29.9  # chi-square with 7 degrees of freedom exceeds this once in 10,000

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
    @pytest.mark.parametrize("seed", [0, 1, 2**63])
    def test_draws_follow_the_softmax_at_their_temperature_and_at_no_other(
        self, temperature: float, seed: int
    ) -> None:
        counts = sample_counts(self.LOGITS, temperature, seed)
        assert chi_square(counts, torch.softmax(self.LOGITS / temperature, 0)) < self.CRITICAL
        for other in (temperature * 0.9, temperature * 1.1):
            assert chi_square(counts, torch.softmax(self.LOGITS / other, 0)) > self.CRITICAL

    def test_positions_samples_and_prompts_alone_give_independent_draws(self) -> None:
        index, zero = torch.arange(20_000), torch.zeros(20_000, dtype=torch.int64)
        for key in (
            draw_keys(3, 0, index, zero, zero),
            draw_keys(3, 0, zero, index, zero),
            draw_keys(3, 0, zero, zero, index),
        ):
            counts = draw(self.LOGITS.expand(20_000, -1), key, shards=8).bincount(minlength=8)
            assert chi_square(counts, torch.softmax(self.LOGITS, 0)) < self.CRITICAL

    def test_rare_tokens_are_drawn_at_their_rate(self) -> None:
        logits = torch.tensor([0.0, *[math.log(1e-4)] * 31])
        counts = sample_counts(logits, 1.0, seed=11, draws=60_000)
        rate = 31e-4 / (1 + 31e-4)
        expected = 60_000 * rate
        assert abs(int(counts[1:].sum()) - expected) < 5 * math.sqrt(expected)

    def test_another_seed_or_rollout_draws_other_tokens_and_the_same_one_the_same(self) -> None:
        logits = torch.zeros(200, 32)
        tokens = draw(logits, keys(200, seed=1), shards=8)
        assert same_bits(tokens, draw(logits, keys(200, seed=1), shards=8))
        for other in (keys(200, seed=2), keys(200, seed=1, rollout=1)):
            agreeing = int((draw(logits, other, shards=8) == tokens).sum())
            assert agreeing < 25  # 200 / 32 by chance
