"""What a rank contributes to the evidence: start-up facts, and each rollout's tensors and digests."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlsp import bits, collectives, determinism
from rlsp.config import Config, Job
from rlsp.config.agreed import agreed_hash
from rlsp.groups import Mesh
from rlsp.model.assemble import Models
from rlsp.model.decoder import Decoder
from rlsp.model.weights import weight_entries
from rlsp.model.wiring import NATIVE, STRICT, Operator, Phase
from rlsp.numerics.compiled import running
from rlsp.pretrained.folder import fingerprint
from rlsp.report.digests import RolloutDigests, UpdateDigests, shard_table
from rlsp.report.manifest import RankAgreement, StartupFacts, WeightSource
from rlsp.report.provenance import loaded_source_hash
from rlsp.report.recorder import Recorder
from rlsp.report.records import RolloutFacts, float64_bits
from rlsp.report.warmup import WARMUP_NAME, Warmup
from rlsp.rl.batch import RolloutBatch
from rlsp.rl.task import Task, Tokenizer
from rlsp.rl.update import Step
from rlsp.stopwatch import Stopwatch

ROUTES = [f"{phase.value}.{operator.value}" for phase in Phase for operator in Operator]


class DisagreementError(RuntimeError):
    """Ranks that should be alike are not; the message names them."""


def startup_facts(
    config: Config, models: Models, mesh: Mesh, task: Task, tokenizer: Tokenizer, initial: str
) -> StartupFacts:
    """Compare all ranks before any data is exchanged, and return what the manifest says of the start.

    Args:
        config: The run's.
        models: What this rank computes with.
        mesh: Its groups.
        task: The run's.
        tokenizer: The run's.
        initial: Digest of the weights that the run began with.

    Raises:
        DisagreementError: On every rank, naming the ranks with another contract, code, kernels, task or
            initial weights.
    """
    contract, certificate = models.contract, models.certificate
    ours = (
        contract.sha256,
        loaded_source_hash(),
        certificate.digest,
        agreed_hash(config),
        task.content_hash,
        initial,
    )
    mine = bytes.fromhex("".join(ours))
    every = collectives.gather(
        torch.tensor([list(mine)], dtype=torch.uint8, device=_device(models)), mesh.world
    ).tolist()
    held = [bytes(row).hex() for row in every]
    agreement = [_row(config, rank, hashes) for rank, hashes in enumerate(held)]
    values_of = {
        what: [getattr(row, what) for row in agreement]
        for what in ("contract_hash", "code_hash", "kernel_digest")
    }
    # Ranks on other machines may have another file under the same path.
    values_of["config"] = [hashes[192:256] for hashes in held]
    values_of["task hash"] = [hashes[256:320] for hashes in held]
    values_of["initial weights"] = [hashes[320:] for hashes in held]
    for what, values in values_of.items():
        if len(set(values)) > 1:
            raise DisagreementError(
                f"ranks disagree on {what}: " + ", ".join(f"rank {i} {v[:16]}" for i, v in enumerate(values))
            )
    kernels_run = running()
    kernels: dict[str, Any] = determinism.kernel_identity(config.device.kind.value)
    return StartupFacts(
        contract={**asdict(contract), "elementwise": list(contract.elementwise)},
        contract_hash=contract.sha256,
        data_hash=task.content_hash,
        tokenizer=tokenizer.name,
        tokenizer_hash=tokenizer.content_hash,
        chat_template_hash=tokenizer.template_hash,
        initial_weights_digest=initial,
        weight_source=_weight_source(config, mesh),
        kernels=kernels,
        certificate={
            "checks": certificate.checks,
            "digest": certificate.digest,
            "wide": len(certificate.wide),
            "few": len(certificate.few),
            "leaf": list(certificate.narrowed),
            "observations": dict(certificate.observations),
            "compiled": kernels_run.origin,
        },
        paths={f"{s.product.value} n={s.n} k={s.k}": "wide" for s in certificate.wide}
        | dict.fromkeys(certificate.narrowed, "leaf")
        | {f"kernel {name}": path for name, path in kernels_run.paths().items()}
        | {f"messages {group.axis}": "lines" if group.lines else "backend" for group in mesh.groups}
        | _decoding(models),
        agreement=tuple(agreement),
    )


def _decoding(models: Models) -> dict[str, str]:
    """Say what takes a new token through rank 0's engine, where it has one."""
    if models.engine is None:
        return {}
    return {"decoding": "layers as one" if Decoder(models.engine).as_one else "modules"}


def _weight_source(config: Config, mesh: Mesh) -> WeightSource | None:
    if config.model.path is None or mesh.world.index:
        return None
    return WeightSource.model_validate(fingerprint(config.model.path))


