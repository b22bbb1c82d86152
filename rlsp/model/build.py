"""Build Megatron-Core's GPTModel from rlsp's modules: the one place that knows its constructors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from rlsp.config import ModelConfig
from rlsp.layout import padded_groups
from rlsp.model.activation import SwiGLU, residual_add
from rlsp.model.attention import Channel, CoreAttention
from rlsp.model.compat import lone_group
from rlsp.model.embedding import LanguageModelEmbedding
from rlsp.model.gradients import ExactParameter, NativeParameter, Weight
from rlsp.model.head import OutputLayer, TokenScores, Vocabulary, score_tokens
from rlsp.model.large_vocabulary import WHOLE_LOGITS, score_hidden
from rlsp.model.linear import ColumnParallelLinear, RowParallelLinear
from rlsp.model.native import (
    NativeColumnParallelLinear,
    NativeHeadRMSNorm,
    NativeLanguageModelEmbedding,
    NativeOutputLayer,
    NativeRMSNorm,
    NativeRowParallelLinear,
    NativeSwiGLU,
)
from rlsp.model.native_attention import NativeCoreAttention
from rlsp.model.native_head import native_scores
from rlsp.model.norm import HeadRMSNorm, RMSNorm
from rlsp.model.rope import inverse_frequencies
from rlsp.model.routes import require_routes
from rlsp.model.wiring import Boundary, Operator, Site, Wiring
from rlsp.summation import Guard, TokenSum

_SHARD_DIMS = 3  # [V_local, N, K]: virtual shards of a matrix


@dataclass
class RlspTransformerConfig(TransformerConfig):
    """Megatron-Core's configuration with what rlsp's modules share."""

    wiring: Wiring | None = None
    inverse_frequencies: Tensor | None = None


class PolicyModel(nn.Module):
    """A Megatron-Core GPT model under the numeric contract.

    Attributes:
        gpt: The Megatron-Core model.
        wiring: What its modules share.
        vocabulary: Which of this rank's logits are true vocabulary.
    """

    def __init__(self, gpt: GPTModel, wiring: Wiring, vocab_size: int) -> None:
        """Wrap a model that `build_model` made."""
        super().__init__()
        self.gpt = gpt
        self.wiring = wiring
        self.vocabulary = Vocabulary.of(wiring, vocab_size, next(gpt.parameters()).device)

    def hidden(self, tokens: Tensor, channel: Channel) -> Tensor:
        """Return the last hidden states [s(/tp), b, H] for tokens int64 [b, s] at the channel's positions."""
        embedded = self.gpt.embedding(input_ids=tokens, position_ids=None)
        hidden: Tensor = self.gpt.decoder(
            hidden_states=embedded, attention_mask=None, packed_seq_params=channel
        )
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [s, b, V_local·n] for hidden states [s(/tp), b, H]."""
        tied = self.gpt.share_embeddings_and_output_weights
        weight = self.gpt.embedding.word_embeddings.weight if tied else None
        logits: Tensor = self.gpt.output_layer(hidden, weight=weight)[0]
        return logits

    def scores(self, logits: Tensor, targets: Tensor, temperature: float) -> TokenScores:
        """Return the targets' scores by the declared route; `head.score_tokens` says what they are."""
        score = native_scores if self.wiring.native(Operator.LOGP) else score_tokens
        return score(logits, targets, temperature, self.vocabulary, self.wiring)

    def hidden_scores(self, hidden: Tensor, targets: Tensor, temperature: float) -> TokenScores:
        """Return the targets' scores for hidden states [s(/tp), b, H], without keeping logits that are large.

        A recorder that listens gets the logits whole.
        """
        small = targets.numel() * self.vocabulary.valid.numel() <= WHOLE_LOGITS
        if small or self.wiring.native(Operator.LOGP) or self.wiring.tap.recorder is not None:
            return self.scores(self.logits(hidden), targets, temperature)
        tied = self.gpt.share_embeddings_and_output_weights
        holder = self.gpt.embedding.word_embeddings if tied else self.gpt.output_layer
        return score_hidden(hidden, holder.weight, targets, temperature, self.vocabulary, self.wiring)

    def named_shards(self) -> Iterator[tuple[str, Weight, bool]]:
        """Yield (name, parameter, sharded) in name order; sharded is [V_local, ...], else all have a copy.

        Raises:
            TypeError: A module outside rlsp brought a parameter, whose gradient nobody would sum.
        """
        for name, parameter in sorted(self.gpt.named_parameters()):
            if not isinstance(parameter, ExactParameter | NativeParameter):
                raise TypeError(
                    f"{name} has no gradient of ours: only rlsp's own modules may bring parameters"
                )
            yield name, parameter, parameter.dim() == _SHARD_DIMS

    def attach_sums(self, guard: Guard) -> list[TokenSum]:
        """Give every parameter its accumulator and return the exact ones in name order.

        `guard` learns the name of everything that a backward pass will note, here or on another rank.
        """
        lsb = self.wiring.contract.grad_lsb
        sums = []
        for name, parameter, _ in self.named_shards():
            if isinstance(parameter, NativeParameter):
                parameter.attach()
                continue
            parameter.token_sum = TokenSum(name, parameter, parameter.rule, lsb, guard)
            sums.append(parameter.token_sum)
        if not self.wiring.native(Operator.ATTENTION):
            for layer in self.gpt.decoder.layers:
                guard.expect(layer.self_attention.core_attention.leaves_name, self.vocabulary.valid.device)
        return sums


