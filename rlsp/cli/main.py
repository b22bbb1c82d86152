"""The `rlsp` command: compose and check first, then run one job or a sweep of them.

Exit status: 0 passed, 1 crashed or aborted, 2 refused before starting, 3 a gate failed, 4 inconclusive;
after a sweep the worst of its jobs' in the order 1, 2, 3, 4, 0, and 3 where jobs that must agree do not.
"""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from argparse import Namespace
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlsp.cli.compose import (
    COMPOSITION_ERRORS,
    CONFIG_NAME,
    VERSION_BASE,
    Composer,
    RefusalError,
    checked,
    conf_dir,
    new_id,
    open_composer,
    process_id,
)
from rlsp.config import Config, Job

PASSED, CRASHED, REFUSED, FAILED, INCONCLUSIVE = range(5)

_WORST_FIRST = (CRASHED, REFUSED, FAILED, INCONCLUSIVE, PASSED)


def main() -> int:
    """Run the command line in `sys.argv` and return the exit status."""
    args = get_args_parser().parse_args()
    process_id.cache_clear()
    try:
        _refuse_under_torchrun()
        if args.help or args.hydra_help or args.cfg or args.resolve or args.info or args.shell_completion:
            return _inform()
        if args.experimental_rerun is not None:
            raise RefusalError(
                ["--experimental-rerun: not supported; give the overrides in .hydra/overrides.yaml"]
            )
        with open_composer(args) as composer:
            return _sweep(composer, args) if _is_sweep(composer, args) else _run(composer, args.overrides)
    except RefusalError as refusal:
        _print_refusal("refused, nothing was started", refusal.lines)
        return REFUSED
    except KeyboardInterrupt:
        print("rlsp: interrupted", file=sys.stderr)
        return CRASHED


def worst(statuses: Iterable[int]) -> int:
    """Return the status that stands for several: the first of 1, 2, 3, 4, 0 among them; others count as 1."""
    seen = {status if status in _WORST_FIRST else CRASHED for status in statuses}
    return next((status for status in _WORST_FIRST if status in seen), PASSED)


def execute_job(cfg: DictConfig) -> int:
    """Check and execute one composed job; Hydra has made its folder.

    Never raises an `Exception`: under a sweep that would end up as status 1 for every kind of failure.
    """
    context = HydraConfig.get()
    run_dir = Path(context.runtime.output_dir)
    sweeping = context.mode == RunMode.MULTIRUN
    try:
        config = checked(cfg)
        _require_empty(run_dir, besides=context.output_subdir)
    except RefusalError as refusal:
        what = f"job {context.job.num} refused" if sweeping else "refused"
        _print_refusal(what, refusal.lines)
        _remove_unused(run_dir, context.output_subdir)
        return REFUSED
    return _execute(_job(config, run_dir, new_id() if sweeping else process_id(), context.overrides.task))


def _job(config: Config, run_dir: Path, run_id: str, overrides: Sequence[str]) -> Job:
    return Job(
        config=config,
        run_id=run_id,
        run_dir=str(run_dir),
        overrides=tuple(overrides),
        command_line=(Path(sys.argv[0]).name, *sys.argv[1:]),
        started_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
    )


def _execute(job: Job) -> int:
    try:
        from rlsp.launch import execute

        return execute(job)
    except (Exception, SystemExit) as error:
        log = Path(job.run_dir) / "logs" / "launcher.error.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(traceback.format_exc())
        print(
            f"rlsp: crashed: {type(error).__name__}: {error}\nrlsp: the traceback is in {log}",
            file=sys.stderr,
        )
        return CRASHED


def _run(composer: Composer, overrides: list[str]) -> int:
    overrides = [*overrides, "hydra.mode=RUN"]
    run_dir = _folder(composer.require_run(overrides), "hydra.run.dir")
    _require_empty(run_dir)
    try:
        job = composer.hydra.run(
            config_name=composer.config_name, task_function=execute_job, overrides=overrides
        )
    except OSError as error:
        raise RefusalError([f"run folder {run_dir}: cannot be written: {error.strerror}"]) from error
    return int(job.return_value)


