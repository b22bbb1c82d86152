"""The jobs of a sweep, composed and checked before the first one starts."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict

from rlsp.cli.compose import Composer, checked
from rlsp.cli.folders import LAUNCHER_NAME, SWEEP_RECORD
from rlsp.cli.machine import machine_lines
from rlsp.cli.overrides import MAX_JOBS, count_values
from rlsp.cli.refusal import COMPOSITION_ERRORS, RefusalError, first_line
from rlsp.config import Config, Violation
from rlsp.report.sweep import SWEEP_NAME

_BASIC = f"{BasicSweeper.__module__}.{BasicSweeper.__qualname__}"
_OWN_NAMES = (SWEEP_RECORD, SWEEP_NAME, LAUNCHER_NAME)
_MAX_NAME_BYTES = 255
_SUBDIR = "hydra.sweep.subdir"


@dataclass(frozen=True)
class PlannedJob:
    """One job of a sweep before it starts.

    Attributes:
        number: Its number in the sweep.
        overrides: Its overrides, swept ones included.
        run_dir: Its run folder.
        refusal: Why it will be refused; empty if it may run.
    """

    number: int
    overrides: tuple[str, ...]
    run_dir: Path
    refusal: tuple[str, ...]


def plan_jobs(
    composer: Composer, master: DictConfig, sweep_dir: Path, *, here: bool
) -> tuple[PlannedJob, ...]:
    """Compose and check every job of a sweep.

    Args:
        composer: The command line's.
        master: The sweep's config.
        sweep_dir: The sweep's folder, empty.
        here: Whether the jobs run on this machine, so that it can be told what they lack here.

    Returns:
        The jobs in order.

    Raises:
        RefusalError: There is no job or there are too many, one cannot be composed, a folder is not one job's
            own, all are refused, or the sweeper is one that decides about its jobs while it runs.
    """
    if (sweeper := master.hydra.sweeper._target_) != _BASIC:
        raise RefusalError(
            [f"hydra/sweeper: {sweeper}: legal: basic, whose jobs are known before the first starts"]
        )
    params = master.hydra.sweeper.params or {}
    texts = [*(f"{key}={value}" for key, value in params.items()), *master.hydra.overrides.task]
    try:
        combinations = _combinations(composer.parse(texts))
        plan = tuple(
            _planned(composer, master, sweep_dir, number, job, here=here)
            for number, job in enumerate(combinations)
        )
    except COMPOSITION_ERRORS as error:
        raise RefusalError([first_line(error)]) from error
    _require_folders(plan, sweep_dir)
    if all(job.refusal for job in plan):
        common = set.intersection(*(set(job.refusal) for job in plan))
        raise RefusalError([*(line for line in plan[0].refusal if line in common), *_lines(plan, common)])
    return plan


def announcement(plan: Sequence[PlannedJob]) -> list[str]:
    """Say which jobs will be refused and why, one line a reason."""
    return _lines(plan, set())


def _combinations(overrides: list[Override]) -> list[list[str]]:
    """Return the overrides of each job, as Hydra's basic sweeper makes them."""
    counts = {
        override.get_key_element(): count_values(override) if override.is_sweep_override() else 1
        for override in overrides
    }
    if not 0 < prod(counts.values()) <= MAX_JOBS:
        found = prod(counts.values())
        raise RefusalError([f"the sweep has {found} jobs: legal: 1 to {MAX_JOBS}"])
    return BasicSweeper.split_arguments(overrides, None)[0]


def _planned(
    composer: Composer, master: DictConfig, sweep_dir: Path, number: int, overrides: list[str], *, here: bool
) -> PlannedJob:
    cfg = composer.hydra.config_loader.load_sweep_config(master, overrides)
    with open_dict(cfg.hydra.job):
        cfg.hydra.job.id = str(number)
        cfg.hydra.job.num = number
    state = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(cfg)  # what a job's values may refer to
    try:
        run_dir = sweep_dir / str(OmegaConf.select(cfg, _SUBDIR))
        config = checked(cfg)
        refusal = (*_machines(config), *(machine_lines(config) if here else ()))
    except RefusalError as error:
        refusal = error.lines
    finally:
        HydraConfig.instance().cfg = state
    return PlannedJob(number, tuple(cfg.hydra.overrides.task), run_dir, refusal)


def _machines(config: Config) -> list[str]:
    """Refuse several machines where a sweep starts: only in a job of a cluster may it come to have them."""
    if config.cluster.nodes == 1:
        return []
    legal = "1 in a sweep (hydra/launcher=slurm with cluster=slurm gives machines to each job)"
    return [str(Violation("cluster.nodes", config.cluster.nodes, legal))]


def _require_folders(plan: Sequence[PlannedJob], sweep_dir: Path) -> None:
    """Refuse folders that jobs would share, or that lie elsewhere: a run never mixes with another."""
    lines = []
    owners: dict[Path, int] = {}  # of each job's folder and of those above it
    for job in plan:
        below = job.run_dir.relative_to(sweep_dir).parts if job.run_dir.is_relative_to(sweep_dir) else ()
        shown = f"{_SUBDIR}={'/'.join(below) or job.run_dir} (job {job.number})"
        if not below or ".." in below or below[0] in _OWN_NAMES:
            lines.append(f"{shown}: legal: a folder inside that of the sweep")
            continue
        above = [*itertools.takewhile(lambda path: path != sweep_dir, job.run_dir.parents)]
        theirs = [owners[path] for path in (job.run_dir, *above) if path in owners]
        if job.run_dir in owners or any(
            path == plan[owners[path]].run_dir for path in above if path in owners
        ):
            lines.append(f"{shown}: legal: a folder for each job alone; job {theirs[0]} has it")
        if any(len(os.fsencode(part)) > _MAX_NAME_BYTES for part in below):
            lines.append(f"{shown}: legal: names of at most {_MAX_NAME_BYTES} bytes")
        owners.update(dict.fromkeys((job.run_dir, *above), job.number))
    if lines:
        raise RefusalError(lines)


def _lines(plan: Sequence[PlannedJob], besides: set[str]) -> list[str]:
    common = set.intersection(*(set(job.overrides) for job in plan))
    return [
        f"job {job.number} ({' '.join(text for text in job.overrides if text not in common)}): {line}"
        for job in plan
        for line in job.refusal
        if line not in besides
    ]
