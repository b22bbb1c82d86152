"""Where the runs of a suite are: in a run folder, or in a sweep's, whose jobs without a run are named."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from rlsp.report.files import EvidenceError, shown
from rlsp.report.statuses import REFUSED
from rlsp.report.sweep import SWEEP_NAME, SweepJob, SweepSummary
from rlsp.report.verdict import is_run_folder

_ENDS = {None: "not started", REFUSED: "refused"}


@dataclass(frozen=True)
class Found:
    """What one folder holds.

    Attributes:
        runs: Run folders, a sweep's in the order of its jobs.
        left_out: Jobs of a sweep that have none, each with how it ended and its overrides.
    """

    runs: tuple[Path, ...]
    left_out: tuple[str, ...]


def find_runs(folder: Path) -> Found:
    """Find a run folder, or the runs of a sweep; a folder without any gives none.

    Raises:
        EvidenceError: The folder or its sweep.json cannot be read.
    """
    if is_run_folder(folder):
        return Found((folder,), ())
    if not folder.is_dir():
        return Found((), ())
    jobs = SweepSummary.read(folder / SWEEP_NAME).jobs if (folder / SWEEP_NAME).exists() else ()
    places = {_place(folder, job): job for job in jobs}
    runs = [place for place in places if is_run_folder(place)]
    known = set(map(os.path.abspath, places))
    # A sweep that was killed has no sweep.json; a run that lies there besides would be lost in silence.
    runs += [entry for entry in _run_folders(folder) if os.path.abspath(entry) not in known]
    absent = [_left_out(folder, job) for place, job in places.items() if not is_run_folder(place)]
    return Found(tuple(runs), tuple(absent))


def _place(sweep_dir: Path, job: SweepJob) -> Path:
    return sweep_dir / (str(job.number) if job.folder is None else job.folder)


def _run_folders(folder: Path) -> list[Path]:
    try:
        entries = [entry for entry in folder.iterdir() if entry.is_dir() and is_run_folder(entry)]
    except OSError as error:
        raise EvidenceError(f"{folder} cannot be listed: {error.strerror or error}") from error
    return sorted(entries, key=lambda entry: (len(entry.name), entry.name))


def _left_out(sweep_dir: Path, job: SweepJob) -> str:
    how = _ENDS.get(job.status, "crashed")
    return shown(f"{sweep_dir.resolve().name}, job {job.number}, {how}: {' '.join(job.overrides)}")
