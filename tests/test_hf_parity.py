"""Logits and log-probabilities against transformers: Qwen3 and Llama, the same weights, every layout.

`-s` prints the table of docs/models.md: model, layout, largest |Δ| of logits and of log-probabilities.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from model_helpers import (
    BF16,
    CPU,
    TIED,
    TINY,
    mesh_of,
    oracle_logits,
    policy,
    products,
    random_state,
    whole_logits,
)
from ranks import run_ranks
from torch import Tensor

from rlsp import bits
from rlsp.config import Given, ModelConfig
from rlsp.layout import Layout, layout_word
from rlsp.model.attention import Channel
from rlsp.model.head import score_tokens
from rlsp.model.hf import load_hugging_face
from rlsp.model.rope import inverse_frequencies
from rlsp.pretrained.architecture import describe
from rlsp.sequence import gather_positions, local_positions

transformers = pytest.importorskip("transformers")

LENGTH = 256  # cp=4 cuts it into 8 chunks of one block
FLOAT32_TOLERANCE = 1e-4
BFLOAT16_TOLERANCE = 0.1

# Layouts by world size.
LAYOUTS = {
    1: [Layout(dp=1, cp=1, tp=1, sp=1)],
    2: [Layout(dp=1, cp=1, tp=2, sp=1), Layout(dp=1, cp=1, tp=2, sp=2), Layout(dp=1, cp=2, tp=1, sp=1)],
    4: [Layout(dp=1, cp=1, tp=4, sp=4), Layout(dp=1, cp=2, tp=2, sp=1), Layout(dp=1, cp=4, tp=1, sp=1)],
    8: [Layout(dp=1, cp=1, tp=8, sp=1), Layout(dp=1, cp=2, tp=4, sp=4), Layout(dp=1, cp=4, tp=2, sp=2)],
}
LLAMA = replace(TINY, qk_norm=False, rope_scaling=Given(rope_type="default"))
LINEAR = replace(LLAMA, rope_scaling=Given(rope_type="linear", factor=4.0))
LLAMA3 = replace(
    LLAMA,
    rope_scaling=Given(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    ),
)
PADDED = replace(LLAMA, num_attention_heads=8, num_query_groups=4, pad_heads=True)  # 16 and 8 for V = 8
SHAPES = {
    "qwen3": TINY,
    "qwen3 tied": TIED,
    "qwen3 bfloat16": BF16,
    "llama": LLAMA,
    "llama linear": LINEAR,
    "llama llama3": LLAMA3,
    "llama padded": PADDED,
}


@cache
def tokens() -> Tensor:
    source = torch.Generator().manual_seed(3)
    return torch.randint(0, TINY.vocab_size, (2, LENGTH), generator=source)


@cache
def reference(kind: str) -> Tensor:
    """Logits [b, s, vocabulary] of transformers' model, float32."""
    shape = SHAPES[kind]
    described = {**describe(shape), "max_position_embeddings": 2 * LENGTH}
    config = transformers.AutoConfig.for_model(**described)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.to(getattr(torch, shape.dtype.value)).eval()
    model.load_state_dict(random_state(shape))
    with torch.no_grad():
        return model(tokens()).logits.float()


Difference = dict[tuple[str, str], tuple[float, float]]


def differences(rank: int, world: int, references: dict[str, Tensor]) -> Difference:
    """Load the same weights in each layout; return max |Δ| of logits and of log-probs."""
    out = {}
    for layout in LAYOUTS[world]:
        mesh = mesh_of(layout, rank)
        for kind, expected in references.items():
            shape = SHAPES[kind]
            model = policy(mesh, sp=layout.sequence_parallel, shape=shape)
            load_hugging_face(model, shape, random_state(shape))
            logits = whole_logits(model, tokens(), mesh)
            assert logits.dtype is getattr(torch, shape.dtype.value)
            logp = torch.log_softmax(expected[:, :-1], -1).gather(2, tokens()[:, 1:, None])[..., 0]
            word = layout_word(cp=layout.cp, tp=layout.tp, sp=layout.sp, dp=layout.dp)
            out[kind, word] = (
                float((logits.float() - expected).abs().max()),
                float((log_probs(model, mesh)[:, :-1] - logp).abs().max()),
            )
    return out


