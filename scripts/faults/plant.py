"""What goes wrong in a rank, and when: the entry that ranks of a tortured run live by.

A file beside the run folder has one plant for each segment of the run. The rank that it names lives as ever
until the moment has come; then it notes the time and acts.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from rlsp.board import BoardWriter, Place
from rlsp.config import Job

ENTRY = "faults.plant:live"


@dataclass(frozen=True)
class Plant:
    """One fault.

    Attributes:
        act: What happens, a name of `faults.acts.ACTS`.
        phase: What the phase of the rank begins with as it happens.
        rank: To whom.
        calls: How many collectives of that phase come before, as far as it has so many.
        hook: The step of that phase at which it happens instead, a name of HOOKS.
        wait_s: Seconds from there, while the rank goes on; for acts that are signals.
        by: Where `phase` is a part of any rollout: the first of the segment, or the second up to this one.
    """

    act: str
    phase: str
    rank: int = 0
    calls: int = 0
    hook: str | None = None
    wait_s: float = 0.0
    by: int | None = None

    def settled(self, first: int, rollouts: int) -> Plant:
        """Say in which rollout it happens, in a segment that begins with `first` of a run of `rollouts`."""
        if self.by is None:
            return self
        index = first + (first < self.by)
        plant = replace(self, phase=f"rollout {index}: {self.phase}", by=None)
        # A run that saved its last rollout would leave nothing to kill.
        return replace(plant, calls=0, wait_s=0.0) if index == rollouts - 1 else plant


@dataclass(frozen=True)
class Fired:
    """That a plant acted: in which segment, when (Unix time, seconds), and how many rows there were."""

    segment: int
    at_s: float
    rows: int


def write_plan(run_dir: Path, plants: Sequence[Plant | None]) -> None:
    """Plant in each segment of a run that is to come what stands at its place."""
    plain = [None if plant is None else asdict(plant) for plant in plants]
    _plan_path(run_dir).write_text(json.dumps(plain))


def fired(run_dir: Path) -> list[Fired]:
    """Read which plants of a run have acted."""
    path = _fired_path(run_dir)
    return [Fired(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def whole_rows(run_dir: Path) -> int:
    """Count the rows that a run folder has; one that is torn is none."""
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def live(job: Job, place: Place) -> None:
    """Live as a rank, with what is planted in this segment."""
    run_rank = import_module("rlsp.run").run_rank
    segment = _segment(Path(job.run_dir))
    plants = json.loads(_plan_path(Path(job.run_dir)).read_text())
    plain = plants[segment] if segment < len(plants) else None
    if plain is None or plain["rank"] != place.rank:
        run_rank(job, place)
        return
    plant = Plant(**plain).settled(job.first_rollout, job.config.num_rollouts)
    with _armed(plant, Path(job.run_dir), segment):
        run_rank(job, place)


def _segment(run_dir: Path) -> int:
    """Count the segments before this one; a machine that has no manifest is in its first."""
    path = run_dir / "manifest.json"
    return len(json.loads(path.read_text())["earlier"]) if path.exists() else 0


@contextmanager
def _armed(plant: Plant, run_dir: Path, segment: int) -> Iterator[None]:
    trigger = _Trigger(plant, run_dir, segment)
    note_phase, note_call = BoardWriter.phase, BoardWriter.call

    def phase(self: BoardWriter, text: str) -> None:
        note_phase(self, text)
        trigger.phase(text)

    def call(self: BoardWriter, sequence: int, signature: str, chain: bytes) -> None:
        note_call(self, sequence, signature, chain)
        trigger.call()

    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(BoardWriter, "phase", phase))
        patched.enter_context(mock.patch.object(BoardWriter, "call", call))
        if plant.hook is not None:
            patched.enter_context(HOOKS[plant.hook](trigger.hook))
        yield


class _Trigger:
    """Act once, when the moment has come."""

    def __init__(self, plant: Plant, run_dir: Path, segment: int) -> None:
        self._plant, self._run_dir, self._segment = plant, run_dir, segment
        self._there = self._done = False
        self._calls = 0

    def phase(self, text: str) -> None:
        """Take in that a phase begins."""
        there, self._there = self._there, text.startswith(self._plant.phase)
        if self._plant.hook is None and (there or (self._there and not self._plant.calls)):
            self._fire()  # a rank alone has no collectives: then it is the phase's end

    def call(self) -> None:
        """Take in that a collective begins."""
        self._calls += self._there
        if self._plant.hook is None and self._there and self._calls >= self._plant.calls:
            self._fire()

    def hook(self, spoil: Callable[[], None] | None) -> None:
        """Take in that the step of the hook has come; what it makes is spoilt where the plant acts."""
        if not self._there or self._done:
            return
        if spoil is not None:
            spoil()
        self._fire()

    def _fire(self) -> None:
        if self._done:
            return
        self._done = True
        if self._plant.wait_s:
            threading.Timer(self._plant.wait_s, self._act).start()
        else:
            self._act()

    def _act(self) -> None:
        from faults.acts import ACTS

        note = Fired(self._segment, time.time(), whole_rows(self._run_dir))
        with _fired_path(self._run_dir).open("a") as file:
            file.write(json.dumps(asdict(note)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        ACTS[self._plant.act](self._run_dir)


# Steps of a phase -------------------------------------------------------------

Fire = Callable[[Callable[[], None] | None], None]


def _around(
    target: str, *, before: bool = True, spoil: Callable[..., None] | None = None
) -> Callable[[Fire], Any]:
    """Fire before a function is called or after it returned; `spoil` gets its arguments then."""

    def hooked(fire: Fire) -> Any:
        where, _, name = target.rpartition(".")
        module, _, kind = where.partition(":")
        owner = import_module(module)
        owner = getattr(owner, kind) if kind else owner
        real = getattr(owner, name)

        def around(*args: Any, **kwargs: Any) -> Any:
            spoilt = None if spoil is None else partial(spoil, *args, **kwargs)
            if before:
                fire(spoilt)
            found = real(*args, **kwargs)
            if not before:
                fire(spoilt)
            return found

        return mock.patch.object(owner, name, around)

    return hooked


def _half_a_row(recorder: Any, row: Any) -> None:
    line = json.dumps(dict(row)).encode()
    recorder._rows.write(line[: len(line) // 2])


def _half_a_file(path: Path, *_: Any) -> None:
    os.truncate(path, path.stat().st_size // 2)


HOOKS: dict[str, Callable[[Fire], Any]] = {
    "tensors written": _around("rlsp.report.recorder.compare_again"),
    "row missing": _around("rlsp.report.recorder:Recorder._append"),
    "row torn": _around("rlsp.report.recorder:Recorder._append", spoil=_half_a_row),
    "shards torn": _around("rlsp.checkpoints.write_shards", before=False, spoil=_half_a_file),
    "shards written": _around("rlsp.checkpoints.write_shards", before=False),
    "not named": _around("rlsp.report.checkpoint:Checkpoint.write", before=False),
    "named": _around("rlsp.checkpoints.commit", before=False),
    "removing an old one": _around("shutil.rmtree"),
}


def _plan_path(run_dir: Path) -> Path:
    return run_dir.with_name(f"{run_dir.name}.plan.json")


def _fired_path(run_dir: Path) -> Path:
    return run_dir.with_name(f"{run_dir.name}.fired")
