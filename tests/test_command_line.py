"""The `rlsp` command: what it refuses, in which words, with which status, and what it leaves behind."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

import rlsp.launch
from rlsp.cli.compose import new_id
from rlsp.cli.main import main, worst
from rlsp.config import Job

EXPERIMENTS = (
    "g00, g01, g10, g11, g11_probe, layout_probe, m000, m001, m010, m011, m100, m101, m110, m111, suite"
)
LAYOUTS = (
    "cp1_tp1_sp1, cp1_tp1_sp1_dp2, cp1_tp1_sp1_dp4, cp1_tp1_sp1_dp8, cp1_tp2_sp1, cp1_tp2_sp2, "
    "cp1_tp2_sp2_dp2, cp1_tp2_sp2_dp4, cp1_tp4_sp1, cp1_tp4_sp4, cp1_tp8_sp8, cp2_tp1_sp1, cp2_tp1_sp1_dp2, "
    "cp2_tp2_sp1, cp2_tp2_sp2, cp2_tp2_sp2_dp2, cp2_tp4_sp1, cp2_tp4_sp4, cp4_tp1_sp1, cp4_tp2_sp2"
)
NOT_NEGATIVE = "a finite number of at least 0"

# One bad override each, and the line that names it.
REFUSED = [
    ("entropy_coef=-0.1", f"entropy_coef=-0.1: legal: {NOT_NEGATIVE}"),
    ("entropy_coef=nan", f"entropy_coef=nan: legal: {NOT_NEGATIVE}"),
    ("entropy_coef=inf", f"entropy_coef=inf: legal: {NOT_NEGATIVE}"),
    ("entropy_coef=abc", f"entropy_coef=abc: legal: {NOT_NEGATIVE}"),
    ("entropy_coef=", f"entropy_coef='': legal: {NOT_NEGATIVE}"),
    ("entropy_coef=null", f"entropy_coef=null: legal: {NOT_NEGATIVE}"),
    ("entropy_coeff=1", "entropy_coeff=1: legal: a known key; did you mean entropy_coef?"),
    ("+entropy_coeff=1", "entropy_coeff=1: legal: a known key; did you mean entropy_coef?"),
    ("tp=2", "tp=2: legal: a known key; did you mean parallel.tp?"),
    ("no_such_thing=1", "no_such_thing=1: legal: a known key; `--cfg job` lists them"),
    ("temperature=-1", "temperature=-1.0: legal: a finite number above 0"),
    ("num_rollouts=0", "num_rollouts=0: legal: an integer of at least 1"),
    ("num_rollouts=1.5", "num_rollouts=1.5: legal: an integer of at least 1"),
    ("parallel.tp=3", "parallel.tp=3: legal: 1, 2, 4, 8 (divisors of numerics.virtual_tp)"),
    ("parallel=cp9", f"parallel=cp9: legal: {LAYOUTS}"),
    ("parallel=null", f"parallel=null: legal: {LAYOUTS}"),
    ("+parallel=cp1_tp1_sp1", "+parallel=cp1_tp1_sp1: Multiple values for parallel."),
    ("experiment=none_such", f"experiment=none_such: legal: {EXPERIMENTS}"),
    ("model.dtype=float16", "model.dtype=float16: legal: bfloat16 or float32"),
    ("resume=outputs", "resume=outputs: legal: null (resuming a run is not supported yet)"),
    ("tracker.tags=word", "tracker.tags=word: legal: a list, each item 1 to 64 characters"),
    (
        "launch=3",
        "launch=3: legal: nothing for the section itself; its keys: launch.timeout_s, launch.grace_s",
    ),
    ("seed=1,2", "seed=1,2: legal: one value; --multirun sweeps over several"),
    ("seed", "seed: legal: key=value, with quotes"),
    ("a=b=c", "a=b=c: legal: key=value, with quotes"),
    ("~seed", "seed=(missing): legal: an integer in 0..2^63-1"),
    ("name=???", "name: Missing mandatory value: name; legal: 1 to 64 letters"),
    ("name=${nowhere}", "name: Interpolation key 'nowhere' not found; legal: 1 to 64 letters"),
    ("hydra.nonsense=1", "hydra.nonsense=1: Could not override 'hydra.nonsense'."),
    ("hydra.run.dir=${nowhere}", "hydra.run.dir: Interpolation key 'nowhere' not found"),
]


class Console:
    """Run the command in an empty folder with a stand-in for the launcher."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
    ) -> None:
        self._monkeypatch, self._capsys, self.folder = monkeypatch, capsys, folder
        self.jobs: list[Job] = []
        self.outcome: Callable[[Job], int] = lambda job: 0
        self.errors = ""
        monkeypatch.chdir(folder)
        monkeypatch.setattr(rlsp.launch, "execute", self._execute)

    def __call__(self, *arguments: str) -> int:
        self._monkeypatch.setattr(sys, "argv", ["rlsp", *arguments])
        status = main()
        self.printed, self.errors = self._capsys.readouterr()
        assert "Traceback" not in self.errors
        return status

    def left(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*"))

    def _execute(self, job: Job) -> int:
        self.jobs.append(job)
        return self.outcome(job)


@pytest.fixture
def rlsp_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Console]:
    handlers, level = list(logging.root.handlers), logging.root.level
    yield Console(monkeypatch, capsys, tmp_path)
    # Hydra leaves a handler on the stream that ends with this test.
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


