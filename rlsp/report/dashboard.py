"""What the W&B dashboards show, as plain data: sections of panels over registered metrics. No W&B here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rlsp.report.metrics import METRICS, STEP
from rlsp.report.mirror import LAYOUT_KEYS, TOTAL_PREFIX
from rlsp.report.records import TotalEvidence

WORKSPACE_TITLE = "rlsp: consistency first"
_MAX_TITLE = 128


class Kind(Enum):
    """How a panel draws its metrics."""

    LINES = "lines"
    STACKED = "stacked"
    SCALAR = "scalar"
    BARS = "bars"


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        title: What stands above it.
        metrics: Names of the registry, drawn over the rollout index; for SCALAR and BARS `total/...` of the
            summary.
        kind: How they are drawn.
        grouped_by: A key of the run's config; runs with one value of it are drawn as one, as their mean and
            the span between smallest and largest.
        log: Whether the vertical axis is logarithmic.
    """

    title: str
    metrics: tuple[str, ...]
    kind: Kind = Kind.LINES
    grouped_by: str | None = None
    log: bool = False


@dataclass(frozen=True)
class Section:
    """Panels that belong together, and in a report what to look for in them."""

    title: str
    text: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Dashboard:
    """A workspace or a report of one project.

    Attributes:
        entity: Whose project it is.
        project: The project.
        group: Show the runs of this group (a sweep's folder name) only; None for all.
        sections: What is shown, from the top.
    """

    entity: str
    project: str
    group: str | None
    sections: tuple[Section, ...]

    @property
    def title(self) -> str:
        """Return the title; dashboards of one title are one dashboard."""
        return (f"{WORKSPACE_TITLE}, {self.group}" if self.group else WORKSPACE_TITLE)[:_MAX_TITLE]

    def to_plain(self) -> dict[str, Any]:
        """Return everything as values that JSON knows."""
        return {
            "entity": self.entity,
            "project": self.project,
            "group": self.group,
            "title": self.title,
            "x": STEP,
            "sections": [_plain_section(section) for section in self.sections],
        }


def build(entity: str, project: str, group: str | None = None) -> Dashboard:
    """Build the dashboard of a project: consistency, mismatch, learning, time, layouts."""
    return Dashboard(entity, project, group, (_CONSISTENCY, _MISMATCH, _LEARNING, _TIME, _LAYOUTS))


def unknown_metrics(sections: Sequence[Section]) -> tuple[str, ...]:
    """Name metrics of panels that no run logs, with the panel that asks for them."""
    totals = {f"{TOTAL_PREFIX}{name}" for name in TotalEvidence.model_fields}
    known: Mapping[Kind, set[str]] = {
        kind: totals if kind in (Kind.SCALAR, Kind.BARS) else set(METRICS) for kind in Kind
    }
    return tuple(
        f"{panel.title}: {metric}"
        for panel in panels(sections)
        for metric in panel.metrics
        if metric not in known[panel.kind]
    )


def panels(sections: Sequence[Section]) -> Iterator[Panel]:
    """Go through all panels."""
    for section in sections:
        yield from section.panels


def _plain_section(section: Section) -> dict[str, Any]:
    shown = [_plain_panel(panel) for panel in section.panels]
    return {"title": section.title, "text": section.text, "panels": shown}


def _plain_panel(panel: Panel) -> dict[str, Any]:
    return {
        "title": panel.title,
        "kind": panel.kind.value,
        "metrics": list(panel.metrics),
        "grouped_by": panel.grouped_by,
        "log": panel.log,
    }


