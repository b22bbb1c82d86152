"""Sweeps through other launchers, for real: jobs in other processes, one sweep.json with the right states."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from command import LIGHT, Console
from conftest import composer
from hydra.types import RunMode
from launch_owner import environment
from wandb.sdk.launch.sweeps import utils as agent

from rlsp.cli.refusal import RefusalError
from rlsp.report.sweep import SweepSummary
from rlsp.report.verdict import verify
from rlsp.report.verify_sweep import verify_sweep

SWEEP_YAML = Path(__file__).parents[1] / "docs" / "wandb_sweep.yaml"
SMALL = (
    LIGHT,
    "prompts_per_rollout=1",
    "tracker=none",
    "launch.grace_s=2",
    "parallel.sp=1",
    "hydra.sweep.dir=swept",
)
ABSENT = {
    "joblib": "the extra `joblib`, a part of `dev`, is not installed",
    "submitit": "the extra `submitit`, a part of `dev`, is not installed",
    "ray": "the extra `ray` is not installed: its cloudpickle<3 excludes joblib 1.6, so it is run apart",
}


def need(extra: str) -> None:
    if find_spec(f"hydra_plugins.hydra_{extra}_launcher") is None:
        pytest.skip(ABSENT[extra])


def started(folder: Path, *arguments: str, first: str = "") -> subprocess.Popen[str]:
    """Start the command as a terminal would: in a process group of its own, interruptible."""
    code = (
        f"{first}\n"
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from rlsp.cli.main import main; sys.exit(main())"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, "-m", *SMALL, *arguments],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("extra", "arguments"),
    [
        ("joblib", ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")),
        ("submitit", ("hydra/launcher=submitit_local",)),
        ("ray", ("hydra/launcher=ray",)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_layouts_agree_whatever_process_runs_them(
    tmp_path: Path, extra: str, arguments: tuple[str, ...]
) -> None:
    need(extra)
    process = started(tmp_path, *arguments, "parallel.tp=1,2,3", "num_rollouts=1")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 2, output
    summary = SweepSummary.read(tmp_path / "swept" / "sweep.json")
    assert [(job.status, job.folder) for job in summary.jobs] == [(0, "0"), (0, "1"), (2, None)]
    assert [job.verdict.value if job.verdict else None for job in summary.jobs] == ["PASS", "PASS", None]
    (group,) = summary.groups
    assert (group.jobs, group.judged, group.agrees) == ((0, 1), True, True)
    assert "job 2 (parallel.tp=3): parallel.tp=3: legal: 1, 2, 4, 8" in output
    assert group.sentence in output
    for job in ("0", "1"):
        assert verify(tmp_path / "swept" / job).damage == ()
        manifest = yaml.safe_load((tmp_path / "swept" / job / "manifest.json").read_text())
        assert manifest["command_line"][1:] == [
            "-m",
            *SMALL,
            *arguments,
            "parallel.tp=1,2,3",
            "num_rollouts=1",
        ]
    assert not (tmp_path / "swept" / "2").exists()


@pytest.mark.parametrize(
    ("extra", "arguments"),
    [
        (None, ()),
        ("joblib", ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")),
        ("submitit", ("hydra/launcher=submitit_local",)),
    ],
    ids=["basic", "joblib", "submitit_local"],
)
def test_an_interrupted_sweep_leaves_sealed_runs_and_the_right_states(
    tmp_path: Path, extra: str | None, arguments: tuple[str, ...]
) -> None:
    if extra is not None:
        need(extra)
    process = started(tmp_path, *arguments, "parallel.tp=1,2,3", "num_rollouts=1000")
    first = tmp_path / "swept" / "0" / "metrics.jsonl"
    while not first.exists():
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert "rlsp: interrupted" in output
    jobs = SweepSummary.read(tmp_path / "swept" / "sweep.json").jobs
    assert (jobs[0].status, jobs[0].folder) == (1, "0")
    assert (jobs[2].status, jobs[2].folder) == (2, None)
    for job in jobs:
        if job.folder is not None:
            assert (job.status, job.verdict.value) == (1, "ABORTED")
            assert verify(tmp_path / "swept" / job.folder).damage == ()
    assert jobs[1].status == (None if extra is None else 1)
    verification = verify_sweep(tmp_path / "swept")
    assert (verification.damage, verification.exit_status) == ((), 1)


def owner_of(run_dir: Path) -> int | None:
    """Find the process that owns a run: its host names it."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError, ValueError):
                words = (folder / "cmdline").read_text().split("\0")
                if "--parent" in words and str(run_dir) in words[words.index("--host") + 1]:
                    return int(words[words.index("--parent") + 1])
    return None


