"""Reads metrics.jsonl while another process is writing it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlsp.report.files import EvidenceError, open_regular
from rlsp.report.metrics import STEP
from rlsp.report.recorder import METRICS_NAME, parse_row


class Follower:
    """Hands out each row of a run's metrics.jsonl once, in order; a line without its end is waited for.

    Args:
        run_dir: The run folder; the file need not exist yet.
        first: Rows of earlier rollouts are left out.
    """

    def __init__(self, run_dir: str | Path, first: int = 0) -> None:
        self._path = Path(run_dir) / METRICS_NAME
        self._next = first
        self._offset = 0

    def new_rows(self) -> list[dict[str, Any]]:
        """Return the rows that were completed since the last call.

        Raises:
            EvidenceError: A complete line is no row.
        """
        try:
            with open_regular(self._path) as file:
                if file.seek(0, 2) < self._offset:
                    # A resumed run took rows back; what was handed out is known by its index.
                    self._offset = 0
                file.seek(self._offset)
                lines = file.read().split(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise EvidenceError(f"{self._path} cannot be read: {error.strerror or error}") from error
        rows = []
        for line in lines[:-1]:
            self._offset += len(line) + 1
            row = parse_row(line, self._path.name)
            index = row.get(STEP)
            if isinstance(index, int) and index >= self._next:
                self._next = index + 1
                rows.append(row)
        return rows
