"""LM head, log-probability and entropy in one, for vocabularies whose logits do not fit in memory at once.

Logits of a few token leaves are made, reduced to their statistics and dropped; the backward pass makes them
again. Every product, row reduction and leaf is that of `head.score_tokens`, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from rlsp import collectives
from rlsp.model.gradients import Differentiable, ExactParameter
from rlsp.model.head import LocalScores, TokenScores, Vocabulary, local_scores, merged_scores
from rlsp.model.linear import add_token_products, leaves_of, reduce_rows, rows_of
from rlsp.model.wiring import Operator, Wiring
from rlsp.numerics import logprob
from rlsp.numerics.products import widened
from rlsp.numerics.tree import tree_sum

LOGITS_AT_ONCE = 1 << 22
"""Elements of the local logits that lie in memory at a time, at least one leaf's: 16 MiB of float32."""

WHOLE_LOGITS = 1 << 24
"""Local logits of up to this many elements are kept: to make them again would cost more than to keep them."""


def score_hidden(
    hidden: Tensor,
    weight: ExactParameter,
    targets: Tensor,
    temperature: float,
    vocabulary: Vocabulary,
    wiring: Wiring,
) -> TokenScores:
    """Return what `head.score_tokens` returns for the logits hidden·weightᵀ; differentiable in both.

    Args:
        hidden: [s(/tp), b, H] in the model's dtype, s a multiple of the token block.
        weight: The head's, or the embedding's where they are tied.
        targets: int64 [s·b], sequence-major.
        temperature: Divides the logits, in float32.
        vocabulary: This rank's columns.
        wiring: The model's wiring.
    """
    wiring.count(Operator.LOGP)
    logp, entropy, digest = _HiddenScores.on(hidden, weight, targets, temperature, vocabulary, wiring)
    return TokenScores(logp, entropy, digest)


class _HiddenScores(Differentiable):
    """Score token leaves in turn, then merge the statistics of all ranks in one message."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: ExactParameter,
        targets: Tensor,
        temperature: float,
        vocabulary: Vocabulary,
        wiring: Wiring,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keep the gathered hidden states and what is known of each row."""
        full = collectives.gather(hidden, wiring.tp, dim=0) if wiring.sequence_parallel else hidden
        block = wiring.contract.token_block
        by_leaf = leaves_of(targets.view(*full.shape[:2], 1, 1), block)
        ctx.every = _Leaves(
            leaves_of(full.unsqueeze(2), block), weight, by_leaf, temperature, vocabulary, wiring
        )
        wide = widened(weight.detach())
        parts = (ctx.every.score(part, wide) for part in ctx.every.parts())
        found = LocalScores(*(rows_of(x, full.shape[1], block) for x in _joined(parts, targets.numel())))
        logp, entropy, log_sum, digest = merged_scores(found, targets, vocabulary, wiring)
        ctx.save_for_backward(log_sum, entropy)
        ctx.full_shape, ctx.dtype = full.shape, full.dtype
        ctx.mark_non_differentiable(digest)
        return logp, entropy, digest

    @staticmethod
    def backward(
        ctx: Any, dlogp: Tensor, dentropy: Tensor, _: Tensor
    ) -> tuple[Tensor, None, None, None, None, None]:
        """Make the logits again, part by part; the input's gradient is summed over TP at the end."""
        every: _Leaves = ctx.every
        s, b, _h = ctx.full_shape
        block = every.wiring.contract.token_block
        known = [
            leaves_of(x.view(s, b, 1, -1), block)
            for x in (*ctx.saved_tensors, dlogp.contiguous(), dentropy.contiguous())
        ]
        wide = widened(every.weight.detach())
        parts = ((every.back(part, wide, [x[part] for x in known]),) for part in every.parts())
        rows = rows_of(_joined(parts, s * b)[0], b, block).view(s, b, -1)
        return reduce_rows(rows, every.wiring).to(ctx.dtype), None, None, None, None, None


def _joined(parts: Iterable[Sequence[Tensor]], rows: int) -> list[Tensor]:
    """Put parts [t, …] one below the other into memory that is taken once.

    Small tensors that are kept between large ones that go would split the heap, and with it the room for the
    next large one: the peak was up to twenty times as high, by chance.
    """
    whole: list[Tensor] = []
    first = 0
    for part in parts:
        whole = whole or [x.new_empty((rows, *x.shape[1:])) for x in part]
        for target, x in zip(whole, part, strict=True):
            target[first : first + x.shape[0]] = x
        first += part[0].shape[0]
    return whole


class _Leaves:
    """Hidden states and targets by token leaf, and the head that scores them."""

    def __init__(
        self,
        hidden: Tensor,
        weight: ExactParameter,
        targets: Tensor,
        temperature: float,
        vocabulary: Vocabulary,
        wiring: Wiring,
    ) -> None:
        """Take hidden states [L, block, 1, H] and targets [L, block, 1, 1]."""
        self.hidden, self.weight, self.targets = hidden, weight, targets
        self.temperature, self.vocabulary, self.wiring = temperature, vocabulary, wiring

    def parts(self) -> list[slice]:
        """Return runs of leaves whose logits may lie in memory at once."""
        count, block = self.hidden.shape[:2]
        at_once = max(1, LOGITS_AT_ONCE // (block * self.vocabulary.valid.numel()))
        return [slice(first, first + at_once) for first in range(0, count, at_once)]

    def score(self, part: slice, wide: Tensor) -> LocalScores:
        """Reduce some leaves' rows to what the merge needs; their logits go. `wide`: the head in float32."""
        targets = self.targets[part].flatten()
        return local_scores(self._logits(part, wide), targets, self.temperature, self.vocabulary)[1]

    def back(self, part: slice, wide: Tensor, known: list[Tensor]) -> Tensor:
        """Return the gradient of some leaves' hidden states [rows, H], and add their weight gradient leaves.

        Args:
            part: The leaves.
            wide: The head in float32: widening it for each part would cost as much as the product.
            known: Of the same leaves, [l, block, 1, …]: normaliser, entropy, and the gradients of
                log-probability and entropy.
        """
        normaliser, entropy, dlogp, dentropy = (x.flatten(0, 2) for x in known)
        hidden, valid = self.hidden[part], self.vocabulary.valid
        logits = self._logits(part, wide)
        x = logprob.tempered(self.vocabulary.by_shard(logits), self.temperature, valid)
        grad = logprob.back(
            x,
            valid,
            normaliser,
            entropy.squeeze(1),
            self.vocabulary.column(self.targets[part].flatten()),
            dlogp.squeeze(1),
            dentropy.squeeze(1),
        )
        dy = (grad / self.temperature).to(logits.dtype).flatten(1)
        add_token_products(self.wiring, self.weight, dy.view(*hidden.shape[:2], valid.shape[0], -1), hidden)
        return self.wiring.products.column_back(dy, wide, tree_sum)

    def _logits(self, part: slice, wide: Tensor) -> Tensor:
        hidden = self.hidden[part].flatten(0, 2)
        return self.wiring.products.column(hidden, wide, hidden.dtype)
