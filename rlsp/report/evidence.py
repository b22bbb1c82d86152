"""What a run folder says, read back from its files alone and measured again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict

from rlsp.report import tensors as tensor_file
from rlsp.report.consistency import ConsistencyReport, RolloutRecord, TokenEvidence, measure, total
from rlsp.report.digests import FOLDER as DIGESTS_FOLDER
from rlsp.report.digests import RolloutDigests, contradictions, digests_path
from rlsp.report.files import EvidenceError, canonical_json, sha256_bytes
from rlsp.report.manifest import MANIFEST_NAME, Manifest
from rlsp.report.metrics import STEP
from rlsp.report.recorder import CONSISTENCY_NAME, METRICS_NAME, whole_rows
from rlsp.report.records import Statistics

# Exponentials differ between mathematics libraries in their last bits; everything else is exact.
_THROUGH_EXP = frozenset({"kl_k3", "ppl_ratio", "ess", "sums"})
_EXP_RELATIVE = 1e-9
# k3 is a difference of nearly equal numbers, so near zero only its size counts.
_EXP_ABSOLUTE = 1e-12


class _Open(BaseModel):
    """A part of the composed config; keys that no gate asks about are left alone."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class _Parallel(_Open):
    dp: int
    cp: int
    tp: int
    sp: int


class _Rollout(_Open):
    engine: str


class Planned(_Open):
    """What the composed config promised."""

    num_rollouts: int
    updates_per_rollout: int
    prompts_per_rollout: int
    samples_per_prompt: int
    parallel: _Parallel
    rollout: _Rollout

    @property
    def sequences(self) -> int:
        """Count the sequences of one rollout."""
        return self.prompts_per_rollout * self.samples_per_prompt

    @property
    def world_size(self) -> int:
        """Count the ranks."""
        return self.parallel.dp * self.parallel.cp * self.parallel.tp


@dataclass(frozen=True)
class Measured:
    """One rollout's tensor file.

    Attributes:
        evidence: The comparison, measured again; None where a side was never recorded or the file is damaged.
        absent: Compared tensors that the file lacks.
        faults: What is malformed.
        sequences: Sequences in the file.
        active_tokens: Active tokens in the file.
    """

    evidence: TokenEvidence | None
    absent: tuple[str, ...]
    faults: tuple[str, ...]
    sequences: int
    active_tokens: int


@dataclass(frozen=True)
class RunEvidence:
    """Everything that the gates judge.

    Attributes:
        manifest: None if it is missing or damaged.
        planned: What the composed config promised; None if the manifest does not say.
        records: Entries of consistency.json by index.
        measured: Tensor files by index.
        digested: Indices of the digest files.
        strays: Files in rollouts/ and digests/ that belong to no rollout.
        rows: Rollout indices of metrics.jsonl in file order.
        faults: What is damaged, missing or contradicts itself.
    """

    manifest: Manifest | None
    planned: Planned | None
    records: dict[int, RolloutRecord]
    measured: dict[int, Measured]
    digested: tuple[int, ...]
    strays: tuple[str, ...]
    rows: tuple[int, ...]
    faults: tuple[str, ...]

    def compared(self) -> Iterator[tuple[int, TokenEvidence]]:
        """Yield every rollout whose two sides could be compared."""
        for index, measured in sorted(self.measured.items()):
            if measured.evidence is not None:
                yield index, measured.evidence


def collect(run_dir: Path) -> RunEvidence:
    """Read a run folder; whatever is wrong with it is listed and never raised.

    A run that recorded no rollout has no reports either: that is not damage, and the counts tell.
    """
    faults: list[str] = []
    manifest, planned = _manifest(run_dir, faults)
    tensor_files, strays = _numbered(run_dir, tensor_file.FOLDER, tensor_file.rollout_path)
    # One at a time in memory.
    measured = {index: _measure(path) for index, path in tensor_files.items()}
    digest_files, digest_strays = _numbered(run_dir, DIGESTS_FOLDER, digests_path)
    report = _report(run_dir, faults) if measured or (run_dir / CONSISTENCY_NAME).exists() else None
    records = {record.index: record for record in report.rollouts} if report else {}
    if report and len(records) != len(report.rollouts):
        faults.append(f"{CONSISTENCY_NAME} lists a rollout twice")
    for index, rollout in sorted(measured.items()):
        name = tensor_file.rollout_path(run_dir, index).name
        faults += [f"{name}: {fault}" for fault in rollout.faults]
        if rollout.evidence is not None and index in records:
            faults += _contradictions(
                f"{CONSISTENCY_NAME}, rollout {index}", records[index], rollout.evidence
            )
    if report:
        faults += _contradictions(f"{CONSISTENCY_NAME}, total", report.total, total(report.rollouts))
    initial = manifest.startup.initial_weights_digest if manifest and manifest.startup else None
    for index, path in digest_files.items():
        faults += _digest_faults(path, records.get(index), initial)
    rows = _rows(run_dir, faults) if report or (run_dir / METRICS_NAME).exists() else ()
    strays += digest_strays
    return RunEvidence(
        manifest, planned, records, measured, tuple(digest_files), tuple(strays), rows, tuple(faults)
    )


