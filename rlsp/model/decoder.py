"""Decode with an engine's layers taken as one: the modules' bits without the cost of calling them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlsp.model.attention import Channel
from rlsp.model.build import PolicyModel
from rlsp.model.rope import rotary_table
from rlsp.model.wiring import Operator
from rlsp.numerics.compiled import Kernel, running
from rlsp.numerics.layers import Cached, Heads, Layers, Place, Weights
from rlsp.numerics.products import FEW_ROWS


class Decoder:
    """Take new tokens through an engine whose weights do not change meanwhile."""

    def __init__(self, model: PolicyModel) -> None:
        """Take the layers as one where the engine is one rank's, strict, and of sizes that kernels take."""
        self._model = model
        self._layers = _together(model)

    @property
    def as_one(self) -> bool:
        """Tell whether layers are taken as one, where there are few sequences and nobody listens."""
        return self._layers is not None

    def hidden(self, tokens: Tensor, channel: Channel) -> Tensor:
        """Return what `model.hidden` does, [n, b, H], for tokens int64 [b, n] and a channel with a cache.

        The modules run where the layers cannot be taken as one, for prompts, for more sequences than the
        kernels are for, and where somebody listens at the modules' boundaries.
        """
        layers, model, cache = self._layers, self._model, channel.cache
        few = tokens.shape[1] == 1 and tokens.shape[0] <= FEW_ROWS
        if layers is None or cache is None or not few or model.wiring.tap.recorder is not None:
            return model.hidden(tokens, channel)
        decoder = model.gpt.decoder
        for _ in decoder.layers:
            model.wiring.count(Operator.ATTENTION)
            model.wiring.count(Operator.FFN)
        frequencies = decoder.layers[0].self_attention.core_attention.inverse_frequencies
        positions = channel.positions.squeeze(0)
        place = Place(positions, *rotary_table(positions, frequencies), channel.blocks)
        embedded = model.gpt.embedding(input_ids=tokens, position_ids=None)
        stream = layers(embedded.squeeze(0), list(map(Cached, cache.keys, cache.values)), place)
        hidden: Tensor = decoder.final_layernorm(stream.unsqueeze(0))
        return hidden


def _together(model: PolicyModel) -> Layers | None:
    wiring = model.wiring
    native = any(wiring.native(operator) for operator in Operator)
    if wiring.tp.size > 1 or native or Kernel.LAYERS not in running().allowed:
        return None
    layers = model.gpt.decoder.layers
    attention = layers[0].self_attention
    heads = Heads(
        groups=attention.num_query_groups_per_partition,
        queries=attention.num_attention_heads_per_partition // attention.num_query_groups_per_partition,
        epsilon=layers[0].input_layernorm.epsilon,
        scale=attention.core_attention.scale,
    )
    found = Layers(wiring.products, heads, [_weights(layer) for layer in layers])
    return found if found.fit(wiring.contract.k_block) else None


def _weights(layer: Any) -> Weights:
    """Collect what Megatron-Core's layer holds."""
    attention, mlp = layer.self_attention, layer.mlp
    query_norm, key_norm = (
        None if norm is None else norm.weight for norm in (attention.q_layernorm, attention.k_layernorm)
    )
    return Weights(
        attention_norm=layer.input_layernorm.weight,
        qkv=attention.linear_qkv.weight,
        query_norm=query_norm,
        key_norm=key_norm,
        projection=attention.linear_proj.weight,
        mlp_norm=layer.pre_mlp_layernorm.weight,
        fc1=mlp.linear_fc1.weight,
        fc2=mlp.linear_fc2.weight,
    )
