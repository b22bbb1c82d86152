"""`rlsp-diagnose RUN`: replay one sequence of a run on both sides and name where they first differ."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlsp.cli.machine import machine_lines
from rlsp.cli.output import UNUSABLE, answer, complain
from rlsp.ending import Abort
from rlsp.report.diagnose_choice import Choice, RefusedError, choose
from rlsp.report.diagnose_records import (
    Answer,
    BoundaryResult,
    Diagnosis,
    FirstDifference,
    Outcome,
    Request,
    Side,
    State,
    answer_path,
    request_path,
)
from rlsp.report.files import EvidenceError
from rlsp.report.verdict import is_run_folder

_CRASHED = 1
_EXIT_STATUS = {Outcome.EQUAL: 0, Outcome.DIFFERENT: 3}
_ENTRY = "rlsp.rederive:diagnose_rank"
_STATES = {
    State.EQUAL: ("equal", "green"),
    State.FIRST: ("FIRST DIFFERENCE", "bold red"),
    State.AFTER: ("differs afterwards", "yellow"),
    State.UNSEEN: ("not seen", "dim"),
}
_EPILOG = """how:
  The run's ranks are started again in a scratch folder, with the run's own config. The weights of rollout I
  are made again, from the seed and by training on the recorded rollouts 0 to I-1, and must have the recorded
  digest. Training's forward pass and the engine's decode then compute the sequence once more, each in its own
  layout and with the sequences that stood beside it. The boundaries of the forward pass are compared in its
  order, element by element. The run folder is read and not changed.

