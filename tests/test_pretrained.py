"""What a checkpoint's folder says before torch is imported: its shape, and every reason to refuse it."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import Console
from model_helpers import BF16, TIED, TINY, random_state
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlsp.config import Given, ModelConfig
from rlsp.pretrained.architecture import PretrainedError, describe, shape_of
from rlsp.pretrained.folder import fingerprint, read_shape, tensor_lines
from rlsp.pretrained.names import HEAD

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "intermediate_size": 128,
    "vocab_size": 97,
    "rope_theta": 1e6,
}
LLAMA = {**QWEN3, "architectures": ["LlamaForCausalLM"]}


def write(folder: Path, shape: ModelConfig, files: int = 1) -> ModelConfig:
    """Write random weights in `files` files with an index; return the shape with its path."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: x.clone() for name, x in random_state(shape).items()}
    if shape.tie_embeddings:
        del state[HEAD]
    (folder / "config.json").write_text(json.dumps(describe(shape)))
    if files == 1:
        save_file(state, folder / "model.safetensors")
        return replace(shape, path=str(folder))
    names = list(state)
    parts: list[dict[str, Tensor]] = [{n: state[n] for n in names[i::files]} for i in range(files)]
    where = {}
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{files:05d}.safetensors"
        save_file(part, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return replace(shape, path=str(folder))


# config.json.


@pytest.mark.parametrize("shape", [TINY, TIED, replace(TINY, qk_norm=False)], ids=["qwen3", "tied", "llama"])
def test_a_shape_that_is_described_is_read_back(shape: ModelConfig) -> None:
    scaling = Given(rope_type="linear", factor=2.0)
    one = replace(shape, rope_scaling=scaling)
    read = shape_of(json.loads(json.dumps(describe(one))))
    assert {key: getattr(one, key) for key in read} == read


def test_what_config_json_leaves_out_is_what_transformers_takes() -> None:
    transformers = pytest.importorskip("transformers")
    for described, kind in ((QWEN3, "qwen3"), (LLAMA, "llama")):
        few = {
            k: v for k, v in described.items() if k not in ("num_key_value_heads", "head_dim", "rope_theta")
        }
        few["num_attention_heads"] = 32  # Qwen3's default has 32 key-value heads
        theirs = transformers.AutoConfig.for_model(kind, **few)
        ours = shape_of(few)
        assert ours["num_query_groups"] == theirs.num_key_value_heads
        assert ours["head_dim"] == theirs.head_dim
        assert ours["rope_base"] == theirs.rope_parameters["rope_theta"]
        assert ours["norm_epsilon"] == theirs.rms_norm_eps
        assert ours["tie_embeddings"] == theirs.tie_word_embeddings


def test_both_forms_of_rope_are_read() -> None:
    numbers = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    older = {**LLAMA, "rope_scaling": {"type": "llama3", **numbers, "original_max_position_embeddings": 8192}}
    newer = {**LLAMA, "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6, **numbers}}
    newer["max_position_embeddings"] = 8192
    expected = {"rope_type": "llama3", **numbers, "original_max_position_embeddings": 8192}
    assert shape_of(older)["rope_scaling"] == shape_of(newer)["rope_scaling"] == expected
    assert shape_of(older)["rope_base"] == shape_of(newer)["rope_base"] == 1e6


FOREIGN: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["MistralForCausalLM"]}, "architectures=['MistralForCausalLM']: legal: [Qwen3"),
    ({"architectures": None}, "architectures=None: legal: [Qwen3ForCausalLM] or [LlamaForCausalLM]"),
    ({"attention_bias": True}, "attention_bias=true: legal: false (the linear layers have no bias)"),
    ({"mlp_bias": True}, "mlp_bias=true: legal: false (the linear layers have no bias)"),
    ({"hidden_act": "gelu"}, "hidden_act=gelu: legal: silu"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "a sliding window is in use: legal: full"),
    ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, "a sliding window is in use"),
    ({"attention_dropout": 0.1}, "attention_dropout=0.1: legal: 0"),
    ({"quantization_config": {"bits": 4}}, "quantization_config: legal: weights in bfloat16"),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "rope_type=yarn: legal: default, linear, llama3",
    ),
    ({"rope_parameters": {"rope_type": "linear"}}, "rope_type=linear without factor"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: legal: 1 (every pair of a head is rotated)"),
]


