from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_fixtures import RUN_ID, make_job, write_run

from rlsp.config import Job
from rlsp.report.files import EvidenceError, sha256_file
from rlsp.report.follow import Follower
from rlsp.report.manifest import Manifest
from rlsp.report.metrics import METRICS
from rlsp.report.tracker import Tracker, WandbTracker, open_tracker
from rlsp.report.verdict import seal

WAIT_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def a_home_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep the user's account and the network out, and show what is written outside the run folder."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("WANDB_", "XDG_"))]:
            patch.delenv(name)
        patch.setenv("HOME", str(home))
        patch.setenv("NETRC", str(home / ".netrc"))
        patch.setenv("WANDB_ERROR_REPORTING", "false")
        patch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{closed_port()}")
        yield home


def closed_port() -> int:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        return int(closed.getsockname()[1])


def run_of(tmp_path: Path, mode: str = "offline", **kwargs: Any) -> tuple[Path, Job, Manifest]:
    """Write a whole run that is not sealed, and return what its owner holds."""
    run_dir = write_run(tmp_path / "run", config={"tracker__mode": mode}, **kwargs)
    return run_dir, make_job(run_dir, tracker__mode=mode), Manifest.read(run_dir / "manifest.json")


def records(run_dir: Path, which: int = 0) -> list[dict[str, Any]]:
    """Read an offline run back, as its supported reader prints it."""
    files = sorted((run_dir / "wandb").glob("offline-run-*/*.wandb"))
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(files[which])]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in printed.splitlines()]


def of_kind(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record[kind] for record in found if record["type"] == kind]


def summary_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for record in of_kind(found, "summary"):
        summary.update(record["update"])
    return summary


def history_of(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record["item"] for record in of_kind(found, "history")]


def exit_codes(found: list[dict[str, Any]]) -> list[int]:
    return [record.get("exit_code", 0) for record in of_kind(found, "exit")]


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


# An offline run ---------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    run_dir, job, manifest = run_of(tmp_path_factory.mktemp("finished"))
    with open_tracker(job, manifest) as tracker:
        tracker.finish(seal(run_dir))
    assert tracker.warning is None
    return run_dir, records(run_dir)


def test_an_offline_run_reads_back_whole(finished, a_home_of_its_own):
    run_dir, found = finished
    run = of_kind(found, "run")[0]
    assert (run["run_id"], run["project"], run["run_group"], run["job_type"]) == (
        RUN_ID,
        "rlsp",
        "synthetic",
        "train",
    )
    assert run["display_name"] == "synthetic-cp2_tp2_sp2-s7"
    assert set(run["tags"]) == {
        "synthetic",
        "qwen3_nano",
        "tp2",
        "cp2",
        "sp",
        "bfloat16",
        "gloo",
        "strict",
    }

    config = run["config"]["update"]
    manifest = Manifest.read(run_dir / "manifest.json")
    assert config["parallel"] == {"cp": 2, "tp": 2, "sp": 2, "dp": 1}
    assert config["entropy_coef"] == 0.01
    assert config["rlsp"]["manifest_hash"] == manifest.begun_hash
    assert config["rlsp"]["config_hash"] == manifest.config_hash

    rows = rows_of(run_dir)
    history = [{k: v for k, v in item.items() if not k.startswith("_")} for item in history_of(found)]
    assert history == rows
    assert len(rows) == 3

    summary = summary_of(found)
    assert summary["verdict"] == "PASS"
    assert summary["total/mismatched_tokens"] == 0
    assert summary["total/active_tokens"] == sum(row["consistency/active_tokens"] for row in rows)
    assert summary["manifest_sha256"] == sha256_file(run_dir / "manifest.json")
    assert exit_codes(found) == [0]

    files = {entry["path"] for record in of_kind(found, "files") for entry in record["files"]}
    assert {"manifest.json", "consistency.json", "VERDICT.json"} <= files
    artifacts = {record["name"]: record for record in of_kind(found, "artifact")}
    assert artifacts[f"manifest-{RUN_ID}"]["type"] == "rlsp-manifest"
    assert artifacts[f"consistency-{RUN_ID}"]["type"] == "rlsp-consistency-report"
    # What was sealed is what was mirrored, in files of its own inside the run folder.
    copies = next((run_dir / "wandb").glob("offline-run-*/files"))
    for name in ("manifest.json", "consistency.json", "VERDICT.json"):
        assert not (copies / name).is_symlink()
        assert (copies / name).read_bytes() == (run_dir / name).read_bytes()
    contents = [entry for record in artifacts.values() for entry in record["manifest"]["contents"]]
    assert all(Path(entry["local_path"]).is_relative_to(run_dir / "wandb") for entry in contents)
    outside = {
        p.relative_to(a_home_of_its_own).as_posix() for p in a_home_of_its_own.rglob("*") if p.is_file()
    }
    assert {path for path in outside if not path.startswith(".cache/wandb/logs/")} == set()


