"""What the parts of one rollout cost: seconds, and bytes from other ranks."""

from __future__ import annotations

import time
from collections import Counter

from rlsp.groups import Ledger


class Stopwatch:
    """Measure the parts of one rollout: seconds, and the bytes that this rank received.

    Attributes:
        laps: Seconds by metric, `time/…_s`.
        moved: Bytes by (part, axis, operation), as `Ledger.wire` counts them.
    """

    def __init__(self, ledger: Ledger) -> None:
        """Start; `ledger` counts what this rank receives."""
        self._start = self._last = time.monotonic()
        self._wire, self._before = ledger.wire, ledger.wire.copy()
        self.laps: dict[str, float] = {}
        self.moved: Counter[tuple[str, str, str]] = Counter()

    def lap(self, part: str) -> None:
        """Book what was since the last lap under `part`."""
        now, name = time.monotonic(), f"time/{part}_s"
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now
        for (axis, operation), octets in (self._wire - self._before).items():
            self.moved[part, axis, operation] += octets
        self._before = self._wire.copy()

    @property
    def bytes_moved(self) -> dict[str, int]:
        """Return the bytes by metric, `comm/…_bytes`."""
        return {
            f"comm/{part}_bytes": sum(n for (of, _, _), n in self.moved.items() if of == part)
            for part in (name.removeprefix("time/").removesuffix("_s") for name in self.laps)
        }

    @property
    def total_s(self) -> float:
        """Return the time since the start."""
        return time.monotonic() - self._start