@torch.no_grad()
def log_probs(model, mesh) -> Tensor:
    """[b, s] of the token that follows each position, by the code that training and rollout use."""
    positions = local_positions(LENGTH, mesh.cp, CPU)
    hidden = model.hidden(
        tokens()[:, positions], Channel(qkv_format="sbhd", positions=positions.unsqueeze(1))
    )
    targets = tokens().roll(-1, dims=1)[:, positions].t().reshape(-1)
    scores = score_tokens(model.logits(hidden), targets, 1.0, model.vocabulary, model.wiring)
    return gather_positions(scores.logp.view(len(positions), -1), mesh.cp).t()


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_logits_and_log_probs_are_those_of_transformers_in_every_layout(world: int) -> None:
    products()
    references = {kind: reference(kind) for kind in SHAPES}
    assert all(expected.std() > 0.5 for expected in references.values())  # logits that say something
    by_rank = [differences(0, 1, references)] if world == 1 else run_ranks(world, differences, references)
    for found in by_rank:
        for (kind, layout), difference in found.items():
            limit = BFLOAT16_TOLERANCE if "bfloat16" in kind else FLOAT32_TOLERANCE
            assert max(difference) < limit, (kind, layout, difference)
    for (kind, layout), (logits, logp) in by_rank[0].items():
        print(f"| {kind} | {layout} | {logits:.1e} | {logp:.1e} |")


@pytest.mark.parametrize("kind", ["qwen3", "qwen3 tied", "llama"])
def test_the_float64_oracle_is_transformers_model(kind: str) -> None:
    shape: ModelConfig = SHAPES[kind]
    exact = oracle_logits({k: v.double() for k, v in random_state(shape).items()}, tokens(), shape)
    assert float((exact - reference(kind)).abs().max()) < FLOAT32_TOLERANCE


def test_a_wrong_mapping_shows() -> None:
    """Witness: swap two heads' keys, which changes no shape."""
    state = random_state(TINY)
    name = "model.layers.0.self_attn.k_proj.weight"
    state[name] = state[name].view(8, 8, -1)[[1, 0, *range(2, 8)]].reshape(64, 64)
    mesh = mesh_of(LAYOUTS[1][0])
    model = policy(mesh)
    load_hugging_face(model, TINY, state)
    assert float((whole_logits(model, tokens(), mesh) - reference("qwen3")).abs().max()) > 0.01


def test_a_scaling_that_is_left_out_shows() -> None:
    """Witness: the frequencies of an unscaled Llama, and the same weights."""
    mesh = mesh_of(LAYOUTS[1][0])
    model = policy(mesh, shape=LLAMA)
    load_hugging_face(model, LLAMA, random_state(LLAMA))
    logits = whole_logits(model, tokens(), mesh)
    for kind in ("llama linear", "llama llama3"):
        assert float((logits - reference(kind)).abs().max()) > 0.01


@pytest.mark.parametrize("head_dim", [8, 16, 64, 80, 96, 128])
@pytest.mark.parametrize("base", [1e4, 5e5, 1e6])
def test_scaled_frequencies_have_the_bits_of_transformers(head_dim: int, base: float) -> None:
    for shape in (LLAMA, LINEAR, LLAMA3):
        one = replace(shape, head_dim=head_dim, rope_base=base)
        config = transformers.AutoConfig.for_model(**describe(one), max_position_embeddings=2 * LENGTH)
        theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq
        ours = inverse_frequencies(head_dim, base, one.rope_scaling)
        assert bits.same_bits(ours, theirs)


def test_frequencies_rounded_once_are_others() -> None:
    """Witness: float64 and one rounding moves entries by an ulp."""
    once, theirs = (inverse_frequencies(64, 1e4, scaling) for scaling in ({}, {"rope_type": "default"}))
    assert not bits.same_bits(once, theirs)
    assert float((once - theirs).abs().max()) < 1e-7
