"""`rlsp-publish SWEEP|RUN… --out FOLDER`: one small table, and figures, of a suite of arms."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlsp.report.files import EvidenceError
from rlsp.report.suite import Arm, pair, passed, read_arm, sentences, table
from rlsp.report.suite_page import write_suite
from rlsp.report.verdict import is_run_folder

_USAGE = 2
_EPILOG = """Every run is verified first: a damaged one is refused, and nothing is written.

exit status:
  0  published, every arm PASS
  1  a folder is damaged or the output cannot be written
  2  no run there
  3  published, but an arm's verdict is not PASS
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Publish what the command line names; return the exit status."""
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
    chosen = parser.parse_args(arguments)
    folders = [run for folder in chosen.folders for run in _runs(folder)]
    if not folders:
        print("rlsp-publish: no run folder there", file=sys.stderr)
        return _USAGE
    try:
        arms = [read_arm(folder) for folder in folders]
        pairs = [pair(*_named(arms, text)) for text in chosen.pair]
        names = write_suite(chosen.out, chosen.title, arms, pairs)
    except EvidenceError as error:
        print(f"rlsp-publish: {error}", file=sys.stderr)
        return 1
    except _UnknownPairError as error:
        print(f"rlsp-publish: {error}", file=sys.stderr)
        return _USAGE
    print(table(arms))
    print("\n".join(sentences(arms, pairs)))
    print(f"wrote {', '.join(names)} to {chosen.out}")
    return 0 if passed(arms) else 3


class _UnknownPairError(ValueError):
    """A pair names no two arms."""


def _runs(folder: Path) -> Iterator[Path]:
    """List a run folder, or the run folders in a sweep's, in the order of their numbers."""
    if is_run_folder(folder):
        yield folder
    elif folder.is_dir():
        jobs = [entry for entry in folder.iterdir() if entry.is_dir() and is_run_folder(entry)]
        yield from sorted(jobs, key=lambda job: (len(job.name), job.name))


def _named(arms: Sequence[Arm], text: str) -> tuple[Arm, Arm]:
    by_name = {arm.name: arm for arm in arms}
    names = text.split(",")
    if len(names) != 2 or not set(names) <= by_name.keys():
        raise _UnknownPairError(f"--pair {text}: legal: two of {', '.join(by_name)}")
    return by_name[names[0]], by_name[names[1]]
