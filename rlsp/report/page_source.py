"""What the page of a run shows: the judgement, and the run folder's files as far as they can be read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from rlsp.report.evidence import RunEvidence
from rlsp.report.files import EvidenceError, as_number, open_regular
from rlsp.report.findings import GateResult, Verdict
from rlsp.report.metrics import STEP
from rlsp.report.page_plot import Point
from rlsp.report.recorder import METRICS_NAME, whole_rows

_LAST_ROLLOUT = 10**9
_ABORT_LOG = Path("logs") / "abort.txt"
_LONGEST_LOG = 100_000


@dataclass(frozen=True)
class Source:
    """Everything that the page of a run is drawn from.

    Attributes:
        folder: Name of the run folder, for a run without a manifest.
        run: What the gates judged.
        verdict: The run's verdict.
        reasons: Its reasons.
        gates: Every gate's answer.
        metrics: Values of metrics.jsonl by name, as (rollout, value) in order of rollouts.
        ranks: How each rank of an aborted run ended, as its launcher wrote it; empty where nothing did.
        notes: What could not be read for the page.
    """

    folder: str
    run: RunEvidence
    verdict: Verdict
    reasons: tuple[str, ...]
    gates: tuple[GateResult, ...]
    metrics: Mapping[str, tuple[Point, ...]]
    ranks: str
    notes: tuple[str, ...]

    @property
    def run_id(self) -> str:
        """Return the run's id, or its folder's name where no manifest says it."""
        return self.run.manifest.run_id if self.run.manifest else self.folder

    @property
    def name(self) -> str:
        """Return the experiment's name."""
        return str(self.setting("name") or "run without a name")

    def setting(self, *keys: str) -> JsonValue:
        """Return a value of the composed config; None where the manifest does not have it."""
        value: JsonValue = self.run.manifest.config if self.run.manifest else None
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value


def read_source(
    run_dir: Path,
    run: RunEvidence,
    verdict: Verdict,
    reasons: tuple[str, ...],
    gates: tuple[GateResult, ...],
) -> Source:
    """Gather what the page needs besides the judgement; what cannot be read becomes a note."""
    notes: list[str] = []
    try:
        metrics = _by_name(row for _, row in whole_rows(run_dir / METRICS_NAME))
    except EvidenceError as error:
        metrics, notes = {}, [str(error)]
    ranks = _ranks(run_dir / _ABORT_LOG) if verdict is Verdict.ABORTED else ""
    return Source(run_dir.resolve().name, run, verdict, reasons, gates, metrics, ranks, tuple(notes))


def _ranks(path: Path) -> str:
    """Read how the ranks ended, without the reason before it; a log is no evidence, so it may be missing."""
    try:
        with open_regular(path) as file:
            text = file.read(_LONGEST_LOG).decode(errors="replace")
    except OSError:
        return ""
    return text.partition("\n")[2].rstrip()


def _by_name(rows: Iterable[Mapping[str, Any]]) -> dict[str, tuple[Point, ...]]:
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        rollout = row.get(STEP)
        if not isinstance(rollout, int) or not 0 <= rollout <= _LAST_ROLLOUT:
            continue  # the evidence gate names such a row
        for name, said in row.items():
            value = as_number(said)
            if name != STEP and value is not None:
                found.setdefault(name, {})[rollout] = value
    return {name: tuple(sorted(values.items())) for name, values in found.items()}
