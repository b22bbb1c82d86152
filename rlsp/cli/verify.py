"""`rlsp-verify RUN`: judge a run again from its files alone, and notice whether any of them changed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlsp.report.files import json_safe
from rlsp.report.findings import Verdict
from rlsp.report.verdict import Verification, is_run_folder, verify

_STYLES = {Verdict.PASS: "green", Verdict.FAIL: "red", Verdict.INCONCLUSIVE: "yellow", Verdict.ABORTED: "red"}
_USAGE = 2
_EPILOG = """exit status:
  0  PASS
  1  the run was aborted
  2  no run folder there
  3  a gate failed, or the evidence is damaged
  4  INCONCLUSIVE
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Verify the run that the command line names; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="rlsp-verify",
        description="Hash a run's files, measure its consistency again, and judge it from its files alone.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder: outputs/<name>/<run_id>")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = parser.parse_args(arguments)
    if not chosen.run.is_dir() or not is_run_folder(chosen.run):
        what = "is no run folder" if chosen.run.is_dir() else "is no folder"
        print(f"rlsp-verify: {chosen.run} {what}", file=sys.stderr)
        return _USAGE
    verification = verify(chosen.run)
    if chosen.json:
        print(json.dumps(json_safe(_plain(verification)), indent=2, allow_nan=False))
    else:
        _show(verification)
    return verification.exit_status


def _plain(verification: Verification) -> dict[str, Any]:
    stored, judgement = verification.stored, verification.judgement
    return {
        "run_id": stored.run_id if stored else None,
        "stored_verdict": stored.verdict.value if stored else None,
        "verdict": judgement.verdict.value,
        "damage": list(verification.damage),
        "reasons": list(judgement.reasons),
        "gates": [gate.model_dump(mode="json") for gate in judgement.gates],
        "artifacts": len(stored.artifacts) if stored else 0,
        "exit_status": verification.exit_status,
    }


def _show(verification: Verification) -> None:
    console = Console()
    table = Table("gate", "verdict", "why", box=None, pad_edge=False)
    for gate in verification.judgement.gates:
        answer = gate.verdict.value if gate.judged else f"({gate.verdict.value})"
        why = "\n".join(gate.reasons)
        table.add_row(
            gate.name, Text(answer, style=_STYLES[gate.verdict] if gate.judged else "dim"), Text(why)
        )
    console.print(table)
    if any(not gate.judged for gate in verification.judgement.gates):
        console.print(
            Text("(…) is reported and not judged: the arithmetic or the engine may differ", style="dim")
        )
    for line in verification.damage:
        console.print(Text(f"damaged: {line}", style="red"), soft_wrap=True)
    stored, verdict = verification.stored, verification.judgement.verdict
    if stored and not verification.damage:
        console.print(f"{len(stored.artifacts)} files are as they were sealed", highlight=False)
    final = "DAMAGED" if verification.damage else verdict.value
    style = "red" if verification.damage else _STYLES[verdict]
    console.print(Text(f"{stored.run_id if stored else 'run'}: {final}", style=style), soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
