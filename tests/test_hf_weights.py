"""Weights into any layout and out again keep every bit, also where heads are padded with zeros."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_helpers import BF16, TIED, TINY, alone, mesh_of, policy, products, random_state
from ranks import run_checks
from safetensors.torch import load_file
from torch import Tensor

from rlsp import bits
from rlsp.config import ModelConfig
from rlsp.layout import Layout
from rlsp.model.hf import hugging_face_weights, load_hugging_face, write_folder, zero_padding
from rlsp.pretrained.architecture import shape_of
from rlsp.pretrained.names import HEAD

LLAMA = replace(TINY, qk_norm=False)
PADDED = replace(LLAMA, num_attention_heads=6, num_query_groups=3, pad_heads=True)  # 16 and 8 of V = 8
SHAPES = {"untied": TINY, "tied": TIED, "llama": LLAMA, "padded": PADDED, "bfloat16": BF16}
LAYOUTS = {
    1: [Layout(dp=1, cp=1, tp=1, sp=1)],
    4: [Layout(dp=1, cp=1, tp=4, sp=4), Layout(dp=1, cp=2, tp=2, sp=1), Layout(dp=2, cp=2, tp=1, sp=1)],
}


def state_of(shape: ModelConfig) -> dict[str, Tensor]:
    dtype = getattr(torch, shape.dtype.value)
    return {name: x.to(dtype) for name, x in random_state(shape).items()}


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Name the tensors that are not the same, by names and bits."""
    assert set(found) == set(expected)
    return [name for name, x in found.items() if not bits.same_bits(x, expected[name])]


def out_again(rank: int, world: int) -> int:
    """Load each shape in each layout, take it out, and compare on every rank."""
    count = 0
    for layout in LAYOUTS[world]:
        mesh = mesh_of(layout, rank)
        for shape in SHAPES.values():
            state = state_of(shape)
            model = policy(mesh, sp=layout.sequence_parallel, shape=shape)
            load_hugging_face(model, shape, state)
            if shape.tie_embeddings:
                del state[HEAD]
            assert differing(dict(hugging_face_weights(model, shape)), state) == []
            count += 1
    return count


def test_weights_come_out_of_every_layout_as_they_went_in() -> None:
    products()
    assert out_again(0, 1) == 5
    assert run_checks(4, [out_again])["out_again"] == [15] * 4


def test_one_element_that_moved_is_seen_on_the_way_out() -> None:
    """Witness: two elements of one padded shard change places."""
    state = state_of(PADDED)
    model = policy(alone(), shape=PADDED)
    load_hugging_face(model, PADDED, state)
    qkv = dict(model.gpt.named_parameters())["decoder.layers.0.self_attention.linear_qkv.weight"]
    with torch.no_grad():
        qkv[1, 0, [3, 4]] = qkv[1, 0, [4, 3]].clone()
    assert differing(dict(hugging_face_weights(model, PADDED)), state) == [
        "model.layers.0.self_attn.q_proj.weight"
    ]


def test_what_comes_out_is_nobody_elses_memory() -> None:
    model = policy(alone())
    held = {x.untyped_storage().data_ptr() for x in model.parameters()}
    assert all(x.untyped_storage().data_ptr() not in held for _, x in hugging_face_weights(model, TINY))


def test_fresh_weights_get_zeros_where_they_are_padding_and_nowhere_else() -> None:
    model = policy(alone(), shape=PADDED)
    before = {name: x.detach().clone() for name, x in model.gpt.named_parameters()}
    zero_padding(model, PADDED)
    qkv, out = "self_attention.linear_qkv.weight", "self_attention.linear_proj.weight"
    for name, x in model.gpt.named_parameters():
        after, was = x.detach(), before[name]
        kept = 3 if name.endswith((qkv, out)) else len(x)
        if "embeddings" in name or "output_layer" in name:
            after, was, kept = after.flatten(0, 1), was.flatten(0, 1), PADDED.vocab_size
            assert kept < len(after)
        assert bits.same_bits(after[:kept], was[:kept])
        assert not bool(after[kept:].any())
    assert bool(before[f"decoder.layers.0.{qkv}"][3:].any())


@pytest.mark.parametrize("shard_bytes", [1 << 30, 40_000])
def test_a_written_folder_holds_every_tensor_once(tmp_path: Path, shard_bytes: int) -> None:
    for name, shape in SHAPES.items():
        folder = tmp_path / name
        model = policy(alone(), shape=shape)
        state = state_of(shape)
        load_hugging_face(model, shape, state)
        write_folder(model, shape, folder, alone().world, shard_bytes)
        if shape.tie_embeddings:
            del state[HEAD]
        files = sorted(folder.glob("*.safetensors"))
        found = {name: x for file in files for name, x in load_file(file).items()}
        assert differing(found, state) == []
        assert sum(len(load_file(file)) for file in files) == len(state)
        assert (
            (len(files) > 1) == (shard_bytes < 1 << 20) == (folder / "model.safetensors.index.json").exists()
        )
        said = json.loads((folder / "config.json").read_text())
        assert said["dtype"] == shape.dtype.value
        read = shape_of(said)
        assert {key: getattr(shape, key) for key in read if key != "rope_scaling"} == {
            key: value for key, value in read.items() if key != "rope_scaling"
        }
