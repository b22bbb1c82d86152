"""The folder of a published suite: a table in Markdown and JSON, and figures as self-contained SVG."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree.ElementTree import tostring

from rlsp.report.files import EvidenceError, json_safe, write_atomically
from rlsp.report.page_elements import style
from rlsp.report.page_plot import HEIGHT, WIDTH, Series, lines
from rlsp.report.suite import circumstances, identity, plain, sentences, table
from rlsp.report.suite_arms import Arm
from rlsp.report.suite_pairs import Pair

_STYLES = 4  # as many lines as a plot tells apart
_SMOOTHED_ABOVE = 20  # rollouts; a shorter line is shown as it is


@dataclass(frozen=True)
class Suite:
    """What is published.

    Attributes:
        title: The page's heading.
        arms: The arms, in order.
        pairs: Those of them that are compared with each other.
        left_out: Jobs of the sweeps that have no run to show, one line each.
    """

    title: str
    arms: tuple[Arm, ...]
    pairs: tuple[Pair, ...]
    left_out: tuple[str, ...]


def write_suite(folder: Path, suite: Suite) -> tuple[str, ...]:
    """Write README.md, table.json and the figures into `folder`, and return their names.

    Raises:
        EvidenceError: The folder or a file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EvidenceError(f"cannot write {folder}: {error.strerror or error}") from error
    figures = _figures(suite.arms)
    data = {**plain(suite.arms, suite.pairs), "left_out": list(suite.left_out)}
    files = {
        "README.md": _readme(suite, figures).encode(errors="backslashreplace"),
        "table.json": json.dumps(json_safe(data), indent=2, sort_keys=True).encode() + b"\n",
        **{name: drawn for name, (_, drawn) in figures.items()},
    }
    for name, content in files.items():
        write_atomically(folder / name, content)
    return tuple(files)


def _readme(suite: Suite, figures: dict[str, tuple[str, bytes]]) -> str:
    arms = suite.arms
    commands = dict.fromkeys(arm.command for arm in arms)
    return "\n".join(
        [
            f"# {suite.title}",
            "",
            "Made by `rlsp-publish` from the runs' own sealed files, each verified first "
            f"(runs {identity(arms)}). The commands:",
            "",
            *(f"    {command}" for command in commands),
            "",
            table(arms),
            *(f"- {sentence}" for sentence in sentences(arms, suite.pairs)),
            *(f"- Left out: {line}." for line in suite.left_out),
            "",
            "What ran, and where:",
            "",
            *(f"- {sentence}" for sentence in circumstances(arms)),
            "",
            *(f"![{caption}]({name})\n\n{caption}\n" for name, (caption, _) in figures.items()),
        ]
    )


def _figures(arms: Sequence[Arm]) -> dict[str, tuple[str, bytes]]:
    """Draw the long arms, at most four: differences, learning, seconds; by file name, with a caption."""
    longest = max(arm.rollouts for arm in arms)
    shown = [arm for arm in arms if arm.rollouts == longest][:_STYLES]
    found = {}
    for name, metric, unit, what, noisy in (
        (
            "mismatched",
            "consistency/mismatched_tokens",
            "tokens",
            "tokens whose log-probabilities differ",
            False,
        ),
        ("max_abs", "consistency/max_abs", "nats", "largest difference of two log-probabilities", False),
        ("reward", "reward/mean", "reward", "mean reward", True),
        ("entropy", "train/entropy", "nats", "mean entropy of a token", True),
        ("length", "rollout/response_length_mean", "tokens", "mean response length", True),
        ("truncated", "rollout/truncated_fraction", "part", "responses that were cut off", True),
        ("seconds", "time/total_s", "seconds", "seconds a rollout with its update", True),
    ):
        series, how = [arm.series(metric) for arm in shown], ""
        if not any(one.points for one in series):
            continue  # a run of an earlier version
        if noisy and longest > _SMOOTHED_ABOVE:
            series, how = [_smooth(one) for one in series], ", means of ten rollouts"
        caption = f"{what[0].upper()}{what[1:]}{how}: {', '.join(arm.name for arm in shown)}"
        found[f"{name}.svg"] = (caption, _svg(series, unit, caption))
    return found


def _smooth(line: Series) -> Series:
    """Replace every ten rollouts by their mean, at the last of them."""
    cut = [line.points[start : start + 10] for start in range(0, len(line.points), 10)]
    return Series(line.label, tuple((part[-1][0], sum(v for _, v in part) / len(part)) for part in cut))


def _svg(series: Sequence[Series], unit: str, caption: str) -> bytes:
    """Draw one figure as a file of its own, legend included, light and dark."""
    image = lines(series, unit, caption, from_zero=unit != "reward", logarithmic=False)
    image.set("xmlns", "http://www.w3.org/2000/svg")
    image.set("viewBox", f"0 0 {WIDTH} {HEIGHT + 18}")
    image.set("width", str(2 * WIDTH))
    sheet = image.makeelement("style", {})
    sheet.text = style() + "\nsvg { background: var(--back); }"
    image.insert(0, sheet)
    for number, line in enumerate(series):
        x = 54 + 74 * number
        sample = {"d": f"M{x} {HEIGHT + 8}H{x + 20}", "class": f"line s{number}"}
        image.append(image.makeelement("path", sample))
        label = image.makeelement("text", {"x": str(x + 26), "y": str(HEIGHT + 12), "class": "tick"})
        label.text = line.label
        image.append(label)
    drawn: bytes = tostring(image, encoding="utf-8")
    return drawn + b"\n"
