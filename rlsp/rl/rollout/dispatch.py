"""Spread a rollout over the engines: hand over and prove the weights, generate, collect the responses."""

from __future__ import annotations

import torch

from rlsp import collectives
from rlsp.groups import Mesh
from rlsp.layout import RolloutLayout, assign_prompts
from rlsp.model.build import PolicyModel
from rlsp.model.weights import hand_over, weights_digest
from rlsp.rl.batch import RolloutBatch, collate
from rlsp.rl.rollout.native import NativeEngine, Response, Sampling, Sequence


class StaleWeightsError(RuntimeError):
    """An engine holds other weights or another version than the trainer at dispatch: no token is drawn."""


class Rollouts:
    """Generate on every engine of the rollout layout from the trainer's weights."""

    def __init__(
        self,
        trainer: PolicyModel,
        engine: NativeEngine | None,
        layout: RolloutLayout,
        mesh: Mesh,
        pad_id: int,
    ) -> None:
        """Take this rank's engine (None where it idles) and where all engines stand."""
        self._trainer, self.engine = trainer, engine
        self._layout, self._mesh, self._pad = layout, mesh, pad_id
        self.weight_version = -1

    def synchronise(self, version: int) -> tuple[str, str]:
        """Hand the trainer's weights to the engines under `version`; return the trainer's digest and theirs.

        Raises:
            StaleWeightsError: On every rank, where any engine's digest is not the trainer's.
        """
        model = None if self.engine is None else self.engine.model
        hand_over(self._trainer, model, self._layout.tp)
        own = weights_digest(self._trainer)
        held = own if model is None else weights_digest(model)
        mine = torch.tensor([list(bytes.fromhex(own)), list(bytes.fromhex(held))], dtype=torch.uint8)
        every = collectives.gather(mine.unsqueeze(0).to(self._device), self._mesh.world)
        for rank, (trainer, engine) in enumerate(every.cpu()):
            if not (bytes(trainer.tolist()) == bytes(engine.tolist()) == bytes.fromhex(own)):
                raise StaleWeightsError(
                    f"rank {rank}: trainer {bytes(trainer.tolist()).hex()}, "
                    f"engine {bytes(engine.tolist()).hex()}; this rank's trainer {own}"
                )
        self.weight_version = version
        return own, held

    def generate(self, sequences: list[Sequence], sampling: Sampling, version: int) -> RolloutBatch:
        """Draw every sequence's response on some engine and return all of them on every rank.

        Args:
            sequences: What to draw, the same list on every rank.
            sampling: How.
            version: The weight version that is to draw.

        Raises:
            StaleWeightsError: On every rank, where the engines were handed another version.
        """
        if self.weight_version != version:
            raise StaleWeightsError(
                f"version {version} was to be rolled out, but the engines hold version {self.weight_version}"
            )
        shares = assign_prompts(len(sequences), self._layout.engines)
        place = self._layout.coords(self._mesh.world.rank)
        mine = () if place is None else shares[place.engine]
        drawn: list[Response] = []
        if self.engine is not None:
            drawn = self.engine.generate([sequences[i] for i in mine], sampling)
        width = max(len(s.tokens) for s in sequences) + sampling.max_tokens
        local = collate([sequences[i] for i in mine], drawn, width, self._pad)
        batch = self._everyone(local, shares, len(sequences))
        longest = int(batch.lengths.max())
        return RolloutBatch(
            batch.tokens[:, :longest],
            batch.active_mask[:, :longest],
            batch.lengths,
            batch.logp[:, :longest],
            batch.row_digest[:, :longest],
        )

    def _everyone(self, local: RolloutBatch, shares: tuple[tuple[int, ...], ...], count: int) -> RolloutBatch:
        """Exchange the engines' rows in one message and put them into the request's order."""
        rows = max(map(len, shares))
        fields = (local.tokens, local.active_mask, local.lengths, local.logp, local.row_digest)
        padded = [
            torch.cat((x, x.new_zeros((rows - x.shape[0], *x.shape[1:])))).to(self._device) for x in fields
        ]
        gathered = collectives.gather_many(padded, self._mesh.world)
        out = [x.new_zeros((count, *x.shape[1:])) for x in fields]
        for engine, share in enumerate(shares):
            for target, parts in zip(out, gathered, strict=True):
                target[list(share)] = parts[engine * self._layout.tp, : len(share)].cpu()
        return RolloutBatch(*out)

    def metrics(self) -> dict[str, float]:
        """Return what the metrics say of the engines besides: nothing."""
        return {}

    @property
    def _device(self) -> torch.device:
        return next(self._trainer.parameters()).device
