"""How a command that answers a question prints and ends, whatever becomes of the place that it prints to."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable

from rich.console import Console

UNUSABLE = 2
_INTERRUPTED = 130
# A file or a pipe is no screen: nothing is wrapped there.
_UNBOUNDED = 1 << 16


def answer(program: str, work: Callable[[Console], int]) -> int:
    """Let `work` write its answer into memory, print it, and return the exit status.

    Args:
        program: The command's name, for messages.
        work: Writes to the console that it is given, and returns the status of what it found.

    Returns:
        The status of `work`, also where the reader went away before the end (`| head -1`); 2 where the answer
        could not be written, 130 where it was interrupted.
    """
    _escape_what_has_no_code()
    memory = io.StringIO()
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    console = Console(
        file=memory,
        highlight=False,
        force_terminal=on_terminal,
        width=None if on_terminal else _UNBOUNDED,
    )
    try:
        status = work(console)
    except KeyboardInterrupt:
        complain(f"{program}: interrupted")
        return _INTERRUPTED
    except SystemExit as end:
        # argparse has printed its help to stdout, or a complaint to stderr.
        raise SystemExit(_deliver(program, "", end.code if isinstance(end.code, int) else UNUSABLE)) from None
    text = memory.getvalue()
    if not on_terminal:
        text = "".join(f"{line.rstrip()}\n" for line in text.split("\n")[:-1])
    return _deliver(program, text, status)


def complain(message: str) -> None:
    """Print a line to stderr, if there is one."""
    with contextlib.suppress(OSError, ValueError):
        print(message, file=sys.stderr, flush=True)


def _escape_what_has_no_code() -> None:
    """Let a word or a name that the encoding of stdout or stderr lacks be shown escaped."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _deliver(program: str, text: str, status: int) -> int:
    if sys.stdout is None:
        return status
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        _abandon_stdout()
    except OSError as error:
        _abandon_stdout()
        complain(f"{program}: the answer cannot be written: {error.strerror or error}")
        return UNUSABLE
    return status


def _abandon_stdout() -> None:
    """Send what is left in the buffer nowhere, or the interpreter complains as it ends."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
