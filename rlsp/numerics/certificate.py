"""The start-up certificate: which wide kernel calls leave the leaf path's bits, here, at the model's shapes.

Operands cancel (x = [r, −r[p]], w = [u, u[p]]: the exact product is 0), so that what is compared is pure
rounding residue and any other order of accumulation shows. A wide call that differs is not used; a leaf whose
bits depend on anything but its row leaves no exact path, and the run is refused.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from rlsp.bits import same_bits
from rlsp.numerics.compiled import Kernel, running
from rlsp.numerics.operands import agree, cancelling, noise
from rlsp.numerics.operators import (
    LONGEST_ROW,
    NORM_ROW,
    OPERATORS,
    REDUCTIONS,
    unsafe_operators,
    unsafe_reductions,
)
from rlsp.numerics.probes import RowProbe, probes
from rlsp.numerics.products import Product, Products, Shape

FEW = (Product.COLUMN, Product.ROW)  # what decoding calls
_WITNESS = (48, 256)  # columns and depth of the product that shows the operands' power


class NoExactPathError(RuntimeError):
    """A kernel's bits depend on more than the contract allows, and no other path is left."""


@dataclass(frozen=True)
class Certificate:
    """What was certified.

    Attributes:
        wide: Shapes whose wide call equals the leaf path.
        few: Shapes of which the compiled kernel for few rows does, where it runs.
        narrowed: Shapes that stay on the leaf path, in words.
        checks: Comparisons made.
        digest: SHA-256 of this machine's kernel outputs on fixed operands: equal on every rank or the run is
            refused.
        observations: Calls that the contract avoids, and whether they left the leaf's bits here all the same:
            recorded, not judged, since no machine must show a difference.
    """

    wide: frozenset[Shape]
    narrowed: tuple[str, ...]
    checks: int
    digest: str
    observations: tuple[tuple[str, bool], ...] = ()
    few: frozenset[Shape] = frozenset()


@dataclass(frozen=True)
class Sharded:
    """One product to certify.

    Attributes:
        shape: The product and its virtual shard's shape.
        shards: How many virtual shards the ranks of this run hold at a time.
    """

    shape: Shape
    shards: tuple[int, ...]


def certify(
    products: Products,
    wanted: tuple[Sharded, ...],
    token_block: int,
    threads_seen: int,
    *,
    device: torch.device | str = "cpu",
    rows: frozenset[int] = frozenset(),
) -> Certificate:
    """Certify the wide path of every product in `wanted` and the operators that every model uses.

    Args:
        products: Leaf products to start from (all on the leaf path).
        wanted: The run's products.
        token_block: Tokens in a leaf of a weight gradient.
        threads_seen: Intra-op threads of this process; enters the digest.
        device: Where the run computes.
        rows: Lengths of rows that are reduced, besides those of the products.

    Raises:
        NoExactPathError: A leaf, an operator or the operands themselves fail.
    """
    at = torch.device(device)
    _require_power(at)
    widths = _row_widths(wanted) | {min(size, LONGEST_ROW) for size in rows}
    unsafe = unsafe_operators(at) + unsafe_reductions(widths, at)
    if unsafe:
        raise NoExactPathError("; ".join(unsafe))
    checks = 1 + 3 * len(OPERATORS) + len(REDUCTIONS) * len(widths)
    wide, few, narrowed = set(), set(), []
    for item in wanted:
        exact, made = _try(products, item, token_block, at)
        checks += made
        if item.shape.product in FEW and _try_few(products, item, token_block, at):
            few.add(item.shape)
        if exact:
            wide.add(item.shape)
        else:
            narrowed.append(_words(item.shape))
    digest = _machine_digest(products, threads_seen, at)
    return Certificate(frozenset(wide), tuple(narrowed), checks, digest, _observe(at), frozenset(few))


