"""The start-up certificate: which wide kernel calls leave the leaf path's bits, on this machine, at the model's shapes.

Operands cancel (x = [r, −r[p]], w = [u, u[p]]: the exact product is 0), so that what is compared is pure rounding residue and
any other order of accumulation shows. A wide call that differs is not used; a leaf whose bits depend on anything but its
row leaves no exact path, and the run is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rlsp.numerics.products import Product, Products, Shape

LENGTHS = (1, 7, 31, 33, 67, 4097)
OFFSETS = (0, 1, 5, 17)
SAFE: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "log": lambda x: torch.log(x.abs() + 0.5),
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 0.5),
    "sin": torch.sin,
    "cos": torch.cos,
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "reciprocal": lambda x: 1 / (x.abs() + 0.5),
}


class NoExactPathError(RuntimeError):
    """A kernel's bits depend on more than the contract allows, and no other path is left."""


@dataclass(frozen=True)
class Certificate:
    """What was certified.

    Attributes:
        wide: Shapes whose wide call equals the leaf path.
        narrowed: Shapes that stay on the leaf path, in words.
        checks: Comparisons made.
        digest: SHA-256 of this machine's kernel outputs on fixed operands: equal on every rank or the run is refused.
    """

    wide: frozenset[Shape]
    narrowed: tuple[str, ...]
    checks: int
    digest: str


@dataclass(frozen=True)
class Sharded:
    """One product to certify: its shard's shape, and how many virtual shards the ranks of this run hold at a time."""

    shape: Shape
    shards: tuple[int, ...]


def certify(
    products: Products, wanted: tuple[Sharded, ...], token_block: int, threads_seen: int
) -> Certificate:
    """Certify the wide path of every product in `wanted` and the operators that every model uses.

    Args:
        products: Leaf products to start from (all on the leaf path).
        wanted: The run's products.
        token_block: Tokens in a leaf of a weight gradient.
        threads_seen: Intra-op threads of this process; enters the digest.

    Raises:
        NoExactPathError: A leaf, an operator or the operands themselves fail.
    """
    _power()
    checks = _elementwise() + _rows()
    wide, narrowed = set(), []
    for item in wanted:
        checks += _leaf_is_pure(products, item.shape)
        if all(_same(a, b) for a, b in _pairs(products, item, token_block)):
            wide.add(item.shape)
        else:
            narrowed.append(f"{item.shape.product.value} n={item.shape.n} k={item.shape.k}")
        checks += 1
    return Certificate(frozenset(wide), tuple(narrowed), checks, _machine_digest(products, threads_seen))


