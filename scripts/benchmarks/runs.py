"""Whole runs of the command line: how long they take, and how much of that is evidence."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from benchmarks.ranks import compose
from rlsp import launch
from rlsp.board import Board, BoardError
from rlsp.config import Job
from rlsp.worker import board_path

DRAWN = ("scoring", "old policy", "update", "writing evidence", "done")
_PROBE = ("experiment=g11_probe", "entropy_coef=0.01")
_POLL_S = 0.005
_LIMIT_S = 600.0


def first_token_s(repeats: int) -> tuple[float, str]:
    """Return seconds from the command to the first drawn token of every sequence, on 8 ranks."""
    times = [_first_token_s() for _ in range(repeats)]
    how = (
        "from exec of rlsp to the end of a rollout of one token a sequence, read from the status board: "
        f"{' '.join(_PROBE)} max_response_tokens=1 num_rollouts=1, 8 ranks; "
        f"median of {repeats}: {_listed(times)} s"
    )
    return median(times), how


def probe_s(repeats: int) -> tuple[float, str]:
    """Return seconds of the whole g11 probe, from the command to its verdict."""
    times = []
    for _ in range(repeats):
        with _command(*_PROBE) as (process, _, started):
            if process.wait(_LIMIT_S):
                raise RuntimeError(f"the probe ended with status {process.returncode}")
            times.append(time.monotonic() - started)
    return median(times), f"wall time of rlsp {' '.join(_PROBE)}, median of {repeats}: {_listed(times)} s"


def evidence_share() -> tuple[float, str]:
    """Return the part of a run's wall time that goes into evidence."""
    config = compose("num_rollouts=20", "launch.progress=false")
    with tempfile.TemporaryDirectory(prefix="rlsp-bench-") as folder:
        job = Job(config, "bench", folder, (), ("rlsp",), datetime.now(UTC).isoformat())
        owner: dict[str, float] = {}
        targets = [(launch, "begin"), (launch, "conclude"), (launch, "open_tracker")]
        started = time.monotonic()
        with redirect_stdout(StringIO()), timed(targets, owner), _timed_finish(owner):
            status = launch.execute(job, entry="benchmarks.timed:rank")
        wall = time.monotonic() - started
        if status:
            raise RuntimeError(f"the default experiment ended with status {status}")
        rank: dict[str, float] = json.loads((Path(folder) / "evidence.json").read_text())
    parts = {**owner, **rank}
    listed = ", ".join(f"{name} {value:.2f}" for name, value in sorted(parts.items()))
    how = f"default experiment, num_rollouts=20, {wall:.1f} s; seconds on rank 0 and in the owner: {listed}"
    return sum(parts.values()) / wall, how


@contextmanager
def timed(targets: list[tuple[Any, str]], spent: dict[str, float]) -> Iterator[None]:
    """Add up the wall seconds of calls; none of the targets calls another."""

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def clocked(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - started

        return clocked

    patches = [mock.patch.object(owner, name, watched(name, getattr(owner, name))) for owner, name in targets]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


@contextmanager
def _timed_finish(spent: dict[str, float]) -> Iterator[None]:
    from rlsp.report import tracker

    kinds = [kind for kind in vars(tracker).values() if isinstance(kind, type) and "finish" in vars(kind)]
    with timed([(kind, "finish") for kind in kinds], spent):
        yield


def _first_token_s() -> float:
    with _command(*_PROBE, "max_response_tokens=1", "num_rollouts=1") as (process, folder, started):
        while time.monotonic() - started < _LIMIT_S and process.poll() is None:
            try:
                slots = Board.open(board_path(folder)).read()
            except BoardError:
                slots = []
            if slots and all(any(phase in slot.phase for phase in DRAWN) for slot in slots):
                return time.monotonic() - started
            time.sleep(_POLL_S)
    raise RuntimeError("no token was drawn")


@contextmanager
def _command(*overrides: str) -> Iterator[tuple[subprocess.Popen[bytes], Path, float]]:
    """Start the command line in a folder that goes afterwards."""
    with tempfile.TemporaryDirectory(prefix="rlsp-bench-") as top:
        folder = Path(top) / "run"
        words = [sys.executable, "-m", "rlsp", *overrides, f"hydra.run.dir={folder}"]
        started = time.monotonic()
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield process, folder, started
        finally:
            process.terminate()
            process.wait()


def _listed(times: list[float]) -> str:
    return " ".join(f"{value:.2f}" for value in times)
