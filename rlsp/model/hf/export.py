"""Write a model as a folder that transformers and vLLM load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rlsp import collectives
from rlsp.config import ModelConfig
from rlsp.groups import Group
from rlsp.model.build import PolicyModel
from rlsp.model.hf.weights import hugging_face_weights
from rlsp.pretrained.architecture import describe
from rlsp.pretrained.folder import beside, gguf_file, located, read_description
from rlsp.pretrained.names import HEAD, tensor_shapes

EXPORT_NAME = "export"
"""The folder below a run's own that takes its last weights."""

SHARD_BYTES = 1 << 30
"""Most bytes of one file of weights (unless one tensor has more), and so of what rank 0 keeps at a time."""

_PARTIAL = ".partial"
_FROM_GGUF = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")


def write_folder(
    model: PolicyModel,
    shape: ModelConfig,
    folder: Path,
    world: Group,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write weights, config.json and what goes with them; every rank calls it, rank 0 of `world` writes.

    Where the model came from a checkpoint, its config.json is kept, with the dtype of this model, and its
    tokenizer and generation config are copied.

    Args:
        model: The model, in any layout.
        shape: What it was built from.
        folder: Where to; made if absent.
        world: All ranks: they meet after every file, so that none waits for more than one.
        shard_bytes: Most bytes of one file of weights.

    Raises:
        OSError: On rank 0, where the folder cannot be written.
        PretrainedError: On rank 0, where the checkpoint that the model came from is gone.
    """
    dtype = getattr(torch, model.wiring.contract.dtype)
    sizes = {
        name: torch.Size(size).numel() * dtype.itemsize
        for name, size in tensor_shapes(shape).items()
        if not (shape.tie_embeddings and name == HEAD)
    }
    writes = world.index == 0
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
        _write_config(shape, folder)
    stream = hugging_face_weights(model, shape)
    files = _files(sizes, shard_bytes)
    for file, names in files.items():
        kept = {}
        for _ in names:
            name, tensor = next(stream)
            if writes:
                kept[name] = tensor.cpu()
        if writes:
            assert set(kept) == set(names)
            partial = folder / f"{file}{_PARTIAL}"
            save_file(kept, partial, metadata={"format": "pt"})
            partial.chmod((folder / "config.json").stat().st_mode)  # safetensors lets nobody else read it
            partial.replace(folder / file)
        collectives.max_integers(torch.zeros(1, dtype=torch.int64, device=_device(model)), world)
    if writes and len(files) > 1:
        where = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(where.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _write_config(shape: ModelConfig, folder: Path) -> None:
    """Write config.json, and whatever of the checkpoint goes with the weights."""
    described = describe(shape)
    if shape.path is not None:
        place = located(shape.path)
        gguf = gguf_file(place)
        said = read_description(shape.path)[1]
        described = said if gguf is None else {**described, **_only(said, _FROM_GGUF)}
        for path in () if gguf is not None else beside(place):
            shutil.copyfile(path, folder / path.name)
        if gguf is not None:
            _save_tokenizer(gguf, folder)
    described = {key: value for key, value in described.items() if key != "torch_dtype"}
    text = json.dumps({**described, "dtype": shape.dtype.value}, indent=2)
    (folder / "config.json").write_text(text + "\n")


def _only(said: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: said[key] for key in keys if key in said}


def _save_tokenizer(gguf: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def _files(sizes: Mapping[str, int], shard_bytes: int) -> dict[str, list[str]]:
    """Spread tensors over files in the order in which they are yielded."""
    files: list[list[str]] = [[]]
    room = shard_bytes
    for name, size in sizes.items():
        if files[-1] and size > room:
            files.append([])
            room = shard_bytes
        files[-1].append(name)
        room -= size
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {f"model-{i + 1:05d}-of-{len(files):05d}.safetensors": names for i, names in enumerate(files)}


def _device(model: PolicyModel) -> torch.device:
    return next(model.parameters()).device
