"""The file sweep.json: every job of a sweep with its results, and whether the jobs that must agree do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import JsonValue

from rlsp.report.compare_rules import result_hash, result_keys
from rlsp.report.documents import Document
from rlsp.report.files import VERDICT_NAME, EvidenceError, canonical_json
from rlsp.report.findings import Verdict
from rlsp.report.manifest import MANIFEST_NAME, Manifest, Status
from rlsp.report.recorder import CONSISTENCY_NAME
from rlsp.report.records import ConsistencyReport, float64_bits
from rlsp.report.statuses import REFUSED
from rlsp.report.verdict import VerdictDocument, is_run_folder

SWEEP_NAME = "sweep.json"
AnyDocument = TypeVar("AnyDocument", bound=Document)


@dataclass(frozen=True)
class JobOutcome:
    """What the entry point knows of one job.

    Attributes:
        number: Its number in the sweep.
        overrides: Its overrides, swept ones included.
        status: Its exit status; 2 for a job that was refused, None for one that was never started, or
            that goes on without the sweep.
        run_dir: Where its run folder is, if it ran: whatever lies there otherwise is not this job's.
    """

    number: int
    overrides: tuple[str, ...]
    status: int | None
    run_dir: Path


class SweepJob(Document):
    """One job; what its folder does not say is None, and so is `status` where the job was not seen to end.

    `complete` tells whether every rollout that was planned is recorded; only such jobs are compared with each
    other. `gradient_norm_bits` has one float64 an update, 16 hex digits each. `result_hash` is equal for jobs
    whose results must be the same bits.
    """

    number: int
    overrides: tuple[str, ...]
    status: int | None
    folder: str | None
    run_id: str | None
    verdict: Verdict | None
    layout: dict[str, int] | None
    rollout_layout: dict[str, int] | None
    micro_batch_size: int | None
    complete: bool
    active_tokens: int | None
    mismatched_tokens: int | None
    mismatched_rows: int | None
    weights_digest: str | None
    gradient_norm_bits: tuple[str, ...] | None
    optimizer_digest: str | None
    result_hash: str | None


class SweepGroup(Document):
    """Jobs that must agree, by number.

    `settings` are the keys in which this group differs from others of the sweep. `weights`, `gradient_norms`
    and `optimizer` list the jobs that share one final weights digest, one list of norms, one final optimizer
    digest: one tuple where all agree. Jobs of native arithmetic or an external engine are allowed to differ:
    `judged` is then False.
    """

    result_hash: str
    settings: dict[str, JsonValue]
    jobs: tuple[int, ...]
    layouts: int
    rollout_layouts: int
    micro_batch_sizes: int
    weights: tuple[tuple[int, ...], ...]
    gradient_norms: tuple[tuple[int, ...], ...]
    optimizer: tuple[tuple[int, ...], ...]
    judged: bool
    sentence: str

    @property
    def agrees(self) -> bool:
        """Tell whether all jobs ended with the same bits."""
        return len(self.weights) == len(self.gradient_norms) == len(self.optimizer) == 1


class SweepSummary(Document):
    """The file sweep.json."""

    schema_version: Literal[1] = 1
    jobs: tuple[SweepJob, ...]
    groups: tuple[SweepGroup, ...]

    @property
    def disagrees(self) -> bool:
        """Tell whether jobs that promised the same bits did not end with them."""
        return any(group.judged and not group.agrees for group in self.groups)


def summarise(sweep_dir: Path, outcomes: Sequence[JobOutcome]) -> SweepSummary:
    """Read what every job of a sweep left and write sweep.json.

    Raises:
        EvidenceError: The sweep folder cannot be written.
    """
    summary = compose_summary(sweep_dir, outcomes)
    summary.write(sweep_dir / SWEEP_NAME)
    return summary


def compose_summary(sweep_dir: Path, outcomes: Sequence[JobOutcome]) -> SweepSummary:
    """Read what every job of a sweep left, by number, and say what sweep.json must; nothing is written."""
    read = [_job(sweep_dir, outcome) for outcome in sorted(outcomes, key=lambda o: o.number)]
    return SweepSummary(jobs=tuple(job for job, _ in read), groups=_groups(read))


def _job(sweep_dir: Path, outcome: JobOutcome) -> tuple[SweepJob, Mapping[str, Any]]:
    """Return a job and its composed config, which is empty where nothing says it."""
    folder = outcome.run_dir
    ran = outcome.status not in (None, REFUSED)
    manifest = _read(Manifest, folder / MANIFEST_NAME) if ran else None
    report = _read(ConsistencyReport, folder / CONSISTENCY_NAME) if ran else None
    seal = _read(VerdictDocument, folder / VERDICT_NAME) if ran else None
    config = manifest.config if manifest else {}
    last = report.rollouts[-1] if report and report.rollouts else None
    size = config.get("micro_batch_size")
    job = SweepJob(
        number=outcome.number,
        overrides=outcome.overrides,
        status=outcome.status,
        folder=_relative(folder, sweep_dir) if _is_there(outcome) else None,
        run_id=manifest.run_id if manifest else None,
        verdict=seal.verdict if seal else None,
        layout=manifest.layout.model_dump(exclude={"table"}) if manifest else None,
        rollout_layout=manifest.rollout_layout.model_dump(exclude={"table"}) if manifest else None,
        micro_batch_size=size if isinstance(size, int) else None,
        complete=_is_complete(manifest, report),
        active_tokens=report.total.active_tokens if report else None,
        mismatched_tokens=report.total.mismatched_tokens if report else None,
        mismatched_rows=report.mismatched_rows if report else None,
        weights_digest=last.weights_digest if last else None,
        gradient_norm_bits=_norms(report) if report else None,
        optimizer_digest=last.optimizer_digest if last else None,
        result_hash=result_hash(config) if manifest else None,
    )
    return job, config


def _is_there(outcome: JobOutcome) -> bool:
    """Tell whether a job has a folder; one that was not seen to end may go on in it."""
    if outcome.status is None:
        return is_run_folder(outcome.run_dir)
    return outcome.status != REFUSED and outcome.run_dir.is_dir()


def _is_complete(manifest: Manifest | None, report: ConsistencyReport | None) -> bool:
    return (
        manifest is not None
        and report is not None
        and manifest.status is Status.FINISHED
        and len(report.rollouts) == manifest.config.get("num_rollouts")
    )


def _norms(report: ConsistencyReport) -> tuple[str, ...]:
    return tuple(float64_bits(norm) for rollout in report.rollouts for norm in rollout.gradient_norms)


def _groups(read: Iterable[tuple[SweepJob, Mapping[str, Any]]]) -> tuple[SweepGroup, ...]:
    """Bring the complete jobs whose results must agree together, in the order of their first jobs."""
    members: dict[str, list[SweepJob]] = {}
    configs: dict[str, Mapping[str, Any]] = {}
    for job, config in read:
        if job.complete and job.result_hash is not None:
            members.setdefault(job.result_hash, []).append(job)
            configs.setdefault(job.result_hash, config)
    keys = {key: result_keys(config) for key, config in configs.items()}
    everywhere = {name for settings in keys.values() for name in settings}
    varied = sorted(
        name for name in everywhere if len({canonical_json(s.get(name)) for s in keys.values()}) > 1
    )
    return tuple(
        _group(key, jobs, {name: keys[key].get(name) for name in varied}, _promises(keys[key]))
        for key, jobs in members.items()
    )


def _promises(settings: Mapping[str, Any]) -> bool:
    """Tell whether jobs with these settings promise the same bits."""
    routes = [value for key, value in settings.items() if key.startswith("numerics.routes.")]
    return set(routes) == {"strict"} and settings.get("rollout.engine") == "native"


def _group(key: str, jobs: Sequence[SweepJob], settings: dict[str, Any], judged: bool) -> SweepGroup:
    group = SweepGroup(
        result_hash=key,
        settings=settings,
        jobs=tuple(job.number for job in jobs),
        layouts=len(_alike(jobs, lambda job: job.layout)),
        rollout_layouts=len(_alike(jobs, lambda job: job.rollout_layout)),
        micro_batch_sizes=len(_alike(jobs, lambda job: job.micro_batch_size)),
        weights=_alike(jobs, lambda job: job.weights_digest),
        gradient_norms=_alike(jobs, lambda job: job.gradient_norm_bits),
        optimizer=_alike(jobs, lambda job: job.optimizer_digest),
        judged=judged,
        sentence="",
    )
    widths = len({job.rollout_layout["tp"] for job in jobs if job.rollout_layout})
    return group.model_copy(update={"sentence": _sentence(group, rollouts_vary=widths > 1)})


def _alike(jobs: Iterable[SweepJob], value: Callable[[SweepJob], Any]) -> tuple[tuple[int, ...], ...]:
    """List the jobs that share a value, one tuple a value."""
    sharing: dict[bytes, list[int]] = {}
    for job in jobs:
        sharing.setdefault(canonical_json(value(job)), []).append(job.number)
    return tuple(tuple(numbers) for numbers in sharing.values())


def _sentence(group: SweepGroup, *, rollouts_vary: bool) -> str:
    """Say in one sentence whether the jobs of a group agree, and which do not.

    Args:
        group: The group.
        rollouts_vary: Whether rollout TP was swept; the number of engines follows the world size anyway.
    """
    where = ", ".join(f"{key}={canonical_json(value).decode()}" for key, value in group.settings.items())
    lead = f"{where}: " if where else ""
    if len(group.jobs) == 1:
        return f"{lead}job {group.jobs[0]} alone: no other job must agree with it"
    rollouts = group.rollout_layouts if rollouts_vary or group.layouts == 1 else 1
    counts = [(rollouts, "rollout layouts"), (group.micro_batch_sizes, "micro-batch sizes")]
    parts = [f"{count} {what}" for count, what in counts if count > 1]
    if group.layouts > 1 or not parts:
        parts.insert(0, f"{group.layouts} layouts" if group.layouts > 1 else f"{len(group.jobs)} equal jobs")
    parts += [
        f"one {one}" if len(sharing) == 1 else f"{len(sharing)} {many} ({_shares(sharing)})"
        for one, many, sharing in (
            ("weights digest", "weights digests", group.weights),
            ("list of gradient norms", "lists of gradient norms", group.gradient_norms),
            ("optimizer digest", "optimizer digests", group.optimizer),
        )
    ]
    return lead + ", ".join(parts)


def _shares(sharing: tuple[tuple[int, ...], ...]) -> str:
    return "; ".join(
        f"job{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}" for numbers in sharing
    )


def _relative(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.as_posix()


def _read(kind: type[AnyDocument], path: Path) -> AnyDocument | None:
    try:
        return kind.read(path)
    except EvidenceError:
        return None
