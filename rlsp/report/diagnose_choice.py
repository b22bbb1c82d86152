"""Which sequence of a run is to be replayed, and every reason why it cannot be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rlsp.config import JOB_PATH, ConfigError, Job, from_plain, violations
from rlsp.report import tensors as tensor_file
from rlsp.report.files import EvidenceError, read_regular
from rlsp.report.manifest import MANIFEST_NAME, Manifest
from rlsp.report.provenance import package_versions, source_hash
from rlsp.report.recorder import CONSISTENCY_NAME
from rlsp.report.records import ConsistencyReport, RolloutRecord
from rlsp.report.verdict import verify
from rlsp.report.warmup import read_warmup

# What kernels and modules come from: other versions may compute other bits.
_PACKAGES = ("torch", "megatron-core", "numpy")


class RefusedError(Exception):
    """There is nothing to replay; the message says why."""


@dataclass(frozen=True)
class Choice:
    """A sequence that can be replayed.

    Attributes:
        job: The run's own job.
        manifest: Its manifest.
        rollout: Index of the rollout.
        sample: Row of the rollout's tensors.
        notes: What may make the replay compute something else than the run did.
    """

    job: Job
    manifest: Manifest
    rollout: int
    sample: int
    notes: tuple[str, ...]


def choose(run_dir: Path, rollout: int | None, sample: int | None) -> Choice:
    """Read a run and pick a sequence: the one that is named, else the first whose two sides differ.

    Raises:
        RefusedError: The run's files cannot be read, there is no such sequence, or it has no active token.
    """
    try:
        manifest = Manifest.read(run_dir / MANIFEST_NAME)
        records = ConsistencyReport.read(run_dir / CONSISTENCY_NAME).rollouts
        job = _job(run_dir)
        if job.config.rollout.external:
            engine = job.config.rollout.engine.value
            raise RefusedError(f"an external engine ({engine}) drew this run's tokens: it cannot be replayed")
        record = _record(records, rollout, sample)
        job = _of_segment(job, manifest, record.index)
        if sample is None:
            sample = _first_mismatch(record)
        _require_tokens(run_dir, record, sample)
    except EvidenceError as error:
        raise RefusedError(str(error)) from error
    return Choice(job, manifest, record.index, sample, _notes(run_dir, manifest))


def _of_segment(job: Job, manifest: Manifest, rollout: int) -> Job:
    """Give a resumed run's job the config, and so the layout, of the segment that made a rollout."""
    if manifest.number_of(rollout) == len(manifest.earlier):
        return job
    try:
        config = from_plain(manifest.segment_of(rollout).config)
    except ConfigError as error:
        raise RefusedError(f"{MANIFEST_NAME}: {error}") from error
    return replace(job, config=config)


def _job(run_dir: Path) -> Job:
    try:
        job = Job.from_json(read_regular(run_dir / JOB_PATH).decode())
    except OSError as error:
        raise RefusedError(f"{JOB_PATH} cannot be read: {error.strerror or error}") from error
    except ConfigError as error:
        raise RefusedError(f"{JOB_PATH} is no job of this version: {error}") from error
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"{JOB_PATH} is damaged: {error}") from error
    if found := violations(job.config):
        raise RefusedError(f"{JOB_PATH}: " + "; ".join(map(str, found)))
    # All ranks of the replay are on this machine, wherever those of the run were.
    alone = replace(job.config.cluster, nodes=1, node=0)
    return replace(job, config=replace(job.config, cluster=alone))


def _record(records: Sequence[RolloutRecord], rollout: int | None, sample: int | None) -> RolloutRecord:
    """Pick the rollout that is named, or the first with a mismatch."""
    if rollout is None and sample is not None:
        raise RefusedError("--sample needs --rollout")
    if rollout is None:
        differing = [record for record in records if record.mismatched_tokens or record.mismatched_rows]
        if not differing:
            raise RefusedError("no token of this run mismatches: name a sequence by --rollout and --sample")
        return differing[0]
    if not 0 <= rollout < len(records):
        legal = f"0..{len(records) - 1}" if records else "none, no rollout was recorded"
        raise RefusedError(f"--rollout {rollout}: legal: {legal}")
    return records[rollout]


def _first_mismatch(record: RolloutRecord) -> int:
    places = (record.first_mismatch, record.first_row_mismatch)
    samples = [place.sample for place in places if place is not None]
    if not samples:
        raise RefusedError(f"no token of rollout {record.index} mismatches: name a sequence by --sample")
    return min(samples)


def _require_tokens(run_dir: Path, record: RolloutRecord, sample: int) -> None:
    """Refuse a row that does not exist or has nothing to replay, and tensors that say what cannot be.

    Raises:
        EvidenceError: The tensors are missing or malformed.
    """
    path = tensor_file.rollout_path(run_dir, record.index)
    stored = tensor_file.read(path)
    if faults := tensor_file.form_faults(stored) or tensor_file.value_faults(stored):
        raise RefusedError(f"{path.name} is damaged: " + "; ".join(faults))
    samples = stored["tokens"].shape[0]
    if not 0 <= sample < samples:
        raise RefusedError(f"--sample {sample}: legal: 0..{samples - 1}")
    if not np.any(stored["active_mask"][sample]):
        raise RefusedError(f"sample {sample} of rollout {record.index} has no active token to replay")


def _notes(run_dir: Path, manifest: Manifest) -> tuple[str, ...]:
    """List what a replay cannot be expected to reproduce."""
    notes = [f"damaged evidence: {line}" for line in verify(run_dir).damage]
    if manifest.code.source_hash != source_hash():
        notes.append("the code is not the one that ran")
    if warmup := read_warmup(run_dir):
        notes.append(f"the replay takes the {len(warmup.steps)} steps of the warm-up again")
    held = package_versions()
    notes += [
        f"{name} is {held.get(name)}, the run had {manifest.packages.get(name)}"
        for name in _PACKAGES
        if held.get(name) != manifest.packages.get(name)
    ]
    return tuple(notes)
