"""The `rlsp` command: compose and check first, then run one job or a sweep of them.

Exit status: 0 passed, 1 crashed or aborted, 2 refused before starting, 3 a gate failed, 4 inconclusive;
after a sweep the worst of its jobs' in the order 1, 2, 3, 4, 0, and 3 where jobs that must agree do not.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from rlsp.cli.compose import (
    Composer,
    checked,
    new_id,
    open_composer,
    process_id,
)
from rlsp.cli.folders import (
    HYDRA_NAME,
    folder_of,
    is_only_taken,
    made,
    of_node,
    pinned,
    prune,
    refusing,
    retaken_run,
    rewrite_record,
    taken_run,
    write_record,
)
from rlsp.cli.machine import machine_lines
from rlsp.cli.overrides import spelt_out
from rlsp.cli.refusal import COMPOSITION_ERRORS, RefusalError, first_line
from rlsp.cli.resume import RESUME_KEY, asked_to_resume, resume, run_there
from rlsp.cli.streams import steady_streams
from rlsp.config import AUTO, Config, Job, Resumption
from rlsp.determinism import environment_values
from rlsp.report.statuses import CRASHED, PASSED, REFUSED

# Hydra would write this folder before anybody knows whether the run may start.
_NO_RECORD = "hydra.output_subdir=null"


def run_command() -> int:
    """Run the command line in `sys.argv` and return the exit status.

    Raises:
        KeyboardInterrupt: A signal asked to stop; what ran is sealed.
    """
    parser = get_args_parser()
    args = parser.parse_args()
    process_id.cache_clear()
    try:
        _refuse_surroundings(args.overrides)
        args.overrides = spelt_out(args.overrides)
        if args.experimental_rerun is not None:
            raise RefusalError(
                ["--experimental-rerun: not supported; give the overrides in .hydra/overrides.yaml"]
            )
        with open_composer(args) as composer:
            if args.help or args.hydra_help or args.cfg or args.resolve or args.info or args.shell_completion:
                return _inform(composer, parser, args)
            return _sweep(composer, args) if _is_sweep(composer, args) else _run(composer, args.overrides)
    except RefusalError as refusal:
        print_lines("refused, nothing was started", refusal.lines)
        return REFUSED


def execute_job(cfg: DictConfig, command_line: Sequence[str] = (), *, auto: bool = False) -> int:
    """Check and execute one composed job; Hydra has made its folder and left it empty.

    A sweep's launcher may call this in another process. Never raises an `Exception`: under a sweep that would
    end up as status 1 for every kind of failure.

    Args:
        cfg: The composed config.
        command_line: The command that the user gave.
        auto: Whether it said `resume=auto`: a folder is taken again whose owner ended before there was a run.
    """
    steady_streams()
    context = HydraConfig.get()
    run_dir = Path(context.runtime.output_dir)
    sweeping = context.mode == RunMode.MULTIRUN
    with ExitStack() as held:
        try:
            config = checked(cfg)
            if lines := [*([] if auto else _only_alone(config)), *machine_lines(config)]:
                raise RefusalError(lines)
            if sweeping and config.cluster.node:  # node 0 has the job's own folder
                run_dir = of_node(run_dir, config.cluster.node)
                run_dir.mkdir(parents=True, exist_ok=True)
            with suppress(Exception):  # what cannot be imported is a crash, and told as one below
                importlib.import_module("rlsp.launch")  # slow: an interrupt here should still leave nothing
            with refusing(run_dir):
                again = auto and is_only_taken(run_dir)
                held.enter_context((retaken_run if again else taken_run)(run_dir))
                write = rewrite_record if again else write_record
                write(run_dir, cfg, OmegaConf.create({"hydra": context}), context.overrides.task)
        except RefusalError as refusal:
            print_lines(f"job {context.job.num} refused" if sweeping else "refused", refusal.lines)
            if sweeping:
                prune(run_dir, Path(context.sweep.dir))
            return REFUSED
        run_id = new_id() if sweeping else process_id()
        return _execute(_job(config, run_dir, run_id, context.overrides.task, command_line))


def execute_resumed(
    cfg: DictConfig, run_dir: Path, run_id: str, resumed: Resumption | None, command_line: Sequence[str]
) -> int:
    """Go on with a run in its folder; the config was checked against the run's.

    Args:
        cfg: The composed config.
        run_dir: The run's folder; on another machine than node 0 that machine's, which may be new.
        run_id: Its id.
        resumed: Where it goes on; None on another machine, which node 0 will tell.
        command_line: The command that the user gave.
    """
    steady_streams()
    context = HydraConfig.get()
    with ExitStack() as held:
        try:
            with suppress(Exception):
                importlib.import_module("rlsp.launch")
            with refusing(run_dir):
                held.enter_context(retaken_run(run_dir))
                rewrite_record(run_dir, cfg, OmegaConf.create({"hydra": context}), context.overrides.task)
        except RefusalError as refusal:
            print_lines("refused", refusal.lines)
            return REFUSED
        return _execute(_job(checked(cfg), run_dir, run_id, context.overrides.task, command_line, resumed))


def print_lines(what: str, lines: Iterable[str]) -> None:
    """Print a heading and lines below it on stderr."""
    print("\n".join([f"rlsp: {what}:", *(f"  {line}" for line in lines)]), file=sys.stderr)


def _only_alone(config: Config) -> list[str]:
    """Refuse to resume as a job of a sweep, or because an experiment says so."""
    if config.resume is None:
        return []
    return [f"{RESUME_KEY}={config.resume}: legal: on the command line of one run"]


def _job(
    config: Config,
    run_dir: Path,
    run_id: str,
    overrides: Sequence[str],
    command: Sequence[str],
    resumed: Resumption | None = None,
) -> Job:
    return Job(
        config=config,
        run_id=run_id,
        run_dir=str(run_dir),
        overrides=tuple(overrides),
        command_line=tuple(command),
        started_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        resumed=resumed,
    )


def _execute(job: Job) -> int:
    try:
        if job.config.cluster.node:
            from rlsp.node import assist

            return assist(job)
        from rlsp.launch import execute

        return execute(job)
    except (Exception, SystemExit) as error:
        print(f"rlsp: crashed: {type(error).__name__}: {error}", file=sys.stderr)
        log = Path(job.run_dir) / "logs" / "launcher.error.log"
        try:
            log.write_text(traceback.format_exc())
            print(f"rlsp: the traceback is in {log}", file=sys.stderr)
        except OSError:  # whatever broke the run may have broken its folder, too
            traceback.print_exc()
        return CRASHED


def _run(composer: Composer, overrides: list[str]) -> int:
    overrides = [*overrides, "hydra.mode=RUN"]
    run = asked_to_resume(composer, overrides)
    auto = run == AUTO
    if auto:
        run = run_there(composer, overrides)
    if run is not None:
        return resume(composer, overrides, run, partial(execute_resumed, command_line=_command_line()))
    cfg = composer.require_run(overrides)
    run_dir = of_node(folder_of(cfg, "hydra.run.dir"), cfg.cluster.node)
    _require_own_record(cfg)
    folder = nullcontext() if auto and is_only_taken(run_dir) else made(run_dir)
    with folder, refusing(run_dir):
        job = composer.hydra.run(
            config_name=composer.config_name,
            task_function=partial(execute_job, command_line=_command_line(), auto=auto),
            overrides=[*overrides, pinned("hydra.run.dir", run_dir), _NO_RECORD],
        )
    return int(job.return_value)


def _sweep(composer: Composer, args: Namespace) -> int:
    from rlsp.cli.sweep import Sweep

    overrides = [*args.overrides, "hydra.mode=MULTIRUN"]
    master = composer.require_sweep(overrides)
    sweep_dir = folder_of(master, "hydra.sweep.dir")
    _require_own_record(master)
    overrides += [pinned("hydra.sweep.dir", sweep_dir), _NO_RECORD]
    sweep = Sweep(composer, overrides, sweep_dir)
    if lines := sweep.announcement():
        print_lines("these jobs will be refused, the others run", lines)
    return sweep.run(partial(execute_job, command_line=_command_line()))


def _command_line() -> tuple[str, ...]:
    return (Path(sys.argv[0]).name, *sys.argv[1:])


def _is_sweep(composer: Composer, args: Namespace) -> bool:
    mode = composer.hydra.get_mode(config_name=composer.config_name, overrides=args.overrides)
    return bool(args.multirun) or mode == RunMode.MULTIRUN


def _require_own_record(cfg: DictConfig) -> None:
    if (name := cfg.hydra.output_subdir) != HYDRA_NAME:
        shown = "null" if name is None else name or "''"
        raise RefusalError([f"hydra.output_subdir={shown}: legal: {HYDRA_NAME}"])


def _inform(composer: Composer, parser: ArgumentParser, args: Namespace) -> int:
    """Let Hydra answer --cfg, --info, --help and shell completion."""
    hydra, name = composer.hydra, composer.config_name
    asked = [args.run, args.multirun, args.cfg is not None, args.shell_completion, args.info is not None]
    if sum(asked) > 1:
        raise RefusalError(["--run, --multirun, --cfg, --info, --shell-completion: legal: one of them"])
    if args.resolve and not (args.cfg or args.help):
        raise RefusalError(["--resolve: legal: together with --cfg or --help"])
    if not args.shell_completion:
        composer.require_composable(args.overrides)
    try:
        if args.help:
            hydra.app_help(config_name=name, args_parser=parser, args=args)
        elif args.hydra_help:
            hydra.hydra_help(config_name=name, args_parser=parser, args=args)
        elif args.cfg:
            hydra.show_cfg(name, args.overrides, args.cfg, args.package, args.resolve)
        elif args.info is not None:
            hydra.show_info(args.info, config_name=name, overrides=args.overrides)
        else:
            hydra.shell_completion(config_name=name, overrides=args.overrides)
    except SystemExit:
        return REFUSED
    except COMPOSITION_ERRORS as error:
        asked_for = " ".join(args.overrides)
        prefix = f"--shell-completion {asked_for}: " if args.shell_completion else ""
        raise RefusalError([prefix + first_line(error)]) from error
    return PASSED


def _refuse_surroundings(overrides: Sequence[str]) -> None:
    """Refuse where no run could be started, whatever its config."""
    found = environment_values(("TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE"))
    if found["TORCHELASTIC_RUN_ID"] is not None:
        # Without it, every process that torchrun starts would compose a run of its own.
        if not any(text.startswith("cluster=") for text in overrides):
            raise RefusalError(["under torchrun: legal: with cluster=torchrun (docs/cluster.md)"])
        if found["LOCAL_WORLD_SIZE"] != "1":
            shown = f"torchrun --nproc-per-node={found['LOCAL_WORLD_SIZE']}"
            raise RefusalError([f"{shown}: legal: 1; rlsp starts the ranks of a machine itself"])
    try:
        Path.cwd()
    except OSError as error:
        raise RefusalError(["the current folder is gone: legal: to start in one that exists"]) from error
    for text in sys.argv:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RefusalError([f"{text!a}: legal: text in UTF-8"]) from error
