"""What a run folder says, read back from its files alone and measured again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from rlsp.config import JOB_PATH
from rlsp.report import tensors as tensor_file
from rlsp.report.consistency import ConsistencyReport, RolloutRecord, TokenEvidence, measure, total
from rlsp.report.contradictions import (
    of_job,
    of_manifest,
    of_record,
    of_row,
    of_statistics,
    of_tensors,
    row_metrics,
)
from rlsp.report.digests import FOLDER as DIGESTS_FOLDER
from rlsp.report.digests import RolloutDigests, contradictions, digests_path
from rlsp.report.documents import first_fault
from rlsp.report.files import EvidenceError, list_contents, read_regular, shown
from rlsp.report.manifest import MANIFEST_NAME, Manifest
from rlsp.report.metrics import STEP
from rlsp.report.planned import Planned
from rlsp.report.recorder import CONSISTENCY_NAME, METRICS_NAME, parse_row, whole_rows
from rlsp.report.segment_rules import of_checkpoints, of_segments
from rlsp.report.warmup import Warmup, read_warmup, warmup_faults

_INDEX_DIGITS = 19


@dataclass(frozen=True)
class Measured:
    """One rollout's tensor file.

    Attributes:
        evidence: The comparison, measured again; None where a side was never recorded or the file is damaged.
        absent: Compared tensors that the file lacks.
        faults: What is malformed.
        contradictions: Where it is not what the config prescribes, or advantages not what the rewards give.
        sequences: Sequences in the file.
        active_tokens: Active tokens in the file.
        metrics: What a row of metrics.jsonl must say of the file.
    """

    evidence: TokenEvidence | None
    absent: tuple[str, ...]
    faults: tuple[str, ...]
    sequences: int = 0
    active_tokens: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    contradictions: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunEvidence:
    """Everything that the gates judge.

    Attributes:
        manifest: None if it is missing or damaged.
        planned: What the composed config promised; None if the manifest does not say.
        warmup: What warmup.json says; None if there is none or it is damaged.
        records: Entries of consistency.json by index.
        measured: Tensor files by index.
        digested: Indices of the digest files.
        strays: Files in rollouts/ and digests/ that belong to no rollout.
        rows: Rollout indices of metrics.jsonl in file order.
        faults: What is damaged, missing or contradicts itself.
        contradictions: Those of the faults that whole files state differently from each other or from the
            config; what they say can be looked at nevertheless.
    """

    manifest: Manifest | None
    planned: Planned | None
    warmup: Warmup | None
    records: dict[int, RolloutRecord]
    measured: dict[int, Measured]
    digested: tuple[int, ...]
    strays: tuple[str, ...]
    rows: tuple[int, ...]
    faults: tuple[str, ...]
    contradictions: tuple[str, ...]

    def cp_of(self, rollout: int) -> int | None:
        """Return how many CP shards a rollout was trained in; None where the manifest does not say."""
        if self.planned is None or self.manifest is None:
            return None
        newest = self.manifest.number_of(rollout) == len(self.manifest.earlier)
        return self.planned.parallel.cp if newest else self.manifest.segment_of(rollout).layout.cp

    def compared(self) -> Iterator[tuple[int, TokenEvidence]]:
        """Yield every rollout whose two sides could be compared."""
        for index, measured in sorted(self.measured.items()):
            if measured.evidence is not None:
                yield index, measured.evidence


def collect(run_dir: Path) -> RunEvidence:
    """Read a run folder; whatever is wrong with it is listed and never raised.

    A run that recorded no rollout has no reports either: that is not damage, and the counts tell.
    """
    faults = list(list_contents(run_dir).faults)
    contradicting: list[str] = []
    manifest, planned = _manifest(run_dir, faults)
    tensor_files, strays = _numbered(run_dir, tensor_file.FOLDER, tensor_file.rollout_path)
    # One at a time in memory.
    measured = {index: _measure(path, planned) for index, path in tensor_files.items()}
    for index, rollout in sorted(measured.items()):
        name = tensor_file.rollout_path(run_dir, index).name
        faults += [f"{name}: {fault}" for fault in rollout.faults]
        contradicting += [f"{name}: {what}" for what in rollout.contradictions]
    digest_files, digest_strays = _numbered(run_dir, DIGESTS_FOLDER, digests_path)
    records = _records(run_dir, measured, faults)
    if manifest is not None:
        contradicting += _job(run_dir, manifest, faults)
        contradicting += of_checkpoints(run_dir, manifest, records)
    if planned is not None:
        for index, record in sorted(records.items()):
            place = f"{CONSISTENCY_NAME}, rollout {index}"
            contradicting += [f"{place}: {what}" for what in of_record(record, planned)]
    initial = manifest.startup.initial_weights_digest if manifest and manifest.startup else None
    losses = {index: _loss(path, records.get(index), initial, faults) for index, path in digest_files.items()}
    recorded = bool(records or measured or (run_dir / METRICS_NAME).exists())
    warmup = _warmup(run_dir, faults)
    if planned is not None:
        contradicting += warmup_faults(warmup, planned.warmup.steps, initial, recorded=recorded)
    rows = _rows(run_dir, faults) if recorded else []
    for index, row in rows:
        if index in records:
            metrics = measured[index].metrics if index in measured else {}
            found = of_row(row, records[index], losses.get(index), metrics, planned)
            contradicting += [f"{METRICS_NAME}, rollout {index}: {what}" for what in found]
    return RunEvidence(
        manifest,
        planned,
        warmup,
        records,
        measured,
        tuple(digest_files),
        (*strays, *digest_strays),
        tuple(index for index, _ in rows),
        (*faults, *contradicting),
        tuple(contradicting),
    )


def _manifest(run_dir: Path, faults: list[str]) -> tuple[Manifest | None, Planned | None]:
    try:
        manifest = Manifest.read(run_dir / MANIFEST_NAME)
    except EvidenceError as error:
        faults.append(str(error))
        return None, None
    planned = None
    try:
        planned = Planned.model_validate(manifest.config)
    except ValidationError as error:
        faults.append(f"{MANIFEST_NAME}: config does not say what was planned: {first_fault(error)}")
    found = [*of_manifest(manifest, planned), *of_segments(manifest)]
    faults += [f"{MANIFEST_NAME}: {fault}" for fault in found]
    return manifest, planned


def _warmup(run_dir: Path, faults: list[str]) -> Warmup | None:
    try:
        return read_warmup(run_dir)
    except EvidenceError as error:
        faults.append(str(error))
        return None


def _job(run_dir: Path, manifest: Manifest, faults: list[str]) -> list[str]:
    """Hold what the ranks received against the manifest; a run that nobody launched has no such file."""
    try:
        job = parse_row(read_regular(run_dir / JOB_PATH), JOB_PATH)
    except FileNotFoundError:
        return []
    except OSError as error:
        faults.append(f"{JOB_PATH} cannot be read: {error.strerror or error}")
        return []
    except EvidenceError as error:
        faults.append(str(error))
        return []
    return [f"{JOB_PATH}: {what}" for what in of_job(job, manifest)]


def _records(run_dir: Path, measured: Mapping[int, Measured], faults: list[str]) -> dict[int, RolloutRecord]:
    """Read consistency.json and hold it against the tensors and its own total."""
    if not measured and not (run_dir / CONSISTENCY_NAME).exists():
        return {}
    try:
        report = ConsistencyReport.read(run_dir / CONSISTENCY_NAME)
    except EvidenceError as error:
        faults.append(str(error))
        return {}
    records = {record.index: record for record in report.rollouts}
    if len(records) != len(report.rollouts):
        faults.append(f"{CONSISTENCY_NAME} lists a rollout twice")
    for index, record in sorted(records.items()):
        tokens = measured[index].evidence if index in measured else None
        found = list(of_statistics(record, tokens)) if tokens is not None else []
        faults += [f"{CONSISTENCY_NAME}, rollout {index}: {fault}" for fault in found]
    faults += [f"{CONSISTENCY_NAME}, total: {fault}" for fault in _of_total(report)]
    return records


def _of_total(report: ConsistencyReport) -> list[str]:
    try:
        return list(of_statistics(report.total, total(report.rollouts)))
    except ArithmeticError as error:
        # Sums that no tokens can have.
        return [f"the rollouts cannot be added up: {error}"]
    except ValidationError as error:
        return [f"the rollouts cannot be added up: {first_fault(error)}"]


def _rows(run_dir: Path, faults: list[str]) -> list[tuple[int, dict[str, Any]]]:
    """Read metrics.jsonl: the rollout index of every row, and the row."""
    try:
        rows = [(row.get(STEP), row) for _, row in whole_rows(run_dir / METRICS_NAME)]
    except EvidenceError as error:
        faults.append(str(error))
        return []
    indexed = [(index, row) for index, row in rows if type(index) is int]
    if len(indexed) != len(rows):
        faults.append(f"{METRICS_NAME}: a row has no rollout index")
    return indexed


def _numbered(
    run_dir: Path, folder: str, named: Callable[[Path, int], Path]
) -> tuple[dict[int, Path], list[str]]:
    """List the files of `folder` by the rollout that they belong to, and those that belong to none."""
    files, strays = {}, []
    for path in sorted((run_dir / folder).glob("*")):
        # An index of more digits than a machine word is no index.
        index = int(path.stem) if path.stem.isdecimal() and len(path.stem) < _INDEX_DIGITS else -1
        if path == named(run_dir, index):
            files[index] = path
        else:
            strays.append(shown(path.relative_to(run_dir).as_posix()))
    return files, strays


def _loss(path: Path, record: RolloutRecord | None, initial: str | None, faults: list[str]) -> float | None:
    """Read a digest file, hold it against its record if there is one, and return its last update's loss."""
    place = path.relative_to(path.parents[1]).as_posix()
    try:
        digests = RolloutDigests.read(path)
    except EvidenceError as error:
        faults.append(f"{DIGESTS_FOLDER}/{error}")
        return None
    if record is not None:
        faults += [f"{place}: {fault}" for fault in contradictions(digests, record, initial)]
    return digests.updates[-1].loss


