"""One rank's life: the whole algorithm on a screen."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rlsp import collectives, determinism, rendezvous
from rlsp.board import BoardWriter, Place
from rlsp.checkpoints import Checkpoints
from rlsp.config import Config, CorrectionKind, DeviceKind, Job
from rlsp.diagnostics import Diagnostics
from rlsp.engines import described, start_engine
from rlsp.evidence import Evidence, startup_facts
from rlsp.groups import Ledger, Mesh, build_mesh
from rlsp.model.assemble import Models, assemble, certified_kernels
from rlsp.model.compat import native_layers
from rlsp.model.hf import EXPORT_NAME, write_folder
from rlsp.numerics.compiled import using
from rlsp.replay import Record
from rlsp.report import manifest
from rlsp.rl.advantage import group_advantages
from rlsp.rl.batch import RolloutBatch
from rlsp.rl.correction import Correction, importance_weights
from rlsp.rl.optimizer import AdamW, Hyperparameters
from rlsp.rl.reward import Judge, score
from rlsp.rl.rollout.dispatch import Rollouts
from rlsp.rl.rollout.external import ExternalRollouts, Wiring
from rlsp.rl.rollout.native import NativeEngine, Sampling, Sequence
from rlsp.rl.task import Task, Tokenizer
from rlsp.rl.update import Objective, Step, Trainer
from rlsp.stopwatch import Stopwatch
from rlsp.task import judge_of, open_task, reward_limit_s
from rlsp.warmup import warm_up


def run_rank(job: Job, place: Place) -> None:
    """Live one rank's life: join, certify, build, then roll out and train `num_rollouts` times."""
    config = job.config
    with determinism.apply(config.numerics.threads, config.device.kind.value):
        live(join(job, place), place)


def live(job: Job, place: Place) -> None:
    """Run the algorithm in a process group that is already joined."""
    mesh = mesh_of(job.config, place)
    with layers_of(job.config, place), using(certified_kernels(job.config, mesh)):
        _live(job, place, mesh)


def _live(job: Job, place: Place, mesh: Mesh) -> None:
    config, board = job.config, place.board
    tokenizer, task, judge = _open_task(config, place)
    board.phase("certifying kernels and building the model")
    models = assemble(config, mesh, device_of(config, place))
    trainer = trainer_of(config, models, mesh)
    checkpoints = Checkpoints(job, board, mesh, trainer)
    _announce(job, models, mesh, task, tokenizer, checkpoints)
    rollouts = rollouts_of(job, models, mesh, tokenizer)
    evidence = Evidence(job, mesh, models, tokenizer.eos_ids)
    evidence.warmed(warm_up(job, trainer, task, tokenizer, board))
    diagnostics = Diagnostics(job, trainer, rollouts.engine, mesh)
    for index in checkpoints.rollouts():
        version = trainer.optimizer.steps
        watch = Stopwatch(mesh.ledger)
        board.phase(f"rollout {index}: handing over weights, version {version}")
        digests = rollouts.synchronise(version)
        watch.lap("sync")

        board.phase(f"rollout {index}: generating")
        sequences = sequences_of(config, task, index)
        sampling = sampling_of(config, index, tokenizer)
        batch = rollouts.generate(sequences, sampling, version)
        watch.lap("rollout")

        board.phase(f"rollout {index}: scoring")
        rewards = _rewards(config, judge, index, batch.responses(), tokenizer, mesh)
        advantages = group_advantages(rewards, config.samples_per_prompt)
        evidence.bind(batch, advantages)
        watch.lap("reward")

        board.phase(f"rollout {index}: old policy")
        old_logp, weighted, correction = old_policy(config, trainer, batch, advantages)
        watch.lap("old_logprob")

        diagnostics.remember()
        steps = [
            _update(f"rollout {index}: update {update}", trainer, batch, weighted, old_logp, mesh, board)
            for update in range(config.updates_per_rollout)
        ]
        watch.lap("train")

        board.phase(f"rollout {index}: writing evidence")
        evidence.record(
            index,
            batch,
            rewards,
            advantages,
            steps,
            digests,
            (rollouts.weight_version, version),
            watch,
            old_logp,
            {**correction, **rollouts.metrics()},
        )
        diagnostics.look(Record(index, sequences, sampling, batch, steps[0].forward, digests[0], version))
    _export(job, models, mesh, board)
    board.phase("done")


