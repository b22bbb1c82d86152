"""Weights of transformers' Qwen3ForCausalLM into a model's virtual shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlsp import bits
from rlsp.config import ModelConfig
from rlsp.model.build import PolicyModel
from rlsp.numerics.contract import Contract

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_NORMS = {
    "input_layernorm": "input_layernorm",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "pre_mlp_layernorm": "post_attention_layernorm",
}


class WeightMismatchError(ValueError):
    """Weights do not fit the model; the message lists every tensor that is missing, unknown or misshapen."""


def load_hugging_face(model: PolicyModel, shape: ModelConfig, state: Mapping[str, Tensor]) -> None:
    """Copy this rank's virtual shards out of a Qwen3 state dict, in the model's dtype.

    Args:
        model: The model to fill.
        shape: What it was built from.
        state: Every tensor by transformers' name, whole. With tied embeddings the head may be absent.

    Raises:
        WeightMismatchError: A tensor is missing, unknown or misshapen, or a tied head is not the embedding.
            Nothing has been copied then.
    """
    _check(state, shape)
    targets = {name: (parameter, sharded) for name, parameter, sharded in model.named_shards()}
    index = model.wiring.tp.index
    with torch.no_grad():
        for name, whole in logical_weights(state, shape, model.wiring.contract):
            parameter, sharded = targets[name]
            own = parameter.shape[0]
            parameter.copy_(whole[index * own : (index + 1) * own] if sharded else whole)


def logical_weights(
    state: Mapping[str, Tensor], shape: ModelConfig, contract: Contract
) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight by Megatron-Core's name: a matrix as all its virtual shards [V, N, K], a norm as [n].

    QKV is interleaved by key-value group, [its query heads, key, value]; FC1 is [gate, up] a virtual shard; a
    row-parallel weight is cut along its input; the vocabulary is padded with rows of zeros.
    """
    v, groups = contract.virtual_tp, shape.num_query_groups
    for layer in range(shape.num_layers):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        for name, source in _NORMS.items():
            yield f"{ours}{name}.weight", state[f"{theirs}{source}.weight"]
        heads = [state[f"{theirs}self_attn.{part}_proj.weight"] for part in "qkv"]
        yield f"{ours}self_attention.linear_qkv.weight", _side_by_side(heads, groups, v)
        halves = [state[f"{theirs}mlp.{part}_proj.weight"] for part in ("gate", "up")]
        yield f"{ours}mlp.linear_fc1.weight", _side_by_side(halves, v, v)
        for name, source in (
            ("self_attention.linear_proj", "self_attn.o_proj"),
            ("mlp.linear_fc2", "mlp.down_proj"),
        ):
            whole = state[f"{theirs}{source}.weight"]
            yield f"{ours}{name}.weight", whole.reshape(whole.shape[0], v, -1).transpose(0, 1)
    yield "decoder.final_layernorm.weight", state["model.norm.weight"]
    yield "embedding.word_embeddings.weight", _padded(state[_EMBEDDING], contract)
    if not shape.tie_embeddings:
        yield "output_layer.weight", _padded(state[_HEAD], contract)


def hugging_face_shapes(shape: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a Qwen3ForCausalLM by transformers' name, the head's included."""
    hidden, ffn, head = shape.hidden_size, shape.ffn_hidden_size, shape.head_dim
    queries, keys = shape.num_attention_heads * head, shape.num_query_groups * head
    one: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    vocabulary = (shape.vocab_size, hidden)
    return {
        **{f"model.layers.{i}.{k}.weight": s for i in range(shape.num_layers) for k, s in one.items()},
        "model.norm.weight": (hidden,),
        _EMBEDDING: vocabulary,
        _HEAD: vocabulary,
    }


def _check(state: Mapping[str, Tensor], shape: ModelConfig) -> None:
    expected = hugging_face_shapes(shape)
    needed = set(expected) - ({_HEAD} if shape.tie_embeddings else set())
    faults = [f"{name} is missing" for name in sorted(needed - set(state))]
    faults += [f"{name} is unknown" for name in sorted(set(state) - set(expected))]
    faults += [
        f"{name} is {tuple(x.shape)}, not {expected[name]}"
        for name, x in sorted(state.items())
        if name in expected and tuple(x.shape) != expected[name]
    ]
    if not faults and shape.tie_embeddings and _HEAD in state:
        same = bits.same_bits(state[_HEAD], state[_EMBEDDING])
        faults += [] if same else [f"{_HEAD} differs from {_EMBEDDING}, to which it is tied"]
    if faults:
        raise WeightMismatchError("; ".join(faults))


def _side_by_side(parts: list[Tensor], cuts: int, shards: int) -> Tensor:
    """Lay the first of `cuts` slices of each part's rows together, then the second ones; [shards, N, K]."""
    cut = torch.cat([x.reshape(cuts, -1, x.shape[1]) for x in parts], dim=1)
    return cut.reshape(shards, -1, cut.shape[2])


def _padded(table: Tensor, contract: Contract) -> Tensor:
    """Pad the vocabulary's rows with zeros and cut them into virtual shards [V, rows, H]."""
    rows = pad(table, (0, 0, 0, contract.padded_vocab - table.shape[0]))
    return rows.view(contract.virtual_tp, -1, table.shape[1])
