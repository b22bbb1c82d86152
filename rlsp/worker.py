"""The processes that compute: `python -m rlsp.worker`, started by the process that owns the run.

`--host` imports everything once and keeps one process a rank of this machine: forked on CPU, executed anew on
CUDA (`--rank`), where a fork after initialisation is illegal.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from rlsp.board import Board, Place
from rlsp.config import DeviceKind, Job, violations
from rlsp.host import Host, die_with_parent, reset_signals
from rlsp.preload import preload

RUN_RANK = "rlsp.run:run_rank"
BOARD_NAME = "board"

RankFunction = Callable[[Job, Place], object]


def board_path(run_dir: Path | str) -> Path:
    """Return where the status board of a run lies."""
    return Path(run_dir) / "logs" / BOARD_NAME


def log_path(run_dir: Path | str, rank: int) -> Path:
    """Return the file that takes a rank's stdout and stderr."""
    return Path(run_dir) / "logs" / f"rank-{rank:02d}.log"


def host_log_path(run_dir: Path | str) -> Path:
    """Return the file that takes what the host itself prints."""
    return Path(run_dir) / "logs" / "host.log"


def error_path(run_dir: Path | str, rank: int) -> Path:
    """Return the file in which a rank says why it failed."""
    return Path(run_dir) / "logs" / f"rank-{rank:02d}.error.json"


def live(job: Job, place: Place, function: RankFunction) -> int:
    """Run one rank to its end and return its exit status: 0, or 1 with the reason in its error file."""
    place.board.phase("starting")
    try:
        function(job, place)
        place.board.phase("shutting down")
        _leave_process_groups()
    except BaseException as error:
        _report_failure(job, place, error)
        return 1
    place.board.done()
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a host or one rank; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m rlsp.worker", description="Host the ranks of a job, or be one."
    )
    parser.add_argument(
        "job", type=Path, metavar="JOB.json", help="the job, as `.hydra/job.json` of a run folder"
    )
    life = parser.add_mutually_exclusive_group(required=True)
    life.add_argument("--host", action="store_true", help="start the ranks of this machine")
    life.add_argument("--rank", type=int, help="be one of them")
    parser.add_argument("--parent", type=int, required=True, help="the process to die with")
    parser.add_argument(
        "--init-method", required=True, help="where ranks meet, as torch.distributed takes it"
    )
    parser.add_argument("--entry", default=RUN_RANK, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        job = Job.from_json(options.job.read_text())
    except (OSError, ValueError) as error:
        print(f"{options.job}: not a job: {error}", file=sys.stderr)
        return 2
    if found := violations(job.config):
        print(f"{options.job}: refused:", *map(str, found), sep="\n  ", file=sys.stderr)
        return 2
    if options.host:
        return _host(job, options)
    die_with_parent(options.parent)
    board = Board.open(board_path(job.run_dir))
    rank, local = options.rank, job.config.local_ranks.index(options.rank)
    place = Place(rank, job.config.world_size, local, options.init_method, board.writer(rank))
    _end_process(_live_here(job, place, options.entry))


def _host(job: Job, options: argparse.Namespace) -> int:
    die_with_parent(options.parent)
    protocol = os.dup(1)  # what libraries print must not reach the owner as an event
    _redirect(host_log_path(job.run_dir))
    forks = job.config.device.kind is DeviceKind.cpu
    function = _load(options.entry) if forks else None
    if forks:
        _know_once(job)
    board = Board.join(board_path(job.run_dir), job.config.world_size)
    init_method = options.init_method
    host_pid = os.getpid()
    ranks = job.config.local_ranks

    def start(rank: int) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            reset_signals()
            os.close(protocol)
            die_with_parent(host_pid)
            _redirect(log_path(job.run_dir, rank))
            if function is None:
                place_options = ["--rank", str(rank), "--init-method", init_method, "--parent", str(host_pid)]
                _execute_anew([str(options.job), "--entry", options.entry, *place_options])
            local = ranks.index(rank)
            place = Place(rank, job.config.world_size, local, init_method, board.writer(rank))
            _dump_stack_when_stopped()
            code = live(job, place, function)
        except BaseException:
            traceback.print_exc()
        finally:
            _end_process(code)

    gc.collect()
    gc.freeze()  # pages that ranks share stay shared
    launch = job.config.launch
    host = Host(
        board, lambda line: os.write(protocol, f"{line}\n".encode()), launch.timeout_s, launch.grace_s
    )
    return host.run(start, ranks)


def _live_here(job: Job, place: Place, entry: str) -> int:
    """Load the rank function and run it in this process."""
    _dump_stack_when_stopped()
    place.board.phase("importing")
    try:
        function = _load(entry)
    except BaseException as error:
        _report_failure(job, place, error)
        return 1
    return live(job, place, function)


def _load(entry: str) -> RankFunction:
    """Import a rank function, given as module:function, and what it needs."""
    if entry == RUN_RANK:
        preload()
    module, _, name = entry.partition(":")
    function: RankFunction = getattr(importlib.import_module(module), name)
    return function


def _know_once(job: Job) -> None:
    """Find out what is the same for every rank that is forked: its code, and the compiled kernels.

    The kernels are tried on one thread: a process that had more running could not be forked.
    """
    if "torch" not in sys.modules:
        return
    from rlsp import determinism
    from rlsp.model.assemble import exact_compiled
    from rlsp.report.provenance import loaded_source_hash

    loaded_source_hash()
    with determinism.apply(1):
        exact_compiled(job.config.numerics.compiled, job.config.device.kind)


def _leave_process_groups() -> None:
    """Shut torch.distributed down in order: gloo ranks that just exit abort now and then."""
    if "torch" not in sys.modules:
        return
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.barrier()  # noqa: TID251  (nobody closes a connection that a peer still reads)
        dist.destroy_process_group()


def _report_failure(job: Job, place: Place, error: BaseException) -> None:
    traceback.print_exception(error)
    report = {
        "rank": place.rank,
        "phase": place.board.last().phase,
        "exception": type(error).__qualname__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "failed_at_s": time.time(),
    }
    path = error_path(job.run_dir, place.rank)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(report, indent=2) + "\n")
    partial.replace(path)


def _dump_stack_when_stopped() -> None:
    """Leave the stack of every thread in the log when the rank crashes or is told to stop."""
    faulthandler.enable()
    faulthandler.register(signal.SIGTERM, chain=True)


def _redirect(path: Path) -> None:
    """Send stdout and stderr to the end of a file, line by line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for target in (1, 2):
        os.dup2(descriptor, target)
    os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _execute_anew(arguments: list[str]) -> NoReturn:
    os.execv(sys.executable, [sys.executable, "-P", "-m", "rlsp.worker", *arguments])


def _end_process(code: int) -> NoReturn:
    """End without the interpreter's own shutdown, which waits for threads of libraries."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
