"""The task that a config asks for, and what can be said against it before anything starts. No torch."""

from __future__ import annotations

import importlib.util
import json
import os
import sys

from rlsp.config import Config, ConfigError, ScorerKind, TaskKind, TaskOrder, Violation, to_plain
from rlsp.pretrained.folder import stated_positions
from rlsp.rl.reward import Apart, InPlace, Judge
from rlsp.rl.task import LimitedTask, Solved, Task, TaskError, Tokenizer, build_task
from rlsp.rl.task.custom import CustomTask, make_custom
from rlsp.rl.task.jsonl import check_first_rows, open_jsonl
from rlsp.rl.task.reasoning import ReasoningGymTask, open_reasoning_gym
from rlsp.rl.task.scorer import ExactScorer, MathVerifyScorer, Scorer
from rlsp.tokenizer import open_tokenizer

_FIRST_ROWS = 16
"""Rows that are looked at before anything starts; the others are met as the run comes to them."""


_JUDGE = "import sys; sys.path[:] = {path!r}; from rlsp.judge import main; sys.exit(main())"
_WAIT_SHARE = 0.9
"""Of the longest wait for a collective, what rewards may take: a slow one's error is the first."""


def open_task(config: Config) -> tuple[Tokenizer, Task]:
    """Make the tokenizer and the task of a run.

    Raises:
        TaskError: What the task needs is not there or cannot be used, or a warm-up is asked of a task without
            solutions.
    """
    tokenizer = open_tokenizer(config)
    task = task_of(config, tokenizer)
    if config.warmup.steps:
        solved(task)
    return tokenizer, task


def solved(task: Task) -> Solved:
    """Return the task that knows the solutions, without what is wrapped around it.

    Raises:
        TaskError: None does.
    """
    inner = task
    while isinstance(inner, LimitedTask | CustomTask):
        inner = inner.task
    if not isinstance(inner, Solved):
        raise TaskError(
            f"the task {task.name} has no solution(index): a warm-up needs it; warmup.steps=0 does without"
        )
    return inner


def judge_of(config: Config, task: Task) -> Judge:
    """Say who computes rewards: this process for rlsp's own, one apart for foreign code."""
    if not runs_foreign_code(config):
        return InPlace(task)
    opening = json.dumps({"parent": os.getpid(), "config": to_plain(config)})
    command = [sys.executable, "-c", _JUDGE.format(path=sys.path)]
    return Apart(command, opening, config.task.timeout_s)


def runs_foreign_code(config: Config) -> bool:
    """Tell whether rewards are computed by code that is not rlsp's: it may raise, hang or crash."""
    foreign = config.task.kind in (TaskKind.custom, TaskKind.reasoning_gym)
    return foreign or config.task.scorer is ScorerKind.math_verify


def reward_limit_s(config: Config) -> float:
    """Return how long a rollout's rewards may take, seconds."""
    return _WAIT_SHARE * config.launch.timeout_s


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
                room=_room(config),
            )
        case TaskKind.reasoning_gym:
            task = _reasoning_gym(config, tokenizer)
        case TaskKind.custom:
            assert asked.factory is not None
            task = make_custom(asked.factory, tokenizer=tokenizer, seed=config.seed)
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


def _room(config: Config) -> int | None:
    """Return what a checkpoint's positions leave for a prompt, tokens; None where they are not known."""
    positions = None if config.model.path is None else stated_positions(config.model.path)
    return None if positions is None else positions - config.max_response_tokens


def scorer_of(config: Config) -> Scorer:
    """Build the scorer that a config asks for."""
    kind = config.task.scorer
    return MathVerifyScorer() if kind is ScorerKind.math_verify else ExactScorer(kind.value)


def task_lines(config: Config) -> list[str]:
    """List what is wrong with a checked config's tokenizer and task on this machine, one line a reason.

    Only what is cheap is looked at: of a file its first rows.
    """
    asked, found = config.task, []
    tokenizer = None
    try:
        tokenizer = open_tokenizer(config)
    except ConfigError as error:
        found += [str(violation) for violation in error.violations]
    if asked.factory is not None:
        found += _factory_lines(asked.factory)
    if asked.kind is TaskKind.reasoning_gym and tokenizer is not None:
        found += _reasoning_lines(config, tokenizer)
    if asked.path is not None:
        found += _row_lines(config, asked.path, tokenizer)
    return found


def _factory_lines(factory: str) -> list[str]:
    module = factory.partition(":")[0].partition(".")[0]
    legal = f"a function that can be imported: there is no module {module} (PYTHONPATH may name its folder)"
    return [] if _is_there(module) else [str(Violation("task.factory", factory, legal))]


def _row_lines(config: Config, path: str, tokenizer: Tokenizer | None) -> list[str]:
    """Look at a file's first rows; without tokenizer or scorer at what can be seen without."""
    asked, found, scorer = config.task, [], None
    try:
        scorer = scorer_of(config)
    except TaskError as error:
        found.append(Violation("task.scorer", asked.scorer, f"a scorer that is installed; {error}"))
    lines = check_first_rows(
        path,
        tokenizer=tokenizer,
        scorer=scorer,
        prompt_key=asked.prompt_key,
        label_key=asked.label_key,
        max_prompt_tokens=asked.max_prompt_tokens,
        count=_FIRST_ROWS,
        room=_room(config),
    )
    legal = "JSON lines with prompts and labels"
    found += [Violation("task.path", path, f"{legal}; {line}") for line in lines]
    return [str(violation) for violation in found]


def _reasoning_gym(config: Config, tokenizer: Tokenizer) -> ReasoningGymTask:
    asked = config.task
    assert asked.dataset is not None
    return open_reasoning_gym(
        asked.dataset,
        asked.dataset_config,
        tokenizer=tokenizer,
        seed=config.seed,
        where=asked.scorer.value,
        prompt_key=asked.prompt_key,
        max_prompt_tokens=asked.max_prompt_tokens,
    )


def _reasoning_lines(config: Config, tokenizer: Tokenizer) -> list[str]:
    try:
        _reasoning_gym(config, tokenizer)
    except TaskError as error:
        return [str(Violation("task.dataset", config.task.dataset, f"what can be asked here; {error}"))]
    return []


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
