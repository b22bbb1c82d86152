"""Sums of two small numbers, with a reward that grades wrong answers too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rlsp.rl.task.protocol import Prompt, Tokenizer, hash_content, random_integer, until_eos

_STREAM: Final = 0x41524954484D4554  # "ARITHMET": apart from whatever else a seed is hashed for.
_VERSION: Final = 1
"""To be raised whenever a prompt or a reward changes for the same fields."""

_FORM, _VALUE, _BREVITY = 0.2, 0.15, 0.1


@dataclass(frozen=True)
class Sums:
    """Endless prompts "a+b=" by index.

    Attributes:
        tokenizer: Must know digits, "+" and "=".
        seed: Changes every operand.
        max_operand: Operands are drawn evenly from 0 … max_operand.
    """

    tokenizer: Tokenizer
    seed: int
    max_operand: int

    def __post_init__(self) -> None:
        """Refuse an empty range of operands."""
        if self.max_operand < 0:
            raise ValueError(f"max_operand must be at least 0, not {self.max_operand}")

    def operands(self, index: int) -> tuple[int, int]:
        """Draw the two operands of a prompt."""
        if index < 0:
            raise ValueError(f"a prompt's index must be at least 0, not {index}")
        count = self.max_operand + 1
        return (
            random_integer(count, _STREAM, self.seed, index, 0),
            random_integer(count, _STREAM, self.seed, index, 1),
        )

    def prompt(self, index: int) -> Prompt:
        """Make the prompt of an index."""
        first, second = self.operands(index)
        text = f"{first}+{second}="
        return self.tokenizer.prompt([("user", text)])

    def answer(self, index: int) -> str:
        """Return the digits of the right answer."""
        return str(sum(self.operands(index)))

    def fields(self) -> dict[str, str | int | float]:
        """Return what the prompts depend on, for a content hash."""
        return {
            "prompts": "sums",
            "prompts_version": _VERSION,
            "seed": self.seed,
            "max_operand": self.max_operand,
            "tokenizer": self.tokenizer.content_hash,
        }


@dataclass(frozen=True)
class ArithmeticTask:
    """Reward right answers with 1 and wrong ones with less than one half."""

    sums: Sums

    @property
    def name(self) -> str:
        """What the manifest calls the task."""
        return "arithmetic"

    @property
    def content_hash(self) -> str:
        """64 hex characters over generator, version, seed, parameters and tokenizer."""
        return hash_content({"generator": self.name, "version": _VERSION, **self.sums.fields()})

    def prompt(self, index: int) -> Prompt:
        """Make the prompt of an index, e.g. "7+5="."""
        return self.sums.prompt(index)

    def reward(self, index: int, response: Sequence[int]) -> float:
        """Score a response.

        The body is what stands before the first EOS, or the whole response if it was cut before one. It
        earns 1.0 if it is the answer, character by character: no space, no leading zero, nothing behind.
        Otherwise, with n the longer of the lengths of body and answer, it earns

            0.2 * digits / n  +  0.15 * prefix / len(answer)  +  0.1 * prefix / n,

        where `digits` counts the body's digits and `prefix` the answer's leading digits that the body starts
        with: write digits, the right ones, and stop. This is below 0.45; an empty body earns 0. Random
            tokens earn
        amounts that differ, so that an untrained model has something to learn from.
        """
        tokenizer = self.sums.tokenizer
        body = tokenizer.decode(until_eos(response, *tokenizer.eos_ids))
        answer = self.sums.answer(index)
        if body == answer:
            return 1.0
        longest = max(len(body), len(answer))
        digits = sum(character in "0123456789" for character in body)
        prefix = 0
        while prefix < min(len(body), len(answer)) and body[prefix] == answer[prefix]:
            prefix += 1
        return _FORM * digits / longest + _VALUE * prefix / len(answer) + _BREVITY * prefix / longest
