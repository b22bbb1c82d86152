"""Prompts and rewards of reasoning-gym, any of its generators by name. It comes with the extra `tasks`."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final

from rlsp.rl.task.extract import number
from rlsp.rl.task.jsonl import write_prompt
from rlsp.rl.task.protocol import Prompt, TaskError, Tokenizer, hash_content, random_integer, until_eos
from rlsp.rl.task.rows import RowError, look_up
from rlsp.rl.task.scorer import answer_of
from rlsp.rl.task.tokenizer import CharacterTokenizer

_STREAM: Final = 0x524541534F4E2121  # "REASON!!": apart from whatever else a seed is hashed for.
_VERSION: Final = 1
"""To be raised whenever a prompt or a reward changes for the same fields and the same reasoning-gym."""

_SEEDS: Final = 2**31  # generators add an item's index to the seed, and some take 32 bits
_ITEMS: Final = 10**9  # "size" is virtual, but some generators refuse an index beyond it
_ITEM_OPTIONS: Final = ("seed", "size")
_EXPRESSION: Final = "metadata.expression"


@dataclass(frozen=True, eq=False)
class ReasoningGymTask:
    """Ask a generator's items, and let it score the answer that a response has.

    Attributes:
        dataset: The generator.
        dataset_name: Its name.
        options: Its configuration as JSON.
        tokenizer: What turns prompts into ids and responses into text.
        seed: Keys the items.
        where: Where responses have their answers, as `answer_of` takes it.
        prompt_key: The part of an item that is asked; None for the bare expression, if there is one and the
            tokenizer knows characters only, else the question.
        max_prompt_tokens: Longest legal prompt; None for any.
        package: Version of reasoning-gym.
    """

    dataset: Any
    dataset_name: str
    options: str
    tokenizer: Tokenizer
    seed: int
    where: str
    prompt_key: str | None
    max_prompt_tokens: int | None
    package: str

    @property
    def name(self) -> str:
        """What the manifest calls the task."""
        return f"reasoning_gym/{self.dataset_name}"

    @property
    def content_hash(self) -> str:
        """64 hex characters over generator, options, version of the package, seed, answers and tokenizer."""
        return hash_content(
            {
                "generator": self.name,
                "version": _VERSION,
                "package": self.package,
                "options": self.options,
                "seed": self.seed,
                "where": self.where,
                "prompt": self.prompt_key or "",
                "max_prompt_tokens": self.max_prompt_tokens or 0,
                "tokenizer": self.tokenizer.content_hash,
            }
        )

    def prompt(self, index: int) -> Prompt:
        """Make the prompt of an index.

        Raises:
            TaskError: The generator fails, or the prompt cannot be encoded or is too long; names the item.
        """
        try:
            messages = [("user", self._text(self._item(index)))]
            return write_prompt(messages, self.tokenizer, self.max_prompt_tokens)
        except RowError as error:
            raise TaskError(f"reasoning-gym {self.dataset_name}, item {index}: {error}") from error

    def reward(self, index: int, response: Sequence[int]) -> float:
        """Let the generator score the answer in what stands before the first EOS; without one pay nothing."""
        item = self._item(index)
        text = self.tokenizer.decode(until_eos(response, *self.tokenizer.eos_ids))
        answer = answer_of(text, self.where, numeric=number(str(item["answer"])) is not None)
        return float(self.dataset.score_answer(answer=answer, entry=item)) if answer else 0.0

    def _item(self, index: int) -> Mapping[str, Any]:
        if not 0 <= index < _ITEMS:
            raise ValueError(f"an item's index must be in 0..{_ITEMS - 1}, not {index}")
        try:
            item: Mapping[str, Any] = self.dataset[index]
        except Exception as error:
            place = f"reasoning-gym {self.dataset_name}, item {index}"
            raise TaskError(f"{place}: {type(error).__name__}: {error}") from error
        return item

    def _text(self, item: Mapping[str, Any]) -> str:
        if self.prompt_key is not None:
            found = look_up(item, self.prompt_key)
            if not isinstance(found, str):
                known = ", ".join([*item, *(f"metadata.{key}" for key in item["metadata"])])
                raise RowError(f"task.prompt_key={self.prompt_key} names no text of it (it has {known})")
            return found
        expression = look_up(item, _EXPRESSION)
        if isinstance(self.tokenizer, CharacterTokenizer) and isinstance(expression, str):
            return f"{expression} ="
        return str(item["question"])


def is_installed() -> bool:
    """Tell whether reasoning-gym is there, without importing it."""
    return importlib.util.find_spec("reasoning_gym") is not None


def open_reasoning_gym(
    name: str,
    options: Mapping[str, Any],
    *,
    tokenizer: Tokenizer,
    seed: int,
    where: str,
    prompt_key: str | None,
    max_prompt_tokens: int | None,
) -> ReasoningGymTask:
    """Make a generator and look at its first item.

    Raises:
        TaskError: reasoning-gym is not there, has no such generator, or its options or first item are bad.
    """
    if not is_installed():
        raise TaskError("reasoning-gym is not installed: it comes with `pip install 'rlsp[tasks]'`")
    known = importlib.import_module("reasoning_gym.factory").DATASETS
    if name not in known:
        near = get_close_matches(name, known, n=3) or sorted(known)
        raise TaskError(f"reasoning-gym has no dataset {name}; it has {', '.join(near)}")
    if reserved := [key for key in _ITEM_OPTIONS if key in options]:
        raise TaskError(
            f"{', '.join(reserved)}: not in task.dataset_config: `seed` keys the items, without end"
        )
    try:
        dataset = importlib.import_module("reasoning_gym").create_dataset(
            name, seed=random_integer(_SEEDS, _STREAM, seed), size=_ITEMS, **options
        )
    except Exception as error:  # whatever a generator has against its options
        raise TaskError(f"reasoning-gym {name}: {type(error).__name__}: {error}") from error
    task = ReasoningGymTask(
        dataset,
        name,
        json.dumps(dict(options), sort_keys=True),
        tokenizer,
        seed,
        where,
        prompt_key,
        max_prompt_tokens,
        importlib.metadata.version("reasoning-gym"),
    )
    if task.prompt(0) != task.prompt(0):
        raise TaskError(f"reasoning-gym {name}: item 0 is another one each time: prompts must be repeatable")
    return task
