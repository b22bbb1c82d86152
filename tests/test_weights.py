"""Weights on their way: digests, the hand-over to the engines, and transformers' state dicts."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from model_helpers import (
    BF16,
    TIED,
    TINY,
    alone,
    engine,
    mesh_of,
    policy,
    products,
    random_state,
)
from ranks import run_checks
from torch import Tensor

from rlsp import bits
from rlsp.layout import Layout, RolloutLayout
from rlsp.model import weights
from rlsp.model.build import PolicyModel
from rlsp.model.hf import WeightMismatchError, load_hugging_face
from rlsp.model.weights import ReplicaDriftError, hand_over, weight_entries, weights_digest


def parameters(model: PolicyModel) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter, _ in model.named_shards()}


def nudge(x: Tensor, index: int = 0) -> None:
    """Move one element by one ulp."""
    with torch.no_grad():
        flat = x.view(-1)
        flat[index] = torch.nextafter(flat[index], torch.tensor(torch.inf, dtype=x.dtype))


# Digests.


def test_a_digest_sees_one_ulp_a_sign_of_zero_and_exchanged_shards() -> None:
    expected = weights_digest(policy(alone()))
    for fault in range(3):
        model = policy(alone())
        table = parameters(model)["decoder.layers.1.mlp.linear_fc2.weight"]
        if fault == 0:
            nudge(table, -1)
        elif fault == 1:
            table.view(-1)[5] = 0.0
            positive = weights_digest(model)
            table.view(-1)[5] = -0.0
            assert weights_digest(model) != positive
        else:
            table[[0, 1]] = table[[1, 0]].clone()
        assert weights_digest(model) != expected


def test_every_tensor_has_an_entry_for_each_virtual_shard() -> None:
    entries = weight_entries(policy(alone()))
    assert len({(name, shard) for name, shard, _, _ in entries}) == len(entries) == 10 * 8 + 9
    assert {shard for name, shard, _, _ in entries if "layernorm" in name} == {0}


def drifted_copies(rank: int, world: int) -> str:
    """D1: one ulp in one copy of one norm weight."""
    model = policy(mesh_of(Layout(dp=1, cp=1, tp=world, sp=world), rank), sp=True)
    if rank == 2:
        nudge(parameters(model)["decoder.layers.1.pre_mlp_layernorm.weight"], 7)
    with pytest.raises(ReplicaDriftError) as caught:
        weights_digest(model)
    return str(caught.value)


# Hand-over.

TRAINERS = [Layout(dp=4, cp=1, tp=1, sp=1), Layout(dp=1, cp=2, tp=2, sp=2), Layout(dp=1, cp=1, tp=4, sp=1)]
ENGINES = [(1, 4), (2, 2), (4, 1), (2, 1), (1, 3)]


def handed_over(rank: int, world: int, bucket_bytes: int) -> int:
    """Hand over between all pairs of layouts; return how many engines this rank had."""
    count = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "BUCKET_BYTES", bucket_bytes)
        for layout, (tp, engines) in product(TRAINERS, ENGINES):
            mesh = mesh_of(layout, rank, RolloutLayout(tp, engines, world))
            source = policy(mesh, sp=layout.sequence_parallel, shape=BF16)
            target = engine(mesh, shape=BF16)
            hand_over(source, None if target is None else target.model, tp)
            handed = weights_digest(source)
            if target is None:
                continue
            count += 1
            drawn = engine(mesh, shape=BF16, seed=0)
            assert drawn is not None
            expected = parameters(drawn.model)
            for name, held in parameters(target.model).items():
                assert bits.same_bits(held, expected[name]), (layout, tp, name)
            assert weights_digest(target.model) == handed
            assert all(
                held.data_ptr() != x.data_ptr()
                for held, x in zip(target.model.parameters(), source.parameters(), strict=True)
            )
    return count


def in_one_bucket(rank: int, world: int) -> int:
    return handed_over(rank, world, weights.BUCKET_BYTES)


def in_small_buckets(rank: int, world: int) -> int:
    return handed_over(rank, world, 40_000)


def loaded_digests(rank: int, world: int) -> set[str]:
    """Load one state dict in several layouts."""
    found = set()
    for layout in TRAINERS:
        model = policy(mesh_of(layout, rank), sp=layout.sequence_parallel)
        load_hugging_face(model, TINY, random_state(TINY))
        found.add(weights_digest(model))
    return found


def test_weights_keep_their_bits_between_layouts() -> None:
    products()
    found = run_checks(4, [drifted_copies, in_one_bucket, in_small_buckets, loaded_digests])
    for said in found["drifted_copies"]:
        assert (
            said
            == "copies differ from those on rank 0: decoder.layers.1.pre_mlp_layernorm.weight (ranks [2])"
        )
    assert found["in_one_bucket"] == found["in_small_buckets"] == [15, 15, 12, 9]
    model = policy(alone())
    load_hugging_face(model, TINY, random_state(TINY))
    assert found["loaded_digests"] == [{weights_digest(model)}] * 4


# transformers' state dicts.


def test_every_element_of_a_state_dict_lands_where_megatron_expects_it() -> None:
    state, model = random_state(TINY), policy(alone())
    load_hugging_face(model, TINY, state)
    held, theirs = parameters(model), "model.layers.1."
    qkv = held["decoder.layers.1.self_attention.linear_qkv.weight"]  # [8, (2 + 2) · 8, 64]
    q, k, v = (state[f"{theirs}self_attn.{part}_proj.weight"] for part in "qkv")
    for group in range(8):
        assert bits.same_bits(qkv[group, :16], q[16 * group : 16 * group + 16])
        assert bits.same_bits(qkv[group, 16:24], k[8 * group : 8 * group + 8])
        assert bits.same_bits(qkv[group, 24:], v[8 * group : 8 * group + 8])
    fc1 = held["decoder.layers.1.mlp.linear_fc1.weight"]
    for shard in range(8):
        rows = slice(16 * shard, 16 * shard + 16)
        assert bits.same_bits(fc1[shard, :16], state[f"{theirs}mlp.gate_proj.weight"][rows])
        assert bits.same_bits(fc1[shard, 16:], state[f"{theirs}mlp.up_proj.weight"][rows])
        down = held["decoder.layers.1.mlp.linear_fc2.weight"][shard]
        assert bits.same_bits(down, state[f"{theirs}mlp.down_proj.weight"][:, rows])
        out = held["decoder.layers.1.self_attention.linear_proj.weight"][shard]
        assert bits.same_bits(out, state[f"{theirs}self_attn.o_proj.weight"][:, rows])
    for ours, source in (("embedding.word_embeddings", "model.embed_tokens"), ("output_layer", "lm_head")):
        table = held[f"{ours}.weight"].view(-1, 64)
        assert bits.same_bits(table[:97], state[f"{source}.weight"])
        assert bool((table[97:] == 0).all())
    norm = held["decoder.layers.1.self_attention.k_layernorm.weight"]
    assert bits.same_bits(norm, state[f"{theirs}self_attn.k_norm.weight"])
    assert bits.same_bits(held["decoder.final_layernorm.weight"], state["model.norm.weight"])


def test_a_tied_head_may_be_absent() -> None:
    state, digests = random_state(TIED), set()
    for _ in range(2):
        model = policy(alone(), shape=TIED)
        load_hugging_face(model, TIED, state)
        digests.add(weights_digest(model))
        state.pop("lm_head.weight", None)
    assert len(digests) == 1


def test_weights_are_rounded_to_the_models_dtype() -> None:
    model = policy(alone(), shape=BF16)
    load_hugging_face(model, BF16, random_state(BF16))
    rounded = random_state(BF16)["model.norm.weight"].bfloat16()
    assert bits.same_bits(parameters(model)["decoder.final_layernorm.weight"], rounded)


def test_a_state_dict_that_does_not_fit_is_refused_whole() -> None:
    model = policy(alone())
    before = weights_digest(model)
    state = random_state(TINY)
    del state["lm_head.weight"]
    state["model.layers.2.input_layernorm.weight"] = torch.ones(64)
    state["model.norm.weight"] = torch.ones(65)
    with pytest.raises(WeightMismatchError) as caught:
        load_hugging_face(model, TINY, state)
    assert str(caught.value) == (
        "lm_head.weight is missing; model.layers.2.input_layernorm.weight is unknown; "
        "model.norm.weight is (65,), not (64,)"
    )
    assert weights_digest(model) == before


def test_a_tied_head_with_bits_of_its_own_is_refused() -> None:
    state = random_state(TIED)
    state["lm_head.weight"] = state["lm_head.weight"].clone()
    nudge(state["lm_head.weight"])
    with pytest.raises(
        WeightMismatchError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"
    ):
        load_hugging_face(policy(alone(), shape=TIED), TIED, state)
