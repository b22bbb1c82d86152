"""Tasks: where prompts come from and what a response is worth."""

from __future__ import annotations

from rlsp.rl.task.arithmetic import ArithmeticTask, Sums
from rlsp.rl.task.constant import ConstantTask
from rlsp.rl.task.limited import LimitedTask
from rlsp.rl.task.protocol import Prompt, Task, Tokenizer
from rlsp.rl.task.tokenizer import CharacterTokenizer

__all__ = ["CharacterTokenizer", "Prompt", "Task", "Tokenizer", "build_task"]


def build_task(
    kind: str,
    *,
    tokenizer: Tokenizer,
    seed: int,
    max_operand: int,
    reward: float,
    response_limit: int | None = None,
) -> Task:
    """Build a built-in task.

    Args:
        kind: "arithmetic" or "constant".
        tokenizer: What turns prompts into ids and responses into text.
        seed: Keys the prompts.
        max_operand: Largest operand.
        reward: What the constant task pays; the arithmetic one does not read it.
        response_limit: Every prompt gets a limit of its own, up to this (0 for one in eight); None for none.

    Raises:
        ValueError: If the kind is unknown, naming the legal ones, or a parameter is out of range.
    """
    sums = Sums(tokenizer=tokenizer, seed=seed, max_operand=max_operand)
    task: Task
    match kind:
        case "arithmetic":
            task = ArithmeticTask(sums)
        case "constant":
            task = ConstantTask(sums, reward)
        case _:
            raise ValueError(f"unknown task {kind!r}; legal: arithmetic, constant")
    return task if response_limit is None else LimitedTask(task, seed, response_limit)
