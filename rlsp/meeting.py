"""The place where the ranks of one machine meet: a folder under the temporary one, gone when its owner is.

The owner holds a lock on it, which the kernel gives up however the owner ends; whoever opens the next place
removes those that nobody holds. It is not in the run folder: torch takes it as a URL, which a path with `#`
or `?` breaks, and locks files there, which not every network file system can.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "rlsp-"
_LOCK_NAME = "owner.lock"


@contextmanager
def meeting_place() -> Iterator[str]:
    """Open a place and yield it as torch.distributed takes it (file://…); it goes with the context.

    Raises:
        OSError: The temporary folder cannot be written.
    """
    top = Path(tempfile.gettempdir())
    _remove_abandoned(top)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=top))
    try:
        descriptor = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Whoever cleans up at this very moment holds it for as long as removing this takes.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            folder.mkdir(mode=0o700, exist_ok=True)
            yield f"file://{folder}/store"
        finally:
            os.close(descriptor)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(top: Path) -> None:
    """Remove the places whose owners are gone; those of other users stay."""
    for lock in top.glob(f"{_PREFIX}*/{_LOCK_NAME}"):
        with suppress(OSError):
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an owner's lock makes this fail
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)
