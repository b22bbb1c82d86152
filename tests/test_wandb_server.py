"""W&B, proved: the real client against a server of the tests' own; what arrives equals the local files."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command import LIGHT
from launch_owner import RUN_ID as OWNED_ID
from launch_owner import Owner, job_of_two_ranks
from report_fixtures import RUN_ID, make_job, write_run
from wandb_answers import StoredRun
from wandb_server import WandbServer, client_environment, serving

from rlsp.config import Config
from rlsp.report.files import sha256_file
from rlsp.report.manifest import Manifest
from rlsp.report.mirror import FILES
from rlsp.report.tracker import open_tracker
from rlsp.report.verdict import seal, verify
from rlsp.report.warmup import WARMUP_NAME
from rlsp.worker import RUN_RANK

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module", autouse=True)
def no_account(home: Path) -> Iterator[None]:
    """Keep the user's account and the network out."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("WANDB_", "XDG_"))]:
            patch.delenv(name)
        yield


@pytest.fixture
def server(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    with serving() as server:
        for name, value in client_environment(home, server.url).items():
            monkeypatch.setenv(name, value)
        yield server


def command(home: Path, server: WandbServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module of this environment with a server to talk to."""
    environment = {**os.environ, **client_environment(home, server.url), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        check=False,
        env=environment,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=120,
    )


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def without_empty(config: dict[str, Any]) -> dict[str, Any]:
    """Leave out empty mappings, which wandb drops (`task.dataset_config`)."""
    kept = {key: without_empty(value) if isinstance(value, dict) else value for key, value in config.items()}
    return {key: value for key, value in kept.items() if value != {}}


def assert_rows_and_files_arrived(stored: StoredRun, run_dir: Path) -> None:
    """Compare everything but artifacts with the local files."""
    assert stored.rows == rows_of(run_dir)
    manifest = json.loads((run_dir / "manifest.json").read_text())
    sent = {name: value for name, value in stored.config.items() if name != "rlsp"}
    assert sent == without_empty(manifest["config"])
    assert stored.config["rlsp"]["config_hash"] == manifest["config_hash"]
    verdict = json.loads((run_dir / "VERDICT.json").read_text())
    assert (stored.summary["verdict"], stored.summary["reasons"]) == (verdict["verdict"], verdict["reasons"])
    assert stored.summary["manifest_sha256"] == sha256_file(run_dir / "manifest.json")
    total = json.loads((run_dir / "consistency.json").read_text())["total"]
    assert {n: stored.summary.get(f"total/{n}") for n, v in total.items() if not isinstance(v, dict)} == {
        name: value for name, value in total.items() if not isinstance(value, dict)
    }
    for name in FILES:
        if name == WARMUP_NAME and not (run_dir / name).is_file():
            continue  # most runs have no warm-up
        assert stored.files[name] == (run_dir / name).read_bytes(), name


def assert_artifacts_arrived(server: WandbServer, run_dir: Path, run_id: str) -> None:
    """Compare the committed artifacts with the local files."""
    found = {a.name: a for a in server.artifacts if a.fields["runName"] == run_id}
    expected = {
        f"manifest-{run_id}": ["manifest.json"],
        f"consistency-{run_id}": ["VERDICT.json", "consistency.json", "report.html"],
    }
    assert {name: sorted(artifact.files) for name, artifact in found.items()} == expected
    for artifact in found.values():
        assert artifact.state == "COMMITTED"
        assert [alias["alias"] for alias in artifact.fields["aliases"]] == ["latest"]
        for name, content in artifact.files.items():
            assert content == (run_dir / name).read_bytes()
            md5 = base64.b64encode(hashlib.md5(content).digest()).decode()
            assert artifact.manifest["contents"][name]["digest"] == md5


# A sweep of the real command --------------------------------------------------


@pytest.fixture(scope="module")
def swept(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WandbServer, Path, str]]:
    """Run two jobs online through the `rlsp` command; many tests look at what arrived."""
    folder = tmp_path_factory.mktemp("swept") / "sweep_one"
    overrides = (
        LIGHT,
        "parallel=cp1_tp1_sp1",
        "num_rollouts=2",
        "prompts_per_rollout=2",
        "tracker=online",
        "seed=1,2",
    )
    with serving() as server:
        ran = command(home, server, "rlsp", "-m", f"hydra.sweep.dir={folder}", *overrides)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        yield server, folder, ran.stdout


def jobs_of(folder: Path) -> dict[str, Path]:
    """Return run folders by run id."""
    found = [path.parent for path in folder.glob("*/manifest.json")]
    return {json.loads((path / "manifest.json").read_text())["run_id"]: path for path in found}


def test_everything_of_an_online_run_arrives_and_equals_the_local_files(swept):
    server, folder, printed = swept
    jobs = jobs_of(folder)
    assert server.runs.keys() == jobs.keys()
    assert len(jobs) == 2
    for run_id, run_dir in jobs.items():
        stored = server.runs[run_id]
        assert len(stored.rows) == 2
        assert_rows_and_files_arrived(stored, run_dir)
        assert_artifacts_arrived(server, run_dir, run_id)
        assert (stored.complete, stored.exit_code) == (True, 0)
        assert f"{server.url}/loopback/rlsp/runs/{run_id}" in printed
        assert verify(run_dir).damage == ()


def test_the_runs_of_a_sweep_share_a_group_and_differ_in_name(swept):
    server, folder, _ = swept
    fields = [stored.fields for stored in server.runs.values()]
    assert {field["groupName"] for field in fields} == {folder.name}
    assert {field["jobType"] for field in fields} == {"train"}
    assert {field["displayName"] for field in fields} == {f"default-cp1_tp1_sp1-s{seed}" for seed in (1, 2)}
    assert all({"cp1", "tp1", "gloo", "strict"} <= set(field["tags"]) for field in fields)


def test_metrics_are_drawn_over_the_rollout_on_the_server_too(swept):
    server, _, _ = swept
    for stored in server.runs.values():
        drawn = stored.metric_definitions
        step = 1 + next(index for index, metric in enumerate(drawn) if metric["1"] == "rollout")
        assert {metric.get("5") for metric in drawn if metric["1"] != "rollout"} == {step}


# An offline run, sent later ---------------------------------------------------


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import wandb

    run_dir = write_run(tmp_path_factory.mktemp("offline") / "run", config={"tracker__mode": "offline"})
    job = make_job(run_dir, tracker__mode="offline")
    with open_tracker(job, Manifest.read(run_dir / "manifest.json")) as tracker:
        tracker.finish(seal(run_dir))
    wandb.teardown()  # else the processes that the other tests start would use this one's service
    return run_dir


def sync(home: Path, server: WandbServer, run_dir: Path, kind: str = "offline-run") -> None:
    folders = sorted(str(path) for path in (run_dir / "wandb").glob(f"{kind}-*"))
    sent = command(home, server, "wandb", "sync", "--include-online", *folders)
    assert sent.returncode == 0, sent.stdout + sent.stderr


def test_an_offline_run_is_synced_whole(home, server, offline, tmp_path):
    run_dir = shutil.copytree(offline, tmp_path / "run", symlinks=True)
    sync(home, server, run_dir)
    stored = server.runs[RUN_ID]
    assert_rows_and_files_arrived(stored, run_dir)
    assert (stored.complete, stored.exit_code, stored.fields["groupName"]) == (True, 0, "synthetic")
    # the artifacts' files are named by where the run was made, and that is still there
    assert_artifacts_arrived(server, run_dir, RUN_ID)


def test_a_moved_run_folder_is_synced_with_its_rows_and_files_and_without_artifacts(
    home, server, offline, tmp_path
):
    run_dir = shutil.copytree(offline, tmp_path / "elsewhere", symlinks=True)
    hidden = offline.rename(offline.parent / "gone")
    try:
        sync(home, server, run_dir)
    finally:
        hidden.rename(offline)
    assert_rows_and_files_arrived(server.runs[RUN_ID], run_dir)
    assert [artifact.files for artifact in server.artifacts if artifact.state == "COMMITTED"] == []


# Servers that are out of order ------------------------------------------------

OnlineJob = Callable[..., Any]


@pytest.fixture
def online_job(compose: Callable[..., Config], tmp_path: Path) -> OnlineJob:
    # Long enough for a machine that is busy; tests of servers that hang say how long they wait themselves.
    fixed = ("tracker=online", "tracker.init_timeout_s=30.0", "tracker.finish_timeout_s=30.0")
    return lambda *overrides: job_of_two_ranks(compose, tmp_path / OWNED_ID, *fixed, *overrides)


def test_a_failed_run_is_shown_failed_with_every_row(server, online_job):
    job = online_job()
    ended = Owner(job, "rows").end()
    assert ended.status == 1
    stored = server.runs[OWNED_ID]
    assert (stored.complete, stored.exit_code, len(stored.rows)) == (True, 1, 2)
    assert stored.rows == rows_of(Path(job.run_dir))
    assert stored.summary["verdict"] == "ABORTED"
    assert "after two rows" in json.dumps(stored.summary["reasons"])
    assert stored.files["VERDICT.json"] == (Path(job.run_dir) / "VERDICT.json").read_bytes()


def test_a_server_that_goes_away_changes_neither_run_nor_status_and_the_rest_can_be_sent(
    server, online_job, home, tmp_path
):
    job = online_job(
        "num_rollouts=2", "parallel=cp1_tp1_sp1", "prompts_per_rollout=2", "tracker.finish_timeout_s=3.0"
    )
    owner = Owner(job, RUN_RANK)
    server.await_that(lambda: OWNED_ID in server.runs)
    server.close()
    ended = owner.end()
    run_dir = Path(job.run_dir)
    assert ended.status == 0, ended.output
    assert verify(run_dir).damage == ()
    left = next((run_dir / "wandb").glob("run-*"))
    said = "tracker: W&B did not take everything within 3 s after the end; send it later: wandb sync"
    assert f"{said} --include-online {left}" in ended.output
    assert "Traceback" not in ended.output
    with serving() as another:
        sync(home, another, run_dir, "run")
        assert_rows_and_files_arrived(another.runs[OWNED_ID], run_dir)
        assert_artifacts_arrived(another, run_dir, OWNED_ID)


@pytest.mark.parametrize("after", [None, "UpsertBucket"])
def test_a_server_that_hangs_holds_the_end_up_for_a_bounded_time(server, online_job, after):
    server.stall(after)
    job = online_job(f"tracker.init_timeout_s={20.0 if after else 3.0}", "tracker.finish_timeout_s=3.0")
    ended = Owner(job, "rows").end()
    assert ended.status == 1
    assert "after two rows" in ended.reason
    assert verify(Path(job.run_dir)).damage == ()
    # two limits of 3 s, the margin, and what the ranks take on a busy machine
    assert ended.seconds < 45
    said = "W&B did not end within" if after else "W&B cannot be reached, this run is kept offline"
    assert f"tracker: {said}" in ended.output
    assert "tracker: W&B is still sending, for at most" in ended.output
    assert "Traceback" not in ended.output.partition("tracker:")[2]
    kept = list((Path(job.run_dir) / "wandb").glob("offline-run-*/*.wandb"))
    assert len(kept) == (0 if after else 1)
    assert processes_with(job.run_dir) == []


def test_a_user_who_does_not_wait_for_an_upload_breaks_it_off_at_once(server, online_job):
    server.stall(after="UpsertBucket")
    job = online_job("tracker.finish_timeout_s=60")
    owner = Owner(job, "rows")
    owner.await_files("VERDICT.json")
    time.sleep(4)  # until it has said that it waits
    owner.mark()
    owner.process.send_signal(signal.SIGINT)
    ended = owner.end()
    assert "W&B is still sending" in ended.output
    assert ended.seconds < 10
    assert ended.status != 0
    assert verify(Path(job.run_dir)).damage == ()
    assert processes_with(job.run_dir) == []


def test_rows_that_a_server_refused_for_a_while_arrive_when_it_is_back(server, online_job):
    server.refuse(503, "out of order", after="UpsertBucket")
    job = online_job("tracker.finish_timeout_s=40")
    owner = Owner(job, "rows")
    owner.await_files("VERDICT.json")
    for _ in range(300):  # a busy machine opens the run after the ranks have ended
        if OWNED_ID in server.runs:
            break
        time.sleep(0.1)
    assert server.runs[OWNED_ID].rows == []
    server.recover()
    ended = owner.end()
    stored = server.runs[OWNED_ID]
    assert stored.rows == rows_of(Path(job.run_dir))
    assert (ended.status, stored.complete, stored.exit_code, len(stored.rows)) == (1, True, 1, 2)
    assert f"tracker: {server.url}/loopback/rlsp/runs/{OWNED_ID}" in ended.output


def processes_with(text: str) -> list[str]:
    """Find processes whose open files lie under a folder of that name, as a service left behind has."""
    found = []
    for folder in Path("/proc").glob("[0-9]*/fd"):
        if int(folder.parent.name) == os.getpid():
            continue
        try:
            found += [str(target) for link in folder.iterdir() if text in (target := os.readlink(link))]
        except OSError:
            continue
    return found


def test_an_entity_that_does_not_exist_is_one_warning_and_the_run_is_kept_offline(server, online_job):
    job = online_job("tracker.entity=nobody")
    ended = Owner(job, "finish").end()
    assert ended.verdict["aborted"] is None
    lines = [line for line in ended.output.splitlines() if line.startswith("  tracker: ")]
    # On a busy machine the run may end while W&B still looks for the entity, and say that it waits.
    said = [line for line in lines if "W&B is still sending" not in line]
    assert len(said) == 1
    assert said[0].startswith("  tracker: W&B cannot be reached, this run is kept offline: ")
    assert "entity nobody not found" in said[0]
    assert len(list((Path(job.run_dir) / "wandb").glob("offline-run-*"))) == 1
    assert server.runs == {}


def test_what_the_server_does_not_know_fails_the_test_that_asked_for_it():
    with pytest.raises(AssertionError, match="NewOperation"), serving() as server:
        assert "errors" in server.graphql("query NewOperation { x }", {})
