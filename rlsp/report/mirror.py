"""What a run looks like on Weights & Biases: identity, metrics, summary, files and artifacts."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsp.config import Job, TrackerMode, to_plain
from rlsp.layout import layout_word
from rlsp.report.files import VERDICT_NAME, json_safe, sha256_file
from rlsp.report.follow import Follower
from rlsp.report.manifest import MANIFEST_NAME, Manifest
from rlsp.report.metrics import METRICS, STEP
from rlsp.report.page import PAGE_NAME
from rlsp.report.recorder import CONSISTENCY_NAME
from rlsp.report.records import ConsistencyReport
from rlsp.report.verdict import Judgement
from rlsp.report.warmup import WARMUP_NAME, read_warmup

if TYPE_CHECKING:
    import wandb

_LOG = logging.getLogger(__name__)
FILES = (MANIFEST_NAME, CONSISTENCY_NAME, WARMUP_NAME, VERDICT_NAME, PAGE_NAME)
_ARTIFACTS = {
    "manifest": ("rlsp-manifest", (MANIFEST_NAME,)),
    "consistency": ("rlsp-consistency-report", (CONSISTENCY_NAME, WARMUP_NAME, VERDICT_NAME, PAGE_NAME)),
}
_MAX_NAME, _MAX_TAG = 128, 64
_READ_LIMIT_S = 60.0
TOTAL_PREFIX = "total/"
LAYOUT_KEYS = ("rlsp.layout", "rlsp.rollout_layout")
"""Keys of a run's config that name its layouts in a word: W&B groups a panel by one key only."""


def open_run(job: Job, manifest: Manifest, mode: TrackerMode) -> wandb.Run:
    """Open the run on Weights & Biases, and say there how its metrics are drawn.

    Args:
        job: The run.
        manifest: As `manifest.begin` returned it.
        mode: Online or offline.

    Raises:
        Exception: Whatever wandb raises; online that is a server that does not answer, or no account.
    """
    import wandb

    tracker, config = job.config.tracker, job.config
    run = wandb.init(
        mode="online" if mode is TrackerMode.online else "offline",
        id=job.run_id,
        project=tracker.project,
        entity=tracker.entity,
        name=_name(job),
        group=tracker.group or config.name,
        job_type="train",
        tags=_tags(job),
        config=dict(config_of(job, manifest)),
        dir=job.run_dir,
        resume="allow",
        settings=wandb.Settings(
            quiet=True,
            silent=True,
            console="off",
            x_disable_stats=True,
            disable_git=True,
            disable_code=True,
            save_code=False,
            init_timeout=tracker.init_timeout_s,
            login_timeout=tracker.init_timeout_s,
            finish_timeout=tracker.finish_timeout_s,
            finish_timeout_raises=True,
        ),
    )
    run.define_metric(STEP, hidden=True)
    for metric in METRICS.values():
        run.define_metric(metric.name, step_metric=STEP, summary=metric.keep.value)
    return run


def forward(run: wandb.Run, follower: Follower) -> None:
    """Send the new rows; non-finite numbers are strings in the file."""
    for row in follower.new_rows():
        run.log({name: float(value) if isinstance(value, str) else value for name, value in row.items()})


def rows_kept_offline(run: wandb.Run, run_dir: Path) -> int:
    """Count the rows, from the first one on, that earlier segments of an offline run left for `wandb sync`.

    A log that cannot be read counts for nothing: rather twice than never.
    """
    rollouts: set[int] = set()
    for log in (run_dir / "wandb").glob(f"*run-*-{run.id}/run-{run.id}.wandb"):
        if log.parent != Path(run.dir).parent:
            rollouts |= _rollouts_in(log)
    return next(index for index in itertools.count() if index not in rollouts)


def _rollouts_in(log: Path) -> set[int]:
    """Read which rollouts a run's log has rows of, by wandb's own reader."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(log)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_READ_LIMIT_S, check=False)
        records = [json.loads(line) for line in done.stdout.splitlines()]
        rows = [record["history"]["item"] for record in records if record["type"] == "history"]
        return {row[STEP] for row in rows if isinstance(row.get(STEP), int)}
    except (OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError, AttributeError) as error:
        _LOG.info("W&B: %s cannot be read: %s", log, error)
        return set()


def send_summary(run: wandb.Run, run_dir: Path, judgement: Judgement | None) -> None:
    """Send the verdict, the totals and the manifest's hash, as far as there are any."""
    if judgement is not None:
        run.summary["verdict"] = judgement.verdict.value
        run.summary["reasons"] = list(judgement.reasons)
    if (run_dir / CONSISTENCY_NAME).is_file():
        totals = ConsistencyReport.read(run_dir / CONSISTENCY_NAME).total.model_dump()
        totals |= totals.pop("mismatch", None) or {}
        run.summary.update(
            {f"{TOTAL_PREFIX}{name}": value for name, value in totals.items() if not isinstance(value, dict)}
        )
    if warmup := read_warmup(run_dir):
        run.summary["warmup/steps"] = len(warmup.steps)
        run.summary["warmup/loss"] = warmup.steps[-1].loss
        run.summary["warmup/weights_digest"] = warmup.weights_digest
    if (run_dir / MANIFEST_NAME).is_file():
        run.summary["manifest_sha256"] = sha256_file(run_dir / MANIFEST_NAME)


