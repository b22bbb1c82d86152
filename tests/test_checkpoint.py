"""Checkpoints in and out: what a rank reads, GGUF against transformers' loader, and folders that it loads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_helpers import BF16, CPU, TIED, TINY, alone, contract_of, mesh_of, policy, products
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from test_pretrained import write
from torch import Tensor

from rlsp import bits
from rlsp.config import Dtype, Given, ModelConfig
from rlsp.layout import Layout
from rlsp.model.build import build_model
from rlsp.model.hf import WeightMismatchError, load_path, sources, write_folder
from rlsp.model.hf.sources import Folder, GgufFile
from rlsp.model.weights import weights_digest
from rlsp.model.wiring import Phase, Wiring
from rlsp.pretrained.folder import read_shape, tensor_lines
from rlsp.pretrained.names import HEAD, tensor_shapes

transformers = pytest.importorskip("transformers")

PADDED = replace(TINY, qk_norm=False, num_attention_heads=8, num_query_groups=4, pad_heads=True)
LAYOUT = Layout(dp=1, cp=1, tp=4, sp=4)


def unfilled(mesh, shape: ModelConfig, sp: bool = False):
    """A model whose weights hold NaN."""
    wiring = Wiring(Phase.TRAIN, contract_of(shape), products(), mesh.tp, mesh.cp, sp)
    model = build_model(shape, wiring, CPU)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    return model


# Reading.


def read_by_rank(rank: int, world: int, shape: ModelConfig) -> tuple[dict[str, int], int, str]:
    """Load on one rank; return elements read by tensor, the largest read, and the weights' digest."""
    read: dict[str, int] = {}
    largest = 0
    whole = Folder.read

    def counted(self: Folder, name: str, dim: int, start: int, stop: int) -> Tensor:
        nonlocal largest
        found = whole(self, name, dim, start, stop)
        read[name] = read.get(name, 0) + found.numel()
        largest = max(largest, found.numel())
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources.Folder, "read", counted)
        model = unfilled(mesh_of(LAYOUT, rank), shape, sp=True)
        load_path(model, shape)
    return read, largest, weights_digest(model)


@pytest.mark.parametrize("shape", [TINY, PADDED], ids=["whole", "padded"])
def test_a_rank_reads_its_own_slices_and_nothing_else(tmp_path: Path, shape: ModelConfig) -> None:
    products()
    shape = write(tmp_path, shape, 3)
    by_rank = run_ranks(4, read_by_rank, shape)
    sizes = {name: torch.Size(size).numel() for name, size in tensor_shapes(shape).items()}
    for name, size in sizes.items():
        counts = [read[name] for read, _, _ in by_rank]
        assert sum(counts) == (4 * size if name.endswith("norm.weight") else size), name
        if not name.endswith("norm.weight") and shape is TINY:
            assert max(counts) <= -(-size // 4) + 64 * 16  # rows of the vocabulary do not divide
    assert max(largest for _, largest, _ in by_rank) <= max(sizes.values()) // 2
    model = unfilled(alone(), shape)
    load_path(model, shape)
    assert {digest for _, _, digest in by_rank} == {weights_digest(model)}


def test_float16_and_float32_are_rounded_to_the_models_dtype(tmp_path: Path) -> None:
    shape = write(tmp_path, BF16)
    state = {name: x.half() for name, x in load_file(tmp_path / "model.safetensors").items()}
    save_file(state, tmp_path / "model.safetensors")
    model = unfilled(alone(), shape)
    load_path(model, shape)
    norm = dict(model.gpt.named_parameters())["decoder.final_layernorm.weight"].detach()
    assert bits.same_bits(norm, state["model.norm.weight"].bfloat16())


def test_a_tied_head_of_its_own_is_refused_on_the_way_in(tmp_path: Path) -> None:
    shape = write(tmp_path, TIED)
    state = load_file(tmp_path / "model.safetensors")
    state[HEAD] = state["model.embed_tokens.weight"].clone()
    save_file(state, tmp_path / "model.safetensors")
    load_path(unfilled(alone(), shape), shape)
    state[HEAD][3, 3] = -state[HEAD][3, 3]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(WeightMismatchError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        load_path(unfilled(alone(), shape), shape)


# GGUF.


def write_gguf(path: Path, kind: str, quantised: bool) -> None:
    """Write a small model as llama.cpp's converter does: named and, for Llama, twisted its way."""
    gguf = pytest.importorskip("gguf")
    source = torch.Generator().manual_seed(0)
    heads, groups, head = {"llama": (8, 4, 8), "qwen3": (2, 1, 128)}[kind]  # transformers takes 128 for Qwen3
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_rope_dimension_count(head)
    writer.add_key_length(head)
    writer.add_rope_freq_base(5e5)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(96)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(96)])
    writer.add_token_merges(["t 1"])
    writer.add_eos_token_id(2)

    def add(name: str, *shape: int) -> None:
        data = torch.randn(shape, generator=source).numpy()
        types = gguf.GGMLQuantizationType
        if len(shape) == 1 or not quantised:
            writer.add_tensor(name, data)
            return
        of = {"ffn_down": types.Q8_0, "attn_q": types.Q4_1, "attn_k": types.F16, "attn_v": types.BF16}
        wanted = next((t for part, t in of.items() if f"{part}.weight" in name), types.Q4_1)
        writer.add_tensor(name, gguf.quantize(data, wanted), raw_dtype=wanted)

    add("token_embd.weight", 96, 64)
    add("output_norm.weight", 64)
    for i in range(2):
        for name, shape in {
            "attn_norm": (64,),
            "ffn_norm": (64,),
            **({"attn_q_norm": (head,), "attn_k_norm": (head,)} if kind == "qwen3" else {}),
            "attn_q": (heads * head, 64),
            "attn_k": (groups * head, 64),
            "attn_v": (groups * head, 64),
            "attn_output": (64, heads * head),
            "ffn_gate": (128, 64),
            "ffn_up": (128, 64),
            "ffn_down": (64, 128),
        }.items():
            add(f"blk.{i}.{name}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def shape_of_file(path: Path) -> ModelConfig:
    fields = read_shape(str(path))
    fields["rope_scaling"] = Given(fields["rope_scaling"])
    return ModelConfig(
        name="gguf", init_std=0.02, pad_heads=True, path=str(path), dtype=Dtype.float32, **fields
    )


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_gguf_file_has_the_bits_of_transformers_own_loader(
    tmp_path: Path, kind: str, quantised: bool
) -> None:
    path = tmp_path / "small.gguf"
    write_gguf(path, kind, quantised)
    shape = shape_of_file(path)
    assert tensor_lines(shape) == []
    pytest.importorskip("accelerate")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    )
    assert theirs.config.rms_norm_eps == shape.norm_epsilon
    assert theirs.config.tie_word_embeddings == shape.tie_embeddings
    file = GgufFile(path, shape)
    for name, expected in theirs.state_dict().items():
        if name != HEAD:
            assert bits.same_bits(file.read(name, 0, 0, len(expected)), expected), name
            half = len(expected) // 2
            assert bits.same_bits(file.read(name, 0, half, len(expected)), expected[half:]), name
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            assert bits.same_bits(file.read(name, 1, 8, 40), expected[:, 8:40].contiguous()), name