def test_a_killed_job_ends_no_sweep_and_the_others_end_with_their_own_states(tmp_path: Path) -> None:
    need("submitit")
    process = started(
        tmp_path,
        "hydra/launcher=submitit_local",
        "parallel=cp1_tp1_sp1",
        "seed=1,2",
        "num_rollouts=2",
        first="import rlsp.cli.sweep; rlsp.cli.sweep._OWNER_LIMIT_S = 0.0",
    )
    while (owner := owner_of(tmp_path / "swept" / "0")) is None:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.1)
    os.kill(owner, signal.SIGKILL)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 1, output
    assert "rlsp: waiting for the other jobs" in output
    jobs = SweepSummary.read(tmp_path / "swept" / "sweep.json").jobs
    found = [(job.status, job.folder, job.verdict.value if job.verdict else None) for job in jobs]
    assert found == [(1, "0", "ABORTED"), (0, "1", "PASS")]
    verification = verify_sweep(tmp_path / "swept")
    assert (verification.damage, verification.notes, verification.exit_status) == ((), (), 1)


def test_joblib_takes_a_number_of_jobs_from_a_config_file(rlsp_command: Console) -> None:
    need("joblib")
    folder = rlsp_command.folder / "own" / "hydra" / "launcher"
    folder.mkdir(parents=True)
    (folder / "two.yaml").write_text("defaults:\n  - joblib\nn_jobs: 2\n")
    own = ("--config-dir", str(rlsp_command.folder / "own"))
    assert rlsp_command("-m", *own, "hydra/launcher=two", "seed=1") == 0
    assert "n_jobs=2," in rlsp_command.printed


def test_joblib_runs_one_job_at_a_time_unless_told_otherwise(rlsp_command: Console) -> None:
    need("joblib")
    assert rlsp_command("-m", "hydra/launcher=joblib", "seed=1,2") == 0
    assert "n_jobs=1," in rlsp_command.printed
    assert [job.config.seed for job in rlsp_command.jobs] == [1, 2]


def test_the_slurm_launcher_composes_and_leaves_the_gpus_to_the_cluster(
    rlsp_command: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("submitit")
    with composer() as opened:
        launcher = opened.compose(["hydra/launcher=slurm"], RunMode.MULTIRUN).hydra.launcher
        assert launcher._target_.endswith(".SlurmLauncher")
        assert (launcher.timeout_min, launcher.tasks_per_node) == (1440, 1)
    monkeypatch.setenv("PATH", str(rlsp_command.folder))  # no Slurm anywhere
    assert rlsp_command("-m", "hydra/launcher=slurm", "device=cuda", "seed=1,2") == 2
    assert "device.kind" not in rlsp_command.errors
    assert "srun" in rlsp_command.errors
    assert rlsp_command("-m", "device=cuda", "seed=1,2") == 2 or Path("/dev/nvidiactl").exists()


@pytest.mark.parametrize("launcher", ["ray", "joblib", "slurm", "submitit_local"])
def test_a_launcher_that_is_not_installed_is_refused_with_its_extra(launcher: str) -> None:
    extra = {"slurm": "submitit", "submitit_local": "submitit"}.get(launcher, launcher)
    if find_spec(f"hydra_plugins.hydra_{extra}_launcher") is not None:
        pytest.skip(f"the extra `{extra}` is installed: nothing to refuse")
    with composer() as opened, pytest.raises(RefusalError, match=rf"pip install 'rlsp\[{extra}\]'"):
        opened.require_sweep([f"hydra/launcher={launcher}", "seed=1,2"])


def test_what_a_wandb_agent_passes_is_what_its_sweep_says(rlsp_command: Console) -> None:
    sweep = yaml.safe_load(SWEEP_YAML.read_text())
    assert (sweep["program"], sweep["command"][0]) == ("rlsp", "${program}")
    choices = {
        key: [{"value": value} for value in says.get("values", [says.get("value")])]
        for key, says in sweep["parameters"].items()
    }
    for chosen in itertools.product(*choices.values()):
        given = dict(zip(choices, chosen, strict=True))
        texts = agent.create_sweep_command_args({"args": given})
        assert sweep["command"][-1] == "${args_no_hyphens}"
        assert rlsp_command("tracker=none", *texts["args_no_hyphens"]) == 0, rlsp_command.errors
        config = rlsp_command.jobs[-1].config
        assert config.entropy_coef == given["entropy_coef"]["value"]
        assert config.learning_rate == given["learning_rate"]["value"]
        assert config.num_rollouts == given["num_rollouts"]["value"]
        assert config.rollout.ignore_eos is given["rollout.ignore_eos"]["value"]
        tp = config.parallel.tp
        assert given["parallel"]["value"] == f"cp{config.parallel.cp}_tp{tp}_sp{config.parallel.sp}"
    assert len(rlsp_command.jobs) == 8


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"parallel": {"cp": 2}}, "parallel={'cp': 2}"),
        ({"resume": None}, "resume=None"),
        ({"name": "a b"}, "name=a b"),
    ],
)
def test_what_an_agent_writes_as_python_does_is_refused_and_never_guessed(
    rlsp_command: Console, given: dict[str, object], why: str
) -> None:
    texts = agent.create_sweep_command_args({"args": {key: {"value": value} for key, value in given.items()}})
    assert rlsp_command(*texts["args_no_hyphens"]) == 2
    assert why in rlsp_command.errors
    assert rlsp_command.jobs == []
