"""One rank's side of checkpoints: restore before the first rollout, save after some, stop when asked to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from rlsp import bits, collectives
from rlsp.board import BoardWriter
from rlsp.config import Job, to_plain
from rlsp.groups import Mesh
from rlsp.layout import virtual_shards
from rlsp.model.checkpoint import CheckpointError, ShardFile, read_shards, write_shards
from rlsp.model.weights import Named, shard_entries, weights_digest
from rlsp.report.checkpoint import (
    DOCUMENT_NAME,
    FOLDER,
    REFERENCE,
    WEIGHT,
    Checkpoint,
    ShardEntry,
    checkpoint_path,
    commit,
    file_name,
    partial_path,
    require_files,
)
from rlsp.report.compare_rules import continuation_hash
from rlsp.report.files import sha256_file, sync
from rlsp.report.recorder import METRICS_NAME
from rlsp.rl.update import Trainer

_SHA256_BYTES = 32


class Checkpoints:
    """Save and restore all that training's next step depends on: weights, masters, moments, reference.

    Attributes:
        initial_digest: Of the weights that the run began with, before a warm-up.
    """

    def __init__(self, job: Job, board: BoardWriter, mesh: Mesh, trainer: Trainer) -> None:
        """Serve one run.

        Args:
            job: The run.
            board: Where the owner says that the run is to stop.
            mesh: This rank's groups.
            trainer: Its state is what is saved.

        Raises:
            CheckpointError: The checkpoint to go on from is another one than the job says.
            EvidenceError: Its document cannot be read.
        """
        self._job, self._board, self._mesh, self._trainer = job, board, mesh, trainer
        self._saved = _saved(job)
        self.initial_digest = (
            self._saved.initial_weights_digest if self._saved else weights_digest(trainer.model)
        )
        width = trainer.model.wiring.contract.virtual_tp
        self._shards = virtual_shards(mesh.tp.size, mesh.tp.index, width)
        self._device = trainer.model.vocabulary.valid.device

    def rollouts(self) -> Iterator[int]:
        """Yield the index of every rollout to come: restore before the first, save after one when it is time.

        Ends early, with the state saved, where the owner asks for it. Every rank runs it at the same pace.

        Raises:
            CheckpointError: What was read is not what was saved, on every rank that shares it; or a file
                could not be written.
            EvidenceError: The folder could not be written.
        """
        for index in range(self._restore(), self._job.config.num_rollouts):
            yield index
            if self._save_if_due(index + 1):
                return

    def _restore(self) -> int:
        """Bring back the state that the job goes on from, if any; return the first rollout to come."""
        saved = self._saved
        if saved is None:
            return 0
        folder = checkpoint_path(self._job.saved_dir, saved.rollouts)
        files = [ShardFile(folder / name, entry.first, entry.end) for name, entry in saved.files.items()]
        read_shards(files, self._state(), self._shards)
        self._trainer.optimizer.steps = saved.optimizer_steps
        for what, found in self._digests().items():
            if found != (said := getattr(saved, f"{what}_digest")):
                raise CheckpointError(
                    f"{FOLDER}/{folder.name}: {what}, read back, has the digest {found}, but it was {said}"
                )
        return saved.rollouts

    def _save_if_due(self, rollouts: int) -> bool:
        """Save after `rollouts` rollouts, if it is time to; return whether the run is to stop here."""
        config = self._job.config
        stopping = self._asked_to_stop() and rollouts < config.num_rollouts
        every = config.checkpoint.every
        if every and (stopping or rollouts % every == 0 or rollouts == config.num_rollouts):
            self._board.phase(f"rollout {rollouts - 1}: saving a checkpoint")
            self._save(rollouts)
        return stopping

    def _save(self, rollouts: int) -> None:
        """Write this rank's shards, tell rank 0 their hash, and let it give the checkpoint its name."""
        run_dir, digests, mine = Path(self._job.saved_dir), self._digests(), bytes(_SHA256_BYTES)
        if self._mesh.token.index == 0:
            path = partial_path(run_dir, rollouts) / file_name(self._mesh.tp.index)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_shards(path, self._state(), self._shards)
            sync(path)
            mine = bytes.fromhex(sha256_file(path))
        told = torch.tensor([list(mine)], dtype=torch.uint8, device=self._device)
        hashes = [bytes(row).hex() for row in collectives.gather(told, self._mesh.world).tolist()]
        if self._mesh.world.index == 0:
            sync(run_dir / METRICS_NAME)
            document = self._document(rollouts, digests, hashes)
            if self._mesh.tp.size > len(self._job.config.local_ranks):  # other machines wrote some of them
                require_files(partial_path(run_dir, rollouts), document)
            commit(run_dir, document, self._job.config.checkpoint.keep)

    def _document(self, rollouts: int, digests: dict[str, str], hashes: list[str]) -> Checkpoint:
        """Say what is saved; `hashes` are those of every rank's file."""
        config, contract = self._job.config, self._trainer.model.wiring.contract
        layout, files = config.layout, {}
        for index in range(layout.tp):
            shards, sha256 = (
                virtual_shards(layout.tp, index, contract.virtual_tp),
                hashes[layout.rank(0, 0, index)],
            )
            files[file_name(index)] = ShardEntry(sha256=sha256, first=shards.start, end=shards.stop)
        return Checkpoint(
            run_id=self._job.run_id,
            rollouts=rollouts,
            optimizer_steps=self._trainer.optimizer.steps,
            prompts=rollouts * config.prompts_per_rollout,
            seed=config.seed,
            contract_hash=contract.sha256,
            config_hash=config.config_hash,
            continuation_hash=continuation_hash(to_plain(config)),
            initial_weights_digest=self.initial_digest,
            weights_digest=digests["weights"],
            optimizer_digest=digests["optimizer"],
            reference_digest=digests.get("reference"),
            groups=dict(Counter(name.partition("/")[0] for name, _, _ in self._state())),
            layout={axis: getattr(layout, axis) for axis in ("dp", "cp", "tp", "sp")},
            files=files,
        ).sealed()

    def _state(self) -> Iterator[Named]:
        """Yield every tensor that is saved, by group and name."""
        for name, weight, sharded in self._trainer.model.named_shards():
            yield f"{WEIGHT}/{name}", weight, sharded
        yield from self._trainer.optimizer.named_state()
        if self._trainer.reference is not None:
            for name, weight, sharded in self._trainer.reference.named_shards():
                yield f"{REFERENCE}/{name}", weight, sharded

    def _digests(self) -> dict[str, str]:
        """Digest weights, optimizer and reference in no layout; the whole TP group calls it."""
        found = {
            "weights": weights_digest(self._trainer.model),
            "optimizer": bits.digest(shard_entries(self._trainer.optimizer.named_state(), self._mesh.tp)),
        }
        if self._trainer.reference is not None:
            found["reference"] = weights_digest(self._trainer.reference)
        return found

    def _asked_to_stop(self) -> bool:
        """Ask all ranks whether any machine wants the run to stop, so that all stop at one point."""
        asked = torch.tensor([self._board.stop_asked()], dtype=torch.uint8, device=self._device)
        return bool(collectives.gather(asked, self._mesh.world).any().item())


def _saved(job: Job) -> Checkpoint | None:
    """Read what the checkpoint says that the job goes on from."""
    if job.resumed is None or job.resumed.checkpoint is None:
        return None
    document = Checkpoint.read(checkpoint_path(job.saved_dir, job.resumed.rollout) / DOCUMENT_NAME)
    if document.digest() != job.resumed.digest:
        raise CheckpointError(f"{FOLDER}/{job.resumed.checkpoint} is another one than the job says")
    return document
