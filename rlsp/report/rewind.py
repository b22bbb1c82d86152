"""Bring a run folder back to where a checkpoint was saved, so that a run can go on from there."""

from __future__ import annotations

from pathlib import Path

from rlsp.report.again import set_aside
from rlsp.report.checkpoint import discard_after
from rlsp.report.diagnose_records import FOLDER as DIAGNOSE_FOLDER
from rlsp.report.files import VERDICT_NAME, EvidenceError
from rlsp.report.page import PAGE_NAME
from rlsp.report.recorder import CONSISTENCY_NAME, METRICS_NAME, Recorder


def rewind(run_dir: Path | str, first: int) -> None:
    """Take back what follows rollout `first` - 1, and the verdict; each step may be repeated after a kill.

    A verdict is of a whole folder, and this one goes on: the manifest keeps why the segment before ended.

    Raises:
        EvidenceError: Evidence of an earlier rollout is missing, or the folder cannot be written.
    """
    folder = Path(run_dir)
    try:
        for name in (VERDICT_NAME, PAGE_NAME):
            (folder / name).unlink(missing_ok=True)
        if first:
            Recorder(folder, first).close()
        else:
            set_aside(folder, 0)
            for name in (CONSISTENCY_NAME, METRICS_NAME):
                (folder / name).unlink(missing_ok=True)
        for path in (folder / DIAGNOSE_FOLDER).glob("*.json"):
            if path.stem.isdigit() and int(path.stem) >= first:
                path.unlink()
        discard_after(folder, first)
    except OSError as error:
        raise EvidenceError(f"cannot write {folder}: {error.strerror or error}") from error
