"""`rlsp-verify RUN`: judge a run or a sweep again from its files alone, and notice whether any changed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlsp.cli.output import UNUSABLE, answer, complain
from rlsp.report.files import json_safe
from rlsp.report.findings import Verdict
from rlsp.report.verdict import Verification, is_run_folder, verify
from rlsp.report.verify_sweep import JobVerification, SweepVerification, is_sweep_folder, verify_sweep

_STYLES = {Verdict.PASS: "green", Verdict.FAIL: "red", Verdict.INCONCLUSIVE: "yellow", Verdict.ABORTED: "red"}
_ENDS = {0: "PASS", 1: "ABORTED", 2: "refused", 3: "FAIL", 4: "INCONCLUSIVE"}
_END_STYLES = {0: "green", 4: "yellow"}
_EPILOG = """exit status:
  0  PASS
  1  the run was aborted
  2  no run folder there, or the answer cannot be printed
  3  a gate failed, or the evidence is damaged
  4  INCONCLUSIVE
of a sweep: 3 where anything is damaged, else the worst of its jobs, in the order 1, 2, 3, 4, 0
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Verify the run or the sweep that the command line names; return the exit status."""
    return answer("rlsp-verify", partial(_answer, arguments))


def _answer(arguments: Sequence[str] | None, console: Console) -> int:
    parser = argparse.ArgumentParser(
        prog="rlsp-verify",
        description="Hash a run's files, measure its consistency again, and judge it from its files alone. "
        "Of a sweep's folder every job is verified, and sweep.json against the jobs' own files.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="a run folder, outputs/<name>/<run_id>, or a sweep's"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = parser.parse_args(arguments)
    plain: dict[str, Any]
    if chosen.run.is_dir() and is_run_folder(chosen.run):
        run = verify(chosen.run)
        plain, show, status = _plain(run), partial(_show, run), run.exit_status
    elif chosen.run.is_dir() and is_sweep_folder(chosen.run):
        sweep = verify_sweep(chosen.run)
        name = chosen.run.resolve().name
        plain, status = _plain_sweep(sweep), sweep.exit_status
        show = partial(_show_sweep, sweep, name)
    else:
        what = "is no run folder" if chosen.run.is_dir() else "is no folder"
        complain(f"rlsp-verify: {chosen.run} {what}")
        return UNUSABLE
    if chosen.json:
        console.file.write(json.dumps(json_safe(plain), indent=2, allow_nan=False) + "\n")
    else:
        show(console)
    return status


def _plain(verification: Verification) -> dict[str, Any]:
    stored, judgement = verification.stored, verification.judgement
    return {
        "run_id": stored.run_id if stored else None,
        "stored_verdict": stored.verdict.value if stored else None,
        "verdict": judgement.verdict.value,
        "damage": list(verification.damage),
        "notes": list(verification.notes),
        "reasons": list(judgement.reasons),
        "gates": [gate.model_dump(mode="json") for gate in judgement.gates],
        "artifacts": len(stored.artifacts) if stored else 0,
        "exit_status": verification.exit_status,
    }


def _plain_sweep(sweep: SweepVerification) -> dict[str, Any]:
    return {
        "jobs": [
            {
                "number": job.number,
                "folder": job.folder,
                "recorded_status": job.recorded_status,
                "run": _plain(job.verification) if job.verification else None,
                "exit_status": job.exit_status,
            }
            for job in sweep.jobs
        ],
        "groups": list(sweep.sentences),
        "disagrees": sweep.disagrees,
        "damage": list(sweep.damage),
        "notes": list(sweep.notes),
        "exit_status": sweep.exit_status,
    }


def _show(verification: Verification, console: Console) -> None:
    table = Table("gate", "verdict", "why", box=None, pad_edge=False)
    for gate in verification.judgement.gates:
        word = gate.verdict.value if gate.judged else f"({gate.verdict.value})"
        style = _STYLES[gate.verdict] if gate.judged else "dim"
        table.add_row(gate.name, Text(word, style=style), Text("\n".join(gate.reasons)))
    console.print(table)
    if any(not gate.judged for gate in verification.judgement.gates):
        note = "(…) is reported and not judged: the arithmetic or the engine may differ"
        console.print(Text(note, style="dim"), soft_wrap=True)
    _lines(console, (f"note: {line}" for line in verification.notes), "dim")
    _lines(console, (f"damaged: {line}" for line in verification.damage), "red")
    stored, verdict = verification.stored, verification.judgement.verdict
    if stored and not verification.damage:
        _lines(console, [f"{len(stored.artifacts)} files are as they were sealed"])
    final = "DAMAGED" if verification.damage else verdict.value
    style = "red" if verification.damage else _STYLES[verdict]
    _lines(console, [f"{stored.run_id if stored else 'run'}: {final}"], style)


def _show_sweep(sweep: SweepVerification, name: str, console: Console) -> None:
    table = Table("job", "folder", "run", "verdict", "why", box=None, pad_edge=False)
    for job in sweep.jobs:
        table.add_row(*_job_row(job))
    console.print(table)
    _lines(console, sweep.sentences, "red" if sweep.disagrees else "")
    _lines(console, (f"note: {line}" for line in sweep.notes), "dim")
    _lines(console, (f"damaged: {line}" for line in sweep.damage), "red")
    status = sweep.exit_status
    word = "DAMAGED" if sweep.is_damaged else _ENDS[status]
    _lines(console, [f"{name}, {len(sweep.jobs)} jobs: {word}"], _END_STYLES.get(status, "red"))


def _job_row(job: JobVerification) -> tuple[str | Text, ...]:
    number = "not listed" if job.number is None else str(job.number)
    if job.verification is None:
        return number, job.folder or "", "", Text(_ENDS.get(job.exit_status, str(job.exit_status))), ""
    stored, damage, status = job.verification.stored, job.verification.damage, job.exit_status
    word = "DAMAGED" if damage else _ENDS[status]
    why = damage or job.verification.judgement.reasons
    return (
        number,
        job.folder or "",
        stored.run_id if stored else "",
        Text(word, style="red" if damage else _END_STYLES.get(status, "red")),
        Text("\n".join(why)),
    )


def _lines(console: Console, lines: Iterable[str], style: str = "") -> None:
    for line in lines:
        console.print(Text(line, style=style), soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
