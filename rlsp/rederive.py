"""One rank's life in a diagnosis: make the weights of a rollout again, prove them, replay a sequence."""

from __future__ import annotations

from pathlib import Path

import torch

from rlsp import collectives, determinism
from rlsp.board import Place
from rlsp.config import Config, Job
from rlsp.groups import Mesh
from rlsp.model.assemble import assemble, certified_kernels
from rlsp.model.weights import weights_digest
from rlsp.numerics.compiled import using
from rlsp.replay import Record, Replayer
from rlsp.report import tensors as tensor_file
from rlsp.report.diagnose_records import Answer, Request, answer_path, request_path
from rlsp.report.recorder import CONSISTENCY_NAME
from rlsp.report.records import ConsistencyReport, RolloutRecord
from rlsp.report.warmup import read_warmup
from rlsp.rl.batch import RolloutBatch
from rlsp.rl.forward import Forward
from rlsp.rl.rollout.native import Sequence
from rlsp.rl.update import Trainer
from rlsp.run import (
    device_of,
    join,
    layers_of,
    mesh_of,
    old_policy,
    rollouts_of,
    sampling_of,
    sequences_of,
    trainer_of,
)
from rlsp.task import open_task
from rlsp.warmup import warm_up


class NotProvedError(RuntimeError):
    """What was made again is not what the run recorded, so that nothing can be concluded; on every rank."""


def diagnose_rank(job: Job, place: Place) -> None:
    """Answer the request that lies in the job's scratch folder; rank 0 writes the answer there."""
    config = job.config
    with determinism.apply(config.numerics.threads, config.device.kind.value):
        join(job, place)
        live(job, place)


def live(job: Job, place: Place) -> None:
    """Answer the request in a process group that is already joined."""
    request = Request.read(request_path(job.run_dir))
    mesh = mesh_of(job.config, place)
    with layers_of(job.config, place), using(certified_kernels(job.config, mesh)):
        try:
            answer = _answer(job, place, mesh, request)
        except NotProvedError as error:
            answer = Answer(refusal=str(error), diagnosis=None)
    if place.rank == 0:
        answer.write(answer_path(job.run_dir))


def _answer(job: Job, place: Place, mesh: Mesh, request: Request) -> Answer:
    """Build both sides, train up to the rollout, replay.

    Raises:
        NotProvedError: Weights or prompts are not those of the run.
    """
    config, board = job.config, place.board
    board.phase("certifying kernels and building the model")
    device = device_of(config, place)
    models = assemble(config, mesh, device)
    tokenizer, task = open_task(config)
    trainer = trainer_of(config, models, mesh)
    rollouts = rollouts_of(job, models, mesh, tokenizer)
    run_dir, rollout = Path(request.run_dir), request.rollout
    records = ConsistencyReport.read(run_dir / CONSISTENCY_NAME).rollouts
    warmed, warmup = warm_up(job, trainer, task, tokenizer, board), read_warmup(run_dir)
    if warmed is not None and warmup is not None:
        _prove(warmed.weights_digest, warmup.weights_digest, "the weights after the warm-up", mesh, device)
    for index in range(rollout):
        board.phase(f"training on rollout {index} again")
        _train_again(config, trainer, run_dir, records[index])
        made = weights_digest(trainer.model)
        _prove(made, records[index].weights_digest, f"the weights after rollout {index}", mesh, device)
    updates = sum(record.updates for record in records[:rollout])
    digests, stored = rollouts.synchronise(updates), records[rollout]
    wanted = (stored.trainer_weights_digest, stored.rollout_weights_digest)
    for side, made, recorded in zip(("training", "the rollout"), digests, wanted, strict=True):
        _prove(made, recorded, f"the weights of {side} at rollout {rollout}", mesh, device)
    batch, train, _ = _load(run_dir, stored)
    sequences = sequences_of(config, task, rollout)
    _prove_prompts(sequences, batch)
    board.phase(f"replaying sample {request.sample} of rollout {rollout}")
    sampling = sampling_of(config, rollout, tokenizer)
    record = Record(rollout, sequences, sampling, batch, train, digests[0], updates)
    diagnosis = Replayer(job, trainer, rollouts.engine, mesh).replay(record, request.sample, request.notes)
    return Answer(refusal=None, diagnosis=diagnosis)


def _train_again(config: Config, trainer: Trainer, run_dir: Path, record: RolloutRecord) -> None:
    """Take a rollout's updates again."""
    batch, _, advantages = _load(run_dir, record)
    old_logp, weighted, _ = old_policy(config, trainer, batch, advantages)
    for _ in range(record.updates):
        trainer.update(batch, weighted, old_logp)


def _prove(made: str, recorded: str, what: str, mesh: Mesh, device: torch.device) -> None:
    """Compare a digest with the recorded one on every rank.

    Raises:
        NotProvedError: On every rank, where they differ on any.
    """
    wrong = torch.tensor([int(made != recorded)], device=device)
    if collectives.max_integers(wrong, mesh.world).item():
        raise NotProvedError(
            f"{what}, made again, have the digest {made}, but the run recorded {recorded}: "
            "a replay with other weights proves nothing"
        )


def _prove_prompts(sequences: list[Sequence], batch: RolloutBatch) -> None:
    """Compare the prompts that the config makes with those that were recorded.

    Raises:
        NotProvedError: On every rank, naming the first sequence with another prompt.
    """
    for index, sequence in enumerate(sequences):
        prompt = batch.tokens[index, : batch.lengths[index]][
            ~batch.active_mask[index, : batch.lengths[index]]
        ]
        if tuple(prompt.tolist()) != sequence.tokens:
            raise NotProvedError(f"sample {index} was recorded with another prompt than the config gives it")


def _load(run_dir: Path, record: RolloutRecord) -> tuple[RolloutBatch, Forward, torch.Tensor]:
    """Read a rollout back: what the engines recorded, what training recorded, and the advantages."""
    stored = tensor_file.read(tensor_file.rollout_path(run_dir, record.index))
    read = {name: torch.from_numpy(array.copy()) for name, array in stored.items()}
    batch = RolloutBatch(
        read["tokens"],
        read["active_mask"],
        read["lengths"],
        read["rollout_logprob"],
        read["rollout_row_digest"],
    )
    train = Forward(
        read["train_logprob"], read["train_row_digest"], record.cp_tokens, record.tp_replicas_agree
    )
    return batch, train, read["advantages"]
