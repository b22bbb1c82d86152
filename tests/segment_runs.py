"""Small runs in this process tree that end early, and are gone on with in another layout."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from ranks import run_ranks

from rlsp import run
from rlsp.board import Board, Place
from rlsp.config import Job, Resumption
from rlsp.ending import Abort, conclude
from rlsp.report.continuation import continuation
from rlsp.report.files import write_atomically
from rlsp.report.verdict import Judgement
from rlsp.rl.update import Trainer
from rlsp.segments import begin

RUN_ID = "20260101-000000-abcdef"
STARTED = "2026-01-01T00:00:00+00:00"
ROLLOUTS = 4
SMALL = (
    f"num_rollouts={ROLLOUTS}",
    "prompts_per_rollout=2",
    "samples_per_prompt=3",
    "max_response_tokens=12",
    "updates_per_rollout=2",
    "kl_coef=0.05",
    "entropy_coef=0.01",
    "checkpoint.every=2",
    "tracker=none",
)
# tp8 is left out: eight ranks take their time on two cores.
LAYOUTS = {
    "one": ("parallel=cp1_tp1_sp1",),
    "tp2_sp2": ("parallel=cp1_tp2_sp2", "rollout.tp=2", "micro_batch_size=2"),
    "tp2": ("parallel=cp1_tp2_sp1", "micro_batch_size=1"),
    "cp2": ("parallel=cp2_tp1_sp1",),
    "dp2": ("parallel=cp1_tp1_sp1", "parallel.dp=2", "rollout.engines=1", "micro_batch_size=5"),
    "tp4_sp4": ("parallel=cp1_tp4_sp4", "rollout.tp=2"),
    "cp2_tp2_sp2": ("parallel=cp2_tp2_sp2", "rollout.tp=4", "micro_batch_size=3"),
}

Plant = Callable[[int], Any]


def segment(
    folder: Path,
    compose: Any,
    layout: str,
    *overrides: str,
    resumed: Resumption | None = None,
    plant: Plant | None = None,
    stop: bool = False,
) -> None:
    """Run the ranks of one segment; what a rank raises comes out here.

    Args:
        folder: The run's.
        compose: Makes the config.
        layout: A key of LAYOUTS.
        overrides: On top of SMALL and the layout's.
        resumed: Where it goes on.
        plant: Makes a context for a rank's life.
        stop: Whether to ask for the end of the run at the first boundary.
    """
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    given = (*SMALL, *LAYOUTS[layout], *overrides)
    job = Job(compose(*given), RUN_ID, str(folder), given, ("rlsp",), STARTED, resumed)
    begin(job, {})
    world = job.config.world_size
    board = Board.create(folder / "logs" / "board", world)
    if stop:
        board.ask_to_stop()

    def live(rank: int, world_size: int) -> None:
        writer = Board.join(folder / "logs" / "board", world_size).writer(rank)
        with plant(rank) if plant else nullcontext():
            run.live(job, Place(rank, world_size, rank, "", writer))

    run_ranks(world, live, timeout_s=240)


def resume(
    folder: Path, compose: Any, layout: str, *overrides: str, plant: Plant | None = None
) -> Resumption:
    """Go on with a run from its newest checkpoint."""
    resumed, _ = continuation(folder)
    segment(folder, compose, layout, *overrides, resumed=resumed, plant=plant)
    return resumed


def end(folder: Path, aborted: str | None = None) -> Judgement:
    """Seal a run as its launcher does."""
    return conclude(folder, Abort(aborted, ()) if aborted else None)


def killed_in(rollout: int, world_size: int, updates: int = 2) -> Plant:
    """Kill the last rank within the second update of a rollout."""

    @contextmanager
    def plant(rank: int) -> Iterator[None]:
        update = Trainer.update

        def dies(self: Trainer, *given: Any) -> Any:
            if self.optimizer.steps == rollout * updates + 1 and rank == world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return update(self, *given)

        with mock.patch.object(Trainer, "update", dies):
            yield

    return plant


def files_of(folder: Path) -> dict[str, bytes]:
    """Read what no layout may change."""
    paths = [*(folder / "rollouts").iterdir(), *(folder / "digests").iterdir()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def flip(path: Path, at: int = -1) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    write_atomically(path, bytes(content))
