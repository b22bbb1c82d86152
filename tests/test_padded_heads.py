"""Heads that only pad a model change nothing, learn nothing and stay zero, in every layout."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import model_helpers
import pytest
import torch
from model_helpers import (
    OBJECTIVE,
    TINY,
    Left,
    alone,
    gradients_of,
    mesh_of,
    products,
    ragged,
    random_state,
    train,
    trainer,
    whole_logits,
)
from ranks import run_checks
from torch import Tensor

from rlsp import bits
from rlsp.config import ModelConfig
from rlsp.layout import Layout
from rlsp.model.build import PolicyModel, initialize
from rlsp.model.hf import hugging_face_weights
from rlsp.model.hf.mapping import Fused, weight_plan
from rlsp.rl.batch import RolloutBatch
from rlsp.rl.update import Trainer

# 4 groups of 2 query heads; V = 8 pads them to 8 groups.
LLAMA = replace(TINY, qk_norm=False, num_attention_heads=8, num_query_groups=4, pad_heads=True)
QWEN3 = replace(LLAMA, qk_norm=True)
SHAPES = {"llama": LLAMA, "qwen3": QWEN3}
ONE = Layout(dp=1, cp=1, tp=1, sp=1)
LAYOUTS = [
    Layout(dp=1, cp=1, tp=4, sp=4),  # the last two ranks hold nothing but padding
    Layout(dp=1, cp=2, tp=2, sp=1),
    Layout(dp=2, cp=1, tp=2, sp=2),
]
ADVANTAGES = torch.tensor([1.0, -0.5, 0.7])
TWO_BY_TWO = replace(OBJECTIVE, micro_batch_size=2)


@cache
def batch() -> RolloutBatch:
    return ragged((34, 70, 12), (30, 20, 8))


def make(layout: Layout, rank: int, shape: ModelConfig) -> Trainer:
    mesh = mesh_of(layout, rank)
    return trainer(mesh, layout, objective=TWO_BY_TWO, shape=shape, state=random_state(shape))


def moved(of: Trainer, shape: ModelConfig) -> list[str]:
    """Name what is not zero in the padding: weights, gradients, masters, moments."""
    model, tp = of.model, of.model.wiring.tp
    held = {
        "weight": {name: p.detach() for name, p, _ in model.named_shards()},
        "gradient": gradients_of(of),
        "master": of.optimizer.masters,
        "first": of.optimizer.first,
        "second": of.optimizer.second,
    }
    plan = [
        w for w in weight_plan(shape, model.wiring.contract) if isinstance(w, Fused) and "attention" in w.name
    ]
    return [
        f"{kind} {weight.name}"
        for kind, tensors in held.items()
        for weight in plan
        for rows in weight.padding(tensors[weight.name], tp.index, tp.size)
        if bool((rows != 0).any())
    ]


def trained(rank: int, world: int) -> dict[tuple[str, Layout], Left]:
    left = {}
    for name, shape in SHAPES.items():
        for layout in LAYOUTS if world > 1 else [ONE]:
            of = make(layout, rank, shape)
            left[name, layout] = train(of, batch(), ADVANTAGES)
            assert moved(of, shape) == []
    return left


def test_padding_stays_zero_over_updates_and_every_layout_leaves_the_same_bits() -> None:
    products()
    expected = {name: left for (name, _), left in trained(0, 1).items()}
    for found in run_checks(4, [trained])["trained"]:
        for (name, layout), left in found.items():
            assert left == expected[name], (name, layout)


def test_padding_that_is_not_zero_learns() -> None:
    """Witness: random numbers in the padding of the same model."""
    mesh = mesh_of(ONE)
    of = trainer(mesh, ONE, objective=TWO_BY_TWO, shape=LLAMA, seed=3)
    initialize(of.model, 3, 0.1, 2)
    train(of, batch(), ADVANTAGES, updates=1)
    assert any(found.startswith("gradient") for found in moved(of, LLAMA))


@pytest.mark.parametrize("name", list(SHAPES))
def test_a_padded_model_is_the_unpadded_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """V = 8 with padding against V = 4, which divides: the trees differ, so the last bits may."""
    padded, logits = outcome(SHAPES[name])
    monkeypatch.setattr(model_helpers, "VIRTUAL", 4)
    plain, plain_logits = outcome(replace(SHAPES[name], pad_heads=False))
    assert float((logits - plain_logits).abs().max()) < 1e-5
    before = random_state(SHAPES[name])
    theirs = weights(plain.model, SHAPES[name])
    for key, x in weights(padded.model, SHAPES[name]).items():
        step = float((x - before[key]).abs().max())
        assert float((x - theirs[key]).norm() / (x - before[key]).norm()) < 1e-3, key
        assert step > 0


def outcome(shape: ModelConfig) -> tuple[Trainer, Tensor]:
    of = make(ONE, 0, shape)
    tokens = torch.arange(64).view(1, 64)
    logits = whole_logits(of.model, tokens, alone())
    train(of, batch(), ADVANTAGES, updates=1)
    return of, logits


def weights(model: PolicyModel, shape: ModelConfig) -> dict[str, Tensor]:
    return dict(hugging_face_weights(model, shape))


def test_the_attention_of_a_padded_model_has_the_bits_of_the_unpadded_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One layer's attention: the tree over 8 shards, half of them zero, is the tree over 4."""
    assert bits.same_bits(attention_of(LLAMA), padded_off(monkeypatch, LLAMA))


def padded_off(monkeypatch: pytest.MonkeyPatch, shape: ModelConfig) -> Tensor:
    monkeypatch.setattr(model_helpers, "VIRTUAL", 4)
    return attention_of(replace(shape, pad_heads=False))


def attention_of(shape: ModelConfig) -> Tensor:
    of = make(ONE, 0, shape)
    layer = of.model.gpt.decoder.layers[0]
    x = torch.sin(torch.arange(64 * 64, dtype=torch.float32)).view(64, 1, 64)
    positions = torch.arange(64).unsqueeze(1)
    channel = model_helpers.Channel(qkv_format="sbhd", positions=positions)
    with torch.no_grad():
        out, _ = layer.self_attention(x, attention_mask=None, packed_seq_params=channel)
    return out
