"""Two programs that work in turn, so that neither disturbs what the other measures."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

_POLL_S = 0.002
_LIMIT_S = 900.0
ENDED = "ended"


class Turn:
    """One side of the two that share a folder; a file there names the side whose turn it is."""

    def __init__(self, folder: Path | str, own: str, other: str) -> None:
        """Join; nobody has the turn before `begin`."""
        self._folder, self._own, self._other = Path(folder), own, other
        self.seconds: list[float] = []

    def begin(self) -> None:
        """Give the first turn to this side."""
        self._pass(self._own)

    def wait(self) -> None:
        """Wait for this side's turn.

        Raises:
            RuntimeError: The other side ended early, or has kept the turn for too long.
        """
        until = time.monotonic() + _LIMIT_S
        while (now := self._now()) != self._own:
            if now == ENDED or time.monotonic() > until:
                raise RuntimeError(f"{self._own} waited for {self._other}, which has ended or hangs")
            time.sleep(_POLL_S)

    def timed(self, call: Callable[[], object]) -> None:
        """Wait, time one call, and pass the turn on."""
        self.wait()
        started = time.perf_counter()
        call()
        self.done(time.perf_counter() - started)

    def done(self, seconds: float) -> None:
        """Note how long this side's turn took, and pass it on."""
        self.seconds.append(seconds)
        self._pass(self._other)

    def end(self) -> None:
        """Say that this side makes no more turns, and leave what it measured."""
        (self._folder / f"{self._own}.json").write_text(json.dumps(self.seconds))
        self._pass(ENDED if self._now() == self._own else self._other)

    def _pass(self, to: str) -> None:
        partial = self._folder / f"turn.{self._own}"
        partial.write_text(to)
        partial.replace(self._folder / "turn")

    def _now(self) -> str:
        path = self._folder / "turn"
        return path.read_text() if path.exists() else ""
