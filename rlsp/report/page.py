"""The page of a run, report.html: its verdict first, then what the verdict rests on. One file, no script."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from xml.etree.ElementTree import Element

from rlsp.layout import layout_word
from rlsp.report.evidence import RunEvidence
from rlsp.report.files import EvidenceError, write_atomically
from rlsp.report.findings import GateResult, Verdict
from rlsp.report.page_charts import charts
from rlsp.report.page_elements import NOTHING, Content, document, listing, node, section, table
from rlsp.report.page_layout import layout
from rlsp.report.page_manifest import digests, elapsed, provenance
from rlsp.report.page_source import Source, read_source

PAGE_NAME = "report.html"

_LOG = logging.getLogger(__name__)
_SHOWN_FAULTS = 50
_MEANING: Mapping[Verdict, str] = {
    Verdict.PASS: "Every judged gate passed.",
    Verdict.FAIL: "A gate failed.",
    Verdict.INCONCLUSIVE: "No gate failed, and the run does not prove what it must.",
    Verdict.ABORTED: "The run ended early. What it left is shown as far as it goes.",
}
_SIGN: Mapping[Verdict, str] = {
    Verdict.PASS: "✓",
    Verdict.FAIL: "✗",
    Verdict.INCONCLUSIVE: "?",
    Verdict.ABORTED: "■",
}


def write_page(
    run_dir: Path,
    run: RunEvidence,
    verdict: Verdict,
    reasons: tuple[str, ...],
    gates: tuple[GateResult, ...],
) -> None:
    """Write report.html into a run folder, before its files are hashed; the verdict never waits for it.

    A page that cannot be drawn is replaced by one that says why, one that cannot be written is logged and
    left away: the files that it shows are the evidence.

    Args:
        run_dir: The run folder.
        run: What was judged.
        verdict: The verdict that will be sealed.
        reasons: Its reasons.
        gates: Every gate's answer.
    """
    path = run_dir / PAGE_NAME
    try:
        content = render(read_source(run_dir, run, verdict, reasons, gates))
    except Exception as error:
        _LOG.warning("%s could not be drawn: %s: %s", PAGE_NAME, type(error).__name__, error, exc_info=True)
        content = _apology(verdict, error)
    try:
        write_atomically(path, content)
    except EvidenceError as error:
        _LOG.warning("%s is missing: %s", PAGE_NAME, error)
        with suppress(OSError):
            path.unlink()  # an earlier launch's page would show another verdict


def render(source: Source) -> bytes:
    """Draw the page; the same evidence gives the same bytes."""
    parts: list[Content] = [
        _part("gates", "Gates", _gates, source),
        _part("damage", "Damaged, missing or contradictory", _damage, source) if _faults(source) else None,
        _part("ranks", "How the ranks ended", _ranks, source) if source.ranks else None,
        _part("charts", "Rollouts", charts, source),
        _part("layout", "Layout", layout, source),
        _part("routes", "Operator routes", _routes, source),
        _part("provenance", "What ran", provenance, source),
        _part("digests", "Digests", digests, source),
    ]
    title = f"{source.verdict.value} · {source.name} · {source.run_id}"
    end = node(
        "footer",
        "Drawn from this folder's files as the run was sealed. VERDICT.json has the SHA-256 of every file, "
        "this page among them; rlsp-verify measures and judges all of it again.",
    )
    return document(title, _head(source), node("main", *parts), end)


def _part(name: str, title: str, draw: Callable[[Source], Content], source: Source) -> Element:
    """Draw one section; damaged evidence that breaks it must not take the others along."""
    try:
        return section(name, title, draw(source))
    except Exception as error:
        _LOG.warning("%s, %s: could not be drawn", PAGE_NAME, title, exc_info=True)
        return section(name, title, node("p", _failure("This section", error), class_="warning"))


def _head(source: Source) -> Element:
    verdict = source.verdict
    badge = node("span", f"{_SIGN[verdict]} {verdict.value}", class_=f"badge {verdict.value.lower()}")
    reasons = listing(source.reasons) if source.reasons else None
    return node(
        "header",
        node("h1", badge, node("span", f" {source.name}", class_="name")),
        node("p", "run ", node("code", source.run_id), class_="id"),
        node("p", _MEANING[verdict], _aside(source), class_="meaning"),
        node("p", _compared(source)),
        reasons,
        _summary(source),
        class_=verdict.value.lower(),
    )


def _aside(source: Source) -> str | None:
    """Name the gates that the verdict does not speak of, so that it claims nothing for them."""
    names = [gate.name for gate in source.gates if not gate.judged]
    return f" Reported without being judged: {', '.join(names)}." if names else None


def _compared(source: Source) -> str:
    """Say what was compared, as measured again from the tensors."""
    found = [one for _, one in source.run.compared()]
    if not found:
        return "No token of a rollout could be compared with training."
    said = (
        f"{sum(one.active_tokens for one in found)} tokens compared between rollout and training: "
        f"{sum(one.mismatched_tokens for one in found)} log-probabilities"
    )
    if not all(one.rows_fed for one in found):
        return f"{said} differ in a bit; the rows of logits of one side were not recorded."
    return f"{said} and {sum(one.mismatched_rows for one in found)} rows of logits differ in a bit."


def _summary(source: Source) -> Element:
    """Put the figures that one looks for first side by side."""
    run, manifest = source.run, source.run.manifest
    compared = [one for _, one in run.compared()]
    planned = f" of {run.planned.num_rollouts}" if run.planned else ""
    figures: dict[str, str] = {"rollouts": f"{len(run.measured)}{planned}"}
    figures["active tokens"] = str(sum(one.active_tokens for one in run.measured.values()))
    if compared:
        figures["mismatched tokens"] = str(sum(one.mismatched_tokens for one in compared))
        if all(one.rows_fed for one in compared):
            figures["mismatched rows"] = str(sum(one.mismatched_rows for one in compared))
    if manifest is not None:
        at = manifest.layout
        figures["layout"] = layout_word(cp=at.cp, tp=at.tp, sp=at.sp, dp=at.dp)
        figures["time"] = elapsed(manifest)
    pairs = (node("div", node("dt", name), node("dd", value)) for name, value in figures.items())
    return node("dl", *pairs, class_="summary")


def _gates(source: Source) -> Element:
    rows = [
        [
            gate.name,
            node("span", f"{_SIGN[gate.verdict]} {gate.verdict.value}", class_=gate.verdict.value.lower()),
            "judged" if gate.judged else "reported only",
            listing(gate.reasons) if gate.reasons else NOTHING,
        ]
        for gate in source.gates
    ]
    head = ("gate", "answer", "counts", "reasons")
    return table("What each gate answered; the worst judged answer counts", head, rows, kind="gates")


def _ranks(source: Source) -> Element:
    return node("pre", node("code", source.ranks), tabindex=0, class_="wide")


def _faults(source: Source) -> tuple[str, ...]:
    # What the page could not read the gates could not either, and have said so.
    notes = tuple(note for note in source.notes if note not in source.run.faults)
    return (*source.run.faults, *notes, *(f"{path} belongs to no rollout" for path in source.run.strays))


def _damage(source: Source) -> Element:
    faults = _faults(source)
    rest = len(faults) - _SHOWN_FAULTS
    return listing([*faults[:_SHOWN_FAULTS], *([f"and {rest} more"] if rest > 0 else [])])


def _routes(source: Source) -> Element:
    """Count the calls of each operator over all rollouts."""
    declared: dict[str, set[str]] = {}
    calls: dict[str, dict[str, int]] = {}
    for _, record in sorted(source.run.records.items()):
        for operator, route in record.declared_routes.items():
            declared.setdefault(operator, set()).add(route)
        for operator, counted in record.routes.items():
            for route, count in counted.items():
                routes = calls.setdefault(operator, {})
                routes[route] = routes.get(route, 0) + count
    if not declared and not calls:
        return node("p", "No calls were recorded.", class_="none")
    rows = []
    for operator in sorted(declared.keys() | calls.keys()):
        wanted, made = declared.get(operator, set()), calls.get(operator, {})
        astray = {route: count for route, count in made.items() if route not in wanted and count}
        rows.append(
            [
                operator,
                ", ".join(sorted(wanted)) or "not declared",
                str(sum(made.get(route, 0) for route in wanted)),
                ", ".join(f"{route}: {count}" for route, count in sorted(astray.items())) or "none",
            ]
        )
    head = ("operator", "declared route", "calls by that route", "other calls")
    return table("Calls of each operator, all rollouts together", head, rows)


def _apology(verdict: Verdict, error: Exception) -> bytes:
    badge = node("span", f"{_SIGN[verdict]} {verdict.value}", class_=f"badge {verdict.value.lower()}")
    said = node("p", _failure("This page", error), class_="warning")
    where = node("p", "The evidence is not affected: VERDICT.json has the gates and their reasons.")
    return document(verdict.value, node("main", node("h1", badge), said, where))


def _failure(what: str, error: Exception) -> str:
    return f"{what} could not be drawn: {type(error).__name__}: {error}"
