"""Leaf products: matrix products whose bits are a pure function of (contract, row).

Every operand is widened to float32 (exact for bfloat16), copied to fresh contiguous storage and cut into
whole row tiles; the accumulation is float32. A *wide* call does several leaves at once and is taken only for
shapes that the start-up certificate passed; elsewhere the leaf path calls the same product leaf by leaf. Both
leave the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

ALIGNMENT_BYTES = 64
# Rows of one wide call, at most: the certificate tries every number of tiles up to here. MKL (AVX-512) cuts
# sums over k >= 1024 in another way from 192 rows on, where the weight is stored [k, n] with n >= 256.
WIDE_ROWS = 128
WIDE_ELEMENTS = 1 << 24  # of one wide call's output, at most, unless one row tile has more: 64 MiB of float32


class Product(Enum):
    """The products of a model, by what they sum over."""

    COLUMN = "column"  # y[t, v·n] = x[t, :] · w[v, n, :]          whole K in a leaf
    COLUMN_BACK = "column_back"  # dx leaf[v, t, k] = dy[t, v, :] · w[v, :, k]
    ROW = "row"  # y leaf[v, t, n] = x[t, v, :] · w[v, n, :]
    ROW_BACK = "row_back"  # dx[t, v·k] = dy[t, :] · w[v, :, k]        whole N in a leaf
    TOKEN = "token"  # dw leaf[l, v, n, k] = sum over the tokens of leaf l
    ATTENTION = "attention"  # y[b, t, n] = a[b, t, :] · w[b, :, n]     one row tile of one head in a leaf
    ATTENTION_TOKEN = "attention_token"  # y[b, k, n] = sum over the queries of block b


@dataclass(frozen=True)
class Shape:
    """One kind of product at one shape of a virtual shard: weight leaf [n, k]."""

    product: Product
    n: int
    k: int


@dataclass(frozen=True)
class Products:
    """Call leaf products on the path that was certified for their shape.

    Attributes:
        row_tile: Rows of a tile; every call has a whole number of them.
        wide: Shapes whose wide call left the leaf path's bits in the start-up certificate.
    """

    row_tile: int
    wide: frozenset[Shape] = frozenset()

    def certified(self, shapes: frozenset[Shape]) -> Products:
        """Return these products with `shapes` allowed on the wide path."""
        return replace(self, wide=shapes)

    def column(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply rows by every virtual shard of a column-parallel weight, whole K inside one leaf.

        Args:
            x: [T, K].
            weight: [V, N, K], one contiguous shard after the other.

        Returns:
            [T, V·N] float32.
        """
        v, n, k = weight.shape
        rows, w = self._tiles(x), widened(weight)
        if Shape(Product.COLUMN, n, k) in self.wide:
            return self._in_turn(torch.mm, rows, w.view(v * n, k).t())[: x.shape[0]]
        out = [self._by_tile(rows, w[i].t()) for i in range(v)]
        return torch.stack(out, dim=1)[: x.shape[0]].reshape(x.shape[0], v * n)

    def row_back(self, dy: Tensor, weight: Tensor) -> Tensor:
        """Multiply rows by every virtual shard of a row-parallel weight transposed, whole N inside one leaf.

        Args:
            dy: [T, N].
            weight: [V, N, K].

        Returns:
            [T, V·K] float32.
        """
        v, n, k = weight.shape
        rows, w = self._tiles(dy), widened(weight)
        if Shape(Product.ROW_BACK, n, k) in self.wide:
            return self._in_turn(torch.mm, rows, w.permute(1, 0, 2).reshape(n, v * k))[: dy.shape[0]]
        out = [self._by_tile(rows, w[i]) for i in range(v)]
        return torch.stack(out, dim=1)[: dy.shape[0]].reshape(dy.shape[0], v * k)

    def row(self, x: Tensor, weight: Tensor) -> Tensor:
        """Leave one partial product a virtual shard of a row-parallel weight.

        Args:
            x: [T, V·K].
            weight: [V, N, K].

        Returns:
            Leaves [V, T, N] float32; their tree sum is the layer's output.
        """
        v, n, k = weight.shape
        return self._leaves(x, widened(weight).transpose(1, 2), v, Shape(Product.ROW, n, k))

    def column_back(self, dy: Tensor, weight: Tensor) -> Tensor:
        """Leave one partial input gradient a virtual shard of a column-parallel weight.

        Args:
            dy: [T, V·N].
            weight: [V, N, K].

        Returns:
            Leaves [V, T, K] float32; their tree sum is the input's gradient.
        """
        v, n, k = weight.shape
        return self._leaves(dy, widened(weight), v, Shape(Product.COLUMN_BACK, n, k))

    def token(self, dy: Tensor, x: Tensor) -> Tensor:
        """Leave one partial weight gradient a token leaf and virtual shard.

        Args:
            dy: Output gradients [L, block, V, N] (V is 1 where the layer's outputs are not sharded).
            x: Inputs [L, block, V, K] (V is 1 where the layer's inputs are not sharded).

        Returns:
            Leaves [L, V, N, K] float32, where V is the larger of the two.
        """
        leaves, block, n, k = dy.shape[0], dy.shape[1], dy.shape[3], x.shape[3]
        v = max(dy.shape[2], x.shape[2])
        left = widened(dy.permute(0, 2, 3, 1)).expand(leaves, v, n, block)
        right = widened(x.permute(0, 2, 1, 3)).expand(leaves, v, block, k)
        if Shape(Product.TOKEN, n, k) in self.wide:
            out = torch.bmm(left.reshape(leaves * v, n, block), right.reshape(leaves * v, block, k))
            return out.view(leaves, v, n, k)
        pairs = [torch.mm(fresh(left[a, b]), fresh(right[a, b])) for a in range(leaves) for b in range(v)]
        return torch.stack(pairs).view(leaves, v, n, k)

    def attention(self, rows: Tensor, w: Tensor) -> Tensor:
        """Multiply row tiles of many heads by each head's block of keys or values.

        Args:
            rows: [B, R, K] float32, R a multiple of the row tile.
            w: [B, K, N] float32.

        Returns:
            [B, R, N] float32; every row tile of every head is one leaf.
        """
        if Shape(Product.ATTENTION, w.shape[2], w.shape[1]) in self.wide:
            return self._in_turn(torch.bmm, rows, w)
        return torch.stack([self._by_tile(rows[b], w[b]) for b in range(rows.shape[0])])

    def attention_token(self, left: Tensor, right: Tensor) -> Tensor:
        """Leave one partial key or value gradient a query block.

        Args:
            left: [B, Q, KB] float32 weights or their gradients, Q the queries of one block and group.
            right: [B, Q, D] float32.

        Returns:
            Leaves [B, KB, D] float32, each summed over the whole Q inside one product.
        """
        if Shape(Product.ATTENTION_TOKEN, left.shape[2], right.shape[2]) in self.wide:
            return torch.bmm(left.transpose(1, 2), right)
        return torch.stack([torch.mm(fresh(a).t(), fresh(b)) for a, b in zip(left, right, strict=True)])

    def _leaves(self, x: Tensor, w: Tensor, v: int, shape: Shape) -> Tensor:
        """Multiply [T, V·a] by [V, a, b] shard by shard into [V, T, b]."""
        rows = self._tiles(x)
        stacked = fresh(rows.view(rows.shape[0], v, -1).transpose(0, 1))
        if shape in self.wide:
            return self._in_turn(torch.bmm, stacked, w)[:, : x.shape[0]]
        return torch.stack([self._by_tile(stacked[i], w[i]) for i in range(v)])[:, : x.shape[0]]

    def _in_turn(self, multiply: Callable[[Tensor, Tensor], Tensor], rows: Tensor, w: Tensor) -> Tensor:
        """Multiply [..., R, K] by [..., K, N], no more rows at a time than the certificate tried."""
        at_once = wide_rows(self.row_tile, rows.shape[:-2].numel() * w.shape[-1])
        if rows.shape[-2] <= at_once:
            return multiply(rows, w)
        return torch.cat([multiply(fresh(part), w) for part in rows.split(at_once, dim=-2)], dim=-2)

    def _by_tile(self, rows: Tensor, w: Tensor) -> Tensor:
        """Multiply one row tile at a time: the definition that the wide calls are held to."""
        w = aligned(w)
        return torch.cat([torch.mm(fresh(tile), w) for tile in rows.split(self.row_tile)])

    def _tiles(self, x: Tensor) -> Tensor:
        """Copy rows to fresh float32 storage, zero-padded to whole row tiles."""
        rows = -(-x.shape[0] // self.row_tile) * self.row_tile
        out = torch.empty((rows, x.shape[1]), dtype=torch.float32, device=x.device)
        out[: x.shape[0]] = x
        out[x.shape[0] :] = 0
        return out


def wide_rows(row_tile: int, columns: int) -> int:
    """Return the most rows of a wide call, in whole tiles.

    Args:
        row_tile: Rows of a tile.
        columns: Columns of the output, over all shards or heads of the call.
    """
    rows = min(WIDE_ROWS, WIDE_ELEMENTS // columns)
    return max(rows // row_tile, 1) * row_tile


def widened(x: Tensor) -> Tensor:
    """Return `x` in float32, contiguous and aligned; exact, and a copy only where one is needed."""
    return fresh(x.to(torch.float32))


def fresh(x: Tensor) -> Tensor:
    """Return `x` contiguous and aligned."""
    return aligned(x.contiguous())


def aligned(x: Tensor) -> Tensor:
    """Return `x` in its storage order at a multiple of 64 bytes: some kernels' bits depend on the address."""
    return x if x.data_ptr() % ALIGNMENT_BYTES == 0 else x.clone()
