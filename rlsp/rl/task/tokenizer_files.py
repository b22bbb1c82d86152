"""Find a tokenizer's files and read them: a folder with tokenizer.json, or a GGUF file. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rlsp.pretrained.architecture import PretrainedError
from rlsp.pretrained.folder import LFS_HINT, gguf_file, is_lfs_pointer, located
from rlsp.pretrained.gguf import GgufHead, described, read_head
from rlsp.rl.task.chat import ChatTemplate
from rlsp.rl.task.gguf import backend_of
from rlsp.rl.task.hugging_face import HuggingFaceTokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_MAIN: Final = "tokenizer.json"
_OTHERS: Final = ("tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_SPECIAL: Final = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class TokenizerFilesError(ValueError):
    """A tokenizer's files cannot be used; the message names the file and says why."""


@dataclass(frozen=True)
class Source:
    """What a tokenizer's files hold.

    Attributes:
        backend: Encodes and decodes.
        special: Special tokens by the names that templates know: `bos_token`, `eos_token`, …
        template: The chat template; None if there is none.
        eos_ids: End a response by what the files say.
        prefix: What the tokenizer puts in front of a text.
    """

    backend: Backend
    special: Mapping[str, str]
    template: str | None
    eos_ids: tuple[int, ...]
    prefix: tuple[int, ...]

    def open(self, eos_ids: Sequence[int], template: ChatTemplate | None) -> HuggingFaceTokenizer:
        """Make the tokenizer: it pads with its own padding, or the first EOS where it has none."""
        pad = self.backend.token_to_id(self.special["pad_token"]) if "pad_token" in self.special else None
        padding = next(iter(eos_ids), 0) if pad is None else pad
        return HuggingFaceTokenizer(self.backend, tuple(eos_ids), padding, self.prefix, template)


def holds_tokenizer(path: str) -> bool:
    """Tell whether a checkpoint comes with a tokenizer, readable or not; raise as `read_source` does."""
    place = _located(path)
    return _gguf_file(place) is not None or any((place / name).exists() for name in (_MAIN, *_OTHERS))


def stated_eos(path: str) -> tuple[int, ...]:
    """Return the ids that end a response by what a checkpoint says, not its tokenizer; maybe none.

    Raises:
        TokenizerFilesError: It cannot be read, or says something else.
    """
    place = _located(path)
    if (file := _gguf_file(place)) is not None:
        return _ids_of(described(_head_of(file)), file)
    for name in ("generation_config.json", "config.json"):
        if ids := _ids_of(_json(place / name), place / name):
            return ids
    return ()


def read_source(path: str) -> Source:
    """Read a tokenizer.

    Raises:
        TokenizerFilesError: It is not there or cannot be used.
    """
    place = _located(path)
    file = _gguf_file(place)
    try:
        return _read_folder(place) if file is None else _read_gguf(file)
    except TokenizerFilesError:
        raise
    except OSError as error:
        raise TokenizerFilesError(f"{error.filename or path}: cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TokenizerFilesError(
            f"{path}: its files are not laid out as a tokenizer's: {error!r}"
        ) from error


def _located(path: str) -> Path:
    try:
        return located(path)
    except PretrainedError as error:
        raise TokenizerFilesError(f"{path}: {'; '.join(error.lines)}") from error


def _gguf_file(place: Path) -> Path | None:
    """Name the GGUF file at a place that has no tokenizer.json."""
    try:
        return None if (place / _MAIN).exists() else gguf_file(place)
    except PretrainedError as error:
        raise TokenizerFilesError(f"{place}: {'; '.join(error.lines)}") from error


def _head_of(file: Path, *, arrays: bool = False) -> GgufHead:
    try:
        return read_head(file, arrays=arrays)
    except PretrainedError as error:
        raise TokenizerFilesError(f"{file.parent}: {'; '.join(error.lines)}") from error


def _ids_of(stated: Mapping[str, Any], file: Path) -> tuple[int, ...]:
    value = stated.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise TokenizerFilesError(f"{file}: eos_token_id={value}: legal: token ids")
    return tuple(ids)


def _read_gguf(path: Path) -> Source:
    header = _head_of(path, arrays=True).fields
    try:
        backend = backend_of(header)
    except (ValueError, KeyError) as error:
        raise TokenizerFilesError(f"{path}: {error}") from error
    ids = {name: header.get(f"tokenizer.ggml.{key}_token_id") for name, key in _GGUF_NAMES.items()}
    tokens = {name: backend.id_to_token(token) for name, token in ids.items() if token is not None}
    special = {name: token for name, token in tokens.items() if token is not None}
    eos, bos = ids["eos_token"], ids["bos_token"]
    prefix = (bos,) if header.get("tokenizer.ggml.add_bos_token") and bos is not None else ()
    template = header.get("tokenizer.chat_template")
    return Source(backend, special, template, () if eos is None else (eos,), prefix)


_GGUF_NAMES: Final = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",
    "pad_token": "padding",
}


def _read_folder(folder: Path) -> Source:
    from tokenizers import Tokenizer

    path = folder / _MAIN
    if not path.exists():
        raise TokenizerFilesError(
            f"{folder}: has no {_MAIN}; `transformers` writes one: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # the library's own are of no narrower type
        raise TokenizerFilesError(f"{path}: {LFS_HINT if is_lfs_pointer(path) else error}") from error
    # A file may say so, for training batches: a prompt is neither cut nor filled.
    backend.no_truncation()
    backend.no_padding()
    config = {**_json(folder / "special_tokens_map.json"), **_json(folder / "tokenizer_config.json")}
    _add_tokens(backend, config, folder)
    special = _special_tokens(config)
    eos = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    ids = dict.fromkeys([*([] if eos is None else [eos]), *stated_eos(str(folder))])
    return Source(backend, special, _template(folder, config), tuple(ids), _prefix(backend))


def _add_tokens(backend: Backend, config: Mapping[str, Any], folder: Path) -> None:
    """Add what tokenizer_config.json knows beyond tokenizer.json, each under its id."""
    from tokenizers import AddedToken

    known = backend.get_added_tokens_decoder()
    for key, fields in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda pair: int(pair[0])):
        if int(key) in known and known[int(key)].content == fields["content"]:
            continue
        token = AddedToken(**fields)
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        if backend.token_to_id(token.content) != int(key):
            raise TokenizerFilesError(
                f"{folder / 'tokenizer_config.json'}: token {token.content} has the id {key} there and "
                f"{backend.token_to_id(token.content)} in {_MAIN}"
            )


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in (f"{key}_token" for key in _SPECIAL):
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Find the chat template: in a file of its own, or in tokenizer_config.json; of several the default."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    stated = config.get("chat_template")
    if isinstance(stated, list):
        return next((each["template"] for each in stated if each.get("name") == "default"), None)
    return stated if isinstance(stated, str) else None


def _prefix(backend: Backend) -> tuple[int, ...]:
    """Find what the tokenizer puts in front of a text; what it puts behind one would end a prompt."""
    plain = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    places = range(len(full) - len(plain) + 1)
    start = next((at for at in places if full[at : at + len(plain)] == plain), 0)
    return tuple(full[:start])


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerFilesError(f"{path}: is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerFilesError(f"{path}: is no JSON object")
    return value
