"""The tokenizer that a GGUF file holds, from its header alone. No torch.

`transformers` can read it too, through the package `gguf`: with 9 s for 49,152 tokens, and torch, in every
process. This takes a fraction of a second. Layout: the GGUF specification, versions 2 and 3.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_SCALARS: Final = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_CONTROL, _USER_DEFINED = 3, 4
_QWEN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_header(path: Path) -> dict[str, Any]:
    """Read all keys and values that stand in front of a GGUF file's tensors.

    Raises:
        ValueError: The file is no GGUF, is cut, or has a layout that is not known.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != _MAGIC:
            raise ValueError("is no GGUF file")
        reader = _Reader(data, 4)
        try:
            if (version := reader.scalar("<I")) not in _VERSIONS:
                raise ValueError(f"is GGUF version {version}: legal: 2 or 3, little-endian")
            _, count = reader.scalar("<Q"), reader.scalar("<Q")
            return {reader.text(): reader.value(reader.scalar("<I")) for _ in range(count)}
        except (struct.error, KeyError, UnicodeDecodeError) as error:
            raise ValueError(f"has a header that cannot be read: {error!r}") from error


@dataclass
class _Reader:
    data: mmap.mmap
    at: int

    def scalar(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return value

    def text(self) -> str:
        length = self.scalar("<Q")
        raw = self.data[self.at : self.at + length]
        if len(raw) < length:
            raise struct.error("a text reaches beyond the end of the file")
        self.at += length
        return raw.decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            inner, count = self.scalar("<I"), self.scalar("<Q")
            return [self.value(inner) for _ in range(count)]
        return self.scalar(_SCALARS[kind])


def backend_of(header: dict[str, Any]) -> Backend:
    """Build a byte-level BPE tokenizer.

    Raises:
        ValueError: The file holds another kind of tokenizer, or none.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    kind = header.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ValueError(f"has tokenizer.ggml.model={kind}: legal: gpt2, byte-level BPE")
    tokens: list[str] = header["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ", 1)) for pair in header["tokenizer.ggml.merges"]]
    vocabulary = {token: place for place, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    split = header.get("tokenizer.ggml.pre", "default")
    backend.pre_tokenizer = _splitter(split)
    if split == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    kinds = header.get("tokenizer.ggml.token_type", [])
    for token, what in zip(tokens, kinds, strict=False):
        if what == _CONTROL:
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif what == _USER_DEFINED:
            backend.add_tokens([AddedToken(token, special=False, normalized=False)])
    return backend


def _splitter(name: str) -> Any:
    """Return how text is cut before pairs are merged, by the name that llama.cpp has for it."""
    from tokenizers import Regex, pre_tokenizers

    match name:
        case "smollm":
            digits = pre_tokenizers.Digits(individual_digits=True)
            return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        case "qwen2":
            cut = pre_tokenizers.Split(Regex(_QWEN), "isolated")
            raw = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            return pre_tokenizers.Sequence([cut, raw])
        case "gpt-2":
            return pre_tokenizers.ByteLevel(add_prefix_space=False)
    raise ValueError(f"has tokenizer.ggml.pre={name}: legal: smollm, qwen2 or gpt-2")
