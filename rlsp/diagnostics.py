"""Diagnose, inside a run, the first mismatching sequence of each rollout that has one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rlsp.config import Job
from rlsp.groups import Mesh
from rlsp.model.build import PolicyModel
from rlsp.replay import Record, Replayer
from rlsp.report.diagnose_records import diagnosis_path
from rlsp.rl.rollout.native import NativeEngine
from rlsp.rl.update import Trainer


class Diagnostics:
    """Keep what a replay needs while a rollout is trained on, and replay it where its sides differ."""

    def __init__(self, job: Job, trainer: Trainer, engine: NativeEngine | None, mesh: Mesh) -> None:
        """Do nothing at all unless the job's config says `diagnose=true`."""
        self._job, self._model = job, trainer.model
        self._replayer = Replayer(job, trainer, engine, mesh)
        self._held: dict[str, Tensor] = {}

    def remember(self) -> None:
        """Keep a copy of the weights that a rollout was drawn with, before an update changes them."""
        if self._job.config.diagnose:
            self._held = {name: x.detach().clone() for name, x, _ in self._model.named_shards()}

    def look(self, record: Record) -> None:
        """Replay the first mismatching sequence, if there is one, and write diagnose/NNNNN.json."""
        if not self._job.config.diagnose:
            return
        sample = record.first_mismatch()
        if sample is not None:
            with _holding(self._model, self._held):
                diagnosis = self._replayer.replay(record, sample)
            if diagnosis is not None:
                path = diagnosis_path(self._job.run_dir, record.rollout)
                path.parent.mkdir(exist_ok=True)
                diagnosis.write(path)
        self._held = {}


@contextmanager
def _holding(model: PolicyModel, weights: dict[str, Tensor]) -> Iterator[None]:
    """Let a model hold other weights for a while."""
    held = {name: x.detach().clone() for name, x, _ in model.named_shards()}
    _fill(model, weights)
    try:
        yield
    finally:
        _fill(model, held)


@torch.no_grad()
def _fill(model: PolicyModel, weights: dict[str, Tensor]) -> None:
    for name, parameter, _ in model.named_shards():
        parameter.copy_(weights[name])
