"""Replay one sequence of a rollout on both sides and name the first boundary at which they differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rlsp import bits, collectives
from rlsp.capture import Exchange, Key, RowRecorder, sites
from rlsp.config import Job
from rlsp.groups import Mesh
from rlsp.layout import assign_prompts
from rlsp.model.build import PolicyModel
from rlsp.model.weights import weights_digest
from rlsp.model.wiring import Boundary, Site
from rlsp.report.diagnose import Words, by_position, compare_boundary, in_order
from rlsp.report.diagnose_records import (
    BoundaryResult,
    Diagnosis,
    Outcome,
    RecordedTokens,
    State,
)
from rlsp.rl.batch import RolloutBatch
from rlsp.rl.forward import Forward
from rlsp.rl.rollout.native import NativeEngine, Sampling, Sequence
from rlsp.rl.update import Trainer

if TYPE_CHECKING:
    from rlsp.rl.rollout.native import _Batch

_ROW_DIGEST, _TOKEN = "row digest", "token"
_LOGP = Site(Boundary.LOGP)
_HEAD = (Boundary.LOGITS, Boundary.LOGP)


class ReplayError(RuntimeError):
    """The weights are not those of the rollout, or the engine does not end where the record does."""


@dataclass(frozen=True)
class Record:
    """A rollout as the run recorded it.

    Attributes:
        rollout: Its index.
        sequences: What the engines were asked for, all of them.
        sampling: How they drew.
        batch: What they recorded.
        train: What training recorded in the first update.
        weights: Digest of the weights that drew it.
        updates: Updates that led to those weights.
    """

    rollout: int
    sequences: list[Sequence]
    sampling: Sampling
    batch: RolloutBatch
    train: Forward
    weights: str
    updates: int

    def predicting(self, sample: int) -> range:
        """Return the positions whose rows predict the tokens of a response, of at least one token."""
        active = self.batch.active_mask[sample].nonzero().flatten().tolist()
        return range(active[0] - 1, active[-1])

    def first_mismatch(self) -> int | None:
        """Return the first sequence with a token whose two log-probabilities or rows differ in a bit."""
        batch, train = self.batch, self.train
        differ = bits.differing(batch.logp, train.logp) | (batch.row_digest != train.row_digest)
        wrong = (differ & batch.active_mask).any(dim=1).nonzero().flatten()
        return int(wrong[0]) if wrong.numel() else None


class ReplayEngine(NativeEngine):
    """Generate a share of sequences again, with the recorded tokens in the place of those that it draws."""

    def __init__(
        self,
        engine: NativeEngine,
        recorder: RowRecorder,
        target: int,
        sequences: list[Sequence],
        responses: list[list[int]],
    ) -> None:
        """Take over an engine's model; show `recorder` what is computed of sequence `target` of the share."""
        super().__init__(engine.model, engine._groups, engine._head_dim, engine._layers)
        self._recorder, self._target = recorder, target
        self._sequences, self._responses = sequences, responses

    def _forward(self, batch: _Batch, tokens: Tensor, positions: Tensor) -> Tensor:
        row = self._row(batch)
        mine = positions[:, row or 0]
        self._recorder.look(
            row, len(batch.index), torch.where(mine < batch.lengths[row or 0], mine, -1)
        )  # a prefill runs past the end of shorter prompts
        return super()._forward(batch, tokens, positions)

    def _draw(
        self, hidden: Tensor, batch: _Batch, sampling: Sampling
    ) -> tuple[list[int], list[float], list[int]]:
        row = self._row(batch)
        self._recorder.look(row, len(batch.index), batch.lengths[row or 0].view(1) - 1)
        drawn, logp, digests = super()._draw(hidden, batch, sampling)
        self._recorder.note(_TOKEN, torch.tensor(drawn))
        self._recorder.note(_ROW_DIGEST, torch.tensor(digests))
        lengths = batch.lengths.tolist()
        return (
            [self._recorded(i, length) for i, length in zip(batch.index, lengths, strict=True)],
            logp,
            digests,
        )

    def _row(self, batch: _Batch) -> int | None:
        return batch.index.index(self._target) if self._target in batch.index else None

    def _recorded(self, index: int, length: int) -> int:
        """Return the token that the run recorded at position `length` of a sequence of the share."""
        response, step = self._responses[index], length - len(self._sequences[index].tokens)
        if step >= len(response):
            raise ReplayError(
                f"sequence {index} of an engine ends after {len(response)} tokens in the record alone"
            )
        return response[step]


