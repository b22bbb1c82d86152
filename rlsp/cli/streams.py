"""Standard streams that outlive their readers: a closed pipe or a full disk silences a command."""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_STREAMS = (("stdout", 1, "replace"), ("stderr", 2, "backslashreplace"))


class _Steady(io.FileIO):
    """Write to a descriptor until that fails; then discard, and let child processes discard, too."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return memoryview(data).nbytes


def steady_streams() -> None:
    """Keep stdout and stderr of this process from ever raising; what cannot be written is dropped.

    Descriptors that were closed at the start are opened on /dev/null, so that no file takes their numbers.
    A stream that something else has put in place is left alone.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    for name, descriptor, errors in _STREAMS:
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):
            raw = io.BufferedWriter(_Steady(descriptor, "w", closefd=False))
            encoding = stream.encoding if stream is not None else "utf-8"
            setattr(sys, name, io.TextIOWrapper(raw, encoding, errors, line_buffering=True))
