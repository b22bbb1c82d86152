"""`rlsp-verify` on a sweep's folder: every job is judged again, and sweep.json held against their files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from compare_fixtures import LAYOUT_A, LAYOUT_B, flip, in_update, make_run
from report_fixtures import NAMES, edit_json

from rlsp.cli.verify import main
from rlsp.report import manifest as manifest_file
from rlsp.report.sweep import JobOutcome, SweepSummary, summarise
from rlsp.report.verify_sweep import SweepVerification, verify_sweep

OVERRIDES = ("seed=7",)
REFUSED = JobOutcome(2, ("seed=-1",), 2, Path("nowhere"))


@pytest.fixture(scope="module", autouse=True)
def one_revision() -> Iterator[None]:
    """Ask git once: its answer takes longer than everything else here."""
    with pytest.MonkeyPatch.context() as patch:
        revision = manifest_file.code_revision()
        patch.setattr(manifest_file, "code_revision", lambda: revision)
        yield


def outcome(number: int, folder: Path, status: int = 0) -> JobOutcome:
    return JobOutcome(number, OVERRIDES, status, folder / str(number))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep") / "sweep_x"
    make_run(folder / "0", LAYOUT_A)
    make_run(folder / "1", LAYOUT_B)
    summary = summarise(folder, [outcome(0, folder), outcome(1, folder)])
    assert not summary.disagrees
    assert summary.groups[0].jobs == (0, 1)
    return folder


@pytest.fixture
def sweep(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "sweep_x"))


def damaged(sweep: Path) -> tuple[str, ...]:
    verification = verify_sweep(sweep)
    assert verification.exit_status == 3
    return verification.damage


def test_a_sweep_that_is_as_it_was_passes(sweep):
    verification = verify_sweep(sweep)
    assert (verification.damage, verification.disagrees, verification.exit_status) == ((), False, 0)
    assert [(job.number, job.folder, job.exit_status) for job in verification.jobs] == [
        (0, "0", 0),
        (1, "1", 0),
    ]
    (group,) = SweepSummary.read(sweep / "sweep.json").groups
    assert verification.sentences == (group.sentence,)


def edited(change: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    return lambda said: change(said["jobs"][1])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (edited(lambda job: job.update(verdict="FAIL")), "verdict is FAIL, but its files give PASS"),
        (edited(lambda job: job.update(active_tokens=1)), "active_tokens is 1, but its files give "),
        (edited(lambda job: job.update(weights_digest="0" * 64)), f"weights_digest is {'0' * 64}, but"),
        (edited(lambda job: job.update(run_id=None)), "run_id is absent, but its files give "),
        (edited(lambda job: job.update(complete=False)), "complete is false, but its files give true"),
        (edited(lambda job: job["gradient_norm_bits"].pop()), "gradient_norm_bits is "),
        (edited(lambda job: job["layout"].update(dp=7)), "layout is dp: 7, cp: 1, tp: 4, sp: 1, but"),
        (edited(lambda job: job.update(overrides=["seed=8"])), "overrides is seed=8, but manifest.json says"),
        (edited(lambda job: job.update(status=4)), "it ended with status 4, but VERDICT.json says PASS"),
        (edited(lambda job: job.update(folder="7")), "its folder 7 is missing or holds no run"),
        (edited(lambda job: job.update(folder="\0")), "is missing or holds no run"),
        (edited(lambda job: job.update(folder=None)), "folder is absent, but its files give 1"),
    ],
)
def test_what_sweep_json_says_of_a_job_must_be_what_its_files_say(sweep, change, said):
    edit_json(sweep / "sweep.json", change)
    found = [line for line in damaged(sweep) if line.startswith("sweep.json, job 1: ")]
    assert any(said in line for line in found), found


def test_groups_that_the_files_do_not_give_are_named(sweep):
    edit_json(sweep / "sweep.json", lambda said: said["groups"][0].update(weights=[[0], [1]]))
    (said,) = damaged(sweep)
    assert said.startswith("sweep.json: its groups are not those that the jobs' files give: 2 layouts")


def test_a_job_that_is_not_listed_is_verified_and_named(sweep):
    edit_json(sweep / "sweep.json", lambda said: said.update(jobs=said["jobs"][:1]))
    damage = damaged(sweep)
    assert "1 is a run folder that sweep.json does not list" in damage
    assert [job.number for job in verify_sweep(sweep).jobs] == [0, None]


def test_a_job_that_is_listed_twice_is_named(sweep):
    edit_json(sweep / "sweep.json", lambda said: said.update(jobs=[said["jobs"][0]] * 2))
    assert "sweep.json lists a job twice" in damaged(sweep)


def test_damage_to_a_jobs_files_is_damage_to_the_sweep(sweep):
    path = sweep / "1" / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-2])
    verification = verify_sweep(sweep)
    assert (verification.damage, verification.exit_status) == ((), 3)
    assert "metrics.jsonl was changed after the run was sealed" in verification.jobs[1].verification.damage


def test_a_lost_job_is_named(sweep):
    shutil.rmtree(sweep / "0")
    assert "sweep.json, job 0: its folder 0 is missing or holds no run" in damaged(sweep)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.write_bytes(b"[" * 100_000), None])
def test_a_sweep_json_that_cannot_be_read_leaves_the_jobs_verified(sweep, make):
    (sweep / "sweep.json").unlink()
    (sweep / "multirun.yaml").write_text("hydra: {}\n")
    if make is not None:
        make(sweep / "sweep.json")
    verification = verify_sweep(sweep)
    assert verification.damage[0].startswith("sweep.json ")
    assert [job.exit_status for job in verification.jobs] == [0, 0]
    assert verification.exit_status == 3


def test_jobs_that_disagree_fail_the_sweep_without_being_damaged(tmp_path):
    make_run(tmp_path / "0", LAYOUT_A)
    change = in_update(lambda update: flip(update["weights"], NAMES[0]), hit=2)
    make_run(tmp_path / "1", LAYOUT_B, digests=change)
    assert summarise(tmp_path, [outcome(0, tmp_path), outcome(1, tmp_path)]).disagrees
    verification = verify_sweep(tmp_path)
    assert (verification.is_damaged, verification.disagrees, verification.exit_status) == (False, True, 3)
    assert "2 weights digests (job 0; job 1)" in verification.sentences[0]


def with_jobs(folder: Path, *outcomes: JobOutcome) -> SweepVerification:
    summarise(folder, outcomes)
    return verify_sweep(folder)


def test_the_status_is_the_worst_of_the_jobs(tmp_path):
    make_run(tmp_path / "0", LAYOUT_A)
    make_run(tmp_path / "1", LAYOUT_B, rollouts=1, aborted="rank 1 was killed")
    refused = with_jobs(tmp_path, outcome(0, tmp_path), REFUSED)
    assert "1 is a run folder that sweep.json does not list" in refused.damage
    aborted = with_jobs(tmp_path, outcome(0, tmp_path), outcome(1, tmp_path, 1), REFUSED)
    assert (aborted.damage, aborted.exit_status) == ((), 1)
    assert [job.exit_status for job in aborted.jobs] == [0, 1, 2]
    shutil.rmtree(tmp_path / "1")
    assert with_jobs(tmp_path, outcome(0, tmp_path), REFUSED).exit_status == 2


@pytest.mark.parametrize("folder", [None, "1"])
def test_a_job_that_ended_after_its_sweep_is_a_note_and_no_damage(written, tmp_path, capsys, folder):
    sweep = Path(shutil.copytree(written, tmp_path / "sweep_x"))
    late = JobOutcome(1, OVERRIDES, None, sweep / "1")
    summarise(sweep, [outcome(0, sweep), late])
    edit_json(sweep / "sweep.json", edited(lambda job: job.update(folder=folder)))
    verification = verify_sweep(sweep)
    assert (verification.damage, verification.exit_status) == ((), 0)
    said = "job 1 had not ended when sweep.json was written; by now VERDICT.json says PASS"
    assert verification.notes == (said,)
    assert main([str(sweep)]) == 0
    assert f"note: {said}\n" in capsys.readouterr().out


def test_a_job_that_ended_after_its_sweep_is_judged_all_the_same(sweep, written):
    summarise(sweep, [outcome(0, sweep), JobOutcome(1, OVERRIDES, None, sweep / "1")])
    (sweep / "1" / "metrics.jsonl").unlink()
    assert verify_sweep(sweep).exit_status == 3
    edit_json(sweep / "sweep.json", edited(lambda job: job.update(verdict="PASS")))
    assert "sweep.json, job 1: verdict is PASS, but its files give absent" in damaged(sweep)


def test_a_copy_of_a_sweep_passes_elsewhere(sweep, tmp_path):
    assert verify_sweep(shutil.move(sweep, tmp_path / "ü elsewhere")).exit_status == 0


def test_the_command_shows_a_table_and_the_sentence(sweep, capsys):
    assert main([str(sweep)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["job", "folder", "run", "verdict", "why"]
    assert [line.split()[3] for line in lines[1:3]] == ["PASS", "PASS"]
    assert "one weights digest" in lines[3]
    assert lines[-1] == "sweep_x, 2 jobs: PASS"
    edit_json(sweep / "sweep.json", edited(lambda job: job.update(active_tokens=1)))
    assert main([str(sweep)]) == 3
    out = capsys.readouterr().out
    assert "damaged: sweep.json, job 1: active_tokens is 1" in out
    assert out.endswith("sweep_x, 2 jobs: DAMAGED\n")


def test_the_command_prints_a_sweep_as_one_json_object(sweep, capsys):
    assert main(["--json", str(sweep)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["exit_status"], said["damage"], said["disagrees"]) == (0, [], False)
    assert [job["run"]["verdict"] for job in said["jobs"]] == ["PASS", "PASS"]
    assert len(said["groups"]) == 1
