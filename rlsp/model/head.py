"""LM head and log-probabilities over the vocabulary shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlsp import bits, collectives
from rlsp.model.gradients import Differentiable
from rlsp.model.linear import ColumnParallelLinear
from rlsp.model.wiring import Boundary, Operator, Site, Wiring
from rlsp.numerics import logprob


@dataclass(frozen=True)
class Vocabulary:
    """Say which columns of the local logits are true vocabulary.

    Attributes:
        first: Index of this rank's first column in the padded vocabulary.
        size: True vocabulary; columns from here on are padding.
        valid: bool [V_local, n].
    """

    first: int
    size: int
    valid: Tensor

    @classmethod
    def of(cls, wiring: Wiring, vocab_size: int, device: torch.device) -> Vocabulary:
        """Cut the padded vocabulary of the contract for this rank of `wiring.tp`."""
        contract = wiring.contract
        local, shards = contract.padded_vocab // wiring.tp.size, contract.virtual_tp // wiring.tp.size
        first = local * wiring.tp.index
        columns = torch.arange(first, first + local, device=device).view(shards, -1)
        return cls(first, vocab_size, columns < vocab_size)

    def column(self, targets: Tensor) -> Tensor:
        """Return each target's column among this rank's, −1 where another rank owns it: int64 [T]."""
        local = targets - self.first
        return torch.where((local >= 0) & (local < self.valid.numel()), local, -1)

    def by_shard(self, logits: Tensor) -> Tensor:
        """View logits [..., V_local·n] as [T, V_local, n]."""
        return logits.reshape(-1, *self.valid.shape)


class OutputLayer(ColumnParallelLinear):
    """Project hidden states (sequence shards under SP) to the own vocabulary; takes the weight where tied."""

    def __init__(self, config: Any, padded_vocab: int, hidden_size: int, tied: bool) -> None:
        """Allocate the weight, or none where the embedding's serves."""
        super().__init__(hidden_size, padded_vocab, config=config)
        if tied:
            self.weight = None  # type: ignore[assignment]

    def forward(
        self, x: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        """Return logits [s, b, V_local·n] for hidden states [s(/tp), b, H]; they stay sharded."""
        if runtime_gather_output:
            raise ValueError("rlsp keeps logits sharded over the vocabulary")
        return super().forward(x, weight)


@dataclass(frozen=True)
class TokenScores:
    """What the log-probability code leaves for each token.

    Attributes:
        logp: float32 [T].
        entropy: float32 [T].
        row_digest: int64 [T], over the whole vocabulary.
    """

    logp: Tensor
    entropy: Tensor
    row_digest: Tensor


def score_tokens(
    logits: Tensor, targets: Tensor, temperature: float | Tensor, vocabulary: Vocabulary, wiring: Wiring
) -> TokenScores:
    """Return each target's log-probability, the row's entropy and digest; differentiable in the logits.

    Args:
        logits: [..., V_local·n] in the model's dtype.
        targets: int64 [T], tokens of the true vocabulary.
        temperature: Divides the logits, in float32; [T, 1, 1] where each token has its own.
        vocabulary: This rank's columns.
        wiring: The model's wiring; the ranks of its TP group share the rows.
    """
    wiring.count(Operator.LOGP)
    logp, entropy, digest = _Scores.on(logits, targets, temperature, vocabulary, wiring)
    wiring.capture(Site(Boundary.LOGP), logp)
    return TokenScores(logp, entropy, digest)


class _Scores(Differentiable):
    """Merge virtual shards' statistics (numerics.logprob) after one gather over TP."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        temperature: float | Tensor,
        vocabulary: Vocabulary,
        wiring: Wiring,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gather statistics, the target's logit and row digests in one message."""
        x, found = local_scores(logits, targets, temperature, vocabulary)
        logp, entropy, log_sum, digest_sum = merged_scores(found, targets, vocabulary, wiring)
        ctx.save_for_backward(x, log_sum, entropy, vocabulary.column(targets))
        ctx.vocabulary, ctx.temperature, ctx.shape, ctx.dtype = (
            vocabulary,
            temperature,
            logits.shape,
            logits.dtype,
        )
        ctx.mark_non_differentiable(digest_sum)
        return logp, entropy, digest_sum

    @staticmethod
    def backward(
        ctx: Any, dlogp: Tensor, dentropy: Tensor, _: Tensor
    ) -> tuple[Tensor, None, None, None, None]:
        """Return the logits' gradient of the own columns: nothing is summed, so nothing is exchanged."""
        x, log_sum, entropy, target = ctx.saved_tensors
        grad = logprob.back(x, ctx.vocabulary.valid, log_sum, entropy, target, dlogp, dentropy)
        return (grad / ctx.temperature).to(ctx.dtype).view(ctx.shape), None, None, None, None


class LocalScores(NamedTuple):
    """What this rank's columns say of some rows.

    Attributes:
        statistics: float32 [T, V_local, 3], of `logprob.shard_statistics`.
        digest: int64 [T].
        picked: float32 [T], the target's tempered logit; 0 where another rank owns the column.
    """

    statistics: Tensor
    digest: Tensor
    picked: Tensor


def local_scores(
    logits: Tensor, targets: Tensor, temperature: float | Tensor, vocabulary: Vocabulary
) -> tuple[Tensor, LocalScores]:
    """Return the tempered logits, float32 [T, V_local, n], of [..., V_local·n], and their reductions."""
    shards = vocabulary.by_shard(logits)
    x = logprob.tempered(shards, temperature, vocabulary.valid)
    column = vocabulary.column(targets)
    owned = column >= 0
    at = torch.where(owned, column, 0).unsqueeze(1)
    picked = torch.where(owned, x.flatten(1).gather(1, at).squeeze(1), 0.0)
    digest = bits.row_digest(shards.flatten(1), vocabulary.first, vocabulary.size)
    return x, LocalScores(logprob.shard_statistics(x, vocabulary.valid), digest, picked)


def merged_scores(
    found: LocalScores, targets: Tensor, vocabulary: Vocabulary, wiring: Wiring
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Exchange what all ranks' columns say; return log-probability, entropy, normaliser and row digest."""
    every, every_digest, every_picked = share(wiring, (found.statistics,), (found.digest, found.picked))
    owner = torch.div(targets, vocabulary.valid.numel(), rounding_mode="floor")
    target_logit = every_picked.gather(0, owner.unsqueeze(0)).squeeze(0)
    return *logprob.merge(every, target_logit), every_digest.sum(dim=0)


def share(wiring: Wiring, by_shard: tuple[Tensor, ...], by_rank: tuple[Tensor, ...]) -> list[Tensor]:
    """Exchange what the ranks of TP know about their vocabulary shards, in one message.

    Args:
        wiring: The model's wiring.
        by_shard: Tensors [T, V_local, ...]; each comes back as [T, V, ...].
        by_rank: Tensors [T, ...]; each comes back as [tp, T, ...].
    """
    gathered = collectives.gather_many([*by_shard, *by_rank], wiring.tp)
    shards = [x.transpose(0, 1).flatten(1, 2) for x in gathered[: len(by_shard)]]
    return [*shards, *gathered[len(by_shard) :]]