class Replayer:
    """Replay sequences on this rank's models; every rank takes part in every call."""

    def __init__(self, job: Job, trainer: Trainer, engine: NativeEngine | None, mesh: Mesh) -> None:
        """Take the models of both sides (no engine where this rank idles during rollout)."""
        self._run_id, self._config = job.run_id, job.config
        self._trainer, self._engine, self._mesh = trainer, engine, mesh

    def replay(self, record: Record, sample: int, notes: tuple[str, ...] = ()) -> Diagnosis | None:
        """Compute both sides of one sequence again and compare them; the diagnosis is rank 0's.

        Either side computes the whole batch in which the sequence stood, so that arithmetic that depends on a
        batch shows itself.

        Args:
            record: The rollout.
            sample: Row of its batch, with active tokens.
            notes: What a reader should know besides.

        Raises:
            ReplayError: On every rank, where a side holds other weights; on an engine's, where it does not
                end a response where the record does.
            CoverageError: On rank 0, where a side left something out.
        """
        self._prove_weights(record.weights)
        training, generating = self._train_again(record, sample), self._draw_again(record, sample)
        predicting = record.predicting(sample)
        boundaries, again = self._compared(training, generating, predicting)
        if self._mesh.world.index:
            return None
        first = next((result.first for result in boundaries if result.state is State.FIRST), None)
        return Diagnosis(
            run_id=self._run_id,
            rollout=record.rollout,
            sample=sample,
            prompt_tokens=predicting.start + 1,
            response_tokens=len(predicting),
            weights_digest=record.weights,
            updates=record.updates,
            outcome=Outcome.EQUAL if first is None else Outcome.DIFFERENT,
            first=first,
            boundaries=boundaries,
            recorded=_counted(record, sample, again),
            notes=notes,
        )

    def _prove_weights(self, weights: str) -> None:
        models = [self._trainer.model, *([self._engine.model] if self._engine else [])]
        wrong = torch.tensor([weights_digest(model) != weights for model in models]).any().to(torch.int64)
        if collectives.max_integers(wrong.view(1).to(self._device), self._mesh.world).item():
            raise ReplayError(f"the models do not hold the weights of the rollout, {weights}")

    def _train_again(self, record: Record, sample: int) -> RowRecorder:
        """Compute training's side, with gradients enabled as in the run."""
        model = self._trainer.model
        recorder = RowRecorder(model.wiring)
        with _uncounted(model), model.wiring.recording(recorder):
            scores = self._trainer.rescore(record.batch, sample, recorder.look)
            if scores is not None:
                recorder.note(_ROW_DIGEST, scores.row_digest)
        return recorder

    def _draw_again(self, record: Record, sample: int) -> RowRecorder | None:
        """Compute the rollout's side on the engine that drew the sequence."""
        layout = self._config.rollout_layout
        place = layout.coords(self._mesh.world.rank)
        if self._engine is None or place is None:
            return None
        share = assign_prompts(len(record.sequences), layout.engines)[place.engine]
        if sample not in share:
            return None
        model, everyone = self._engine.model, record.batch.responses()
        recorder = RowRecorder(model.wiring)
        sequences, responses = [record.sequences[i] for i in share], [everyone[i] for i in share]
        engine = ReplayEngine(self._engine, recorder, share.index(sample), sequences, responses)
        with _uncounted(model), model.wiring.recording(recorder):
            engine.generate(sequences, record.sampling)
        return recorder

    def _compared(
        self, training: RowRecorder, generating: RowRecorder | None, predicting: range
    ) -> tuple[tuple[BoundaryResult, ...], dict[str, Words]]:
        """Compare every boundary, and return what was replayed of each token by its name in `RecordedTokens`.

        Both are rank 0's, and empty elsewhere; one boundary's tensors are exchanged at a time.
        """
        places = list(sites(self._config.model.num_layers))
        keys: list[Key] = [*places, _ROW_DIGEST, _TOKEN]
        a, b = (Exchange(keys, side, self._mesh.world, self._device) for side in (training, generating))
        results: list[BoundaryResult] = []
        again: dict[str, Words] = {}
        for site in places:
            train, rollout = a.pieces(site), b.pieces(site)
            if self._mesh.world.index:
                continue
            positions = predicting if site.boundary in _HEAD else range(predicting.stop)
            features = self._config.model.vocab_size if site.boundary is Boundary.LOGITS else None
            place = (site.boundary.value, site.layer)
            results.append(compare_boundary(*place, train, rollout, positions, features))
            if site.boundary is Boundary.LOGP:
                again["train_logprob"] = by_position(train, predicting)
                again["rollout_logprob"] = by_position(rollout, predicting)
        others = (("train_row", a, _ROW_DIGEST), ("rollout_row", b, _ROW_DIGEST), ("drawn", b, _TOKEN))
        for name, side, key in others:
            pieces = side.pieces(key)
            if self._mesh.world.index == 0:
                again[name] = by_position(pieces, predicting)
        return in_order(results), again

    @property
    def _device(self) -> torch.device:
        return next(self._trainer.model.parameters()).device


def _counted(record: Record, sample: int, again: dict[str, Words]) -> RecordedTokens:
    """Count the active tokens whose replay differs from the record."""
    batch, train = record.batch, record.train
    mask = batch.active_mask[sample]
    stored = {
        "train_logprob": train.logp,
        "train_row": train.row_digest,
        "rollout_logprob": batch.logp,
        "rollout_row": batch.row_digest,
        "drawn": batch.tokens,
    }
    counts = {}
    for name, words in again.items():
        wanted = bits.bit_pattern(stored[name][sample][mask]).numpy()
        counts[name] = int(np.count_nonzero(words.view(wanted.dtype) != wanted))
    return RecordedTokens(tokens=int(mask.sum()), **counts)


@contextmanager
def _uncounted(model: PolicyModel) -> Iterator[None]:
    """Leave the counts of operators as they are: the run declares its own calls alone."""
    calls = model.wiring.calls
    before = Counter(calls)
    try:
        yield
    finally:
        calls.clear()
        calls.update(before)
