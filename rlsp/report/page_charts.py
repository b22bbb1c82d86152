"""The page's charts: which values of a run they show, in which units, and the same figures as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from xml.etree.ElementTree import Element

from rlsp.report.page_elements import NOTHING, Content, folded, node, table
from rlsp.report.page_plot import Series, bars, lines, swatch, written
from rlsp.report.page_source import Source

_TABLE_ROWS = 250
_NAMED_ROLLOUTS = 6
_PARTS = ("sync", "rollout", "reward", "old_logprob", "train", "evidence")

Draw = Callable[[Source], tuple[Series, ...]]


class Kind(Enum):
    """How the values of a chart are drawn."""

    LINES = "lines"
    COUNTS = "counts"
    ORDERS = "orders of magnitude"
    PARTS = "parts of a whole"


@dataclass(frozen=True)
class Chart:
    """One chart: what it shows, in which unit, how, and where the values come from.

    An `optional` one is left out of the page of a run that has no such values.
    """

    title: str
    unit: str
    kind: Kind
    series: Draw
    source: str
    optional: bool = False


def _logged(**names: str) -> Draw:
    """Take metrics by name; the keyword, with blanks for underscores, is what the legend says."""

    def draw(source: Source) -> tuple[Series, ...]:
        return tuple(
            Series(label.replace("_", " "), source.metrics[name])
            for label, name in names.items()
            if name in source.metrics
        )

    return draw


def _measured(source: Source) -> tuple[Series, ...]:
    """Take the comparison that was measured again from the tensors: the one that the gates judge."""
    found = tuple(source.run.compared())
    if not found:
        return ()
    return (
        Series("mismatched tokens", tuple((at, float(one.mismatched_tokens)) for at, one in found)),
        Series(
            "mismatched rows", tuple((at, float(one.mismatched_rows)) for at, one in found if one.rows_fed)
        ),
        Series(
            "missing tokens", tuple((at, float(one.missing_rollout + one.missing_train)) for at, one in found)
        ),
    )


def _tokens(source: Source) -> tuple[Series, ...]:
    # A file that cannot be read has no sequences.
    found = [(at, one) for at, one in sorted(source.run.measured.items()) if one.sequences]
    return (Series("active tokens", tuple((at, float(one.active_tokens)) for at, one in found)),)


def _lengths(source: Source) -> tuple[Series, ...]:
    """Add the limit, at which responses are truncated."""
    found = _logged(
        mean="rollout/response_length_mean",
        longest="rollout/response_length_max",
        shortest="rollout/response_length_min",
    )(source)
    limit = source.setting("max_response_tokens")
    if found and isinstance(limit, int):
        found += (Series("limit (truncated there)", tuple((at, float(limit)) for at, _ in found[0].points)),)
    return found


def _times(source: Source) -> tuple[Series, ...]:
    """Take the parts of each rollout's time, and what its total has besides."""
    parts = {part: dict(source.metrics.get(f"time/{part}_s", ())) for part in _PARTS}
    parts = {part.replace("_", " "): values for part, values in parts.items() if values}
    rollouts = sorted({at for values in parts.values() for at in values})
    totals = dict(source.metrics.get("time/total_s", ()))
    if totals and rollouts:
        known = {at: sum(values.get(at, 0.0) for values in parts.values()) for at in rollouts}
        parts["other"] = {at: totals[at] - known[at] for at in rollouts if at in totals}
    return tuple(
        Series(part, tuple((at, values.get(at, 0.0)) for at in rollouts)) for part, values in parts.items()
    )


