"""The native route's log-probabilities: torch's reductions over the vocabulary, summed by the backend."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor

from rlsp import bits, collectives
from rlsp.model.compat import lone_group
from rlsp.model.head import TokenScores, Vocabulary
from rlsp.model.wiring import NATIVE, Boundary, Operator, Site, Wiring
from rlsp.numerics.logprob import tempered


def native_scores(
    logits: Tensor, targets: Tensor, temperature: float, vocabulary: Vocabulary, wiring: Wiring
) -> TokenScores:
    """Return what `head.score_tokens` returns, as Megatron-Core's vocabulary-parallel cross entropy sums it.

    Every rank sums its own columns in one reduction of torch's, and the backend adds the ranks' sums; the
    gradient is autograd's.
    """
    wiring.count(Operator.LOGP, NATIVE)
    shards = vocabulary.by_shard(logits)
    with torch.no_grad():
        digest = bits.row_digest(shards.detach().flatten(1), vocabulary.first, vocabulary.size)
        digest = collectives.gather(digest.unsqueeze(0), wiring.tp, dim=0).sum(dim=0)
    x = tempered(shards, temperature, vocabulary.valid).flatten(1)
    top = collectives.gather(x.detach().amax(dim=-1).unsqueeze(0), wiring.tp, dim=0).amax(dim=0)
    shifted = x - top.unsqueeze(-1)
    weight = torch.exp(shifted)
    local = targets - vocabulary.first
    owned = (local >= 0) & (local < vocabulary.valid.numel())
    picked = shifted.gather(1, torch.where(owned, local, 0).unsqueeze(1)).squeeze(1)
    sums = torch.stack((weight.sum(dim=-1), (weight * shifted).sum(dim=-1), torch.where(owned, picked, 0.0)))
    if wiring.tp.size > 1:
        sums = reduce_from_tensor_model_parallel_region(sums, group=lone_group(wiring.tp))
    total, moment, target = sums
    log_total = torch.log(total)
    logp = target - log_total
    wiring.capture(Site(Boundary.LOGP), logp)
    return TokenScores(logp, log_total - moment / total, digest)


def native_logp(x: Tensor, tokens: Tensor, wiring: Wiring) -> Tensor:
    """Return the log-probability of drawn tokens, float32 [T], as an inference engine takes it.

    Args:
        x: [T, V_local, n] float32 from `logprob.tempered`.
        tokens: int64 [T].
        wiring: The engine's wiring; the columns of its TP group are gathered, then normalised in one go.
    """
    wiring.count(Operator.LOGP, NATIVE)
    whole = collectives.gather(x.flatten(1), wiring.tp, dim=1)
    return torch.log_softmax(whole, dim=-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
