"""What training's forward pass leaves for every token: noted by micro-batch, put together from all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlsp import collectives
from rlsp.groups import Mesh
from rlsp.layout import Layout
from rlsp.model.head import TokenScores
from rlsp.rl.batch import RolloutBatch
from rlsp.summation import exact_sums

METRICS = ("loss", "policy_loss", "kl", "entropy", "clip_fraction", "approx_kl")


@dataclass(frozen=True)
class Forward:
    """What training computed for every token of the batch, on every rank.

    Attributes:
        logp: float32 [N, S]; entry t belongs to token t, 0 where inactive, NaN where an active token was
            not covered.
        row_digest: int64 [N, S].
        tokens_by_cp: Active tokens that each CP shard computed.
        replicas_agree: Whether all TP ranks of each (dp, cp) hold the same bits.
    """

    logp: Tensor
    row_digest: Tensor
    tokens_by_cp: tuple[int, ...]
    replicas_agree: bool


@dataclass(frozen=True)
class Shard:
    """A micro-batch as this rank sees it: rows of the batch, own positions, and what stands there.

    Attributes:
        rows: int64 [b], rows of the batch.
        positions: int64 [s], this CP rank's positions.
        tokens: int64 [b, s].
        targets: int64 [b, s], the tokens that follow.
        active: bool [b, s], whether the target counts.
        bound: Magnitude below which attention's gradient leaves must stay, the same in every layout.
    """

    rows: Tensor
    positions: Tensor
    tokens: Tensor
    targets: Tensor
    active: Tensor
    bound: float


class ForwardRecorder:
    """Collect a step's log-probabilities, digests and metric sums from the micro-batches of this rank."""

    def __init__(self, batch: RolloutBatch) -> None:
        self._mask = batch.active_mask
        self._logp = torch.full_like(self._mask, torch.nan, dtype=torch.float32)
        self._digest = torch.zeros_like(self._mask, dtype=torch.int64)
        self._metrics: list[tuple[Tensor, ...]] = []

    def note(self, shard: Shard, scores: TokenScores, metrics: tuple[Tensor, ...]) -> None:
        """Store a micro-batch's active tokens; entry t belongs to token t, computed at position t − 1."""
        s, b = shard.positions.numel(), shard.rows.numel()
        where = shard.active
        rows, columns = shard.rows.unsqueeze(1).expand(b, s)[where], (shard.positions + 1).expand(b, s)[where]
        self._logp[rows, columns] = scores.logp.detach().view(s, b).t()[where]
        self._digest[rows, columns] = scores.row_digest.view(s, b).t()[where]
        self._metrics.append(tuple(x.reshape(-1) for x in metrics))

    def forward(self, layout: Layout, mesh: Mesh) -> Forward:
        """Put the shards of all ranks together: one exchange over the world."""
        parts = collectives.gather_many([self._logp, self._digest], mesh.world)
        logp, digest = torch.zeros_like(self._logp), torch.zeros_like(self._digest)
        logp[self._mask] = torch.nan
        counts, agree = [0] * layout.cp, True
        for rank, (part, hashes) in enumerate(zip(*parts, strict=True)):
            place = layout.coords(rank)
            covered = ~part.isnan()
            if place.tp == 0:
                logp[covered], digest[covered] = part[covered], hashes[covered]
                counts[place.cp] += int(covered.sum())
            else:
                first = rank - place.tp
                same = bool((parts[0][first].view(torch.int32) == part.view(torch.int32)).all())
                agree = agree and same and bool((parts[1][first] == hashes).all())
        return Forward(logp.cpu(), digest.cpu(), tuple(counts), agree)

    def means(self, mesh: Mesh, batch: RolloutBatch) -> dict[str, float]:
        """Return the exact means over all active tokens, equal in every layout."""
        nothing = [torch.zeros(1, device=self._logp.device)] * len(METRICS)
        columns = [torch.cat(parts) for parts in zip(*self._metrics, strict=True)] or nothing
        sums = exact_sums(columns, mesh.token)
        return {name: total / max(batch.active_tokens, 1) for name, total in zip(METRICS, sums, strict=True)}