def _try(products: Products, item: Sharded, token_block: int, device: torch.device) -> tuple[bool, int]:
    """Return whether one product's wide path leaves the leaf path's bits, and how many pairs were compared.

    Raises:
        NoExactPathError: The leaf path's own bits depend on more than the leaf.
    """
    exact, checks = True, 0
    wide = products.certified(frozenset({item.shape}))
    for probe in probes(item.shape, item.shards, products.row_tile, token_block, device):
        for what, got, want in probe.leaf_pairs(products):
            checks += 1
            if not agree(got, want):
                raise NoExactPathError(f"the bits of {_words(item.shape)} depend on {what}")
        for _, got, want in probe.wide_pairs(products, wide):
            checks += 1
            exact = exact and same_bits(got, want)
    return exact, checks


def _try_few(products: Products, item: Sharded, token_block: int, device: torch.device) -> bool:
    """Return whether the compiled kernel for few rows runs and leaves the leaf path's bits."""
    if Kernel.FEW_ROWS not in running().allowed:
        return False
    few = products.certified(frozenset(), frozenset({item.shape}))
    found = probes(item.shape, item.shards, products.row_tile, token_block, device)
    pairs = [
        pair for probe in found if isinstance(probe, RowProbe) for pair in probe.few_pairs(products, few)
    ]
    return all(same_bits(got, want) for _, got, want in pairs)


def _words(shape: Shape) -> str:
    return f"{shape.product.value} n={shape.n} k={shape.k}"


def _row_widths(wanted: tuple[Sharded, ...]) -> set[int]:
    """Return the lengths of reduced rows: hidden size, vocabulary shard, head size, key block, norm."""
    kinds = (Product.COLUMN, Product.ATTENTION)
    sizes = {size for item in wanted if item.shape.product in kinds for size in (item.shape.n, item.shape.k)}
    return {min(size, LONGEST_ROW) for size in sizes} | {NORM_ROW}


def _require_power(device: torch.device) -> None:
    """Show that the operands tell orders apart: the same sum in another order of k must leave other bits.

    Raises:
        NoExactPathError: It leaves the same.
    """
    x, w = cancelling(64, *_WITNESS, 1, device)
    order = noise(4, (x.shape[1],), device).argsort(stable=True)
    if agree(torch.mm(x, w.t()), torch.mm(x[:, order].contiguous(), w[:, order].contiguous().t())):
        raise NoExactPathError("the certificate's operands do not tell two orders of accumulation apart")


def _observe(device: torch.device) -> tuple[tuple[str, bool], ...]:
    """Try calls that NUMERICS section 1 found to depend on more than the row."""
    x, w = cancelling(32, 256, 1024, 50, device)
    small, thin = cancelling(32, 8, 16, 53, device)
    weight, narrow = w.t().contiguous(), thin.t().contiguous()
    whole = torch.mm(x, weight)
    shifted = torch.empty(x.numel() + 1, device=device)[1:].view(x.shape).copy_(x)
    vector = noise(56, (64 * 31,), device) * 4
    silu = torch.nn.SiLU()
    return (
        ("product of 1 row", agree(torch.mm(x[:1], weight), whole[:1])),
        ("product of 4 rows", agree(torch.mm(x[:4], weight), whole[:4])),
        ("product of 256 rows", agree(torch.mm(x.repeat(8, 1), weight), whole.repeat(8, 1))),
        ("product below 4096", agree(torch.mm(small[:2], narrow), torch.mm(small, narrow)[:2])),
        ("product of an unaligned operand", agree(torch.mm(shifted, weight), whole)),
        (
            "torch's silu in lengths of 31",
            agree(torch.cat([silu(x) for x in vector.split(31)]), silu(vector)),
        ),
    )


def _machine_digest(products: Products, threads: int, device: torch.device) -> str:
    """Digest fixed kernels' outputs: ranks on unlike processors or settings do not agree on it."""
    x, w = cancelling(products.row_tile, 64, 1024, 60, device)
    outputs: list[Tensor] = [torch.mm(x, w.t())]
    outputs += [operator(x) for operator in OPERATORS.values()]
    outputs += [reduce(x) for reduce in REDUCTIONS.values()]
    pieces = [str(threads).encode(), *(out.contiguous().cpu().numpy().tobytes() for out in outputs)]
    return hashlib.sha256(b"".join(pieces)).hexdigest()
