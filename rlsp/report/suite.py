"""A suite of arms side by side: what each arm's own files say, and how two of them compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict

from rlsp.report.files import canonical_json, sha256_bytes
from rlsp.report.findings import Verdict
from rlsp.report.suite_arms import Arm
from rlsp.report.suite_pairs import Pair

_LONG = frozenset({"curves", "settings"})


def plain(arms: Sequence[Arm], pairs: Sequence[Pair]) -> dict[str, object]:
    """Return everything but curves and settings as plain values for a JSON file."""
    rows = [{key: value for key, value in asdict(arm).items() if key not in _LONG} for arm in arms]
    return {"arms": rows, "pairs": [asdict(one) for one in pairs]}


def table(arms: Sequence[Arm]) -> str:
    """Write the arms as a Markdown table."""
    columns: tuple[tuple[str, Callable[[Arm], str]], ...] = (
        ("arm", lambda a: a.name),
        ("engine", lambda a: a.engine),
        ("attention, FFN, log-prob", _routes),
        ("old policy", lambda a: "rollout's" if a.reuse else "recomputed"),
        ("verdict", lambda a: a.verdict),
        ("rollouts", lambda a: str(a.rollouts)),
        ("tokens", lambda a: f"{a.active_tokens:,}"),
        ("tokens that differ", lambda a: _share(a.mismatched_tokens, a.active_tokens)),
        ("rows that differ", _rows),
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
    """Say in words what the table shows: strict arms, arms of native arithmetic or another engine, pairs."""
    strict = [arm for arm in arms if arm.exact]
    native = [arm for arm in arms if not arm.exact]
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
            f"Native routes and external engines: the fewest tokens differ in {least.name} "
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


def circumstances(arms: Iterable[Arm]) -> list[str]:
    """Say which code ran where: one sentence for all arms that have both in common."""
    common: dict[str, list[str]] = {}
    for arm in arms:
        packages = ", ".join(f"{name} {version}" for name, version in arm.packages.items())
        placement = ", ".join(f"{what} {value}" for what, value in arm.placement.items())
        code = f"source {arm.source_hash[:8]}, revision {arm.revision[:12]}"
        common.setdefault(f"{code}, {packages}; {arm.processor}; {placement}", []).append(arm.name)
    return [f"{', '.join(names)}: {said}." for said, names in common.items()]


def doubled(arms: Iterable[Arm]) -> list[str]:
    """List the names that several arms have; a table could not tell them apart."""
    return [name for name, count in Counter(arm.name for arm in arms).items() if count > 1]


def identity(arms: Sequence[Arm]) -> str:
    """Hash the run ids of the arms, so that a page says which runs it was made from; 8 hex characters."""
    return sha256_bytes(canonical_json([arm.run_id for arm in arms]))[:8]


def passed(arms: Iterable[Arm]) -> bool:
    """Tell whether every arm's verdict is PASS."""
    return all(arm.verdict == Verdict.PASS.value for arm in arms)


def _routes(arm: Arm) -> str:
    words = [arm.routes[operator] for operator in ("attention", "ffn", "logp")]
    return words[0] if len(set(words)) == 1 else ", ".join(words)


def _rows(arm: Arm) -> str:
    return "not shown" if arm.mismatched_rows is None else _share(arm.mismatched_rows, arm.active_tokens)


def _share(count: int, total: int) -> str:
    return f"{count:,} ({100 * count / max(total, 1):.2f} %)" if count else "0"


def _small(value: float) -> str:
    return f"{value:.2e}" if value else "0"
