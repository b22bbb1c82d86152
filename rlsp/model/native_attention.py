"""The native route's core attention: torch's scaled dot product, over CP shards and over the cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention  # noqa: TID251 - the control

from rlsp import collectives
from rlsp.groups import Group
from rlsp.model.attention import Channel, CoreAttention, KeyValueCache
from rlsp.model.gradients import Differentiable
from rlsp.model.rope import rotary_table
from rlsp.model.wiring import NATIVE
from rlsp.sequence import gather_positions, own_positions


class NativeCoreAttention(CoreAttention):
    """Rotate q and k in the model's dtype, then attend by torch's kernel, whichever it chooses."""

    route = NATIVE

    def _rotated(self, x: Tensor, channel: Channel, dtype: torch.dtype) -> Tensor:
        """Rotate heads in the model's dtype, as Megatron-Core's unfused rotation does."""
        halves = rotary_table(channel.positions, self.inverse_frequencies)
        tables = (torch.cat((t, t), dim=-1) for t in halves)
        cosine, sine = (t.unsqueeze(2).to(dtype) for t in tables)
        first, second = x.chunk(2, dim=-1)
        return x * cosine + torch.cat((-second, first), dim=-1) * sine

    def _own_queries(self, query: Tensor, key: Tensor, value: Tensor, channel: Channel) -> Tensor:
        """Attend with this CP rank's queries to every key up to their positions."""
        cp = self.wiring.cp
        both = _GatherPositions.on(torch.stack((key, value), dim=1), cp)
        keys, values = (x.permute(1, 2, 0, 3) for x in both.unbind(dim=1))
        mask = None
        if cp.size > 1:
            mask = torch.arange(both.shape[0], device=query.device) <= channel.positions
        return self._sdpa(query, keys, values, mask)

    def _to_cache(
        self, query: Tensor, key: Tensor, value: Tensor, channel: Channel, cache: KeyValueCache
    ) -> Tensor:
        """Store the new keys and values, then attend to the cache; what it widened is narrowed exactly."""
        layer = self.layer_number - 1
        cache.store(layer, key, value, channel.positions)
        held = (cache.keys[layer].transpose(3, 4), cache.values[layer])
        keys, values = (x[:, :, : channel.blocks].flatten(2, 3).to(query.dtype) for x in held)
        at = torch.arange(keys.shape[2], device=query.device)
        mask = (at <= channel.positions.t().unsqueeze(-1)).unsqueeze(1)
        return self._sdpa(query, keys, values, mask)

    def _sdpa(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Attend with [n, b, h, D] to [b, G, S, D]; without a mask, causally over equal lengths."""
        out = scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=True,
        )
        return out.permute(2, 0, 1, 3).flatten(2)


class _GatherPositions(Differentiable):
    """Gather zigzag shards into position order; the gradient is summed over CP by the backend."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: Group) -> Tensor:
        """Move bits."""
        ctx.cp = cp
        return gather_positions(x, cp)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        """Sum every rank's gradient and take the own positions."""
        return own_positions(collectives.backend_all_reduce(dy, ctx.cp), ctx.cp), None