@pytest.mark.parametrize(("change", "said"), FOREIGN)
def test_what_the_model_does_not_carry_is_refused(change: dict[str, Any], said: str) -> None:
    shape_of(QWEN3)
    with pytest.raises(PretrainedError) as caught:
        shape_of({**QWEN3, **change})
    assert len(caught.value.lines) == 1
    assert caught.value.lines[0].startswith(said)


def test_all_reasons_are_listed_at_once() -> None:
    changes: dict[str, Any] = {}
    for change, _ in FOREIGN[2:5]:
        changes |= change
    described = {**QWEN3, **changes}
    del described["hidden_size"]
    with pytest.raises(PretrainedError) as caught:
        shape_of(described)
    assert len(caught.value.lines) == 4
    assert "hidden_size is missing" in caught.value.lines


def test_a_window_that_is_switched_off_is_none() -> None:
    shape_of({**QWEN3, "use_sliding_window": False, "sliding_window": 4096})
    shape_of({**QWEN3, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2})


def test_a_window_from_the_first_layer_on_may_be_left_out() -> None:
    for first in ({}, {"max_window_layers": None}, {"max_window_layers": 0}):
        with pytest.raises(PretrainedError, match="a sliding window is in use"):
            shape_of({**QWEN3, "use_sliding_window": True, "sliding_window": 9, **first})


# Files.


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": 3},
        {"rope_parameters": [1]},
        {"rope_scaling": "yarn"},
        {"hidden_size": "64", "head_dim": None, "architectures": ["LlamaForCausalLM"]},
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": "2"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_config_json_with_other_types_is_refused_by_name(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3, **change}))
    with pytest.raises(PretrainedError) as caught:
        read_shape(str(tmp_path))
    (line,) = caught.value.lines
    assert line.startswith("config.json: is not laid out as transformers writes it (")


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("shape", [TINY, TIED], ids=["untied", "tied"])
def test_a_folder_that_fits_has_nothing_against_it(tmp_path: Path, shape: ModelConfig, files: int) -> None:
    model = write(tmp_path, shape, files)
    assert tensor_lines(model) == []
    assert read_shape(str(tmp_path))["num_layers"] == 2


def truncate(folder: Path) -> None:
    file = folder / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    file = folder / "model-00001-of-00003.safetensors"
    state = load_file(file)
    change(state)
    save_file(state, file)


def misshape(folder: Path) -> None:
    rewrite(folder, lambda state: state.update({FIRST: state[FIRST][:-1].clone()}))


def double(folder: Path) -> None:
    rewrite(folder, lambda state: state.update({FIRST: state[FIRST].double()}))


FIRST = next(iter(random_state(TINY)))
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
BROKEN: list[tuple[Callable[[Path], object], str]] = [
    (truncate, "model-00002-of-00003.safetensors: is torn or no safetensors file ("),
    (
        lambda f: (f / "model-00003-of-00003.safetensors").unlink(),
        "model-00003-of-00003.safetensors is missing",
    ),
    (
        lambda f: (f / "model.safetensors.index.json").unlink(),
        "neither model.safetensors nor model.safetensors",
    ),
    (
        lambda f: (f / "model.safetensors.index.json").write_text("{"),
        "model.safetensors.index.json: is no JSON",
    ),
    (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b"}}'),
        "model.safetensors.index.json: weight_map: legal: names of files in the folder, by tensor",
    ),
    (
        lambda f: (f / "model.safetensors.index.json").write_text("[" * 100_000),
        "model.safetensors.index.json: is no JSON",
    ),
    (
        lambda f: (f / "model-00002-of-00003.safetensors").write_bytes(POINTER),
        "model-00002-of-00003.safetensors: is a pointer of git-lfs, not the file itself: `git lfs pull`",
    ),
    (misshape, f"{FIRST} is (63,), not (64,)"),
    (double, f"{FIRST} is F64: legal: BF16, F16, F32"),
    (
        lambda f: rewrite(f, lambda s: s.pop(FIRST)),
        f"model-00001-of-00003.safetensors: has no {FIRST}, which",
    ),
    (lambda f: rewrite(f, lambda s: s.update(more=s[FIRST].clone())), "more is unknown"),
]


