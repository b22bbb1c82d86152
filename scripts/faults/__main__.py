"""Plant faults in runs, let each go on, and hold it against an undisturbed run: docs/torture.md.

The status is 0 where every cell that could be run is as the failure policy wants it.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from faults.cells import Cell, cells
from faults.kills import kill
from faults.trial import Row, Undisturbed, attempt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; return 0 if all of it is right, else 1."""
    parser = argparse.ArgumentParser(prog="scripts/torture", description=__doc__)
    parser.add_argument("--cells", default="all", metavar="N", help="so many, each fault in turn (all)")
    parser.add_argument("--only", metavar="PATTERN", help="cells whose name matches: of --list, with * and ?")
    parser.add_argument("--list", action="store_true", help="print the names")
    parser.add_argument("--kills", type=int, metavar="N", help="kill one run so often instead")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of --kills (0)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write every row there as soon as it is known"
    )
    parser.add_argument("--folder", type=Path, help="where runs lie (a temporary one)")
    options = parser.parse_args(arguments)
    wanted = [cell for cell in cells() if fnmatch.fnmatchcase(cell.name, options.only or "*")]
    if options.cells != "all":
        wanted = wanted[: int(options.cells)]
    if options.list:
        print(*(cell.name for cell in wanted), sep="\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="torture-", dir=options.folder) as folder:
        if options.kills is not None:
            return _kill(Path(folder), options.kills, options.seed, options.json)
        return _table(Path(folder), wanted, options.json)


def _table(folder: Path, wanted: Sequence[Cell], path: Path | None) -> int:
    undisturbed = Undisturbed(folder / "undisturbed", folder / "undisturbed-rewarded")
    rows: list[Row] = []
    for number, cell in enumerate(wanted, start=1):
        print(f"{number}/{len(wanted)} {cell.name}", end=" ", file=sys.stderr, flush=True)
        row = attempt(cell, folder, undisturbed)
        print(f"→ {row.wrong or 'right'}", file=sys.stderr, flush=True)
        rows.append(row)
        if path is not None:
            path.write_text(json.dumps([asdict(each) for each in rows], indent=2) + "\n")
    _show(rows)
    ran = [row for row in rows if row.exact is not None]
    right = sum(not row.wrong for row in ran)
    print(f"{len(ran)} of {len(rows)} cells were run; {right} are as the failure policy wants them")
    for row in rows:
        if row.wrong:
            print(f"  {row.fault}, {row.moment}, {row.layout}: {row.wrong}")
    return int(right < len(ran))


def _show(rows: Sequence[Row]) -> None:
    table = Table(
        *(
            "fault",
            "moment",
            "layout",
            "goes on in",
            "status",
            "s to stop",
            "left",
            "rows lost",
            "at",
            "exact",
        ),
        box=MARKDOWN,
    )
    for row in rows:
        exact = {True: "yes", False: "no", None: "not run"}[row.exact]
        counts = (str(row.left), str(row.lost), str(row.goes_on_at))
        table.add_row(
            row.fault, row.moment, row.layout, row.then, row.status, f"{row.seconds:.1f}", *counts, exact
        )
    Console(width=160, highlight=False).print(table)


def _kill(folder: Path, kills: int, seed: int, path: Path | None) -> int:
    outcome = kill(folder, kills, seed)
    if path is not None:
        path.write_text(json.dumps(asdict(outcome), indent=2) + "\n")
    acts = ", ".join(f"{count} × {act}" for act, count in outcome.acts.items())
    print(f"{outcome.kills} kills ({acts}), {outcome.resumed} resumed by hand, {outcome.left} processes left")
    print(f"weights of the killed run       {outcome.digest}")
    print(f"weights of the undisturbed run  {outcome.undisturbed}")
    print(outcome.wrong or "every file of rollouts/ and digests/ has the same bytes; rlsp-compare: equal")
    return int(bool(outcome.wrong) or outcome.digest != outcome.undisturbed)


if __name__ == "__main__":
    sys.exit(main())
