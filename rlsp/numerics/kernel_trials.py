"""Try every compiled kernel against the torch code that defines it, and allow those whose bits agree.

Operands have ties, cancelling addends, both zeros, NaN, infinities, subnormals and huge numbers, and shapes
with every kind of tail: a kernel that rounds, orders or counts otherwise shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from rlsp.bits import row_digest, same_bits, shard_hashes
from rlsp.numerics.attention import TILE, cached_attention, store
from rlsp.numerics.compiled import TORCH, Kernel, Kernels, using
from rlsp.numerics.decoding import HEADS, KEYS, LONGEST_NORM, QUERIES
from rlsp.numerics.elementwise import rms_norm
from rlsp.numerics.fixed import Scratch, UnitAdder, add_leaves, leaf_bound
from rlsp.numerics.hashing import uniform
from rlsp.numerics.layers import Cached, Heads, Layers, Place, Weights
from rlsp.numerics.operands import cancelling, noise
from rlsp.numerics.products import Product, Products, Shape
from rlsp.numerics.tree import tree_sum

_CPU = torch.device("cpu")
_LSB = 40
_BOUND = leaf_bound(_LSB, 16)
_TIES = (0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.75, -0.25, 3.0, 2.0**23 + 0.5)  # in units
_SMALL = (0.0, -0.0, 2.0**-149, -(2.0**-149), 2.0**-126, -(2.0**-130))
_LARGE = (2.0**17 - 2.0**-7, -(2.0**17) + 2.0**-7)  # of the sums; in units, beyond what float64 adds exactly
_BROKEN = (float("nan"), float("inf"), float("-inf"), 3e38, -3e38, 2.0**30)
_FIRST_NAN = 0x7FC00000  # quiet, and so are the next millions
_WIDTHS = (1, 3, 8, 17, 64, 700, 2049)
_TOKENS = 2

Outputs = tuple[Tensor, ...]
Trial = Callable[[], Outputs]


def exact_kernels(kernels: Kernels) -> frozenset[Kernel]:
    """Return the kernels that leave the bits of their definitions on every operand, and whose parts do."""
    exact = {kernel for kernel in kernels.allowed if _exact(kernels.only(frozenset({kernel})), kernel)}
    return frozenset(kernel for kernel in exact if PARTS.get(kernel, frozenset()) <= exact)


def _exact(alone: Kernels, kernel: Kernel) -> bool:
    for call in _TRIALS[kernel]():
        with using(TORCH):
            want = call()
        with using(alone):
            got = call()
        if not all(same_bits(a, b) for a, b in zip(got, want, strict=True)):
            return False
    return True


def _planted(shape: tuple[int, ...], seed: int, values: tuple[float, ...]) -> Tensor:
    """Return noise of many magnitudes, every fifth element of it from `values`."""
    x = noise(seed, shape, _CPU) * torch.exp2(noise(seed + 1, shape, _CPU) * 20 - 20)
    flat = x.view(-1)
    flat[::5] = torch.tensor(values).repeat(len(flat[::5]) // len(values) + 1)[: len(flat[::5])]
    return x


def _sums() -> Iterator[Trial]:
    """Add leaves as they come: contiguous, transposed, at an inner dimension; then out of bound."""
    fine = tuple(tie * 2.0**-_LSB for tie in _TIES) + _SMALL + _LARGE
    for width in _WIDTHS:
        leaves = _planted((9, 2, 5, width), width, fine)
        yield partial(_added, leaves)
        yield partial(_added, leaves.transpose(1, 2))
        yield partial(_added_inside, leaves)
        yield partial(_added, -leaves.flip(0))
    for value in _BROKEN:
        broken = _planted((3, 2, 40), 7, (*fine, value))
        yield partial(_seen, broken)


def _added(leaves: Tensor) -> Outputs:
    total = torch.arange(leaves[0].numel()).view(leaves.shape[1:]).contiguous()
    return total, *add_leaves(total, leaves, _LSB, _BOUND)


def _seen(leaves: Tensor) -> Outputs:
    """Leave the sum out: what does not fit has no integer."""
    return _added(leaves)[1:]


def _added_inside(leaves: Tensor) -> Outputs:
    adder = UnitAdder((leaves.shape[0], *leaves.shape[2:]), _LSB, Scratch(_CPU))
    largest = [adder.add(part, 1).abs() for part in (leaves, leaves * 0.5, leaves * 0)]
    return adder.total(), *largest


def _hashes() -> Iterator[Trial]:
    for width in _WIDTHS:
        x = _planted((3, width), width, _SMALL + _BROKEN)
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            yield partial(_hashed, x.to(dtype))


def _hashed(x: Tensor) -> Outputs:
    return shard_hashes(x), shard_hashes(x[:, ::2])


def _digests() -> Iterator[Trial]:
    for width in _WIDTHS:
        x = _planted((5, width), width, _SMALL + _BROKEN)
        for dtype in (torch.float32, torch.bfloat16):
            for valid in (7 + width, 7 + width // 2):
                yield partial(_digested, x.to(dtype), valid)


def _digested(x: Tensor, valid: int) -> Outputs:
    return row_digest(x, 7, valid), row_digest(x[:, ::2], 0, valid)


def _trees() -> Iterator[Trial]:
    """Sum leaves that cancel but for rounding, those with infinities and NaN, and NaN that all differ.

    The last leave room between each other, as messages do that come behind a header.
    """
    for count in (2, 3, 4, 7, 8, 16, 64):
        for width in _WIDTHS:
            x = _planted((count, width), count, _SMALL)
            whole = torch.cat((x, -x.flip(0)))[:64]
            broken = _planted((count, width), count + width, _SMALL + _BROKEN + (-float("nan"),))
            other = torch.arange(count * (width + 16), dtype=torch.int32).view(count, -1) + _FIRST_NAN
            yield partial(_summed, whole, broken, other.view(torch.float32)[:, 16:])


def _summed(*leaves: Tensor) -> Outputs:
    return tuple(tree_sum(x) for x in leaves)


def _uniforms() -> Iterator[Trial]:
    keys = (noise(3, (9,), _CPU) * 2.0**62).to(torch.int64)
    for first, count in ((0, 1), (7, 40), (151_000, 333)):
        yield partial(_uniform, keys, first, count)


def _uniform(keys: Tensor, first: int, count: int) -> Outputs:
    return (uniform(keys, first, count),)


def _norms() -> Iterator[Trial]:
    """Normalise rows with every kind of tail, and so long that sums are folded once and again."""
    for width in (*_WIDTHS, 32, 128, 520, 576, 1024, LONGEST_NORM):
        x = noise(width, (16, width), _CPU) * torch.exp2(noise(width + 1, (16, 1), _CPU) * 20)
        yield partial(rms_norm, x, noise(width + 2, (width,), _CPU), 1e-6)


def _rows() -> Iterator[Trial]:
    """Multiply rows by operands that cancel; the certificate does so again, at the shapes of a run."""
    for shards, count, k, n in ((1, 5, 128, 104), (8, 3, 16, 64), (2, 32, 48, 33)):
        x, w = cancelling(count, n, k, shards)
        weight = w.unsqueeze(0).repeat(shards, 1, 1)
        yield partial(_multiplied, x.repeat(1, shards), weight)


def _multiplied(x: Tensor, weight: Tensor) -> Outputs:
    _, n, k = weight.shape
    shapes = frozenset({Shape(Product.ROW, n, k), Shape(Product.COLUMN, n, k)})
    products = Products(TILE).certified(frozenset(), shapes)
    return products.row(x, weight), products.column(x[:, :k], weight)


def _stores() -> Iterator[Trial]:
    """Store a token at the ends and in the middle of blocks, for several sequences and in one call."""
    for positions in (torch.tensor([[0, 31, 40]]), torch.tensor([[3, 62, 1], [4, 63, 2]])):
        for dtype in (torch.float32, torch.bfloat16):
            key, value = (_planted((*positions.shape, 2, 5), seed, _SMALL).to(dtype) for seed in (5, 8))
            yield partial(_stored, key, value, positions)


def _stored(key: Tensor, value: Tensor, positions: Tensor) -> Outputs:
    keys, values = torch.zeros(3, 2, 2, 5, KEYS), torch.zeros(3, 2, 2, KEYS, 5)
    store(keys, values, key, value, positions)
    return keys, values


def _attentions() -> Iterator[Trial]:
    """Attend to one block and to several, from a position in the middle of each; some queries see fewer."""
    for d in HEADS:
        for heads, count, blocks in ((2, 1, 1), (3, 2, 3), (1, QUERIES, 2)):
            q, k, v = (
                noise(d + i, (heads, n, d), _CPU) for i, n in enumerate((count, blocks * KEYS, blocks * KEYS))
            )
            keys, values = k.view(heads, blocks, d, KEYS) * 4, v.view(heads, blocks, KEYS, d)
            positions = (torch.arange(heads * count) * 7 % (blocks * KEYS)).view(heads, count)
            positions[0, 0] = blocks * KEYS - 2
            yield partial(_attended, q, keys, values, positions)


def _attended(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Outputs:
    return (cached_attention(Products(TILE), q, k, v, positions, q.shape[2] ** -0.5),)


def _layers() -> Iterator[Trial]:
    """Decode through two layers across the end of a block, with and without norms of heads."""
    yield partial(_decoded, torch.bfloat16, 4, 5, 32, True)
    yield partial(_decoded, torch.bfloat16, 1, 2, 16, False)
    yield partial(_decoded, torch.float32, 2, 1, 64, True)


def _decoded(dtype: torch.dtype, shards: int, b: int, d: int, normed: bool) -> Outputs:
    hidden, narrow, groups, queries = 72, 24, 2 * shards, 2
    matrices = {
        "qkv": (shards, 2 * (queries + 2) * d, hidden),
        "projection": (shards, hidden, 2 * queries * d),
        "fc1": (shards, 2 * narrow, hidden),
        "fc2": (shards, hidden, narrow),
    }
    norms = {"attention_norm": hidden, "mlp_norm": hidden, "query_norm": d, "key_norm": d}
    shapes = {**matrices, **{name: (n,) for name, n in norms.items()}}
    weights = []
    for seed in (100, 200):
        drawn = {
            name: noise(seed + i, shape, _CPU).to(dtype) for i, (name, shape) in enumerate(shapes.items())
        }
        weights.append(Weights(**drawn if normed else drawn | {"query_norm": None, "key_norm": None}))
    cache = [Cached(torch.zeros(b, groups, 2, d, KEYS), torch.zeros(b, groups, 2, KEYS, d)) for _ in weights]
    layers = Layers(Products(TILE), Heads(groups, queries, 1e-6, d**-0.5), weights)
    out = []
    for step in range(_TOKENS):
        positions = torch.arange(b) * 5 + KEYS - 1 + step
        angles = noise(300 + step, (b, d // 2), _CPU)
        place = Place(positions, angles.cos(), angles.sin(), 2)
        out.append(layers(noise(400 + step, (b, hidden), _CPU).to(dtype), cache, place))
    return *out, *(part for cached in cache for part in cached)


_TRIALS: dict[Kernel, Callable[[], Iterator[Trial]]] = {
    Kernel.ADD_LEAVES: _sums,
    Kernel.SHARD_HASHES: _hashes,
    Kernel.ROW_DIGEST: _digests,
    Kernel.TREE_SUM: _trees,
    Kernel.UNIFORMS: _uniforms,
    Kernel.RMS_NORM: _norms,
    Kernel.FEW_ROWS: _rows,
    Kernel.STORE: _stores,
    Kernel.CACHED_ATTENTION: _attentions,
    Kernel.LAYERS: _layers,
}
PARTS = {
    Kernel.LAYERS: frozenset(
        {Kernel.TREE_SUM, Kernel.RMS_NORM, Kernel.FEW_ROWS, Kernel.STORE, Kernel.CACHED_ATTENTION}
    )
}
"""Kernels that are built of others, and run where all of those do."""
