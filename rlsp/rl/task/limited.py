"""Ragged responses on purpose: every prompt says how long its responses may get, and some say not at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from rlsp.rl.task.protocol import Prompt, Task, hash_content, random_integer

_STREAM: Final = 0x4C494D4954454421  # "LIMITED!": apart from whatever else a seed is hashed for.
_ONE_IN: Final = 8


@dataclass(frozen=True)
class LimitedTask:
    """Give another task's prompts a limit each: 0 for one prompt in eight, else evenly from 1 … longest.

    A limit of 0 leaves an empty response: the sequence counts for nothing and must disturb nothing.

    Attributes:
        task: Whose prompts and rewards these are.
        seed: Keys the limits.
        longest: The largest limit, tokens.
    """

    task: Task
    seed: int
    longest: int

    def __post_init__(self) -> None:
        """Refuse a limit that leaves no token."""
        if self.longest < 1:
            raise ValueError(f"the longest response must have at least 1 token, not {self.longest}")

    @property
    def name(self) -> str:
        """What the manifest calls the task."""
        return self.task.name

    @property
    def content_hash(self) -> str:
        """64 hex characters over the task and the limits."""
        return hash_content({"limited": self.task.content_hash, "seed": self.seed, "longest": self.longest})

    def prompt(self, index: int) -> Prompt:
        """Make the prompt of an index, with its limit."""
        empty = random_integer(_ONE_IN, _STREAM, self.seed, index, 0) == 0
        limit = 0 if empty else 1 + random_integer(self.longest, _STREAM, self.seed, index, 1)
        return replace(self.task.prompt(index), limit=limit)

    def reward(self, index: int, response: Sequence[int]) -> float:
        """Score as the task does."""
        return self.task.reward(index, response)
