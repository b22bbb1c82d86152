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


class Beginning(Enum):
    """Why a segment of a run began."""

    STARTED = "started"
    RESUMED = "resumed"
    RESTARTED = "restarted"


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


class Segment(Document):
    """One stretch of a run, from its start or from a checkpoint up to its end or the next one's beginning.

    It made the rollouts from `first_rollout` on that no later segment made again. `checkpoint` names what it
    went on from, with the digest of its document; both are null where it began at rollout 0.
    """

    begun_by: Beginning
    first_rollout: int
    checkpoint: str | None
    checkpoint_digest: str | None
    started_at: str
    command_line: tuple[str, ...]
    overrides: tuple[str, ...]
    config: dict[str, JsonValue]
    config_hash: str
    layout: TrainingLayout
    rollout_layout: EngineLayout
    code: CodeRevision
    hardware: Hardware
    startup: StartupFacts | None
    status: Status
    ended_at: str | None
    aborted: str | None


class Manifest(Document):
    """The file manifest.json. Times are UTC, ISO 8601; `environment` lists the switches that matter.

    A run that was resumed or restarted is told by its newest segment; `earlier` has those before it.
    """

    schema_version: Literal[1, 2] = 2
    run_id: str
    begun_by: Beginning = Beginning.STARTED
    first_rollout: int = 0
    checkpoint: str | None = None
    checkpoint_digest: str | None = None
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
    earlier: tuple[Segment, ...] = ()

    @property
    def segments(self) -> tuple[Segment, ...]:
        """List all segments in order, the newest as the manifest itself tells it."""
        own = {name: getattr(self, name) for name in Segment.model_fields}
        return (*self.earlier, Segment(**own))

    def number_of(self, rollout: int) -> int:
        """Return which segment, from 0, made what the folder holds of a rollout."""
        firsts = [*(segment.first_rollout for segment in self.earlier), self.first_rollout]
        return max((n for n, first in enumerate(firsts) if first <= rollout), default=0)

    def segment_of(self, rollout: int) -> Segment:
        """Return the segment that made what the folder holds of a rollout."""
        return self.segments[self.number_of(rollout)]

    @property
    def begun_hash(self) -> str:
        """Hash what was known as the run began; adding start-up facts and the end leaves it."""
        begun = self.model_dump(mode="json", exclude={"startup", "status", "ended_at", "aborted"})
        return sha256_bytes(canonical_json(begun))


def begin(job: Job, environment: Mapping[str, str], begun_by: Beginning | None = None) -> Manifest:
    """Write the manifest of a run, or of a segment of one, that is about to start, and return it.

    Args:
        job: The run. Where it is resumed, the manifest in its folder goes on as an earlier segment.
        environment: The environment switches that matter (`determinism.environment_switches()`).
        begun_by: Why it begins; None: as the job says.

    Raises:
        EvidenceError: The folder cannot be written.
    """
    config, resumed = job.config, job.resumed
    run_dir = Path(job.run_dir)
    manifest = Manifest(
        run_id=job.run_id,
        begun_by=begun_by or (Beginning.RESUMED if resumed else Beginning.STARTED),
        first_rollout=job.first_rollout,
        checkpoint=resumed.checkpoint if resumed else None,
        checkpoint_digest=resumed.digest if resumed else None,
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
        earlier=Manifest.read(run_dir / MANIFEST_NAME).segments if resumed else (),
    )
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
