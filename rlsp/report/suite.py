"""A suite of arms side by side: what each arm's own files say, and how two of them compare."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rlsp.config import from_plain
from rlsp.report.files import EvidenceError, canonical_json, sha256_bytes
from rlsp.report.findings import Verdict
from rlsp.report.manifest import MANIFEST_NAME, Manifest
from rlsp.report.metrics import STEP
from rlsp.report.page_plot import Point, Series
from rlsp.report.recorder import CONSISTENCY_NAME, METRICS_NAME, whole_rows
from rlsp.report.records import ConsistencyReport
from rlsp.report.verdict import verify

_NEEDED = ("reward/mean", "time/total_s", "time/rollout_s", "time/old_logprob_s", "time/train_s")


@dataclass(frozen=True)
class Arm:
    """One arm of a suite, read from its run folder.

    Attributes:
        name: The experiment's name.
        routes: Its declared routes by operator, as they were asked for.
        reuse: Whether the old policy's log-probabilities are the rollout's.
        verdict: What its files give now; a damaged folder is refused before.
        rollouts: Rollouts that are recorded.
        active_tokens: Tokens that were compared.
        mismatched_tokens: Those whose two log-probabilities differ in any bit.
        mismatched_rows: Those whose full-vocabulary logits differ in any bit.
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
        run_id: The run.
        command: The command that made it.
        curves: Values over rollouts by metric.
    """

    name: str
    routes: dict[str, str]
    reuse: bool
    verdict: str
    rollouts: int
    active_tokens: int
    mismatched_tokens: int
    mismatched_rows: int
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
    run_id: str
    command: str
    curves: dict[str, tuple[Point, ...]]

    def series(self, metric: str) -> Series:
        """Return one metric over the rollouts, under the arm's name."""
        return Series(self.name, self.curves.get(metric, ()))


@dataclass(frozen=True)
class Pair:
    """Two arms on the same prompts and seeds, rollout by rollout.

    Attributes:
        first: Name of one arm.
        second: Name of the other.
        rollouts: Rollouts that both have.
        reward_difference: Mean of second − first.
        reward_error: Its standard error over rollouts.
        step_ratio: Median of second / first of a rollout's seconds.
    """

    first: str
    second: str
    rollouts: int
    reward_difference: float
    reward_error: float
    step_ratio: float


