"""The console script `rlsp`. Nothing heavy is imported here: Ctrl-C is answered from the first moment on."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rlsp.cli.streams import steady_streams

_INTERRUPTED = 1


def main() -> int:
    """Run the command line in `sys.argv` and return the exit status."""
    steady_streams()
    try:
        with _interruptible():
            from rlsp.cli.app import run_command

            return run_command()
    except KeyboardInterrupt:
        print("rlsp: interrupted", file=sys.stderr)
        return _INTERRUPTED


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM and SIGHUP interrupt as Ctrl-C does, where nothing else was asked for."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    taken = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
