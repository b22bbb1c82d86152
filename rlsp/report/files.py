"""Files of a run folder: written whole or not at all, hashed, and listed."""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

PARTIAL_SUFFIX = ".partial"
VERDICT_NAME = "VERDICT.json"
# Both are still being written when the verdict is sealed.
_UNSEALED_FOLDERS = frozenset({"logs", "wandb"})
_BLOCK_BYTES = 1 << 20


class EvidenceError(RuntimeError):
    """Evidence that cannot be written, or that does not say what it must say."""


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` by `content`, so that a reader sees the old file or the new one and never a part.

    Raises:
        EvidenceError: The content could not be written (full disk, no permission); the old file is untouched.
    """
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise EvidenceError(f"cannot write {path}: {error.strerror or error}") from error


def _sync_folder(folder: Path) -> None:
    """Make the rename in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_bytes(content: bytes) -> str:
    """Hash bytes; 64 hex characters."""
    return hashlib.sha256(content).hexdigest()


def sha256_file(path: Path) -> str:
    """Hash a file's content in blocks; 64 hex characters."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def json_safe(value: Any) -> Any:
    """Return `value` with non-finite floats as the strings "NaN", "Infinity" and "-Infinity".

    JSON has no such numbers, and a bare NaN makes a file that other readers refuse.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return value


def canonical_json(value: Any) -> bytes:
    """Encode `value` in the one form that is hashed: sorted keys, no blanks, ASCII, no bare NaN."""
    return json.dumps(json_safe(value), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def artifact_paths(run_dir: Path) -> tuple[str, ...]:
    """List the files that the verdict seals, as sorted POSIX paths relative to `run_dir`.

    Everything counts except logs/, wandb/ and the verdict itself.
    """
    found = []
    for folder, folders, names in os.walk(run_dir):
        here = Path(folder)
        if here == run_dir:
            folders[:] = [name for name in folders if name not in _UNSEALED_FOLDERS]
        for name in names:
            path = here / name
            if path.is_file() and path != run_dir / VERDICT_NAME:
                found.append(path.relative_to(run_dir).as_posix())
    return tuple(sorted(found))


def remove_partials(run_dir: Path) -> None:
    """Delete what a process that was killed while writing left half-written."""
    for path in artifact_paths(run_dir):
        if path.endswith(PARTIAL_SUFFIX):
            (run_dir / path).unlink()
    run_dir.joinpath(VERDICT_NAME + PARTIAL_SUFFIX).unlink(missing_ok=True)