@pytest.mark.parametrize(("override", "line"), REFUSED, ids=[override for override, _ in REFUSED])
def test_a_bad_override_is_named_and_leaves_nothing(rlsp_command: Console, override: str, line: str) -> None:
    assert rlsp_command(override) == 2
    header, *lines = rlsp_command.errors.splitlines()
    assert header == "rlsp: refused, nothing was started:"
    assert len(lines) == 1
    assert lines[0].startswith(f"  {line}")
    assert rlsp_command.left() == []
    assert rlsp_command.jobs == []


def test_all_bad_overrides_are_listed_together(rlsp_command: Console) -> None:
    bad = ["entropy_coeff=1", "kl_coef=abc", "parallel=cp9", "foo", "num_rollouts=0", "parallel.tp=3"]
    assert rlsp_command("seed=1", *bad, "name=fine") == 2
    named = [line.strip().partition(":")[0] for line in rlsp_command.errors.splitlines()[1:]]
    assert named == bad
    assert rlsp_command.left() == []


def test_a_good_run_gets_one_job_in_a_folder_of_its_own(rlsp_command: Console) -> None:
    assert rlsp_command("seed=3", "name=mine") == 0
    (job,) = rlsp_command.jobs
    assert Path(job.run_dir) == rlsp_command.folder / "outputs" / "mine" / job.run_id
    assert (job.config.seed, job.overrides) == (3, ("seed=3", "name=mine"))
    assert job.command_line == ("rlsp", "seed=3", "name=mine")
    assert job.config.tracker.group is None
    assert sorted(path.name for path in Path(job.run_dir).iterdir()) == [".hydra"]
    assert sorted(path.name for path in (Path(job.run_dir) / ".hydra").iterdir()) == [
        "config.yaml",
        "hydra.yaml",
        "overrides.yaml",
    ]
    assert Job.from_json(job.to_json()) == job


def test_two_runs_never_share_a_folder(rlsp_command: Console) -> None:
    assert [rlsp_command(), rlsp_command()] == [0, 0]
    assert len({job.run_dir for job in rlsp_command.jobs}) == 2
    assert len({new_id() for _ in range(50)}) == 50


@pytest.mark.parametrize("status", range(5))
def test_the_status_of_the_job_is_the_commands(rlsp_command: Console, status: int) -> None:
    rlsp_command.outcome = lambda job: status
    assert rlsp_command() == status


def raising(error: BaseException) -> Callable[[Job], int]:
    def outcome(job: Job) -> int:
        raise error

    return outcome


@pytest.mark.parametrize("error", [RuntimeError("disk on fire"), SystemExit(3)], ids=["exception", "exit"])
def test_a_crash_is_one_line_and_a_log(rlsp_command: Console, error: BaseException) -> None:
    rlsp_command.outcome = raising(error)
    assert rlsp_command() == 1
    log = Path(rlsp_command.jobs[0].run_dir) / "logs" / "launcher.error.log"
    assert rlsp_command.errors.splitlines() == [
        f"rlsp: crashed: {type(error).__name__}: {error}",
        f"rlsp: the traceback is in {log}",
    ]
    assert "Traceback" in log.read_text()


def test_an_interrupt_is_an_abort(rlsp_command: Console) -> None:
    rlsp_command.outcome = raising(KeyboardInterrupt())
    assert rlsp_command() == 1
    assert rlsp_command.errors == "rlsp: interrupted\n"


def test_a_run_never_enters_a_folder_that_holds_something(rlsp_command: Console) -> None:
    (rlsp_command.folder / "taken").mkdir()
    (rlsp_command.folder / "taken" / "evidence").touch()
    assert rlsp_command("hydra.run.dir=taken") == 2
    assert rlsp_command("-m", "hydra.sweep.dir=taken", "seed=1,2") == 2
    assert "taken: legal: a folder that is absent or empty" in rlsp_command.errors
    assert rlsp_command.left() == ["taken", "taken/evidence"]
    assert rlsp_command("hydra.run.dir=taken/evidence") == 2


