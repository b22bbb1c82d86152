"""Plots over rollouts as inline SVG: lines and stacked bars with axes, and nothing to run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar
from xml.etree.ElementTree import Element

from rlsp.report.files import json_safe
from rlsp.report.page_elements import node

# User units; the page shows a plot at about this size, so that its letters stay as large as the text around.
WIDTH, HEIGHT = 360, 206
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 350, 24, 166
_MARKED_POINTS = 48
_DRAWN_POINTS = 300
# Beyond these a difference of two values would overflow or vanish; nothing a run measures comes near.
_LARGEST, _SMALLEST = 1e300, 1e-300
_FLAT = 1e-5
_LOGARITHMIC_FROM = 50.0

Point = tuple[int, float]
T = TypeVar("T")


@dataclass(frozen=True)
class Series:
    """One line or one part of the bars: its name and (rollout, value) in order; values may be non-finite."""

    label: str
    points: tuple[Point, ...]

    @property
    def drawable(self) -> tuple[Point, ...]:
        """Return the points that have a place on an axis."""
        return tuple(point for point in self.points if abs(point[1]) <= _LARGEST)

    @property
    def undrawable(self) -> tuple[Point, ...]:
        """Return the points that are NaN, infinite or beyond any axis."""
        return tuple(point for point in self.points if not abs(point[1]) <= _LARGEST)


@dataclass(frozen=True)
class Axis:
    """The values of an axis: its ends, its ticks, and whether distances are of logarithms."""

    low: float
    high: float
    ticks: tuple[float, ...]
    logarithmic: bool = False

    def part(self, value: float) -> float:
        """Return how far along the axis a value lies, 0 to 1."""
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return (value - low) / (high - low)

    def labels(self) -> tuple[str, ...]:
        """Write the ticks with as many digits as tell them apart."""
        if self.logarithmic or len(self.ticks) < 2:
            return tuple(f"{tick:.4g}" for tick in self.ticks)
        whole = math.floor(math.log10(max(abs(tick) for tick in self.ticks)))
        digits = whole - math.floor(math.log10(self.ticks[1] - self.ticks[0])) + 1
        # Up to a million no exponent, which is what %g writes for fewer digits than the number has.
        digits = max(digits, whole + 1 if whole < 6 else 1)
        return tuple(f"{tick:.{digits}g}" for tick in self.ticks)


def value_axis(values: Iterable[float], *, from_zero: bool, logarithmic: bool = False) -> Axis:
    """Lay an axis with round ticks around finite values.

    Args:
        values: What must fit.
        from_zero: Whether 0 must fit, too.
        logarithmic: Whether values that span orders of magnitude may be told apart by their logarithms.
    """
    found = [*values, *([0.0] if from_zero else [])] or [0.0]
    low, high = min(found), max(found)
    if logarithmic and low > _SMALLEST and high / low > _LOGARITHMIC_FROM:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        every = -(-(last - first) // 4)
        ticks = tuple(10.0**power for power in range(first, last + 1, every))
        return Axis(10.0**first, 10.0**last, ticks, logarithmic=True)
    largest = max(abs(low), abs(high))
    if high - low <= max(_FLAT * largest, _SMALLEST):
        margin = 0.1 * largest if largest > _SMALLEST else 1.0
        low, high = low - (0 if from_zero or not largest else margin), high + margin
    step = _round_step((high - low) / 4)
    first, last = math.floor(low / step), math.ceil(high / step)
    return Axis(first * step, last * step, tuple(number * step for number in range(first, last + 1)))


def rollout_axis(rollouts: Iterable[int]) -> Axis:
    """Lay an axis of rollout indices, half a rollout wider on each side, with whole ticks."""
    found = list(rollouts) or [0]
    low, high = min(found), max(found)
    step = max(1, round(_round_step((high - low) / 6))) if high > low else 1
    ticks = tuple(float(tick) for tick in range(-(-low // step) * step, high + 1, step))
    return Axis(low - 0.5, high + 0.5, ticks)


def lines(series: Sequence[Series], unit: str, label: str, *, from_zero: bool, logarithmic: bool) -> Element:
    """Draw each series as a line of its own style; values without a place stand as × on the upper edge.

    Args:
        series: At most four, as there are so many styles.
        unit: Of the values.
        label: What a reader who cannot see the plot is told.
        from_zero: Whether the axis starts at 0.
        logarithmic: Whether the axis may be logarithmic.
    """
    across = rollout_axis(rollout for line in series for rollout, _ in line.points)
    up = value_axis(
        (value for line in series for _, value in line.drawable), from_zero=from_zero, logarithmic=logarithmic
    )
    image = _frame(across, up, unit, label)
    for number, line in enumerate(series):
        for run in _unbroken(line):
            places = [(_x(across, rollout), _y(up, value)) for rollout, value in _thinned(run)]
            path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
            image.append(node("path", d=path, class_=f"line s{number}"))
            # A lone point has no line.
            if len(line.points) <= _MARKED_POINTS or len(run) == 1:
                image.extend(_marker(across, up, number, line.label, point) for point in run)
        for rollout, value in line.undrawable:
            what = node("title", f"{line.label}, rollout {rollout}: {written(value)}")
            place = {"x": f"{_x(across, rollout):.1f}", "y": _TOP + 4}
            image.append(node("text", what, "×", **place, class_=f"lost s{number}"))
    return image


def bars(series: Sequence[Series], unit: str, label: str) -> Element:
    """Draw one bar a rollout, the series on top of each other in order; of many rollouts means of neighbours.

    Args:
        series: At most seven; values of the same rollouts, none negative; what is not finite has no height.
        unit: Of the values.
        label: What a reader who cannot see the plot is told.
    """
    heights = [dict(part.drawable) for part in series]
    rollouts = sorted({rollout for part in series for rollout, _ in part.points})
    groups = [group for group in _groups(rollouts, _DRAWN_POINTS) if group]
    means = [
        [sum(max(part.get(at, 0.0), 0.0) for at in group) / len(group) for group in groups]
        for part in heights
    ]
    across = rollout_axis(rollouts)
    up = value_axis((sum(column) for column in zip(*means, strict=True)), from_zero=True)
    image = _frame(across, up, unit, label)
    floor = [0.0] * len(groups)
    for number, part in enumerate(means):
        pieces = []
        for at, (group, value) in enumerate(zip(groups, part, strict=True)):
            left, right = _x(across, group[0] - 0.4), _x(across, group[-1] + 0.4)
            bottom, top = _y(up, floor[at]), _y(up, floor[at] + value)
            pieces.append(f"M{left:.1f} {bottom:.1f}H{right:.1f}V{top:.1f}H{left:.1f}z")
            floor[at] += value
        image.append(node("path", d="".join(pieces), class_=f"bar s{number}"))
    return image


def swatch(number: int, *, bar: bool) -> Element:
    """Draw the legend's sample of a series' style."""
    sample = (
        node("path", d="M4 1H20V11H4z", class_=f"bar s{number}")
        if bar
        else node("path", d="M0 6H24", class_=f"line s{number}")
    )
    return node("svg", sample, viewBox="0 0 24 12", width=24, height=12, aria_hidden="true")


def written(value: float) -> str:
    """Write a value with six digits; what is not finite as the run's JSON files have it."""
    return f"{value:.6g}" if math.isfinite(value) else str(json_safe(value))


