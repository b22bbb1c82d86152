"""Which ranks of a run own a value: a virtual shard, a token's training or its drawing."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, ValidationError

from rlsp.layout import assign_prompts, assign_sequences, padded_length, zigzag_positions
from rlsp.report.files import EvidenceError
from rlsp.report.manifest import MANIFEST_NAME, Manifest, Segment

Ranks = tuple[int, ...]


class _Numerics(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    virtual_tp: int
    token_block: int
    q_block: int
    k_block: int


class _Config(BaseModel):
    """The keys of a composed config that say who computes what."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    micro_batch_size: int
    numerics: _Numerics


class Owners:
    """Answer for one segment of a run, from its manifest alone.

    Raises:
        EvidenceError: The manifest's config does not say how work is cut.
    """

    def __init__(self, manifest: Manifest | Segment) -> None:
        try:
            self._config = _Config.model_validate(manifest.config)
        except ValidationError as error:
            raise EvidenceError(f"{MANIFEST_NAME}: config does not say how work is cut: {error}") from error
        self._layout, self._rollout = manifest.layout, manifest.rollout_layout

    def everyone(self) -> Ranks:
        """List every rank: what each holds a copy of."""
        return tuple(row.rank for row in self._layout.table)

    def of_shard(self, shard: int, shards: int) -> Ranks:
        """List the ranks that hold virtual shard `shard` of `shards`; every rank holds an uncut tensor."""
        if shards == 1 or self._config.numerics.virtual_tp % self._layout.tp:
            return self.everyone()
        owner = shard // (self._config.numerics.virtual_tp // self._layout.tp)
        return tuple(row.rank for row in self._layout.table if row.tp == owner)

    def of_drawing(self, sample: int, samples: int) -> Ranks:
        """List the ranks of the engine that drew sample `sample` of `samples`."""
        shares = assign_prompts(samples, self._rollout.engines)
        engine = next((number for number, share in enumerate(shares) if sample in share), None)
        return tuple(row.rank for row in self._rollout.table if row.engine == engine)

    def of_training(self, sample: int, token: int, lengths: Sequence[int]) -> Ranks:
        """List the ranks whose forward pass scored token `token` of sample `sample`, one a TP shard.

        The score of a token comes from the position before it. Where that position lies follows from the
        sequences beside it: replicas share the sequences out by length, micro-batches pad them to one length,
        and CP deals that length out in a zigzag.
        """
        shares = enumerate(assign_sequences(tuple(lengths), self._layout.dp))
        replica, share = next((number, share) for number, share in shares if sample in share)
        size, place = self._config.micro_batch_size, share.index(sample)
        beside = share[place - place % size :][:size]
        numerics, cp = self._config.numerics, self._layout.cp
        blocks = (numerics.token_block, numerics.q_block, numerics.k_block)
        length = padded_length(max(lengths[row] for row in beside), cp, self._layout.tp, blocks)
        shard = next(index for index in range(cp) if token - 1 in zigzag_positions(length, cp, index))
        return tuple(r.rank for r in self._layout.table if (r.dp, r.cp) == (replica, shard))