CHARTS = (
    Chart("Mismatches", "tokens", Kind.COUNTS, _measured, "measured again from rollouts/"),
    Chart("Active tokens", "tokens", Kind.COUNTS, _tokens, "counted in rollouts/"),
    Chart(
        "Distance of the log-probabilities",
        "nats",
        Kind.COUNTS,
        _logged(largest="consistency/max_abs", mean="consistency/mean_abs"),
        "consistency/max_abs, mean_abs",
    ),
    Chart(
        "Reward",
        "mean reward; part of the prompts",
        Kind.LINES,
        _logged(mean="reward/mean", prompts_that_a_sample_solved="reward/solved_fraction"),
        "reward/mean, reward/solved_fraction",
    ),
    Chart(
        "Gradient norm",
        "norm before clipping",
        Kind.ORDERS,
        _logged(gradient_norm="train/gradient_norm"),
        "train/gradient_norm",
    ),
    Chart(
        "Loss",
        "per active token",
        Kind.LINES,
        _logged(loss="train/loss", policy_loss="train/policy_loss"),
        "train/loss, train/policy_loss",
    ),
    Chart("Entropy", "nats per token", Kind.LINES, _logged(entropy="train/entropy"), "train/entropy"),
    Chart(
        "KL divergence",
        "nats per token",
        Kind.COUNTS,
        _logged(
            to_the_first_policy="train/kl",
            from_the_old_policy="train/approx_kl",
            of_rollout_and_training="consistency/kl_k3",
        ),
        "train/kl, train/approx_kl, consistency/kl_k3",
    ),
    Chart("Response length", "tokens", Kind.COUNTS, _lengths, "rollout/response_length_*"),
    Chart("Time", "seconds", Kind.PARTS, _times, "time/*_s"),
    Chart(
        "Throughput",
        "active tokens a second",
        Kind.COUNTS,
        _logged(rollout="time/rollout_tokens_per_s", training="time/train_tokens_per_s"),
        "time/*_tokens_per_s",
    ),
    Chart(
        "Signal",
        "part of the whole",
        Kind.COUNTS,
        _logged(
            tokens_whose_ratio_was_clipped="train/clip_fraction",
            prompts_with_constant_rewards="reward/constant_groups_fraction",
            tokens_whose_importance_was_cut="train/is_cut_fraction",
            responses_that_were_cut_off="rollout/truncated_fraction",
        ),
        "train/clip_fraction, train/is_cut_fraction, reward/constant_groups_fraction, "
        "rollout/truncated_fraction",
    ),
    Chart(
        "Importance weights",
        "training over rollout",
        Kind.COUNTS,
        _logged(mean="train/is_weight_mean", largest="train/is_weight_max"),
        "train/is_weight_mean, train/is_weight_max",
        optional=True,
    ),
)


def charts(source: Source) -> Element:
    """Draw every chart; one without values says so."""
    return node("div", *(_figure(chart, chart.series(source)) for chart in CHARTS), class_="charts")


def _figure(chart: Chart, series: Sequence[Series]) -> Element | None:
    heading = node("figcaption", node("h3", chart.title))
    series = [one for one in series if one.points]
    if not series and chart.optional:
        return None
    if not series:
        return node("figure", heading, node("p", f"No values: {chart.source}.", class_="none"))
    stacked = chart.kind is Kind.PARTS
    told = f"{chart.title}, {chart.unit}, by rollout. " + " ".join(map(_told, series))
    if stacked:
        image = bars(series, chart.unit, told)
    else:
        zero, orders = chart.kind is Kind.COUNTS, chart.kind is Kind.ORDERS
        image = lines(series, chart.unit, told, from_zero=zero, logarithmic=orders)
    legend = node(
        "ul",
        *(node("li", swatch(n, bar=stacked), f" {one.label}") for n, one in enumerate(series)),
        class_="legend",
    )
    return node("figure", heading, image, legend, *_lost(series), folded("Figures", _figures(chart, series)))


def _told(one: Series) -> str:
    """Say a series in words: its ends and its extremes."""
    values = [value for _, value in one.drawable]
    if not values:
        return f"{one.label}: no finite value."
    if min(values) == max(values):
        return f"{one.label}: {values[0]:.4g} throughout."
    return (
        f"{one.label}: first {values[0]:.4g}, last {values[-1]:.4g}, smallest {min(values):.4g}, "
        f"largest {max(values):.4g}."
    )


def _lost(series: Sequence[Series]) -> list[Content]:
    """Name the values that have no place in the plot."""
    found: list[Content] = []
    for one in series:
        points = one.undrawable
        if points:
            named = ", ".join(f"{written(value)} in rollout {at}" for at, value in points[:_NAMED_ROLLOUTS])
            rest = len(points) - _NAMED_ROLLOUTS
            more = f" and {rest} more" if rest > 0 else ""
            found.append(node("p", f"× {one.label}: {named}{more}", class_="warning"))
    return found


def _figures(chart: Chart, series: Sequence[Series]) -> Element:
    columns = [dict(one.points) for one in series]
    rollouts = sorted({at for column in columns for at in column})
    every = -(-len(rollouts) // _TABLE_ROWS)
    shown = sorted({*rollouts[::every], rollouts[-1]})
    caption = f"{chart.title}, {chart.unit} ({chart.source})"
    caption += f"; one rollout in {every}, all are in metrics.jsonl" if every > 1 else ""
    rows = [
        [str(at), *(written(column[at]) if at in column else NOTHING for column in columns)] for at in shown
    ]
    return table(caption, ["rollout", *(one.label for one in series)], rows, kind="numbers")