def _measure(path: Path, planned: Planned | None) -> Measured:
    try:
        tensors = tensor_file.read(path)
    except EvidenceError as error:
        return Measured(None, (), (str(error),))
    absent = tuple(sorted(tensor_file.COMPARED - tensors.keys()))
    faults = [
        f for f in tensor_file.form_faults(tensors) if f not in {f"{name} is missing" for name in absent}
    ]
    if faults:
        return Measured(None, absent, tuple(faults))
    faults = tensor_file.value_faults(tensors)
    contradicting: tuple[str, ...] = ()
    metrics: dict[str, float] = {}
    if planned is not None:
        contradicting = tuple(of_tensors(tensors, planned))
        metrics = row_metrics(tensors, planned.samples_per_prompt)
    mask = tensors["active_mask"].astype(np.bool_)
    evidence = None
    if not absent:
        evidence = measure(
            tensors["rollout_logprob"].astype(np.float32, copy=False),
            tensors["train_logprob"].astype(np.float32, copy=False),
            mask,
            tensors["rollout_row_digest"].astype(np.int64, copy=False),
            tensors["train_row_digest"].astype(np.int64, copy=False),
        )
    active = int(np.count_nonzero(mask))
    return Measured(evidence, absent, tuple(faults), mask.shape[0], active, metrics, contradicting)
