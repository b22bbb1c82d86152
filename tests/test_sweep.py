"""The end of a sweep: sweep.json, the table, and the sentence that says whether the layouts agree."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command import LIGHT
from report_fixtures import (
    NAMES,
    digest_of,
    fit_facts,
    make_digests,
    make_facts,
    make_startup,
    make_tensors,
    weights,
)

import rlsp.launch
from rlsp.cli import main as cli
from rlsp.config import Job
from rlsp.report import manifest as manifest_file
from rlsp.report import verdict
from rlsp.report.consistency import RolloutFacts, float64_bits
from rlsp.report.digests import RolloutDigests
from rlsp.report.recorder import Recorder
from rlsp.report.sweep import SweepSummary

ROLLOUTS = 2
SWEPT = (LIGHT, "num_rollouts=2", "tracker=none", "prompts_per_rollout=2")


def leave_evidence(job: Job, change: Callable[[int, dict[str, Any]], None], rollouts: int) -> int:
    """Do what a launcher would: write and seal a run whose results do not depend on its layout."""
    manifest = manifest_file.begin(job, {})
    manifest_file.add_startup(job.run_dir, make_startup(manifest))
    with Recorder(job.run_dir) as recorder:
        for index in range(rollouts):
            tensors = make_tensors(index)
            facts = make_facts(index, tensors)
            facts["cp_tokens"] = (int(tensors["active_mask"].sum()), *[0] * (job.config.parallel.cp - 1))
            digests = make_digests(index, facts)
            change(index, digests)
            fit_facts(facts, digests)
            recorder.rollout(index, tensors, RolloutFacts(**facts), {}, digests=RolloutDigests(**digests))
    aborted = None if rollouts == job.config.num_rollouts else "rank 1 was killed by SIGKILL"
    status = manifest_file.Status.FINISHED if aborted is None else manifest_file.Status.ABORTED
    manifest_file.finish(job.run_dir, "2026-01-02T03:05:05+00:00", status, aborted)
    return verdict.seal(job.run_dir, aborted).exit_status


class Sweep:
    """Run `rlsp -m` in an empty folder, with `outcome` in place of the launcher."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
    ) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys
        self.folder = folder / "swept"
        self.rollouts: Callable[[Job], int] = lambda job: job.config.num_rollouts
        self.change: Callable[[Job, int, dict[str, Any]], None] = lambda job, index, digests: None
        self.printed = ""
        monkeypatch.chdir(folder)
        monkeypatch.setattr(rlsp.launch, "execute", self._execute)

    def __call__(self, *arguments: str) -> int:
        fixed = ("-m", f"hydra.sweep.dir={self.folder}", *SWEPT)
        self._monkeypatch.setattr(sys, "argv", ["rlsp", *fixed, *arguments])
        status = cli.main()
        self.printed, self.errors = self._capsys.readouterr()
        assert "Traceback" not in self.errors
        return status

    @property
    def summary(self) -> SweepSummary:
        return SweepSummary.read(self.folder / "sweep.json")

    def _execute(self, job: Job) -> int:
        return leave_evidence(job, lambda *said: self.change(job, *said), self.rollouts(job))


@pytest.fixture
def sweep(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Sweep]:
    revision = manifest_file.code_revision()
    monkeypatch.setattr(manifest_file, "code_revision", lambda: revision)
    handlers, level = list(logging.root.handlers), logging.root.level
    yield Sweep(monkeypatch, capsys, tmp_path)
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


def flip(table: dict[str, list[str]], name: str, shard: int) -> None:
    table[name][shard] = f"{int(table[name][shard], 16) ^ 1:032x}"


def test_layouts_that_agree_are_said_to(sweep):
    assert sweep("parallel=cp1_tp1_sp1,cp1_tp2_sp2,cp2_tp4_sp4") == 0
    sentence = "3 layouts, one weights digest, one list of gradient norms, one optimizer digest"
    assert sentence in sweep.printed.splitlines()
    (group,) = sweep.summary.groups
    assert (group.sentence, group.jobs, group.settings) == (sentence, (0, 1, 2), {})
    assert group.agrees
    assert "left out" not in sweep.printed


def test_sweep_json_says_everything_about_a_job(sweep):
    assert sweep("parallel=cp1_tp1_sp1,cp2_tp4_sp4") == 0
    said = json.loads((sweep.folder / "sweep.json").read_text())
    job = said["jobs"][1]
    assert (job["number"], job["status"], job["verdict"], job["folder"]) == (1, 0, "PASS", "1")
    assert job["overrides"] == [*SWEPT, "parallel=cp2_tp4_sp4"]
    assert job["layout"] == {"dp": 1, "cp": 2, "tp": 4, "sp": 4}
    assert job["rollout_layout"] == {"tp": 1, "engines": 8}
    assert job["active_tokens"] == sum(int(make_tensors(i)["active_mask"].sum()) for i in range(ROLLOUTS))
    assert (job["mismatched_tokens"], job["mismatched_rows"], job["complete"]) == (0, 0, True)
    assert job["weights_digest"] == weights(ROLLOUTS)
    assert job["optimizer_digest"] == digest_of("optimizer", ROLLOUTS - 1)
    assert job["gradient_norm_bits"] == [float64_bits(0.5), float64_bits(0.5 + 1 / 7)]
    assert job["run_id"] == manifest_file.Manifest.read(sweep.folder / "1" / "manifest.json").run_id


