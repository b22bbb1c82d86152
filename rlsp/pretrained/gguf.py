"""The head of a GGUF file: what llama.cpp says of a model before its tensors.

The package gguf reads it, too, but takes seconds over a vocabulary, and transformers' loader calls it several
times: a minute for 135 M parameters. Source of the format: ggml's docs/gguf.md, versions 2 and 3,
little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rlsp.pretrained.architecture import PretrainedError

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_MAX_LENGTH = 1 << 28
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies.

    Attributes:
        shape: As torch has it: rows first.
        kind: ggml's number of its quantisation.
        offset: First byte, from the start of the file.
    """

    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class GgufHead:
    """What stands before the tensors: fields (an array only by its length), the tensors, and its size."""

    fields: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    bytes: int


def read_head(path: Path, *, arrays: bool = False) -> GgufHead:
    """Read the head of a file; `arrays` also reads what stands in arrays, such as a vocabulary.

    Raises:
        PretrainedError: It cannot be read or is no whole GGUF head.
    """
    try:
        with path.open("rb") as file:
            return _head(file, arrays)
    except OSError as error:
        raise PretrainedError([f"{path.name}: cannot be read: {error.strerror}"]) from error
    except (struct.error, UnicodeDecodeError, ValueError, KeyError) as error:
        raise PretrainedError([f"{path.name}: is no GGUF file of version 2 or 3, or is torn"]) from error


def described(head: GgufHead) -> dict[str, Any]:
    """Write what a GGUF file says of its model as a config.json would, so that one place judges both."""
    named = head.fields.get("general.architecture")
    own = {
        key.removeprefix(f"{named}."): value
        for key, value in head.fields.items()
        if key.startswith(f"{named}.")
    }
    keys = {
        "num_hidden_layers": "block_count",
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length" if "attention.key_length" in own else "rope.dimension_count",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "max_position_embeddings": "context_length",
    }
    found = {ours: own[theirs] for ours, theirs in keys.items() if theirs in own}
    for name in ("bos", "eos", "padding"):
        if (token := head.fields.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            found[f"{name[:3]}_token_id"] = token
    if (table := head.tensors.get("token_embd.weight")) is not None:
        found["vocab_size"] = table.shape[0]
    return {
        "architectures": [_ARCHITECTURES.get(str(named), f"GGUF's {named}")],
        **found,
        "tie_word_embeddings": "output.weight" not in head.tensors,
        "attention_bias": any(name.endswith("attn_q.bias") for name in head.tensors),
        "rope_parameters": _rope(head, own),
    }


def _rope(head: GgufHead, own: Mapping[str, Any]) -> dict[str, Any]:
    kind = own.get("rope.scaling.type", "none")
    if "rope_freqs.weight" in head.tensors:
        kind = "a table of factors (rope_freqs.weight)"  # transformers would drop it
    said = {
        "rope_theta": own.get("rope.freq_base", 10000.0),
        "rope_type": "default" if kind == "none" else kind,
    }
    factor = own.get("rope.scaling.factor")
    return said if factor is None else {**said, "factor": factor}


def _head(file: BinaryIO, arrays: bool) -> GgufHead:
    if file.read(4) != _MAGIC or _scalar(file, 4) not in (2, 3):
        raise ValueError("not GGUF")
    tensors, fields = _scalar(file, 10), _scalar(file, 10)
    known = {_string(file): _value(file, _scalar(file, 4), arrays) for _ in range(fields)}
    found = [_tensor(file) for _ in range(tensors)]
    alignment = known.get("general.alignment", 32)
    begin = -(-file.tell() // alignment) * alignment
    placed = {name: GgufTensor(shape, kind, begin + offset) for name, shape, kind, offset in found}
    return GgufHead(known, placed, file.tell())


def _tensor(file: BinaryIO) -> tuple[str, tuple[int, ...], int, int]:
    name = _string(file)
    inner_first = [_scalar(file, 10) for _ in range(_scalar(file, 4))]
    return name, tuple(reversed(inner_first)), _scalar(file, 4), _scalar(file, 10)


def _value(file: BinaryIO, kind: int, arrays: bool) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind != _ARRAY:
        return _scalar(file, kind)
    of, length = _scalar(file, 4), _scalar(file, 10)
    if arrays:
        return [_value(file, of, arrays) for _ in range(length)]
    if of in (_STRING, _ARRAY):
        for _ in range(length):
            _value(file, of, arrays)
    else:
        file.seek(length * struct.calcsize(_SCALARS[of]), 1)
    return length


def _string(file: BinaryIO) -> str:
    length = _scalar(file, 10)
    if length > _MAX_LENGTH:
        raise ValueError("a text longer than any file")
    text = file.read(length)
    if len(text) != length:
        raise ValueError("torn")
    return text.decode()


def _scalar(file: BinaryIO, kind: int) -> Any:
    form = f"<{_SCALARS[kind]}"
    return struct.unpack(form, file.read(struct.calcsize(form)))[0]
