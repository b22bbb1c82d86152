"""What `rlsp -m` checks before its first job, and how one job leaves the others alone."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

import pytest
from command import Console
from hydra._internal.hydra import Hydra

from rlsp.cli import app, sweep
from rlsp.cli.folders import taken_run
from rlsp.config import Job
from rlsp.report.statuses import worst
from rlsp.report.sweep import SweepSummary

NOT_NEGATIVE = "a number in 0..1000000"


def test_a_sweep_runs_layouts_of_different_sizes_in_numbered_folders(rlsp_command: Console) -> None:
    assert rlsp_command("-m", "parallel=cp1_tp1_sp1,cp2_tp4_sp4", "entropy_coef=0,0.01") == 0
    assert [job.config.world_size for job in rlsp_command.jobs] == [1, 1, 8, 8]
    assert [Path(job.run_dir).name for job in rlsp_command.jobs] == ["0", "1", "2", "3"]
    (sweep,) = {Path(job.run_dir).parent.name for job in rlsp_command.jobs}
    assert sweep.startswith("sweep_")
    assert {job.config.tracker.group for job in rlsp_command.jobs} == {sweep}
    assert len({job.run_id for job in rlsp_command.jobs}) == 4


def test_a_stated_group_is_kept_under_a_sweep(rlsp_command: Console) -> None:
    assert rlsp_command("-m", "tracker.group=ours", "seed=0,1") == 0
    assert [job.config.tracker.group for job in rlsp_command.jobs] == ["ours", "ours"]


def test_a_crash_does_not_end_a_sweep_and_its_status_wins(rlsp_command: Console) -> None:
    def outcome(job: Job) -> int:
        if job.config.seed == 1:
            raise SystemExit(0)
        return 3

    rlsp_command.outcome = outcome
    assert rlsp_command("-m", "seed=0,1,2") == 1
    assert len(rlsp_command.jobs) == 3


def test_a_refused_job_leaves_no_folder_and_the_others_run(rlsp_command: Console) -> None:
    assert rlsp_command("-m", "parallel.tp=3,2", "num_rollouts=1") == 2
    assert [job.config.parallel.tp for job in rlsp_command.jobs] == [2]
    reason = "parallel.tp=3: legal: 1, 2, 4, 8 (divisors of numerics.virtual_tp)"
    assert rlsp_command.errors.splitlines()[:4] == [
        "rlsp: these jobs will be refused, the others run:",
        f"  job 0 (parallel.tp=3): {reason}",
        "rlsp: job 0 refused:",
        f"  {reason}",
    ]
    sweep = Path(rlsp_command.jobs[0].run_dir).parent
    assert sorted(path.name for path in sweep.iterdir()) == ["1", "multirun.yaml", "sweep.json"]


def test_a_sweep_of_refused_jobs_alone_leaves_nothing(rlsp_command: Console) -> None:
    assert rlsp_command("-m", "seed=0,1", "entropy_coef=-1") == 2
    assert rlsp_command.left() == []


def test_all_reasons_of_a_sweep_that_is_refused_whole_are_listed(rlsp_command: Console) -> None:
    assert rlsp_command("-m", "parallel.tp=3,5", "entropy_coef=-1") == 2
    divisors = "legal: 1, 2, 4, 8 (divisors of numerics.virtual_tp)"
    assert rlsp_command.errors.splitlines() == [
        "rlsp: refused, nothing was started:",
        f"  entropy_coef=-1.0: legal: {NOT_NEGATIVE}",
        f"  job 0 (parallel.tp=3): parallel.tp=3: {divisors}",
        f"  job 1 (parallel.tp=5): parallel.tp=5: {divisors}",
    ]


@pytest.mark.parametrize(
    ("swept", "line"),
    [
        ("seed=range(0,1000000000000)", "seed=range(0,1000000000000): legal: at most 1000 values"),
        ("seed=shuffle(range(0,1000000000000))", "legal: at most 1000 values"),
        ("kl_coef=range(0.0,1.0,0.0000001)", "legal: at most 1000 values"),
        ("seed=range(5,5)", "the sweep has 0 jobs: legal: 1 to 1000"),
    ],
)
def test_a_sweep_without_end_is_refused_at_once(rlsp_command: Console, swept: str, line: str) -> None:
    assert rlsp_command("-m", swept) == 2
    assert line in rlsp_command.errors
    assert rlsp_command.left() == []


def test_a_product_of_sweeps_without_end_is_refused(rlsp_command: Console) -> None:
    many = ",".join(map(str, range(1, 12)))
    assert rlsp_command("-m", f"seed={many}", f"num_rollouts={many}", f"micro_batch_size={many}") == 2
    assert "the sweep has 1331 jobs: legal: 1 to 1000" in rlsp_command.errors


def test_no_experiment_can_be_asked_for(rlsp_command: Console) -> None:
    assert rlsp_command("experiment=null", "seed=4") == 0
    assert rlsp_command.jobs[0].config.seed == 4
    assert rlsp_command("-m", "experiment=null,g11_probe") == 2
    assert ", g11_probe, layout_probe" in rlsp_command.errors
    assert ", null (alone, not in a sweep)" in rlsp_command.errors


def test_a_sweep_that_cannot_be_composed_is_refused_whole(rlsp_command: Console) -> None:
    assert rlsp_command("-m", "seed=0,1", "parallel.tp=2,x", "bar=1,2", "foo", "kl_coef=interval(0,1)") == 2
    named = [line.strip().partition(":")[0] for line in rlsp_command.errors.splitlines()[1:]]
    assert named == ["foo", "kl_coef=interval(0,1)", "parallel.tp=x", "bar=1", "bar=2"]
    assert rlsp_command.left() == []
    assert rlsp_command.jobs == []


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [([0, 0], 0), ([0, 4], 4), ([4, 3, 0], 3), ([3, 2, 4], 2), ([2, 1, 3], 1), ([], 0), ([0, 77], 1)],
)
def test_the_worst_status_of_a_sweep_is_the_first_of_1_2_3_4_0(
    statuses: Iterable[int], expected: int
) -> None:
    assert worst(statuses) == expected


def test_an_interrupted_sweep_keeps_the_jobs_so_far_with_the_right_states(rlsp_command: Console) -> None:
    def outcome(job: Job) -> int:
        if job.config.parallel.tp == 2:
            raise KeyboardInterrupt
        return 0

    rlsp_command.outcome = outcome
    assert rlsp_command("-m", "hydra.sweep.dir=swept", "parallel.sp=1", "parallel.tp=3,1,2,4") == 1
    assert rlsp_command.errors.splitlines()[-1] == "rlsp: interrupted"
    jobs = SweepSummary.read(rlsp_command.folder / "swept" / "sweep.json").jobs
    # The stand-in seals nothing: job 1 came to its end without a verdict.
    assert [job.status for job in jobs] == [2, 1, 1, None]
    assert [job.folder for job in jobs] == [None, "1", "2", None]
    assert "job 3 (not started)" in rlsp_command.printed


def test_a_sweeper_whose_jobs_are_not_known_before_is_refused(rlsp_command: Console) -> None:
    assert rlsp_command("-m", "hydra.sweeper._target_=somebody.else.Sweeper", "seed=1,2") == 2
    assert "hydra/sweeper: somebody.else.Sweeper: legal: basic" in rlsp_command.errors
    assert rlsp_command.left() == []


def test_values_that_a_config_sweeps_over_are_planned_like_those_of_the_command_line(
    rlsp_command: Console,
) -> None:
    folder = rlsp_command.folder / "mine" / "experiment"
    folder.mkdir(parents=True)
    (folder / "swept.yaml").write_text(
        "# @package _global_\nhydra: {sweeper: {params: {parallel.tp: '1,2,3'}}}\n"
    )
    assert rlsp_command("--config-dir", "mine", "-m", "experiment=swept", "parallel.sp=1") == 2
    assert [job.config.parallel.tp for job in rlsp_command.jobs] == [1, 2]
    assert "job 2 (parallel.tp=3): parallel.tp=3: legal" in rlsp_command.errors


def test_a_sweep_that_breaks_off_keeps_the_jobs_so_far(
    rlsp_command: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    multirun = Hydra.multirun

    def broken(*arguments: object, **named: object) -> object:
        multirun(*arguments, **named)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Hydra, "multirun", broken)
    assert rlsp_command("-m", "hydra.sweep.dir=swept", "seed=1,2") == 1
    assert "rlsp: the sweep broke off: OSError: [Errno 28] No space left on device" in rlsp_command.errors
    jobs = SweepSummary.read(rlsp_command.folder / "swept" / "sweep.json").jobs
    assert [job.folder for job in jobs] == ["0", "1"]


def test_a_job_that_still_has_an_owner_is_neither_sealed_nor_judged(
    rlsp_command: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "_OWNER_LIMIT_S", 0.2)
    held = ExitStack()

    def outcome(job: Job) -> int:
        raise KeyboardInterrupt  # the launcher is broken off, and the job's own process goes on

    def kept(run_dir: Path) -> AbstractContextManager[None]:
        held.enter_context(taken_run(run_dir))
        return nullcontext()

    monkeypatch.setattr(app, "taken_run", kept)
    rlsp_command.outcome = outcome
    with held:
        assert rlsp_command("-m", "hydra.sweep.dir=swept", "seed=1,2") == 1
    assert (
        f"rlsp: job 0 goes on; {rlsp_command.folder / 'swept' / '0'} will say how it ends"
        in rlsp_command.errors
    )
    jobs = SweepSummary.read(rlsp_command.folder / "swept" / "sweep.json").jobs
    assert [(job.status, job.folder) for job in jobs] == [(None, None), (None, None)]
    assert not (rlsp_command.folder / "swept" / "0" / "VERDICT.json").exists()
