"""The file manifest.json: everything needed to say what ran, where, and with which contract."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from pydantic import JsonValue, ValidationError

from rlsp.config import Job, to_plain
from rlsp.layout import Layout, RolloutLayout
from rlsp.report.documents import Document
from rlsp.report.files import EvidenceError, canonical_json, json_safe, sha256_bytes
from rlsp.report.provenance import CodeRevision, Hardware, code_revision, hardware, package_versions

MANIFEST_NAME = "manifest.json"


class Status(Enum):
    """How far a run got."""

    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"


class RankPlace(Document):
    """One row of the layout table: where a rank stands; `sp` is the index of its residual shard."""

    rank: int
    dp: int
    cp: int
    tp: int
    sp: int


class EnginePlace(Document):
    """One row of the rollout's table; an idle rank has no engine."""

    rank: int
    engine: int | None
    tp: int | None


class TrainingLayout(Document):
    """Widths of the training axes and the place of every rank; `sp` is 1 or equal to tp."""

    dp: int
    cp: int
    tp: int
    sp: int
    table: tuple[RankPlace, ...]


class EngineLayout(Document):
    """Widths of the rollout and the place of every rank."""

    tp: int
    engines: int
    table: tuple[EnginePlace, ...]


class RankAgreement(Document):
    """What one rank says about itself; `layout` is its row of the layout table, without the rank."""

    rank: int
    contract_hash: str
    layout: dict[str, int]
    code_hash: str
    kernel_digest: str


class WeightFile(Document):
    """A file of weights: `head_sha256` hashes its head, which says how tensors lie, not what they hold."""

    name: str
    bytes: int
    head_sha256: str


class WeightSource(Document):
    """Where the initial weights came from; `sha256` is over the files' lines."""

    path: str
    format: Literal["safetensors", "gguf"]
    files: tuple[WeightFile, ...]
    sha256: str


class StartupFacts(Document):
    """What rank 0 learns as the ranks come up.

    `data_hash` is the task's content hash, `tokenizer` the tokenizer's kind, `chat_template_hash` null where
    prompts are made without a template. `kernels` is the identity of the kernels, `certificate` what the
    start-up certificate measured, `paths` the path that it chose for each operator. `weight_source` is null
    for fresh weights.
    """

    contract: dict[str, JsonValue]
    contract_hash: str
    data_hash: str
    tokenizer: str
    tokenizer_hash: str
    chat_template_hash: str | None
    initial_weights_digest: str
    weight_source: WeightSource | None = None
    kernels: dict[str, JsonValue]
    certificate: dict[str, JsonValue]
    paths: dict[str, str]
    agreement: tuple[RankAgreement, ...]


class Manifest(Document):
    """The file manifest.json. Times are UTC, ISO 8601; `environment` lists the switches that matter."""

    schema_version: Literal[1] = 1
    run_id: str
    started_at: str
    command_line: tuple[str, ...]
    overrides: tuple[str, ...]
    config: dict[str, JsonValue]
    config_hash: str
    layout: TrainingLayout
    rollout_layout: EngineLayout
    seeds: dict[str, int]
    entropy_coef: float
    code: CodeRevision
    packages: dict[str, str]
    hardware: Hardware
    environment: dict[str, str]
    startup: StartupFacts | None
    status: Status
    ended_at: str | None
    aborted: str | None

    @property
    def begun_hash(self) -> str:
        """Hash what was known as the run began; adding start-up facts and the end leaves it."""
        begun = self.model_dump(mode="json", exclude={"startup", "status", "ended_at", "aborted"})
        return sha256_bytes(canonical_json(begun))


def begin(job: Job, environment: Mapping[str, str]) -> Manifest:
    """Write the manifest of a run that is about to start, in its run folder, and return it.

    Args:
        job: The run.
        environment: The environment switches that matter (`determinism.environment_switches()`).

    Raises:
        EvidenceError: The folder cannot be written.
    """
    config = job.config
    manifest = Manifest(
        run_id=job.run_id,
        started_at=job.started_at,
        command_line=job.command_line,
        overrides=job.overrides,
        config=json_safe(to_plain(config)),
        config_hash=config.config_hash,
        layout=training_layout(config.layout),
        rollout_layout=engine_layout(config.rollout_layout),
        seeds={"seed": config.seed},
        entropy_coef=config.entropy_coef,
        code=code_revision(),
        packages=dict(package_versions()),
        hardware=hardware(),
        environment=dict(sorted(environment.items())),
        startup=None,
        status=Status.RUNNING,
        ended_at=None,
        aborted=None,
    )
    run_dir = Path(job.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    manifest.write(run_dir / MANIFEST_NAME)
    return manifest


def add_startup(run_dir: str | Path, startup: StartupFacts | Mapping[str, Any]) -> Manifest:
    """Add what rank 0 learnt at start-up.

    Raises:
        EvidenceError: A fact is missing, unknown or malformed, or the manifest cannot be read or written.
    """
    path = Path(run_dir) / MANIFEST_NAME
    if not isinstance(startup, StartupFacts):
        try:
            startup = StartupFacts.model_validate(json_safe(dict(startup)))
        except ValidationError as error:
            faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
            raise EvidenceError("start-up facts are malformed: " + "; ".join(faults)) from error
    return _replaced(path, startup=startup)


def finish(run_dir: str | Path, ended_at: str, status: Status, aborted: str | None = None) -> Manifest:
    """Say when and how the run ended.

    Args:
        run_dir: The run folder.
        ended_at: UTC, ISO 8601.
        status: FINISHED or ABORTED.
        aborted: Why it was aborted; None for a finished run.

    Raises:
        EvidenceError: The manifest cannot be read or written.
        ValueError: Status and reason contradict each other.
    """
    if status is Status.RUNNING or (status is Status.ABORTED) != (aborted is not None):
        raise ValueError(f"a run cannot end as {status.value} with aborted={aborted!r}")
    return _replaced(Path(run_dir) / MANIFEST_NAME, ended_at=ended_at, status=status, aborted=aborted)


def _replaced(path: Path, **changes: Any) -> Manifest:
    manifest = Manifest.read(path).model_copy(update=changes)
    manifest.write(path)
    return manifest


def training_layout(layout: Layout) -> TrainingLayout:
    """Write a training layout with the place of every rank."""
    table = tuple(RankPlace(**row) for row in layout.table())
    return TrainingLayout(dp=layout.dp, cp=layout.cp, tp=layout.tp, sp=layout.sp, table=table)


def engine_layout(layout: RolloutLayout) -> EngineLayout:
    """Write a rollout layout with the place of every rank."""
    places = [(rank, layout.coords(rank)) for rank in range(layout.world_size)]
    table = tuple(
        EnginePlace(rank=rank, engine=at.engine if at else None, tp=at.tp if at else None)
        for rank, at in places
    )
    return EngineLayout(tp=layout.tp, engines=layout.engines, table=table)
