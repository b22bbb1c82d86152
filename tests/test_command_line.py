"""The `rlsp` command: what it refuses, in which words, with which status, and what it leaves behind."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from hydra._internal.hydra import Hydra

import rlsp.launch
from rlsp.cli import app, folders, machine
from rlsp.cli.compose import new_id
from rlsp.cli.folders import pinned
from rlsp.cli.main import main
from rlsp.cli.statuses import worst
from rlsp.config import Job
from rlsp.report.sweep import SweepSummary

EXPERIMENTS = (
    "g00, g01, g10, g11, g11_probe, layout_probe, m000, m001, m010, m011, m100, m101, m110, m111, suite"
)
LAYOUTS = (
    "cp1_tp1_sp1, cp1_tp1_sp1_dp2, cp1_tp1_sp1_dp4, cp1_tp1_sp1_dp8, cp1_tp2_sp1, cp1_tp2_sp2, "
    "cp1_tp2_sp2_dp2, cp1_tp2_sp2_dp4, cp1_tp4_sp1, cp1_tp4_sp4, cp1_tp8_sp8, cp2_tp1_sp1, cp2_tp1_sp1_dp2, "
    "cp2_tp2_sp1, cp2_tp2_sp2, cp2_tp2_sp2_dp2, cp2_tp4_sp1, cp2_tp4_sp4, cp4_tp1_sp1, cp4_tp2_sp2"
)
NOT_NEGATIVE = "a number in 0..1000000"

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
    ("temperature=-1", "temperature=-1.0: legal: a number in 1e-6..1e6"),
    ("num_rollouts=0", "num_rollouts=0: legal: an integer in 1..1000000"),
    ("num_rollouts=1.5", "num_rollouts=1.5: legal: an integer in 1..1000000"),
    ("parallel.tp=3", "parallel.tp=3: legal: 1, 2, 4, 8 (divisors of numerics.virtual_tp)"),
    ("parallel=cp9", f"parallel=cp9: legal: {LAYOUTS}"),
    ("parallel=null", f"parallel=null: legal: {LAYOUTS}"),
    ("+parallel=cp1_tp1_sp1", "+parallel=cp1_tp1_sp1: Multiple values for parallel."),
    ("experiment=none_such", f"experiment=none_such: legal: {EXPERIMENTS}, null"),
    ("+seed=1", "+seed=1: legal: seed=1 (the key is there already: without the plus sign)"),
    ("=", "=: legal: key=value, with quotes"),
    ("=1", "=1: legal: key=value, with quotes"),
    ("num_rollouts=1" + "0" * 29, "num_rollouts=1" + "0" * 29 + ": legal: an integer in 1..1000000"),
    ("max_response_tokens=1000000", "max_response_tokens=1000000: legal: an integer in 1..131072"),
    (
        "prompts_per_rollout=1000000",
        "prompts_per_rollout=1000000: legal: at most 250000 (samples_per_prompt=4)",
    ),
    ("launch.timeout_s=1e300", "launch.timeout_s=1e+300: legal: seconds in 1..86400"),
    ("launch.timeout_s=1e-9", "launch.timeout_s=1e-09: legal: seconds in 1..86400"),
    ("tracker.init_timeout_s=1e300", "tracker.init_timeout_s=1e+300: legal: seconds in 1..86400"),
    (f"numerics.row_tile={2**60}", f"numerics.row_tile={2**60}: legal: a power of two in 16..4096"),
    (f"numerics.token_block={2**60}", f"numerics.token_block={2**60}: legal: a power of two of at most 4096"),
    (f"numerics.virtual_tp={2**60}", f"numerics.virtual_tp={2**60}: legal: a power of two of at most 4096"),
    ("task.reward=1e308", "task.reward=1e+308: legal: a number in -1000000..1000000"),
    (
        "parallel.cp=5000",
        "parallel.cp=5000: legal: what makes dp · cp · tp at most 64 ranks (for device.kind=cpu)",
    ),
    ("hydra.run.dir=", "hydra.run.dir='': legal: a folder that is absent or empty"),
    ("hydra.run.dir=" + "x" * 300, "folder "),
    ("hydra.output_subdir=manifest.json", "hydra.output_subdir=manifest.json: legal: .hydra"),
    ("hydra.output_subdir=rollouts", "hydra.output_subdir=rollouts: legal: .hydra"),
    ("hydra.output_subdir=a/b", "hydra.output_subdir=a/b: legal: .hydra"),
    ("hydra.run.dir='a\\${seed}'", "hydra.run.dir=a${seed}: legal: a path without ${"),
    ("hydra.output_subdir=null", "hydra.output_subdir=null: legal: .hydra"),
    ("name=${name}", "name: Recursive interpolation detected; legal: 1 to 64 letters"),
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
    assert sorted(path.name for path in Path(job.run_dir).iterdir()) == [".hydra", "logs"]
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
    assert rlsp_command.errors.splitlines()[1:] == [
        f"  folder {rlsp_command.folder}/file/run: cannot be written: Not a directory"
    ]


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
    ("subdir", "line"),
    [
        ("all", "hydra.sweep.subdir=all (job 1): legal: a folder for each job alone; job 0 has it"),
        ("${parallel.tp}", "hydra.sweep.subdir=2 (job 1): legal: a folder for each job alone; job 0 has it"),
        ("j/${seed}/..", "hydra.sweep.subdir=j/1/.. (job 0): legal: a folder inside that of the sweep"),
        (".", "(job 0): legal: a folder inside that of the sweep"),
        ("/tmp", "hydra.sweep.subdir=/tmp (job 0): legal: a folder inside that of the sweep"),
        ("sweep.json", "hydra.sweep.subdir=sweep.json (job 0): legal: a folder inside that of the sweep"),
        ("x" * 300 + "${seed}", "(job 0): legal: names of at most 255 bytes"),
    ],
    ids=lambda text: text[:40],
)
def test_jobs_that_would_not_have_a_folder_each_are_refused_before_the_first(
    rlsp_command: Console, subdir: str, line: str
) -> None:
    assert rlsp_command("-m", "seed=1,2", f"hydra.sweep.subdir='{subdir}'") == 2
    assert line in rlsp_command.errors.splitlines()[1]
    assert rlsp_command.jobs == []
    assert rlsp_command.left() == []


def test_a_job_inside_the_folder_of_another_is_refused(rlsp_command: Console) -> None:
    (rlsp_command.folder / "mine" / "experiment").mkdir(parents=True)
    for name, subdir in (("a", "x"), ("b", "x/y")):
        path = rlsp_command.folder / "mine" / "experiment" / f"{name}.yaml"
        path.write_text(f"# @package _global_\nname: {name}\nhydra: {{sweep: {{subdir: {subdir}}}}}\n")
    for order in ("a,b", "b,a"):
        assert rlsp_command("--config-dir", "mine", "-m", f"experiment={order}") == 2
        assert "legal: a folder for each job alone; job 0 has it" in rlsp_command.errors
    assert rlsp_command.jobs == []


def test_a_swept_name_leaves_the_sweep_in_one_folder(rlsp_command: Console) -> None:
    assert rlsp_command("-m", "name=a,b") == 0
    assert len({Path(job.run_dir).parent for job in rlsp_command.jobs}) == 1


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
    assert (
        f"experiment=null: legal: {EXPERIMENTS}, null (alone, not in a sweep)" in rlsp_command.errors
    )


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("torn", "name: [a\nseed: {\n", "torn.yaml, line 2, column 5: no YAML: expected ',' or ']'"),
        ("twice", "name: a\nname: b\n", "twice.yaml, line 2, column 1: no YAML: found duplicate key name"),
        ("bytes", b"\xff\xfe", "can't decode byte 0xff"),
        ("listed", "- a\n- b\n", "In 'experiment/listed'"),
        ("open", '# @package _global_\nname: "${a"\n', "experiment=open: "),
        ("defaults", "defaults: 3\n", "defaults must be a list"),
        ("circle", "# @package _global_\nname: ${task.x}\ntask: {x: '${name}'}\n", "circle"),
    ],
)
def test_a_broken_file_is_refused_with_its_place(
    rlsp_command: Console, name: str, content: str | bytes, line: str
) -> None:
    folder = rlsp_command.folder / "mine" / "experiment"
    folder.mkdir(parents=True)
    (folder / f"{name}.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    for arguments in (
        (f"experiment={name}",),
        ("-m", f"experiment={name}", "seed=1,2"),
        ("--cfg", "job", f"experiment={name}", "--resolve"),
    ):
        assert rlsp_command("--config-dir", "mine", *arguments) == 2
        assert line in rlsp_command.errors
        assert len(rlsp_command.errors.splitlines()) == 2
    assert sorted(path.name for path in rlsp_command.folder.iterdir()) == ["mine"]


def test_a_broken_primary_file_is_refused_with_its_place(rlsp_command: Console) -> None:
    (rlsp_command.folder / "config.yaml").write_text("defaults: [\n")
    for arguments in ((), ("seed=1",), ("--cfg", "job"), ("--help",)):
        assert rlsp_command("--config-path", ".", *arguments) == 2
        assert "config.yaml, line 2, column 1: no YAML: " in rlsp_command.errors


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
    [
        ["--cfg", "job", "foo=1"],
        ["--cfg", "job", "-m"],
        ["--resolve"],
        ["--experimental-rerun", "x"],
        ["-sc", "bad"],
        ["-sc", "query=fish"],
        ["-sc", "install=zork"],
    ],
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


@pytest.mark.parametrize("arguments", [(), ("-m", "seed=1,2")], ids=["run", "sweep"])
def test_only_folders_that_the_command_made_are_removed(
    rlsp_command: Console, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    (rlsp_command.folder / "mine" / "run").mkdir(parents=True)
    kind = "sweep" if arguments else "run"
    # refused after Hydra has begun: neither value is known to be wrong before
    monkeypatch.setattr(app, "machine_lines", lambda config: ["nothing runs here"])
    for folder in (".", "mine/run", "mine/run/deeper/still"):
        if folder == ".":
            monkeypatch.chdir(rlsp_command.folder / "mine" / "run")
        assert rlsp_command(*arguments, f"hydra.{kind}.dir={folder}") == 2
        monkeypatch.chdir(rlsp_command.folder)
        assert "nothing runs here" in rlsp_command.errors
        assert rlsp_command.left() == ["mine", "mine/run"]


def test_of_two_commands_that_take_one_folder_at_once_one_is_refused(
    rlsp_command: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both have looked and found the folder empty; the other one is a moment faster.
    require_free = folders.require_free

    def overtaken(folder: Path) -> None:
        require_free(folder)
        (folder / "logs").mkdir(parents=True)
        (folder / "logs" / "theirs").touch()

    monkeypatch.setattr(folders, "require_free", overtaken)
    assert rlsp_command("hydra.run.dir=one") == 2
    assert "one: legal: a folder that is absent or empty" in rlsp_command.errors
    assert rlsp_command.left() == ["one", "one/logs", "one/logs/theirs"]
    assert rlsp_command.jobs == []

    def overtaken_sweep(folder: Path) -> None:
        require_free(folder)
        folder.mkdir()
        (folder / "multirun.yaml").write_text("theirs")

    monkeypatch.setattr(folders, "require_free", overtaken_sweep)
    assert rlsp_command("-m", "seed=1,2", "hydra.sweep.dir=two") == 2
    assert (rlsp_command.folder / "two" / "multirun.yaml").read_text() == "theirs"


@pytest.mark.parametrize("arguments", [(), ("-m", "seed=1,2")], ids=["run", "sweep"])
def test_a_full_disk_is_refused_and_nothing_stays(
    rlsp_command: Console, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    def full(run_dir: Path, *_: object) -> None:
        (run_dir / ".hydra").mkdir()
        (run_dir / ".hydra" / "config.yaml").write_text("na")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(app, "write_record", full)
    assert rlsp_command(*arguments) == 2
    assert "cannot be written: No space left on device" in rlsp_command.errors
    assert rlsp_command.left() == []


def test_a_folder_with_every_awkward_character_is_used_as_it_is(rlsp_command: Console) -> None:
    for name in (
        "it's",
        "a b",
        "run#7?",
        "\\'x\\",
        "back\\",
        "ü, (x)={y}:[z]",
        "$HOME %s",
    ):
        assert rlsp_command(pinned("hydra.run.dir", rlsp_command.folder / name)) == 0, rlsp_command.errors
        assert Path(rlsp_command.jobs[-1].run_dir) == rlsp_command.folder / name
        assert (
            rlsp_command("-m", pinned("hydra.sweep.dir", rlsp_command.folder / f"{name}s"), "seed=1,2") == 0
        )
        assert Path(rlsp_command.jobs[-1].run_dir) == rlsp_command.folder / f"{name}s" / "1"


def test_a_gpu_run_is_refused_where_there_is_no_gpu(
    rlsp_command: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = rlsp_command.folder / "devices"
    devices.mkdir()
    monkeypatch.setattr(machine, "_DEVICES", devices)
    assert rlsp_command("device=cuda") == 2
    assert rlsp_command.errors.splitlines()[1] == (
        f"  device.kind=cuda: legal: cpu (neither {devices}/nvidiactl nor {devices}/dxg is there: "
        "this machine has no NVIDIA driver; nothing overrides this)"
    )
    (devices / "nvidiactl").touch()
    assert rlsp_command("device=cuda") == 0, "how many GPUs there are is not known"
    for number in range(2):
        (devices / f"nvidia{number}").touch()
    assert rlsp_command("device=cuda") == 0
    assert rlsp_command("device=cuda", "parallel=cp1_tp4_sp4") == 2
    assert "4 ranks (dp · cp · tp): legal: at most 2, the GPUs here" in rlsp_command.errors


def test_a_folder_that_is_gone_is_no_place_to_start(
    rlsp_command: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = rlsp_command.folder / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert rlsp_command() == 2
    assert rlsp_command.errors.splitlines()[1:] == [
        "  the current folder is gone: legal: to start in one that exists"
    ]
    monkeypatch.chdir(rlsp_command.folder)


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


def test_an_interrupt_before_the_first_job_leaves_nothing(
    rlsp_command: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for place in (Hydra, "compose_config"), (Hydra, "multirun"):
        monkeypatch.setattr(*place, interrupt)
        for arguments in ((), ("-m", "seed=1,2")):
            if place[1] == "compose_config" or arguments:
                assert rlsp_command(*arguments) == 1
                assert rlsp_command.errors == "rlsp: interrupted\n"
        monkeypatch.undo()
        monkeypatch.chdir(rlsp_command.folder)
    assert rlsp_command.left() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_any_moment_of_the_start_is_an_interrupt(tmp_path: Path, number: signal.Signals) -> None:
    # The command interrupts itself as it comes to a module: early, while Hydra comes in, and late.
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == sys.argv[-1]: os.kill(os.getpid(), int(sys.argv[-2]))\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from rlsp.cli.main import main\n"
        "wanted, sys.argv = sys.argv, ['rlsp', 'num_rollouts=0', sys.argv[-2], sys.argv[-1]]\n"
        "sys.exit(main())\n"
    )
    for module in ("rlsp.cli.app", "hydra", "omegaconf.errors", "rlsp.config.checks"):
        done = subprocess.run(
            [sys.executable, "-c", code, str(int(number)), module],
            check=False,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (1, "rlsp: interrupted\n"), module


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_refusal_into_a_closed_pipe_is_still_a_refusal(tmp_path: Path, stream: str) -> None:
    for arguments, status in ((["entropy_coef=nan"], 2), (["--cfg", "job"], 0), (["--no-such-option"], 2)):
        read_end, write_end = os.pipe()
        os.close(read_end)
        command = [sys.executable, "-m", "rlsp", *arguments]
        other = {"stdout": "stderr", "stderr": "stdout"}[stream]
        streams = {stream: write_end, other: subprocess.PIPE}
        done = subprocess.run(command, check=False, cwd=tmp_path, **streams)
        os.close(write_end)
        assert done.returncode == status, arguments
        said = done.stderr if stream == "stdout" else done.stdout
        assert b"BrokenPipe" not in (said or b"")
    assert list(tmp_path.iterdir()) == []


def test_closed_descriptors_and_full_disks_do_not_change_a_status(tmp_path: Path) -> None:
    line = f"{sys.executable} -m rlsp"
    for redirection in (">&- 2>&- <&-", ">/dev/full 2>&1"):
        for arguments, status in (("entropy_coef=nan", 2), ("--cfg job", 0)):
            done = subprocess.run(f"{line} {arguments} {redirection}", check=False, shell=True, cwd=tmp_path)
            assert done.returncode == status, (redirection, arguments)


@pytest.mark.parametrize("name", ["compare", "verify"])
def test_the_other_commands_keep_their_status_in_a_closed_pipe(tmp_path: Path, name: str) -> None:
    code = f"import sys; from rlsp.cli.main import {name}; sys.exit({name}())"
    for arguments, status in ((["--help"], 0), (["nowhere", "nowhere"][: 2 if name == "compare" else 1], 2)):
        done = subprocess.run(
            f"{sys.executable} -c '{code}' {' '.join(arguments)} 2>&1 | true; exit ${{PIPESTATUS[0]}}",
            check=False,
            shell=True,
            executable="/bin/bash",
            cwd=tmp_path,
            capture_output=True,
        )
        assert done.returncode == status


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
