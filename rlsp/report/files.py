"""Files of a run folder: written whole or not at all, hashed, and listed."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

PARTIAL_SUFFIX = ".partial"
VERDICT_NAME = "VERDICT.json"
# Both are still being written when the verdict is sealed.
_UNSEALED_FOLDERS = frozenset({"logs", "wandb"})
_BLOCK_BYTES = 1 << 20
_SHOWN_CHARACTERS = 400
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFDIR: "a folder",
}


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
        sync(path.parent)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise EvidenceError(f"cannot write {path}: {error.strerror or error}") from error


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_bytes(content: bytes) -> str:
    """Hash bytes; 64 hex characters."""
    return hashlib.sha256(content).hexdigest()


def sha256_file(path: Path) -> str:
    """Hash a regular file's content in blocks; 64 hex characters.

    Raises:
        OSError: The file cannot be read, or is none.
    """
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; what is no regular file (a link, a pipe, a device) is never opened.

    Raises:
        OSError: The file cannot be opened, or is no regular one.
    """
    try:
        _require_regular(path.lstat().st_mode)
    except ValueError as error:
        raise OSError(errno.EINVAL, "no file can have this name") from error
    # What was put in its place meanwhile is neither followed nor waited for.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _require_regular(os.fstat(descriptor).st_mode)
        return os.fdopen(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


def read_regular(path: Path) -> bytes:
    """Return a regular file's content.

    Raises:
        OSError: The file cannot be read, or is none.
    """
    with open_regular(path) as file:
        return file.read()


def _require_regular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"it is {_kind(mode)} and no regular file")


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "of an unknown kind")


def shown(text: str) -> str:
    """Return `text` as it may be printed: no control characters, no broken Unicode, of bounded length."""
    cut = text[:_SHOWN_CHARACTERS] + (" …" if len(text) > _SHOWN_CHARACTERS else "")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


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


def as_number(value: object) -> float | None:
    """Read a number back that `json_safe` may have written as a string; None for what is no number."""
    if isinstance(value, int | float) or value in ("NaN", "Infinity", "-Infinity"):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    return None


def canonical_json(value: Any) -> bytes:
    """Encode `value` in the one form that is hashed: sorted keys, no blanks, ASCII, no bare NaN."""
    return json.dumps(json_safe(value), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


@dataclass(frozen=True)
class Contents:
    """What lies in a run folder besides logs/, wandb/ and the verdict itself.

    Attributes:
        files: Regular files, as sorted POSIX paths relative to the folder.
        empty: Folders with nothing in them, likewise.
        faults: What can be no evidence: links, pipes, sockets, devices, names that are not UTF-8, folders
            that cannot be listed.
    """

    files: tuple[str, ...]
    empty: tuple[str, ...]
    faults: tuple[str, ...]


def list_contents(run_dir: Path) -> Contents:
    """List a run folder without opening anything in it and without following a link."""
    files: list[str] = []
    empty: list[str] = []
    faults: list[str] = []
    pending = [""]
    while pending:
        folder = pending.pop()
        try:
            with os.scandir(run_dir / folder) as found:
                modes = {entry.name: entry.stat(follow_symlinks=False).st_mode for entry in found}
        except OSError as error:
            faults.append(f"{shown(folder) or 'the folder'} cannot be listed: {error.strerror or error}")
            continue
        if folder and not modes:
            empty.append(folder)
        for name, mode in modes.items():
            path = f"{folder}/{name}" if folder else name
            if path in _UNSEALED_FOLDERS:
                continue
            if not _is_utf8(name):
                faults.append(f"{shown(path)} has a name that is not UTF-8")
            elif stat.S_ISDIR(mode) and path != VERDICT_NAME:
                pending.append(path)
            elif not stat.S_ISREG(mode):
                faults.append(f"{shown(path)} is {_kind(mode)} and no regular file")
            elif path != VERDICT_NAME:
                files.append(path)
    return Contents(tuple(sorted(files)), tuple(sorted(empty)), tuple(sorted(faults)))


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def artifact_paths(run_dir: Path) -> tuple[str, ...]:
    """List the files that the verdict seals, as sorted POSIX paths relative to `run_dir`.

    Every regular file counts except those in logs/ and wandb/ and the verdict itself.
    """
    return list_contents(run_dir).files


def remove_partials(run_dir: Path) -> None:
    """Delete what a process that was killed while writing left half-written."""
    for path in artifact_paths(run_dir):
        if path.endswith(PARTIAL_SUFFIX):
            (run_dir / path).unlink()
    run_dir.joinpath(VERDICT_NAME + PARTIAL_SUFFIX).unlink(missing_ok=True)
