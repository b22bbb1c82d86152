"""Supervised steps before the first rollout: a policy that never answers right has nothing to learn from."""

from __future__ import annotations

from rlsp.board import BoardWriter
from rlsp.config import Config, Job
from rlsp.model.weights import weights_digest
from rlsp.report.warmup import Warmup, WarmupStep
from rlsp.rl.batch import RolloutBatch, collate
from rlsp.rl.rollout.native import Response, Sequence
from rlsp.rl.task import Task, TaskError, Tokenizer
from rlsp.rl.update import Trainer
from rlsp.task import solved


def warm_up(
    job: Job, trainer: Trainer, task: Task, tokenizer: Tokenizer, board: BoardWriter
) -> Warmup | None:
    """Take the warm-up's steps, then begin anew: the optimizer is fresh, the reference is the warm policy.

    What is left of the warm-up is the weights in the model's dtype, as if they came from a checkpoint.

    Returns:
        What the steps recorded, the same on every rank; None where there is none,
        or it is behind.
    """
    config, asked = job.config, job.config.warmup
    if not asked.steps or job.first_rollout:
        return None
    initial = weights_digest(trainer.model)
    steps = []
    for step in range(asked.steps):
        board.phase(f"warm-up: step {step + 1} of {asked.steps}")
        batch = solutions(config, task, tokenizer, step)
        steps.append(WarmupStep.of(*trainer.imitate(batch, asked.learning_rate)))
    trainer.restart()
    # The first rollout counts its own calls alone.
    trainer.model.wiring.take_counts()
    return Warmup(
        steps=tuple(steps), initial_weights_digest=initial, weights_digest=weights_digest(trainer.model)
    )


def solutions(config: Config, task: Task, tokenizer: Tokenizer, step: int) -> RolloutBatch:
    """Return the prompts of a step with their solutions, which count like responses; prompts come once.

    Raises:
        TaskError: A solution cannot be encoded or is longer than a response may be.
    """
    known, count = solved(task), config.warmup.sequences
    sequences, responses = [], []
    for index in range(step * count, (step + 1) * count):
        text = known.solution(index)
        try:
            tokens = [*tokenizer.encode(text), *tokenizer.eos_ids[:1]]
        except ValueError as error:
            raise TaskError(f"the solution of prompt {index}: {error}") from error
        if len(tokens) > config.max_response_tokens:
            raise TaskError(
                f"the solution of prompt {index} has {len(tokens)} tokens with its end: "
                f"max_response_tokens={config.max_response_tokens} allows no more"
            )
        sequences.append(Sequence(index, 0, task.prompt(index).tokens))
        responses.append(Response(tokens, [0.0] * len(tokens), [0] * len(tokens)))
    width = max(len(s.tokens) + len(r.tokens) for s, r in zip(sequences, responses, strict=True))
    return collate(sequences, responses, width, tokenizer.pad_id)
