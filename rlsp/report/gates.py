"""The gates: each asks one question of a run's evidence and answers it with a plain reason."""

from __future__ import annotations

from collections.abc import Callable

from rlsp.report.evidence import RunEvidence
from rlsp.report.findings import GateResult, Verdict
from rlsp.report.run_gates import agreement, counts, routes, version
from rlsp.report.token_gates import bits, coverage, evidence, non_vacuous, rows

__all__ = ["GATES", "GateResult", "Verdict"]

GATES: tuple[Callable[[RunEvidence], GateResult], ...] = (
    evidence,
    coverage,
    bits,
    rows,
    non_vacuous,
    version,
    routes,
    agreement,
    counts,
)
