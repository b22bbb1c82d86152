"""Compares two runs bit by bit from their files alone, and names the first difference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlsp.report import tensors as tensor_file
from rlsp.report.compare_owners import Owners
from rlsp.report.compare_records import (
    Comparison,
    Difference,
    Outcome,
    RunFacts,
    Side,
    Stage,
    StageResult,
    State,
)
from rlsp.report.compare_rules import notes, refusals
from rlsp.report.compare_stages import Found, Pair, Recorded, compare_initial, compare_warmups
from rlsp.report.digests import RolloutDigests, digests_path
from rlsp.report.evidence import RunEvidence
from rlsp.report.files import EvidenceError, shown
from rlsp.report.manifest import MANIFEST_NAME, Manifest
from rlsp.report.verdict import verify
from rlsp.report.warmup import Warmup

_UNITS = {
    Stage.INITIAL_WEIGHTS: "virtual shards",
    Stage.WARM_UP: "losses, norms and weights",
    Stage.REWARDS: "samples",
    Stage.ADVANTAGES: "samples",
    Stage.LOSS: "updates",
    Stage.GRADIENTS: "virtual shards",
    Stage.GRADIENT_NORM: "updates",
    Stage.OPTIMIZER: "virtual shards",
    Stage.WEIGHTS: "virtual shards",
}

_SHOWN = 3


@dataclass(frozen=True)
class _Run:
    folder: Path
    manifest: Manifest
    owners: tuple[Owners, ...]
    rollouts: int
    facts: RunFacts
    contradictions: tuple[str, ...]
    warmup: Warmup | None

    def recorded(self, index: int) -> Recorded:
        """Read one rollout."""
        return Recorded(
            tensors=tensor_file.read(tensor_file.rollout_path(self.folder, index)),
            digests=RolloutDigests.read(digests_path(self.folder, index)),
            owners=self.owners[self.manifest.number_of(index)],
        )


def compare(run_a: str | Path, run_b: str | Path) -> Comparison:
    """Compare two sealed runs in the order in which things happen, up to the shorter one's last rollout.

    Runs whose evidence was damaged or does not say what was measured, or whose contract, data, seeds or
    result-relevant configuration differ, are not compared: every reason is listed.
    """
    opened = [_open(side, Path(folder)) for side, folder in (("A", run_a), ("B", run_b))]
    damage = tuple(fault for _, faults in opened for fault in faults)
    a, b = opened[0][0], opened[1][0]
    if damage or a is None or b is None:
        return _refused((), damage, ())
    facts = a.facts, b.facts
    said = (*notes(a.manifest, b.manifest), *_first_few(a.contradictions), *_first_few(b.contradictions))
    if reasons := refusals(a.manifest, b.manifest):
        return _refused(facts, reasons, said)
    common = min(a.rollouts, b.rollouts)
    try:
        stages = _summarised(_walk(a, b, common))
    except EvidenceError as error:
        return _refused(facts, (str(error),), said)
    first = next((stage.first for stage in stages if stage.state is State.FIRST), None)
    if first is None and common == 0:
        idle = " and ".join(side for side, run in (("A", a), ("B", b)) if run.rollouts == 0)
        return _refused(facts, (f"nothing to compare: run {idle} recorded no rollout",), said)
    return Comparison(
        outcome=Outcome.EQUAL if first is None else Outcome.DIFFERENT,
        runs=facts,
        refusals=(),
        notes=said,
        rollouts=common,
        first=first,
        stages=stages,
    )


def _open(side: str, folder: Path) -> tuple[_Run | None, list[str]]:
    """Verify a run; return it, or everything that is wrong with its evidence."""
    verification = verify(folder)
    evidence = verification.evidence
    faults = [f"run {side} is damaged: {line}" for line in verification.damage]
    broken = [fault for fault in evidence.faults if fault not in evidence.contradictions]
    faults += [f"run {side} contradicts itself: {shown(fault)}" for fault in broken]
    if faults or evidence.manifest is None:
        return None, faults
    try:
        owners = tuple(Owners(segment) for segment in evidence.manifest.segments)
    except EvidenceError as error:
        return None, [f"run {side}: {error}"]
    rollouts = _unbroken(evidence)
    facts = _facts(evidence.manifest, verification.judgement.verdict.value, rollouts)
    # What whole and sealed files state differently is a finding: its first trace in the bits is looked for.
    odd = tuple(shown(f"run {side} contradicts itself: {what}") for what in evidence.contradictions)
    return _Run(folder, evidence.manifest, owners, rollouts, facts, odd, evidence.warmup), []


def _first_few(lines: tuple[str, ...]) -> tuple[str, ...]:
    rest = len(lines) - _SHOWN
    return (*lines[:_SHOWN], f"and {rest} more contradictions") if rest > 0 else lines


def _unbroken(evidence: RunEvidence) -> int:
    """Count the rollouts, from the first one on, of which all evidence is there."""
    index = 0
    while (
        index in evidence.records
        and index in evidence.digested
        and index in evidence.measured
        and not evidence.measured[index].absent
    ):
        index += 1
    return index


def _facts(manifest: Manifest, verdict: str, rollouts: int) -> RunFacts:
    size = manifest.config.get("micro_batch_size")
    return RunFacts(
        run_id=manifest.run_id,
        status=manifest.status.value,
        verdict=verdict,
        layout=manifest.layout.model_dump(exclude={"table"}),
        rollout_layout=manifest.rollout_layout.model_dump(exclude={"table"}),
        micro_batch_size=size if isinstance(size, int) else None,
        rollouts=rollouts,
    )


def _walk(a: _Run, b: _Run, common: int) -> Iterator[Found]:
    """Yield every stage of every rollout, in the order in which things happen."""
    yield _initial(a, b, common)
    if a.warmup is not None and b.warmup is not None:
        yield compare_warmups(a.warmup, b.warmup, (a.owners[0], b.owners[0]))
    for index in range(common):
        pair = a.recorded(index), b.recorded(index)
        for what, mine, other in (
            ("samples", *(run.tensors["tokens"].shape[0] for run in pair)),
            ("updates", *(len(run.digests.updates) for run in pair)),
        ):
            if mine != other:
                raise EvidenceError(f"rollout {index} has {mine} {what} in A, {other} in B")
        yield from Pair(index, *pair).compare()


def _initial(a: _Run, b: _Run, common: int) -> Found:
    """Compare the initial weights tensor by tensor, or by their digests where no rollout recorded them."""
    tables = [run.recorded(0).digests.initial for run in (a, b)] if common else [None, None]
    if tables[0] is not None and tables[1] is not None:
        return compare_initial(tables[0], tables[1], (a.owners[0], b.owners[0]))
    digests = [
        run.manifest.startup.initial_weights_digest for run in (a, b) if run.manifest.startup is not None
    ]
    if digests[0] == digests[1]:
        return Found(Stage.INITIAL_WEIGHTS, 1, 0, None)
    mine, other = (
        Side(bits=f"0x{digest}", number=None, ranks=run.owners[0].everyone())
        for digest, run in zip(digests, (a, b), strict=True)
    )
    return Found(
        Stage.INITIAL_WEIGHTS,
        1,
        1,
        Difference(
            stage=Stage.INITIAL_WEIGHTS,
            a=mine,
            b=other,
            explanation="only the digest of all tensors is known: a run recorded no rollout",
        ),
    )


def _summarised(walk: Iterator[Found]) -> tuple[StageResult, ...]:
    """Add up each stage over rollouts and updates; the first difference of the walk is the first."""
    compared, differing = dict.fromkeys(Stage, 0), dict.fromkeys(Stage, 0)
    firsts: dict[Stage, Difference] = {}
    for found in walk:
        compared[found.stage] += found.compared
        differing[found.stage] += found.differing
        if found.first is not None:
            # A dict keeps the order of insertion: the walk's.
            firsts.setdefault(found.stage, found.first)
    # Most runs have no warm-up: then there is no such stage.
    stages = [stage for stage in Stage if compared[stage] or stage is not Stage.WARM_UP]
    return tuple(_result(stage, compared[stage], differing[stage], firsts) for stage in stages)


def _result(stage: Stage, compared: int, differing: int, firsts: Mapping[Stage, Difference]) -> StageResult:
    state = State.EQUAL if compared else State.EMPTY
    if stage in firsts:
        state = State.FIRST if stage is next(iter(firsts)) else State.AFTER
    return StageResult(
        stage=stage,
        state=state,
        unit=_UNITS.get(stage, "tokens"),
        compared=compared,
        differing=differing,
        first=firsts.get(stage),
    )


def _refused(runs: tuple[RunFacts, ...], reasons: tuple[str, ...], said: tuple[str, ...]) -> Comparison:
    return Comparison(
        outcome=Outcome.NOT_COMPARABLE,
        runs=runs,
        refusals=reasons or (f"a run has no readable {MANIFEST_NAME}",),
        notes=said,
        rollouts=0,
        first=None,
        stages=(),
    )