class Evidence:
    """Bring each rollout's evidence together and let rank 0 write it."""

    def __init__(self, job: Job, mesh: Mesh, models: Models, eos_ids: tuple[int, ...]) -> None:
        """Open the recorder on rank 0; the models hold their initial weights."""
        self._eos_ids, self._run_dir = eos_ids, Path(job.run_dir)
        self._config, self._mesh, self._models = job.config, mesh, models
        self._recorder = Recorder(job.run_dir, job.first_rollout) if mesh.world.index == 0 else None
        self._initial = weight_entries(models.trainer)
        self._bound: list[int] | None = None
        self._started = time.monotonic()

    def warmed(self, warmup: Warmup | None) -> None:
        """Write what a warm-up recorded, if there was one; every rank calls it.

        Raises:
            DisagreementError: On every rank, where one holds other weights than rank 0.
        """
        if warmup is not None:
            self._same_everywhere([warmup.weights_digest])
            if self._recorder is not None:
                warmup.write(self._run_dir / WARMUP_NAME)

    def bind(self, batch: RolloutBatch, advantages: Tensor) -> None:
        """Fix what the rollout recorded before training computes its own side; every rank calls it.

        Raises:
            DisagreementError: On every rank, naming the ranks that hold another batch or advantages.
        """
        self._bound = _fingerprint(batch, advantages)
        mine = torch.tensor([self._bound], device=_device(self._models))
        every = collectives.gather(mine, self._mesh.world).tolist()
        if odd := [rank for rank, held in enumerate(every) if held != every[0]]:
            raise DisagreementError(f"ranks {odd} hold another batch or other advantages than rank 0")

    def record(
        self,
        index: int,
        batch: RolloutBatch,
        rewards: Ordered[float],
        advantages: Tensor,
        steps: Ordered[Step],
        digests: tuple[str, str],
        versions: tuple[int, int],
        watch: Stopwatch,
        old_logp: Tensor,
        further: Mapping[str, float],
    ) -> None:
        """Write rollout `index`; every rank calls it.

        Args:
            index: The rollout.
            batch: Its sequences with what the rollout recorded.
            rewards: One a sequence.
            advantages: float32 [N].
            steps: Its updates; the first one's forward pass is training's side of the comparison.
            digests: The trainer's and the engines' weights at dispatch.
            versions: Weight version of the engines, and of training at its first forward pass.
            watch: The rollout's clock so far.
            old_logp: float32 [N, S], the old policy's log-probabilities that the updates used.
            further: Metrics of the importance weights and of an external engine, by name.

        Raises:
            DisagreementError: The batch is not the one that was bound, or after the updates a rank holds
                other gradients, optimizer state or weights than rank 0.
        """
        first, last = steps[0].forward, steps[-1]
        agreed = self._bound == _fingerprint(batch, advantages)
        if not agreed:
            raise DisagreementError(f"rollout {index}: batch or advantages changed while training ran")
        after = [bits.digest(entries) for entries in (last.gradients, last.optimizer, last.weights)]
        self._same_everywhere(after)
        routes = self._routes()
        facts = RolloutFacts(
            weight_version_rollout=versions[0],
            weight_version_train=versions[1],
            trainer_weights_digest=digests[0],
            rollout_weights_digest=digests[1],
            weights_digest=after[2],
            gradient_norm=last.gradient_norm,
            gradient_norm_bits=float64_bits(last.gradient_norm),
            gradient_digest=after[0],
            optimizer_digest=after[1],
            gradient_norms=tuple(step.gradient_norm for step in steps),
            updates=len(steps),
            learning_rate=self._config.learning_rate,
            routes=routes,
            declared_routes=self._config.declared_routes,
            cp_tokens=first.tokens_by_cp,
            tp_replicas_agree=first.replicas_agree,
            ranks_agree=agreed,
            sequences=batch.tokens.shape[0],
            sources=self._sources(routes),
        )
        watch.lap("evidence")
        if self._recorder is not None:
            tensors = _tensors(batch, rewards, advantages, steps[0])
            metrics = {
                **self._metrics(batch, rewards, advantages, steps, versions, watch),
                "train/old_logprob_mismatched": _mismatched(old_logp, first.logp, batch.active_mask),
                **further,
            }
            self._recorder.rollout(index, tensors, facts, metrics, digests=self._digests(index, steps))

    def _digests(self, index: int, steps: Ordered[Step]) -> RolloutDigests:
        updates = tuple(
            UpdateDigests.of(
                loss=step.metrics["loss"],
                gradients=shard_table(step.gradients),
                gradient_norm=step.gradient_norm,
                optimizer=shard_table(step.optimizer),
                weights=shard_table(step.weights),
            )
            for step in steps
        )
        return RolloutDigests(initial=None if index else shard_table(self._initial), updates=updates)

    def _same_everywhere(self, digests: list[str]) -> None:
        """Compare the digests of gradients, optimizer state and weights of all ranks."""
        mine = torch.tensor(
            [[list(bytes.fromhex(digest)) for digest in digests]],
            dtype=torch.uint8,
            device=_device(self._models),
        )
        every = collectives.gather(mine, self._mesh.world).tolist()
        drifted = [rank for rank, held in enumerate(every) if held != every[0]]
        if drifted:
            raise DisagreementError(
                f"replicas drifted apart: ranks {drifted} hold other gradients, optimizer state or weights"
                f" than rank {self._mesh.world.ranks[0]}"
            )

    def _routes(self) -> dict[str, dict[str, int]]:
        """Return every rank's calls since the last rollout, by operator and route."""
        wirings = [m.wiring for m in (self._models.trainer, self._models.engine) if m is not None]
        counts = {name: calls for wiring in wirings for name, calls in wiring.take_counts().items()}
        ran = [counts.get(name, {}) for name in ROUTES]
        rows = [[calls.get(STRICT, 0), sum(calls.values()) - calls.get(STRICT, 0)] for calls in ran]
        total = collectives.sum_integers(torch.tensor(rows, device=_device(self._models)), self._mesh.world)
        return {
            name: {route: n for route, n in zip((STRICT, NATIVE), calls, strict=True) if n}
            for name, calls in zip(ROUTES, total.tolist(), strict=True)
            if name in self._config.declared_routes  # an external engine's calls are not seen
        }

    def _sources(self, routes: Mapping[str, Mapping[str, int]]) -> dict[str, str]:
        """Say which computation made each side: by whose log-probability code calls were counted."""
        made = {"rollout": "decode", "train": "forward"}
        found = {side: name for side, name in made.items() if any(routes.get(f"{side}.logp", {}).values())}
        if self._config.rollout.external:
            return {**found, "rollout": self._config.rollout.engine.value}
        return found

    def _metrics(
        self,
        batch: RolloutBatch,
        rewards: Ordered[float],
        advantages: Tensor,
        steps: Ordered[Step],
        versions: tuple[int, int],
        watch: Stopwatch,
    ) -> dict[str, float]:
        last, n = steps[-1], self._config.samples_per_prompt
        lengths = batch.active_mask.sum(dim=1)
        groups = [rewards[i : i + n] for i in range(0, len(rewards), n)]
        active, laps = batch.active_tokens, watch.laps
        return {
            **{f"train/{name}": value for name, value in last.metrics.items()},
            "train/gradient_norm": last.gradient_norm,
            "train/clip_coefficient": last.clip,
            "train/vanished_fraction": last.vanished_fraction,
            "train/learning_rate": self._config.learning_rate,
            "train/weight_version": versions[1] + len(steps),
            "rollout/active_tokens": active,
            "rollout/sequences": len(rewards),
            "rollout/response_length_mean": active / len(rewards),
            "rollout/response_length_max": int(lengths.max()),
            "rollout/response_length_min": int(lengths.min()),
            "rollout/truncated_fraction": batch.truncated(self._eos_ids) / len(rewards),
            "rollout/weight_version": versions[0],
            "reward/mean": float(np.mean(rewards)),
            "reward/std": float(np.std(rewards)),
            "reward/min": min(rewards),
            "reward/max": max(rewards),
            "reward/solved_fraction": sum(max(g) >= 1.0 for g in groups) / len(groups),
            "reward/constant_groups_fraction": sum(min(g) == max(g) for g in groups) / len(groups),
            "reward/advantage_max_abs": float(advantages.abs().max()),
            **laps,
            **watch.bytes_moved,
            "time/total_s": watch.total_s,
            "time/elapsed_s": time.monotonic() - self._started,
            "time/rollout_tokens_per_s": active / laps["time/rollout_s"],
            "time/train_tokens_per_s": active * len(steps) / laps["time/train_s"],
            "memory/peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }


def _fingerprint(batch: RolloutBatch, advantages: Tensor) -> list[int]:
    """Hash everything that the rollout hands to training."""
    held = (batch.tokens, batch.active_mask, batch.lengths, batch.logp, batch.row_digest, advantages)
    words: list[int] = torch.cat([bits.shard_hashes(x.unsqueeze(0)) for x in held]).flatten().tolist()
    return words


def _mismatched(a: Tensor, b: Tensor, mask: Tensor) -> int:
    """Count the tokens of `mask` on which two float32 tensors differ in any bit."""
    return int(((a.cpu().view(torch.int32) != b.view(torch.int32)) & mask).sum())


def _row(config: Config, rank: int, hashes: str) -> RankAgreement:
    place = {axis: at for axis, at in config.layout.table()[rank].items() if axis != "rank"}
    return RankAgreement(
        rank=rank,
        layout=place,
        contract_hash=hashes[:64],
        code_hash=hashes[64:128],
        kernel_digest=hashes[128:192],
    )


def _tensors(
    batch: RolloutBatch, rewards: Ordered[float], advantages: Tensor, first: Step
) -> dict[str, np.ndarray]:
    return {
        "tokens": batch.tokens.numpy(),
        "active_mask": batch.active_mask.numpy(),
        "lengths": batch.lengths.numpy(),
        "rollout_logprob": batch.logp.numpy(),
        "train_logprob": first.forward.logp.numpy(),
        "rollout_row_digest": batch.row_digest.numpy(),
        "train_row_digest": first.forward.row_digest.numpy(),
        "rewards": np.asarray(rewards, dtype=np.float32),
        "advantages": advantages.numpy(),
    }


def _device(models: Models) -> torch.device:
    return next(models.trainer.parameters()).device
