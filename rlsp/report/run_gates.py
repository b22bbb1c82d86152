"""The gates that look at the run: versions, routes, agreement of the ranks, completeness."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from rlsp.report.contradictions import words
from rlsp.report.evidence import RunEvidence
from rlsp.report.findings import Findings, GateResult
from rlsp.report.manifest import RankAgreement, Segment, StartupFacts

_SHOWN_ROLLOUTS = 8


def version(run: RunEvidence) -> GateResult:
    """Ask whether every rollout drew its tokens with the weights that the trainer had at dispatch."""
    found = Findings()
    startup = run.manifest.startup if run.manifest else None
    for index, record in sorted(run.records.items()):
        if record.weight_version_rollout != record.weight_version_train:
            found.faults.append(
                f"rollout {index} was drawn with weight version {record.weight_version_rollout}, "
                f"the trainer had version {record.weight_version_train}"
            )
        earlier = index * run.planned.updates_per_rollout if run.planned else record.weight_version_train
        if record.weight_version_train != earlier:
            found.faults.append(
                f"rollout {index} was trained from weight version {record.weight_version_train}, "
                f"but {earlier} updates came before it"
            )
        if record.rollout_weights_digest != record.trainer_weights_digest:
            found.faults.append(
                f"rollout {index}: the engines held weights {record.rollout_weights_digest}, the trainer "
                f"{record.trainer_weights_digest}"
            )
        if index == 0:
            expected, source = startup.initial_weights_digest if startup else None, "the run began with"
            if run.planned and run.planned.warmup.steps:
                expected = run.warmup.weights_digest if run.warmup else None
                source = "the warm-up ended with"
        else:
            last = run.records.get(index - 1)
            expected, source = last.weights_digest if last else None, f"rollout {index - 1} ended with"
        if expected is not None and record.trainer_weights_digest != expected:
            found.faults.append(
                f"rollout {index}: the trainer had weights {record.trainer_weights_digest} at dispatch, "
                f"but {source} {expected}"
            )
    if not run.records:
        found.doubts.append("no rollout was recorded")
    elif run.planned is not None and run.planned.rollout.external:
        found.notes.append(
            f"the digest of the engine ({run.planned.rollout.engine}) is of the weights that its loader took"
        )
    return found.result("version")


def routes(run: RunEvidence) -> GateResult:
    """Ask whether every declared operator ran by its declared route, and nothing fell back."""
    found = Findings()
    for index, record in sorted(run.records.items()):
        if not record.declared_routes:
            found.doubts.append(f"rollout {index}: no route was declared")
        for operator, declared in sorted(record.declared_routes.items()):
            calls = record.routes.get(operator, {})
            if calls.get(declared, 0) == 0:
                never = f"rollout {index}: {operator} never ran by its declared route {declared}"
                # With every response empty there is nothing that the rollout would have to compute.
                (found.faults if record.active_tokens else found.doubts).append(never)
            for route, count in sorted(calls.items()):
                if route != declared and count:
                    found.faults.append(
                        f"rollout {index}: {operator} fell back from {declared} to {route} in {count} calls"
                    )
        for operator in sorted(record.routes.keys() - record.declared_routes.keys()):
            found.faults.append(f"rollout {index}: {operator} ran without a declared route")
    if not run.records:
        found.doubts.append("no rollout was recorded")
    return found.result("routes")


def agreement(run: RunEvidence) -> GateResult:
    """Ask whether all ranks had one contract, one code, the same kernels, and the manifest's layout."""
    found = Findings()
    found.faults += [
        f"rollout {index}: the ranks disagreed about a step"
        for index, r in sorted(run.records.items())
        if not r.ranks_agree
    ]
    if run.manifest is None:
        found.doubts.append("the manifest has no start-up facts: nothing says that the ranks agreed")
        return found.result("agreement")
    segments = run.manifest.segments
    made = {run.manifest.number_of(index) for index in run.records} | {len(segments) - 1}
    for number, segment in enumerate(segments):
        place = "start-up" if len(segments) == 1 else f"start-up of segment {number}"
        if segment.startup is not None:
            found.faults += [f"{place}: {fault}" for fault in _agreed(segment, segment.startup)]
        elif number in made:
            where = "the manifest" if len(segments) == 1 else f"segment {number}"
            found.doubts.append(f"{where} has no start-up facts: nothing says that the ranks agreed")
    return found.result("agreement")


