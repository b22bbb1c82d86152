"""The console scripts. Nothing heavy is imported here: Ctrl-C is answered from the first moment on."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rlsp.cli.streams import steady_streams

_INTERRUPTED = 1


def main() -> int:
    """Run `rlsp` with the command line in `sys.argv` and return the exit status."""

    def command() -> int:
        from rlsp.cli.app import run_command

        return run_command()

    return _guarded("rlsp", command)


def compare() -> int:
    """Run `rlsp-compare` with the command line in `sys.argv` and return the exit status."""

    def command() -> int:
        from rlsp.cli import compare

        return compare.main()

    return _guarded("rlsp-compare", command)


def verify() -> int:
    """Run `rlsp-verify` with the command line in `sys.argv` and return the exit status."""

    def command() -> int:
        from rlsp.cli import verify

        return verify.main()

    return _guarded("rlsp-verify", command)


def publish() -> int:
    """Run `rlsp-publish` with the command line in `sys.argv` and return the exit status."""

    def command() -> int:
        from rlsp.cli import publish

        return publish.main()

    return _guarded("rlsp-publish", command)


def _guarded(name: str, command: Callable[[], int]) -> int:
    steady_streams()
    try:
        with _interruptible():
            return command()
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
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