def send_files(run: wandb.Run, run_dir: Path, run_id: str) -> None:
    """Send the evidence that there is, as files of the run and as versioned artifacts."""
    present = [name for name in FILES if (run_dir / name).is_file()]
    for name in present:
        # A copy inside the W&B run's folder: a link to the outside is lost when the folder moves.
        shutil.copyfile(run_dir / name, Path(run.dir) / name)
        run.save(str(Path(run.dir) / name), base_path=run.dir, policy="now")
    with _staged_inside(run_dir / "wandb" / "data"):
        _log_artifacts(run, run_id, present)


def _log_artifacts(run: wandb.Run, run_id: str, present: list[str]) -> None:
    import wandb

    for kind, (artifact_type, names) in _ARTIFACTS.items():
        files = [name for name in names if name in present]
        if not files:
            continue
        artifact = wandb.Artifact(f"{kind}-{run_id}", type=artifact_type, metadata={"run_id": run_id})
        for name in files:
            # Immutable: the copy above is W&B's own already, so no third one is staged.
            artifact.add_file(str(Path(run.dir) / name), name=name, policy="immutable", skip_cache=True)
        if run.offline:
            run.log_artifact(artifact)
        else:
            _publish(run, artifact)


def _publish(run: wandb.Run, artifact: wandb.Artifact) -> None:
    """Log an artifact online as wandb does offline: as a record of the run, with no question to the server.

    wandb 0.31's `log_artifact` logs in anew and asks for the type of each artifact first, 19 s apiece on a
    server that hangs, and writes nothing that `wandb sync` could send later. No type can clash under a name
    that bears the run's id.
    """
    artifact.finalize()
    assert run._interface is not None
    run._interface.publish_artifact(run, artifact, aliases=["latest"])


def end_service(limit_s: float = 2.0) -> None:
    """End wandb's service, so that it keeps neither a run's id nor a process: asked first, then killed.

    wandb 0.31 waits without a limit for its service, and that goes on retrying an upload for many minutes,
    even after this process is gone and in spite of SIGTERM.

    Args:
        limit_s: How long it may take when asked.
    """
    process = _service_process()
    asking = threading.Thread(target=_teardown, name="rlsp-tracker-end", daemon=True)
    asking.start()
    asking.join(limit_s)
    if process is not None and process.poll() is None:
        process.kill()
        asking.join(limit_s)


def _teardown() -> None:
    import wandb

    try:
        wandb.teardown(exit_code=1)
    except Exception as error:
        _LOG.info("W&B: its service did not end: %s", error)


def _service_process() -> subprocess.Popen[bytes] | None:
    """Find the process of wandb's service; wandb 0.31 has no public way to it."""
    from wandb.sdk import wandb_setup

    connection = getattr(wandb_setup._singleton, "_connection", None)
    process = getattr(getattr(connection, "_proc", None), "_process", None)
    return process if isinstance(process, subprocess.Popen) else None


@contextmanager
def _staged_inside(folder: Path) -> Iterator[None]:
    """Let wandb stage artifacts in `folder` for as long as the context lasts.

    wandb 0.31 reads this place from the environment only (WANDB_DATA_DIR, else the user's home), and a run
    must not write outside its folder nor change the environment of the process.
    """
    import wandb.env

    kept = wandb.env.get_data_dir
    wandb.env.get_data_dir = lambda env=None: str(folder)
    try:
        yield
    finally:
        wandb.env.get_data_dir = kept


def _layout(job: Job) -> str:
    at = job.config.parallel
    return layout_word(cp=at.cp, tp=at.tp, sp=at.sp, dp=at.dp)


def _name(job: Job) -> str:
    return f"{job.config.name}-{_layout(job)}-s{job.config.seed}"[-_MAX_NAME:]


def _tags(job: Job) -> list[str]:
    """Tag for searching; W&B cannot group by tags, so everything here is in the config too."""
    config = job.config
    found = [
        *config.tracker.tags,
        f"cp{config.parallel.cp}",
        f"tp{config.parallel.tp}",
        *(["sp"] if config.parallel.sp > 1 else []),
        *([f"dp{config.parallel.dp}"] if config.parallel.dp > 1 else []),
        config.model.name,
        config.model.dtype.name,
        config.device.backend,
        "strict" if config.numerics.routes.strict else "native",
    ]
    return [tag[:_MAX_TAG] for tag in dict.fromkeys(found)]


def config_of(job: Job, manifest: Manifest) -> Mapping[str, Any]:
    """Return the composed config, and under `rlsp` what else identifies the run."""
    versions = {
        name: manifest.packages.get(name) for name in ("torch", "megatron-core", "transformers", "wandb")
    }
    identity = {
        "run_id": job.run_id,
        "manifest_hash": manifest.begun_hash,
        "manifest_schema_version": manifest.schema_version,
        "config_hash": manifest.config_hash,
        "code_revision": manifest.code.revision,
        "code_dirty": manifest.code.dirty,
        "source_hash": manifest.code.source_hash,
        "overrides": list(job.overrides),
        "world_size": job.config.world_size,
        "layout": _layout(job),
        "rollout_layout": f"{manifest.rollout_layout.engines} x tp{manifest.rollout_layout.tp}",
        "packages": versions,
    }
    return {**json_safe(to_plain(job.config)), "rlsp": identity}
