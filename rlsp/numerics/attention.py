"""Causal attention in fixed blocks: the order of every sum is the order of positions, whoever computes it.

Key blocks are visited in position order by an online softmax; a query visits the blocks up to its own and no
other. The training path works on whole query blocks, the cached path on single queries; both call the same
row products and the same elementwise steps, so a token's bits are the same on either.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlsp.numerics import decoding
from rlsp.numerics.elementwise import MASKED
from rlsp.numerics.fixed import Scratch, UnitAdder, reach
from rlsp.numerics.products import WIDE_ROWS, Products, fresh, widened

TILE = 32
"""Rows of a tile that the compiled kernel is tried against."""

SCORES = 1 << 24
"""Of cached attention, computed at once: a long prompt is cut, or its scores would fill the memory."""


@dataclass(frozen=True)
class KeyValueGradient:
    """Exact gradients of keys and values.

    Attributes:
        dk: int64 units of 2^-lsb, [B, n_k, block, D].
        dv: Likewise.
        reach: Float scalar, the largest leaf over the bound: below 1, or a breach.
    """

    dk: Tensor
    dv: Tensor
    reach: Tensor


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
    keys, values = widened(k), widened(v)
    visible = _causal(block, g, q.device)
    parts = [
        _attend(products, widened(q[:, some]).view(b, -1, d), keys, values, q_blocks[some], scale, visible)
        for some in _in_turn(n_q, g * block)
    ]
    out, softmax = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
    return out.view(b, n_q, g, block, d), softmax.view(b, n_q, g, block, 2)


def _attend(
    products: Products,
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    q_blocks: tuple[int, ...],
    scale: float,
    visible: Tensor,
) -> tuple[Tensor, Tensor]:
    """Attend some query blocks, as rows [B, n_q·G·block, D]; return output and softmax, [B, rows, …]."""
    first = visible.shape[0]  # rows of one query block
    top = rows.new_full((*rows.shape[:2], 1), MASKED)
    total, out = torch.zeros_like(top), torch.zeros_like(rows)
    for j in range(q_blocks[-1] + 1):
        start = _first_at_least(q_blocks, j) * first
        scores = products.attention(fresh(rows[:, start:]), fresh(keys[:, j]).transpose(1, 2)).mul_(scale)
        diagonal = _is_diagonal(q_blocks, j)
        if diagonal:
            scores[:, :first] = torch.where(visible, scores[:, :first], MASKED)
        old = top[:, start:]
        new = torch.maximum(old, scores.amax(dim=-1, keepdim=True))
        weights = scores.sub_(new).exp_()
        if diagonal:
            weights[:, :first] = torch.where(visible, weights[:, :first], 0.0)
        decay = torch.exp(old - new)
        total[:, start:] = total[:, start:] * decay + weights.sum(dim=-1, keepdim=True)
        out[:, start:].mul_(decay).add_(products.attention(weights, fresh(values[:, j])))
        top[:, start:] = new
    return out.div_(total), torch.cat((top, total), dim=-1)


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
    keys, values = widened(k), widened(v)
    sums = _KeyValueSums(k.shape, lsb, q.device)
    visible = _causal(block, g, q.device)
    parts = []
    for some in _in_turn(n_q, g * block):
        rows, grad = (widened(x[:, some]).view(b, -1, d) for x in (q, dout))
        delta = (grad * out[:, some].reshape(grad.shape)).sum(dim=-1, keepdim=True)
        top, total = softmax[:, some].reshape(b, -1, 2).split(1, dim=-1)
        pieces = _Rows(rows, grad, delta, top, total)
        parts.append(_attend_back(products, pieces, keys, values, q_blocks[some], scale, visible, sums))
    return torch.cat(parts, dim=1).view(b, n_q, g, block, d), sums.gradient(bound)


@dataclass(frozen=True)
class _Rows:
    """Some query blocks as rows [B, rows, …], and what the backward pass knows of each row."""

    query: Tensor
    grad: Tensor
    delta: Tensor
    top: Tensor
    total: Tensor

    def since(self, start: int) -> _Rows:
        """Leave the rows before `start` out."""
        if start == 0:
            return self
        query, grad = fresh(self.query[:, start:]), fresh(self.grad[:, start:])
        return _Rows(query, grad, *(x[:, start:] for x in (self.delta, self.top, self.total)))


def _attend_back(
    products: Products,
    every: _Rows,
    keys: Tensor,
    values: Tensor,
    q_blocks: tuple[int, ...],
    scale: float,
    visible: Tensor,
    sums: _KeyValueSums,
) -> Tensor:
    """Return dQ of some query blocks, [B, rows, D], and add their leaves of dK and dV."""
    first = visible.shape[0]  # rows of one query block
    dq = torch.zeros_like(every.query)
    for j in range(q_blocks[-1] + 1):
        start = _first_at_least(q_blocks, j) * first
        part, key = every.since(start), fresh(keys[:, j])
        scores = products.attention(part.query, key.transpose(1, 2)).mul_(scale)
        weights = scores.sub_(part.top).exp_().div_(part.total)
        if _is_diagonal(q_blocks, j):
            weights[:, :first] = torch.where(visible, weights[:, :first], 0.0)
        dweights = products.attention(part.grad, fresh(values[:, j]).transpose(1, 2))
        dscores = dweights.sub_(part.delta).mul_(weights).mul_(scale)
        dq[:, start:] += products.attention(dscores, key)
        for side, left, right in ((sums.dk, dscores, part.query), (sums.dv, weights, part.grad)):
            leaves = products.attention_token(
                left.view(-1, first, left.shape[-1]), right.view(-1, first, right.shape[-1])
            )
            sums.add(side[j], leaves, keys.shape[0])
    return dq


class _KeyValueSums:
    """Add the leaves of dK and dV exactly, and remember the largest."""

    def __init__(self, shape: torch.Size, lsb: int, device: torch.device) -> None:
        """Start from zeros of `shape` [B, n_k, block, D]."""
        b, n_k, *leaf = shape
        self._extents, scratch = [torch.zeros((), device=device)], Scratch(device)
        self.dk, self.dv = ([UnitAdder((b, *leaf), lsb, scratch) for _ in range(n_k)] for _ in range(2))

    def add(self, side: UnitAdder, leaves: Tensor, b: int) -> None:
        """Add leaves [B·n_q, block, D] to a key block's sum."""
        self._extents.append(side.add(leaves.view(b, -1, *leaves.shape[1:]), 1))

    def gradient(self, bound: float) -> KeyValueGradient:
        """Return the sums, and how near to `bound` the largest leaf came."""
        dk, dv = (torch.stack([block.total() for block in side], dim=1) for side in (self.dk, self.dv))
        return KeyValueGradient(dk, dv, reach(torch.stack(self._extents), bound))


