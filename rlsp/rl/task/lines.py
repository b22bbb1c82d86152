"""A file of lines of which only the places are held in memory, 16 bytes a line. No torch."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from rlsp.pretrained.folder import LFS_HINT, LFS_POINTER
from rlsp.rl.task.protocol import TaskError

MAX_LINE_BYTES: Final = 4 * 2**20
"""Longest line; what is longer is no row of prompts but another kind of file."""

_CHUNK_BYTES: Final = 2**22
_NEWLINE: Final = ord("\n")
_MAGIC: Final = {
    b"\x1f\x8b": "gzip-compressed: unpack it first (gzip -d)",
    b"\x28\xb5\x2f\xfd": "zstd-compressed: unpack it first (zstd -d)",
    b"\xfd7zXZ\x00": "xz-compressed: unpack it first (xz -d)",
    b"BZh": "bzip2-compressed: unpack it first (bzip2 -d)",
    b"PK\x03\x04": "a zip archive: unpack it first",
    b"PAR1": "a Parquet file: write its rows as JSON, one object a line",
    b"\xff\xfe": "UTF-16: write it as UTF-8",
    b"\xfe\xff": "UTF-16: write it as UTF-8",
    LFS_POINTER: LFS_HINT.removeprefix("is "),
}


@dataclass(frozen=True)
class Stamp:
    """What tells that a file is still the one that was indexed: device, inode, bytes, modification time."""

    device: int
    inode: int
    size: int
    modified_ns: int


@dataclass(frozen=True, eq=False)
class LineFile:
    """Lines by index; empty ones are left out and still counted in the line numbers.

    Attributes:
        path: The file.
        stamp: Its identity as it was indexed.
        sha256: Of all its bytes, 64 hex characters.
        starts: Offset of each line's first byte, int64.
        ends: Offset behind each line's last byte, without the newline, int64.
        numbers: Line numbers, from 1, int64; None where they are index + 1.
    """

    path: Path
    stamp: Stamp
    sha256: str
    starts: np.ndarray
    ends: np.ndarray
    numbers: np.ndarray | None

    @classmethod
    def scan(cls, path: Path) -> LineFile:
        """Index and hash a file in one pass.

        Raises:
            TaskError: It cannot be read, is no text, has no line or has one that is too long.
        """
        try:
            with _opened(path) as file:
                stamp = _stamp(path, os.fstat(file.fileno()))
                refuse_other_kinds(path, file.read(len(LFS_POINTER)))
                file.seek(0)
                digest, newlines, at, opened = hashlib.sha256(), [], 0, 0
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    found = np.flatnonzero(np.frombuffer(chunk, np.uint8) == _NEWLINE) + at
                    at += len(chunk)
                    newlines.append(found)
                    opened = int(found[-1]) + 1 if found.size else opened
                    if at - opened > MAX_LINE_BYTES:
                        raise _too_long(path, 1 + sum(map(len, newlines)))
        except OSError as error:
            raise unreadable(path, error) from error
        ends = np.concatenate([*newlines, [at] * (at > opened)]).astype(np.int64)
        starts = np.concatenate([[0][: ends.size], ends[:-1] + 1]).astype(np.int64)
        if (long := np.flatnonzero(ends - starts > MAX_LINE_BYTES)).size:
            raise _too_long(path, int(long[0]) + 1)
        return cls(path, stamp, digest.hexdigest(), starts, ends, None)._without_empty()

    @property
    def count(self) -> int:
        """Count the lines that are not empty."""
        return int(self.starts.size)

    def number(self, index: int) -> int:
        """Return the number of a line in the file, from 1."""
        return index + 1 if self.numbers is None else int(self.numbers[index])

    def where(self, index: int) -> str:
        """Name a line as a message does."""
        return f"{self.path}, line {self.number(index)}"

    def read(self, index: int) -> bytes:
        """Read a line, without its newline.

        Raises:
            TaskError: The file is no longer the one that was indexed.
        """
        try:
            with _opened(self.path) as file:
                if _stamp(self.path, os.fstat(file.fileno())) != self.stamp:
                    raise TaskError(f"{self.path}: was changed after this run had indexed it")
                start, end = int(self.starts[index]), int(self.ends[index])
                return os.pread(file.fileno(), end - start, start)
        except OSError as error:
            raise unreadable(self.path, error) from error

    def _without_empty(self) -> LineFile:
        lengths = self.ends - self.starts
        empty = lengths == 0
        for index in np.flatnonzero(lengths == 1):  # a line of Windows that holds nothing
            empty[index] = self.read(int(index)) == b"\r"
        if empty.all():
            raise TaskError(f"{self.path}: is empty: it needs at least one row")
        if not empty.any():
            return self
        kept = np.flatnonzero(~empty)
        return LineFile(self.path, self.stamp, self.sha256, self.starts[kept], self.ends[kept], kept + 1)


def first_lines(path: Path, count: int) -> list[tuple[int, bytes]]:
    """Read the first lines that are not empty, with their numbers from 1, without indexing the file.

    Raises:
        TaskError: The file cannot be read, is no text, has no line or one of these is too long.
    """
    lines: list[tuple[int, bytes]] = []
    try:
        with _opened(path) as file:
            _stamp(path, os.fstat(file.fileno()))
            refuse_other_kinds(path, file.read(len(LFS_POINTER)))
            file.seek(0)
            number = 0
            while len(lines) < count and (line := file.readline(MAX_LINE_BYTES + 2)):
                number += 1
                line = line.removesuffix(b"\n")
                if len(line) > MAX_LINE_BYTES:
                    raise _too_long(path, number)
                if line not in (b"", b"\r"):
                    lines.append((number, line))
    except OSError as error:
        raise unreadable(path, error) from error
    if not lines:
        raise TaskError(f"{path}: is empty: it needs at least one row")
    return lines


def refuse_other_kinds(path: Path, head: bytes) -> None:
    """Refuse what is known by its first bytes to be no text.

    Raises:
        TaskError: Saying what it is and what to do about it.
    """
    for magic, what in _MAGIC.items():
        if head.startswith(magic):
            raise TaskError(f"{path}: is {what}")


def unreadable(path: Path, error: OSError) -> TaskError:
    """Say why a file cannot be read."""
    return TaskError(f"{path}: cannot be read: {error.strerror or error}")


def _opened(path: Path) -> BinaryIO:
    """Open for reading at once, whatever it is: a pipe that nobody writes to is not waited for."""
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def _stamp(path: Path, status: os.stat_result) -> Stamp:
    if not stat.S_ISREG(status.st_mode):
        raise TaskError(f"{path}: is no regular file: rows are read by their place, again and again")
    return Stamp(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _too_long(path: Path, number: int) -> TaskError:
    return TaskError(f"{path}, line {number}: is longer than {MAX_LINE_BYTES // 2**20} MiB: one row a line")
