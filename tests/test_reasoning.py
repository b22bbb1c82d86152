"""reasoning-gym's generators as tasks: by name, seeded, their scores behind rlsp's search for answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from command import Console

from rlsp.config import Config
from rlsp.rl.reward import Apart, score
from rlsp.rl.task import CharacterTokenizer, Message, Prompt, TaskError, reasoning
from rlsp.rl.task.reasoning import ReasoningGymTask, open_reasoning_gym
from rlsp.task import judge_of, open_task

TOKENIZER = CharacterTokenizer()
SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}

needs_package = pytest.mark.skipif(
    not reasoning.is_installed(), reason="needs reasoning-gym, the extra `tasks`"
)


@dataclass(frozen=True)
class AnyTokenizer:
    """A tokenizer that is not the built-in one and knows every character."""

    name: ClassVar[str] = "any"
    template_hash: ClassVar[None] = None
    vocab_size: ClassVar[int] = 0x110002
    pad_id: ClassVar[int] = 0x110000
    eos_ids: ClassVar[tuple[int, ...]] = (0x110001,)
    content_hash: ClassVar[str] = "a" * 64

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        return Prompt(self.encode(messages[-1][1]), messages[-1][1])

    def decode(self, ids: Any) -> str:
        return "".join(map(chr, ids))


def opened(name: str = "chain_sum", **changes: Any) -> ReasoningGymTask:
    options = changes.pop("options", SMALL)
    settings = {
        "tokenizer": TOKENIZER,
        "seed": 3,
        "where": "exact",
        "prompt_key": None,
        "max_prompt_tokens": None,
    }
    return open_reasoning_gym(name, options, **{**settings, **changes})


def reward(task: ReasoningGymTask, index: int, text: str) -> float:
    return task.reward(index, task.tokenizer.encode(text))


@needs_package
class TestItems:
    def test_characters_get_the_bare_expression_and_others_the_question(self) -> None:
        assert opened().prompt(0).text.endswith(" =")
        assert len(opened().prompt(0).text) == len("1 + 1 =")
        question = opened(tokenizer=AnyTokenizer()).prompt(0).text
        assert question.startswith("State the final answer")
        assert question.endswith(opened().prompt(0).text)
        assert opened(prompt_key="question").prompt(0).text == question
        assert opened(prompt_key="metadata.expression").prompt(0).text + " =" == opened().prompt(0).text

    def test_the_seed_makes_the_items_and_neighbouring_seeds_share_none(self) -> None:
        options = {"min_terms": 4, "max_terms": 4, "min_digits": 3, "max_digits": 3}
        texts = [opened(options=options).prompt(index).text for index in range(30)]
        assert [opened(options=options).prompt(index).text for index in reversed(range(30))] == texts[::-1]
        other = {opened(options=options, seed=4).prompt(index).text for index in range(30)}
        assert len({*texts}) == 30
        assert not other & {*texts}

    def test_the_right_answer_is_found_and_a_negative_one_too(self) -> None:
        task = opened()
        answers = {}
        for index in range(60):
            left, sign, right = task.prompt(index).text.split()[:3]
            answers[index] = int(left) + int(right) * {"+": 1, "-": -1}[sign]
        assert min(answers.values()) < 0
        for index, answer in answers.items():
            assert reward(task, index, str(answer)) == 1.0
            assert reward(task, index, f"<answer>{answer}</answer> 99") == 1.0
            assert reward(task, index, f"it is {answer}") == 1.0
            assert reward(task, index, str(answer + 100)) < 1.0
        assert reward(task, 0, "") == reward(task, 0, "none") == 0.0

    def test_answers_are_taken_from_where_the_scorer_says(self) -> None:
        task = opened(where="tag")
        assert reward(task, 0, "5") == 0.0

    def test_the_hash_holds_whatever_makes_items_or_scores(self) -> None:
        variants = [
            opened(),
            opened(seed=4),
            opened("gcd", options={}),
            opened(options={**SMALL, "max_terms": 3}),
            opened(where="number"),
            opened(prompt_key="question"),
            opened(tokenizer=AnyTokenizer(), max_prompt_tokens=500),
        ]
        assert len({each.content_hash for each in variants}) == len(variants)
        assert opened().content_hash == opened(options=dict(reversed(SMALL.items()))).content_hash


@needs_package
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "chain_sun"}, "reasoning-gym has no dataset chain_sun; it has chain_sum"),
        (
            {"options": {"terms": 2}},
            "TypeError: ChainSumConfig.__init__() got an unexpected keyword argument",
        ),
        ({"options": {"min_terms": 9}}, "reasoning-gym chain_sum: AssertionError: max_terms must be >="),
        ({"options": {"size": 5}}, "size: not in task.dataset_config: `seed` keys the items, without end"),
        ({"prompt_key": "metadata.nothing"}, "item 0: task.prompt_key=metadata.nothing names no text of it"),
        ({"max_prompt_tokens": 3}, "item 0: the prompt has 7 tokens: task.max_prompt_tokens allows 3"),
        ({"name": "maze", "options": {}}, "reasoning-gym maze, item 0: character '\\n' (U+000A)"),
    ],
    ids=["name", "option", "value", "size", "key", "long", "characters"],
)
def test_what_cannot_be_asked_is_refused_in_the_generators_words(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(TaskError) as refusal:
        opened(**changes)
    assert said in str(refusal.value)


@needs_package
def test_a_config_makes_the_task_and_its_rewards_come_from_a_process_apart(
    compose: Callable[..., Config],
) -> None:
    config = compose("task=reasoning_gym", "task.dataset_config={max_terms: 2, max_digits: 1}")
    assert config.task.dataset_config == {"max_terms": 2, "max_digits": 1}
    tokenizer, task = open_task(config)
    judge = judge_of(config, task)
    assert isinstance(judge, Apart)
    responses = [tokenizer.encode(str(number)) for number in range(10)]
    with closing(judge):
        found = score(judge, responses, rollout=0, first=7, samples=5, decode=tokenizer.decode, within_s=30.0)
    assert found == [task.reward(7 + place // 5, response) for place, response in enumerate(responses)]


@needs_package
def test_the_command_refuses_what_cannot_be_asked(rlsp_command: Console) -> None:
    assert rlsp_command("task=reasoning_gym", "task.dataset=chain_sun") == 2
    assert rlsp_command.errors.splitlines()[1:] == [
        "  task.dataset=chain_sun: legal: what can be asked here; "
        "reasoning-gym has no dataset chain_sun; it has chain_sum, decimal_chain_sum"
    ]
    assert rlsp_command.left() == []
    assert rlsp_command("task=reasoning_gym", "task.dataset_config.max_terms=3") == 0
    assert rlsp_command.jobs[0].config.task.dataset_config == {"max_terms": 3}


def test_without_the_package_the_run_is_refused_with_the_way_to_get_it(
    rlsp_command: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reasoning, "is_installed", lambda: False)
    assert rlsp_command("task=reasoning_gym") == 2
    assert rlsp_command.errors.splitlines()[1:] == [
        "  task.dataset=chain_sum: legal: what can be asked here; "
        "reasoning-gym is not installed: it comes with `pip install 'rlsp[tasks]'`"
    ]
    assert rlsp_command.left() == []


def test_a_mapping_of_options_survives_plain_json_and_is_hashed(compose: Callable[..., Config]) -> None:
    config = compose("task=reasoning_gym", "task.dataset_config={b: [1, x], a: true}")
    again = compose("task=reasoning_gym", "task.dataset_config={a: true, b: [1, x]}")
    assert config == again
    assert (config.config_hash, hash(config)) == (again.config_hash, hash(again))
    assert config.config_hash != compose("task=reasoning_gym").config_hash
