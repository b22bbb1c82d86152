"""What the segments of a run must have in common, and what its checkpoints must say of its evidence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

from pydantic import ValidationError

from rlsp.report.checkpoint import DOCUMENT_NAME, FOLDER, Checkpoint, contradictions, numbered
from rlsp.report.compare_rules import LENGTH_KEY, continuation_keys, unequal
from rlsp.report.contradictions import of_contract, of_layouts
from rlsp.report.documents import first_fault
from rlsp.report.files import EvidenceError, canonical_json, sha256_bytes
from rlsp.report.manifest import Beginning, Manifest, Segment, StartupFacts
from rlsp.report.planned import Planned
from rlsp.report.records import RolloutRecord

_ALIKE = ("contract_hash", "data_hash", "tokenizer_hash", "initial_weights_digest")


def of_segments(manifest: Manifest) -> Iterator[str]:
    """Yield where the segments of a run do not fit together, or one contradicts itself."""
    segments = manifest.segments
    for number, segment in enumerate(segments):
        yield from (f"segment {number}: {fault}" for fault in _beginning(number, segment))
    for number, (segment, after) in enumerate(pairwise(segments)):
        yield from (f"segment {number}: {fault}" for fault in _within(segment))
        yield from (f"segments {number} and {number + 1}: {fault}" for fault in _between(segment, after))


def of_checkpoints(run_dir: Path, manifest: Manifest, records: Mapping[int, RolloutRecord]) -> list[str]:
    """List where a checkpoint's document cannot be read or contradicts the run's other files."""
    faults = []
    for number, path in numbered(run_dir).items():
        place = f"{FOLDER}/{path.name}"
        try:
            document = Checkpoint.read(path / DOCUMENT_NAME)
        except EvidenceError as error:
            faults.append(f"{place}: {error}")
            continue
        last = records.get(number - 1)
        faults += [f"{place}: {fault}" for fault in contradictions(document, path.name, manifest, last)]
        if last is None:
            faults.append(f"{place}: rollout {number - 1}, which came before it, was not recorded")
    return faults


def _beginning(number: int, segment: Segment) -> Iterator[str]:
    if (segment.begun_by is Beginning.STARTED) != (number == 0):
        yield f"it was {segment.begun_by.value}"
    wanted = f"{segment.first_rollout:05d}" if segment.first_rollout else None
    yield from unequal("its checkpoint", segment.checkpoint, wanted)
    if (segment.checkpoint is None) != (segment.checkpoint_digest is None):
        yield f"its checkpoint is {segment.checkpoint}, with the digest {segment.checkpoint_digest}"


def _within(segment: Segment) -> Iterator[str]:
    """Yield what an earlier segment states twice and differently; the newest is the manifest itself."""
    if sha256_bytes(canonical_json(segment.config)) != segment.config_hash:
        yield "config_hash is not the hash of config"
    try:
        planned = Planned.model_validate(segment.config)
    except ValidationError as error:
        yield f"config does not say what was planned: {first_fault(error)}"
        return
    yield from of_layouts(segment, planned)
    if segment.startup is not None:
        yield from of_contract(segment.startup, planned)


def _between(before: Segment, after: Segment) -> Iterator[str]:
    kept, now = continuation_keys(before.config), continuation_keys(after.config, before.config)
    for key in sorted(kept.keys() | now.keys()):
        yield from unequal(key, kept.get(key), now.get(key))
    length = [segment.config.get(LENGTH_KEY) for segment in (before, after)]
    if isinstance(length[0], int) and isinstance(length[1], int) and length[1] < length[0]:
        yield f"{LENGTH_KEY} shrank from {length[0]} to {length[1]}"
    if before.startup is not None and after.startup is not None:
        yield from _startups(before.startup, after.startup)


def _startups(before: StartupFacts, after: StartupFacts) -> Iterator[str]:
    for name in _ALIKE:
        yield from unequal(name, getattr(before, name), getattr(after, name))
