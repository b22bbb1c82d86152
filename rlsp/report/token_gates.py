"""The gates that look at tokens: were they computed, do they agree, was there anything to prove."""

from __future__ import annotations

import math

from rlsp.report.evidence import RunEvidence
from rlsp.report.findings import Findings, GateResult
from rlsp.report.records import RolloutRecord, TokenEvidence, TokenLocation


def evidence(run: RunEvidence) -> GateResult:
    """Ask whether the files are readable, and whether each says what the others and the config say."""
    found = Findings()
    found.faults += run.faults
    return found.result("evidence")


def coverage(run: RunEvidence) -> GateResult:
    """Ask whether every active token was computed on both sides, by every CP shard and TP replica."""
    found = Findings()
    for index, measured in sorted(run.measured.items()):
        if measured.absent:
            found.doubts.append(f"rollout {index}: {', '.join(measured.absent)} was never recorded")
    for index, tokens in run.compared():
        for side, fed, missing in (
            ("rollout", tokens.rollout_fed, tokens.missing_rollout),
            ("training", tokens.train_fed, tokens.missing_train),
        ):
            if not fed:
                found.doubts.append(f"rollout {index}: nothing was recorded on the {side} side")
            elif missing:
                found.faults.append(
                    f"rollout {index}: {missing} of {tokens.active_tokens} active tokens have no finite "
                    f"log-probability on the {side} side{_at(tokens.first_missing)}"
                )
    _check_shards(run, found)
    return found.result("coverage")


def bits(run: RunEvidence) -> GateResult:
    """Ask whether the two log-probabilities of every active token are the same bits."""
    found = Findings()
    if _is_external(run):
        found.notes.append(f"the engine ({_engine(run)}) is not rlsp's: its bits may differ from training's")
    for index, tokens in _fed(run, found):
        if tokens.mismatched_tokens == 0:
            continue
        what = (
            f"{tokens.mismatched_tokens} of {tokens.active_tokens} tokens differ, "
            f"by at most {tokens.max_ulp} ulp"
        )
        if tokens.alignment_shift_suspected is not None:
            what += (
                f"; an alignment fault, not a kernel's: the rollout's values fit training's when read "
                f"{tokens.alignment_shift_suspected:+d} position further"
            )
        found.faults.append(f"rollout {index}{_at(tokens.first_mismatch)}: {what}")
    return found.result("bits", judged=_is_strict(run))


def rows(run: RunEvidence) -> GateResult:
    """Ask whether the full-vocabulary logits of every active token are the same bits on both sides."""
    found = Findings()
    if _is_external(run):
        found.doubts.append(f"not available: the engine ({_engine(run)}) shows no logits")
        return found.result("rows", judged=False)
    for index, tokens in _fed(run, found):
        if not tokens.rows_fed:
            found.doubts.append(f"rollout {index}: no row digest was recorded")
        elif tokens.mismatched_rows:
            found.faults.append(
                f"rollout {index}{_at(tokens.first_row_mismatch)}: the row digests of "
                f"{tokens.mismatched_rows} of {tokens.active_tokens} tokens differ"
            )
    return found.result("rows", judged=_is_strict(run))


def non_vacuous(run: RunEvidence) -> GateResult:
    """Ask whether there was something to prove: tokens, two computations, a gradient, and changed weights."""
    found = Findings()
    if not run.measured:
        found.doubts.append("no rollout was recorded")
    found.doubts += [
        f"rollout {index}: no active token"
        for index, m in sorted(run.measured.items())
        if not m.active_tokens
    ]
    for index, record in sorted(run.records.items()):
        _check_sources(index, record, found)
        _check_gradient(index, record, found)
        moved = record.weights_digest != record.trainer_weights_digest
        if not moved and record.learning_rate > 0 and any(norm != 0 for norm in record.gradient_norms):
            found.faults.append(
                f"rollout {index}: the weights did not change ({record.weights_digest}) although "
                f"the gradient norm is {record.gradient_norm} and the learning rate {record.learning_rate}"
            )
    return found.result("non_vacuous")


def _fed(run: RunEvidence, found: Findings) -> list[tuple[int, TokenEvidence]]:
    """List the rollouts of which both sides were computed; without any token to compare, say so."""
    fed = [(index, tokens) for index, tokens in run.compared() if tokens.rollout_fed and tokens.train_fed]
    unfed = sorted(run.measured.keys() - {index for index, _ in fed})
    found.doubts += [f"rollout {index}: nothing to compare" for index in unfed]
    if not any(tokens.active_tokens for _, tokens in fed) and not unfed:
        found.doubts.append("no token was compared")
    return fed


def _is_strict(run: RunEvidence) -> bool:
    """Tell whether equality was promised: native arithmetic and external engines are allowed to differ."""
    native = any("native" in record.declared_routes.values() for record in run.records.values())
    return not _is_external(run) and not native


def _is_external(run: RunEvidence) -> bool:
    return run.planned is not None and run.planned.rollout.external


def _engine(run: RunEvidence) -> str:
    return run.planned.rollout.engine if run.planned else ""


def _at(location: TokenLocation | None) -> str:
    if location is None:
        return ""
    return (
        f", sample {location.sample}, token {location.position}: rollout {location.rollout}, "
        f"training {location.train}"
    )


def _check_sources(index: int, record: RolloutRecord, found: Findings) -> None:
    """Refuse a comparison of one computation with itself."""
    rollout, train = record.sources.get("rollout"), record.sources.get("train")
    if rollout is None or train is None:
        found.doubts.append(f"rollout {index}: nothing says which computation made which side")
    elif rollout == train:
        found.doubts.append(f"rollout {index}: vacuous, both sides come from one computation ({rollout})")


def _check_gradient(index: int, record: RolloutRecord, found: Findings) -> None:
    """Ask for finite gradients above zero, in every update."""
    for update, norm in enumerate(record.gradient_norms):
        if not math.isfinite(norm):
            found.faults.append(f"rollout {index}, update {update}: the gradient norm is {norm}")
        elif norm == 0:
            found.doubts.append(
                f"rollout {index}, update {update}: the gradient is zero, which proves nothing"
            )


def _check_shards(run: RunEvidence, found: Findings) -> None:
    """Ask every CP shard for its tokens, and the TP replicas for their agreement."""
    by_width: dict[int, list[tuple[int, ...]]] = {}
    for index, record in sorted(run.records.items()):
        shards = run.cp_of(index)
        if shards == len(record.cp_tokens):
            by_width.setdefault(shards, []).append(record.cp_tokens)
        elif shards is not None:
            found.faults.append(
                f"rollout {index}: {len(record.cp_tokens)} of {shards} CP shards reported tokens"
            )
        covered = sum(record.cp_tokens)
        if covered != record.active_tokens:
            found.faults.append(
                f"rollout {index}: CP shards covered {list(record.cp_tokens)} = {covered} tokens, "
                f"but {record.active_tokens} are active"
            )
        if not record.tp_replicas_agree:
            found.faults.append(f"rollout {index}: TP replicas of one token do not agree")
    for shards, rows in sorted(by_width.items()):
        totals = [sum(column) for column in zip(*rows, strict=True)]
        if idle := [shard for shard, tokens in enumerate(totals) if tokens == 0 and sum(totals)]:
            found.notes.append(
                f"no active token fell on CP shards {idle}: sequences are too short for "
                f"parallel.cp={shards}, and the run says nothing about these shards"
            )
