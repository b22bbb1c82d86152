"""`rlsp-dashboard ENTITY/PROJECT`: make the W&B workspace, and on request the report, of a project."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec

from rich.console import Console

from rlsp.cli.output import UNUSABLE, answer, complain
from rlsp.config.plain import is_legal
from rlsp.config.rules import Project
from rlsp.report.dashboard import Dashboard, Kind, Panel, build
from rlsp.report.files import shown

_FAILED = 1
_EPILOG = """The workspace shows consistency first, then learning, time, and the layouts. One that an earlier
call made is replaced; every --report is a new report. The server is WANDB_BASE_URL, else where
`wandb login` went.

exit status:
  0  made, or with --dry-run shown
  1  W&B refused: no log-in, no such project, no server
  2  wrong arguments, the answer cannot be printed, or the extra is missing: pip install 'rlsp[dashboards]'
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the dashboards that the command line asks for; return the exit status."""
    return answer("rlsp-dashboard", partial(_answer, arguments))


def _answer(arguments: Sequence[str] | None, console: Console) -> int:
    parser = argparse.ArgumentParser(
        prog="rlsp-dashboard",
        description="Make the Weights & Biases workspace of a project; every panel shows what rlsp logs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("project", metavar="ENTITY/PROJECT", help="whose project, and which")
    parser.add_argument("--report", action="store_true", help="make a report, too")
    parser.add_argument("--group", help="only the runs of this group, such as a sweep's folder name")
    parser.add_argument("--dry-run", action="store_true", help="show what would be made; send nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = parser.parse_args(arguments)
    entity, _, project = chosen.project.partition("/")
    if not (is_legal(Project, entity) and is_legal(Project, project)):
        return _complain(f"{shown(chosen.project)}: legal: ENTITY/PROJECT", UNUSABLE)
    dashboard = build(entity, project, chosen.group)
    addresses: dict[str, str] = {}
    if not chosen.dry_run:
        if find_spec("wandb_workspaces") is None:
            return _complain("wandb-workspaces is missing: pip install 'rlsp[dashboards]'", UNUSABLE)
        try:
            _save(dashboard, chosen.report, addresses)
        except RuntimeError as error:
            made = "".join(f"\nrlsp-dashboard: made before: {address}" for address in addresses.values())
            return _complain(f"{error}{made}", _FAILED)
    if chosen.json:
        console.file.write(json.dumps({**dashboard.to_plain(), **addresses}, indent=2) + "\n")
    else:
        console.file.write("".join(f"{line}\n" for line in _lines(dashboard, addresses)))
    return 0


def _save(dashboard: Dashboard, with_report: bool, addresses: dict[str, str]) -> None:
    """Save what was asked for, and note the address of each."""
    import wandb

    from rlsp.report import dashboard_wandb
    from rlsp.report.mirror import end_service

    wandb.setup(wandb.Settings(silent=True, quiet=True))
    try:
        addresses["workspace"] = dashboard_wandb.save_workspace(dashboard)
        if with_report:
            addresses["report"] = dashboard_wandb.save_report(dashboard)
    finally:
        end_service()


def _lines(dashboard: Dashboard, addresses: dict[str, str]) -> Iterator[str]:
    """Yield the panels by section, and where they are to be seen."""
    yield f"{dashboard.title}  ({dashboard.entity}/{dashboard.project})"
    for section in dashboard.sections:
        yield ""
        yield section.title
        yield from (f"  {panel.title}: {_text(panel)}" for panel in section.panels)
    yield ""
    yield from (f"{kind}: {address}" for kind, address in addresses.items())
    if not addresses:
        yield "nothing was sent"


def _text(panel: Panel) -> str:
    how = [] if panel.kind is Kind.LINES else [panel.kind.value]
    how += [f"by {panel.grouped_by}"] if panel.grouped_by else []
    how += ["log"] if panel.log else []
    return " ".join(panel.metrics) + (f"  ({', '.join(how)})" if how else "")


def _complain(message: str, status: int) -> int:
    complain(f"rlsp-dashboard: {message}")
    return status


if __name__ == "__main__":
    sys.exit(main())
