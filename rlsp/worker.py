"""The processes that compute: `python -m rlsp.worker`.

`--host JOB.json` imports everything once and keeps one process a rank: forked on CPU, executed anew on CUDA,
where a fork after initialisation is illegal. `JOB.json` alone is one rank in the environment of torchrun.
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from rlsp.board import Board, Place
from rlsp.cli.streams import steady_streams
from rlsp.config import DeviceKind, Job, violations
from rlsp.determinism import environment_switches, environment_values
from rlsp.ending import Abort, RankError, conclude
from rlsp.host import Host, die_with_parent, reset_signals
from rlsp.report import manifest

RUN_RANK = "rlsp.run:run_rank"
BOARD_NAME = "board"
_EVIDENCE = ("consistency.json", "VERDICT.json")
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# The last is what torch imports at the first backward pass that is given a gradient: here once for all.
_PRELOAD = ("torch", "torch.distributed", "megatron.core.models.gpt", "torch.fx.experimental.symbolic_shapes")

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
    parser.add_argument("--host", action="store_true", help="start every rank of the job on this machine")
    parser.add_argument("--parent", type=int, default=os.getppid(), help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--init-method", help="where the ranks of a host meet, as torch.distributed takes it")
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
    if options.host and options.init_method is None:
        parser.error("--host needs --init-method, for instance file:///tmp/an-absent-file")
    if options.host:
        return _host(job, options)
    if options.rank is not None:
        die_with_parent(options.parent)
        board = Board.open(board_path(job.run_dir))
        rank, size = options.rank, job.config.world_size
        place = Place(rank, size, rank, options.init_method, board.writer(rank))
        _end_process(_live_here(job, place, options.entry))
    return _torchrun_rank(job, options.entry)


def _host(job: Job, options: argparse.Namespace) -> int:
    die_with_parent(options.parent)
    protocol = os.dup(1)  # what libraries print must not reach the owner as an event
    _redirect(host_log_path(job.run_dir))
    forks = job.config.device.kind is DeviceKind.cpu
    function = _load(options.entry) if forks else None
    board = Board.join(board_path(job.run_dir), job.config.world_size)
    init_method = options.init_method
    host_pid = os.getpid()

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
            place = Place(rank, job.config.world_size, rank, init_method, board.writer(rank))
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
    return host.run(start)


def _torchrun_rank(job: Job, entry: str) -> int:
    """Be the rank that torchrun's environment names."""
    steady_streams()
    values = environment_values(_TORCHRUN)
    if held := [name for name in _EVIDENCE if (Path(job.run_dir) / name).exists()]:
        print(f"rlsp.worker: {job.run_dir} already holds a run's {' and '.join(held)};", file=sys.stderr)
        print("  give the job a run_dir that does not exist: evidence is never replaced", file=sys.stderr)
        return 2
    if faults := _torchrun_faults(values, job.config.world_size):
        print(
            "rlsp.worker: this is no torchrun environment for the job:", *faults, sep="\n  ", file=sys.stderr
        )
        print("  start it by torchrun, or host all ranks here with --host", file=sys.stderr)
        return 2
    rank = int(values["RANK"] or 0)
    board = Board.join(board_path(job.run_dir), job.config.world_size)
    local_rank = int(values["LOCAL_RANK"] or 0)
    place = Place(rank, job.config.world_size, local_rank, "env://", board.writer(rank))
    if rank:
        _end_process(_live_here(job, place, entry))
    # Nobody owns this run: rank 0 writes its manifest and its verdict, and nothing mirrors it.
    error_path(job.run_dir, rank).unlink(missing_ok=True)
    manifest.begin(job, environment_switches())
    code = _live_here(job, place, entry)
    error = RankError.read(error_path(job.run_dir, rank))
    why = error.describe() if error else f"status {code}"
    abort = Abort(f"rank 0 failed: {why}", (place.board.last().describe(),)) if code else None
    judgement = conclude(job.run_dir, abort)
    print("\n  ".join([judgement.verdict.value, *judgement.reasons, f"folder: {job.run_dir}"]))
    _end_process(judgement.exit_status)


def _torchrun_faults(values: Mapping[str, str | None], world_size: int) -> list[str]:
    """List what is missing or inconsistent, each naming variable, value and legal values."""
    limits = {
        "RANK": range(world_size),
        "LOCAL_RANK": range(world_size),
        "WORLD_SIZE": range(world_size, world_size + 1),
        "MASTER_PORT": range(1, 65536),
    }
    faults = []
    for name, value in values.items():
        legal = limits.get(name)
        words = "a host name"
        if legal is not None:
            words = (
                f"an integer in {legal[0]}..{legal[-1]}"
                if len(legal) > 1
                else f"{legal[0]} (the job's layout)"
            )
        if not value:
            faults.append(f"{name} is not set: legal: {words}")
        elif legal is not None and not (value.isascii() and value.isdigit() and int(value) in legal):
            faults.append(f"{name}={value}: legal: {words}")
    return faults


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
        for name in _PRELOAD:
            importlib.import_module(name)
    module, _, name = entry.partition(":")
    function: RankFunction = getattr(importlib.import_module(module), name)
    return function


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
