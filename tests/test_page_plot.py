from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree.ElementTree import tostring

from hypothesis import given
from hypothesis import strategies as st

from rlsp.report import page
from rlsp.report.page_elements import table
from rlsp.report.page_plot import Series, bars, lines, rollout_axis, value_axis

STYLE = Path(page.__file__).with_name("page.css")

# Plots ------------------------------------------------------------------------

finite = st.floats(-1e300, 1e300)


@given(st.lists(finite, max_size=8), st.booleans(), st.booleans())
def test_an_axis_holds_its_values_between_a_few_round_ticks(values, from_zero, logarithmic):
    axis = value_axis(values, from_zero=from_zero, logarithmic=logarithmic)
    assert axis.low < axis.high
    assert 2 <= len(axis.ticks) <= 12
    assert all(-1e-6 <= axis.part(value) <= 1 + 1e-6 for value in values)
    labels = axis.labels()
    assert len(set(labels)) == len(labels)


@given(st.lists(st.integers(0, 10**9), max_size=8))
def test_a_rollout_axis_has_whole_ticks_inside(rollouts):
    axis = rollout_axis(rollouts)
    assert len(axis.ticks) <= 12
    assert all(tick == int(tick) and axis.low < tick < axis.high for tick in axis.ticks)


@given(st.lists(st.floats(), min_size=1, max_size=6))
def test_whatever_the_values_a_plot_can_be_drawn(values):
    series = [Series("a", tuple(enumerate(values))), Series("b", ((3, 1.0),))]
    for made in (
        lines(series, "unit", "label", from_zero=False, logarithmic=True),
        bars(series, "unit", "label"),
    ):
        assert not re.search(r'(?:d|x|y|cx|cy)="[^"]*(?:nan|inf)', tostring(made, encoding="unicode"))


def test_many_rollouts_are_thinned_without_losing_a_spike():
    points = tuple((rollout, 1000.0 if rollout == 3333 else 1.0) for rollout in range(10_000))
    made = tostring(
        lines([Series("a", points)], "u", "l", from_zero=True, logarithmic=False), encoding="unicode"
    )
    assert len(made) < 20_000
    highest = min(float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", made))
    assert highest == 24.0
    assert len(tostring(bars([Series("a", points)], "u", "l"))) < 20_000


# Looks ------------------------------------------------------------------------


def _themes() -> Iterator[dict[str, str]]:
    light, dark = re.findall(r":root \{(.*?)\}", STYLE.read_text(), re.DOTALL)
    colours = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", theme)) for theme in (light, dark)]
    assert colours[0].keys() == colours[1].keys()
    yield from colours


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_text_and_lines_stand_out_in_both_themes():
    for theme in _themes():
        for name, colour in theme.items():
            wanted = 3.0 if re.fullmatch(r"s\d", name) else 4.5
            if name not in ("back", "card", "rule", "on"):
                assert min(_contrast(colour, theme[back]) for back in ("back", "card")) >= wanted, name
        for verdict in ("pass", "fail", "inconclusive", "aborted", "s0"):
            assert _contrast(theme["on"], theme[verdict]) >= 4.5, verdict


def test_a_table_scrolls_by_keyboard_and_has_row_headings():
    made = tostring(table("what", ("a", "b"), [("x", "1")]), encoding="unicode", method="html")
    assert made.startswith('<div class="scroll" role="region" aria-label="what" tabindex="0"><table>')
    assert '<th scope="row">x</th><td>1</td>' in made