def build_model(shape: ModelConfig, wiring: Wiring, device: torch.device) -> PolicyModel:
    """Build an uninitialised model on `device`, wired to the groups and the contract of `wiring`.

    Raises:
        ValueError: QKV and output projection do not agree on sequence parallelism, or a size does not divide.
    """
    initialize_rng_tracker(
        inference_rng_tracker=True
    )  # the stock tracker lives on CUDA; nothing here draws from it
    config = _megatron_config(shape, wiring)
    groups = ProcessGroupCollection(
        tp=lone_group(wiring.tp), cp=lone_group(wiring.cp), pp=lone_group(None), embd=None
    )
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=_block(shape, wiring),
        vocab_size=wiring.contract.padded_vocab,
        max_sequence_length=1 << 20,
        position_embedding_type="none",
        share_embeddings_and_output_weights=shape.tie_embeddings,
        pg_collection=groups,
    )
    native = wiring.native(Operator.LOGP)
    embedding = NativeLanguageModelEmbedding if native else LanguageModelEmbedding
    head = NativeOutputLayer if native else OutputLayer
    gpt.embedding = embedding(config, wiring.contract.padded_vocab, shape.hidden_size)
    gpt.output_layer = head(config, wiring.contract.padded_vocab, shape.hidden_size, shape.tie_embeddings)
    gpt.setup_embeddings_and_output_layer()
    for layer in gpt.decoder.layers:
        agree_on_sequence_parallelism(layer.self_attention.linear_qkv, layer.self_attention.linear_proj)
    name_sites(gpt)
    require_routes(gpt, wiring)
    return PolicyModel(gpt.to(device), wiring, shape.vocab_size)


def name_sites(gpt: GPTModel) -> None:
    """Tell every module whose class serves several boundaries which of them its output is."""
    for number, layer in enumerate(gpt.decoder.layers):
        for boundary, module in (
            (Boundary.ATTENTION_NORM, layer.input_layernorm),
            (Boundary.QKV, layer.self_attention.linear_qkv),
            (Boundary.PROJECTION, layer.self_attention.linear_proj),
            (Boundary.MLP_NORM, layer.pre_mlp_layernorm),
            (Boundary.FC1, layer.mlp.linear_fc1),
            (Boundary.ACTIVATION, layer.mlp.activation_func),
            (Boundary.FC2, layer.mlp.linear_fc2),
        ):
            module.site = Site(boundary, number)
    gpt.decoder.final_layernorm.site = Site(Boundary.FINAL_NORM)
    gpt.output_layer.site = Site(Boundary.LOGITS)


def agree_on_sequence_parallelism(qkv: nn.Module, projection: nn.Module) -> None:
    """Refuse a layer whose QKV and output projection do not agree on sequence parallelism.

    Raises:
        ValueError: The two do not say the same.
    """
    if qkv.sequence_parallel != projection.sequence_parallel:
        raise ValueError(
            f"sequence parallelism: linear_qkv says {qkv.sequence_parallel}, linear_proj says "
            f"{projection.sequence_parallel}; both must be the same"
        )