def test_metrics_are_drawn_over_the_rollout_and_no_star_is_defined(finished):
    _, found = finished
    defined = {record.get("name"): record for record in of_kind(found, "metric")}
    assert defined.keys() == METRICS.keys() | {"rollout"}
    assert not any("glob_name" in record for record in defined.values())
    assert {record.get("step_metric") for name, record in defined.items() if name != "rollout"} == {"rollout"}
    assert defined["consistency/max_ulp"]["summary"] == {"max": True}


def test_a_sealed_run_still_verifies_after_it_was_mirrored(finished):
    from rlsp.report.verdict import verify

    assert verify(finished[0]).damage == ()


@pytest.mark.parametrize(
    ("changes", "aborted", "status", "verdict"),
    [
        ({"rollouts": 1, "aborted": "rank 3 died"}, "rank 3 died", 1, "ABORTED"),
        ({"rollouts": 2}, None, 3, "FAIL"),
    ],
)
def test_a_run_that_did_not_pass_is_closed_as_failed(tmp_path, changes, aborted, status, verdict):
    run_dir, job, manifest = run_of(tmp_path, **changes)
    with open_tracker(job, manifest) as tracker:
        tracker.finish(seal(run_dir, aborted))
    found = records(run_dir)
    assert exit_codes(found) == [status]
    assert summary_of(found)["verdict"] == verdict
    assert len(history_of(found)) == len(rows_of(run_dir))


def test_an_exception_in_the_owner_closes_the_run_as_failed_with_every_row(tmp_path):
    run_dir, job, manifest = run_of(tmp_path)
    with pytest.raises(RuntimeError, match="the owner"), open_tracker(job, manifest):
        raise RuntimeError("the owner fails")
    found = records(run_dir)
    assert exit_codes(found) == [1]
    assert len(history_of(found)) == 3
    assert "verdict" not in summary_of(found)


def test_numbers_that_are_not_finite_arrive_as_numbers(tmp_path):
    run_dir, job, manifest = run_of(tmp_path)
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    row = {**json.loads(lines[0]), "train/loss": "NaN", "train/gradient_norm": "Infinity"}
    (run_dir / "metrics.jsonl").write_text("\n".join([json.dumps(row), *lines[1:], ""]))
    with open_tracker(job, manifest):
        pass
    first = history_of(records(run_dir))[0]
    assert (first["train/loss"], first["train/gradient_norm"]) == ("NaN", "Infinity")


