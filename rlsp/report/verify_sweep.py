"""Judges a sweep again from its files alone: every job's run folder, and sweep.json against all of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlsp.report.contradictions import words
from rlsp.report.files import VERDICT_NAME, EvidenceError, shown
from rlsp.report.findings import Verdict
from rlsp.report.manifest import MANIFEST_NAME
from rlsp.report.statuses import CRASHED, FAILED, REFUSED, worst
from rlsp.report.sweep import SWEEP_NAME, JobOutcome, SweepJob, SweepSummary, compose_summary
from rlsp.report.verdict import EXIT_STATUS, Verification, is_run_folder, verify

_HYDRA_RECORD = "multirun.yaml"
_NO_FOLDER = (CRASHED, REFUSED, None)  # None: an interrupted sweep never started it, or did not see it end


@dataclass(frozen=True)
class JobVerification:
    """What a later look at one job found.

    Attributes:
        number: Its number in sweep.json; None for a run folder that is not listed there.
        folder: Its folder, relative to the sweep's; None for a job that left none.
        recorded_status: The exit status that sweep.json gives it.
        verification: What its folder says; None where there is none.
    """

    number: int | None
    folder: str | None
    recorded_status: int | None
    verification: Verification | None

    @property
    def exit_status(self) -> int:
        """Return the status of the job's files, or what it ended with where it left none."""
        if self.verification is not None:
            return self.verification.exit_status
        return EXIT_STATUS[Verdict.ABORTED] if self.recorded_status is None else self.recorded_status


@dataclass(frozen=True)
class SweepVerification:
    """What a later look at a sweep's folder found.

    Attributes:
        jobs: Every job.
        sentences: Whether the jobs that must agree do, as their files give it now.
        disagrees: Whether jobs that promised the same bits did not end with them.
        damage: Where sweep.json and the jobs' own files differ; each job has its own damage besides.
        notes: Jobs whose end the sweep did not see, and what their folders say of it.
    """

    jobs: tuple[JobVerification, ...]
    sentences: tuple[str, ...]
    disagrees: bool
    damage: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def is_damaged(self) -> bool:
        """Tell whether anything in the sweep is not what it was."""
        return bool(self.damage) or any(job.verification and job.verification.damage for job in self.jobs)

    @property
    def exit_status(self) -> int:
        """Return 3 for damage, else the worst of the jobs, in the order 1, 2, 3, 4, 0."""
        if self.is_damaged:
            return EXIT_STATUS[Verdict.FAIL]
        return worst([*(job.exit_status for job in self.jobs), *([FAILED] if self.disagrees else [])])


def is_sweep_folder(path: Path) -> bool:
    """Tell whether a folder is a sweep's."""
    return any(os.path.lexists(path / name) for name in (SWEEP_NAME, _HYDRA_RECORD))


def verify_sweep(sweep_dir: str | Path) -> SweepVerification:
    """Verify every job of a sweep, and name where sweep.json says other than the jobs' own files."""
    folder = Path(sweep_dir)
    damage: list[str] = []
    summary: SweepSummary | None = None
    try:
        summary = SweepSummary.read(folder / SWEEP_NAME)
    except EvidenceError as error:
        damage.append(str(error))
    said = summary.jobs if summary else ()
    jobs = [_listed(folder, job) for job in said] + list(_unlisted(folder, said))
    damage += [
        f"{job.folder} is a run folder that {SWEEP_NAME} does not list"
        for job in jobs
        if job.number is None and summary is not None
    ]
    now = compose_summary(folder, [_outcome(folder, job) for job in said])
    if summary is not None:
        listed = sorted(jobs[: len(said)], key=_number)
        for stored, given, job in zip(sorted(said, key=_number), now.jobs, listed, strict=True):
            damage += [f"{SWEEP_NAME}, job {stored.number}: {what}" for what in _of_job(stored, given, job)]
        if len({job.number for job in said}) != len(said):
            damage.append(f"{SWEEP_NAME} lists a job twice")
        if summary.groups != now.groups:
            found = "; ".join(group.sentence for group in now.groups) or "no jobs that must agree"
            damage.append(f"{SWEEP_NAME}: its groups are not those that the jobs' files give: {found}")
    sentences = tuple(shown(group.sentence) for group in now.groups)
    notes = tuple(shown(note) for job in jobs for note in _notes(job))
    return SweepVerification(tuple(jobs), sentences, now.disagrees, tuple(map(shown, damage)), notes)


def _number(job: SweepJob | JobVerification) -> int:
    return -1 if job.number is None else job.number


def _folder(sweep_dir: Path, job: SweepJob) -> Path:
    """Return where a job's run folder is, or would be."""
    return sweep_dir / (str(job.number) if job.folder is None else job.folder)


def _outcome(sweep_dir: Path, job: SweepJob) -> JobOutcome:
    return JobOutcome(job.number, job.overrides, job.status, _folder(sweep_dir, job))


def _listed(sweep_dir: Path, job: SweepJob) -> JobVerification:
    folder = _folder(sweep_dir, job)
    there = folder.is_dir() and is_run_folder(folder)
    return JobVerification(job.number, job.folder, job.status, verify(folder) if there else None)


def _unlisted(sweep_dir: Path, said: Sequence[SweepJob]) -> Iterator[JobVerification]:
    known = {os.path.realpath(_folder(sweep_dir, job)) for job in said if "\0" not in (job.folder or "")}
    for path in sorted(sweep_dir.iterdir()):
        if path.is_dir() and os.path.realpath(path) not in known and is_run_folder(path):
            yield JobVerification(None, shown(path.name), None, verify(path))


def _notes(job: JobVerification) -> Iterable[str]:
    """Say what became of a job that is listed and whose end the sweep did not see."""
    if job.number is not None and job.recorded_status is None and job.verification is not None:
        seal = job.verification.stored
        what = f"{VERDICT_NAME} says {seal.verdict.value}" if seal else "it is not sealed"
        yield f"job {job.number} had not ended when {SWEEP_NAME} was written; by now {what}"


def _of_job(stored: SweepJob, found: SweepJob, job: JobVerification) -> Iterable[str]:
    """Yield where sweep.json says of a job what its folder does not."""
    if stored.folder is not None and job.verification is None:
        yield f"its folder {stored.folder} is missing or holds no run"
        return
    unseen = {"folder"} if stored.status is None else set()  # it may have been made since
    for name in SweepJob.model_fields:
        said, now = getattr(stored, name), getattr(found, name)
        if said != now and name not in unseen:
            yield f"{name} is {words(said)}, but its files give {words(now)}"
    if job.verification is None:
        if stored.status not in _NO_FOLDER:
            yield f"it ended with status {stored.status} and left no folder"
        return
    manifest, seal = job.verification.evidence.manifest, job.verification.stored
    if manifest is not None and manifest.overrides != stored.overrides:
        yield f"overrides is {words(stored.overrides)}, but {MANIFEST_NAME} says {words(manifest.overrides)}"
    if stored.status is None:
        return  # the sweep ended before the job did: see `_notes`
    # A launcher may crash after the seal: status 1 goes with every verdict.
    legal = {CRASHED} if seal is None else {CRASHED, EXIT_STATUS[seal.verdict]}
    if stored.status not in legal:
        yield f"it ended with status {stored.status}, but {VERDICT_NAME} says " + (
            seal.verdict.value if seal else "nothing"
        )