_CONSISTENCY = Section(
    "1 Consistency",
    "Training and rollout compute the same bits: no token mismatches in any rollout, KL is zero and the "
    "effective sample size is one. Anything else shows at which rollout it began.",
    (
        Panel("Mismatched tokens, whole run", ("total/mismatched_tokens",), Kind.SCALAR),
        Panel("Active tokens compared, whole run", ("total/active_tokens",), Kind.SCALAR),
        Panel(
            "Mismatched tokens and rows",
            ("consistency/mismatched_tokens", "consistency/mismatched_rows", "consistency/missing_tokens"),
        ),
        Panel("Largest |Δ log-prob|", ("consistency/max_abs", "consistency/mean_abs")),
        Panel("Largest distance, ulp", ("consistency/max_ulp",)),
        Panel("KL(rollout || train), k1 and k3", ("consistency/kl_k1", "consistency/kl_k3")),
        Panel("Effective sample size", ("consistency/ess",)),
        Panel("Perplexity, train / rollout", ("consistency/ppl_ratio",)),
        Panel("Tokens compared", ("consistency/active_tokens", "rollout/active_tokens")),
        Panel("Weight versions", ("rollout/weight_version", "train/weight_version")),
        Panel("Weights found again in an external engine", ("rollout/weights_found_fraction",)),
    ),
)
_MISMATCH = Section(
    "2 Mismatch, under other frameworks' names",
    "For native routes: how far the two sides are apart, over tokens and over whole sequences. In strict "
    "runs every ratio is one and every distance zero.",
    (
        Panel(
            "Ratio of probabilities, train / rollout",
            ("mismatch/ratio_mean", "mismatch/ratio_min", "mismatch/ratio_max"),
        ),
        Panel("Its spread", ("mismatch/ratio_std", "mismatch/ratio_mean_abs", "mismatch/chi2")),
        Panel("Tokens out of [1/2, 2]", ("mismatch/ratio_below_half", "mismatch/ratio_above_two")),
        Panel("Mean exp |Δ log-prob|", ("mismatch/multiplicative_error",)),
        Panel("Reverse KL k3; Jensen–Shannon", ("mismatch/kl_k3_reverse", "mismatch/js_divergence")),
        Panel(
            "|Δ probability|",
            (
                "mismatch/probability_mean_abs",
                "mismatch/probability_std_abs",
                "mismatch/probability_max_abs",
            ),
        ),
        Panel("Correlation of probabilities", ("mismatch/probability_correlation",)),
        Panel(
            "Sequences: ratio and sample size",
            ("mismatch/sequence_ratio_min", "mismatch/sequence_ratio_max", "mismatch/sequence_ess"),
        ),
        Panel(
            "Sequences: KL and χ²",
            ("mismatch/sequence_kl_k1", "mismatch/sequence_kl_k3", "mismatch/sequence_chi2"),
        ),
        Panel(
            "Sequences: distance",
            ("mismatch/sequence_mean_abs", "mismatch/sequence_multiplicative_error_max"),
        ),
        Panel(
            "Sequences: perplexity, train / rollout",
            ("mismatch/sequence_ppl_ratio", "mismatch/sequence_log_ppl_abs"),
        ),
    ),
)
_LEARNING = Section(
    "3 Learning",
    "Reward, entropy and KL; a group whose samples all got one reward teaches nothing, and a response "
    "that was cut off had no room for its end.",
    (
        Panel("Reward", ("reward/mean", "reward/min", "reward/max")),
        Panel("Reward, standard deviation", ("reward/std",)),
        Panel("Prompts that a sample solved", ("reward/solved_fraction",)),
        Panel(
            "Groups of one reward; |advantage|",
            ("reward/constant_groups_fraction", "reward/advantage_max_abs"),
        ),
        Panel("Entropy, nats", ("train/entropy",)),
        Panel("KL to the policy that RL began with, k3", ("train/kl",)),
        Panel("KL from the old policy, k3", ("train/approx_kl",)),
        Panel("Loss", ("train/loss", "train/policy_loss")),
        Panel("Gradient norm, before clipping", ("train/gradient_norm",), log=True),
        Panel("Clipping", ("train/clip_fraction", "train/clip_coefficient")),
        Panel(
            "Importance weights, train / rollout",
            ("train/is_weight_mean", "train/is_weight_max", "train/is_cut_fraction"),
        ),
        Panel("Old policy's log-probs that are not training's", ("train/old_logprob_mismatched",)),
        Panel("Learning rate", ("train/learning_rate",)),
        Panel("Gradient lost below the unit", ("train/vanished_fraction",)),
        Panel(
            "Response length, tokens",
            ("rollout/response_length_mean", "rollout/response_length_min", "rollout/response_length_max"),
        ),
        Panel("Responses cut off", ("rollout/truncated_fraction",)),
    ),
)
_TIME = Section(
    "4 Time",
    "Where a rollout's seconds go, and the tokens that come out of them.",
    (
        Panel(
            "Seconds a rollout, by phase",
            (
                "time/sync_s",
                "time/rollout_s",
                "time/reward_s",
                "time/old_logprob_s",
                "time/train_s",
                "time/evidence_s",
            ),
            Kind.STACKED,
        ),
        Panel("Seconds a rollout", ("time/total_s",)),
        Panel("Tokens a second", ("time/rollout_tokens_per_s", "time/train_tokens_per_s")),
        Panel("Since the start, s", ("time/elapsed_s",)),
        Panel(
            "Bytes that rank 0 received in a rollout, by phase",
            (
                "comm/sync_bytes",
                "comm/rollout_bytes",
                "comm/reward_bytes",
                "comm/old_logprob_bytes",
                "comm/train_bytes",
                "comm/evidence_bytes",
            ),
            Kind.STACKED,
        ),
        Panel("Memory of rank 0, MiB", ("memory/peak_mib",)),
    ),
)
_LAYOUTS = Section(
    "5 Layouts",
    "The same metrics with one line a layout: lines of one seed lie on each other, or a layout is wrong.",
    tuple(
        panel
        for key, of in zip(LAYOUT_KEYS, ("layout", "rollout layout"), strict=True)
        for panel in (
            Panel(f"Mismatched tokens by {of}", ("total/mismatched_tokens",), Kind.BARS, key),
            Panel(f"Loss by {of}", ("train/loss",), grouped_by=key),
            Panel(f"Reward by {of}", ("reward/mean",), grouped_by=key),
            Panel(f"Gradient norm by {of}", ("train/gradient_norm",), grouped_by=key, log=True),
            Panel(f"Seconds a rollout by {of}", ("time/total_s",), grouped_by=key),
        )
    ),
)
