"""Outside oracles for gradients: the model's formulas in float64, and Megatron-Core's own layers at TP=1."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rlsp.config import ModelConfig

Weights = Mapping[str, Tensor]


def in_megatron_layout(name: str, shards: Tensor) -> Tensor:
    """Lay virtual shards [V, ...] out as Megatron-Core's TP=1 tensor, in float64; FC1 is [gate; up] there."""
    x = shards.detach().double()
    if x.dim() == 1:
        return x
    if "linear_proj" in name or "linear_fc2" in name:
        return x.permute(1, 0, 2).reshape(x.shape[1], -1)
    if "linear_fc1" in name:
        gate, up = x.chunk(2, dim=1)
        return torch.cat((gate.reshape(-1, x.shape[2]), up.reshape(-1, x.shape[2])))
    return x.reshape(-1, x.shape[2])


def float64_logits(shape: ModelConfig, weights: Weights, tokens: Tensor) -> Tensor:
    """Compute logits [b, s, padded vocabulary] of tokens [b, s] from the published formulas, in float64."""
    angles = _angles(shape, tokens.shape[1])
    x = weights["embedding.word_embeddings.weight"][tokens]
    for layer in range(shape.num_layers):
        own = {
            name.split(f"layers.{layer}.")[-1]: w for name, w in weights.items() if f"layers.{layer}." in name
        }
        x = x + _attention(shape, own, _norm(x, own["input_layernorm.weight"], shape), angles)
        inner = _norm(x, own["pre_mlp_layernorm.weight"], shape) @ own["mlp.linear_fc1.weight"].t()
        gate, up = inner.chunk(2, dim=-1)
        x = x + (gate / (1 + torch.exp(-gate)) * up) @ own["mlp.linear_fc2.weight"].t()
    head = weights.get("output_layer.weight", weights["embedding.word_embeddings.weight"])
    return _norm(x, weights["decoder.final_layernorm.weight"], shape) @ head.t()


def loss(logits: Tensor, targets: Tensor, advantage: Tensor, vocab_size: int) -> Tensor:
    """Sum a policy-gradient and an entropy term over the tokens whose advantage is not 0."""
    logp = torch.log_softmax(logits[..., :vocab_size], dim=-1)
    entropy = -(logp.exp() * logp).sum(dim=-1)
    picked = logp.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (advantage * picked - 0.01 * entropy * (advantage != 0)).sum()


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Let Megatron-Core's stock layers, which ask for the current CUDA device, find the CPU; one rank."""
    with mock.patch.object(torch.cuda, "current_device", return_value=torch.device("cpu")):
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(0, inference_rng_tracker=True)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


def megatron_model(shape: ModelConfig, padded_vocab: int, dtype: torch.dtype) -> GPTModel:
    """Build Megatron-Core's own model of this shape from its local spec, unfused."""
    config = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn_hidden_size,
        layernorm_epsilon=shape.norm_epsilon,
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        attention_softmax_in_fp32=True,
    )
    model = GPTModel(
        config,
        _local_spec(),
        vocab_size=padded_vocab,
        max_sequence_length=1024,
        position_embedding_type="rope",
        rotary_base=int(shape.rope_base),
        share_embeddings_and_output_weights=shape.tie_embeddings,
    )
    return model.to(dtype)


def _local_spec() -> ModuleSpec:
    """Return Megatron-Core's local layer spec; its module compiles functions and warns as it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

        return get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")


def megatron_logits(model: GPTModel, tokens: Tensor) -> Tensor:
    """Run Megatron-Core's own forward pass: logits [b, s, padded vocabulary] of tokens [b, s]."""
    length = tokens.shape[1]
    hidden = torch.triu(torch.ones(length, length, dtype=torch.bool), 1).view(1, 1, length, length)
    return model(tokens, torch.arange(length).expand_as(tokens), hidden)


def _angles(shape: ModelConfig, length: int) -> Tensor:
    inverse = [shape.rope_base ** (-2 * i / shape.head_dim) for i in range(shape.head_dim // 2)]
    return torch.arange(length, dtype=torch.float64).unsqueeze(1) * torch.tensor(inverse, dtype=torch.float64)


def _norm(x: Tensor, weight: Tensor, shape: ModelConfig) -> Tensor:
    return x * torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + shape.norm_epsilon) * weight


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cosine, sine = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def _attention(shape: ModelConfig, own: Weights, x: Tensor, angles: Tensor) -> Tensor:
    groups, per_group = shape.num_query_groups, shape.num_attention_heads // shape.num_query_groups
    qkv = (x @ own["self_attention.linear_qkv.weight"].t()).view(*x.shape[:2], groups, per_group + 2, -1)
    q = _norm(qkv[..., :-2, :].flatten(2, 3), own["self_attention.q_layernorm.weight"], shape)
    k = _norm(qkv[..., -2, :], own["self_attention.k_layernorm.weight"], shape)
    q, k = _rotate(q, angles), _rotate(k, angles).repeat_interleave(per_group, dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(shape.head_dim)
    hidden = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1)
    weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
    mixed = torch.einsum("bhij,bjhd->bihd", weights, qkv[..., -1, :].repeat_interleave(per_group, dim=2))
    return mixed.flatten(2) @ own["self_attention.linear_proj.weight"].t()
