"""A process of its own that answers lines: foreign code that may hang, crash or print. No torch."""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Final

_HANG_UP_S: Final = 2.0
_STACK_S: Final = 0.2  # for a stack to be written before the kill


class ProcessEndedError(Exception):
    """The process hung up or ended; the message says how, in words that follow its name."""


class LineProcess:
    """Start a process and exchange lines with it; no wait is longer than was asked for."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, log: Path | None = None
    ) -> None:
        """Start it, at the head of a process group of its own.

        Args:
            command: Reads lines from its stdin and answers on its stdout.
            environment: Its environment; this process's if None.
            log: Takes its stderr, at the end; this process's if None.
        """
        with nullcontext() if log is None else log.open("ab") as errors:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=None if environment is None else dict(environment),
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._pipes = self._process.stdin, self._process.stdout
        for pipe in self._pipes:
            os.set_blocking(pipe.fileno(), False)
        self._unsent = self._unread = b""

    def send(self, line: str) -> None:
        """Have a line sent as the next answer is waited for."""
        self._unsent += f"{line}\n".encode()

    def receive(self, within_s: float) -> str | None:
        """Wait for a line; None if time is up before.

        Raises:
            ProcessEndedError: There will be none.
        """
        until_s = time.monotonic() + within_s
        to, from_ = (pipe.fileno() for pipe in self._pipes)
        while b"\n" not in self._unread:
            left_s = max(until_s - time.monotonic(), 0.0)
            readable, writable, _ = select.select([from_], [to] if self._unsent else [], [], left_s)
            if not readable and not writable:
                return None
            try:
                if writable:
                    self._unsent = self._unsent[os.write(to, self._unsent) :]
                chunk = os.read(from_, 65536) if readable else None
            except BrokenPipeError:
                chunk = b""
            if chunk == b"":
                raise ProcessEndedError(self._end())
            self._unread += chunk or b""
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode(errors="replace")

    def kill(self, *, stack: bool = False) -> None:
        """Kill the process and what it started; let it leave its stack in the log first if asked to."""
        if self._process.poll() is None:
            if stack:
                self._process.send_signal(signal.SIGUSR1)
                time.sleep(_STACK_S)
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for pipe in self._pipes:
            with suppress(OSError):  # what was not sent stays so
                pipe.close()

    def _end(self) -> str:
        """Let a process that hung up end by itself, kill one that does not, and say how it ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_HANG_UP_S)
        self.kill()
        code = self._process.returncode
        return f"exited with status {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


def answering() -> Callable[[str], None]:
    """Take the stdout of a `LineProcess` for answers alone, and return what writes one.

    What libraries print goes where stderr goes. SIGUSR1 leaves the stack there.
    """
    protocol = os.dup(1)
    os.dup2(2, 1)
    faulthandler.register(signal.SIGUSR1)

    def reply(line: str) -> None:
        data = f"{line}\n".encode()
        while data:
            data = data[os.write(protocol, data) :]

    return reply
