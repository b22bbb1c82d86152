"""Vocabulary-parallel embedding that leaves its output on sequence shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rlsp import collectives
from rlsp.model.gradients import Differentiable, Weight, exact_parameter
from rlsp.model.wiring import STRICT, Boundary, Site, Wiring
from rlsp.summation import Rule, Span


class VocabParallelEmbedding(nn.Module):
    """Hold virtual shards [V_local, rows, H] of the padded vocabulary."""

    route = STRICT

    def __init__(self, config: Any, padded_vocab: int, hidden_size: int) -> None:
        """Allocate the rows uninitialised."""
        super().__init__()
        wiring: Wiring = config.wiring
        self.wiring = wiring
        shape = (
            wiring.contract.virtual_tp // wiring.tp.size,
            padded_vocab // wiring.contract.virtual_tp,
            hidden_size,
        )
        self.weight = self._allocate(shape, config.params_dtype)

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Weight:
        # A tied head adds leaves of token_block tokens to the same sum; block=1 is the stricter bound.
        return exact_parameter(shape, dtype, Rule(Span.TOKENS, block=1))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return [s(/tp), b, H] for tokens int64 [b, s]."""
        rows: Tensor = _Lookup.on(tokens, self.weight, self.wiring)
        self.wiring.capture(Site(Boundary.EMBEDDING), rows)
        return rows


class LanguageModelEmbedding(nn.Module):
    """Stand in for Megatron-Core's class of this name: same attributes, no position embedding, no dropout."""

    words: type[VocabParallelEmbedding] = VocabParallelEmbedding

    def __init__(self, config: Any, padded_vocab: int, hidden_size: int) -> None:
        """Make the word embedding."""
        super().__init__()
        self.word_embeddings = self.words(config, padded_vocab, hidden_size)
        self.scatter_to_sequence_parallel = True
        self.reduce_scatter_embeddings = False

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **_: Any) -> Tensor:
        """Return [s(/tp), b, H] for `input_ids` int64 [b, s]; positions enter by RoPE alone."""
        embedded: Tensor = self.word_embeddings(input_ids)
        return embedded


class _Lookup(Differentiable):
    """Take the owner's row: the other ranks add zeros, and every zero of the sum is made positive."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, wiring: Wiring) -> Tensor:
        """Look up owned rows, sum over TP in float32 (one nonzero addend: exact)."""
        index, owned = owned_rows(tokens.t().contiguous(), weight, wiring)
        ctx.save_for_backward(index, owned, weight)
        ctx.wiring = wiring
        table = weight.view(-1, weight.shape[-1])
        out = torch.where(owned.unsqueeze(-1), table[index].float(), 0.0) + 0.0
        if wiring.sequence_parallel:
            out = collectives.reduce_scatter(out, wiring.tp, dim=0)
        else:
            out = collectives.all_reduce(out, wiring.tp)
        return out.to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, None]:
        """Gather the gradient's sequence shards; add one leaf a token to the rows that this rank owns."""
        index, owned, weight = ctx.saved_tensors
        wiring: Wiring = ctx.wiring
        full = collectives.gather(dy, wiring.tp, dim=0) if wiring.sequence_parallel else dy
        weight.token_sum.add_rows(index[owned], full[owned].float())
        return None, None, None


def owned_rows(tokens: Tensor, weight: Tensor, wiring: Wiring) -> tuple[Tensor, Tensor]:
    """Return each token's local row (0 where another rank owns it) and whether this rank owns it."""
    rows = weight.shape[0] * weight.shape[1]
    local = tokens - wiring.tp.index * rows
    owned = (local >= 0) & (local < rows)
    return torch.where(owned, local, 0), owned
