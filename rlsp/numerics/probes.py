"""What a leaf product's bits might depend on, as pairs of outputs that must be equal.

Every probe holds the operands of *one* leaf. It asks the leaf path, and then the wide path, for that leaf in
other places: elsewhere in its row tile, beside other rows, in another shard's or head's slot, in calls of
other sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rlsp.numerics.operands import cancelling, with_extremes
from rlsp.numerics.products import Product, Products, Shape, wide_rows

Pair = tuple[str, Tensor, Tensor]
RowCall = Callable[[Products, Tensor, Tensor, int], Tensor]
TokenCall = Callable[[Products, int, int], Tensor]

BATCHES = (1, 48)  # heads × sequences (× key blocks, in the rollout) of an attention product
GROUP_SIZES = (1, 2, 4, 8)  # query heads of one key-value head: they lie inside an attention token leaf
LEAVES = (1, 16)  # token leaves of a call, as far as WIDE_LEAF_ELEMENTS allows
WIDE_LEAF_ELEMENTS = 1 << 23


@dataclass(frozen=True)
class RowProbe:
    """One row tile [tile, depth] times one shard's weight, given as [width, depth].

    Attributes:
        x: The tile; one row is denormal, one large.
        w: The weight leaf, as [width, depth] whatever the storage that `call` gives it.
        call: (products, rows [R, depth], w, v) → [v, R, width]: the product with v equal shards or heads.
        counts: The numbers of shards or heads to try.
    """

    x: Tensor
    w: Tensor
    call: RowCall
    counts: tuple[int, ...]

    def leaf_pairs(self, leaf: Products) -> Iterator[Pair]:
        """Move rows through the tile, and change the other rows of the tile and the number of shards."""
        y = self._tile(leaf, self.x)
        yield "its place in the tile", self._tile(leaf, self.x.roll(5, 0)), y.roll(5, 0)
        for first in (0, 1):
            some = torch.zeros_like(self.x)
            some[first::2] = self.x[first::2]
            yield "the other rows of its tile", self._tile(leaf, some)[first::2], y[first::2]
        alone = torch.zeros_like(self.x)
        alone[-1] = self.x[0]
        yield "being alone in its tile", self._tile(leaf, alone)[-1], y[0]
        v = max(self.counts)
        got = self.call(leaf, _rolled(self.x, 2), self.w, v)
        yield "the place of its shard or head", got, _rolled(y, 2).expand(v, -1, -1)

    def wide_pairs(self, leaf: Products, wide: Products) -> Iterator[Pair]:
        """Call with every number of tiles that a wide call may have, each tile rolled by another number."""
        y, tile = self._tile(leaf, self.x), self.x.shape[0]
        for v in self.counts:
            for tiles in range(1, wide_rows(tile, v * self.w.shape[0]) // tile + 1):
                got = self.call(wide, _rolled(self.x, tiles), self.w, v)
                yield f"{v} shards, {tiles} tiles", got, _rolled(y, tiles).expand(v, -1, -1)

    def few_pairs(self, leaf: Products, few: Products) -> Iterator[Pair]:
        """Call with few rows, whole tiles or not."""
        y = self._tile(leaf, self.x)
        for v in self.counts:
            for rows in (1, 7, self.x.shape[0]):
                got = self.call(few, self.x[:rows], self.w, v)
                yield f"{v} shards, {rows} rows", got, y[:rows].expand(v, -1, -1)

    def _tile(self, products: Products, x: Tensor) -> Tensor:
        return self.call(products, x, self.w, 1)[0]


@dataclass(frozen=True)
class MaskedProbe:
    """An attention product some of whose keys a query does not see: what stands there must not matter.

    Attributes:
        inner: The same product with every key in sight.
        keys_are_columns: Whether keys are the columns of the output (scores) or what is summed over (values).
    """

    inner: RowProbe
    keys_are_columns: bool

    def leaf_pairs(self, leaf: Products) -> Iterator[Pair]:
        """Put zeros or numbers where a tail of the keys is not seen."""
        x, w, call = self.inner.x, self.inner.w, self.inner.call
        keys = w.shape[0] if self.keys_are_columns else w.shape[1]
        for seen in sorted({1, keys // 2, keys - 1} - {0}):
            rows, empty = x.clone(), w.clone()
            if self.keys_are_columns:
                empty[seen:] = 0
            else:
                rows[:, seen:], empty[:, seen:] = 0, 0
            outputs = [call(leaf, rows, weight, 1)[0] for weight in (w, empty)]
            if self.keys_are_columns:
                outputs = [out[:, :seen] for out in outputs]
            yield "keys that its query does not see", outputs[0], outputs[1]

    def wide_pairs(self, leaf: Products, wide: Products) -> Iterator[Pair]:
        """Ask nothing: the inner probe holds the wide path to the leaf path."""
        return iter(())


@dataclass(frozen=True)
class TokenProbe:
    """One token leaf: a product that is summed over the tokens of one block.

    Attributes:
        call: (products, leaves, v) → [leaves, v, n, k], every one the same leaf.
        sizes: The (leaves, v) to try.
    """

    call: TokenCall
    sizes: tuple[tuple[int, int], ...]

    def leaf_pairs(self, leaf: Products) -> Iterator[Pair]:
        """Compute the leaf twice in one call."""
        yield "its place in the call", self.call(leaf, 2, 1), self.call(leaf, 1, 1).expand(2, -1, -1, -1)

    def wide_pairs(self, leaf: Products, wide: Products) -> Iterator[Pair]:
        """Call with several numbers of leaves and shards."""
        want = self.call(leaf, 1, 1)
        for leaves, v in self.sizes:
            yield f"{leaves} leaves, {v} shards", self.call(wide, leaves, v), want.expand(leaves, v, -1, -1)


Probe = RowProbe | MaskedProbe | TokenProbe


def probes(
    shape: Shape, counts: tuple[int, ...], row_tile: int, token_block: int, device: torch.device
) -> list[Probe]:
    """Return the probes of one product.

    Args:
        shape: Product and shard shape.
        counts: Virtual shards that a rank of this run holds at a time.
        row_tile: Rows of a tile.
        token_block: Tokens of a leaf of a weight gradient.
        device: Where the run computes.
    """
    n, k = shape.n, shape.k
    if shape.product is Product.TOKEN:
        return [_token(n, k, counts, token_block, device, sharded) for sharded in ("output", "input")]
    if shape.product is Product.ATTENTION_TOKEN:
        return [_attention_token(n, k, size * n, device) for size in GROUP_SIZES]
    depth, width = (n, k) if shape.product in (Product.COLUMN_BACK, Product.ROW_BACK) else (k, n)
    x, w = cancelling(row_tile, width, depth, 10, device)
    x = with_extremes(x)
    if shape.product is not Product.ATTENTION:
        return [RowProbe(x, w, _ROW_CALLS[shape.product], counts)]
    batches = tuple(sorted({*BATCHES, *counts}))
    by_key, by_value = RowProbe(x, w, _by_keys, batches), RowProbe(x, w, _by_values, batches)
    return [by_key, by_value, MaskedProbe(by_key, True), MaskedProbe(by_value, False)]


def _token(
    n: int, k: int, counts: tuple[int, ...], block: int, device: torch.device, sharded: str
) -> TokenProbe:
    left, right = cancelling(n, k, block, 20, device)
    dy, x = left.t().reshape(1, block, 1, n), right.t().reshape(1, block, 1, k)

    def call(products: Products, leaves: int, v: int) -> Tensor:
        outputs, inputs = (v, 1) if sharded == "output" else (1, v)
        return products.token(dy.expand(leaves, -1, outputs, -1), x.expand(leaves, -1, inputs, -1))

    room = {v: max(1, WIDE_LEAF_ELEMENTS // (v * n * k)) for v in counts}
    sizes = tuple((leaves, v) for v in counts for leaves in sorted({min(size, room[v]) for size in LEAVES}))
    return TokenProbe(call, sizes)


def _attention_token(n: int, k: int, queries: int, device: torch.device) -> TokenProbe:
    left, right = cancelling(n, k, queries, 30, device)
    weights, rows = left.t().contiguous(), right.t().contiguous()

    def call(products: Products, leaves: int, v: int) -> Tensor:
        return products.attention_token(_copies(weights, leaves * v), _copies(rows, leaves * v)).unsqueeze(1)

    return TokenProbe(call, tuple((batch, 1) for batch in BATCHES))


def _column(products: Products, x: Tensor, w: Tensor, v: int) -> Tensor:
    return products.column(x, _copies(w, v)).view(x.shape[0], v, -1).transpose(0, 1)


def _row_back(products: Products, x: Tensor, w: Tensor, v: int) -> Tensor:
    return products.row_back(x, _copies(w.t(), v)).view(x.shape[0], v, -1).transpose(0, 1)


def _row(products: Products, x: Tensor, w: Tensor, v: int) -> Tensor:
    return products.row(x.repeat(1, v), _copies(w, v))


def _column_back(products: Products, x: Tensor, w: Tensor, v: int) -> Tensor:
    return products.column_back(x.repeat(1, v), _copies(w.t(), v))


def _by_keys(products: Products, x: Tensor, w: Tensor, v: int) -> Tensor:
    """Multiply by keys as they lie in the cache, [v, keys, D], transposed without a copy."""
    return products.attention(_copies(x, v), _copies(w, v).transpose(1, 2))


def _by_values(products: Products, x: Tensor, w: Tensor, v: int) -> Tensor:
    return products.attention(_copies(x, v), _copies(w.t(), v))


def _rolled(x: Tensor, tiles: int) -> Tensor:
    """Put `tiles` copies of a tile's rows one below the other, the i-th rolled down by i rows."""
    rows = x.shape[0]
    shift = torch.arange(tiles, device=x.device).unsqueeze(1)
    return x[((torch.arange(rows, device=x.device) - shift) % rows).view(-1)]


def _copies(x: Tensor, count: int) -> Tensor:
    """Put `count` copies of `x` side by side in memory of their own."""
    return x.expand(count, *x.shape).clone(memory_format=torch.contiguous_format)


_ROW_CALLS: dict[Product, RowCall] = {
    Product.COLUMN: _column,
    Product.COLUMN_BACK: _column_back,
    Product.ROW: _row,
    Product.ROW_BACK: _row_back,
}
