"""The arithmetic prompts with one reward for everything: a control, whose advantages are exactly zero."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlsp.rl.task.arithmetic import Sums
from rlsp.rl.task.protocol import Prompt, hash_content


@dataclass(frozen=True)
class ConstantTask:
    """Reward every response alike.

    Attributes:
        sums: The prompts.
        value: The reward, finite.
    """

    sums: Sums
    value: float

    def __post_init__(self) -> None:
        """Refuse a reward that is not a number."""
        if not math.isfinite(self.value):
            raise ValueError(f"the constant reward must be finite, not {self.value}")

    @property
    def name(self) -> str:
        """What the manifest calls the task."""
        return "constant"

    @property
    def content_hash(self) -> str:
        """64 hex characters over prompts and reward."""
        return hash_content({"generator": self.name, "version": 1, "value": self.value, **self.sums.fields()})

    def prompt(self, index: int) -> Prompt:
        """Make the prompt of an index, as the arithmetic task has it."""
        return self.sums.prompt(index)

    def reward(self, index: int, response: Sequence[int]) -> float:
        """Return the constant."""
        return self.value
