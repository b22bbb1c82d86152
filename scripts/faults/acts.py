"""What a plant does in the rank whose turn it is."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

FILLER = "filler"
GO = ".go"
_GO_LIMIT_S = 60.0
_BLOCK_BYTES = 1 << 16
_ROOM_BYTES = 64 << 20
_TWICE_S = 0.3


class PlantedError(RuntimeError):
    """Is raised on purpose."""


def parent(pid: int) -> int:
    """Return the process that started another."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _send(number: signal.Signals, generations: int, _run_dir: Path) -> None:
    pid = os.getpid()
    for _ in range(generations):
        pid = parent(pid)
    os.kill(pid, number)


def _twice(run_dir: Path) -> None:
    _send(signal.SIGINT, 2, run_dir)
    time.sleep(_TWICE_S)
    _send(signal.SIGINT, 2, run_dir)


def _stop_host(run_dir: Path) -> None:
    """Stop the host, and work no more: ranks that nobody watches would end the run before that is seen."""
    _send(signal.SIGSTOP, 1, run_dir)
    time.sleep(_GO_LIMIT_S)


def _note(_run_dir: Path) -> None:
    """Do nothing: the fault is elsewhere, as in the reward function."""


def _raise(_run_dir: Path) -> None:
    raise PlantedError("planted")


def _disagree(_run_dir: Path) -> None:
    """Call the next collective that has other ranks by another name than they do."""
    from rlsp.groups import Group, Ledger, Trail

    enter = Ledger.enter

    def other(self: Ledger, group: Group, operation: str, signature: str) -> Trail:
        if group.size == 1:
            return enter(self, group, operation, signature)
        patch.stop()
        return enter(self, group, operation, f"{signature} planted")

    patch = mock.patch.object(Ledger, "enter", other)
    patch.start()


def _exhaust(_run_dir: Path) -> None:
    """Need more memory than there is: the address space is limited to what is used, and some more."""
    import torch

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _ROOM_BYTES, resource.RLIM_INFINITY))
    torch.empty(16 * _ROOM_BYTES, dtype=torch.uint8)


def _limit_files(_run_dir: Path) -> None:
    """Let no file of this process grow any more."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def _fill(run_dir: Path) -> None:
    """Leave no room on the disk that the run folder is on."""
    with (run_dir.parent / FILLER).open("wb", buffering=0) as file:
        try:
            while file.write(bytes(_BLOCK_BYTES)):
                pass
        except OSError:
            return


def _forbid(run_dir: Path) -> None:
    """Let nobody make, replace or remove a file of the run."""
    for folder in (run_dir, *(path for path in run_dir.rglob("*") if path.is_dir())):
        folder.chmod(0o555)


def _wait(run_dir: Path) -> None:
    """Let others act while this rank stands still."""
    until_s = time.monotonic() + _GO_LIMIT_S
    while not run_dir.with_name(run_dir.name + GO).exists() and time.monotonic() < until_s:
        time.sleep(0.01)


ACTS: dict[str, Callable[[Path], None]] = {
    "kill": partial(_send, signal.SIGKILL, 0),
    "stop": partial(_send, signal.SIGSTOP, 0),
    "kill host": partial(_send, signal.SIGKILL, 1),
    "stop host": _stop_host,
    "kill owner": partial(_send, signal.SIGKILL, 2),
    "SIGINT": partial(_send, signal.SIGINT, 2),
    "SIGTERM": partial(_send, signal.SIGTERM, 2),
    "SIGHUP": partial(_send, signal.SIGHUP, 2),
    "SIGINT twice": _twice,
    "raise": _raise,
    "disagree": _disagree,
    "exhaust": _exhaust,
    "limit files": _limit_files,
    "fill": _fill,
    "forbid": _forbid,
    "wait": _wait,
    "note": _note,
}
"""Signals go to the rank itself, to the host of the ranks, or to the process that owns the run."""
