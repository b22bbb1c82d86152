"""Checkpoints as files: what checkpoint.json says, whether a folder holds what it says, which one to take."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from safetensors import SafetensorError, safe_open

from rlsp.report.compare_rules import continuation_hash
from rlsp.report.documents import Count, Document
from rlsp.report.files import (
    PARTIAL_SUFFIX,
    EvidenceError,
    canonical_json,
    list_contents,
    sha256_bytes,
    sha256_file,
    shown,
    sync,
)
from rlsp.report.manifest import Manifest
from rlsp.report.records import RolloutRecord

FOLDER = "checkpoints"
DOCUMENT_NAME = "checkpoint.json"
WEIGHT, REFERENCE = "weight", "reference"
STATE = (WEIGHT, "exp_avg", "exp_avg_sq", "master")
"""The groups of tensors that every checkpoint has; `reference` too where the loss has a KL term."""

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
FileName = Annotated[str, Field(pattern=r"^shards-[0-9]{4}\.safetensors$")]


class ShardEntry(Document):
    """One file: its SHA-256, and the virtual shards `first` to `end` - 1 that it has of every tensor."""

    sha256: Sha256
    first: Count
    end: Count


class Checkpoint(Document):
    """The file checkpoint.json: where a run stood after `rollouts` rollouts.

    `optimizer_steps` is the weight version. `prompts` counts those used up: the data position. All randomness
    is keyed by `seed` and by what is drawn. `continuation_hash` covers every key of the config that a resumed
    run may not change. The three digests are of all virtual shards, in no layout; `reference_digest` is null
    without a KL term. `groups` counts the tensors of each group of state.
    `layout` wrote the files; any may read them.
    """

    schema_version: Literal[1] = 1
    run_id: str
    rollouts: Count
    optimizer_steps: Count
    prompts: Count
    seed: Count
    contract_hash: str
    config_hash: str
    continuation_hash: str
    initial_weights_digest: str
    weights_digest: str
    optimizer_digest: str
    reference_digest: str | None
    groups: dict[str, Count]
    layout: dict[str, int]
    files: dict[FileName, ShardEntry]
    self_digest: str = ""

    def digest(self) -> str:
        """Compute what `self_digest` must be."""
        return sha256_bytes(canonical_json(self.model_dump(mode="json", exclude={"self_digest"})))

    def sealed(self) -> Checkpoint:
        """Return the document with its digest filled in."""
        return self.model_copy(update={"self_digest": self.digest()})


@dataclass(frozen=True)
class Choice:
    """Which checkpoint a run goes on from.

    Attributes:
        folder: The newest valid one; None where there is none.
        document: What it says.
        passed: Why newer ones cannot be taken, one line each.
    """

    folder: Path | None
    document: Checkpoint | None
    passed: tuple[str, ...]


def file_name(number: int) -> str:
    """Name the file of the shards of TP rank `number`."""
    return f"shards-{number:04d}.safetensors"


def checkpoint_path(run_dir: Path | str, rollouts: int) -> Path:
    """Return where the checkpoint after `rollouts` rollouts lies."""
    return Path(run_dir) / FOLDER / f"{rollouts:05d}"


def partial_path(run_dir: Path | str, rollouts: int) -> Path:
    """Return where it is put together, before it gets its name."""
    final = checkpoint_path(run_dir, rollouts)
    return final.with_name(final.name + PARTIAL_SUFFIX)


def numbered(run_dir: Path) -> dict[int, Path]:
    """List the checkpoints that have got their name, by rollouts completed, in order."""
    found = [path for path in (run_dir / FOLDER).glob("*") if path.name.isdecimal()]
    return {
        int(path.name): path for path in sorted(found) if path == checkpoint_path(run_dir, int(path.name))
    }


def require_files(folder: Path, document: Checkpoint) -> None:
    """Make sure that every file of a checkpoint is really there, as whoever wrote it says.

    Other machines write some of them: what is no shared folder, or loses a write, is found before the
    checkpoint has a name.

    Raises:
        EvidenceError: A file is missing or has another hash; the message names all of them.
    """

    def fault(name: str) -> str | None:
        try:
            damaged = sha256_file(folder / name) != document.files[name].sha256
        except OSError as error:
            return f"{name} cannot be read: {error.strerror or error}"
        return f"{name} has another SHA-256 than its rank wrote" if damaged else None

    with ThreadPoolExecutor() as pool:  # hashing lets other threads work: it takes as long as one file
        faults = [text for text in pool.map(fault, sorted(document.files)) if text is not None]
    if faults:
        raise EvidenceError(f"{FOLDER}/{folder.name}, as node 0 sees it: {'; '.join(faults)}")


def commit(run_dir: Path, document: Checkpoint, keep: int | None) -> None:
    """Give a checkpoint whose files are durable its name, and remove those that are not to be kept.

    Raises:
        EvidenceError: The folder cannot be written.
    """
    final, partial = (at(run_dir, document.rollouts) for at in (checkpoint_path, partial_path))
    try:
        for path in partial.iterdir():  # of an attempt that was killed, in another layout
            if path.name not in document.files:
                path.unlink()
        document.write(partial / DOCUMENT_NAME)
        if final.exists():
            _remove(final)
        partial.rename(final)
        sync(final.parent)
        for path in list(numbered(run_dir).values())[: -keep if keep else 0]:
            _remove(path)
    except OSError as error:
        raise EvidenceError(f"cannot write {final}: {error.strerror or error}") from error


def discard_after(run_dir: Path, rollouts: int) -> None:
    """Remove the checkpoints after `rollouts`, and what never got a name: a resumed run makes them again."""
    for number, path in numbered(run_dir).items():
        if number > rollouts:
            _remove(path)
    remove_unfinished(run_dir)


def remove_unfinished(run_dir: Path) -> None:
    """Remove what a process that was killed while saving, or while removing, left behind."""
    for path in (run_dir / FOLDER).glob(f"*{PARTIAL_SUFFIX}"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)


def newest(run_dir: Path, manifest: Manifest, records: Mapping[int, RolloutRecord]) -> Choice:
    """Choose the newest checkpoint that is whole, is this run's, and fits the evidence before it.

    Args:
        run_dir: The run folder.
        manifest: The run's.
        records: Entries of its consistency.json by index.
    """
    passed = []
    for path in sorted((run_dir / FOLDER).glob(f"*{PARTIAL_SUFFIX}")):
        passed.append(f"{FOLDER}/{path.name} was never finished")
    for number, path in sorted(numbered(run_dir).items(), reverse=True):
        document, faults = inspect(path, manifest, records.get(number - 1))
        if document is not None and not faults:
            return Choice(path, document, tuple(passed))
        passed += [f"{FOLDER}/{path.name}: {fault}" for fault in faults]
    return Choice(None, None, tuple(passed))


def inspect(
    path: Path, manifest: Manifest, last: RolloutRecord | None
) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """Read a checkpoint's document and list everything that speaks against going on from it.

    Args:
        path: Its folder.
        manifest: The run's.
        last: The record of the last rollout before it; None where there is none.
    """
    try:
        document = Checkpoint.read(path / DOCUMENT_NAME)
    except EvidenceError as error:
        return None, (str(error),)
    faults = [*contradictions(document, path.name, manifest, last), *_file_faults(path, document)]
    if last is None:
        faults.append(f"the evidence of rollout {document.rollouts - 1}, which came before it, is missing")
    return document, tuple(map(shown, faults))


def contradictions(
    document: Checkpoint, name: str, manifest: Manifest, last: RolloutRecord | None
) -> Iterator[str]:
    """Yield what a checkpoint's document states otherwise than its name, the manifest and the evidence."""
    if document.self_digest != document.digest():
        yield f"{DOCUMENT_NAME} was changed after it was written"
    said: list[tuple[str, object, object]] = [
        ("rollouts", f"{document.rollouts:05d}", name),
        ("run_id", document.run_id, manifest.run_id),
        ("seed", document.seed, manifest.seeds.get("seed")),
        ("continuation_hash", document.continuation_hash, continuation_hash(manifest.config)),
        ("prompts", document.prompts, _prompts(manifest.config, document.rollouts)),
    ]
    startup = next((s.startup for s in manifest.segments if s.startup is not None), None)
    if startup is not None:
        said += [
            (name, getattr(document, name), getattr(startup, name))
            for name in ("contract_hash", "initial_weights_digest")
        ]
    if last is not None:
        steps = last.weight_version_train + last.updates
        said += [
            ("optimizer_steps", document.optimizer_steps, steps),
            ("weights_digest", document.weights_digest, last.weights_digest),
            ("optimizer_digest", document.optimizer_digest, last.optimizer_digest),
        ]
    for what, stated, wanted in said:
        if stated != wanted:
            yield f"{what} is {stated}, but the run's is {wanted}"