def test_a_run_may_enter_an_empty_folder(rlsp_command: Console) -> None:
    (rlsp_command.folder / "mine").mkdir()
    assert rlsp_command("hydra.run.dir=mine") == 0
    assert rlsp_command.jobs[0].run_dir == str(rlsp_command.folder / "mine")


def test_a_folder_that_cannot_be_made_is_refused(rlsp_command: Console) -> None:
    (rlsp_command.folder / "file").touch()
    assert rlsp_command("hydra.run.dir=file/run") == 2
    assert "file/run: cannot be written: Not a directory" in rlsp_command.errors


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
    assert rlsp_command.errors.splitlines()[:2] == [
        "rlsp: job 0 refused:",
        "  parallel.tp=3: legal: 1, 2, 4, 8 (divisors of numerics.virtual_tp)",
    ]
    sweep = Path(rlsp_command.jobs[0].run_dir).parent
    assert sorted(path.name for path in sweep.iterdir()) == ["1", "multirun.yaml", "sweep.json"]


def test_a_sweep_of_refused_jobs_alone_leaves_nothing(rlsp_command: Console) -> None:
    assert rlsp_command("-m", "seed=0,1", "entropy_coef=-1") == 2
    assert rlsp_command.left() == []


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


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--cfg", "job"], "num_rollouts: 5"),
        (["--cfg", "job", "experiment=g11_probe"], "num_rollouts: 2"),
        (["--info", "defaults-tree"], "parallel: cp1_tp2_sp2"),
        (["--help"], "rlsp is powered by Hydra"),
        (["--hydra-help"], "--multirun"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_questions_are_answered_without_starting_anything(
    rlsp_command: Console, arguments: list[str], expected: str
) -> None:
    assert rlsp_command(*arguments) == 0
    assert expected in rlsp_command.printed
    assert rlsp_command.left() == []


@pytest.mark.parametrize(
    "arguments",
    [["--cfg", "job", "foo=1"], ["--cfg", "job", "-m"], ["--resolve"], ["--experimental-rerun", "x"]],
    ids=" ".join,
)
def test_a_wrong_question_is_refused(rlsp_command: Console, arguments: list[str]) -> None:
    assert rlsp_command(*arguments) == 2
    assert rlsp_command.errors
    assert rlsp_command.left() == []


def test_an_unknown_option_is_refused(rlsp_command: Console) -> None:
    with pytest.raises(SystemExit) as end:
        rlsp_command("--no-such-option")
    assert end.value.code == 2


def test_a_users_own_folder_of_experiments_is_composed(rlsp_command: Console) -> None:
    folder = rlsp_command.folder / "mine" / "experiment"
    folder.mkdir(parents=True)
    (folder / "ours.yaml").write_text("# @package _global_\nname: ours\nseed: 9\n")
    assert rlsp_command("--config-dir", "mine", "experiment=ours") == 0
    assert rlsp_command(f"hydra.searchpath=[file://{folder.parent}]", "experiment=ours") == 0
    assert [job.config.seed for job in rlsp_command.jobs] == [9, 9]
    assert rlsp_command("--config-dir", "nowhere") == 2
    assert "--config-dir nowhere: no such folder" in rlsp_command.errors
    assert rlsp_command(f"hydra.searchpath=[file://{folder.parent}]", "experiment=ours", "seed=x") == 2
    assert rlsp_command.errors.splitlines()[1:] == ["  seed=x: legal: an integer in 0..2^63-1"]


def test_a_broken_tree_is_not_blamed_on_the_overrides(rlsp_command: Console) -> None:
    (rlsp_command.folder / "config.yaml").write_text("defaults:\n  - rlsp_schema\n  - model: gone\n")
    assert rlsp_command("--config-path", ".", "seed=1") == 2
    assert rlsp_command.errors.splitlines()[1:] == ["  In 'config': Could not find 'model/gone'"]


def test_rlsp_is_refused_under_torchrun(rlsp_command: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert rlsp_command() == 2
    assert "python -m rlsp.worker JOB.json" in rlsp_command.errors


def test_the_command_starts_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys, rlsp.cli.main; print({'torch', 'megatron', 'wandb', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


def test_bash_completes_keys_and_options(tmp_path: Path) -> None:
    def completed(line: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-m", "rlsp", "-sc", "query=bash"],
            env={**os.environ, "COMP_LINE": f"rlsp {line}", "COMP_POINT": str(5 + len(line))},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.split()

    assert completed("parallel.") == ["parallel.cp=", "parallel.dp=", "parallel.sp=", "parallel.tp="]
    assert "experiment=g11_probe" in completed("experiment=")


def test_a_refusal_is_the_exit_status_of_the_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rlsp", "entropy_coef=nan"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "rlsp: refused, nothing was started:",
        f"  entropy_coef=nan: legal: {NOT_NEGATIVE}",
    ]
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []
