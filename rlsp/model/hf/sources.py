"""transformers' tensors on disk, read in slices: by every rank its own, or by rank 0 for all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rlsp import bits, collectives
from rlsp.config import ModelConfig
from rlsp.groups import Group
from rlsp.model.build import PolicyModel
from rlsp.model.hf.mapping import Tensors
from rlsp.model.hf.weights import WeightMismatchError, load_weights
from rlsp.pretrained.folder import Stored, gguf_file, located, tensor_table
from rlsp.pretrained.names import EMBEDDING, HEAD, misfits, tensor_shapes


def load_path(model: PolicyModel, shape: ModelConfig, world: Group) -> None:
    """Fill a model from the checkpoint at its path; every rank of `world` calls it.

    Args:
        model: The model to fill.
        shape: What it was built from, with a path.
        world: All ranks, of which rank 0 reads a GGUF file for all.

    Raises:
        WeightMismatchError: The tensors do not fit the model.
        PretrainedError: Files are missing or cannot be read.
    """
    assert shape.path is not None
    place = located(shape.path)
    if (file := gguf_file(place)) is not None:
        load_weights(model, shape, GgufFile(file, shape, world, next(model.parameters()).device))
        return
    table = tensor_table(place)
    if faults := misfits({name: stored.shape for name, stored in table.items()}, shape):
        raise WeightMismatchError("; ".join(faults))
    with open_folder(table) as tensors:
        if shape.tie_embeddings and HEAD in table:
            _require_tied(tensors, shape, model)
        load_weights(model, shape, tensors)


@contextmanager
def open_folder(table: Mapping[str, Stored]) -> Iterator[Folder]:
    """Open the files of a table of tensors for as long as their slices are read."""
    with ExitStack() as held:
        files = {stored.file for stored in table.values()}
        yield Folder(table, {file: held.enter_context(safe_open(file, framework="pt")) for file in files})


class Folder:
    """Slices of safetensors files: a read allocates the slice and nothing else."""

    def __init__(self, table: Mapping[str, Stored], opened: Mapping[Path, Any]) -> None:
        """Take the files that hold the tensors of `table`, opened."""
        self._table, self._opened = table, opened

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Copy the indices start … stop of dimension `dim` out of the file."""
        cut = self._opened[self._table[name].file].get_slice(name)
        if start == stop:  # a rank whose heads are all padding
            size = list(cut.get_shape())
            size[dim] = 0
            return torch.empty(size)
        found: Tensor = cut[start:stop] if dim == 0 else cut[:, start:stop]
        return found


class GgufFile:
    """A GGUF file, dequantised by transformers on rank 0 and given to all ranks tensor by tensor."""

    def __init__(self, file: Path, shape: ModelConfig, world: Group, device: torch.device) -> None:
        """Read the whole file on rank 0, in float32: 4 bytes a parameter there and nowhere else."""
        self._world, self._device = world, device
        self._shapes = tensor_shapes(shape)
        self._state = _dequantised(file) if world.index == 0 else {}

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Return the indices start … stop of dimension `dim`; all ranks ask for the same tensors in turn."""
        whole = self._state.pop(name, None)
        if whole is None:
            whole = torch.empty(self._shapes[name])
        shared = collectives.broadcast(whole.to(self._device, torch.float32), self._world, source=0)
        return shared.narrow(dim, start, stop - start).clone()


def _dequantised(file: Path) -> dict[str, Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return dict(model.state_dict())


def _require_tied(tensors: Tensors, shape: ModelConfig, model: PolicyModel) -> None:
    """Refuse a head of its own where it should be the embedding; each rank looks at its rows."""
    tp = model.wiring.tp
    first, last = (shape.vocab_size * edge // tp.size for edge in (tp.index, tp.index + 1))
    head, embedding = (tensors.read(name, 0, first, last) for name in (HEAD, EMBEDDING))
    if not bits.same_bits(head, embedding):
        raise WeightMismatchError(f"{HEAD} differs from {EMBEDDING}, to which it is tied")
