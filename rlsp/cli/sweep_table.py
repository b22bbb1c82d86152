"""The end of a sweep on the terminal: one table of its jobs, and whether those that must agree do."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlsp.layout import layout_word
from rlsp.report.files import canonical_json, sha256_bytes
from rlsp.report.sweep import SweepJob, SweepSummary

_STATUSES = {0: "green", 4: "yellow", None: "dim"}
_LEFT_OUT = {
    None: "not started",
    0: "incomplete",
    1: "crashed",
    2: "refused",
    3: "incomplete",
    4: "incomplete",
}
_LOG_WIDTH = 160
_SHORT = 8


def show(summary: SweepSummary) -> None:
    """Print a sweep's table and its sentences."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_LOG_WIDTH)
    names = (
        "job",
        "end",
        "swept",
        "layout",
        "rollout",
        "tokens",
        "mismatched",
        "weights",
        "norms",
        "optimizer",
    )
    table = Table(*names, box=None, pad_edge=False)
    common = set.intersection(*(set(job.overrides) for job in summary.jobs))
    for job in summary.jobs:
        table.add_row(*_row(job, common))
    console.print(table)
    for group in summary.groups:
        style = "bold green" if group.agrees else "bold red" if group.judged else "yellow"
        console.print(Text(group.sentence, style="" if len(group.jobs) == 1 else style), soft_wrap=True)
        if not group.agrees:
            odd = next(s for s in (group.weights, group.gradient_norms, group.optimizer) if len(s) > 1)
            folders = {job.number: job.folder for job in summary.jobs}
            pair = f"{folders[odd[0][0]]} {folders[odd[1][0]]}"
            console.print(f"in the sweep's folder, rlsp-compare {pair} names the first difference")
    if left := [f"job {job.number} ({_end(job)})" for job in summary.jobs if not job.complete]:
        console.print(f"left out: {', '.join(left)}", soft_wrap=True)


def _row(job: SweepJob, common: set[str]) -> tuple[str | Text, ...]:
    layout, rollout = job.layout, job.rollout_layout
    norms = job.gradient_norm_bits
    return (
        str(job.number),
        Text(_end(job), style=_STATUSES.get(job.status, "red")),
        Text(" ".join(text for text in job.overrides if text not in common)),
        layout_word(**layout) if layout else "",
        f"{rollout['engines']} × tp{rollout['tp']}" if rollout else "",
        _number(job.active_tokens),
        _number(job.mismatched_tokens),
        (job.weights_digest or "")[:_SHORT],
        sha256_bytes(canonical_json(norms))[:_SHORT] if norms else "",
        (job.optimizer_digest or "")[:_SHORT],
    )


def _end(job: SweepJob) -> str:
    """Say how a job ended: its verdict, or what its status means where it has none."""
    if job.status is None and job.folder is not None:
        return "goes on"
    return job.verdict.value if job.verdict is not None else _LEFT_OUT.get(job.status, str(job.status))


def _number(value: int | None) -> str:
    return "" if value is None else str(value)
