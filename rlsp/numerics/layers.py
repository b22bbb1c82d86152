"""Decoding's layers as one: a new token of every sequence, in three compiled calls a layer.

Calling a module costs more than a few rows' arithmetic in it. What is called here is what the modules
compute, operator by operator, with the same roundings; between the calls torch takes its own exp. Of NaN no
bits are promised: no token is drawn from them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rlsp.numerics.attention import TILE, cached_attention, store
from rlsp.numerics.compiled import TREE_LEAVES, Kernel, library_for
from rlsp.numerics.decoding import HEADS, KEYS, LONGEST_NORM, QUERIES
from rlsp.numerics.elementwise import MASKED, rms_norm, rotate, swiglu
from rlsp.numerics.products import Product, Products, turned, widened
from rlsp.numerics.tree import tree_sum


class Weights(NamedTuple):
    """One layer's weights as the model holds them, all virtual shards of each.

    Attributes:
        attention_norm: [H].
        qkv: [V, (heads + 2·G)·D/V, H]; each group's queries, key and value side by side.
        query_norm: [D], or None where heads are not normalised.
        key_norm: Likewise.
        projection: [V, H, heads·D/V].
        mlp_norm: [H].
        fc1: [V, 2·F/V, H]; each shard's gate and up side by side.
        fc2: [V, H, F/V].
    """

    attention_norm: Tensor
    qkv: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    projection: Tensor
    mlp_norm: Tensor
    fc1: Tensor
    fc2: Tensor


class Cached(NamedTuple):
    """Keys [b, G, n_k, D, block] and values [b, G, n_k, block, D] of one layer, float32, contiguous."""

    keys: Tensor
    values: Tensor


class Place(NamedTuple):
    """Where the new tokens stand.

    Attributes:
        positions: int64 [b].
        cosine: float32 [b, D/2], of each position.
        sine: Likewise.
        blocks: Key blocks to visit, up to the longest sequence.
    """

    positions: Tensor
    cosine: Tensor
    sine: Tensor
    blocks: int


@dataclass(frozen=True)
class Heads:
    """What the weights' shapes do not say.

    Attributes:
        groups: Key-value heads, G.
        queries: Query heads of each.
        epsilon: Added to the mean square of every norm.
        scale: Factor on attention's scores.
    """

    groups: int
    queries: int
    epsilon: float
    scale: float

    def size(self, qkv: Tensor) -> int:
        """Return the size of a head, D, of a QKV weight."""
        return qkv.shape[0] * qkv.shape[1] // (self.groups * (self.queries + 2))


class Layers:
    """All layers of a model whose weights do not change meanwhile."""

    def __init__(self, products: Products, heads: Heads, weights: Sequence[Weights]) -> None:
        """Take the weights of every layer, in order, all of the same shapes."""
        self._products, self._heads, self._weights = products, heads, weights
        self._bound: list[_Bound] = []
        self._room: _Room | None = None

    def fit(self, block: int) -> bool:
        """Tell whether the compiled functions take these sizes, and a cache in blocks of `block` keys."""
        first, heads = self._weights[0], self._heads
        v, _, hidden = first.qkv.shape
        products = {
            Product.COLUMN: [matrix for layer in self._weights for matrix in (layer.qkv, layer.fc1)],
            Product.ROW: [matrix for layer in self._weights for matrix in (layer.projection, layer.fc2)],
        }
        return (
            all(self._products.takes_few(x, product) for product, every in products.items() for x in every)
            and (self._products.row_tile, block) == (TILE, KEYS)
            and first.qkv.dtype in (torch.bfloat16, torch.float32)
            and hidden <= LONGEST_NORM
            and heads.queries <= QUERIES
            and heads.size(first.qkv) in HEADS
            and v <= TREE_LEAVES
        )

    def __call__(self, stream: Tensor, cache: Sequence[Cached], place: Place) -> Tensor:
        """Take one new token of every sequence through all layers, and store its keys and values.

        Args:
            stream: Embedded tokens [b, H].
            cache: One entry a layer, changed in place.
            place: Where the tokens stand.

        Returns:
            [b, H] in stream's dtype.
        """
        library = library_for(Kernel.LAYERS, stream, *cache[0])
        if library is None:
            for weights, cached in zip(self._weights, cache, strict=True):
                stream = self._layer(weights, cached, stream, place)
            return stream
        room = self._room_for(stream, cache[0])
        room.enter(stream, place)
        for bound, (keys, values) in zip(self._bound, cache, strict=True):
            bound.layer.keys, bound.layer.values = keys.data_ptr(), values.data_ptr()
            both = ctypes.byref(bound.layer), ctypes.byref(room.step)
            library.rlsp_layer_scores(*both)
            room.weights.exp_()
            library.rlsp_layer_gates(*both)
            room.gates.exp_()
            library.rlsp_layer_end(*both)
        return torch.empty_like(stream).copy_(room.stream)

    def _room_for(self, stream: Tensor, cached: Cached) -> _Room:
        """Return room for these sequences, which become fewer as they end."""
        if not self._bound:
            self._bound = [_Bound(weights) for weights in self._weights]
        shape = (stream.shape[0], cached.values.shape[2])
        if self._room is None or self._room.shape != shape:
            self._room = _Room(self._weights[0], self._heads, stream.dtype, shape)
        return self._room

    def _layer(self, weights: Weights, cached: Cached, stream: Tensor, place: Place) -> Tensor:
        """Apply one layer: the definition, operator by operator as the modules have it."""
        heads, (b, _), dtype = self._heads, stream.shape, stream.dtype
        x = rms_norm(stream, weights.attention_norm, heads.epsilon)[0]
        mixed = self._products.column(x, weights.qkv, dtype).view(b, heads.groups, heads.queries + 2, -1)
        query, key, value = mixed.split((heads.queries, 1, 1), dim=2)
        query, key = (
            self._rotated(part, norm, place, dtype)
            for part, norm in ((query, weights.query_norm), (key, weights.key_norm))
        )
        new_key, new_value = (part.permute(2, 0, 1, 3) for part in (key, value))
        store(cached.keys, cached.values, new_key, new_value, place.positions.unsqueeze(0))
        keys, values = (part.flatten(0, 1)[:, : place.blocks] for part in cached)
        seen = place.positions.view(b, 1, 1).expand(b, heads.groups, heads.queries).flatten(0, 1)
        attended = cached_attention(self._products, query.flatten(0, 1), keys, values, seen, heads.scale)
        out = self._products.row(attended.to(dtype).reshape(b, -1), weights.projection, tree_sum)
        stream = out.to(dtype) + stream
        x = rms_norm(stream, weights.mlp_norm, heads.epsilon)[0]
        gates = self._products.column(x, weights.fc1, dtype).view(b, weights.fc1.shape[0], 2, -1)
        out = self._products.row(swiglu(gates).flatten(1), weights.fc2, tree_sum)
        return out.to(dtype) + stream

    def _rotated(self, x: Tensor, norm: Tensor | None, place: Place, dtype: torch.dtype) -> Tensor:
        """Normalise heads [b, G, n, D] in float32, rotate them and round once."""
        wide = x.float() if norm is None else rms_norm(x.float(), norm, self._heads.epsilon)[0]
        return rotate(wide, place.cosine[:, None, None], place.sine[:, None, None]).to(dtype)


class _Layer(ctypes.Structure):
    """As `Layer` in the source."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in (*Weights._fields, *Cached._fields))


