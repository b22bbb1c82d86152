"""Run functions on several gloo ranks, forked from the test process: as many checks as you like in a launch.

    results = run_ranks(4, function, "argument")   # function(rank, world_size, "argument") on each rank
    outcomes = run_checks(4, [check_a, check_b])   # both in one launch: outcomes["check_a"] is a list by rank

Each rank has one thread, torch.distributed initialised over gloo, and everything that the test process
imported. Results are pickled, in rank order. A rank that raises stops the launch: its own exception is raised
again in the test (the earliest, where several raise; a rank that was killed goes first), with a note that
names rank, check and traceback. A launch that takes longer than timeout_s raises TimeoutError with every late
rank's stack. Either way no process is left. Where the test process sees a GPU, ranks come from a fork server
instead: functions must then be importable. Within a rank, catch what you expect; a check that fails ends the
launch, so those after it fail too.
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

Function = Callable[..., Any]

_GRACE_S = 1.0  # after a first failure, for the others' own accounts of it
_LOG_CHARS = 20_000  # enough for a stack from within pytest, whose newest frames come first
_PR_SET_PDEATHSIG = 1
_SLOW_IMPORT = (
    "torch.fx.experimental.symbolic_shapes"  # 0.4 s, made by every rank's first backward if not before
)


class RankError(RuntimeError):
    """A rank died, or raised what cannot be pickled."""


class NotReachedError(RuntimeError):
    """An earlier check of the launch failed."""


class Failure(NamedTuple):
    """What went wrong first on one rank."""

    at_s: float
    rank: int
    check: str
    error: BaseException
    killed: bool


class Outcomes:
    """What each check returned on each rank, by the check's name."""

    def __init__(self, names: Sequence[str], world_size: int) -> None:
        self.world_size = world_size
        self.failed: tuple[str, BaseException] | None = None
        self.values: dict[str, dict[int, Any]] = {name: {} for name in names}

    def __getitem__(self, name: str) -> list[Any]:
        """Return the results in rank order, or raise what made the check fail."""
        values = self.values[name]
        if len(values) == self.world_size:
            return [values[rank] for rank in range(self.world_size)]
        assert self.failed is not None
        if self.failed[0] == name:
            raise self.failed[1]
        raise NotReachedError(
            f"{name}: not run to its end, because {self.failed[0]} failed: {self.failed[1]!r}"
        )


