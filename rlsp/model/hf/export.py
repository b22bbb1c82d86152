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
from rlsp.pretrained.names import HEAD, tensor_shapes

SHARD_BYTES = 1 << 30
"""Most bytes of one file of weights (unless one tensor has more), and so of what rank 0 keeps at a time."""

_PARTIAL = ".partial"


def write_folder(
    model: PolicyModel,
    shape: ModelConfig,
    folder: Path,
    world: Group,
    described: Mapping[str, Any],
    beside: tuple[Path, ...] = (),
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write weights, config.json and what lies beside them; every rank calls it, rank 0 of `world` writes.

    Args:
        model: The model, in any layout.
        shape: What it was built from.
        folder: Where to; made if absent.
        world: All ranks: they meet after every file, so that none waits for more than one.
        described: config.json, to which the dtype is added.
        beside: Files that are copied along (tokenizer, generation config).
        shard_bytes: Most bytes of one file of weights.

    Raises:
        OSError: On rank 0, where the folder cannot be written.
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
        said = {key: value for key, value in described.items() if key != "torch_dtype"}
        config = {**said, "dtype": model.wiring.contract.dtype}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for path in beside:
            shutil.copyfile(path, folder / path.name)
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
            partial.replace(folder / file)
        collectives.max_integers(torch.zeros(1, dtype=torch.int64, device=_device(model)), world)
    if writes and len(files) > 1:
        where = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(where.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


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