def read_arm(folder: Path) -> Arm:
    """Verify a run folder and read what the suite says of it.

    Raises:
        EvidenceError: The folder is damaged, was never sealed, or has no rollout.
    """
    verification = verify(folder)
    if verification.damage or verification.stored is None:
        raise EvidenceError(f"{folder}: {'; '.join(verification.damage) or 'not sealed'}")
    manifest = Manifest.read(folder / MANIFEST_NAME)
    report = ConsistencyReport.read(folder / CONSISTENCY_NAME)
    if not report.rollouts:
        raise EvidenceError(f"{folder}: no rollout was recorded")
    config, curves = from_plain(manifest.config), _curves(folder)
    if absent := [name for name in _NEEDED if name not in curves]:
        raise EvidenceError(f"{folder}: {METRICS_NAME} has no {', '.join(absent)}")
    rewards = [value for _, value in curves["reward/mean"]]
    total = report.total
    return Arm(
        name=config.name,
        routes=asdict(config.numerics.routes),
        reuse=config.reuse_rollout_logprob,
        verdict=verification.judgement.verdict.value,
        rollouts=len(report.rollouts),
        active_tokens=total.active_tokens,
        mismatched_tokens=total.mismatched_tokens,
        mismatched_rows=total.mismatched_rows,
        clean_rollouts=sum(not one.mismatched_tokens and not one.mismatched_rows for one in report.rollouts),
        max_abs=total.max_abs,
        mean_abs=total.mean_abs,
        kl_k3=total.kl_k3,
        smallest_gradient_norm=min(norm for one in report.rollouts for norm in one.gradient_norms),
        reward_mean=statistics.fmean(rewards),
        reward_last=statistics.fmean(rewards[-max(1, len(rewards) // 10) :]),
        step_s=_median(curves["time/total_s"]),
        parts_s=(
            _median(curves["time/rollout_s"]),
            _median(curves["time/old_logprob_s"]),
            _median(curves["time/train_s"]),
        ),
        weights_digest=report.rollouts[-1].weights_digest,
        run_id=manifest.run_id,
        command=shlex.join(manifest.command_line),
        curves=curves,
    )


def pair(first: Arm, second: Arm) -> Pair:
    """Compare two arms rollout by rollout."""
    one, other = (dict(arm.curves["reward/mean"]) for arm in (first, second))
    common = sorted(one.keys() & other.keys())
    differences = [other[at] - one[at] for at in common]
    slow, fast = (dict(arm.curves["time/total_s"]) for arm in (first, second))
    spread = statistics.stdev(differences) if len(differences) > 1 else 0.0
    return Pair(
        first=first.name,
        second=second.name,
        rollouts=len(common),
        reward_difference=statistics.fmean(differences),
        reward_error=spread / max(len(differences), 1) ** 0.5,
        step_ratio=statistics.median(fast[at] / slow[at] for at in common),
    )


def plain(arms: Sequence[Arm], pairs: Sequence[Pair]) -> dict[str, object]:
    """Return everything but the curves as plain values for a JSON file."""
    rows = [{key: value for key, value in asdict(arm).items() if key != "curves"} for arm in arms]
    return {"arms": rows, "pairs": [asdict(one) for one in pairs]}


def table(arms: Sequence[Arm]) -> str:
    """Write the arms as a Markdown table."""
    columns: tuple[tuple[str, Callable[[Arm], str]], ...] = (
        ("arm", lambda a: a.name),
        ("attention, FFN, log-prob", _routes),
        ("old policy", lambda a: "rollout's" if a.reuse else "recomputed"),
        ("verdict", lambda a: a.verdict),
        ("rollouts", lambda a: str(a.rollouts)),
        ("tokens", lambda a: f"{a.active_tokens:,}"),
        ("tokens that differ", lambda a: _share(a.mismatched_tokens, a.active_tokens)),
        ("rows that differ", lambda a: _share(a.mismatched_rows, a.active_tokens)),
        ("mean abs Δ", lambda a: _small(a.mean_abs)),
        ("max abs Δ", lambda a: _small(a.max_abs)),
        ("KL k3", lambda a: _small(a.kl_k3)),
        ("least gradient norm", lambda a: f"{a.smallest_gradient_norm:.3g}"),
        ("reward", lambda a: f"{a.reward_mean:.4f}"),
        ("reward, last tenth", lambda a: f"{a.reward_last:.4f}"),
        ("seconds a rollout", lambda a: f"{a.step_s:.2f}"),
        ("generate / old policy / train", lambda a: " / ".join(f"{part:.2f}" for part in a.parts_s)),
        ("weights", lambda a: f"`{a.weights_digest[:8]}`"),
    )
    lines = [
        "| " + " | ".join(title for title, _ in columns) + " |",
        "|" + "---|" * len(columns),
        *("| " + " | ".join(cell(arm) for _, cell in columns) + " |" for arm in arms),
    ]
    return "\n".join(lines) + "\n"


def sentences(arms: Sequence[Arm], pairs: Iterable[Pair]) -> list[str]:
    """Say in words what the table shows: strict arms, native arms, pairs."""
    strict = [arm for arm in arms if set(arm.routes.values()) == {"strict"}]
    native = [arm for arm in arms if arm not in strict]
    said = [
        f"{arm.name}: {arm.clean_rollouts} of {arm.rollouts} rollouts without any difference "
        f"({arm.active_tokens:,} tokens, {arm.mismatched_tokens} log-probabilities and "
        f"{arm.mismatched_rows} rows differ)."
        for arm in strict
    ]
    if native:
        least = min(native, key=lambda arm: arm.mismatched_tokens / max(arm.active_tokens, 1))
        most = max(native, key=lambda arm: arm.max_abs)
        said.append(
            f"Native routes: the fewest tokens differ in {least.name} "
            f"({_share(least.mismatched_tokens, least.active_tokens)}); "
            f"the largest difference is {_small(most.max_abs)} in {most.name}."
        )
    said += [
        f"{one.second} against {one.first}, over {one.rollouts} common rollouts: reward "
        f"{one.reward_difference:+.4f} ± {one.reward_error:.4f} (standard error), "
        f"seconds a rollout × {one.step_ratio:.2f} (median)."
        for one in pairs
    ]
    same: dict[tuple[int, str], list[str]] = {}
    for arm in arms:
        same.setdefault((arm.rollouts, arm.weights_digest), []).append(arm.name)
    said += [
        f"{' and '.join(names)} end with the same weights, bit for bit ({digest[:8]})."
        for (_, digest), names in same.items()
        if len(names) > 1
    ]
    return said


def identity(arms: Sequence[Arm]) -> str:
    """Hash the run ids of the arms, so that a page says which runs it was made from; 8 hex characters."""
    return sha256_bytes(canonical_json([arm.run_id for arm in arms]))[:8]


def passed(arms: Iterable[Arm]) -> bool:
    """Tell whether every arm's verdict is PASS."""
    return all(arm.verdict == Verdict.PASS.value for arm in arms)


def _curves(folder: Path) -> dict[str, tuple[Point, ...]]:
    curves: dict[str, list[Point]] = {}
    for _, row in whole_rows(folder / METRICS_NAME):
        for name, value in row.items():
            if name != STEP and isinstance(value, int | float):
                curves.setdefault(name, []).append((int(row[STEP]), float(value)))
    return {name: tuple(points) for name, points in curves.items()}


def _median(points: Sequence[Point]) -> float:
    return statistics.median(value for _, value in points)


def _routes(arm: Arm) -> str:
    words = [arm.routes[operator] for operator in ("attention", "ffn", "logp")]
    return words[0] if len(set(words)) == 1 else ", ".join(words)


def _share(count: int, total: int) -> str:
    return f"{count:,} ({100 * count / max(total, 1):.2f} %)" if count else "0"


def _small(value: float) -> str:
    return f"{value:.2e}" if value else "0"
