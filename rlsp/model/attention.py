"""Megatron-Core's core attention, over CP shards in training and over a block cache in the rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn

from rlsp import collectives
from rlsp.model.gradients import Differentiable
from rlsp.model.rope import Rotate, rotary_table
from rlsp.model.wiring import STRICT, Boundary, Operator, Site, Wiring
from rlsp.numerics.attention import (
    KeyValueGradient,
    block_attention,
    block_attention_back,
    cached_attention,
    store,
)
from rlsp.numerics.fixed import from_fixed
from rlsp.sequence import gather_positions, local_blocks, own_positions
from rlsp.summation import Guard


class KeyValueCache:
    """Hold rotated keys and values of every layer in blocks, zero where nothing is stored (NUMERICS rule 8).

    Attributes:
        keys: One tensor a layer, [B, G, n_k, D, block], as products want them: the numbers, widened
            once to float32.
        values: Likewise, [B, G, n_k, block, D].
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        groups: int,
        length: int,
        block: int,
        head_dim: int,
        device: torch.device,
    ) -> None:
        """Allocate room for `length` tokens, rounded up to blocks."""
        shape = (batch, groups, -(-length // block))
        self.block = block
        self.keys = [torch.zeros((*shape, head_dim, block), device=device) for _ in range(layers)]
        self.values = [torch.zeros((*shape, block, head_dim), device=device) for _ in range(layers)]

    def store(self, layer: int, key: Tensor, value: Tensor, positions: Tensor) -> None:
        """Write keys and values [n, b, G, D] at int64 positions [n, b] of layer `layer` (from 0)."""
        store(self.keys[layer], self.values[layer], key, value, positions)

    def keep(self, sequences: Tensor) -> None:
        """Drop every sequence but those of the int64 index `sequences`."""
        self.keys = [x.index_select(0, sequences) for x in self.keys]
        self.values = [x.index_select(0, sequences) for x in self.values]


@dataclass(kw_only=True)
class Channel(PackedSeqParams):
    """Carry one call's positions and cache through Megatron-Core's layers to the core attention.

    Attributes:
        positions: int64 [s, 1] in training (this CP rank's positions) or [n, b] in the rollout.
        cache: The rollout's cache; None in training.
        blocks: Key blocks to visit in the rollout (up to the longest sequence).
        guard: Where training notes leaves out of bound; None where there is no backward pass.
        bound: Magnitude below which dK's and dV's leaves must stay.
        table: Cosine and sine of the positions, [s, b, 1, D/2]: all layers rotate alike, the first makes it.
    """

    positions: Tensor
    cache: KeyValueCache | None = None
    blocks: int = 0
    guard: Guard | None = None
    bound: float = 0.0
    table: tuple[Tensor, Tensor] | None = None


class CoreAttention(nn.Module):
    """Rotate q and k, then attend in canonical blocks."""

    route = STRICT

    def __init__(
        self, *, config: Any, layer_number: int, softmax_scale: float | None = None, **_: Any
    ) -> None:
        """Take Megatron-Core's constructor arguments."""
        super().__init__()
        self.wiring: Wiring = config.wiring
        self.layer_number = layer_number
        self.head_dim: int = config.kv_channels
        self.inverse_frequencies: Tensor = config.inverse_frequencies
        self.scale = softmax_scale if softmax_scale is not None else float(self.head_dim) ** -0.5
        self.leaves_name = f"attention dK dV, layer {layer_number}"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: Any,
        **_: Any,
    ) -> Tensor:
        """Return [s, b, h·D] for query [s, b, h, D], key and value [s, b, G, D] before rotation."""
        if not isinstance(packed_seq_params, Channel) or attention_mask is not None:
            raise ValueError(
                "rlsp's core attention is causal and takes positions from a Channel: no mask and no packing"
            )
        channel = packed_seq_params
        self.wiring.count(Operator.ATTENTION, self.route)
        query, key = (self._rotated(x, channel, value.dtype) for x in (query, key))
        self.wiring.capture(Site(Boundary.QUERY, self.layer_number - 1), query)
        self.wiring.capture(Site(Boundary.KEY, self.layer_number - 1), key)
        if channel.cache is not None:
            attended = self._to_cache(query, key, value, channel, channel.cache)
        else:
            attended = self._own_queries(query, key, value, channel)
        self.wiring.capture(Site(Boundary.CORE_ATTENTION, self.layer_number - 1), attended)
        return attended

    def _rotated(self, x: Tensor, channel: Channel, dtype: torch.dtype) -> Tensor:
        """Rotate heads [s, b, heads, D] by their positions and round once to `dtype`."""
        if channel.table is None:
            cosine, sine = rotary_table(channel.positions, self.inverse_frequencies)
            channel.table = cosine.unsqueeze(2), sine.unsqueeze(2)
        rotated: Tensor = Rotate.on(x, *channel.table, dtype)
        return rotated

    def _own_queries(self, query: Tensor, key: Tensor, value: Tensor, channel: Channel) -> Tensor:
        """Attend with this CP rank's queries to the keys of all."""
        attended: Tensor = _ContextAttention.on(query, key, value, self, channel)
        return attended

    def _to_cache(
        self, query: Tensor, key: Tensor, value: Tensor, channel: Channel, cache: KeyValueCache
    ) -> Tensor:
        """Store the new keys and values, then attend to the cache."""
        n, b, heads, d = query.shape
        groups = key.shape[2]
        layer = self.layer_number - 1
        cache.store(layer, key, value, channel.positions)
        keys, values = (x[layer].flatten(0, 1)[:, : channel.blocks] for x in (cache.keys, cache.values))
        rows = query.view(n, b, groups, -1, d).permute(1, 2, 0, 3, 4).reshape(b * groups, -1, d)
        positions = (
            channel.positions.t()
            .reshape(b, 1, n, 1)
            .expand(b, groups, n, heads // groups)
            .reshape(b * groups, -1)
        )
        out = cached_attention(self.wiring.products, rows, keys, values, positions, self.scale).to(
            value.dtype
        )
        return out.view(b, groups, n, -1, d).permute(2, 0, 1, 3, 4).reshape(n, b, heads * d)


class _ContextAttention(Differentiable):
    """Gather K and V over CP (moves bits), attend with the own queries, sum dK and dV exactly."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, module: CoreAttention, channel: Channel
    ) -> Tensor:
        """Attend in blocks; keep what the backward pass recomputes from, in the model's dtype (exact)."""
        wiring, dtype = module.wiring, value.dtype
        block = wiring.contract.q_block
        both = gather_positions(torch.stack((key.to(dtype), value), dim=1), wiring.cp)
        keys, values = (_key_blocks(x, block) for x in both.unbind(dim=1))
        queries = _query_blocks(query.to(dtype), key.shape[2], block)
        blocks = local_blocks(both.shape[0], block, wiring.cp)
        out, log_sum = block_attention(wiring.products, queries, keys, values, blocks, module.scale)
        ctx.save_for_backward(queries, keys, values, out, log_sum)
        ctx.module, ctx.channel, ctx.blocks, ctx.shape = module, channel, blocks, query.shape
        return _from_query_blocks(out, query.shape).to(dtype).flatten(2)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Return dQ, and the own positions of the exact dK and dV; dQ and dK in float32."""
        wiring, channel = ctx.module.wiring, ctx.channel
        contract = wiring.contract
        keys = ctx.saved_tensors[1]
        b, groups = ctx.shape[1], keys.shape[0] // ctx.shape[1]
        dout = _query_blocks(dy.view(ctx.shape), groups, contract.q_block)
        dq, exact = block_attention_back(
            wiring.products,
            dout,
            ctx.saved_tensors,
            ctx.blocks,
            ctx.module.scale,
            contract.grad_lsb,
            channel.bound,
        )
        channel.guard.note(ctx.module.leaves_name, exact.reach)
        dk, dv = _sum_over_context(exact, b, wiring)
        return _from_query_blocks(dq, ctx.shape), dk, dv.to(dy.dtype), None, None


def _sum_over_context(exact: KeyValueGradient, batch: int, wiring: Wiring) -> tuple[Tensor, Tensor]:
    """Add dK and dV of all CP ranks as integers and return the own positions [s, b, G, D] in float32."""
    total = collectives.sum_integers(torch.stack((exact.dk, exact.dv)), wiring.cp)
    _, bg, n_k, block, d = total.shape
    by_position = total.view(2, batch, bg // batch, n_k * block, d).permute(3, 0, 1, 2, 4)
    own = from_fixed(own_positions(by_position, wiring.cp), wiring.contract.grad_lsb)
    return own[:, 0].contiguous(), own[:, 1].contiguous()


def _query_blocks(x: Tensor, groups: int, block: int) -> Tensor:
    """Cut [s, b, h, D] into [b·G, n_q, h/G, block, D]."""
    s, b, heads, d = x.shape
    cut = x.reshape(s // block, block, b, groups, heads // groups, d).permute(2, 3, 0, 4, 1, 5)
    return cut.reshape(b * groups, s // block, heads // groups, block, d)


def _from_query_blocks(x: Tensor, shape: torch.Size) -> Tensor:
    """Undo `_query_blocks` into `shape` [s, b, h, D]."""
    s, b, heads, d = shape
    bg, n_q, per_group, block, _ = x.shape
    cut = x.view(b, bg // b, n_q, per_group, block, d).permute(2, 4, 0, 1, 3, 5)
    return cut.reshape(s, b, heads, d)


def _key_blocks(x: Tensor, block: int) -> Tensor:
    """Cut [S, b, G, D] into [b·G, n_k, block, D]."""
    s, b, groups, d = x.shape
    return x.permute(1, 2, 0, 3).reshape(b * groups, s // block, block, d)
