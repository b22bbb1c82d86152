"""Run the command with something planted, and see how it ends: status, time, processes left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from faults.plant import Fired, Plant, fired, whole_rows, write_plan
from faults.start import USER

ROOT = Path(__file__).resolve().parents[2]
MARK = "RLSP_TORTURED"
OWN_SUFFIXES = (".plan.json", ".output")
SMALL = (
    *("model.num_layers=1", "model.hidden_size=64", "model.num_attention_heads=8"),
    *("model.head_dim=8", "model.ffn_hidden_size=64"),
    *("task=arithmetic", "warmup.steps=0", "tracker=none"),
    *("prompts_per_rollout=2", "samples_per_prompt=2", "max_response_tokens=40", "rollout.ignore_eos=true"),
    *("entropy_coef=0.01", "checkpoint.every=2", "launch.grace_s=2.0", "launch.progress=false"),
)
"""The smallest run that passes in every layout: long enough that every rank has tokens at CP 2."""
_LIMIT_S = 600.0
_LEFT_S = 15.0
_POLL_S = 0.02


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        status: Its exit status; below zero the signal that killed it.
        seconds: From the fault until no process was left, or from the start where there was none.
        left: Processes of the run that were still there after a while.
        lost: Rows that were there at the fault and are not any more.
        fired: The plants that acted.
        output: What it printed.
    """

    status: int
    seconds: float
    left: int
    lost: int
    fired: tuple[Fired, ...]
    output: str


@dataclass
class Command:
    """A command that runs: `rlsp` with the smallest run's overrides and some more, or `rlsp resume=…`.

    Attributes:
        run_dir: The run's folder; plan, marks and output lie beside it.
        overrides: What is given on the command line.
        plants: One for each segment from the run's first on.
        variables: What is added to the environment.
        as_user: Whether file permissions hold for it although root starts it.
    """

    run_dir: Path
    overrides: Sequence[str]
    plants: Sequence[Plant | None] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    as_user: bool = False

    def __post_init__(self) -> None:
        """Start it."""
        write_plan(self.run_dir, self.plants)
        self._before = len(fired(self.run_dir))
        self._output = self.run_dir.with_name(f"{self.run_dir.name}.output")
        path = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests")]
        environment = {**os.environ, **self.variables, MARK: str(self.run_dir), "PYTHONPATH": ":".join(path)}
        words = [sys.executable, "-m", "faults.start", *([USER] if self.as_user else []), *self.overrides]
        self._started_at_s = time.time()
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                words,
                env=environment,
                cwd=self.run_dir.parent,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def await_fault(self) -> None:
        """Wait until something planted acted, as long as the command runs."""
        while self._process.poll() is None and len(fired(self.run_dir)) == self._before:
            time.sleep(_POLL_S)

    def end(self) -> Ended:
        """Wait for its end and for that of every process that it started; kill what is left after that."""
        try:
            status = self._process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        left = _await_none(lambda: processes_of(self.run_dir))
        acted = tuple(fired(self.run_dir)[self._before :])
        since_s = acted[-1].at_s if acted else self._started_at_s
        seconds = time.time() - since_s
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        lost = max(0, acted[-1].rows - whole_rows(self.run_dir)) if acted else 0
        return Ended(status, seconds, len(left), lost, acted, self._output.read_text(errors="replace"))


def begin(run_dir: Path, *overrides: str, plants: Sequence[Plant | None] = (), **options: object) -> Command:
    """Start a run of its own."""
    return Command(run_dir, (*SMALL, f"hydra.run.dir={run_dir}", *overrides), plants, **options)  # type: ignore[arg-type]


def go_on(run_dir: Path, *overrides: str, plants: Sequence[Plant | None] = (), **options: object) -> Command:
    """Resume a run."""
    return Command(run_dir, (f"resume={run_dir}", *overrides), plants, **options)  # type: ignore[arg-type]


def processes_of(run_dir: Path) -> list[int]:
    """Find living processes that a command for this run started, whoever is their parent now."""
    mark = f"{MARK}={run_dir}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def forget(run_dir: Path) -> None:
    """Remove a run and what lies beside it."""
    for path in run_dir.parent.glob(f"{run_dir.name}*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _await_none(find: Callable[[], list[int]]) -> list[int]:
    until_s = time.monotonic() + _LEFT_S
    while (found := find()) and time.monotonic() < until_s:
        time.sleep(_POLL_S)
    return found
