"""Names and shapes of the tensors of transformers' Qwen3ForCausalLM and LlamaForCausalLM."""

from __future__ import annotations

from collections.abc import Mapping

from rlsp.config import ModelConfig

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_RECOMPUTED = ".rotary_emb.inv_freq"  # old Llama files hold it; it follows from the shape

Shapes = Mapping[str, tuple[int, ...]]


def tensor_shapes(shape: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor by transformers' name, the head's included."""
    hidden, ffn, head = shape.hidden_size, shape.ffn_hidden_size, shape.head_dim
    queries, keys = shape.num_attention_heads * head, shape.num_query_groups * head
    norms = ("self_attn.q_norm", "self_attn.k_norm") if shape.qk_norm else ()
    one: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        **dict.fromkeys(norms, (head,)),
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
        EMBEDDING: vocabulary,
        HEAD: vocabulary,
    }


def misfits(found: Shapes, shape: ModelConfig) -> list[str]:
    """List every tensor that is missing, unknown or misshapen; a tied head may be absent."""
    expected = tensor_shapes(shape)
    needed = set(expected) - ({HEAD} if shape.tie_embeddings else set())
    known = {name for name in found if not name.endswith(_RECOMPUTED)}
    return [
        *(f"{name} is missing" for name in sorted(needed - known)),
        *(f"{name} is unknown" for name in sorted(known - set(expected))),
        *(
            f"{name} is {tuple(found[name])}, not {expected[name]}"
            for name in sorted(known & set(expected))
            if tuple(found[name]) != expected[name]
        ),
    ]
