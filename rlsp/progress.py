"""What a person sees of a run: a live display on a terminal, plain lines elsewhere, and a summary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from rlsp.board import Slot
from rlsp.config import Job
from rlsp.report.metrics import STEP
from rlsp.report.records import TotalEvidence
from rlsp.report.verdict import Judgement

_COLOURS = {"PASS": "bold green", "FAIL": "bold red", "ABORTED": "bold red", "INCONCLUSIVE": "bold yellow"}
UNSHOWN = (OSError, ValueError, SystemExit)
"""What printing raises where nobody reads: errors of the stream, its encoding or its end; rich's own exit."""

_SHOWN = (
    ("reward/mean", "reward"),
    ("train/loss", "loss"),
    ("train/gradient_norm", "gradient norm"),
    ("time/total_s", "seconds"),
)


class Display:
    """Show nothing: `launch.progress=false`."""

    def row(self, row: Mapping[str, Any]) -> None:
        """Show a row of metrics.jsonl."""

    def line(self, text: str) -> None:
        """Show a line of text."""

    def tick(self, slots: Sequence[Slot]) -> None:
        """Show what the ranks are at."""


class LineDisplay(Display):
    """Print one line a rollout."""

    def __init__(self, console: Console, num_rollouts: int) -> None:
        self._console = console
        self._num_rollouts = num_rollouts

    def row(self, row: Mapping[str, Any]) -> None:
        """Print a row of metrics.jsonl."""
        self.line(row_text(row, self._num_rollouts))

    def line(self, text: str) -> None:
        """Print a line of text."""
        self._console.print(Text(text), soft_wrap=True)


class LiveDisplay(Display):
    """Keep a progress bar with the phase below one line a rollout; it is drawn at every tick."""

    def __init__(self, progress: Progress, num_rollouts: int) -> None:
        self._progress = progress
        self._lines = LineDisplay(progress.console, num_rollouts)
        self._task = progress.add_task("starting", total=num_rollouts)

    def row(self, row: Mapping[str, Any]) -> None:
        """Print a row of metrics.jsonl and count the rollout."""
        self._lines.row(row)
        self._progress.update(self._task, completed=int(row[STEP]) + 1)

    def line(self, text: str) -> None:
        """Print a line of text above the bar."""
        self._lines.line(text)

    def tick(self, slots: Sequence[Slot]) -> None:
        """Show what rank 0 is at."""
        self._progress.update(self._task, description=slots[0].phase or "starting")
        self._progress.refresh()


class SteadyDisplay(Display):
    """Show through another display until that fails, as on a closed pipe; a run goes on without."""

    def __init__(self, display: Display) -> None:
        self._display = display

    def row(self, row: Mapping[str, Any]) -> None:
        """Show a row of metrics.jsonl."""
        with self._silenced():
            self._display.row(row)

    def line(self, text: str) -> None:
        """Show a line of text."""
        with self._silenced():
            self._display.line(text)

    def tick(self, slots: Sequence[Slot]) -> None:
        """Show what the ranks are at."""
        with self._silenced():
            self._display.tick(slots)

    @contextmanager
    def _silenced(self) -> Iterator[None]:
        try:
            yield
        except UNSHOWN:
            self._display = Display()


@contextmanager
def open_display(job: Job, console: Console) -> Iterator[Display]:
    """Open the display that fits the console and the config; no failure of a stream comes out of it."""
    with ExitStack() as opened:
        try:
            display = opened.enter_context(_fitting(job, console))
        except UNSHOWN:
            display = Display()
        yield SteadyDisplay(display)
        with suppress(*UNSHOWN):
            opened.close()


def show(console: Console, text: Text) -> None:
    """Print a text, where somebody still reads."""
    with suppress(*UNSHOWN):
        console.print(text, soft_wrap=True)


@contextmanager
def _fitting(job: Job, console: Console) -> Iterator[Display]:
    if not job.config.launch.progress:
        yield Display()
    elif not console.is_terminal:
        yield LineDisplay(console, job.config.num_rollouts)
    else:
        phase = TextColumn("{task.description}", markup=False)
        columns = (SpinnerColumn(), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), phase)
        with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
            yield LiveDisplay(progress, job.config.num_rollouts)


def row_text(row: Mapping[str, Any], num_rollouts: int) -> str:
    """Write a row of metrics.jsonl in one line for people; rollouts count from 1."""
    return f"rollout {int(row[STEP]) + 1}/{num_rollouts}: {figures_text(row)}"


def figures_text(row: Mapping[str, Any]) -> str:
    """Write the figures of a row that one watches."""
    parts = []
    if "consistency/mismatched_tokens" in row:
        parts.append(
            f"{row['consistency/mismatched_tokens']} of {row['consistency/active_tokens']} tokens mismatched"
        )
    parts += [f"{label} {_number(row[name])}" for name, label in _SHOWN if name in row]
    return ", ".join(parts)


def summary(job: Job, judgement: Judgement, total: TotalEvidence | None, details: Sequence[str]) -> Text:
    """Write the block that ends a run.

    Args:
        job: The run.
        judgement: Its verdict.
        total: The totals of its consistency report, if any rollout was recorded.
        details: More lines on why it was aborted.
    """
    verdict = judgement.verdict.value
    text = Text.assemble((verdict, _COLOURS[verdict]), f"  {job.config.name}  {job.run_id}\n")
    # What an aborted run lacks follows from its abort; VERDICT.json lists it.
    lines = [*judgement.reasons[:1], *details] if details else [*judgement.reasons]
    if total is None:
        lines.append("no rollout was recorded")
    else:
        lines.append(
            f"{total.rollouts} of {job.config.num_rollouts} rollouts: {total.active_tokens} active tokens, "
            f"{total.mismatched_tokens} mismatched; {total.mismatched_rows} rows mismatched"
        )
    lines.append(f"folder: {_short(Path(job.run_dir))}")
    text.append("\n".join(f"  {line}" for line in lines))
    return text


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _short(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