def _open_task(config: Config, place: Place) -> tuple[Tokenizer, Task, Judge]:
    """Open the task first: what is wrong with its data is said before anything costs time."""
    place.board.phase("opening the task")
    tokenizer, task = open_task(config)
    return tokenizer, task, judge_of(config, task)


def _announce(
    job: Job, models: Models, mesh: Mesh, task: Task, tokenizer: Tokenizer, checkpoints: Checkpoints
) -> None:
    """Compare all ranks before any data is exchanged, and add to the manifest what they agree on."""
    facts = startup_facts(job.config, models, mesh, task, tokenizer, checkpoints.initial_digest)
    if mesh.world.index == 0:
        manifest.add_startup(job.run_dir, facts)


def _export(job: Job, models: Models, mesh: Mesh, board: BoardWriter) -> None:
    """Write the weights that the run leaves, where that was asked for, as transformers and vLLM load them."""
    if job.config.export:
        board.phase("exporting weights")
        write_folder(models.trainer, job.config.model, Path(job.run_dir) / EXPORT_NAME, mesh.world)


def _update(
    name: str,
    trainer: Trainer,
    batch: RolloutBatch,
    weighted: Tensor,
    old_logp: Tensor,
    mesh: Mesh,
    board: BoardWriter,
) -> Step:
    """Take one step, then let every group compare what its ranks called."""
    board.phase(f"{name}, forward and backward")
    step = trainer.update(batch, weighted, old_logp)
    for group in mesh.groups:
        collectives.check_agreement(group)
    return step


def mesh_of(config: Config, place: Place) -> Mesh:
    """Open this rank's groups."""
    return build_mesh(
        config.layout, config.rollout_layout, place.rank, config.launch.timeout_s, Ledger(place.board)
    )


def layers_of(config: Config, place: Place) -> AbstractContextManager[None]:
    """Prepare Megatron-Core for its own layers, where a route is native."""
    return nullcontext() if config.numerics.routes.strict else native_layers(device_of(config, place))


def device_of(config: Config, place: Place) -> torch.device:
    """Take this rank's device: on CUDA the GPU of its number on this machine."""
    if config.device.kind is DeviceKind.cpu:
        return torch.device("cpu")
    torch.cuda.set_device(place.local_rank)
    return torch.device("cuda", place.local_rank)


def join(job: Job, place: Place) -> Job:
    """Join the process group, if there is more than one rank; return the job as node 0 has it."""
    config = job.config
    if config.cluster.nodes > 1:
        return rendezvous.join(job, place)
    if place.world_size > 1:
        dist.init_process_group(
            config.device.backend,
            init_method=place.init_method,
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=config.launch.timeout_s),
        )
    return job


def sequences_of(config: Config, task: Task, rollout: int) -> list[Sequence]:
    """Return the rollout's sequences: every prompt's samples side by side; no index comes twice in a run."""
    first = config.first_prompt(rollout)
    prompts = [task.prompt(first + prompt) for prompt in range(config.prompts_per_rollout)]
    return [
        Sequence(index, sample, prompt.tokens, prompt.limit)
        for index, prompt in enumerate(prompts)
        for sample in range(config.samples_per_prompt)
    ]


def sampling_of(config: Config, rollout: int, tokenizer: Tokenizer) -> Sampling:
    """Say how this rollout draws."""
    ends = () if config.rollout.ignore_eos else tokenizer.eos_ids
    return Sampling(config.seed, rollout, config.temperature, config.max_response_tokens, ends)


