"""Generate with an external engine: hand over and prove the weights, ask, and give every rank the responses.

Rank 0 speaks to the engine. The others wait for it in short steps, so that no collective waits longer than
usual however long the engine takes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from rlsp import collectives
from rlsp.config import ModelConfig
from rlsp.groups import Mesh
from rlsp.model.build import PolicyModel
from rlsp.model.hf import write_folder
from rlsp.model.weights import weights_digest
from rlsp.numerics.hashing import hash_words
from rlsp.rl.batch import RolloutBatch, collate
from rlsp.rl.rollout.answers import digest_of, integer_of, responses_of
from rlsp.rl.rollout.dispatch import StaleWeightsError
from rlsp.rl.rollout.engine import EngineError, ExternalEngine
from rlsp.rl.rollout.native import Response, Sampling, Sequence, limits_of

_STREAM: Final = 0x45585445524E414C  # "EXTERNAL": apart from whatever else a seed is hashed for
_SEED_BITS: Final = 63
_BEAT_SHARE: Final = 0.2
_MAX_BEAT_S: Final = 5.0


@dataclass(frozen=True)
class Wiring:
    """What external rollouts are made of besides the trainer.

    Attributes:
        shape: What the trainer's model was built from; whether it came from a checkpoint does not matter.
        described: The same as transformers' config.json.
        start: Starts the engine with the model of a folder; called on rank 0 alone.
        folder: Where weights are written on their way; absent before.
        pad_id: Fills a batch.
        timeout_s: How long a collective may take: rank 0 gives signs of life while it waits for the engine.
    """

    shape: ModelConfig
    described: dict[str, Any]
    start: Callable[[Path], ExternalEngine]
    folder: Path
    pad_id: int
    timeout_s: float

    @property
    def beat_s(self) -> float:
        """Return how long rank 0 is silent at most, seconds."""
        return min(_BEAT_SHARE * self.timeout_s, _MAX_BEAT_S)


class ExternalRollouts:
    """Generate with one external engine from the trainer's weights; every rank takes part in every call."""

    engine: None = None
    """No rank holds a model of the engine's."""

    def __init__(self, trainer: PolicyModel, mesh: Mesh, wiring: Wiring) -> None:
        """Start the engine on rank 0; it gets ready while the caller goes on."""
        self._trainer, self._mesh, self._wiring = trainer, mesh, wiring
        self.weight_version = -1
        self.found_share = 0.0
        self._room: int | None = None
        self._engine: ExternalEngine | None = None
        if mesh.world.index == 0:
            home = wiring.folder / "model"
            home.mkdir(parents=True, exist_ok=True)  # a resumed run has one
            (home / "config.json").write_text(json.dumps(wiring.described) + "\n")
            self._engine = wiring.start(home)

    def synchronise(self, version: int) -> tuple[str, str]:
        """Hand the trainer's weights to the engine under `version`; return the trainer's digest and its.

        The engine's is of the tensors that its loader took, in the trainer's terms; `found_share` is the part
        of their elements that was found again in its model, with the same bits.

        Raises:
            StaleWeightsError: On every rank, where digest or version are not the trainer's.
            EngineError: On rank 0, where the engine fails.
        """
        if self._room is None:
            answer = self._await()
            self._room = integer_of(answer, "max_tokens") if answer is not None else 0
        own, weights = weights_digest(self._trainer), self._wiring.folder / "weights"
        write_folder(self._trainer, self._wiring.shape, weights, self._mesh.world)
        request = {"do": "load", "version": version, "folder": str(weights)}
        answer = self._ask(f"load weights of version {version}", request)
        said, digest = [0, 0, 1], bytes(32)
        if answer is not None:
            shutil.rmtree(weights)
            said = [integer_of(answer, key) for key in ("version", "found", "elements")]
            digest = digest_of(answer)
        loaded, found, elements = self._from_first(torch.tensor(said)).tolist()
        held = bytes(self._from_first(torch.tensor(list(digest), dtype=torch.uint8)).tolist()).hex()
        if (loaded, held) != (version, own):
            raise StaleWeightsError(
                f"the engine holds weights {held} under version {loaded}, "
                f"the trainer {own} under version {version}"
            )
        self.weight_version, self.found_share = version, found / elements
        return own, held

    def generate(self, sequences: list[Sequence], sampling: Sampling, version: int) -> RolloutBatch:
        """Draw every sequence's response and return all of them on every rank.

        Args:
            sequences: What to draw, the same list on every rank.
            sampling: How; a sequence's seed is keyed by the run's, the rollout, its prompt and its sample.
            version: The weight version that is to draw.

        Raises:
            StaleWeightsError: On every rank, where the engine holds or names another version.
            EngineError: On rank 0, where the engine fails, or a response cannot be.
        """
        if self.weight_version != version:
            raise StaleWeightsError(
                f"version {version} was to be rolled out, but the engine holds version {self.weight_version}"
            )
        responses = [Response() for _ in sequences]
        limits = limits_of(sequences, sampling)
        wanted = [i for i, limit in enumerate(limits) if limit > 0]
        if wanted:
            some = [sequences[i] for i in wanted], [limits[i] for i in wanted]
            for i, response in zip(wanted, self._draw(*some, sampling, version), strict=False):
                responses[i] = response
        width = max(len(s.tokens) for s in sequences) + sampling.max_tokens
        batch = collate(sequences, responses, width, self._wiring.pad_id)
        fields = (batch.tokens, batch.active_mask, batch.lengths, batch.logp, batch.row_digest)
        batch = RolloutBatch(*map(self._from_first, fields))
        longest = int(batch.lengths.max())
        return RolloutBatch(
            batch.tokens[:, :longest],
            batch.active_mask[:, :longest],
            batch.lengths,
            batch.logp[:, :longest],
            batch.row_digest[:, :longest],
        )

    def metrics(self) -> dict[str, float]:
        """Return what the metrics say of the engine besides."""
        return {"rollout/weights_found_fraction": self.found_share}

    def _draw(
        self, sequences: list[Sequence], limits: list[int], sampling: Sampling, version: int
    ) -> list[Response]:
        """Ask for responses; rank 0 has them, the others none."""
        names = [f"prompt {s.prompt}, sample {s.sample}" for s in sequences]
        if self._engine is not None:
            assert self._room is not None
            for name, sequence, limit in zip(names, sequences, limits, strict=True):
                if (length := len(sequence.tokens) + limit) > self._room:
                    raise EngineError(
                        f"{name} may become {length} tokens long, the engine's cache holds {self._room}: "
                        "rollout.kv_cache_gib is too small"
                    )
        stop = list(sampling.eos_ids)
        request = {
            "do": "draw",
            "version": version,
            "temperature": sampling.temperature,
            "stop": stop,
            "requests": list(
                zip([s.tokens for s in sequences], limits, _seeds(sequences, sampling), strict=True)
            ),
        }
        answer = self._ask(f"draw rollout {sampling.rollout}", request)
        used = version if answer is None else integer_of(answer, "version")
        used = int(self._from_first(torch.tensor([used]))[0])
        if used != version:
            raise StaleWeightsError(f"the engine drew with version {used}, asked for version {version}")
        if answer is None:
            return []
        found = responses_of(answer, names, limits, stop, self._wiring.shape.vocab_size)
        # An engine shows no logits: the row digests stay zero, which evidence reads as not recorded.
        return [Response(tokens, logp, [0] * len(tokens)) for tokens, logp in found]

    def _ask(self, doing: str, request: dict[str, Any]) -> dict[str, Any] | None:
        if self._engine is not None:
            self._engine.ask(doing, request)
        return self._await()

    def _await(self) -> dict[str, Any] | None:
        """Wait on every rank until the engine answered; rank 0 has the answer."""
        while True:
            answer = None if self._engine is None else self._engine.answer(self._wiring.beat_s)
            if self._from_first(torch.tensor([answer is not None])).item():
                return answer

    def _from_first(self, x: Tensor) -> Tensor:
        """Return rank 0's tensor on every rank."""
        device = next(self._trainer.parameters()).device
        return collectives.broadcast(x.to(device), self._mesh.world, source=0).cpu()


def _seeds(sequences: list[Sequence], sampling: Sampling) -> list[int]:
    prompts, samples = (torch.tensor(x) for x in zip(*((s.prompt, s.sample) for s in sequences), strict=True))
    words = hash_words(_STREAM, sampling.seed, sampling.rollout, prompts, samples)
    return [word % (1 << _SEED_BITS) for word in words.tolist()]
