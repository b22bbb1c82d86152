"""The tensors of a GGUF file under transformers' names, dequantised by slices. Needs the package gguf."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rlsp.config import ModelConfig
from rlsp.pretrained.gguf import GgufTensor, read_head
from rlsp.pretrained.names import EMBEDDING, HEAD, misfits

_AT_ONCE = 1 << 22
"""Elements that are dequantised at a time: 16 MiB of float32."""

_NAMES = {"token_embd.weight": EMBEDDING, "output.weight": HEAD, "output_norm.weight": "model.norm.weight"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_INTERLEAVED = ("self_attn.q_proj.weight", "self_attn.k_proj.weight")


def gguf_lines(file: Path, model: ModelConfig) -> list[str]:
    """List what is wrong with a file's tensors, from its head alone."""
    if importlib.util.find_spec("gguf") is None:
        return [f"{file.name}: needs `pip install 'rlsp[gguf]'`"]
    table = _table(file)
    lines = misfits({name: tensor.shape for name, tensor in table.items()}, model)
    size = file.stat().st_size
    for name, tensor in table.items():
        if tensor.kind not in set(_gguf().GGMLQuantizationType):
            lines.append(f"{name}: its quantisation, number {tensor.kind}, is unknown to the package gguf")
        elif tensor.offset + _row_bytes(tensor) * _rows(tensor) > size:
            lines.append(f"{file.name}: is torn: {name} ends after the file")
    return lines


class GgufSlices:
    """Slices of a file's tensors, float32; a read dequantises the blocks that it touches and no others."""

    def __init__(self, file: Path, model: ModelConfig) -> None:
        """Read the head, not the tensors."""
        self._table = _table(file)
        self._bytes = np.memmap(file, dtype=np.uint8, mode="r")
        # llama.cpp keeps the pairs that RoPE turns side by side in Llama's queries and keys, not in Qwen3's.
        self._head_dim = None if model.qk_norm else model.head_dim

    def pieces(self, name: str, dim: int, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yield the indices start … stop of a tensor's dimension `dim`, some rows at a time, in order.

        Queries and keys are read by whole heads.
        """
        tensor = self._table[name]
        if start == stop:
            return
        if len(tensor.shape) == 1:
            yield self._cells(tensor, (0, 1), (start, stop))[0]
            return
        rows, columns = (
            ((start, stop), (0, tensor.shape[1])) if dim == 0 else ((0, tensor.shape[0]), (start, stop))
        )
        step = max(1, _AT_ONCE // (columns[1] - columns[0]))
        twined = self._head_dim if name.endswith(_INTERLEAVED) else None
        if twined is not None:
            step = max(1, step // twined) * twined
        for first in range(rows[0], rows[1], step):
            cells = self._cells(tensor, (first, min(first + step, rows[1])), columns)
            yield cells if twined is None else _untwined(cells, twined)

    def _cells(self, tensor: GgufTensor, rows: tuple[int, int], columns: tuple[int, int]) -> np.ndarray:
        """Dequantise the blocks of some rows that have some columns, and cut these out."""
        block, size = _gguf().GGML_QUANT_SIZES[tensor.kind]
        first, last = columns[0] // block, -(-columns[1] // block)
        count, per_row = rows[1] - rows[0], tensor.shape[-1] // block
        begin = tensor.offset + rows[0] * per_row * size
        raw = self._bytes[begin : begin + count * per_row * size].reshape(count, per_row, size)
        own = _typed(raw[:, first:last].reshape(count, -1), tensor.kind)
        found: np.ndarray = _gguf().dequantize(own, _gguf().GGMLQuantizationType(tensor.kind))
        return found[:, columns[0] - first * block : columns[1] - first * block].astype(
            np.float32, copy=False
        )


def _untwined(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Lay each head's first elements of all pairs before the second ones, as transformers has them."""
    pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _table(file: Path) -> dict[str, GgufTensor]:
    return {_renamed(name): tensor for name, tensor in read_head(file).tensors.items()}


def _renamed(name: str) -> str:
    """Give a tensor transformers' name; one that is not known keeps its own, and is refused by it."""
    block, _, rest = name.removeprefix("blk.").partition(".")
    source = _LAYER_NAMES.get(rest.removesuffix(".weight"))
    if name.startswith("blk.") and source is not None:
        return f"model.layers.{block}.{source}.weight"
    return _NAMES.get(name, name)


def _rows(tensor: GgufTensor) -> int:
    return tensor.shape[0] if len(tensor.shape) > 1 else 1


def _row_bytes(tensor: GgufTensor) -> int:
    block, size = _gguf().GGML_QUANT_SIZES[tensor.kind]
    return int(tensor.shape[-1] // block * size)


def _typed(raw: np.ndarray, kind: int) -> np.ndarray:
    """View bytes as the package gguf wants them: unquantised ones as the floats that they are."""
    kinds = _gguf().GGMLQuantizationType
    plain = {kinds.F32: np.float32, kinds.F16: np.float16}
    return raw.view(plain[kind]) if kind in plain else raw


def _gguf() -> Any:
    import gguf

    return gguf