def _manifest(run_dir: Path, faults: list[str]) -> tuple[Manifest | None, Planned | None]:
    try:
        manifest = Manifest.read(run_dir / MANIFEST_NAME)
    except EvidenceError as error:
        faults.append(str(error))
        return None, None
    if sha256_bytes(canonical_json(manifest.config)) != manifest.config_hash:
        faults.append(f"{MANIFEST_NAME}: config_hash is not the hash of config")
    try:
        return manifest, Planned.model_validate(manifest.config)
    except ValueError as error:
        faults.append(f"{MANIFEST_NAME}: config does not say what was planned: {error}")
        return manifest, None


def _report(run_dir: Path, faults: list[str]) -> ConsistencyReport | None:
    try:
        return ConsistencyReport.read(run_dir / CONSISTENCY_NAME)
    except EvidenceError as error:
        faults.append(str(error))
        return None


def _rows(run_dir: Path, faults: list[str]) -> tuple[int, ...]:
    try:
        rows = [row for _, row in whole_rows(run_dir / METRICS_NAME)]
    except EvidenceError as error:
        faults.append(str(error))
        return ()
    indices = [row.get(STEP) for row in rows]
    if not all(isinstance(index, int) for index in indices):
        faults.append(f"{METRICS_NAME}: a row has no rollout index")
    return tuple(index for index in indices if isinstance(index, int))


def _numbered(
    run_dir: Path, folder: str, named: Callable[[Path, int], Path]
) -> tuple[dict[int, Path], list[str]]:
    """List the files of `folder` by the rollout that they belong to, and those that belong to none."""
    files, strays = {}, []
    for path in sorted((run_dir / folder).glob("*")):
        index = int(path.stem) if path.stem.isdecimal() else -1
        if path == named(run_dir, index):
            files[index] = path
        else:
            strays.append(path.relative_to(run_dir).as_posix())
    return files, strays


def _digest_faults(path: Path, record: RolloutRecord | None, initial: str | None) -> list[str]:
    """List what is wrong with a digest file; without a record it can only be read."""
    place = path.relative_to(path.parents[1]).as_posix()
    try:
        digests = RolloutDigests.read(path)
    except EvidenceError as error:
        return [f"{DIGESTS_FOLDER}/{error}"]
    return [f"{place}: {fault}" for fault in contradictions(digests, record, initial)] if record else []


def _measure(path: Path) -> Measured:
    try:
        tensors = tensor_file.read(path)
    except EvidenceError as error:
        return Measured(None, (), (str(error),), 0, 0)
    absent = tuple(sorted(tensor_file.COMPARED - tensors.keys()))
    faults = [
        f for f in tensor_file.form_faults(tensors) if f not in {f"{name} is missing" for name in absent}
    ]
    if faults:
        return Measured(None, absent, tuple(faults), 0, 0)
    faults = tensor_file.value_faults(tensors)
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
    return Measured(evidence, absent, tuple(faults), mask.shape[0], int(np.count_nonzero(mask)))


def _contradictions(place: str, stored: Statistics, measured: Statistics) -> list[str]:
    """List the statistics of `measured` that `stored` states otherwise."""
    faults = []
    for name in type(measured).model_fields:
        said, found = getattr(stored, name), getattr(measured, name)
        if not _same(said, found, exact=name not in _THROUGH_EXP):
            faults.append(f"{place}: {name} is {said}, but the evidence gives {found}")
    return faults


def _same(a: object, b: object, *, exact: bool) -> bool:
    if isinstance(a, BaseModel) and isinstance(b, BaseModel):
        return all(_same(getattr(a, name), getattr(b, name), exact=exact) for name in type(a).model_fields)
    if isinstance(a, float) and isinstance(b, float):
        if math.isnan(a) or math.isnan(b):
            return math.isnan(a) and math.isnan(b)
        return a == b if exact else math.isclose(a, b, rel_tol=_EXP_RELATIVE, abs_tol=_EXP_ABSOLUTE)
    return a == b