def _frame(across: Axis, up: Axis, unit: str, label: str) -> Element:
    image = node("svg", viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=label)
    said = unit + (" (logarithmic)" if up.logarithmic else "")
    image.append(node("text", said, x=4, y=13, class_="unit"))
    for tick, text in zip(up.ticks, up.labels(), strict=True):
        y = f"{_y(up, tick):.1f}"
        image.append(node("path", d=f"M{_LEFT} {y}H{_RIGHT}", class_="grid"))
        image.append(node("text", text, x=_LEFT - 6, y=y, dy="0.35em", class_="tick end"))
    for tick in across.ticks:
        x = f"{_x(across, tick):.1f}"
        image.append(node("path", d=f"M{x} {_BOTTOM}v4", class_="axis"))
        image.append(node("text", f"{tick:.0f}", x=x, y=_BOTTOM + 16, class_="tick middle"))
    image.append(node("path", d=f"M{_LEFT} {_BOTTOM}H{_RIGHT}", class_="axis"))
    image.append(node("text", "rollout", x=(_LEFT + _RIGHT) / 2, y=HEIGHT - 8, class_="unit middle"))
    return image


def _marker(across: Axis, up: Axis, number: int, label: str, point: Point) -> Element:
    what = node("title", f"{label}, rollout {point[0]}: {written(point[1])}")
    x, y = f"{_x(across, point[0]):.1f}", f"{_y(up, point[1]):.1f}"
    return node("circle", what, cx=x, cy=y, r=2.6, class_=f"mark s{number}")


def _x(axis: Axis, rollout: float) -> float:
    return _LEFT + axis.part(rollout) * (_RIGHT - _LEFT)


def _y(axis: Axis, value: float) -> float:
    return _BOTTOM - axis.part(value) * (_BOTTOM - _TOP)


def _unbroken(line: Series) -> list[list[Point]]:
    """Cut a line where a value has no place, so that the gap shows."""
    runs: list[list[Point]] = [[]]
    for point in line.points:
        if abs(point[1]) <= _LARGEST:
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Keep of many points each neighbourhood's smallest and largest, so that no spike is lost."""
    if len(points) <= 2 * _DRAWN_POINTS:
        return list(points)
    kept: list[Point] = []
    for group in _groups(points, _DRAWN_POINTS):
        kept += sorted({min(group, key=lambda p: p[1]), max(group, key=lambda p: p[1])})
    return kept


def _groups(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """Cut items into at most `count` groups of neighbours."""
    size = max(1, -(-len(items) // count))
    return [items[start : start + size] for start in range(0, len(items), size)]


def _round_step(step: float) -> float:
    """Return the next of 1, 2, 5, 10 … times a power of ten."""
    unit = 10.0 ** math.floor(math.log10(step))
    return next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= step * (1 - 1e-9))
