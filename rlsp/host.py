"""Keep the ranks of one machine: start them, watch them, and stop all of them when one fails. No torch.

The host reports to the process that owns the run in JSON lines, one an event. It dies with the owner, and the
ranks die with it: the kernel sees to that (PR_SET_PDEATHSIG), whatever signal ends either.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlsp.board import Board, Slot
from rlsp.ending import Cause, RankEnd

_PR_SET_PDEATHSIG = 1
_TICK_S = 0.5
# Peers of a rank that died report broken connections within milliseconds; the whole story is waited for.
_SETTLE_S = 0.3
# A rank at work takes CPU time even where it has nothing to say; below this share of a core it only waits.
_IDLE_CPU_SHARE = 0.02
_IDLE_CPU_S = 0.1
_BUSY_STATES = ("running", "waiting for a device")  # it works, or would on a machine with less to do
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends; Linux.

    Args:
        parent: Process id of the expected parent. Where that has ended already, this process ends too.
    """
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def silence_limit_s(timeout_s: float) -> float:
    """Return after how many seconds silence means a hang: a collective's own timeout comes first."""
    return 1.1 * timeout_s + 2.0


class SilenceWatch:
    """Find ranks that neither write to the board nor take CPU time: stopped, or waiting for nothing.

    A rank that computes for long is not silent: it may have no reason to write. One that waits for others is
    ended by its own collective's timeout, unless it cannot run at all.
    """

    def __init__(self, limit_s: float) -> None:
        """Call a rank silent after `limit_s` seconds."""
        self._limit_s = limit_s
        self._marks: dict[int, tuple[float, int, float]] = {}

    def silent(
        self, now_s: float, slots: Sequence[Slot], cpu_s: Mapping[int, float], states: Mapping[int, str]
    ) -> tuple[int, ...]:
        """Return the silent ranks.

        Args:
            now_s: A monotonic clock, seconds.
            slots: Slots of the board.
            cpu_s: CPU time so far of every living rank, seconds.
            states: What each living rank's process is doing.
        """
        found = []
        for slot in slots:
            if slot.done or slot.rank not in cpu_s:
                continue
            since_s, generation, before_s = self._marks.get(slot.rank, (now_s, -1, 0.0))
            worked = cpu_s[slot.rank] - before_s > max(_IDLE_CPU_S, _IDLE_CPU_SHARE * (now_s - since_s))
            if slot.generation != generation or worked or states.get(slot.rank) in _BUSY_STATES:
                self._marks[slot.rank] = (now_s, slot.generation, cpu_s[slot.rank])
            elif now_s - since_s > self._limit_s:
                found.append(slot.rank)
        return tuple(found)