def test_a_torn_gguf_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    write_gguf(path, "llama", True)
    shape = shape_of_file(path)
    path.write_bytes(path.read_bytes()[:-33])
    (line,) = tensor_lines(shape)
    assert line.startswith("small.gguf: is torn: model.layers.1.")


# Out again.


@pytest.mark.parametrize("shape", [TINY, TIED, BF16, PADDED], ids=["untied", "tied", "bfloat16", "padded"])
@pytest.mark.parametrize("shard_bytes", [1 << 30, 40_000])
def test_transformers_loads_what_is_written_and_computes_the_same_bits(
    tmp_path: Path, shape: ModelConfig, shard_bytes: int
) -> None:
    shape = write(tmp_path / "in", shape, 3)
    for name in ("tokenizer.json", "generation_config.json", "notes.txt"):
        (tmp_path / "in" / name).write_text("{}")
    model = unfilled(alone(), shape)
    load_path(model, shape)
    write_folder(model, shape, tmp_path / "out", alone().world, shard_bytes)
    dtype = getattr(torch, shape.dtype.value)
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said == {**json.loads((tmp_path / "in" / "config.json").read_text()), "dtype": shape.dtype.value}
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert not (tmp_path / "out" / "notes.txt").exists()
    tokens = torch.arange(40).view(2, 20)
    logits = []
    for folder in ("in", "out"):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=dtype).eval()
        with torch.no_grad():
            logits.append(theirs(tokens).logits)
    assert bits.same_bits(*logits)
    again = replace(shape, path=str(tmp_path / "out"))
    assert tensor_lines(again) == []
    second = unfilled(alone(), again)
    load_path(second, again)
    assert weights_digest(second) == weights_digest(model)


def written(rank: int, world: int, shape: ModelConfig, folder: str) -> None:
    mesh = mesh_of(Layout(dp=2, cp=1, tp=2, sp=2), rank)
    model = policy(mesh, sp=True, shape=shape)
    load_path(model, shape)
    write_folder(model, shape, Path(folder), mesh.world, 40_000)


def test_four_ranks_write_the_bytes_that_one_writes(tmp_path: Path) -> None:
    products()
    shape = write(tmp_path / "in", replace(PADDED, dtype=Dtype.bfloat16))
    run_ranks(4, written, shape, str(tmp_path / "four"))
    model = unfilled(alone(), shape)
    load_path(model, shape)
    write_folder(model, shape, tmp_path / "one", alone().world, 40_000)
    one, four = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("one", "four"))
    assert len(one) > 3
    assert one == four
