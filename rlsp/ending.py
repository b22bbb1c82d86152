"""How the ranks of a run ended, and what to say about it: which rank, where, and why. No torch."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

from rlsp.board import Slot
from rlsp.report import manifest, verdict
from rlsp.report.verdict import Judgement
from rlsp.waits import disagreements, missing

_TIMEOUT = re.compile(r"time[d]?[ -]?out", re.IGNORECASE)
_MESSAGE_CHARS = 400
# Exceptions of the network and of a peer that is gone; all others but memory's follow from what is computed.
_PASSING = frozenset(
    {
        "AcceleratorError",
        "BrokenPipeError",
        "CollectiveError",
        "ConnectionAbortedError",
        "ConnectionRefusedError",
        "ConnectionResetError",
        "DistBackendError",
        "DistNetworkError",
        "DistStoreError",
        "TimeoutError",
    }
)
# torch has no exception of its own for a processor's memory, and NumPy's is private.
_NO_MEMORY = re.compile(r"MemoryError$|can(?:'|no)t allocate memory", re.IGNORECASE)
# Libraries abort a rank whose peers went away; every other signal is a cause of its own.
_CONSEQUENCE = signal.SIGABRT


class Cause(Enum):
    """Why a host stops its ranks."""

    RANK = "rank"
    SIGNAL = "signal"
    SILENCE = "silence"


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended.

    Attributes:
        rank: The rank.
        code: Exit status, or None where a signal ended it.
        signal: Number of that signal, or None.
        asked: Whether the host was already stopping the ranks.
        finished: Whether the rank had said that its work was done.
    """

    rank: int
    code: int | None
    signal: int | None
    asked: bool
    finished: bool

    @property
    def good(self) -> bool:
        """Tell whether the rank did all its work."""
        return self.code == 0 and self.finished

    def describe(self) -> str:
        """Say it in words."""
        if self.good:
            return "finished"
        if self.signal is not None:
            return (
                f"stopped by {signal_name(self.signal)}"
                if self.asked
                else f"killed by {signal_name(self.signal)}"
            )
        return f"exited with status {self.code}" + ("" if self.finished else " before its work was done")