exit status:
  0  equal, bit by bit
  1  crashed
  2  refused: usage, no run, no such sequence, no active token, no such device here; or the weights made again
     are not the run's; or the answer cannot be printed
  3  different: the first difference is named
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Diagnose the sequence that the command line names; return the exit status."""
    return answer("rlsp-diagnose", partial(_answer, arguments))


def _answer(arguments: Sequence[str] | None, console: Console) -> int:
    chosen = _parser().parse_args(arguments)
    try:
        if not chosen.run.is_dir() or not is_run_folder(chosen.run):
            raise RefusedError(f"{chosen.run} is no {'run ' if chosen.run.is_dir() else ''}folder")
        choice = choose(chosen.run.resolve(), chosen.rollout, chosen.sample)
        if lines := machine_lines(choice.job.config):
            raise RefusedError("; ".join(lines))
        diagnosis = _replayed(choice, chosen.run.resolve())
    except RefusedError as error:
        complain(f"rlsp-diagnose: refused: {error}")
        return UNUSABLE
    except _CrashError as error:
        complain(f"rlsp-diagnose: crashed: {error}")
        return _CRASHED
    if chosen.json:
        console.file.write(diagnosis.to_bytes().decode())
    else:
        _show(diagnosis, console)
    return _EXIT_STATUS[diagnosis.outcome]


class _CrashError(Exception):
    """The ranks did not answer; the message says which and why."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlsp-diagnose",
        description="Replay one sequence of a finished run on both sides, and name the first point of the "
        "forward pass at which training and rollout differ.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder: outputs/<name>/<run_id>")
    parser.add_argument(
        "--rollout", type=int, metavar="I", help="rollout, from 0 (default: the first that mismatches)"
    )
    parser.add_argument(
        "--sample", type=int, metavar="J", help="sequence, from 0 (default: the first that mismatches)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _replayed(choice: Choice, run_dir: Path) -> Diagnosis:
    """Let the ranks replay in a scratch folder, which stays only if they crash."""
    from rlsp.launch import compute

    scratch = Path(tempfile.mkdtemp(prefix="rlsp-diagnose-"))
    try:
        asked = Request(
            run_dir=str(run_dir), rollout=choice.rollout, sample=choice.sample, notes=choice.notes
        )
        asked.write(request_path(scratch))
        abort = compute(replace(choice.job, run_dir=str(scratch)), _ENTRY)
        if abort is not None:
            raise _CrashError(_crash(abort, scratch))
        said = Answer.read(answer_path(scratch))
    except (EvidenceError, OSError) as error:
        raise _CrashError(f"{error}; logs: {scratch}/logs") from error
    except KeyboardInterrupt:
        shutil.rmtree(scratch)
        raise
    shutil.rmtree(scratch)
    if said.diagnosis is None:
        raise RefusedError(str(said.refusal))
    return said.diagnosis


def _crash(abort: Abort, scratch: Path) -> str:
    return "\n  ".join([abort.reason, *abort.lines, f"logs: {scratch}/logs"])


def _show(diagnosis: Diagnosis, console: Console) -> None:
    _print(console, _place(diagnosis), f"weights {diagnosis.weights_digest[:16]}, {_proof(diagnosis)}")
    _print(console, *(f"note: {note}" for note in diagnosis.notes), style="yellow")
    table = Table(box=None, pad_edge=False)
    for header in ("boundary", "result", "elements differ", "positions differ", "first at"):
        table.add_column(header, overflow="fold")
    for result in diagnosis.boundaries:
        table.add_row(*_row(result))
    console.print(table)
    _print(console, *_record_lines(diagnosis))
    if diagnosis.first is not None:
        _show_first(console, diagnosis.first)
    elif any(result.state is State.UNSEEN for result in diagnosis.boundaries):
        _print(console, "equal, bit by bit, at every boundary that both sides show", style="bold green")
    else:
        _print(console, "equal, bit by bit, at every boundary", style="bold green")


def _show_first(console: Console, first: FirstDifference) -> None:
    name = _boundary(first.boundary, first.layer)
    _print(
        console,
        f"first difference: {name}, position {first.position}, element {first.element} ({first.dtype})",
        style="bold red",
    )
    _print(console, f"  training  {_side(first.train)}", f"  rollout   {_side(first.rollout)}")


def _place(diagnosis: Diagnosis) -> str:
    prompt = _count(diagnosis.prompt_tokens, "prompt token")
    drawn = _count(diagnosis.response_tokens, "drawn token")
    return f"{diagnosis.run_id}  rollout {diagnosis.rollout}, sample {diagnosis.sample}: {prompt}, {drawn}"


def _proof(diagnosis: Diagnosis) -> str:
    if diagnosis.updates == 0:
        return "drawn from the seed; the run recorded the same"
    return f"made again by {_count(diagnosis.updates, 'update')}; the run recorded the same"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _record_lines(diagnosis: Diagnosis) -> list[str]:
    """Say where the replay is not what the run recorded: the fault may not have come back."""
    recorded, tokens = diagnosis.recorded, diagnosis.recorded.tokens
    counts = (
        ("training's log-probs", recorded.train_logprob),
        ("training's rows", recorded.train_row),
        ("the rollout's log-probs", recorded.rollout_logprob),
        ("the rollout's rows", recorded.rollout_row),
        ("drawn tokens", recorded.drawn),
    )
    lines = [f"replayed otherwise than recorded: {what}, {n} of {tokens}" for what, n in counts if n]
    return lines or [f"both sides replayed as recorded, over {_count(tokens, 'token')}"]


def _row(result: BoundaryResult) -> tuple[str, Text, str, str, str]:
    state, style = _STATES[result.state]
    first = (
        "" if result.first is None else f"position {result.first.position}, element {result.first.element}"
    )
    return (
        _boundary(result.boundary, result.layer),
        Text(state, style=style),
        f"{result.differing_elements} of {result.elements}",
        f"{result.differing_positions} of {result.positions}",
        first,
    )


def _boundary(boundary: str, layer: int | None) -> str:
    return boundary if layer is None else f"layer {layer} {boundary}"


def _side(side: Side) -> str:
    ranks = ", ".join(map(str, side.ranks))
    return f"{side.bits} ({side.number!r})  on rank{'' if len(side.ranks) == 1 else 's'} {ranks}"


def _print(console: Console, *lines: str, style: str = "") -> None:
    for line in lines:
        console.print(Text(line, style=style), soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