def _prompts(config: Mapping[str, Any], rollouts: int) -> object:
    each = config.get("prompts_per_rollout")
    return rollouts * each if isinstance(each, int) else None


def _file_faults(path: Path, document: Checkpoint) -> Iterator[str]:
    """Yield what is wrong with the files, each with the groups of state that are lost with it."""
    contents = list_contents(path)
    yield from contents.faults
    listed = {*document.files, DOCUMENT_NAME}
    yield from (
        f"{name} is no part of it" for name in (*contents.files, *contents.empty) if name not in listed
    )
    groups, held = ", ".join(sorted(document.groups)), True
    for name, entry in sorted(document.files.items()):
        lost = f"(state groups {groups}, virtual shards {entry.first} to {entry.end - 1})"
        try:
            if sha256_file(path / name) != entry.sha256:
                yield f"{name} is damaged: its SHA-256 is another one {lost}"
                held = False
        except OSError as error:
            yield f"{name} cannot be read: {error.strerror or error} {lost}"
            held = False
    ends = [entry.end for _, entry in sorted(document.files.items())]
    if [entry.first for _, entry in sorted(document.files.items())] != [0, *ends[:-1]] or not ends:
        yield "its files do not make up all virtual shards"
    elif held:
        yield from _group_faults(path, document)


def _group_faults(path: Path, document: Checkpoint) -> Iterator[str]:
    """Yield the groups of state of which a tensor is missing, by the headers of the files."""
    wanted = {*STATE, *([REFERENCE] if document.reference_digest else [])}
    yield from (f"state group {group} is missing" for group in sorted(wanted - document.groups.keys()))
    for number, name in enumerate(sorted(document.files)):
        try:
            with safe_open(path / name, framework="numpy") as opened:
                keys = [key.partition("/")[::2] for key in opened.keys()]  # noqa: SIM118  (no mapping)
        except (SafetensorError, OSError) as error:
            yield f"{name} is no safetensors file: {error}"
            continue
        tensors = {group: {tensor for of, tensor in keys if of == group} for group in document.groups}
        every = set().union(*tensors.values())
        for group, found in sorted(tensors.items()):
            whole = len(found) == document.groups[group] if number == 0 else found == every
            if not whole:
                yield f"state group {group} is incomplete in {name}"


def _remove(folder: Path) -> None:
    """Remove a checkpoint so that no moment shows a part of it under its name."""
    aside = folder.with_name(f"{folder.name}.{os.getpid()}{PARTIAL_SUFFIX}")
    folder.rename(aside)
    shutil.rmtree(aside)
