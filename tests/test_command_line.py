"""The `rlsp` command: what it refuses, in which words, with which status, and what it leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command import LIGHT, Console, raising

from rlsp.cli import machine
from rlsp.config import Job

EXPERIMENTS = (
    "g00, g01, g10, g11, g11_probe, layout_probe, m000, m001, m010, m011, m100, m101, m110, m111, "
    "qwen3_8b_g11, smollm2_chain_sum, suite"
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
    ("rollout.top_p=0.9", "rollout.top_p=0.9: legal: a known key; did you mean rollout.tp?"),
    ("+rollout.top_k=40", "rollout.top_k=40: legal: a known key; did you mean rollout.tp?"),
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
    ("resume=outputs", "resume=outputs: legal: a run folder or the id of a run"),
    ("tracker.tags=word", "tracker.tags=word: legal: a list, each item 1 to 64 printable characters"),
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
    assert (job.config.seed, job.overrides) == (3, ("seed=3", "name=mine", LIGHT))
    assert job.command_line == ("rlsp", "seed=3", "name=mine", LIGHT)
    assert job.config.tracker.group is None
    assert sorted(path.name for path in Path(job.run_dir).iterdir()) == [".hydra", "logs"]
    assert sorted(path.name for path in (Path(job.run_dir) / ".hydra").iterdir()) == [
        "config.yaml",
        "hydra.yaml",
        "overrides.yaml",
    ]
    assert Job.from_json(job.to_json()) == job


@pytest.mark.parametrize("status", range(5))
def test_the_status_of_the_job_is_the_commands(rlsp_command: Console, status: int) -> None:
    rlsp_command.outcome = lambda job: status
    assert rlsp_command() == status


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


def test_under_torchrun_rlsp_is_one_process_a_machine_or_refused(
    rlsp_command: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert rlsp_command() == 2
    assert "under torchrun: legal: with cluster=torchrun" in rlsp_command.errors
    assert rlsp_command("cluster=torchrun") == 2
    assert "torchrun --nproc-per-node=2: legal: 1; rlsp starts" in rlsp_command.errors
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert rlsp_command("cluster=torchrun") == 0


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
