"""One arm of a published suite: what the sealed files of its run say, and on what it ran."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import JsonValue

from rlsp.config import Config, ConfigError, from_plain
from rlsp.layout import layout_word
from rlsp.report.compare_rules import result_keys
from rlsp.report.files import EvidenceError, as_number
from rlsp.report.manifest import MANIFEST_NAME, Manifest
from rlsp.report.metrics import STEP
from rlsp.report.page_plot import Point, Series
from rlsp.report.recorder import CONSISTENCY_NAME, METRICS_NAME, whole_rows
from rlsp.report.records import ConsistencyReport
from rlsp.report.verdict import verify

_NEEDED = ("reward/mean", "time/total_s", "time/rollout_s", "time/old_logprob_s", "time/train_s")
_PACKAGES = ("torch", "megatron-core")


@dataclass(frozen=True)
class Arm:
    """One arm of a suite, read from its run folder.

    Attributes:
        name: The experiment's name.
        engine: What generated.
        routes: Its declared routes by operator, as they were asked for.
        reuse: Whether the old policy's log-probabilities are the rollout's.
        verdict: What its files give now; a damaged folder is refused before.
        rollouts: Rollouts that are recorded.
        active_tokens: Tokens that were compared.
        mismatched_tokens: Those whose two log-probabilities differ in any bit.
        mismatched_rows: Those whose full-vocabulary logits differ in any bit; None of an external engine.
        clean_rollouts: Rollouts without any difference.
        max_abs: Largest |difference| of the two log-probabilities.
        mean_abs: Mean |difference|.
        kl_k3: k3 estimate of KL(rollout || train).
        smallest_gradient_norm: Over all updates.
        reward_mean: Over all rollouts.
        reward_last: Over the last tenth of the rollouts.
        step_s: Median seconds of a rollout with its updates.
        parts_s: Medians of generating, of the old policy's recomputation, and of the updates, seconds.
        weights_digest: Of the last weights.
        source_hash: Of the code that ran.
        revision: Of its repository; `unknown` where there was none.
        processor: What it ran on.
        packages: Versions of those that decide kernels and model, by name.
        data_hash: Of the task's content; None where no rank said it.
        placement: Layouts, micro-batch size and device: they leave strict bits alone, native ones not.
        settings: What else of the config decides the results, as dotted key and value.
        run_id: The run.
        command: The command that made it.
        curves: Values over rollouts by metric.
    """

    name: str
    engine: str
    routes: dict[str, str]
    reuse: bool
    verdict: str
    rollouts: int
    active_tokens: int
    mismatched_tokens: int
    mismatched_rows: int | None
    clean_rollouts: int
    max_abs: float
    mean_abs: float
    kl_k3: float
    smallest_gradient_norm: float
    reward_mean: float
    reward_last: float
    step_s: float
    parts_s: tuple[float, float, float]
    weights_digest: str
    source_hash: str
    revision: str
    processor: str
    packages: dict[str, str]
    data_hash: str | None
    placement: dict[str, str]
    settings: dict[str, JsonValue]
    run_id: str
    command: str
    curves: dict[str, tuple[Point, ...]]

    @property
    def exact(self) -> bool:
        """Tell whether its two sides promise the same bits."""
        return self.engine == "native" and set(self.routes.values()) == {"strict"}

    def series(self, metric: str) -> Series:
        """Return one metric over the rollouts, under the arm's name."""
        return Series(self.name, self.curves.get(metric, ()))


def read_arm(folder: Path) -> Arm:
    """Verify a run folder and read what the suite says of it.

    Raises:
        EvidenceError: The folder is damaged, was never sealed, has no rollout, or another version's config.
    """
    verification = verify(folder)
    if verification.damage or verification.stored is None:
        raise EvidenceError(f"{folder}: {'; '.join(verification.damage) or 'not sealed'}")
    manifest = Manifest.read(folder / MANIFEST_NAME)
    report = ConsistencyReport.read(folder / CONSISTENCY_NAME)
    if not report.rollouts:
        raise EvidenceError(f"{folder}: no rollout was recorded")
    try:
        config = from_plain(manifest.config)
    except ConfigError as error:
        raise EvidenceError(f"{folder}: {MANIFEST_NAME} has no config of this version: {error}") from error
    curves = _curves(folder)
    if absent := [name for name in _NEEDED if name not in curves]:
        raise EvidenceError(f"{folder}: {METRICS_NAME} has no {', '.join(absent)}")
    rewards = [value for _, value in curves["reward/mean"]]
    total = report.total
    return Arm(
        name=config.name,
        engine=config.rollout.engine.value,
        routes=asdict(config.numerics.routes),
        reuse=config.reuse_rollout_logprob,
        verdict=verification.judgement.verdict.value,
        rollouts=len(report.rollouts),
        active_tokens=total.active_tokens,
        mismatched_tokens=total.mismatched_tokens,
        mismatched_rows=report.mismatched_rows,
        clean_rollouts=sum(not one.mismatched_tokens and not one.mismatched_rows for one in report.rollouts),
        max_abs=total.max_abs,
        mean_abs=total.mean_abs,
        kl_k3=total.kl_k3,
        smallest_gradient_norm=_smallest([norm for one in report.rollouts for norm in one.gradient_norms]),
        reward_mean=mean(rewards),
        reward_last=mean(rewards[-max(1, len(rewards) // 10) :]),
        step_s=_median(curves["time/total_s"]),
        parts_s=(
            _median(curves["time/rollout_s"]),
            _median(curves["time/old_logprob_s"]),
            _median(curves["time/train_s"]),
        ),
        weights_digest=report.rollouts[-1].weights_digest,
        source_hash=manifest.code.source_hash,
        revision=manifest.code.revision,
        processor=manifest.hardware.cpu,
        packages={name: manifest.packages.get(name, "absent") for name in _PACKAGES},
        data_hash=manifest.startup.data_hash if manifest.startup else None,
        placement=_placement(manifest, config),
        settings=result_keys(manifest.config),
        run_id=manifest.run_id,
        command=shlex.join(manifest.command_line),
        curves=curves,
    )


def mean(values: Sequence[float]) -> float:
    """Return the mean; NaN or infinite as its values are."""
    return statistics.fmean(values) if all(map(math.isfinite, values)) else sum(values) / len(values)


def median(values: Sequence[float]) -> float:
    """Return the median; NaN where a value is NaN, which has no place in an order."""
    return math.nan if any(map(math.isnan, values)) else statistics.median(values)


def _smallest(values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else min(values)


def _placement(manifest: Manifest, config: Config) -> dict[str, str]:
    at, rollout = manifest.layout, manifest.rollout_layout
    return {
        "layout": layout_word(cp=at.cp, tp=at.tp, sp=at.sp, dp=at.dp),
        "rollout layout": f"{rollout.engines} × tp{rollout.tp}",
        "micro-batch size": str(config.micro_batch_size),
        "device": config.device.kind.value,
    }


def _curves(folder: Path) -> dict[str, tuple[Point, ...]]:
    curves: dict[str, list[Point]] = {}
    for _, row in whole_rows(folder / METRICS_NAME):
        for name, said in row.items():
            value = as_number(said)
            if name != STEP and value is not None:
                curves.setdefault(name, []).append((int(row[STEP]), value))
    return {name: tuple(points) for name, points in curves.items()}


def _median(points: Sequence[Point]) -> float:
    return median([value for _, value in points])