@pytest.mark.parametrize(("break_it", "said"), BROKEN)
def test_files_that_do_not_fit_are_refused_from_their_headers(
    tmp_path: Path, break_it: Callable[[Path], object], said: str
) -> None:
    model = write(tmp_path, TINY, 3)
    break_it(tmp_path)
    lines = tensor_lines(model)
    assert len(lines) == 1, lines
    assert lines[0].startswith(said)


def test_several_missing_files_are_named_together(tmp_path: Path) -> None:
    model = write(tmp_path, TINY, 3)
    for number in (1, 3):
        (tmp_path / f"model-0000{number}-of-00003.safetensors").unlink()
    assert tensor_lines(model) == [f"model-0000{number}-of-00003.safetensors is missing" for number in (1, 3)]


def test_a_fingerprint_tells_files_apart_by_head_and_size_not_by_content(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, shape).path for name, shape in (("a", TINY), ("b", TINY), ("c", TIED))]
    a, b, c = (fingerprint(str(path)) for path in paths)
    assert a["sha256"] == b["sha256"] != c["sha256"]
    assert [file["name"] for file in a["files"]] == ["config.json", "model.safetensors"]
    file = tmp_path / "b" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # of a tensor: for the digest of the initial weights to see
    file.write_bytes(content)
    assert fingerprint(str(paths[1]))["sha256"] == a["sha256"]


def test_nothing_of_this_needs_torch() -> None:
    import subprocess

    code = "import rlsp.pretrained.folder, rlsp.cli.compose, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# The command line.


def test_a_path_that_cannot_be_used_is_refused_in_its_own_words(
    rlsp_command: Console, tmp_path: Path
) -> None:
    write(tmp_path / "good", BF16)
    write(tmp_path / "torn", TINY, 3)
    truncate(tmp_path / "torn")
    (tmp_path / "two").mkdir()
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / "two" / name).write_bytes(b"GGUF" + struct.pack("<I", 3) + bytes(8))
    legal = "legal: a folder with config.json and safetensors, or a GGUF file"
    for overrides, said in (
        ((), f"model.path=(missing): {legal}"),
        (("model.path=nowhere",), f"model.path=nowhere: {legal}; nothing lies there"),
        (("model.path=two",), f"model.path=two: {legal}; several GGUF files: legal: one of a.gguf, b.gguf"),
        (("model.path=two/a.gguf",), "a.gguf: is no GGUF file of version 2 or 3, or is torn"),
        (("model.path=package:no_such/x.gguf",), "the package no_such is not installed"),
        (("model.path=torn",), "model-00002-of-00003.safetensors: is torn"),
        (("model.path=good", "model.num_layers=3"), "model.num_layers=3: legal: 2, as good has it"),
        (
            ("model.path=good", "numerics.virtual_tp=16"),
            "any with model.pad_heads=true: zero heads make it 32",
        ),
    ):
        assert rlsp_command("model=hf", *overrides) == 2
        assert said in rlsp_command.errors
        assert not (tmp_path / "outputs").exists()


def test_a_model_that_names_its_shape_must_agree_with_its_path(rlsp_command: Console, tmp_path: Path) -> None:
    write(tmp_path / "good", TINY)
    assert rlsp_command("model=qwen3_nano", "model.path=good") == 2
    for key in ("hidden_size=128", "head_dim=16", "ffn_hidden_size=256"):
        assert f"model.{key}: legal: " in rlsp_command.errors
    assert "model.num_layers" not in rlsp_command.errors


def test_random_bytes_are_no_gguf_file(tmp_path: Path) -> None:
    source = np.random.default_rng(0)
    for size in (0, 3, 40, 4000):
        file = tmp_path / "x.gguf"
        file.write_bytes(b"GGUF\x03\0\0\0" + source.bytes(size))
        with pytest.raises(PretrainedError, match=r"x\.gguf"):
            read_shape(str(file))
