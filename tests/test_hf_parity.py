"""Logits and log-probabilities against transformers' Qwen3ForCausalLM: the same weights, every layout."""

from __future__ import annotations

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

from rlsp.config import ModelConfig
from rlsp.layout import Layout
from rlsp.model.attention import Channel
from rlsp.model.head import score_tokens
from rlsp.model.hf import load_hugging_face
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
SHAPES = {"untied": TINY, "tied": TIED, "bfloat16": BF16}


@cache
def tokens() -> Tensor:
    source = torch.Generator().manual_seed(3)
    return torch.randint(0, TINY.vocab_size, (2, LENGTH), generator=source)


@cache
def reference(kind: str) -> Tensor:
    """Logits [b, s, vocabulary] of transformers' model, float32."""
    shape = SHAPES[kind]
    config = transformers.Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_query_groups,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_base},
        tie_word_embeddings=shape.tie_embeddings,
        max_position_embeddings=2 * LENGTH,
        attn_implementation="eager",
    )
    model = transformers.Qwen3ForCausalLM(config).to(getattr(torch, shape.dtype.value)).eval()
    model.load_state_dict(random_state(shape))
    with torch.no_grad():
        return model(tokens()).logits.float()


def differences(rank: int, world: int, references: dict[str, Tensor]) -> dict[tuple[str, Layout], float]:
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
            out[kind, layout] = max(
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
            limit = BFLOAT16_TOLERANCE if kind == "bfloat16" else FLOAT32_TOLERANCE
            assert difference < limit, (kind, layout, difference)
    print(
        f"world {world}: max |Δ|",
        {kind: max(d for (k, _), d in found.items() if k == kind) for kind in SHAPES},
    )


@pytest.mark.parametrize("kind", ["untied", "tied"])
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
    assert float((whole_logits(model, tokens(), mesh) - reference("untied")).abs().max()) > 0.01