def _rewards(
    config: Config,
    judge: Judge,
    rollout: int,
    responses: list[list[int]],
    tokenizer: Tokenizer,
    mesh: Mesh,
) -> list[float]:
    """Score on rank 0 and let every rank have the same numbers: a task need not be deterministic.

    They are float32, as the evidence keeps them, so that advantages can be computed again from what it says.
    """
    scores = torch.zeros(len(responses), dtype=torch.float32)
    if mesh.world.index == 0:
        rewards = score(
            judge,
            responses,
            rollout=rollout,
            first=config.first_prompt(rollout),
            samples=config.samples_per_prompt,
            decode=tokenizer.decode,
            within_s=reward_limit_s(config),
        )
        scores[:] = torch.tensor(rewards, dtype=torch.float32)
    carried = scores.to(mesh.world.device_type or "cpu")
    return collectives.broadcast(carried, mesh.world, source=0).tolist()


def old_policy(
    config: Config, trainer: Trainer, batch: RolloutBatch, advantages: Tensor
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Return the old policy's log-probabilities, advantages weighed by importance ratios, and metrics.

    They are the rollout's own, or those of a forward pass before the first update.
    """
    old_logp = batch.logp if config.reuse_rollout_logprob else trainer.score(batch)
    if config.correction.kind is CorrectionKind.none:
        return old_logp, advantages, {}
    kind, bounds = Correction(config.correction.kind.value), config.correction
    found = importance_weights(
        old_logp, batch.logp, batch.active_mask, kind, upper=bounds.upper, lower=bounds.lower
    )
    active = max(batch.active_tokens, 1)
    metrics = {
        "train/is_weight_mean": float(found.weight.sum(dtype=torch.float64)) / active,
        "train/is_weight_max": float(found.weight.max()),
        "train/is_cut_fraction": float(found.cut.sum()) / active,
    }
    return old_logp, advantages.unsqueeze(1) * found.weight, metrics


def trainer_of(config: Config, models: Models, mesh: Mesh) -> Trainer:
    """Wire the policy to its optimizer and objective."""
    optimizer = config.optimizer
    hyper = Hyperparameters(optimizer.beta1, optimizer.beta2, optimizer.epsilon, optimizer.weight_decay)
    objective = Objective(
        clip_ratio=config.clip_ratio,
        kl_coef=config.kl_coef,
        entropy_coef=config.entropy_coef,
        temperature=config.temperature,
        grad_clip=config.grad_clip,
        learning_rate=config.learning_rate,
        micro_batch_size=config.micro_batch_size,
    )
    return Trainer(
        models.trainer, models.reference, AdamW(models.trainer, hyper), mesh, config.layout, objective
    )


def rollouts_of(job: Job, models: Models, mesh: Mesh, tokenizer: Tokenizer) -> Rollouts | ExternalRollouts:
    """Put the engine, where this rank has one, to work for its group; or one that is not rlsp's for all."""
    config = job.config
    if config.rollout.external:
        return ExternalRollouts(models.trainer, mesh, _external(job, tokenizer))
    engine = None if models.engine is None else NativeEngine(models.engine, *cache_shape(config))
    return Rollouts(models.trainer, engine, config.rollout_layout, mesh, tokenizer.pad_id)


def _external(job: Job, tokenizer: Tokenizer) -> Wiring:
    config, run_dir = job.config, Path(job.run_dir)
    return Wiring(
        shape=replace(config.model, path=None),
        described=described(config),
        start=partial(start_engine, config, run_dir),
        folder=run_dir / "logs" / "engine",
        pad_id=tokenizer.pad_id,
        timeout_s=config.launch.timeout_s,
    )


def cache_shape(config: Config) -> tuple[int, int, int]:
    """Return the engine's key-value heads on one rank, the head size and the layers."""
    return config.padded_query_groups // config.rollout.tp, config.model.head_dim, config.model.num_layers
