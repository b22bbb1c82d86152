"""The tokenizer that a GGUF file holds, built from its head. No torch, and no `transformers`.

`transformers` builds it, too, with the package gguf: in 9 s for 49,152 tokens, in every process, and without
the way of cutting text that the file states (`tokenizer.ggml.pre`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_CONTROL, _USER_DEFINED = 3, 4
_QWEN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def backend_of(header: Mapping[str, Any]) -> Backend:
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