def _sweep(composer: Composer, args: Namespace) -> int:
    overrides = [*args.overrides, "hydra.mode=MULTIRUN"]
    sweep_dir = _folder(composer.require_sweep(overrides), "hydra.sweep.dir")
    _require_empty(sweep_dir)
    absent = [folder for folder in (sweep_dir, *sweep_dir.parents) if not folder.exists()]
    try:
        batches = composer.hydra.multirun(
            config_name=composer.config_name, task_function=execute_job, overrides=overrides
        )
    except COMPOSITION_ERRORS as error:
        raise RefusalError([str(error)]) from error
    except OSError as error:
        raise RefusalError([f"sweep folder {sweep_dir}: cannot be written: {error.strerror}"]) from error
    finally:
        _remove_idle_sweep(sweep_dir, absent)
    jobs = [job for batch in batches for job in batch]
    if not jobs:
        raise RefusalError(["the sweep is empty: legal: values, ranges or globs that name at least one job"])
    statuses = [int(job.return_value) for job in jobs]
    if sweep_dir.is_dir():
        from rlsp.cli.sweep import conclude

        statuses += conclude(sweep_dir, jobs)
    return worst(statuses)


def _is_sweep(composer: Composer, args: Namespace) -> bool:
    mode = composer.hydra.get_mode(config_name=composer.config_name, overrides=args.overrides)
    return bool(args.multirun) or mode == RunMode.MULTIRUN


def _inform() -> int:
    """Let Hydra answer --cfg, --info, --help and shell completion."""
    answer = hydra.main(version_base=VERSION_BASE, config_path=str(conf_dir()), config_name=CONFIG_NAME)(
        execute_job
    )
    try:
        answer()
    except SystemExit as end:
        return REFUSED if end.code else PASSED
    except COMPOSITION_ERRORS as error:
        raise RefusalError([str(error)]) from error
    return PASSED


def _refuse_under_torchrun() -> None:
    # torchrun's mark is read here: if anything started below it, every rank would compose its own run.
    if "TORCHELASTIC_RUN_ID" in os.environ:  # noqa: TID251
        raise RefusalError(
            ["under torchrun start `python -m rlsp.worker JOB.json`; rlsp itself starts its ranks"]
        )


def _folder(cfg: DictConfig, key: str) -> Path:
    try:
        return Path(OmegaConf.select(cfg, key, throw_on_missing=True)).resolve()
    except OmegaConfBaseException as error:
        raise RefusalError([f"{key}: {str(error).splitlines()[0]}"]) from error


def _require_empty(folder: Path, besides: str | None = None) -> None:
    """Refuse a folder that holds anything (besides Hydra's own): a run never mixes with another."""
    if folder.exists() and (not folder.is_dir() or any(entry.name != besides for entry in folder.iterdir())):
        raise RefusalError([f"run folder {folder}: legal: a folder that is absent or empty"])


def _remove_unused(run_dir: Path, hydra_subdir: str | None) -> None:
    """Take back what Hydra wrote for a job that was refused, unless the folder holds something else."""
    if hydra_subdir and {entry.name for entry in run_dir.iterdir()} == {hydra_subdir}:
        shutil.rmtree(run_dir / hydra_subdir)
    _remove_empty([run_dir])


def _remove_idle_sweep(sweep_dir: Path, absent: Sequence[Path]) -> None:
    """Take back the folders of a sweep of which no job was started."""
    record = sweep_dir / "multirun.yaml"
    if record.is_file() and len(list(sweep_dir.iterdir())) == 1:
        record.unlink()
        _remove_empty([sweep_dir, *absent])


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _print_refusal(what: str, lines: Iterable[str]) -> None:
    print("\n".join([f"rlsp: {what}:", *(f"  {line}" for line in lines)]), file=sys.stderr)
