"""Causal attention in fixed blocks: the order of every sum is the order of positions, whoever computes it.

Key blocks are visited in position order by an online softmax; a query visits the blocks up to its own and no
other. The training path works on whole query blocks, the cached path on single queries; both call the same
row products and the same elementwise steps, so a token's bits are the same on either.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlsp.numerics.elementwise import MASKED
from rlsp.numerics.fixed import to_fixed, within
from rlsp.numerics.products import Products, fresh, widened


@dataclass(frozen=True)
class KeyValueGradient:
    """Exact gradients of keys and values.

    Attributes:
        dk: int64 units of 2^-lsb, [B, n_k, block, D].
        dv: Likewise.
        within: bool scalar, whether every leaf was in bound.
    """

    dk: Tensor
    dv: Tensor
    within: Tensor


def block_attention(
    products: Products, q: Tensor, k: Tensor, v: Tensor, q_blocks: tuple[int, ...], scale: float
) -> tuple[Tensor, Tensor]:
    """Attend every query block to the key blocks up to its own.

    Args:
        products: Leaf products.
        q: [B, n_q, G, block, D]; B is batch × key-value heads, G the query heads of one key-value head.
        k: [B, n_k, block, D], all key blocks from position 0 on.
        v: [B, n_k, block, D].
        q_blocks: The position (in blocks) of each query block, ascending.
        scale: Factor on the scores.

    Returns:
        Output float32 [B, n_q, G, block, D], and what the backward pass needs of the softmax: the maximum
        score and the sum of exp(score − maximum), float32 [B, n_q, G, block, 2].
    """
    b, n_q, g, block, d = q.shape
    rows, keys, values = widened(q).view(b, n_q * g * block, d), widened(k), widened(v)
    top = rows.new_full((b, n_q * g * block, 1), MASKED)
    total, out = torch.zeros_like(top), torch.zeros_like(rows)
    visible = _causal(block, g, q.device)
    for j in range(k.shape[1]):
        start = _first_at_least(q_blocks, j) * g * block
        if start == rows.shape[1]:
            break
        scores = products.attention(fresh(rows[:, start:]), fresh(keys[:, j]).transpose(1, 2)) * scale
        diagonal = _is_diagonal(q_blocks, j)
        if diagonal:
            scores[:, : g * block] = torch.where(visible, scores[:, : g * block], MASKED)
        old = top[:, start:]
        new = torch.maximum(old, scores.amax(dim=-1, keepdim=True))
        weights = torch.exp(scores - new)
        if diagonal:
            weights[:, : g * block] = torch.where(visible, weights[:, : g * block], 0.0)
        decay = torch.exp(old - new)
        total[:, start:] = total[:, start:] * decay + weights.sum(dim=-1, keepdim=True)
        out[:, start:] = out[:, start:] * decay + products.attention(weights, fresh(values[:, j]))
        top[:, start:] = new
    softmax = torch.cat((top, total), dim=-1)
    return (out / total).view(b, n_q, g, block, d), softmax.view(b, n_q, g, block, 2)


def block_attention_back(
    products: Products,
    dout: Tensor,
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    q_blocks: tuple[int, ...],
    scale: float,
    lsb: int,
    bound: float,
) -> tuple[Tensor, KeyValueGradient]:
    """Return the gradients of `block_attention`.

    dQ is summed over key blocks in position order. dK and dV leave one leaf a query block and group, summed
    exactly.

    Args:
        products: Leaf products.
        dout: [B, n_q, G, block, D].
        saved: q, k, v as given to `block_attention`, and the two that it returned.
        q_blocks: The position of each query block, ascending.
        scale: Factor on the scores.
        lsb: Unit of the exact sums, 2^-lsb.
        bound: Magnitude below which every leaf element must stay.

    Returns:
        dQ float32 [B, n_q, G, block, D], and this rank's share of dK and dV.
    """
    q, k, v, out, softmax = saved
    b, n_q, g, block, d = q.shape
    shape = (b, n_q * g * block, d)
    rows, keys, values = widened(q).view(shape), widened(k), widened(v)
    grad = widened(dout).view(shape)
    delta = (grad * out.view(shape)).sum(dim=-1, keepdim=True)
    top, total = softmax.reshape(b, -1, 2).split(1, dim=-1)
    dq = torch.zeros_like(rows)
    dk, dv = (torch.zeros(k.shape, dtype=torch.int64, device=q.device) for _ in range(2))
    visible = _causal(block, g, q.device)
    inside = torch.ones((), dtype=torch.bool, device=q.device)
    for j in range(k.shape[1]):
        start = _first_at_least(q_blocks, j) * g * block
        if start == rows.shape[1]:
            break
        part, part_grad, key = fresh(rows[:, start:]), fresh(grad[:, start:]), fresh(keys[:, j])
        scores = products.attention(part, key.transpose(1, 2)) * scale
        weights = torch.exp(scores - top[:, start:]) / total[:, start:]
        if _is_diagonal(q_blocks, j):
            weights[:, : g * block] = torch.where(visible, weights[:, : g * block], 0.0)
        dweights = products.attention(part_grad, fresh(values[:, j]).transpose(1, 2))
        dscores = weights * (dweights - delta[:, start:]) * scale
        dq[:, start:] += products.attention(dscores, key)
        for exact, left, right in ((dk, dscores, part), (dv, weights, part_grad)):
            leaves = products.attention_token(left.view(-1, g * block, block), right.view(-1, g * block, d))
            inside = inside & within(leaves, bound)
            exact[:, j] += to_fixed(leaves, lsb).view(b, -1, block, d).sum(dim=1)
    return dq.view(b, n_q, g, block, d), KeyValueGradient(dk, dv, inside)


def cached_attention(
    products: Products, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float
) -> Tensor:
    """Attend single queries to a block cache: the same bits as `block_attention` gives the same tokens.

    Args:
        products: Leaf products.
        q: [B, R, D]: R queries of key-value head B (new tokens × query heads of the group).
        k: [B, n_k, block, D] cached keys, zero where nothing is stored yet.
        v: [B, n_k, block, D].
        positions: int64 [B, R], each query's position; it sees the keys at positions up to its own.
        scale: Factor on the scores.

    Returns:
        float32 [B, R, D].
    """
    b, r, d = q.shape
    n_k, block = k.shape[1], k.shape[2]
    scores = (
        _tiled(products, widened(q).unsqueeze(1).expand(b, n_k, r, d), widened(k).transpose(2, 3)) * scale
    )
    key_position = torch.arange(n_k * block, device=q.device).view(1, n_k, 1, block)
    visible = key_position <= positions.view(b, 1, r, 1)
    scores = torch.where(visible, scores, MASKED)
    tops = torch.cummax(scores.amax(dim=-1, keepdim=True), dim=1).values
    weights = torch.where(visible, torch.exp(scores - tops), 0.0)
    partial = torch.cat((_tiled(products, weights, widened(v)), weights.sum(dim=-1, keepdim=True)), dim=-1)
    decays = torch.exp(torch.cat((torch.full_like(tops[:, :1], MASKED), tops[:, :-1]), dim=1) - tops)
    last_block = torch.div(positions, block, rounding_mode="floor").unsqueeze(-1)
    everyone_visits = int(last_block.min())  # waits for the device, and saves most of the selections below
    state = scores.new_zeros((b, r, d + 1))  # the weighted sum of values, and beside it the sum of weights
    for j in range(n_k):
        visited = state * decays[:, j] + partial[:, j]
        state = visited if j <= everyone_visits else torch.where(last_block >= j, visited, state)
    return state[..., :d] / state[..., d:]


def _tiled(products: Products, rows: Tensor, w: Tensor) -> Tensor:
    """Multiply [b, n_k, r, K] by [b, n_k, K, N], rows zero-padded to whole tiles: [b, n_k, r, N]."""
    b, n_k, r, depth = rows.shape
    tiles = -(-r // products.row_tile) * products.row_tile
    padded = rows.new_zeros((b * n_k, tiles, depth))
    padded.view(b, n_k, tiles, depth)[:, :, :r] = rows
    out = products.attention(padded, w.reshape(b * n_k, depth, w.shape[3]))
    return out.view(b, n_k, tiles, -1)[:, :, :r]


def _causal(block: int, group: int, device: torch.device) -> Tensor:
    """Return the mask of a diagonal block, bool [G·block, block]: key ≤ query."""
    index = torch.arange(block, device=device)
    return (index.unsqueeze(0) <= index.unsqueeze(1)).repeat(group, 1)


def _first_at_least(q_blocks: tuple[int, ...], j: int) -> int:
    """Return how many query blocks lie before key block j: they do not see it."""
    return sum(block < j for block in q_blocks)


def _is_diagonal(q_blocks: tuple[int, ...], j: int) -> bool:
    """Return whether the first query block that sees key block j is block j itself."""
    return j in q_blocks
