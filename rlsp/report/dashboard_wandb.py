"""Makes a dashboard a W&B workspace or report; needs the extra `dashboards` (wandb-workspaces)."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import wandb
from wandb_workspaces import expr
from wandb_workspaces._graphql import execute_graphql
from wandb_workspaces.reports.v2 import gql
from wandb_workspaces.reports.v2 import interface as reports
from wandb_workspaces.workspaces import interface as workspaces
from wandb_workspaces.workspaces.internal import View

from rlsp.report.dashboard import Dashboard, Kind, Panel, Section
from rlsp.report.metrics import STEP

_TIMEOUT_S = 10
# wandb 0.31 says this of its own service when a server does not answer.
_UNANSWERED = "Failed to execute API request: the service process is busy and did not respond in time."
_NAME_CHARS = 11
# A report's grid is 24 wide.
_WIDTH, _HEIGHT, _COLUMNS = 12, 8, 2
_COLUMNS_SHOWN = ["summary:verdict", "summary:total/mismatched_tokens", "summary:total/active_tokens"]


class DashboardError(RuntimeError):
    """Say why W&B did not take a dashboard."""


def workspace(dashboard: Dashboard) -> workspaces.Workspace:
    """Build the workspace; nothing is sent."""
    sections = [
        workspaces.Section(name=section.title, panels=_panels(section), is_open=True)
        for section in dashboard.sections
    ]
    return workspaces.Workspace(
        entity=dashboard.entity,
        project=dashboard.project,
        name=dashboard.title,
        sections=sections,
        settings=workspaces.WorkspaceSettings(x_axis=STEP),
        runset_settings=workspaces.RunsetSettings(
            filters=_filters(dashboard), pinned_columns=list(_COLUMNS_SHOWN)
        ),
    )


def report(dashboard: Dashboard) -> reports.Report:
    """Build the report: the same panels, each section with what to look for; nothing is sent."""
    blocks: list[Any] = [reports.TableOfContents()]
    for section in dashboard.sections:
        runset = reports.Runset(
            entity=dashboard.entity,
            project=dashboard.project,
            name=dashboard.group or "all runs",
            filters=_filters(dashboard),
        )
        blocks += [
            reports.H1(text=section.title),
            reports.P(text=section.text),
            reports.PanelGrid(runsets=[runset], panels=_panels(section)),
        ]
    return reports.Report(
        entity=dashboard.entity,
        project=dashboard.project,
        title=dashboard.title,
        description="Made by rlsp-dashboard",
        blocks=blocks,
        width="fluid",
    )


def save_workspace(dashboard: Dashboard) -> str:
    """Save the workspace and return its address; one of the same title in the project is replaced.

    Raises:
        DashboardError: There is no log-in, no such project, or no server that answers.
    """
    try:
        _require_project(dashboard)
        made = workspace(dashboard)
        name = _view_name(dashboard.title)
        try:
            made._internal_id = View.from_name(dashboard.entity, dashboard.project, name).id
        except ValueError:
            made._internal_id = ""  # none of this title yet
        made._internal_name = name
        return str(made.save().url)
    except Exception as error:
        raise _explained(error, dashboard) from error


def save_report(dashboard: Dashboard) -> str:
    """Save a new report and return its address.

    Raises:
        DashboardError: There is no log-in, no such project, or no server that answers.
    """
    try:
        _require_project(dashboard)
        return str(report(dashboard).save().url)
    except Exception as error:
        raise _explained(error, dashboard) from error


def _panels(section: Section) -> list[Any]:
    return [_panel(panel, _place(index)) for index, panel in enumerate(section.panels)]


def _panel(panel: Panel, place: reports.Layout) -> Any:
    how: dict[str, Any] = {"title": panel.title, "layout": place}
    if panel.grouped_by is not None:
        how["groupby"] = reports.Config(panel.grouped_by)
        how |= {"groupby_aggfunc": "mean", "groupby_rangefunc": "minmax"}
    if panel.kind is Kind.SCALAR:
        (metric,) = panel.metrics
        return reports.ScalarChart(metric=reports.SummaryMetric(metric), groupby_aggfunc="max", **how)
    if panel.kind is Kind.BARS:
        return reports.BarPlot(metrics=[reports.SummaryMetric(metric) for metric in panel.metrics], **how)
    plot_type: Literal["stacked-area", "line"] = "stacked-area" if panel.kind is Kind.STACKED else "line"
    how |= {"smoothing_type": "none", "log_y": panel.log or None}
    return reports.LinePlot(x=STEP, y=list(panel.metrics), plot_type=plot_type, **how)


def _filters(dashboard: Dashboard) -> expr.And | str:
    return expr.And(expr.Metric("Group") == dashboard.group) if dashboard.group else ""


def _place(index: int) -> reports.Layout:
    row, column = divmod(index, _COLUMNS)
    return reports.Layout(x=column * _WIDTH, y=row * _HEIGHT, w=_WIDTH, h=_HEIGHT)


def _view_name(title: str) -> str:
    """Name a view after its title, in the form of W&B's own names, so that the next call finds it."""
    return f"nw-{hashlib.sha256(title.encode()).hexdigest()[:_NAME_CHARS]}-v"


def _require_project(dashboard: Dashboard) -> None:
    asked = {"entityName": dashboard.entity, "projectName": dashboard.project}
    answer = execute_graphql(wandb.Api(timeout=_TIMEOUT_S), gql.projectInternalId, asked)
    if not answer.get("project"):
        raise DashboardError(
            f"no project {dashboard.entity}/{dashboard.project} that this account may see; a run with "
            f"tracker=online tracker.entity={dashboard.entity} tracker.project={dashboard.project} makes it"
        )


def _explained(error: Exception, dashboard: Dashboard) -> DashboardError:
    """Turn whatever wandb raises into one line."""
    if isinstance(error, DashboardError):
        return error
    said = " ".join(str(error).split()) or type(error).__name__
    said = said.replace(_UNANSWERED, f"no answer within {_TIMEOUT_S} s")
    if "API key" in said or "not logged in" in said:
        return DashboardError(f"not logged in to W&B: run `wandb login`, or set WANDB_API_KEY ({said})")
    return DashboardError(f"W&B did not take the dashboard of {dashboard.entity}/{dashboard.project}: {said}")
