"""The task that a config asks for, and what can be said against it before anything starts. No torch."""

from __future__ import annotations

from rlsp.config import Config, TaskKind, TaskOrder, Violation
from rlsp.rl.task import CharacterTokenizer, LimitedTask, Task, Tokenizer, build_task
from rlsp.rl.task.jsonl import check_first_rows, open_jsonl
from rlsp.rl.task.scorer import ExactScorer, Scorer

_FIRST_ROWS = 16
"""Rows that are looked at before anything starts; the others are met as the run comes to them."""


def task_of(config: Config, tokenizer: Tokenizer) -> Task:
    """Build the task that a config asks for.

    Raises:
        TaskError: What it needs is not there or cannot be used.
    """
    asked = config.task
    match asked.kind:
        case TaskKind.jsonl:
            assert asked.path is not None
            task: Task = open_jsonl(
                asked.path,
                tokenizer=tokenizer,
                seed=config.seed,
                shuffled=asked.order is TaskOrder.shuffled,
                scorer=scorer_of(config),
                prompt_key=asked.prompt_key,
                label_key=asked.label_key,
                max_prompt_tokens=asked.max_prompt_tokens,
            )
        case _:
            task = build_task(
                asked.kind.value,
                tokenizer=tokenizer,
                seed=config.seed,
                max_operand=asked.max_operand,
                reward=asked.reward,
            )
    limit = asked.response_limit
    return task if limit is None else LimitedTask(task, config.seed, limit)


def scorer_of(config: Config) -> Scorer:
    """Build the scorer that a config asks for."""
    return ExactScorer(config.task.scorer.value)


def task_lines(config: Config) -> list[str]:
    """List what is wrong with a checked config's task on this machine, one line a reason.

    Only what is cheap is looked at: of a file its first rows.
    """
    asked = config.task
    if asked.kind is not TaskKind.jsonl:
        return []
    assert asked.path is not None
    found = check_first_rows(
        asked.path,
        tokenizer=CharacterTokenizer(),
        prompt_key=asked.prompt_key,
        label_key=asked.label_key,
        max_prompt_tokens=asked.max_prompt_tokens,
        count=_FIRST_ROWS,
    )
    return [
        str(Violation("task.path", asked.path, f"JSON lines with prompts and labels; {line}"))
        for line in found
    ]