def _agreed(segment: Segment, startup: StartupFacts) -> Iterator[str]:
    """Yield where a rank of one segment was not like the rest, or stood elsewhere than its layout says."""
    places = {row.rank: row.model_dump(exclude={"rank"}) for row in segment.layout.table}
    said = [row.rank for row in startup.agreement]
    if sorted(said) != sorted(places):
        yield f"ranks {sorted(said)} reported, the layout has {sorted(places)}"
    for row in startup.agreement:
        here = {axis: index for axis, index in row.layout.items() if axis != "rank"}
        if row.rank in places and here != places[row.rank]:
            yield f"rank {row.rank} stands at {here}, the layout says {places[row.rank]}"
    shared: tuple[tuple[str, str, Callable[[RankAgreement], str]], ...] = (
        ("contract", startup.contract_hash, lambda row: row.contract_hash),
        ("code", segment.code.source_hash, lambda row: row.code_hash),
        ("kernels", _kernel_digest(startup), lambda row: row.kernel_digest),
    )
    for what, expected, of in shared:
        for row in startup.agreement:
            if of(row) != expected:
                yield f"rank {row.rank} has {what} {of(row)}, not {expected}"


def _kernel_digest(startup: StartupFacts) -> str:
    """Return the digest of the kernels: the certificate's, or the first rank's where it has none."""
    if "digest" in startup.certificate:
        return words(startup.certificate["digest"])
    return startup.agreement[0].kernel_digest if startup.agreement else ""


def counts(run: RunEvidence) -> GateResult:
    """Ask whether every rollout and every step is present, once."""
    found = Findings()
    found.faults += [f"{path} belongs to no rollout" for path in run.strays]
    if run.planned is None:
        found.doubts.append("the manifest does not say how many rollouts were planned")
        return found.result("counts")
    for what, present in (
        ("tensor file", sorted(run.measured)),
        ("digest file", sorted(run.digested)),
        ("entry in consistency.json", sorted(run.records)),
        ("row in metrics.jsonl", list(run.rows)),
    ):
        found.faults += _miscounted(what, present, run.planned.num_rollouts)
    for index, record in sorted(run.records.items()):
        if record.updates != run.planned.updates_per_rollout or len(record.gradient_norms) != record.updates:
            found.faults.append(
                f"rollout {index}: {record.updates} updates with {len(record.gradient_norms)} gradient "
                f"norms, planned {run.planned.updates_per_rollout}"
            )
        in_file = run.measured[index].sequences if index in run.measured else record.sequences
        if {record.sequences, in_file} != {run.planned.sequences}:
            found.faults.append(
                f"rollout {index}: {record.sequences} sequences, {in_file} in its file, planned "
                f"{run.planned.sequences}"
            )
    return found.result("counts")


def _miscounted(what: str, present: Sequence[int], planned: int) -> Iterator[str]:
    """Say which rollouts lack something or have it twice, in time that grows with what is there alone."""
    there = set(present)
    missing = planned - sum(1 for index in there if 0 <= index < planned)
    if missing:
        lost = list(
            itertools.islice(
                (index for index in itertools.count() if index not in there), min(missing, _SHOWN_ROLLOUTS)
            )
        )
        more = " …" if missing > len(lost) else ""
        yield f"no {what} for rollout {', '.join(map(str, lost))}{more}"
    elif len(present) != planned:
        yield f"one {what} is wanted for each of {planned} rollouts, there are {len(present)}"
    elif any(index != place for place, index in enumerate(present)):
        yield f"{what} by {what}, the rollouts do not come in order: {list(present[:_SHOWN_ROLLOUTS])}"
