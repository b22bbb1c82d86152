"""`rlsp-dashboard`: panels over metrics that exist, saved through the real package to a loopback server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launch_owner import environment
from report_fixtures import make_job, write_run
from wandb_server import WandbServer, client_environment, serving

from rlsp.cli import dashboard as cli
from rlsp.report import dashboard_wandb, mirror
from rlsp.report.dashboard import Kind, Panel, Section, build, panels, unknown_metrics
from rlsp.report.manifest import Manifest
from rlsp.report.metrics import METRICS, STEP

ROOT = Path(__file__).resolve().parents[1]
PROJECT = "loopback/rlsp"

Command = subprocess.CompletedProcess[str]


# What is shown ----------------------------------------------------------------


def test_every_metric_of_every_panel_is_one_that_runs_log():
    assert unknown_metrics(build("e", "p").sections) == ()


def test_a_panel_over_a_metric_that_no_run_logs_is_named():
    wrong = Section("", "", (Panel("Loss", ("train/los",)), Panel("Tokens", ("train/loss",), Kind.SCALAR)))
    assert unknown_metrics((wrong,)) == ("Loss: train/los", "Tokens: train/loss")


def test_every_registered_metric_but_plain_counts_is_shown():
    shown = {metric for panel in panels(build("e", "p").sections) for metric in panel.metrics}
    assert METRICS.keys() - shown == {"rollout/sequences", "mismatch/sequences"}


def test_consistency_comes_first_and_titles_are_not_repeated():
    sections = build("e", "p").sections
    assert [section.title for section in sections] == [
        "1 Consistency",
        "2 Mismatch, under other frameworks' names",
        "3 Learning",
        "4 Time",
        "5 Layouts",
    ]
    titles = [panel.title for panel in panels(sections)]
    assert len(titles) == len(set(titles))


def test_panels_are_grouped_by_keys_that_are_in_the_config_of_a_run(tmp_path):
    run_dir = write_run(tmp_path / "run")
    config: Any = mirror.config_of(make_job(run_dir), Manifest.read(run_dir / "manifest.json"))
    keys = {panel.grouped_by for panel in panels(build("e", "p").sections)} - {None}
    assert keys == {"rlsp.layout", "rlsp.rollout_layout"}
    assert [config["rlsp"][key.removeprefix("rlsp.")] for key in sorted(keys)] == ["cp2_tp2_sp2", "3 x tp1"]


# Without sending --------------------------------------------------------------


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be without the extra."""
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    monkeypatch.setattr(cli, "find_spec", lambda name: None)


def test_a_dry_run_prints_all_panels_and_needs_neither_server_nor_package(no_package, capsys):
    assert cli.main([PROJECT, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "  KL(rollout || train), k1 and k3: consistency/kl_k1 consistency/kl_k3\n" in printed
    assert "  Loss by layout: train/loss  (by rlsp.layout)\n" in printed
    assert printed.endswith("nothing was sent\n")


def test_a_dry_run_as_json_names_sections_panels_and_axis(capsys):
    assert cli.main([PROJECT, "--dry-run", "--json", "--group", "sweep_1"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["entity"], said["project"], said["group"], said["x"]) == (
        "loopback",
        "rlsp",
        "sweep_1",
        STEP,
    )
    assert said["title"].endswith("sweep_1")
    assert said["sections"][0]["panels"][0]["metrics"] == ["total/mismatched_tokens"]


def test_without_the_package_there_is_one_message_and_status_2(no_package, capsys):
    assert cli.main([PROJECT]) == 2
    assert capsys.readouterr() == (
        "",
        "rlsp-dashboard: wandb-workspaces is missing: pip install 'rlsp[dashboards]'\n",
    )


@pytest.mark.parametrize("project", ["rlsp", "a/b/c", "/rlsp", "loopback/"])
def test_what_is_no_project_is_refused(project, capsys):
    assert cli.main([project]) == 2
    assert capsys.readouterr().err == f"rlsp-dashboard: {project}: legal: ENTITY/PROJECT\n"


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_reader_that_leaves_and_a_screen_without_unicode_are_no_failure(tmp_path, more):
    line = " ".join([sys.executable, "-m", "rlsp.cli.dashboard", PROJECT, "--group", "ü", "--dry-run", *more])
    for pipe, encoding in ((" | true", "utf-8"), ("", "ascii")):
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", line + pipe],
            check=False,
            env={**environment(), "PYTHONIOENCODING": encoding},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (0, "")
        if more and not pipe:
            assert json.loads(done.stdout)["group"] == "ü"


def test_an_interrupt_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(cli, "_save", raising_interrupt)
    assert cli.main([PROJECT]) == 130
    assert capsys.readouterr().err == "rlsp-dashboard: interrupted\n"


def raising_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


# Saved to a server ------------------------------------------------------------


def run_command(home: Path, server: WandbServer, *arguments: str, **changes: str) -> Command:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "XDG_"))}
    environment = {**inherited, **client_environment(home, server.url), "PYTHONPATH": str(ROOT), **changes}
    return subprocess.run(
        [sys.executable, "-m", "rlsp.cli.dashboard", *arguments],
        check=False,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WandbServer, list[dict[str, Any]]]]:
    """Make workspace and report of a group, then the workspace again."""
    home = tmp_path_factory.mktemp("home")
    with serving() as server:
        answers = []
        for more in (("--report",), ()):
            ran = run_command(home, server, PROJECT, "--group", "sweep_1", "--json", *more)
            assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr
            answers.append(json.loads(ran.stdout))
        yield server, answers