def cancelling(rows: int, columns: int, k: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return x [rows, k] and w [columns, k] float32 whose exact product is 0: bits of the product are rounding alone."""
    generator = torch.Generator().manual_seed(seed)
    half = -(-k // 2)
    order = torch.randperm(half, generator=generator)
    r = torch.randn(rows, half, generator=generator)
    u = torch.randn(columns, half, generator=generator)
    return torch.cat((r, -r[:, order]), 1)[:, :k].contiguous(), torch.cat((u, u[:, order]), 1)[
        :, :k
    ].contiguous()


def _power() -> None:
    """Show that the operands tell orders apart: the same sum in another order of k must leave other bits."""
    x, w = cancelling(64, 48, 256, seed=1)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(2))
    if _same(x @ w.t(), x[:, order].contiguous() @ w[:, order].contiguous().t()):
        raise NoExactPathError("the certificate's operands do not tell two orders of accumulation apart")


def _pairs(products: Products, item: Sharded, token_block: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (leaf path, wide path) outputs of one product for several row counts and shard counts."""
    shape, tile = item.shape, products.row_tile
    wide = products.certified(frozenset({shape}))
    for v in item.shards:
        for rows in (1, tile + 3, 3 * tile):
            for call in _calls(shape, v, rows, token_block, tile):
                yield call(products), call(wide)


def _calls(
    shape: Shape, v: int, rows: int, token_block: int, tile: int
) -> list[Callable[[Products], Tensor]]:
    """Return the calls that exercise one product on fixed operands."""
    n, k = shape.n, shape.k
    if shape.product in (Product.COLUMN, Product.ROW):
        x, w = cancelling(rows, v * n, k, seed=3)
        if shape.product is Product.COLUMN:
            return [lambda p: p.column(x, w.view(v, n, k))]
        spread = x.repeat(1, v)
        return [lambda p: p.row(spread, w.view(v, n, k))]
    if shape.product in (Product.COLUMN_BACK, Product.ROW_BACK):
        dy, w_t = cancelling(rows, v * k, n, seed=4)
        weight = w_t.view(v, k, n).transpose(1, 2).contiguous()
        if shape.product is Product.ROW_BACK:
            return [lambda p: p.row_back(dy, weight)]
        spread = dy.repeat(1, v)
        return [lambda p: p.column_back(spread, weight)]
    leaves = max(1, rows // tile)
    if shape.product is Product.TOKEN:
        left, right = cancelling(leaves * v * n, k, token_block, seed=5)
        dy4 = left.view(leaves, v, n, token_block).permute(0, 3, 1, 2)
        x4 = right.t().reshape(1, token_block, 1, k).expand(leaves, token_block, 1, k)
        return [lambda p: p.token(dy4, x4)]
    a, b = cancelling(v * tile * leaves, n, k, seed=6)
    if shape.product is Product.ATTENTION:
        keys = b.t().contiguous().expand(v, k, n).contiguous()
        return [lambda p: p.attention(a.view(v, tile * leaves, k), keys)]
    left, right = cancelling(v * n, k, 2 * tile, seed=7)
    first = left.view(v, n, 2 * tile).transpose(1, 2).contiguous()
    second = right.t().contiguous().expand(v, 2 * tile, k).contiguous()
    return [lambda p: p.attention_token(first, second)]


def _leaf_is_pure(products: Products, shape: Shape) -> int:
    """Check that a row's bits ignore its place in the tile and the other rows of the tile.

    Raises:
        NoExactPathError: They do not.
    """
    tile, depth = (
        products.row_tile,
        shape.n if shape.product in (Product.COLUMN_BACK, Product.ROW_BACK) else shape.k,
    )
    width = shape.k if shape.product in (Product.COLUMN_BACK, Product.ROW_BACK) else shape.n
    if shape.product in (Product.TOKEN, Product.ATTENTION_TOKEN):
        return 0  # such a leaf is called at one shape with the same operands wherever it is computed
    x, w = cancelling(tile, width, depth, seed=8)
    whole = torch.mm(x, w.t())
    for row in (0, 1, tile // 2, tile - 1):
        alone = torch.zeros_like(x)
        alone[(row + 5) % tile] = x[row]
        if not _same(torch.mm(alone, w.t())[(row + 5) % tile], whole[row]):
            raise NoExactPathError(
                f"a row of a {shape.product.value} product (n={shape.n}, k={shape.k}) depends on its tile"
            )
    return 4


def _elementwise() -> int:
    """Check that the listed operators ignore length and offset.

    Raises:
        NoExactPathError: Naming the operator, length and offset.
    """
    source = torch.randn(8192, generator=torch.Generator().manual_seed(9)) * 4
    for name, operator in SAFE.items():
        reference = operator(source)
        for length in LENGTHS:
            for offset in OFFSETS:
                if not _same(operator(source[offset : offset + length]), reference[offset : offset + length]):
                    raise NoExactPathError(
                        f"{name} depends on its length or offset (length {length}, offset {offset})"
                    )
    return len(SAFE) * len(LENGTHS) * len(OFFSETS)


def _rows() -> int:
    """Check that row sums and maxima ignore the number of rows.

    Raises:
        NoExactPathError: They do not.
    """
    for width in (16, 128, 4096):
        x = torch.randn(64, width, generator=torch.Generator().manual_seed(10))
        for operator in (lambda t: t.sum(dim=-1), lambda t: t.double().sum(dim=-1), lambda t: t.amax(dim=-1)):
            if not _same(torch.cat([operator(x[i : i + 1].clone()) for i in range(64)]), operator(x)):
                raise NoExactPathError(f"a row reduction over {width} elements depends on the number of rows")
    return 9


def _machine_digest(products: Products, threads: int) -> str:
    """Digest fixed kernels' outputs: ranks on unlike processors or settings do not agree on it."""
    x, w = cancelling(products.row_tile, 64, 1024, seed=11)
    outputs = [x @ w.t(), *(operator(x) for operator in SAFE.values()), x.sum(dim=-1), x.double().sum(dim=-1)]
    pieces = [str(threads).encode(), *(out.contiguous().numpy().tobytes() for out in outputs)]
    return hashlib.sha256(b"".join(pieces)).hexdigest()


def _same(a: Tensor, b: Tensor) -> bool:
    """Compare bit patterns, and count an all-zero pair as different: it would show nothing."""
    view = torch.int64 if a.dtype is torch.float64 else torch.int32
    equal = bool((a.contiguous().view(view) == b.contiguous().view(view)).all())
    return equal and bool(a.any())
