"""A run whose owner was killed goes on as one W&B run in another layout: every row once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launch_owner import processes_naming
from test_wandb_server import ROOT, command, home, no_account, rows_of, server, sync  # noqa: F401  (fixtures)
from wandb_answers import StoredRun
from wandb_server import WandbServer, client_environment

from rlsp.report.files import sha256_file
from rlsp.report.mirror import FILES
from rlsp.report.verdict import verify

GIVEN = (
    "parallel=cp1_tp1_sp1",
    "num_rollouts=5",
    "prompts_per_rollout=2",
    "samples_per_prompt=2",
    "max_response_tokens=8",
    "entropy_coef=0.01",
    "checkpoint.every=2",
)
BY_SEGMENT = ("time/", "memory/", "comm/")
"""What depends on the segment that made a row: its machine, and its layout."""


def kill_owner(home: Path, server: WandbServer, run_dir: Path, *overrides: str) -> None:  # noqa: F811
    """Start a run and kill its owner once three rows are written: rollout 2 is not in a checkpoint.

    The ranks stand still from the third row on: a fast machine would end the run before its owner is killed.
    """
    environment = {**os.environ, **client_environment(home, server.url), "PYTHONPATH": str(ROOT)}
    given = ["rlsp", *GIVEN, f"hydra.run.dir={run_dir}", *overrides]
    owner = subprocess.Popen([sys.executable, "-m", *given], env=environment, cwd=home)
    until_s = time.monotonic() + 120
    rows = run_dir / "metrics.jsonl"
    while not rows.exists() or rows.read_bytes().count(b"\n") < 3:
        assert owner.poll() is None
        assert time.monotonic() < until_s
        time.sleep(0.01)
    for pid in processes_naming(f"{run_dir}/.hydra"):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(1.0)  # for the tracker to have seen it
    assert owner.poll() is None
    assert rows.read_bytes().count(b"\n") < 5
    owner.kill()
    owner.wait()


def alike(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if not name.startswith(BY_SEGMENT)} for row in rows]


def assert_one_whole_run(stored: StoredRun, run_dir: Path) -> None:
    """Compare what arrived with the local files; a rollout made again may be shown by either segment."""
    assert [row["rollout"] for row in stored.rows] == list(range(5))
    assert alike(stored.rows) == alike(rows_of(run_dir))
    assert (stored.summary["verdict"], stored.exit_code) == ("PASS", 0)
    assert stored.summary["manifest_sha256"] == sha256_file(run_dir / "manifest.json")
    assert stored.config["parallel"]["tp"] == 2
    for name in FILES:
        assert stored.files[name] == (run_dir / name).read_bytes(), name


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_a_run_whose_owner_was_killed_goes_on_as_one(
    home: Path,  # noqa: F811
    server: WandbServer,  # noqa: F811
    tmp_path: Path,
    mode: str,
) -> None:
    run_dir = tmp_path / "run"
    kill_owner(home, server, run_dir, f"tracker={mode}")
    ran = command(home, server, "rlsp", f"resume={run_dir}", "parallel=cp1_tp2_sp2")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    if mode == "offline":
        assert server.runs == {}
        assert len(list((run_dir / "wandb").glob("offline-run-*"))) == 2
        sync(home, server, run_dir)
    run_id = json.loads((run_dir / "manifest.json").read_text())["run_id"]
    assert list(server.runs) == [run_id]
    assert_one_whole_run(server.runs[run_id], run_dir)
    assert verify(run_dir).damage == ()
