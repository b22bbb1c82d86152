"""A task of the user's own, made by a function that a config names."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsp.rl.task.protocol import Prompt, Task, TaskError, Tokenizer, hash_content


@dataclass(frozen=True)
class CustomTask:
    """Ask what a user's task asks, and see that its prompts are prompts.

    Attributes:
        task: The user's.
        factory: The function that made it, as module:function.
        source_hash: SHA-256 of the file that the function is in; empty if it is in none.
        tokenizer: What the task was made with.
    """

    task: Task
    factory: str
    source_hash: str
    tokenizer: Tokenizer

    @property
    def name(self) -> str:
        """What the task calls itself."""
        return self.task.name

    @property
    def content_hash(self) -> str:
        """64 hex characters over the task's own hash, the function's name and its file."""
        return hash_content(
            {"factory": self.factory, "source": self.source_hash, "content": self.task.content_hash}
        )

    def prompt(self, index: int) -> Prompt:
        """Make the prompt of an index.

        Raises:
            TaskError: The task raised, or what it made is no prompt for the tokenizer.
        """
        place = f"{self.factory}: prompt {index}"
        try:
            prompt: Any = self.task.prompt(index)
        except Exception as error:
            raise TaskError(f"{place}: raised {type(error).__name__}: {error}") from error
        if not isinstance(prompt, Prompt):
            raise TaskError(f"{place}: is {type(prompt).__name__}, no rlsp.rl.task.Prompt")
        size = self.tokenizer.vocab_size
        if not prompt.tokens or not all(type(t) is int and 0 <= t < size for t in prompt.tokens):
            raise TaskError(f"{place}: its tokens must be a tuple of at least one integer in 0..{size - 1}")
        return prompt

    def reward(self, index: int, response: Sequence[int]) -> float:
        """Score as the task does."""
        return self.task.reward(index, response)


def make_custom(factory: str, *, tokenizer: Tokenizer, seed: int) -> CustomTask:
    """Import `module:function`, call it with `tokenizer` and `seed`, and look at what it made.

    Raises:
        TaskError: It cannot be imported or called, or made what is no task.
    """
    module, _, name = factory.partition(":")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        task = function(tokenizer=tokenizer, seed=seed)
    except Exception as error:
        raise TaskError(f"{factory}: {type(error).__name__}: {error}") from error
    members = ("name", "content_hash", "prompt", "reward")
    if absent := [member for member in members if not hasattr(task, member)]:
        raise TaskError(f"{factory}: made {type(task).__name__}, which has no {', '.join(absent)}")
    if not isinstance(task.content_hash, str) or not re.fullmatch(r"[0-9a-f]{64}", task.content_hash):
        raise TaskError(f"{factory}: its content_hash must be 64 hex characters, as hash_content makes them")
    return CustomTask(task, factory, _source_hash(function), tokenizer)


def _source_hash(function: Callable[..., Any]) -> str:
    try:
        path = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:
        return ""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""
