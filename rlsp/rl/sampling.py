"""Draw tokens such that a draw depends on what is drawn alone: not on rank, batch, call order or cut.

The Gumbel-max trick (Gumbel, 1954; Maddison et al., NeurIPS 2014): the index that maximises logit + Gumbel
noise is a sample of the softmax. A maximum is exact in any order, so shards of the vocabulary need no
common sum, and each rank makes the noise of its own columns from the draw's key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from rlsp.numerics.hashing import hash_words, uniform

_STREAM: Final = 0x53414D504C494E47  # "SAMPLING": apart from whatever else a seed is hashed for.


def draw_keys(
    seed: int,
    rollout: int,
    prompt: Int64[Tensor, " B"],
    sample: Int64[Tensor, " B"],
    position: Int64[Tensor, " B"],
) -> Int64[Tensor, " B"]:
    """Name one draw a row by a 64-bit key.

    Args:
        seed: The run's seed.
        rollout: Index of the rollout.
        prompt: Index of the prompt within the rollout.
        sample: Index of the sample within its prompt.
        position: Position of the token that is drawn.

    Returns:
        One key a row.
    """
    return hash_words(_STREAM, seed, rollout, prompt, sample, position)


def gumbel(keys: Int64[Tensor, " B"], first_index: int, count: int) -> Float32[Tensor, "B count"]:
    """Make the noise of `count` vocabulary columns that start at `first_index`.

    u is an odd multiple of 2^-24, hence exact in float32 and strictly inside (0, 1); the noise,
    -log(-log(u)), lies in [-2.82, 16.64]. A token of probability below about 3e-8 is therefore practically
    never drawn, as with any float32 uniform.

    Args:
        keys: As from `draw_keys`.
        first_index: Vocabulary index of the first column.
        count: Number of columns.

    Returns:
        Element [b, i] is a function of keys[b] and first_index + i alone.
    """
    return -torch.log(-torch.log(uniform(keys, first_index, count)))


@dataclass(frozen=True)
class Candidates:
    """Each virtual shard's best column of each row.

    Attributes:
        scores: logit + noise.
        indices: Vocabulary index.
        logits: The logit alone.
    """

    scores: Float32[Tensor, "B V_local"]
    indices: Int64[Tensor, "B V_local"]
    logits: Float32[Tensor, "B V_local"]


def candidates(
    logits: Float32[Tensor, "B V_local n"], noise: Float32[Tensor, "B V_local n"], first_index: int
) -> Candidates:
    """Find each virtual shard's best column, the lowest index on ties.

    Args:
        logits: Divided by the temperature; padding holds a finite, hugely negative constant.
        noise: `gumbel(keys, first_index, V_local * n)` in the same shape.
        first_index: Vocabulary index of the first column; the shards are adjacent.

    Returns:
        The candidates. NaN scores are kept for `choose` to refuse.
    """
    shards, width = logits.shape[1], logits.shape[2]
    scores = logits + noise
    best = scores.amax(-1, keepdim=True)
    column = torch.arange(width, device=logits.device)
    # By integers, since which of equal scores an argmax returns is the kernel's choice. NaN equals nothing.
    winner = torch.where(scores == best, column, width - 1).amin(-1, keepdim=True)
    offset = first_index + width * torch.arange(shards, device=logits.device)
    return Candidates(
        scores=best[..., 0], indices=winner[..., 0] + offset, logits=logits.gather(-1, winner)[..., 0]
    )


def choose(scores: Float32[Tensor, "B V"], indices: Int64[Tensor, "B V"]) -> Int64[Tensor, " B"]:
    """Choose each row's token among the candidates of all virtual shards, the lowest index on ties.

    The candidates may stand in any order. A token's virtual shard is token // (padded vocabulary / V).

    Raises:
        ValueError: If a score is NaN, naming the rows: the model's logits were NaN.
    """
    broken = scores.isnan().any(-1)
    if bool(broken.any()):
        rows = broken.nonzero().flatten().tolist()
        raise ValueError(f"NaN among the logits of rows {rows}: no token can be drawn")
    is_best = scores == scores.amax(-1, keepdim=True)
    return torch.where(is_best, indices, torch.iinfo(torch.int64).max).amin(-1)
