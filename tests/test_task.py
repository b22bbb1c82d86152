"""Tasks are pure, keyed by seed and index, and rewards tell responses apart from the first rollout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsp.config import checks
from rlsp.numerics.hashing import hash_words
from rlsp.rl.advantage import group_advantages
from rlsp.rl.task import CharacterTokenizer, LimitedTask, Prompt, Task, Tokenizer, build_task
from rlsp.rl.task.protocol import hash_content, random_integer, until_eos

TOKENIZER = CharacterTokenizer()
EOS, PAD = TOKENIZER.eos_id, TOKENIZER.pad_id


def task(kind: str = "arithmetic", *, seed: int = 1, max_operand: int = 9, reward: float = 0.5) -> Task:
    return build_task(kind, tokenizer=TOKENIZER, seed=seed, max_operand=max_operand, reward=reward)


def answer(prompt: Prompt) -> str:
    first, second = prompt.text.removesuffix("=").split("+")
    return str(int(first) + int(second))


def index_with_answer(built: Task, wanted: str) -> int:
    return next(index for index in range(1000) if answer(built.prompt(index)) == wanted)


class TestTokenizer:
    @settings(deadline=None)
    @given(st.text(st.characters(min_codepoint=32, max_codepoint=126)))
    def test_printable_ascii_survives_the_round_trip_one_id_a_character(self, text: str) -> None:
        ids = TOKENIZER.encode(text)
        assert len(ids) == len(text)
        assert TOKENIZER.decode(ids) == text

    def test_ids_are_dense_and_the_special_ones_come_last(self) -> None:
        assert TOKENIZER.encode("".join(map(chr, range(32, 127)))) == tuple(range(95))
        assert (PAD, EOS, TOKENIZER.vocab_size) == (95, 96, 97)

    @pytest.mark.parametrize(("text", "named"), [("1+é=", "'é' (U+00E9) at position 2"), ("a\n", "U+000A")])
    def test_a_character_without_token_is_named(self, text: str, named: str) -> None:
        with pytest.raises(ValueError) as refusal:  # noqa: PT011
            TOKENIZER.encode(text)
        assert named in str(refusal.value)

    @settings(deadline=None)
    @given(st.lists(st.integers(-(2**63), 2**63 - 1)))
    def test_any_id_decodes_to_one_character(self, ids: list[int]) -> None:
        assert len(TOKENIZER.decode(ids)) == len(ids)

    def test_special_and_unknown_ids_decode_to_the_replacement_sign(self) -> None:
        assert TOKENIZER.decode((*TOKENIZER.encode("7"), PAD, EOS, 97, -1)) == "7" + "\ufffd" * 4


class TestPrompts:
    @pytest.mark.parametrize("kind", ["arithmetic", "constant"])
    def test_a_prompt_is_a_sum_and_its_tokens_are_its_text(self, kind: str) -> None:
        for index in range(50):
            prompt = task(kind).prompt(index)
            first, second = prompt.text.removesuffix("=").split("+")
            assert 0 <= int(first) <= 9
            assert 0 <= int(second) <= 9
            assert TOKENIZER.decode(prompt.tokens) == prompt.text

    def test_prompts_depend_on_seed_and_index_alone(self) -> None:
        texts = [task(max_operand=99).prompt(index).text for index in range(40)]
        assert [task(max_operand=99).prompt(index).text for index in reversed(range(40))] == texts[::-1]
        assert len(set(texts)) > 30
        other = [task(seed=2, max_operand=99).prompt(index).text for index in range(40)]
        assert sum(a == b for a, b in zip(texts, other, strict=True)) < 3

    def test_every_operand_up_to_the_largest_occurs(self) -> None:
        operands = {int(task(max_operand=4).prompt(index).text[0]) for index in range(200)}
        assert operands == {0, 1, 2, 3, 4}
        assert task(max_operand=0).prompt(3).text == "0+0="

    def test_both_tasks_ask_the_same(self) -> None:
        assert task().prompt(5) == task("constant").prompt(5)

    def test_random_integers_are_even(self) -> None:
        counts = torch.tensor([random_integer(7, 1, index) for index in range(7000)]).bincount()
        assert float(((counts - 1000) ** 2 / 1000.0).sum()) < 27.9  # 6 degrees of freedom, once in 10,000

    def test_illegal_ranges_indices_and_kinds_are_refused(self) -> None:
        with pytest.raises(ValueError, match="max_operand must be at least 0, not -1"):
            task(max_operand=-1)
        with pytest.raises(ValueError, match="index must be at least 0, not -3"):
            task().prompt(-3)
        with pytest.raises(ValueError, match="unknown task 'chess'; legal: arithmetic, constant"):
            task("chess")
        with pytest.raises(ValueError, match="must be finite, not nan"):
            task("constant", reward=math.nan)


class TestReward:
    def reward(self, text: str, *after: int, wanted: str = "12") -> float:
        built = task()
        return built.reward(index_with_answer(built, wanted), (*TOKENIZER.encode(text), *after))

    def test_the_exact_answer_earns_one_whether_eos_or_the_limit_ends_it(self) -> None:
        assert self.reward("12", EOS) == self.reward("12") == 1.0
        assert self.reward("7", EOS, wanted="7") == 1.0

    @pytest.mark.parametrize(
        "text", ["", " 12", "12 ", "012", "+12", "13", "1", "12.", "121", "12" * 20, "x12"]
    )
    def test_anything_else_earns_less_than_one_half(self, text: str) -> None:
        assert 0.0 <= self.reward(text, EOS) < 0.5

    @settings(deadline=None)
    @given(st.lists(st.integers(0, 99), max_size=20), st.integers(0, 300))
    def test_any_response_has_a_finite_reward_and_only_the_answer_earns_one(
        self, response: list[int], index: int
    ) -> None:
        built = task()
        reward = built.reward(index, response)
        exact = TOKENIZER.decode(until_eos(response, EOS)) == answer(built.prompt(index))
        assert reward == 1.0 if exact else 0.0 <= reward < 0.45
        assert reward == built.reward(index, tuple(response))

    def test_an_empty_response_earns_nothing(self) -> None:
        assert self.reward("") == self.reward("", EOS) == 0.0

    def test_credit_rises_from_letters_to_digits_to_the_right_digits_to_stopping(self) -> None:
        ladder = ["xyz", "x5z", "555", "155", "125", "12"]
        earned = [self.reward(text, EOS) for text in ladder]
        assert earned == sorted(set(earned))

    def test_the_formula_is_the_documented_one(self) -> None:
        assert self.reward("1x", EOS) == 0.2 * 1 / 2 + 0.15 * 1 / 2 + 0.1 * 1 / 2
        assert self.reward("12ab") == 0.2 * 2 / 4 + 0.15 * 2 / 2 + 0.1 * 2 / 4

    def test_the_first_eos_ends_the_response_and_whatever_follows_is_not_read(self) -> None:
        exact = self.reward("12", EOS)
        assert exact == self.reward("12", EOS, EOS) == self.reward("12", EOS, *TOKENIZER.encode("99"), PAD)
        assert self.reward("", EOS, *TOKENIZER.encode("12")) == 0.0

    def test_padding_that_a_model_draws_is_a_wrong_character_and_no_end(self) -> None:
        assert self.reward("12", PAD, EOS) < 0.5

    def test_eos_counts_once_where_padding_has_the_same_id(self) -> None:
        @dataclass(frozen=True)
        class SharedEnd(CharacterTokenizer):
            @property
            def pad_id(self) -> int:  # type: ignore[override]
                return EOS

        built = build_task("arithmetic", tokenizer=SharedEnd(), seed=1, max_operand=9, reward=0.0)
        index = index_with_answer(built, "12")
        padded = (*TOKENIZER.encode("12"), EOS, EOS, EOS)
        assert built.reward(index, padded) == 1.0
        assert until_eos(padded, EOS) == TOKENIZER.encode("12")

    @pytest.mark.parametrize("length", [8, 16, 64])
    def test_an_untrained_models_rewards_vary_within_nearly_every_group(self, length: int) -> None:
        built = task()
        varied = 0
        for prompt in range(60):
            drawn = hash_words(9, prompt, torch.arange(8)[:, None], torch.arange(length)).remainder(97)
            rewards = [built.reward(prompt, row) for row in drawn.tolist()]
            varied += bool(group_advantages(rewards, 8).any())
        assert varied >= 58

    def test_a_reward_for_right_answers_alone_would_not_vary(self) -> None:
        built = task()
        drawn = hash_words(9, torch.arange(480)[:, None], torch.arange(16)).remainder(97).tolist()
        assert [built.reward(0, row) for row in drawn].count(1.0) == 0

    @pytest.mark.parametrize("response", [(), (EOS,), (1, 2, 3)])
    def test_the_constant_task_pays_the_same_for_everything(self, response: Sequence[int]) -> None:
        assert task("constant", reward=0.25).reward(3, response) == 0.25


class TestContentHash:
    def test_it_changes_with_whatever_changes_prompts_or_rewards(self) -> None:
        class OtherTokenizer(CharacterTokenizer):
            @property
            def content_hash(self) -> str:
                return "0" * 64

        built = [
            task(),
            task(seed=2),
            task(max_operand=10),
            task("constant"),
            task("constant", reward=1.0),
            build_task("arithmetic", tokenizer=OtherTokenizer(), seed=1, max_operand=9, reward=0.5),
        ]
        hashes = {each.content_hash for each in built}
        assert len(hashes) == len(built)
        assert all(len(value) == 64 for value in hashes)
        assert task().content_hash == task().content_hash

    def test_a_parameter_that_a_task_does_not_read_is_not_in_its_hash(self) -> None:
        assert task(reward=0.5).content_hash == task(reward=0.7).content_hash

    def test_the_order_of_the_fields_does_not_matter_and_nan_is_refused(self) -> None:
        assert hash_content({"a": 1, "b": "x"}) == hash_content({"b": "x", "a": 1})
        with pytest.raises(ValueError, match="not JSON compliant"):
            hash_content({"a": math.nan})


def test_a_task_of_ones_own_needs_no_base_class() -> None:
    @dataclass(frozen=True)
    class Shout:
        tokenizer: Tokenizer
        seed: int

        @property
        def name(self) -> str:
            return "shout"

        @property
        def content_hash(self) -> str:
            return hash_content(
                {
                    "generator": self.name,
                    "version": 1,
                    "seed": self.seed,
                    "tokens": self.tokenizer.content_hash,
                }
            )

        def prompt(self, index: int) -> Prompt:
            word = ("stop", "go")[random_integer(2, self.seed, index)]
            return Prompt(tokens=self.tokenizer.encode(word), text=word)

        def reward(self, index: int, response: Sequence[int]) -> float:
            body = self.tokenizer.decode(until_eos(response, *self.tokenizer.eos_ids))
            return float(body == self.prompt(index).text.upper())

    own: Task = Shout(TOKENIZER, 1)
    assert own.reward(0, TOKENIZER.encode(own.prompt(0).text.upper())) == 1.0
    assert {own.prompt(index).text for index in range(20)} == {"stop", "go"}


def test_the_smallest_legal_vocabulary_holds_every_character() -> None:
    assert CharacterTokenizer().vocab_size == checks.CHARACTERS


def test_limits_are_keyed_by_the_prompt_and_some_are_empty() -> None:
    plain = build_task("arithmetic", tokenizer=CharacterTokenizer(), seed=0, max_operand=9, reward=1.0)
    limited = LimitedTask(plain, 0, 24)
    limits = [limited.prompt(index).limit for index in range(200)]
    assert limits == [limited.prompt(index).limit for index in range(200)]
    assert plain.prompt(0).limit is None
    assert set(limits) == set(range(25))
    assert 10 < limits.count(0) < 45
    assert limited.content_hash != plain.content_hash
    assert limited.reward(3, ()) == plain.reward(3, ())
