"""Where each of a model's weights lies in transformers' tensors: cuts and moves of bits, either way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlsp.config import ModelConfig
from rlsp.layout import padded_groups
from rlsp.numerics.contract import Contract
from rlsp.pretrained.names import EMBEDDING, HEAD


class Tensors(Protocol):
    """transformers' tensors by name, of which slices are read."""

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Return the indices start … stop of dimension `dim`, which may be none."""


@dataclass(frozen=True)
class Copied:
    """A weight of which every rank has a copy: a norm's.

    Attributes:
        name: Megatron-Core's name.
        source: transformers' name.
        size: Its elements.
    """

    name: str
    source: str
    size: int

    def collect(self, tensors: Tensors, _index: int, _ranks: int) -> Tensor:
        """Read the weight, [n]."""
        return tensors.read(self.source, 0, 0, self.size)


@dataclass(frozen=True)
class Part:
    """One of transformers' matrices, of which equal slices go into the units of a weight.

    Attributes:
        name: transformers' name.
        width: Rows or columns of a slice.
        size: Rows or columns in all; what slices have beyond is padding, zeros.
    """

    name: str
    width: int
    size: int


@dataclass(frozen=True)
class Fused:
    """A weight of virtual shards: units side by side, each with one slice of every part.

    Attributes:
        name: Megatron-Core's name.
        parts: Where the slices come from, in the order in which they lie in a unit.
        units: How many there are, padding included; a multiple of the virtual width.
        dim: The dimension of the parts that is cut: 0 for rows, 1 for columns (of one part only).
    """

    name: str
    parts: tuple[Part, ...]
    units: int
    dim: int = 0

    def collect(self, tensors: Tensors, index: int, ranks: int) -> Tensor:
        """Read the adjacent units of rank `index` of `ranks`, [units/ranks, N, K]."""
        own = self.units // ranks
        cut = []
        for part in self.parts:
            first, last = (min(edge * own * part.width, part.size) for edge in (index, index + 1))
            x = tensors.read(part.name, self.dim, first, last)
            missing = own * part.width - (last - first)
            cut.append(pad(x, (0, 0, 0, missing) if self.dim == 0 else (0, missing)))
        if self.dim == 1:
            return cut[0].reshape(cut[0].shape[0], own, -1).transpose(0, 1)
        return torch.cat([x.reshape(own, -1, x.shape[1]) for x in cut], dim=1)

    def shards(self, units: Tensor, count: int) -> Tensor:
        """Lay units [units, n, k] together into `count` virtual shards [count, N, K]."""
        if self.dim == 1:
            n, k = units.shape[1:]
            return units.reshape(count, -1, n, k).transpose(1, 2).reshape(count, n, -1)
        return units.reshape(count, -1, units.shape[2])

    def take_apart(self, shards: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield each part by transformers' name, whole and without padding, from all shards [V, N, K]."""
        if self.dim == 1:
            yield self.parts[0].name, shards.transpose(0, 1).flatten(1)[:, : self.parts[0].size].contiguous()
            return
        units = shards.reshape(self.units, -1, shards.shape[2])
        edges = accumulate((part.width for part in self.parts), initial=0)
        for part, (start, stop) in zip(self.parts, pairwise(edges), strict=True):
            yield part.name, units[:, start:stop].flatten(0, 1)[: part.size].contiguous()

    def padding(self, shards: Tensor, index: int, ranks: int) -> Iterator[Tensor]:
        """Yield views of what is padding in the own virtual shards [V_local, N, K] of rank `index`."""
        own = self.units // ranks
        per_shard = own // shards.shape[0]
        for shard, unit in ((s, u) for s in range(shards.shape[0]) for u in range(per_shard)):
            number = index * own + shard * per_shard + unit
            widths = [part.width for part in self.parts]
            start = unit * sum(widths)
            for part in self.parts:
                true = min(max(part.size - number * part.width, 0), part.width)
                rows = slice(start + true, start + part.width)
                yield shards[shard, rows] if self.dim == 0 else shards[shard, :, rows]
                start += part.width


def weight_plan(shape: ModelConfig, contract: Contract) -> Iterator[Copied | Fused]:
    """Yield where every weight of a model comes from, layer by layer.

    QKV is interleaved by key-value group, [its query heads, key, value]; FC1 is [gate, up] a virtual shard; a
    row-parallel weight is cut along its input; groups of heads and the vocabulary are padded with zeros to
    what the virtual width divides.
    """
    v, hidden, ffn, head = contract.virtual_tp, shape.hidden_size, shape.ffn_hidden_size, shape.head_dim
    groups = padded_groups(shape.num_query_groups, v)
    key = head * shape.num_query_groups
    query = head * shape.num_attention_heads
    per_group = query // shape.num_query_groups
    norms = {
        "input_layernorm": ("input_layernorm", hidden),
        "pre_mlp_layernorm": ("post_attention_layernorm", hidden),
    }
    if shape.qk_norm:
        norms["self_attention.q_layernorm"] = ("self_attn.q_norm", head)
        norms["self_attention.k_layernorm"] = ("self_attn.k_norm", head)
    for layer in range(shape.num_layers):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."

        def part(name: str, width: int, size: int, theirs: str = theirs) -> Part:
            return Part(f"{theirs}{name}_proj.weight", width, size)

        for name, (source, size) in norms.items():
            yield Copied(f"{ours}{name}.weight", f"{theirs}{source}.weight", size)
        qkv = (
            part("self_attn.q", per_group, query),
            part("self_attn.k", head, key),
            part("self_attn.v", head, key),
        )
        yield Fused(f"{ours}self_attention.linear_qkv.weight", qkv, groups)
        out = part("self_attn.o", per_group, query)
        yield Fused(f"{ours}self_attention.linear_proj.weight", (out,), groups, dim=1)
        gated = (part("mlp.gate", ffn // v, ffn), part("mlp.up", ffn // v, ffn))
        yield Fused(f"{ours}mlp.linear_fc1.weight", gated, v)
        yield Fused(f"{ours}mlp.linear_fc2.weight", (part("mlp.down", ffn // v, ffn),), v, dim=1)
    yield Copied("decoder.final_layernorm.weight", "model.norm.weight", hidden)
    rows = contract.padded_vocab // v
    yield Fused("embedding.word_embeddings.weight", (Part(EMBEDDING, rows, shape.vocab_size),), v)
    if not shape.tie_embeddings:
        yield Fused("output_layer.weight", (Part(HEAD, rows, shape.vocab_size),), v)