def run_ranks(world_size: int, function: Function | str, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Call function(rank, world_size, *args) on every rank and return the results in rank order.

    Args:
        world_size: How many ranks.
        function: A callable, or its dotted name.
        args: Further arguments, the same on every rank.
        timeout_s: How long the launch may take; also the timeout of the default process group.
    """
    outcomes = run_checks(world_size, [function], *args, timeout_s=timeout_s)
    return outcomes[next(iter(outcomes.values))]


def run_checks(
    world_size: int, functions: Sequence[Function | str], *args: Any, timeout_s: float = 60.0
) -> Outcomes:
    """Call each of `functions` as `run_ranks` does, one after the other in one launch."""
    import_module(_SLOW_IMPORT)
    checks = [(_name(function), function) for function in functions]
    outcomes = Outcomes([name for name, _ in checks], world_size)
    assert len(outcomes.values) == len(checks) > 0, "checks need distinct names"
    context: Any = multiprocessing.get_context("forkserver" if torch.cuda.is_available() else "fork")
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload(["torch.distributed", _SLOW_IMPORT])
    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        launch = _Launch(world_size, Path(folder), outcomes, timeout_s)
        try:
            launch.start(context, checks, args)
            launch.watch()
        finally:
            launch.stop()
    return outcomes


class _Launch:
    def __init__(self, world_size: int, folder: Path, outcomes: Outcomes, timeout_s: float) -> None:
        self.world_size, self.folder, self.outcomes = world_size, folder, outcomes
        self.timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        self.processes: list[BaseProcess] = []
        self.pipes: dict[Connection, int] = {}
        self.at = [""] * world_size  # the check each rank is in
        self.failures: list[Failure] = []

    def start(self, context: Any, checks: list[tuple[str, Function | str]], args: tuple[Any, ...]) -> None:
        self.at = [checks[0][0]] * self.world_size
        for rank in range(self.world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(rank, self.world_size, str(self.folder), self.timeout_s, theirs, checks, args),
                name=f"rank-{rank}",
                daemon=True,
            )
            with warnings.catch_warnings():
                # Python 3.12 warns of forking beside other threads; the ranks use none of them.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            theirs.close()  # before the next fork: held by another rank too, it would hide this one's death
            self.processes.append(process)
            self.pipes[ours] = rank

    def watch(self) -> None:
        open_pipes = dict(self.pipes)
        while open_pipes:
            ready = wait(list(open_pipes), max(0.0, self.deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                if not self._hear(pipe, open_pipes[pipe]):
                    del open_pipes[pipe]
            if self.failures:
                self.deadline = min(self.deadline, self.failures[0].at_s + _GRACE_S)
        if self.failures:
            first = min(self.failures, key=lambda failure: (not failure.killed, failure.at_s))
            for other in self.failures:
                if other is not first:
                    first.error.add_note(
                        f"rank {other.rank}, after that: {type(other.error).__name__}: {other.error}"
                    )
            self.outcomes.failed = (first.check, first.error)
        elif open_pipes:
            late = sorted(open_pipes.values())
            self.outcomes.failed = (self.at[late[0]], self._timeout(late))

    def stop(self) -> None:
        for process in self.processes:
            process.join(5.0 if self.outcomes.failed is None else 0.0)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self.pipes:
            pipe.close()

    def _hear(self, pipe: Connection, rank: int) -> bool:
        """Take one message; return whether there can be more."""
        try:
            message = pickle.loads(pipe.recv_bytes())
        except EOFError:
            self.processes[rank].join(5.0)
            code = self.processes[rank].exitcode
            how = (
                f"signal {signal.Signals(-code).name}"
                if code is not None and code < 0
                else f"exit status {code}"
            )
            self._fail(rank, time.monotonic(), RankError(f"rank {rank} died by {how}"), killed=True)
            return False
        kind, name, payload = message
        self.at[rank] = name
        if kind == "value":
            self.outcomes.values[name][rank] = payload
        elif kind == "error":
            at_s, pickled, text = payload
            error = RankError(text) if pickled is None else pickle.loads(pickled)
            self._fail(rank, at_s, error, text=text)
        return kind in ("value", "check")

    def _fail(
        self, rank: int, at_s: float, error: BaseException, *, killed: bool = False, text: str = ""
    ) -> None:
        error.add_note(
            f"on rank {rank} of {self.world_size}, in {self.at[rank]}\n{text}{_log(self.folder, rank)}"
        )
        self.failures.append(Failure(at_s, rank, self.at[rank], error, killed))

    def _timeout(self, late: list[int]) -> TimeoutError:
        for rank in late:
            os.kill(self.processes[rank].pid or 0, signal.SIGUSR1)
        time.sleep(0.3)  # for the stacks to be written
        places = ", ".join(f"{rank} in {self.at[rank]}" for rank in late)
        error = TimeoutError(
            f"after {self.timeout_s} s these ranks of {self.world_size} were not done: {places}"
        )
        for rank in late:
            error.add_note(f"rank {rank}{_log(self.folder, rank)}")
        return error


def _rank_main(
    rank: int,
    world_size: int,
    folder: str,
    timeout_s: float,
    pipe: Connection,
    checks: list[tuple[str, Function | str]],
    args: tuple[Any, ...],
) -> None:
    _attach(Path(folder), rank)
    torch.set_num_threads(1)
    name = checks[0][0]
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        for name, function in checks:
            pipe.send_bytes(pickle.dumps(("check", name, None)))
            value = _resolve(function)(rank, world_size, *args)
            pipe.send_bytes(pickle.dumps(("value", name, value)))
        dist.barrier()  # nobody leaves while another still talks to it
        dist.destroy_process_group()
        pipe.send_bytes(pickle.dumps(("done", name, None)))
    except BaseException as error:
        at_s = time.monotonic()  # one clock for all processes of a machine: the earliest is the cause
        pipe.send_bytes(pickle.dumps(("error", name, (at_s, _pickled(error), traceback.format_exc()))))
        time.sleep(
            2 * _GRACE_S
        )  # stay connected, so that the others do not fail for another reason; then be killed
        os._exit(1)


def _attach(folder: Path, rank: int) -> None:
    """Tie the rank to the test process's life and its output to a log of its own."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    log = os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = sys.stderr = os.fdopen(log, "w", buffering=1)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2)


def _resolve(function: Function | str) -> Function:
    if callable(function):
        return function
    module, _, name = function.rpartition(".")
    resolved: Function = getattr(import_module(module), name)
    return resolved


def _name(function: Function | str) -> str:
    return (
        function.rpartition(".")[2]
        if isinstance(function, str)
        else getattr(function, "__name__", repr(function))
    )


def _pickled(error: BaseException) -> bytes | None:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data


def _log(folder: Path, rank: int) -> str:
    path = folder / f"{rank}.log"
    text = path.read_text(errors="replace")[-_LOG_CHARS:].strip() if path.exists() else ""
    return f"\nits output:\n{text}" if text else ""
