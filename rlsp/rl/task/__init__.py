"""Tasks: where prompts come from and what a response is worth."""

from __future__ import annotations

from rlsp.rl.task.arithmetic import ArithmeticTask, Sums
from rlsp.rl.task.constant import ConstantTask
from rlsp.rl.task.limited import LimitedTask
from rlsp.rl.task.protocol import Message, Prompt, Task, TaskError, Tokenizer
from rlsp.rl.task.tokenizer import CharacterTokenizer

__all__ = [
    "CharacterTokenizer",
    "LimitedTask",
    "Message",
    "Prompt",
    "Task",
    "TaskError",
    "Tokenizer",
    "build_task",
]


def build_task(
    kind: str,
    *,
    tokenizer: Tokenizer,
    seed: int,
    max_operand: int,
    reward: float,
) -> Task:
    """Build a task that needs nothing but numbers.

    Args:
        kind: "arithmetic" or "constant".
        tokenizer: What turns prompts into ids and responses into text.
        seed: Keys the prompts.
        max_operand: Largest operand.
        reward: What the constant task pays; the arithmetic one does not read it.

    Raises:
        ValueError: If the kind is unknown, naming the legal ones, or a parameter is out of range.
    """
    sums = Sums(tokenizer=tokenizer, seed=seed, max_operand=max_operand)
    match kind:
        case "arithmetic":
            return ArithmeticTask(sums)
        case "constant":
            return ConstantTask(sums, reward)
        case _:
            raise ValueError(f"unknown task {kind!r}; legal: arithmetic, constant")