@dataclass(frozen=True)
class RankError:
    """What a rank's error file says; times are Unix time in seconds."""

    rank: int
    phase: str
    exception: str
    message: str
    traceback: str
    failed_at_s: float

    def describe(self) -> str:
        """Name the exception and the first line of its message, clipped."""
        text = (self.message.strip().splitlines() or [""])[0]
        return f"{self.exception}: {text[:_MESSAGE_CHARS]}" if text else self.exception

    @property
    def passing(self) -> bool:
        """Tell whether the network, memory or a peer that is gone is to blame, and not what is computed."""
        lacks = any(map(_NO_MEMORY.search, (self.exception, *self.message.splitlines()[:1])))
        return lacks or self.exception in _PASSING

    @classmethod
    def read(cls, path: Path) -> RankError | None:
        """Read an error file; None if there is none or it is damaged."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None


@dataclass
class HostReport:
    """What a host has said so far, gathered by the owner from its lines.

    Attributes:
        pids: Process id of each rank, in rank order.
        ends: How ranks ended, in order of arrival.
        cause: Why the host stopped the ranks; None while it does not.
        detail: The signal that asked for the stop, if one did.
        silent: Ranks that neither spoke nor worked.
        states: What each living rank's process was doing as the stop began.
        finished: Whether the host saw all its ranks end.
    """

    pids: tuple[int, ...] = ()
    ends: list[RankEnd] = field(default_factory=list)
    cause: Cause | None = None
    detail: str = ""
    silent: tuple[int, ...] = ()
    states: dict[int, str] = field(default_factory=dict)
    finished: bool = False

    def hear(self, line: str | bytes) -> None:
        """Take in one line; a line that is no event is left alone."""
        try:
            event: dict[str, Any] = json.loads(line)
            kind = event.pop("event")
        except (ValueError, KeyError, TypeError, AttributeError):
            return
        if kind == "started":
            self.pids = tuple(event["pids"])
        elif kind == "end":
            self.ends.append(RankEnd(**event))
        elif kind == "stopping":
            self.cause, self.detail, self.silent = (
                Cause(event["cause"]),
                event["detail"],
                tuple(event["silent"]),
            )
            self.states = {int(rank): state for rank, state in event["states"].items()}
        elif kind == "finished":
            self.finished = True

    @property
    def good(self) -> bool:
        """Tell whether every rank did all its work."""
        return self.finished and self.cause is None and all(end.good for end in self.ends)


@dataclass(frozen=True)
class Abort:
    """Why a run was aborted.

    Attributes:
        reason: One sentence.
        lines: The ranks side by side.
        passing: Whether the same run may well succeed when it starts again: a process or the network failed
            it, and not what it computes.
    """

    reason: str
    lines: tuple[str, ...]
    passing: bool = False


def explain(
    report: HostReport,
    errors: Mapping[int, RankError],
    slots: Sequence[Slot],
    host_end: str,
    stopped_by: str | None = None,
) -> Abort:
    """Find out which rank ended a run, where, and why.

    Args:
        report: What the host said.
        errors: Error files by rank.
        slots: The status board.
        host_end: How the host itself ended, in words.
        stopped_by: The signal that the owner was stopped by, if any.
    """
    lines = side_by_side(report, errors, slots)
    first = _first_failure(report.ends, errors)
    if first is not None:
        error = errors.get(first.rank) if first.signal is None else None
        lines += tuple(error.message.splitlines()[1:]) if error else ()
        passing = (error is None or error.passing) and not disagreements(slots)
        return Abort("; ".join(_failure(first, error, report, slots)), lines, passing)
    if stopped_by is not None or report.cause is Cause.SIGNAL:
        return Abort(f"stopped by {stopped_by or report.detail}", lines)
    if report.silent:
        return Abort("; ".join(_silence(report, slots)), lines, passing=not disagreements(slots))
    return Abort(f"the host of the ranks {host_end}", lines, passing=True)


def conclude(run_dir: Path | str, abort: Abort | None) -> Judgement:
    """Write the end of a run into its folder and seal it; from then on only logs/ and wandb/ may change.

    Args:
        run_dir: The run folder.
        abort: Why the run was aborted, if it was.

    Raises:
        EvidenceError: The folder cannot be written.
    """
    reason = abort.reason if abort else None
    if abort is not None:
        log = Path(run_dir) / "logs" / "abort.txt"
        log.parent.mkdir(exist_ok=True)
        log.write_text("\n".join([abort.reason, *abort.lines, ""]))
    status = manifest.Status.ABORTED if abort else manifest.Status.FINISHED
    manifest.finish(run_dir, datetime.now(UTC).isoformat(timespec="milliseconds"), status, reason)
    return verdict.seal(run_dir, reason)


def side_by_side(
    report: HostReport, errors: Mapping[int, RankError], slots: Sequence[Slot]
) -> tuple[str, ...]:
    """Lay how each rank ended, its phase and its last collective side by side, one line a rank."""
    ends = {end.rank: end for end in report.ends}
    rows = [("rank", "end", "phase", "last collective")]
    for slot in slots:
        end, error = ends.get(slot.rank), errors.get(slot.rank)
        how = error.exception if error else end.describe() if end else "no end reported"
        state = report.states.get(slot.rank)
        how += f" (was {state})" if state == "stopped" else ""
        call = f"{slot.sequence} {slot.signature}" if slot.sequence >= 0 else "none"
        rows.append((str(slot.rank), how, _phase(slot, error), call + (" (torn)" if slot.torn else "")))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return tuple(
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows
    )


def signal_name(number: int) -> str:
    """Name a signal by its number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _first_failure(ends: Iterable[RankEnd], errors: Mapping[int, RankError]) -> RankEnd | None:
    """Pick the failure that the others follow from: a rank that was killed, then the earliest exception."""
    own = [end for end in ends if not end.good and not end.asked]

    def order(end: RankEnd) -> tuple[int, float]:
        if end.signal is not None:
            return (2 if end.signal == _CONSEQUENCE else 0), 0.0
        error = errors.get(end.rank)
        return 1, error.failed_at_s if error else 0.0

    return min(own, key=order, default=None)


def _failure(end: RankEnd, error: RankError | None, report: HostReport, slots: Sequence[Slot]) -> list[str]:
    """Say how the first rank failed and where, and what its collective lacked."""
    slot = slots[end.rank]
    place = replace(slot, phase=_phase(slot, error)).describe()
    how = f"failed: {error.describe()}" if error else f"{'was ' if end.signal else ''}{end.describe()}"
    said = [f"rank {end.rank} {how} (at: {place})"]
    if error is None and end.signal != _CONSEQUENCE:
        return said
    clash = disagreements(slots)
    if not clash and error is not None and _TIMEOUT.search(error.message):
        clash = missing(slots, report.states)
    return clash + said


def _silence(report: HostReport, slots: Sequence[Slot]) -> list[str]:
    """Say which rank hangs: a stopped one if there is one, else whoever the others wait for."""
    stopped = [rank for rank in report.silent if report.states.get(rank) in ("stopped", "traced")]
    said = []
    for rank in stopped or report.silent:
        state = f"its process is {report.states.get(rank, 'unknown')}"
        said.append(f"rank {rank} hangs: no sign of life, {state} (at: {slots[rank].describe()})")
    return said if stopped else said + (disagreements(slots) or missing(slots, {}))


def _phase(slot: Slot, error: RankError | None) -> str:
    return (error.phase if error else slot.phase) or "not started"
