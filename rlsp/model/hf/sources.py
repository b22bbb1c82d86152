"""transformers' tensors on disk, of which every rank reads its own slices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rlsp import bits
from rlsp.config import ModelConfig
from rlsp.model.build import PolicyModel
from rlsp.model.hf.mapping import Tensors
from rlsp.model.hf.weights import WeightMismatchError, load_weights
from rlsp.pretrained.folder import Stored, gguf_file, located, tensor_table
from rlsp.pretrained.gguf_tensors import GgufSlices
from rlsp.pretrained.names import EMBEDDING, HEAD, misfits, tensor_shapes


def load_path(model: PolicyModel, shape: ModelConfig) -> None:
    """Fill a model with this rank's part of the checkpoint at its path.

    Args:
        model: The model to fill.
        shape: What it was built from, with a path.

    Raises:
        WeightMismatchError: The tensors do not fit the model.
        PretrainedError: Files are missing or cannot be read.
    """
    assert shape.path is not None
    place = located(shape.path)
    if (file := gguf_file(place)) is not None:
        load_weights(model, shape, GgufFile(file, shape))
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
    """Slices of safetensors files, which are mapped: what is copied out of a slice is all that is read."""

    def __init__(self, table: Mapping[str, Stored], opened: Mapping[Path, Any]) -> None:
        """Take the files that hold the tensors of `table`, opened."""
        self._table, self._opened = table, opened

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """View the indices start … stop of dimension `dim` in the mapped file."""
        cut = self._opened[self._table[name].file].get_slice(name)
        if start == stop:  # a rank whose heads are all padding
            size = list(cut.get_shape())
            size[dim] = 0
            return torch.empty(size)
        found: Tensor = cut[start:stop] if dim == 0 else cut[:, start:stop]
        return found


class GgufFile:
    """Slices of a GGUF file, dequantised to float32: a read keeps its slice, and bounds what it works on."""

    def __init__(self, file: Path, shape: ModelConfig) -> None:
        """Open the file."""
        self._slices, self._shapes = GgufSlices(file, shape), tensor_shapes(shape)

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Return the indices start … stop of dimension `dim`."""
        size = list(self._shapes[name])
        size[dim] = stop - start
        found, at = torch.empty(size), 0
        for piece in self._slices.pieces(name, dim, start, stop):
            found[at : at + len(piece)] = torch.tensor(piece)
            at += len(piece)
        return found


def _require_tied(tensors: Tensors, shape: ModelConfig, model: PolicyModel) -> None:
    """Refuse a head of its own where it should be the embedding; each rank looks at its rows."""
    tp = model.wiring.tp
    first, last = (shape.vocab_size * edge // tp.size for edge in (tp.index, tp.index + 1))
    head, embedding = (tensors.read(name, 0, first, last) for name in (HEAD, EMBEDDING))
    if not bits.same_bits(head, embedding):
        raise WeightMismatchError(f"{HEAD} differs from {EMBEDDING}, to which it is tied")
