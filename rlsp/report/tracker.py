"""The mirror of a run on Weights & Biases; the files are the truth, and the composing process owns it."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsp.config import Job, TrackerMode, to_plain
from rlsp.report.files import VERDICT_NAME, json_safe, sha256_file
from rlsp.report.follow import Follower
from rlsp.report.manifest import MANIFEST_NAME, Manifest
from rlsp.report.metrics import METRICS, STEP
from rlsp.report.recorder import CONSISTENCY_NAME
from rlsp.report.records import ConsistencyReport
from rlsp.report.verdict import Judgement

if TYPE_CHECKING:
    import wandb

_LOG = logging.getLogger(__name__)
_POLL_S = 0.5
# How long an upload may go on after the run ended; what it did not send, `wandb sync` does.
_FINISH_TIMEOUT_S = 60.0
_FILES = (MANIFEST_NAME, CONSISTENCY_NAME, VERDICT_NAME)
_ARTIFACTS = {
    "manifest": ("rlsp-manifest", (MANIFEST_NAME,)),
    "consistency": ("rlsp-consistency-report", (CONSISTENCY_NAME, VERDICT_NAME)),
}
_MAX_NAME, _MAX_TAG = 128, 64


class Tracker:
    """A mirror that keeps nothing: `tracker=none`."""

    @property
    def warning(self) -> str | None:
        """Say what went wrong with the mirror, if anything did."""
        return None

    @property
    def url(self) -> str | None:
        """Return the address of the run, where it has one."""
        return None

    def finish(self, judgement: Judgement) -> None:
        """Hand over the verdict of a run whose files are sealed, and close the mirror."""

    def close(self) -> None:
        """Close the mirror; without a verdict before, the run counts as failed."""


@contextmanager
def open_tracker(job: Job, manifest: Manifest) -> Iterator[Tracker]:
    """Mirror a run on Weights & Biases for as long as the context lasts.

    Nothing that goes wrong there raises or waits here: W&B runs on a thread of its own, a failure is one
    warning, and `online` falls back to `offline`. Everything it writes lies in the run folder's wandb/.

    Args:
        job: The run.
        manifest: As `manifest.begin` returned it.
    """
    tracker = Tracker() if job.config.tracker.mode is TrackerMode.none else WandbTracker(job, manifest)
    try:
        yield tracker
    finally:
        tracker.close()


class WandbTracker(Tracker):
    """Forwards the rows of metrics.jsonl, then verdict, totals and files, from its own thread."""

    def __init__(self, job: Job, manifest: Manifest) -> None:
        self._job = job
        self._manifest = manifest
        self._run_dir = Path(job.run_dir)
        self._warning: str | None = None
        self._url: str | None = None
        self._judgement: Judgement | None = None
        self._ending = threading.Event()
        # A daemon: an upload that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._mirror, name="rlsp-tracker", daemon=True)
        self._thread.start()

    @property
    def warning(self) -> str | None:
        """Say what went wrong with the mirror first, if anything did."""
        return self._warning

    @property
    def url(self) -> str | None:
        """Return the address of an online run; None before it is open, and offline."""
        return self._url

    def finish(self, judgement: Judgement) -> None:
        """Hand over the verdict of a run whose files are sealed, and close the mirror."""
        self._judgement = judgement
        self.close()

    def close(self) -> None:
        """Close the mirror; without a verdict before, the run counts as failed."""
        if self._ending.is_set():
            return
        self._ending.set()
        limit_s = self._job.config.tracker.init_timeout_s + 2 * _FINISH_TIMEOUT_S
        self._thread.join(limit_s)
        if self._thread.is_alive():
            self._warn(f"W&B did not finish within {limit_s:.0f} s and was left behind")

    def _warn(self, message: str) -> None:
        """Warn once; what follows from the first failure is only noted."""
        if self._warning is None:
            self._warning = message
            _LOG.warning(message)
        else:
            _LOG.info(message)

    def _mirror(self) -> None:
        try:
            with self._open() as run:
                self._url = run.url if not run.offline else None
                _define_metrics(run)
                follower = Follower(self._run_dir, first=run.step if run.resumed else 0)
                while not self._ending.wait(_POLL_S):
                    _forward(run, follower)
                _forward(run, follower)
                self._hand_over(run)
                run.finish(exit_code=self._judgement.exit_status if self._judgement else 1)
        except Exception as error:
            # Whatever W&B raises, the run goes on: its files are the truth.
            self._warn(f"W&B failed, the run's files are not affected: {type(error).__name__}: {error}")
            _end_service()

    def _open(self) -> wandb.Run:
        """Open the run; where `online` cannot be had, offline."""
        import wandb

        tracker, config = self._job.config.tracker, self._job.config
        arguments: dict[str, Any] = {
            "id": self._job.run_id,
            "project": tracker.project,
            "entity": tracker.entity,
            "name": _name(self._job),
            "group": tracker.group or config.name,
            "job_type": "train",
            "tags": _tags(self._job),
            "config": _config(self._job, self._manifest),
            "dir": self._job.run_dir,
            "resume": "allow",
            "settings": wandb.Settings(
                quiet=True,
                silent=True,
                console="off",
                x_disable_stats=True,
                disable_git=True,
                disable_code=True,
                save_code=False,
                init_timeout=tracker.init_timeout_s,
                login_timeout=tracker.init_timeout_s,
                finish_timeout=_FINISH_TIMEOUT_S,
            ),
        }
        if tracker.mode is TrackerMode.online:
            try:
                return wandb.init(mode="online", **arguments)
            except Exception as error:
                self._warn(
                    f"W&B cannot be reached, this run is kept offline: {type(error).__name__}: {error}"
                )
                # wandb 0.31's service goes on holding the id of a run that it could not open.
                wandb.teardown()
        return wandb.init(mode="offline", **arguments)

    def _hand_over(self, run: wandb.Run) -> None:
        """Send the verdict, the totals and the files that there are."""
        if self._judgement is not None:
            run.summary["verdict"] = self._judgement.verdict.value
            run.summary["reasons"] = list(self._judgement.reasons)
        present = [name for name in _FILES if (self._run_dir / name).is_file()]
        if CONSISTENCY_NAME in present:
            totals = ConsistencyReport.read(self._run_dir / CONSISTENCY_NAME).total.model_dump()
            totals |= totals.pop("mismatch") or {}
            scalars = {
                f"total/{name}": value for name, value in totals.items() if not isinstance(value, dict)
            }
            run.summary.update(scalars)
        if MANIFEST_NAME in present:
            run.summary["manifest_sha256"] = sha256_file(self._run_dir / MANIFEST_NAME)
        for name in present:
            # A copy inside the W&B run's folder: a link to the outside is lost when the folder moves.
            shutil.copyfile(self._run_dir / name, Path(run.dir) / name)
            run.save(str(Path(run.dir) / name), base_path=run.dir, policy="now")
        with _staged_inside(self._run_dir / "wandb" / "data"):
            _log_artifacts(run, self._job.run_id, present)


def _end_service() -> None:
    """End wandb's service after a failure, so that it keeps neither the run nor a process."""
    try:
        import wandb

        wandb.teardown(exit_code=1)
    except Exception as error:
        _LOG.info("wandb's service did not end: %s", error)


def _define_metrics(run: wandb.Run) -> None:
    """Draw every registered metric over the rollout index, with the summary that the registry names."""
    run.define_metric(STEP, hidden=True)
    for metric in METRICS.values():
        run.define_metric(metric.name, step_metric=STEP, summary=metric.keep.value)


def _forward(run: wandb.Run, follower: Follower) -> None:
    """Send the new rows; non-finite numbers are strings in the file."""
    for row in follower.new_rows():
        run.log({name: float(value) if isinstance(value, str) else value for name, value in row.items()})


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
        run.log_artifact(artifact)


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


def _name(job: Job) -> str:
    parallel = job.config.parallel
    layout = f"cp{parallel.cp}_tp{parallel.tp}_sp{parallel.sp}" + (
        f"_dp{parallel.dp}" if parallel.dp > 1 else ""
    )
    return f"{job.config.name}-{layout}-s{job.config.seed}"[-_MAX_NAME:]


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


def _config(job: Job, manifest: Manifest) -> Mapping[str, Any]:
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
        "packages": versions,
    }
    return {**json_safe(to_plain(job.config)), "rlsp": identity}