@pytest.mark.parametrize(
    ("swept", "counted"),
    [
        ("micro_batch_size=1,2,3", "3 micro-batch sizes"),
        ("rollout.tp=1,2", "2 rollout layouts"),
        ("launch.timeout_s=60,61", "2 equal jobs"),
    ],
)
def test_what_was_swept_is_what_is_counted(sweep, swept, counted):
    assert sweep("parallel=cp1_tp2_sp2", swept) == 0
    assert f"{counted}, one weights digest, one list of gradient norms" in sweep.printed


def test_a_layout_that_differs_is_named_and_fails_the_sweep(sweep):
    def change(job: Job, index: int, digests: dict[str, Any]) -> None:
        if job.config.parallel.tp == 2 and index == ROLLOUTS - 1:
            flip(digests["updates"][0]["weights"], NAMES[1], 3)

    sweep.change = change
    assert sweep("parallel=cp1_tp1_sp1,cp1_tp2_sp2,cp1_tp4_sp4") == 3
    (group,) = sweep.summary.groups
    assert group.weights == ((0, 2), (1,))
    assert group.sentence == (
        "3 layouts, 2 weights digests (jobs 0, 2; job 1), one list of gradient norms, one optimizer digest"
    )
    assert "in the sweep's folder, rlsp-compare 0 1 names the first difference" in sweep.printed
    # Each job by itself passed: only side by side are they wrong.
    assert [job.status for job in sweep.summary.jobs] == [0, 0, 0]


def test_one_ulp_in_a_norm_and_one_bit_of_optimizer_state_are_seen(sweep):
    def change(job: Job, index: int, digests: dict[str, Any]) -> None:
        update = digests["updates"][0]
        if job.config.parallel.cp == 2 and index == 0:
            bits = f"{int(update['gradient_norm_bits'], 16) + 1:016x}"
            update.update(gradient_norm_bits=bits, gradient_norm=0.5000000000000001)
        if job.config.parallel.tp == 2 and index == ROLLOUTS - 1:
            flip(update["optimizer"], f"exp_avg/{NAMES[1]}", 0)

    sweep.change = change
    assert sweep("parallel=cp1_tp1_sp1,cp1_tp2_sp2,cp2_tp1_sp1") == 3
    (group,) = sweep.summary.groups
    assert (len(group.weights), group.gradient_norms, group.optimizer) == (1, ((0, 1), (2,)), ((0, 2), (1,)))


def test_jobs_of_different_settings_need_not_agree_and_are_grouped(sweep):
    def change(job: Job, index: int, digests: dict[str, Any]) -> None:
        if job.config.entropy_coef:
            flip(digests["updates"][0]["optimizer"], f"master/{NAMES[1]}", 0)

    sweep.change = change
    assert sweep("parallel=cp1_tp1_sp1,cp1_tp2_sp2", "entropy_coef=0,0.01") == 0
    assert [group.jobs for group in sweep.summary.groups] == [(0, 2), (1, 3)]
    assert [group.settings for group in sweep.summary.groups] == [
        {"entropy_coef": 0.0},
        {"entropy_coef": 0.01},
    ]
    for value in ("0.0", "0.01"):
        assert f"entropy_coef={value}: 2 layouts, one weights digest, one list" in sweep.printed


def test_a_job_alone_is_said_to_prove_nothing(sweep):
    assert sweep("seed=1,2") == 0
    assert "seed=1: job 0 alone: no other job must agree with it" in sweep.printed


def test_refused_crashed_and_aborted_jobs_stand_in_the_table_and_are_left_out(sweep):
    def rollouts(job: Job) -> int:
        if job.config.parallel.tp == 4:
            raise RuntimeError("disk on fire")
        return 1 if job.config.parallel.tp == 8 else ROLLOUTS

    sweep.rollouts = rollouts
    assert sweep("parallel.sp=1", "parallel.tp=1,2,3,4,8") == 1
    jobs = sweep.summary.jobs
    assert [job.status for job in jobs] == [0, 0, 2, 1, 1]
    assert [job.folder for job in jobs] == ["0", "1", None, "3", "4"]
    assert [job.verdict.value if job.verdict else None for job in jobs] == [
        "PASS",
        "PASS",
        None,
        None,
        "ABORTED",
    ]
    assert [job.complete for job in jobs] == [True, True, False, False, False]
    assert (jobs[2].layout, jobs[2].weights_digest) == (None, None)
    assert jobs[4].weights_digest == weights(1)
    assert "2 layouts, one weights digest" in sweep.printed
    assert "left out: job 2 (refused), job 3 (crashed), job 4 (ABORTED)" in sweep.printed
    lines = sweep.printed.splitlines()
    assert [line.split()[:3] for line in lines if line[:1].isdigit()][:5] == [
        ["0", "PASS", "parallel.tp=1"],
        ["1", "PASS", "parallel.tp=2"],
        ["2", "refused", "parallel.tp=3"],
        ["3", "crashed", "parallel.tp=4"],
        ["4", "ABORTED", "parallel.tp=8"],
    ]


def test_a_sweep_without_a_complete_job_claims_nothing(sweep):
    sweep.rollouts = lambda job: 0
    assert sweep("parallel=cp1_tp1_sp1,cp1_tp2_sp2") == 1
    assert sweep.summary.groups == ()
    assert "digest," not in sweep.printed


def test_a_summary_that_cannot_be_written_is_a_crash(sweep, monkeypatch):
    from rlsp.report import sweep as report

    def refuse(*_: object) -> None:
        raise report.EvidenceError("cannot write sweep.json: No space left on device")

    monkeypatch.setattr(report.SweepSummary, "write", refuse)
    assert sweep("parallel=cp1_tp1_sp1,cp1_tp2_sp2") == 1
    assert sweep.errors == "rlsp: cannot write sweep.json: No space left on device\n"
