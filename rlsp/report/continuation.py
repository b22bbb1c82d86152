"""Where a run can go on: its newest checkpoint, or its start."""

from __future__ import annotations

from pathlib import Path

from rlsp.config import Resumption
from rlsp.report.checkpoint import newest, numbered
from rlsp.report.files import EvidenceError
from rlsp.report.manifest import MANIFEST_NAME, Manifest
from rlsp.report.recorder import CONSISTENCY_NAME
from rlsp.report.records import ConsistencyReport


def continuation(run_dir: Path | str) -> tuple[Resumption, tuple[str, ...]]:
    """Say where a run goes on, and why checkpoints that are newer cannot be taken.

    A run that never finished saving begins again at rollout 0. One that did never does so by itself: it would
    hide that its state was lost.

    Raises:
        EvidenceError: The manifest or the evidence cannot be read, or there are checkpoints and none is
            valid; the message has a line for each fault.
    """
    folder = Path(run_dir)
    manifest = Manifest.read(folder / MANIFEST_NAME)
    records = {}
    if (folder / CONSISTENCY_NAME).exists():
        report = ConsistencyReport.read(folder / CONSISTENCY_NAME)
        records = {record.index: record for record in report.rollouts}
    choice = newest(folder, manifest, records)
    if choice.document is not None and choice.folder is not None:
        document = choice.document
        return Resumption(document.rollouts, choice.folder.name, document.self_digest), choice.passed
    if numbered(folder):
        raise EvidenceError("\n".join(["no checkpoint can be gone on from", *choice.passed]))
    return Resumption(0, None, None), choice.passed  # of a run that was killed while it saved its first one
