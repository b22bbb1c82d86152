"""`rlsp resume=RUN`: go on with a run in its own folder, with its own overrides and what is given on top."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from hydra.errors import OverrideParseException
from omegaconf import DictConfig

from rlsp.cli.compose import Composer, checked, process_id
from rlsp.cli.folders import folder_of, of_node, pinned
from rlsp.cli.machine import machine_lines
from rlsp.cli.output import complain
from rlsp.cli.refusal import RefusalError
from rlsp.config import AUTO, Config, Resumption, Violation, to_plain
from rlsp.report.compare_rules import LENGTH_KEY, continuation_keys
from rlsp.report.continuation import continuation
from rlsp.report.files import VERDICT_NAME, EvidenceError
from rlsp.report.manifest import MANIFEST_NAME, Manifest, Status
from rlsp.report.provenance import source_hash
from rlsp.report.verdict import EXIT_STATUS, VerdictDocument, is_run_folder

RESUME_KEY = "resume"

_RUN_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")

Execute = Callable[[DictConfig, Path, str, Resumption | None], int]


def asked_to_resume(composer: Composer, overrides: Sequence[str]) -> str | None:
    """Return what the command line's `resume` names, if anything."""
    given = [text for text in overrides if text.startswith(f"{RESUME_KEY}=")][-1:]
    try:
        values = [each.value() for each in composer.parse(given)]
    except OverrideParseException:  # which composing explains
        return None
    return str(values[0]) if values and values[0] is not None else None


def run_there(composer: Composer, overrides: Sequence[str]) -> str | None:
    """Return the run folder that `resume=auto` goes on with; None where the run is yet to begin.

    Raises:
        RefusalError: Every command would have a folder of its own, so that none would ever go on.
    """
    run_dir = folder_of(composer.require_run(overrides), "hydra.run.dir")
    if process_id() in str(run_dir):
        raise RefusalError(
            [f"{RESUME_KEY}={AUTO}: legal: with hydra.run.dir=FOLDER that is the same each time"]
        )
    return str(run_dir) if is_run_folder(run_dir) else None


def resume(composer: Composer, overrides: Sequence[str], run: str, execute: Execute) -> int:
    """Go on with a run; return the exit status.

    Args:
        composer: The command line's.
        overrides: What the user gave, `resume` included.
        run: A run folder, or the id of a run.
        execute: Executes the composed job in the run's folder, under its id, from where it goes on; on
            another machine than node 0 in that machine's folder, from where node 0 will say.

    Raises:
        RefusalError: There is no such run, it cannot go on, or a value would change its results.
    """
    composer.require_composable(overrides)
    run_dir = _located(composer, overrides, run)
    try:
        manifest = Manifest.read(run_dir / MANIFEST_NAME)
    except EvidenceError as error:
        raise RefusalError([f"{RESUME_KEY}={run}: {error}"]) from error
    merged = [*_kept(composer, manifest.overrides, overrides), *overrides]
    cfg = composer.require_run(merged)
    config = checked(cfg)
    if lines := [*_changes(manifest, config), *machine_lines(config)]:
        raise RefusalError(lines)
    if (status := _finished(run_dir, manifest, config)) is not None:
        return status
    resumed = None if config.cluster.node else _from_where(run, run_dir, manifest)
    own_dir = of_node(run_dir, config.cluster.node)
    job = composer.hydra.run(
        config_name=composer.config_name,
        task_function=partial(_execute, execute, own_dir, manifest.run_id, resumed),
        overrides=[*merged, pinned("hydra.run.dir", own_dir), "hydra.output_subdir=null"],
    )
    return int(job.return_value)


def _execute(
    execute: Execute, run_dir: Path, run_id: str, resumed: Resumption | None, cfg: DictConfig
) -> int:
    return execute(cfg, run_dir, run_id, resumed)


def _from_where(run: str, run_dir: Path, manifest: Manifest) -> Resumption:
    """Choose the point at which a run goes on, and say what is not as one may expect it."""
    try:
        resumed, passed = continuation(run_dir)
    except EvidenceError as error:
        raise RefusalError([f"{RESUME_KEY}={run}: {line}" for line in str(error).splitlines()]) from error
    for line in (*(f"passed over: {line}" for line in passed), *_notes(manifest)):
        complain(f"rlsp: {line}")
    return resumed


def _located(composer: Composer, overrides: Sequence[str], run: str) -> Path:
    """Find the folder that a path or an id names; ids are looked for where runs are made."""
    folder = Path(run).absolute()
    if not folder.is_dir() and _RUN_ID.fullmatch(run):
        made = folder_of(composer.compose([*overrides, f"{RESUME_KEY}=null"]), "hydra.run.dir")
        found = [path for path in made.parent.parent.glob(f"*/{run}") if is_run_folder(path)]
        if len(found) != 1:
            among = f"{made.parent.parent}/*/{run}"
            raise RefusalError([f"{RESUME_KEY}={run}: legal: a run folder; {len(found)} match {among}"])
        folder = found[0]
    if not folder.is_dir() or not is_run_folder(folder):
        raise RefusalError([f"{RESUME_KEY}={run}: legal: a run folder or the id of a run"])
    return folder


def _kept(composer: Composer, stored: Sequence[str], given: Sequence[str]) -> list[str]:
    """Return those of a run's overrides that what is given now does not replace."""
    keys = {each.get_key_element().lstrip("~+") for each in composer.parse(given)} | {RESUME_KEY}
    groups = {key for key in keys if composer.hydra.config_loader.get_group_options(key)}
    kept = []
    for text, each in zip(stored, composer.parse(stored), strict=True):
        key = each.get_key_element().lstrip("~+")
        if key not in keys and key.partition(".")[0] not in groups:
            kept.append(text)
    return kept


def _changes(manifest: Manifest, config: Config) -> list[str]:
    """List every value that would change the results, with the one that the run has."""
    before, now = continuation_keys(manifest.config), continuation_keys(to_plain(config), manifest.config)
    absent = object()
    lines = []
    for key in sorted(before.keys() | now.keys()):
        had, has = (side.get(key, absent) for side in (before, now))
        if had != has:
            said, wanted = ("absent" if value is absent else value for value in (has, had))
            legal = f"{_shown(wanted)}, which the run has: it decides the results"
            lines.append(str(Violation(key, said, legal)))
    planned = manifest.config.get(LENGTH_KEY)
    if isinstance(planned, int) and config.num_rollouts < planned:
        lines.append(
            str(Violation(LENGTH_KEY, config.num_rollouts, f"at least {planned}, which the run has"))
        )
    return lines


def _shown(value: object) -> str:
    return str(Violation("", value, "")).removeprefix("=").removesuffix(": legal: ")


def _finished(run_dir: Path, manifest: Manifest, config: Config) -> int | None:
    """Return the status of a run that has nothing left to do, and say so; None of one that has."""
    if manifest.status is not Status.FINISHED or config.num_rollouts != manifest.config.get(LENGTH_KEY):
        return None
    try:
        verdict = VerdictDocument.read(run_dir / VERDICT_NAME).verdict
    except EvidenceError:
        return None
    print(
        f"{verdict.value}  {manifest.run_id}\n  all {config.num_rollouts} rollouts are there: nothing to do; "
        f"a larger {LENGTH_KEY} extends the run\n  folder: {run_dir}"
    )
    return EXIT_STATUS[verdict]


def _notes(manifest: Manifest) -> list[str]:
    """Say what else is not as it was: it may change bits that no key decides."""
    if manifest.code.source_hash == source_hash():
        return []
    return ["other code than before goes on with this run; the manifest names both"]