def store(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> None:
    """Write the keys and values of new tokens into a block cache, widened.

    Args:
        keys: float32 [b, G, n_k, D, block], changed in place.
        values: float32 [b, G, n_k, block, D], likewise.
        key: [n, b, G, D].
        value: Likewise.
        positions: int64 [n, b].
    """
    if decoding.store(keys, values, key, value, positions):
        return
    width = values.shape[3]
    sequence = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
    block, place = positions // width, positions % width
    keys[sequence, :, block, :, place] = key.float()
    values[sequence, :, block, place] = value.float()


def cached_attention(
    products: Products, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float
) -> Tensor:
    """Attend single queries to a block cache: the same bits as `block_attention` gives the same tokens.

    Args:
        products: Leaf products.
        q: [B, R, D]: R queries of key-value head B (new tokens × query heads of the group).
        k: [B, n_k, D, block] cached keys, zero where nothing is stored yet.
        v: [B, n_k, block, D].
        positions: int64 [B, R], each query's position; it sees the keys at positions up to its own.
        scale: Factor on the scores.

    Returns:
        float32 [B, R, D].
    """
    if products.row_tile == TILE:
        done = decoding.cached_attention(widened(q), k, v, positions, scale, MASKED)
        if done is not None:
            return done
    b, r, d = q.shape
    _, n_k, block, _ = v.shape
    tiles = max(1, SCORES // (b * n_k * block * products.row_tile))
    rows = tiles * products.row_tile
    if r <= rows:
        return _attend_cached(products, q, k, v, positions, scale)
    out = q.new_empty((b, r, d), dtype=torch.float32)
    for some in (slice(first, first + rows) for first in range(0, r, rows)):
        seen = int(positions[:, some].max()) // block + 1  # the blocks behind are masked for all of these
        keys, values = (x[:, :seen].contiguous() for x in (k, v))
        out[:, some] = _attend_cached(products, q[:, some], keys, values, positions[:, some], scale)
    return out


def _attend_cached(
    products: Products, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float
) -> Tensor:
    """Attend some queries, all at once, to the blocks given."""
    b, r, d = q.shape
    n_k, block = v.shape[1], v.shape[2]
    scores = _tiled(products, widened(q).unsqueeze(1).expand(b, n_k, r, d), widened(k)) * scale
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


def _in_turn(n_q: int, rows: int) -> list[slice]:
    """Cut query blocks of `rows` rows into runs whose scores fit the cache and one wide call."""
    at_once = max(1, WIDE_ROWS // rows)
    return [slice(first, first + at_once) for first in range(0, n_q, at_once)]


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
