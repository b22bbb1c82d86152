"""The memory that one rank needs, from shapes alone: what is held all the time, and the two peaks over it.

Activations are those that strict routes keep for the backward pass, without recomputation. Weights,
optimizer, sums and cache are exact; a test holds activations against what autograd saved. Allocators keep
more than they need, and gloo or NCCL, Python and libraries come on top.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlsp.report.plan_shapes import Rank, Weight

_FP32, _INT64, _FP64 = 4, 8, 8
_ADAMW = 3 * _FP32  # master and two moments
_LOGIT_TEMPORARIES = 5 * _FP32  # log p, p, one-hot, gradient and one product of them
_LEAF = _FP32 + _FP32 + _FP64 + _INT64  # a widened weight, and one leaf on its way into the exact sum


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank.

    Attributes:
        weights: The trainer's.
        reference: The initial policy's, where kl_coef is above 0.
        engine: The rollout's copy; 0 on a rank that idles.
        optimizer: Masters and both moments, float32.
        sums: int64 accumulators of the gradients.
        activations: What the largest micro-batch keeps for its backward pass, logits excepted.
        logits: float32 logits of the largest micro-batch, and what their gradient needs.
        workspace: The largest weight widened, and one leaf of its gradient.
        reduction: Copies of sums and gradients while they cross ranks and the optimizer steps.
        cache: Keys and values of the rollout, float32.
    """

    weights: int
    reference: int
    engine: int
    optimizer: int
    sums: int
    activations: int
    logits: int
    workspace: int
    reduction: int
    cache: int

    @property
    def held(self) -> int:
        """Add what stays from step to step."""
        return self.weights + self.reference + self.engine + self.optimizer + self.sums

    @property
    def peak(self) -> int:
        """Add the largest of a backward pass, a step and a rollout to what is held."""
        backward = self.activations + self.logits + self.workspace
        return self.held + max(backward, self.reduction, self.cache)


def memory(rank: Rank) -> Memory:
    """Predict the bytes that a rank needs."""
    config, items = rank.config, _items(rank.weights)
    model_bytes = items * rank.item_bytes
    passes = [_tokens(rank, sequences, length) for sequences, length in rank.micro_batches]
    return Memory(
        weights=model_bytes,
        reference=model_bytes * (config.kl_coef > 0),
        engine=_items(rank.engine_weights) * rank.item_bytes,
        optimizer=items * _ADAMW,
        sums=items * _INT64,
        activations=max((_activations(rank, *each) for each in passes), default=0),
        logits=max((_logits(rank, tokens) for tokens, _ in passes), default=0),
        workspace=max(weight.items for weight in rank.weights) * _LEAF,
        reduction=items * (2 * _INT64 if rank.size("token") > 1 else _FP32),
        cache=_cache(rank),
    )


def saved_activations(rank: Rank, tokens: int, positions: int) -> int:
    """Count what autograd keeps of one micro-batch, the scores' float32 logits excepted.

    Args:
        rank: The rank.
        tokens: Of this rank, over all sequences.
        positions: Of all CP ranks, over all sequences: their keys and values are gathered.
    """
    model, tp = rank.config.model, rank.size("tp")
    item, shard = rank.item_bytes, tokens // (tp if rank.config.layout.sequence_parallel else 1)
    head, config = model.head_dim, rank.config
    heads, groups = config.padded_attention_heads // tp, config.padded_query_groups // tp
    norm = shard * (model.hidden_size * item + _FP32)
    full = tokens * model.hidden_size * item
    per_token = (
        (heads + 2 * groups) * head * item  # the product of QKV, which the head norms keep
        + (heads + groups) * _FP32  # their reciprocals
        + heads * head * item * (groups > 1)  # queries, which lie apart in that product
        + heads * head * (item + _FP32)  # rotated queries, and attention's float32 output
        + heads * 2 * _FP32  # maximum and sum of the softmax
        + heads * head * item  # the projection's input
        + 3 * model.ffn_hidden_size // tp * item  # gate and up, and their product
    )
    key_values = positions * 2 * groups * head * item
    layer = 2 * norm + 2 * full + tokens * per_token + key_values
    return model.num_layers * layer + norm + full


def _activations(rank: Rank, tokens: int, positions: int) -> int:
    """Add what autograd keeps to the largest pass's residual stream in float32, on its way to be summed."""
    return saved_activations(rank, tokens, positions) + tokens * rank.config.model.hidden_size * _FP32


def _logits(rank: Rank, tokens: int) -> int:
    columns = rank.config.padded_vocab // rank.size("tp")
    return tokens * columns * (rank.item_bytes + _FP32 + _LOGIT_TEMPORARIES)


def _cache(rank: Rank) -> int:
    """Count the key-value cache: every sequence has room for the longest that may come out."""
    config, work = rank.config, rank.engine_work
    if not work.prompts:
        return 0
    block = config.numerics.k_block
    room = -(-(max(work.prompts) + max(work.responses)) // block) * block
    groups = config.padded_query_groups // config.rollout.tp
    return 2 * config.model.num_layers * len(work.prompts) * groups * room * config.model.head_dim * _FP32


def _tokens(rank: Rank, sequences: int, length: int) -> tuple[int, int]:
    return sequences * length // rank.size("cp"), sequences * length


def _items(weights: Iterable[Weight]) -> int:
    return sum(weight.items for weight in weights)