class Host:
    """Start and watch the ranks until all have ended."""

    def __init__(self, board: Board, say: Callable[[str], object], timeout_s: float, grace_s: float) -> None:
        """Watch ranks that write to `board`; report each event as one JSON line through `say`.

        Args:
            board: The status board of all ranks.
            say: Takes one line.
            timeout_s: How long a collective may take; a rank is silent somewhat later.
            grace_s: How long ranks get between SIGTERM and SIGKILL.
        """
        self._board = board
        self._write = say
        self._grace_s = grace_s
        self._silence = SilenceWatch(silence_limit_s(timeout_s))
        self._alive: dict[int, int] = {}
        self._failed_at_s: float | None = None
        self._stopped_at_s: float | None = None
        self._killed = False

    def run(self, start: Callable[[int], int], ranks: Sequence[int]) -> int:
        """Start ranks, wait for all, and return 0 if each did its work.

        Args:
            start: Starts the process of a rank and returns its process id.
            ranks: The ranks of this machine.
        """
        good = True
        with waking(*_STOP_SIGNALS) as wake:
            try:
                pids = [start(rank) for rank in ranks]
                self._alive = dict(zip(pids, ranks, strict=True))
                self._say("started", pids=pids)
                while self._alive:
                    wake.wait(self._until_next_step_s())
                    good &= self._reap()
                    self._act(wake.received)
                    self._say("alive")  # the owner listens for this: a host that is stopped says nothing
            finally:
                self._kill(signal.SIGKILL)
        self._say("finished")
        return 0 if good else 1

    def _until_next_step_s(self) -> float:
        now_s = time.monotonic()
        if self._stopped_at_s is not None:
            return max(0.0, min(_TICK_S, self._stopped_at_s + self._grace_s - now_s))
        if self._failed_at_s is not None:
            return max(0.0, self._failed_at_s + _SETTLE_S - now_s)
        return _TICK_S

    def _reap(self) -> bool:
        """Collect ranks that have ended; return whether all of those did their work."""
        good = True
        for pid, rank in list(self._alive.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            del self._alive[pid]
            code = os.waitstatus_to_exitcode(status)
            end = RankEnd(
                rank=rank,
                code=code if code >= 0 else None,
                signal=-code if code < 0 else None,
                asked=self._stopped_at_s is not None,
                finished=self._board.slot(rank).done,
            )
            self._say("end", **vars(end))
            if not end.good:
                good = False
                self._failed_at_s = self._failed_at_s or time.monotonic()
        return good

    def _act(self, received: signal.Signals | None) -> None:
        """Begin to stop the ranks if there is a reason, and go from SIGTERM to SIGKILL when time is up."""
        now_s = time.monotonic()
        if self._stopped_at_s is not None:
            if now_s >= self._stopped_at_s + self._grace_s and not self._killed:
                self._killed = True
                self._kill(signal.SIGKILL)
        elif received is not None:
            self._stop(Cause.SIGNAL, received.name)
        elif self._failed_at_s is not None:
            if now_s >= self._failed_at_s + _SETTLE_S:
                self._stop(Cause.RANK, "")
        else:
            spent_s = {
                rank: seconds for pid, rank in self._alive.items() if (seconds := cpu_s(pid)) is not None
            }
            if silent := self._silence.silent(now_s, self._board.read(), spent_s, self._states()):
                self._stop(Cause.SILENCE, "", silent)

    def _stop(self, cause: Cause, detail: str, silent: tuple[int, ...] = ()) -> None:
        self._say("stopping", cause=cause.value, detail=detail, silent=silent, states=self._states())
        self._stopped_at_s = time.monotonic()
        self._kill(signal.SIGTERM)
        self._kill(signal.SIGCONT)  # a stopped process takes no other signal

    def _states(self) -> dict[int, str]:
        return {rank: process_state(pid) for pid, rank in self._alive.items()}

    def _kill(self, number: signal.Signals) -> None:
        for pid in self._alive:  # not reaped yet, so the ids are still theirs
            os.kill(pid, number)

    def _say(self, event: str, **values: Any) -> None:
        self._write(json.dumps({"event": event, **values}))


class Wake:
    """Wait for a signal, for a descriptor to become readable or for time to pass; no signal is lost."""

    def __init__(self, descriptor: int, stop_signals: Sequence[signal.Signals]) -> None:
        self.received: signal.Signals | None = None
        self.signals = 0  # how many came
        self._descriptor = descriptor
        self._stop_signals = stop_signals
        self._found: dict[signal.Signals, Any] = {}

    def wait(self, timeout_s: float, *descriptors: int) -> bool:
        """Wait for at most `timeout_s` seconds; return whether one of `descriptors` can be read."""
        ready = select.select([self._descriptor, *descriptors], [], [], timeout_s)[0]
        if self._descriptor in ready:
            os.read(self._descriptor, 4096)
        return any(descriptor in ready for descriptor in descriptors)

    def take(self, *numbers: signal.Signals) -> None:
        """Take signals over, but for those that this process was started to ignore."""
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._found[number] = signal.signal(number, self._note)

    def release(self) -> None:
        """Give the signals back; a second call does nothing."""
        while self._found:
            signal.signal(*self._found.popitem())

    def _note(self, number: int, _frame: object) -> None:
        if number in self._stop_signals:
            self.signals += 1
            self.received = self.received or signal.Signals(number)


@contextmanager
def waking(*stop_signals: signal.Signals) -> Iterator[Wake]:
    """Turn signals, and the end of a child, into something to wait for.

    Python hands signals to the main thread alone: in another one, descriptors and time are all there is.

    Args:
        stop_signals: Signals that ask to stop; `Wake.received` names the first that came.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    wake = Wake(read_end, stop_signals)
    try:
        if threading.current_thread() is not threading.main_thread():
            yield wake
            return
        descriptor = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        try:
            wake.take(*stop_signals, signal.SIGCHLD)
            yield wake
        finally:
            wake.release()
            signal.set_wakeup_fd(descriptor)
    finally:
        os.close(read_end)
        os.close(write_end)


def reset_signals() -> None:
    """Give a forked rank the default signal handling instead of its host's."""
    signal.set_wakeup_fd(-1)
    for number in (*_STOP_SIGNALS, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)


def _stat(pid: int) -> list[str]:
    """Read the fields of /proc/PID/stat from the state on; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def cpu_s(pid: int) -> float | None:
    """Return the CPU time that a process took so far, in seconds; None where there is none."""
    fields = _stat(pid)
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK") if len(fields) > 12 else None


def process_state(pid: int) -> str:
    """Say what a process is doing; empty where there is none."""
    letter = (_stat(pid) or [""])[0]
    names = {
        "R": "running",
        "S": "waiting",
        "D": "waiting for a device",
        "T": "stopped",
        "t": "traced",
        "Z": "ended",
    }
    return names.get(letter, letter)
