"""What a gate answers, and how its findings become an answer."""

from __future__ import annotations

from enum import Enum

from rlsp.report.documents import Document
from rlsp.report.files import shown

_SHOWN_REASONS = 3


class Verdict(Enum):
    """What a gate or a run comes to; FAIL outweighs INCONCLUSIVE, which outweighs PASS."""

    PASS = "PASS"
    INCONCLUSIVE = "INCONCLUSIVE"
    FAIL = "FAIL"
    ABORTED = "ABORTED"


class GateResult(Document):
    """One gate's answer; a gate that is not `judged` reports what it saw and leaves the verdict alone."""

    name: str
    verdict: Verdict
    reasons: tuple[str, ...]
    judged: bool = True


class Findings:
    """Collects what a gate finds: faults fail it, doubts leave it inconclusive, notes are only told."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.doubts: list[str] = []
        self.notes: list[str] = []

    def result(self, name: str, *, judged: bool = True) -> GateResult:
        """Answer for the gate `name`, with the first reasons and the count of the others."""
        verdict = Verdict.FAIL if self.faults else Verdict.INCONCLUSIVE if self.doubts else Verdict.PASS
        reasons = [shown(reason) for reason in self.faults + self.doubts + self.notes]
        if len(reasons) > _SHOWN_REASONS:
            reasons = [*reasons[:_SHOWN_REASONS], f"and {len(reasons) - _SHOWN_REASONS} more"]
        return GateResult(name=name, verdict=verdict, reasons=tuple(reasons), judged=judged)