def test_a_resumed_run_is_the_same_run_and_sends_what_was_not_sent(tmp_path):
    run_dir, job, manifest = run_of(tmp_path)
    rows = (run_dir / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    for count in (2, 3):  # the owner is killed after two rows
        (run_dir / "metrics.jsonl").write_bytes(b"".join(rows[:count]))
        with open_tracker(job, manifest):
            pass
        time.sleep(1.1)  # wandb names folders by the second
    both = [records(run_dir, which) for which in range(2)]
    assert {of_kind(found, "run")[0]["run_id"] for found in both} == {RUN_ID}
    assert [[row["rollout"] for row in history_of(found)] for found in both] == [[0, 1], [2]]


def test_rows_of_a_log_that_cannot_be_read_are_sent_again(tmp_path):
    run_dir, job, manifest = run_of(tmp_path)
    with open_tracker(job, manifest):
        pass
    time.sleep(1.1)
    log = next((run_dir / "wandb").glob("offline-run-*/*.wandb"))
    log.write_bytes(b"no log of wandb's")
    with open_tracker(job, manifest):
        pass
    assert [row["rollout"] for row in history_of(records(run_dir, 1))] == [0, 1, 2]


# Without W&B ------------------------------------------------------------------


def test_tracker_none_starts_nothing_and_imports_nothing(tmp_path):
    run_dir, job, manifest = run_of(tmp_path, mode="none")
    with open_tracker(job, manifest) as tracker:
        assert type(tracker) is Tracker
        tracker.finish(seal(run_dir))
    assert (tracker.warning, tracker.url) == (None, None)
    assert not (run_dir / "wandb").exists()


def test_online_without_a_server_falls_back_to_offline_with_one_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_API_KEY", "local" + "0" * 40)
    run_dir, _, manifest = run_of(tmp_path, mode="online")
    job = make_job(run_dir, tracker__mode="online", tracker__init_timeout_s=3.0)
    with caplog.at_level(logging.WARNING), open_tracker(job, manifest) as tracker:
        tracker.finish(seal(run_dir))
    warnings = [record.message for record in caplog.records if record.name == "rlsp.report.tracker"]
    assert len(warnings) == 1
    assert warnings[0].startswith("W&B cannot be reached, this run is kept offline")
    assert tracker.warning == warnings[0]
    assert len(history_of(records(run_dir))) == 3


def test_online_without_an_account_falls_back_to_offline(tmp_path):
    run_dir, _, manifest = run_of(tmp_path, mode="online")
    job = make_job(run_dir, tracker__mode="online", tracker__init_timeout_s=3.0)
    with open_tracker(job, manifest) as tracker:
        tracker.finish(seal(run_dir))
    assert tracker.warning is not None
    assert len(history_of(records(run_dir))) == 3


def break_wandb(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    import wandb

    def explode(*_: Any, **__: Any) -> None:
        raise RuntimeError("W&B is broken today")

    owner = {
        "init": wandb,
        "log": wandb.Run,
        "log_artifact": wandb.Run,
        "save": wandb.Run,
        "finish": wandb.Run,
    }[place]
    monkeypatch.setattr(owner, place, explode)


@pytest.mark.parametrize("place", ["init", "log", "log_artifact", "save", "finish"])
def test_whatever_breaks_in_wandb_the_run_goes_on_with_one_warning(tmp_path, monkeypatch, caplog, place):
    run_dir, job, manifest = run_of(tmp_path)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        break_wandb(patch, place)
        with open_tracker(job, manifest) as tracker:
            judgement = seal(run_dir)
            tracker.finish(judgement)
    warnings = [record.message for record in caplog.records if record.name == "rlsp.report.tracker"]
    assert len(warnings) == 1
    assert "W&B is broken today" in warnings[0]
    assert judgement.exit_status == 0


def test_the_place_where_wandb_stages_is_put_back(finished):
    import wandb.env

    assert wandb.env.get_data_dir.__module__ == "wandb.env"
    assert not (finished[0] / "data").exists()


# Following metrics.jsonl ------------------------------------------------------


def test_a_torn_last_line_is_waited_for(tmp_path):
    path, follower = tmp_path / "metrics.jsonl", Follower(tmp_path)
    assert follower.new_rows() == []
    path.write_text('{"rollout": 0, "train/loss": 1.0}\n{"rollout": 1, "train/l')
    assert [row["rollout"] for row in follower.new_rows()] == [0]
    assert follower.new_rows() == []
    with path.open("a") as file:
        file.write('oss": 2.0}\n')
    assert follower.new_rows() == [{"rollout": 1, "train/loss": 2.0}]
    assert follower.new_rows() == []


def test_rows_that_a_resumed_run_takes_back_are_not_handed_out_twice(tmp_path):
    path, follower = tmp_path / "metrics.jsonl", Follower(tmp_path, first=1)
    path.write_text("".join(f'{{"rollout": {i}}}\n' for i in range(3)))
    assert [row["rollout"] for row in follower.new_rows()] == [1, 2]
    path.write_text('{"rollout": 0}\n')
    assert follower.new_rows() == []
    path.write_text("".join(f'{{"rollout": {i}}}\n' for i in range(5)))
    assert [row["rollout"] for row in follower.new_rows()] == [3, 4]


def test_a_line_that_is_no_row_is_an_error_that_names_the_file(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{broken\n")
    with pytest.raises(EvidenceError, match=r"metrics\.jsonl is damaged"):
        Follower(tmp_path).new_rows()


def test_rows_arrive_while_the_run_goes_on(tmp_path, monkeypatch):
    import wandb

    sent: list[int] = []
    log = wandb.Run.log

    def noted(self: Any, data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        assert not args
        assert not kwargs  # never step=
        sent.append(data["rollout"])
        log(self, data)

    monkeypatch.setattr(wandb.Run, "log", noted)
    run_dir, job, manifest = run_of(tmp_path)
    rows = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").unlink()
    with open_tracker(job, manifest) as tracker:
        assert isinstance(tracker, WandbTracker)
        for count, row in enumerate(rows, start=1):
            with (run_dir / "metrics.jsonl").open("a") as file:
                file.write(row)
            until_s = time.monotonic() + WAIT_S
            while len(sent) < count and time.monotonic() < until_s:
                time.sleep(0.05)
            assert sent == list(range(count))