def drawn(spec: Any) -> list[dict[str, Any]]:
    """Find all panels in a saved spec, wherever they stand."""
    if isinstance(spec, dict):
        here = [spec] if "viewType" in spec and "config" in spec else []
        return here + [panel for value in spec.values() for panel in drawn(value)]
    return [panel for value in spec for panel in drawn(value)] if isinstance(spec, list) else []


def spec_of(server: WandbServer, kind: str) -> dict[str, Any]:
    (view,) = [view for view in server.views.values() if view["type"] == kind]
    assert (view["entityName"], view["projectName"]) == ("loopback", "rlsp")
    return json.loads(view["spec"])


@pytest.mark.parametrize("kind", ["project-view", "runs"])
def test_workspace_and_report_arrive_with_every_panel_over_its_metrics(saved, kind):
    server, _ = saved
    arrived = [
        [name.removeprefix("summary_metrics.") for name in panel["config"]["metrics"]]
        for panel in drawn(spec_of(server, kind))
    ]
    assert arrived == [list(panel.metrics) for panel in panels(build("e", "p").sections)]


@pytest.mark.parametrize("kind", ["project-view", "runs"])
def test_lines_are_drawn_over_the_rollout_and_layouts_are_grouped_by_config(saved, kind):
    server, _ = saved
    arrived = drawn(spec_of(server, kind))
    lines = [panel["config"] for panel in arrived if panel["viewType"] == "Run History Line Plot"]
    assert {config["xAxis"] for config in lines} == {STEP}
    grouped = {panel["config"]["groupBy"] for panel in arrived if panel["config"].get("groupBy")}
    assert grouped == {"rlsp.value.layout", "rlsp.value.rollout_layout"}


@pytest.mark.parametrize("kind", ["project-view", "runs"])
def test_a_group_filters_the_runs(saved, kind):
    server, _ = saved
    assert '"sweep_1"' in json.dumps(spec_of(server, kind)).replace("\\", "")


def test_the_addresses_are_printed_and_a_second_call_replaces_the_workspace(saved):
    server, (first, second) = saved
    assert first["workspace"].startswith(f"{server.url}/{PROJECT}?nw=")
    assert first["report"].startswith(f"{server.url}/{PROJECT}/reports/")
    assert second["workspace"] == first["workspace"]
    assert "report" not in second
    assert sorted(view["type"] for view in server.views.values()) == ["project-view", "runs"]
    assert server.operations.count("UpsertView2") == 2


def test_the_saved_workspace_is_read_back_by_the_package_as_it_was_built(saved):
    from wandb_workspaces.workspaces.internal import WorkspaceViewspec

    server, _ = saved
    read = WorkspaceViewspec.model_validate(spec_of(server, "project-view"))
    built = dashboard_wandb.workspace(build("loopback", "rlsp", "sweep_1"))._to_model().spec
    titles = [[s.name for s in spec.section.panel_bank_config.sections] for spec in (read, built)]
    assert titles[0] == titles[1]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WandbServer]:
    with serving() as server:
        yield server


def assert_one_message(ran: Command, text: str) -> None:
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("rlsp-dashboard: ")
    assert ran.stderr.count("\n") == 1
    assert text in ran.stderr


def test_an_entity_that_does_not_exist_is_one_message(tmp_path, server):
    ran = run_command(tmp_path, server, "nobody/rlsp")
    assert_one_message(ran, "no project nobody/rlsp that this account may see")


def test_no_log_in_is_one_message(tmp_path, server):
    ran = run_command(tmp_path, server, PROJECT, WANDB_API_KEY="")
    assert_one_message(ran, "not logged in to W&B: run `wandb login`, or set WANDB_API_KEY")


def test_a_server_that_refuses_is_one_message(tmp_path, server):
    server.refuse(401, "no")
    assert_one_message(run_command(tmp_path, server, PROJECT), "error 401")


def test_a_server_that_is_down_is_one_message_in_bounded_time(tmp_path, server):
    server.close()
    ran = run_command(tmp_path, server, PROJECT)
    assert_one_message(ran, f"Failed to verify credentials with {server.url}: no answer within 10 s")