def initialize(model: PolicyModel, seed: int, init_std: float, num_layers: int) -> None:
    """Draw initial weights keyed by (seed, name, virtual shard): the same bits in every layout.

    Norm weights are 1; matrices are normal with `init_std`, divided by sqrt(2·num_layers) where they feed the
    residual stream (Megatron-Core's scaled initialisation).
    """
    first = model.wiring.tp.index * (model.wiring.contract.virtual_tp // model.wiring.tp.size)
    with torch.no_grad():
        for name, parameter, sharded in model.named_shards():
            if not sharded:
                parameter.fill_(1.0)
                continue
            scaled = "linear_proj" in name or "linear_fc2" in name
            std = init_std / (2.0 * num_layers) ** 0.5 if scaled else init_std
            for local in range(parameter.shape[0]):
                parameter[local] = _draw(seed, name, first + local, parameter[local].shape, std)


def copy_bits(source: PolicyModel, target: PolicyModel) -> None:
    """Copy every parameter's bits between two models of one layout."""
    with torch.no_grad():
        for (_, a, _), (_, b, _) in zip(source.named_shards(), target.named_shards(), strict=True):
            b.copy_(a)


def _draw(seed: int, name: str, shard: int, shape: torch.Size, std: float) -> Tensor:
    """Draw one whole virtual shard in float32 from a generator of its own."""
    key = hashlib.sha256(f"{seed}/{name}/{shard}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
    return torch.empty(shape, dtype=torch.float32).normal_(0.0, std, generator=generator)


def _megatron_config(shape: ModelConfig, wiring: Wiring) -> RlspTransformerConfig:
    """Translate the model's shape into Megatron-Core's terms, with the heads that pad it."""
    groups = padded_groups(shape.num_query_groups, wiring.contract.virtual_tp)
    dtype = getattr(torch, wiring.contract.dtype)
    return RlspTransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=groups * (shape.num_attention_heads // shape.num_query_groups),
        num_query_groups=groups,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn_hidden_size,
        layernorm_epsilon=shape.norm_epsilon,
        normalization="RMSNorm",
        qk_layernorm=shape.qk_norm,
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=wiring.tp.size,
        context_parallel_size=wiring.cp.size,
        sequence_parallel=wiring.sequence_parallel,
        use_cpu_initialization=True,
        perform_initialization=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        use_te_activation_func=True,
        wiring=wiring,
        inverse_frequencies=inverse_frequencies(shape.head_dim, shape.rope_base, shape.rope_scaling),
    )


def _block(shape: ModelConfig, wiring: Wiring) -> TransformerBlockSubmodules:
    """Return a spec for each layer: Megatron-Core 0.19 rewrites the MLP's in place.

    An operator's norm goes with it, and the vocabulary's operators (embedding, final norm, head) go together:
    a tied weight has one gradient.
    """
    final_norm = NativeRMSNorm if wiring.native(Operator.LOGP) else RMSNorm
    return TransformerBlockSubmodules(
        layer_specs=[_layer(wiring, shape.qk_norm) for _ in range(shape.num_layers)], layer_norm=final_norm
    )


def _layer(wiring: Wiring, qk_norm: bool) -> ModuleSpec:
    """Return one layer: pre-norm attention (Qwen3's with QK-norm), pre-norm SwiGLU, each by its route."""
    native_attention, native_ffn = wiring.native(Operator.ATTENTION), wiring.native(Operator.FFN)
    head_norm = (NativeHeadRMSNorm if native_attention else HeadRMSNorm) if qk_norm else None
    attention = SelfAttentionSubmodules(
        linear_qkv=NativeColumnParallelLinear if native_attention else ColumnParallelLinear,
        core_attention=NativeCoreAttention if native_attention else CoreAttention,
        linear_proj=NativeRowParallelLinear if native_attention else RowParallelLinear,
        q_layernorm=head_norm,
        k_layernorm=head_norm,
    )
    mlp = MLPSubmodules(
        linear_fc1=NativeColumnParallelLinear if native_ffn else ColumnParallelLinear,
        linear_fc2=NativeRowParallelLinear if native_ffn else RowParallelLinear,
        activation_func=NativeSwiGLU if native_ffn else SwiGLU,
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=NativeRMSNorm if native_attention else RMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
            ),
            self_attn_bda=residual_add,
            pre_mlp_layernorm=NativeRMSNorm if native_ffn else RMSNorm,
            mlp=ModuleSpec(module=MLP, submodules=mlp),
            mlp_bda=residual_add,
        ),
    )
