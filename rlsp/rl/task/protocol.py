"""What a task is: prompts by index, and a reward for a response.

To write one's own, make a frozen dataclass with the members of `Task`; nothing has to be inherited:

    @dataclass(frozen=True)
    class Shout:
        tokenizer: Tokenizer
        seed: int

        @property
        def name(self) -> str:
            return "shout"

        @property
        def content_hash(self) -> str:
            # Everything that prompts and rewards depend on, and a version to raise when this code changes.
            fields = {"generator": self.name, "version": 1, "seed": self.seed}
            return hash_content({**fields, "tokenizer": self.tokenizer.content_hash})

        def word(self, index: int) -> str:
            return ("stop", "go")[random_integer(2, self.seed, index)]

        def prompt(self, index: int) -> Prompt:
            return self.tokenizer.prompt([("user", self.word(index))])

        def reward(self, index: int, response: Sequence[int]) -> float:
            body = self.tokenizer.decode(until_eos(response, *self.tokenizer.eos_ids))
            return float(body == self.word(index).upper())

Rules: `prompt` and `reward` are pure functions of their arguments and the fields, so that any rank may call
them, in any order, any number of times; any non-negative index is legal; a prompt is never empty; a reward is
finite; a response may hold any token id, padding included, may lack an EOS (it was cut) and may be empty.
`task=custom task.factory=module:function` takes it from anywhere (docs/tasks.md). To offer it by a name of
its own, add it to `task_of` and to the enum `TaskKind`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


class TaskError(ValueError):
    """A task cannot give a prompt or a reward; the message names which one and why."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model sees it and as a person reads it.

    Attributes:
        tokens: Token ids, at least one.
        text: What they say.
        limit: The most tokens that a response to it may have, below the run's own limit; None for that one.
    """

    tokens: tuple[int, ...]
    text: str
    limit: int | None = None


Message = tuple[str, str]
"""What was said in a conversation: by whom ("user", "system", "assistant"), and the text."""


@runtime_checkable
class Tokenizer(Protocol):
    """A two-way map between text and token ids."""

    @property
    def name(self) -> str:
        """What the manifest calls its kind."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of ids; ids are 0 … vocab_size - 1."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids of which any ends a response; the first is the one to write. Empty where none does."""
        ...

    @property
    def pad_id(self) -> int:
        """The id that fills a batch; may be one of `eos_ids`: lengths and masks say what is padding."""
        ...

    @property
    def content_hash(self) -> str:
        """64 hex characters over everything that the map depends on, and what a prompt is made with."""
        ...

    @property
    def template_hash(self) -> str | None:
        """64 hex characters over the chat template alone; None where prompts are made without one."""
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """Turn text into ids, without special ones; raise ValueError for what has no id."""
        ...

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        """Write what was said so far as the model is to see it; raise ValueError for what cannot be."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Turn ids into text; never raise, since a model may draw any id."""
        ...


@runtime_checkable
class Task(Protocol):
    """Prompts by index and a reward by tokens."""

    @property
    def name(self) -> str:
        """What the manifest calls it."""
        ...

    @property
    def content_hash(self) -> str:
        """64 hex characters over everything that prompts and rewards depend on."""
        ...

    def prompt(self, index: int) -> Prompt:
        """Make the prompt of an index, the same at every call."""
        ...

    def reward(self, index: int, response: Sequence[int]) -> float:
        """Score a response to the prompt of an index: the drawn tokens, with the EOS if one was drawn."""
        ...


def until_eos(response: Sequence[int], *eos_ids: int) -> tuple[int, ...]:
    """Cut a response before its first EOS; whatever follows it is padding or was drawn past the end."""
    tokens = tuple(response)
    end = next((place for place, token in enumerate(tokens) if token in eos_ids), len(tokens))
    return tokens[:end]


def one_below_the_other(messages: Sequence[Message]) -> str:
    """Write a conversation without a template: what was said, a line break between."""
    return "\n".join(content for _, content in messages)


def random_integer(count: int, *words: int) -> int:
    """Draw from 0 … count - 1 by hashing integers, evenly up to count / 2^53."""
    from rlsp.numerics.hashing import hash_words  # torch: what only looks at a task does without it

    return (int(hash_words(*words)) >> 11) % (1 << 53) % count


def hash_content(fields: Mapping[str, str | int | float]) -> str:
    """Hash named values to 64 hex characters: the SHA-256 of their JSON in order of the names."""
    return hashlib.sha256(json.dumps(dict(fields), sort_keys=True, allow_nan=False).encode()).hexdigest()
