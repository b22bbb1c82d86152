"""`rlsp-compare RUN_A RUN_B`: compare two runs bit by bit and name the first difference."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlsp.cli.output import UNUSABLE, answer, complain
from rlsp.layout import layout_word
from rlsp.report.compare import compare
from rlsp.report.compare_records import Comparison, Difference, Outcome, RunFacts, Side, StageResult, State
from rlsp.report.verdict import is_run_folder

_EXIT_STATUS = {Outcome.EQUAL: 0, Outcome.DIFFERENT: 3, Outcome.NOT_COMPARABLE: 4}
_STATES = {
    State.EQUAL: ("equal", "green"),
    State.FIRST: ("FIRST DIFFERENCE", "bold red"),
    State.AFTER: ("differs afterwards", "yellow"),
    State.EMPTY: ("nothing to compare", "dim"),
}
_SHOWN_RANKS = 16
_EPILOG = """order:
  initial weights; then in each rollout tokens, rollout log-prob, rollout row, train log-prob, train row,
  rewards, advantages; then in each update loss, gradients, gradient norm, optimizer state, weights.
  Weights and optimizer state go in forward order (embedding, layers, head), gradients in backward order
  (head, layers, embedding), so that the tensor named is the one beside the fault. Samples go by index, tokens
  by position.

exit status:
  0  equal, bit by bit
  2  no run folder there, or the answer cannot be printed
  3  different
  4  not comparable: other contract, data, seeds or configuration, or damaged evidence
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the runs that the command line names; return the exit status."""
    return answer("rlsp-compare", partial(_answer, arguments))


def _answer(arguments: Sequence[str] | None, console: Console) -> int:
    parser = argparse.ArgumentParser(
        prog="rlsp-compare",
        description="Compare two runs bit by bit from their files alone, in the order in which things "
        "happen, and name the first difference with both values, its coordinates and the ranks that own it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name in ("run_a", "run_b"):
        parser.add_argument(name, type=Path, metavar=name.upper(), help="a run folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = parser.parse_args(arguments)
    wrong = [run for run in (chosen.run_a, chosen.run_b) if not run.is_dir() or not is_run_folder(run)]
    for run in wrong:
        complain(f"rlsp-compare: {run} is no {'run ' if run.is_dir() else ''}folder")
    if wrong:
        return UNUSABLE
    comparison = compare(chosen.run_a, chosen.run_b)
    if chosen.json:
        console.file.write(comparison.to_bytes().decode())
    else:
        _show(comparison, console)
    return _EXIT_STATUS[comparison.outcome]


def _show(comparison: Comparison, console: Console) -> None:
    _print(console, *(f"{side}  {_run_text(run)}" for side, run in zip("AB", comparison.runs, strict=False)))
    _print(console, *(f"note: {note}" for note in comparison.notes), style="dim")
    if comparison.outcome is Outcome.NOT_COMPARABLE:
        _print(console, "not comparable:", style="bold red")
        _print(console, *(f"  {refusal}" for refusal in comparison.refusals), style="red")
        return
    table = Table(box=None, pad_edge=False)
    for header in ("stage", "result", "differ", "first at"):
        table.add_column(header, overflow="fold")
    for stage in comparison.stages:
        table.add_row(*_row(stage))
    console.print(table)
    if comparison.first is None:
        _print(console, f"equal, bit by bit, over {_rollouts(comparison.rollouts)}", style="bold green")
    else:
        _show_first(console, comparison.first, comparison.runs)


def _show_first(console: Console, first: Difference, runs: Sequence[RunFacts]) -> None:
    _print(console, f"first difference: {first.stage.value}, {place_text(first)}", style="bold red")
    sides = zip("AB", runs, (first.a, first.b), strict=True)
    _print(console, *(f"  {side}  {_side_text(value)}  of {layout_text(run)}" for side, run, value in sides))
    if first.explanation:
        _print(console, f"  {first.explanation}")


def _print(console: Console, *lines: str, style: str = "") -> None:
    for line in lines:
        console.print(Text(line, style=style), soft_wrap=True)


def place_text(difference: Difference) -> str:
    """Write the coordinates of a difference for people."""
    parts = [
        f"{label} {value}"
        for label, value in (
            ("rollout", difference.rollout),
            ("update", difference.update),
            ("sample", difference.sample),
            ("position", difference.position),
        )
        if value is not None
    ]
    if difference.tensor is not None and (difference.sample is None or difference.tensor == "active_mask"):
        parts.append(difference.tensor)
    if difference.virtual_shard is not None:
        parts.append(f"virtual shard {difference.virtual_shard}")
    return ", ".join(parts) or "all tensors"


def layout_text(run: RunFacts) -> str:
    """Write a run's layouts for people."""
    axes = layout_word(**run.layout)
    rollout = run.rollout_layout
    return f"{axes}, rollout {rollout['engines']} × tp{rollout['tp']}, micro-batch {run.micro_batch_size}"


def _run_text(run: RunFacts) -> str:
    return f"{run.run_id}  {layout_text(run)}  {_rollouts(run.rollouts)}  {run.verdict}"


def _rollouts(count: int) -> str:
    return f"{count} rollout{'' if count == 1 else 's'}"


def _row(stage: StageResult) -> tuple[str, Text, str, str]:
    state, style = _STATES[stage.state]
    place = place_text(stage.first) if stage.first else ""
    counts = f"{stage.differing} of {stage.compared} {stage.unit}"
    return stage.stage.value, Text(state, style=style), counts, place


def _side_text(side: Side) -> str:
    number = "" if side.number is None else f" ({side.number!r})"
    ranks = ", ".join(map(str, side.ranks[:_SHOWN_RANKS])) + (" …" if len(side.ranks) > _SHOWN_RANKS else "")
    return f"{side.bits}{number}  on rank{'' if len(side.ranks) == 1 else 's'} {ranks or 'none'}"


if __name__ == "__main__":
    sys.exit(main())
