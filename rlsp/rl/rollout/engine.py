"""Speak to an engine in a process of its own: whatever goes wrong is an error that names it. No torch."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlsp.rl.apart import LineProcess, ProcessEndedError

_SHOWN_CHARS = 200
_SHOWN_LINES = 12


class EngineError(RuntimeError):
    """The engine cannot do what was asked; the first line says what, the others what it left behind."""


class ExternalEngine:
    """One engine: it is asked for one thing at a time, and each has its time."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        opening: Mapping[str, Any],
        log: Path,
        timeout_s: float,
    ) -> None:
        """Start the process; its first answer says that it is ready.

        Args:
            name: What messages call it.
            command: Answers each line of JSON on its stdin with one on its stdout.
            environment: Its environment.
            opening: What it is told first.
            log: Takes what it prints.
            timeout_s: How long anything that it is asked for may take.
        """
        self._name, self._log, self._timeout_s = name, log, timeout_s
        log.parent.mkdir(parents=True, exist_ok=True)
        self._process = LineProcess(command, environment, log)
        self.ask("start", opening)

    def ask(self, doing: str, request: Mapping[str, Any]) -> None:
        """Ask for something; `doing` is what messages call it, as in "load version 3"."""
        self._doing, self._until_s = doing, time.monotonic() + self._timeout_s
        self._process.send(json.dumps(request))

    def answer(self, within_s: float) -> dict[str, Any] | None:
        """Wait for the answer, at most as long as is left of its time; None if there is none yet.

        Raises:
            EngineError: There will be none, or it is no answer.
        """
        left_s = self._until_s - time.monotonic()
        try:
            line = self._process.receive(max(min(within_s, left_s), 0.0))
        except ProcessEndedError as end:
            raise self._error(f"{end} when asked to {self._doing}", self._tail()) from end
        if line is None:
            if time.monotonic() < self._until_s:
                return None
            self.close(stack=True)
            took = f"did not {self._doing} within {self._timeout_s:g} s (rollout.timeout_s) and was killed"
            raise self._error(took, self._tail())
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise self._error(f"said what is no answer when asked to {self._doing}: {line[:_SHOWN_CHARS]!r}")
        if "fault" in answer:
            raise self._error(f"could not {self._doing}: {answer['fault']}", answer.get("details", ()))
        return answer

    def close(self, *, stack: bool = False) -> None:
        """End the process, whatever it does."""
        self._process.kill(stack=stack)

    def _error(self, what: str, lines: Sequence[str] = ()) -> EngineError:
        return EngineError("\n".join([f"the engine ({self._name}) {what}; its log is {self._log}", *lines]))

    def _tail(self) -> list[str]:
        return self._log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
