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

from rlsp.numerics import decoding

ALIGNMENT_BYTES = 64
# Rows of one wide call, at most: the certificate tries every number of tiles up to here. MKL (AVX-512) cuts
# sums over k >= 1024 in another way from 192 rows on, where the weight is stored [k, n] with n >= 256.
WIDE_ROWS = 128
FEW_ROWS = 64  # of the compiled kernel, at most: above, the BLAS is faster
FEW_ELEMENTS = 1 << 20  # of the weights that are kept turned for it, each
WIDE_ELEMENTS = 1 << 24  # of one wide call's output, at most, unless one row tile has more: 64 MiB of float32


Combine = Callable[[Tensor], Tensor]

_TURNED = "rlsp_turned"  # of a weight: which bits it had, together or not; and the copy


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
        few: Shapes of which the compiled kernel for few rows did.
    """

    row_tile: int
    wide: frozenset[Shape] = frozenset()
    few: frozenset[Shape] = frozenset()

    def certified(self, wide: frozenset[Shape], few: frozenset[Shape] = frozenset()) -> Products:
        """Return these products with `wide` allowed on the wide path, and `few` in the compiled kernel."""
        return replace(self, wide=wide, few=few)

    def column(self, x: Tensor, weight: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Multiply rows by every virtual shard of a column-parallel weight, whole K inside one leaf.

        Args:
            x: [T, K].
            weight: [V, N, K], one contiguous shard after the other.
            dtype: What the float32 product is rounded to.

        Returns:
            [T, V·N] in `dtype`.
        """
        v, n, k = weight.shape
        if (few := self._few(x, weight, Product.COLUMN)) is not None:
            return few[0].to(dtype)
        w = widened(weight)
        if Shape(Product.COLUMN, n, k) in self.wide:
            whole = w.view(v * n, k).t()
            return self._in_turn(x, v * n, lambda rows: torch.mm(self._tiles(rows), whole), dtype)
        return self._leaf_by_leaf(x, [w[i].t() for i in range(v)]).to(dtype)

    def row_back(self, dy: Tensor, weight: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Multiply rows by every virtual shard of a row-parallel weight transposed, whole N inside one leaf.

        Args:
            dy: [T, N].
            weight: [V, N, K].
            dtype: What the float32 product is rounded to.

        Returns:
            [T, V·K] in `dtype`.
        """
        v, n, k = weight.shape
        w = widened(weight)
        if Shape(Product.ROW_BACK, n, k) in self.wide:
            whole = w.permute(1, 0, 2).reshape(n, v * k)
            return self._in_turn(dy, v * k, lambda rows: torch.mm(self._tiles(rows), whole), dtype)
        return self._leaf_by_leaf(dy, list(w)).to(dtype)

    def row(self, x: Tensor, weight: Tensor, combine: Combine | None = None) -> Tensor:
        """Leave one partial product a virtual shard of a row-parallel weight.

        Args:
            x: [T, V·K].
            weight: [V, N, K].
            combine: Takes the leaves of some rows, [V, t, N], to [t, N] while they are in the cache.

        Returns:
            Leaves [V, T, N] float32, whose tree sum is the layer's output; [T, N] where they are combined.
        """
        _, n, k = weight.shape
        if (few := self._few(x, weight, Product.ROW)) is not None:
            return few if combine is None else combine(few)
        return self._leaves(x, widened(weight).transpose(1, 2), Shape(Product.ROW, n, k), combine)

    def column_back(self, dy: Tensor, weight: Tensor, combine: Combine | None = None) -> Tensor:
        """Leave one partial input gradient a virtual shard of a column-parallel weight.

        Args:
            dy: [T, V·N].
            weight: [V, N, K].
            combine: Takes the leaves of some rows, [V, t, K], to [t, K] while they are in the cache.

        Returns:
            Leaves [V, T, K] float32, whose tree sum is the input's gradient; [T, K] where they are combined.
        """
        _, n, k = weight.shape
        return self._leaves(dy, widened(weight), Shape(Product.COLUMN_BACK, n, k), combine)

    def token(self, dy: Tensor, x: Tensor) -> Tensor:
        """Leave one partial weight gradient a token leaf and virtual shard.

        Args:
            dy: Output gradients [L, block, V, N]; V is 1 where the layer's outputs are not sharded.
            x: Inputs [L, block, V, K]; V is 1 where the layer's inputs are not sharded: in one of the two.

        Returns:
            Leaves [L, V, N, K] float32, where V is the larger of the two; with strides as they come.
        """
        leaves, block, n, k = dy.shape[0], dy.shape[1], dy.shape[3], x.shape[3]
        v = max(dy.shape[2], x.shape[2])
        assert 1 in (dy.shape[2], x.shape[2])
        if Shape(Product.TOKEN, n, k) in self.wide:
            left, right = (widened(part.reshape(leaves, block, -1)) for part in (dy, x))
            out = torch.bmm(left.transpose(1, 2), right)
            return out.view(leaves, v, n, k) if x.shape[2] == 1 else out.view(leaves, n, v, k).transpose(1, 2)
        left = widened(dy.permute(0, 2, 3, 1)).expand(leaves, v, n, block)
        right = widened(x.permute(0, 2, 1, 3)).expand(leaves, v, block, k)
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
            at_once = wide_rows(self.row_tile, rows.shape[0] * w.shape[2])
            if rows.shape[1] <= at_once:
                return torch.bmm(rows, w)
            return torch.cat([torch.bmm(fresh(part), w) for part in rows.split(at_once, dim=1)], dim=1)
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

    def takes_few(self, weight: Tensor, product: Product) -> bool:
        """Tell whether a few rows may be multiplied by a weight [V, N, K] in the compiled kernel."""
        if weight.requires_grad or weight.numel() > FEW_ELEMENTS:
            return False
        return Shape(product, weight.shape[1], weight.shape[2]) in self.few

    def _few(self, x: Tensor, weight: Tensor, product: Product) -> Tensor | None:
        """Multiply a few rows by weights that nobody trains: [V, T, N], or [1, T, V·N] of columns."""
        if x.shape[0] > FEW_ROWS or not self.takes_few(weight, product):
            return None
        return decoding.few_rows(x, turned(weight, together=product is Product.COLUMN))

    def _leaves(self, x: Tensor, w: Tensor, shape: Shape, combine: Combine | None) -> Tensor:
        """Multiply [T, V·a] by [V, a, b] shard by shard into [V, T, b], or [T, b] where they are combined."""
        v, width = w.shape[0], w.shape[2]

        def leaves(rows: Tensor) -> Tensor:
            tiles = self._tiles(rows)
            stacked = fresh(tiles.view(tiles.shape[0], v, -1).transpose(0, 1))
            if shape in self.wide:
                return torch.bmm(stacked, w)
            return torch.stack([self._by_tile(stacked[i], w[i]) for i in range(v)])

        return self._in_turn(
            x, v * width, leaves if combine is None else lambda rows: combine(leaves(rows)), torch.float32
        )

    def _leaf_by_leaf(self, x: Tensor, shards: list[Tensor]) -> Tensor:
        """Multiply [T, a] by each shard's [a, b] into [T, V·b], one row tile at a time."""
        rows = self._tiles(x)
        return torch.cat([self._by_tile(rows, w)[: x.shape[0]] for w in shards], dim=1)

    def _in_turn(
        self, x: Tensor, columns: int, multiply: Callable[[Tensor], Tensor], dtype: torch.dtype
    ) -> Tensor:
        """Multiply rows [T, a] into [..., T, b] in `dtype`, no more at a time than the certificate tried.

        Args:
            x: The rows.
            columns: Columns of the output, over all shards.
            multiply: Takes [t, a] to [..., t padded to whole tiles, b].
            dtype: What every part is rounded to, while it is in the cache.
        """
        parts = x.split(wide_rows(self.row_tile, columns))
        done = [multiply(part)[..., : part.shape[0], :].to(dtype) for part in parts]
        return done[0] if len(done) == 1 else torch.cat(done, dim=-2)

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


def turned(weight: Tensor, *, together: bool) -> Tensor:
    """Return a weight [V, N, K] in float32 as [V, K, N], or as [1, K, V·N]; kept until its bits change.

    What is kept takes twice the memory of the weight in bfloat16.
    """
    kept = getattr(weight, _TURNED, None)
    now = (weight._version, weight.data_ptr(), together)
    if kept is None or kept[0] != now:
        wide = weight.detach().to(torch.float32)
        every = wide.reshape(1, -1, wide.shape[2]) if together else wide
        kept = (now, every.transpose(1, 2).contiguous())
        setattr(weight, _TURNED, kept)
    copy: Tensor = kept[1]
    return copy


def widened(x: Tensor) -> Tensor:
    """Return `x` in float32, contiguous and aligned; exact, and a copy only where one is needed."""
    return fresh(x.to(torch.float32))


def fresh(x: Tensor) -> Tensor:
    """Return `x` contiguous and aligned."""
    return aligned(x.contiguous())


def aligned(x: Tensor) -> Tensor:
    """Return `x` in its storage order at a multiple of 64 bytes: some kernels' bits depend on the address."""
    return x if x.data_ptr() % ALIGNMENT_BYTES == 0 else x.clone()