_SIZES = ("sequences", "hidden", "shards", "groups", "queries", "d", "ffn", "room", "blocks", "bfloat16")
_ROOMS = ("stream", "rows", "wide", "leaves", "query", "key", "value", "weights", "gates")


class _Step(ctypes.Structure):
    """As `Step` in the source."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_float) for name in ("epsilon", "scale", "masked")),
        *((name, ctypes.c_void_p) for name in ("cosine", "sine", "positions", "seen", *_ROOMS)),
    )


class _Bound:
    """Hold a layer's weights as the compiled functions read them."""

    def __init__(self, weights: Weights) -> None:
        given = {name: x for name, x in weights._asdict().items() if x is not None}
        self._held = {
            name: widened(x.detach()) if x.dim() == 1 else turned(x, together=name in ("qkv", "fc1"))
            for name, x in given.items()
        }
        self.layer = _Layer(**{name: x.data_ptr() for name, x in self._held.items()})


class _Room:
    """Hold what one call works in, for one number of sequences and one length of the cache."""

    def __init__(self, weights: Weights, heads: Heads, dtype: torch.dtype, shape: tuple[int, int]) -> None:
        b, room = self.shape = shape
        (v, narrow, hidden), ffn = weights.qkv.shape, weights.fc2.shape[0] * weights.fc2.shape[2]
        all_heads = b * heads.groups * heads.queries
        d = heads.size(weights.qkv)
        sizes = {
            "stream": b * hidden,
            "rows": b * hidden,
            "wide": b * max(v * narrow, 2 * ffn),
            "leaves": v * b * hidden,
            "query": all_heads * d,
            "key": b * heads.groups * d,
            "value": b * heads.groups * d,
            "weights": all_heads * room * (KEYS + 1),
            "gates": b * ffn,
        }
        self._every = torch.zeros(sum(sizes.values()))
        self._parts = dict(zip(sizes, self._every.split(list(sizes.values())), strict=True))
        self.step = _Step(
            b, hidden, v, heads.groups, heads.queries, d, ffn, room, 0, dtype is torch.bfloat16,
            heads.epsilon, heads.scale, MASKED,
            **{name: part.data_ptr() for name, part in self._parts.items()},
        )  # fmt: skip
        self.stream, self.gates = self._parts["stream"].view(b, hidden), self._parts["gates"]
        self._heads = heads

    def enter(self, stream: Tensor, place: Place) -> None:
        """Begin with embedded tokens at their places; what is pointed at is held."""
        every = self._heads.groups * self._heads.queries
        self._held = (
            place.cosine.contiguous(),
            place.sine.contiguous(),
            place.positions.contiguous(),
            place.positions.repeat_interleave(every),
        )
        step = self.step
        step.cosine, step.sine, step.positions, step.seen = (x.data_ptr() for x in self._held)
        step.blocks = place.blocks
        self.weights = self._parts["weights"][: self.shape[0] * every * place.blocks * (KEYS + 1)]
        self.stream.copy_(stream)
