"""`rlsp-publish SWEEP|RUN… --out FOLDER`: one small table, and figures, of a suite of arms."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from rlsp.cli.output import UNUSABLE, answer, complain
from rlsp.report.files import EvidenceError
from rlsp.report.suite import doubled, passed, sentences, table
from rlsp.report.suite_arms import Arm, read_arm
from rlsp.report.suite_folders import find_runs
from rlsp.report.suite_page import Suite, write_suite
from rlsp.report.suite_pairs import UnlikePairError, pair

_FAILED, _NOT_PASSED = 1, 3
_EPILOG = """Every run is verified first: a damaged one is refused, and nothing is written. Jobs of a sweep
that left no run are named as left out. A pair must have code, data, processor, packages, layouts, device and
configuration in common, but for name, routes, old policy, correction and the number of rollouts.

exit status:
  0  published, every arm PASS
  1  a folder is damaged or the output cannot be written
  2  a folder without a run, arms of one name, a pair that is none, or the answer cannot be printed
  3  published, but an arm's verdict is not PASS
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Publish what the command line names; return the exit status."""
    return answer("rlsp-publish", partial(_answer, arguments))


def _answer(arguments: Sequence[str] | None, console: Console) -> int:
    chosen = _parser().parse_args(arguments)
    try:
        suite = _suite(chosen)
        names = write_suite(chosen.out, suite)
    except EvidenceError as error:
        complain(f"rlsp-publish: {error}")
        return _FAILED
    except (_RefusedError, UnlikePairError) as error:
        complain(f"rlsp-publish: {error}")
        return UNUSABLE
    lines = [
        table(suite.arms),
        *sentences(suite.arms, suite.pairs),
        *(f"left out: {line}" for line in suite.left_out),
        f"wrote {', '.join(names)} to {chosen.out}",
    ]
    console.file.write("".join(f"{line}\n" for line in lines))
    return 0 if passed(suite.arms) else _NOT_PASSED


class _RefusedError(ValueError):
    """The command line names what cannot be published; the message says why."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlsp-publish",
        description="Put the arms of a suite side by side: table, figures, commands.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "folders", type=Path, nargs="+", metavar="FOLDER", help="run folders, or sweep folders that hold some"
    )
    parser.add_argument("--out", type=Path, required=True, help="where README.md, table.json and *.svg go")
    parser.add_argument("--title", default="Arms", help="the page's heading")
    parser.add_argument(
        "--pair",
        action="append",
        default=[],
        metavar="A,B",
        help="two arms by name, to be compared rollout by rollout (B against A); may be given again",
    )
    return parser


def _suite(chosen: argparse.Namespace) -> Suite:
    """Read every run that the command line names.

    Raises:
        EvidenceError: A folder is damaged.
        UnlikePairError: Two arms cannot be compared.
        _RefusedError: A folder holds no run, two arms have one name, or a pair names no two arms.
    """
    found = {folder: find_runs(folder) for folder in chosen.folders}
    if empty := [str(folder) for folder, inside in found.items() if not inside.runs]:
        raise _RefusedError(f"no run folder there: {', '.join(empty)}")
    arms = tuple(read_arm(run) for inside in found.values() for run in inside.runs)
    if names := doubled(arms):
        raise _RefusedError(f"several arms are named {', '.join(names)}: legal: one run a name")
    return Suite(
        title=chosen.title,
        arms=arms,
        pairs=tuple(pair(*_named(arms, text)) for text in chosen.pair),
        left_out=tuple(line for inside in found.values() for line in inside.left_out),
    )


def _named(arms: Sequence[Arm], text: str) -> tuple[Arm, Arm]:
    by_name = {arm.name: arm for arm in arms}
    names = text.split(",")
    if len(names) != 2 or not set(names) <= by_name.keys():
        raise _RefusedError(f"--pair {text}: legal: two of {', '.join(by_name)}")
    return by_name[names[0]], by_name[names[1]]


if __name__ == "__main__":
    sys.exit(main())
