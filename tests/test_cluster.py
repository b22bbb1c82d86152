"""Several machines, here as several commands on one: they find each other, agree, and end together."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import composer
from launch_owner import Ended, Owner, environment, job_of_two_ranks, processes_of

from rlsp.cli.refusal import RefusalError
from rlsp.config import Config, Job
from rlsp.config.agreed import agreed_hash
from rlsp.network import interface_towards
from rlsp.report.compare import compare
from rlsp.report.verdict import verify

STOP_LIMIT_S = 12.0
SMALL = (
    "num_rollouts=1",
    "prompts_per_rollout=1",
    "tracker=none",
    "launch.grace_s=2.0",
    "checkpoint.every=0",
)
LOOPBACK = "cluster.host=127.0.0.1"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


MakeJobs = Callable[..., list[Job]]


@pytest.fixture
def make_jobs(compose: Callable[..., Config], tmp_path: Path) -> MakeJobs:
    """Compose one job for each of two machines; `own` are overrides of machine 1 alone."""

    def make(*overrides: str, own: tuple[str, ...] = ()) -> list[Job]:
        shared = (LOOPBACK, "cluster.nodes=2", f"cluster.port={free_port()}", *overrides)
        return [
            job_of_two_ranks(compose, tmp_path / f"machine-{node}", *shared, f"cluster.node={node}", *extra)
            for node, extra in enumerate([(), own])
        ]

    return make


@pytest.fixture
def owners() -> Iterator[Callable[[list[Job], str], list[Owner]]]:
    """Start the command of every machine; whatever a test leaves is killed."""
    with ExitStack() as opened:

        def start(jobs: list[Job], entry: str) -> list[Owner]:
            found = [Owner(job, entry) for job in jobs]
            for owner in found:
                opened.callback(owner.process.kill)
            return found

        yield start


Start = Callable[[list[Job], str], list[Owner]]


def ends(owners: list[Owner]) -> list[Ended]:
    found = [owner.end() for owner in owners]
    assert [processes_of(owner.job) for owner in owners] == [[] for _ in owners]
    return found


def test_two_machines_exchange_and_only_node_0_has_evidence(make_jobs: MakeJobs, owners: Start) -> None:
    jobs = make_jobs()
    first, second = ends(owners(jobs, "meet_and_exchange"))
    assert first.verdict["aborted"] is None, first.output
    assert second.status == 0, second.output
    assert "node 1 of 2, ranks 1 to 1: all ranks did their work; the verdict is on node 0" in second.output
    assert not (Path(jobs[1].run_dir) / "manifest.json").exists()
    for node, job in enumerate(jobs):
        logs = {path.name for path in (Path(job.run_dir) / "logs").glob("rank-*.log")}
        assert logs == {f"rank-0{node}.log"}
    nodes = json.loads((Path(jobs[0].run_dir) / "logs" / "nodes.json").read_text())
    assert socket.gethostname() not in (Path(jobs[0].run_dir) / "manifest.json").read_text().split('"')
    assert [(node["node"], node["first_rank"], node["last_rank"]) for node in nodes] == [(0, 0, 0), (1, 1, 1)]
    assert [node["run_dir"] for node in nodes] == [job.run_dir for job in jobs]


@pytest.mark.parametrize(
    ("own", "what"),
    [
        (("seed=1",), "seed is 1, on node 0 0"),
        (
            ("entropy_coef=0.5", "launch.timeout_s=7"),
            "entropy_coef is 0.5, on node 0 0.0, launch.timeout_s is 7.0",
        ),
        (("parallel=cp2_tp1_sp1",), "parallel.cp is 2, on node 0 1, parallel.sp is 1, on node 0 2"),
        (("parallel=cp2_tp2_sp2",), "parallel.cp is 2, on node 0 1"),
    ],
)
def test_machines_that_were_told_different_things_say_so_on_both_before_anything_is_exchanged(
    make_jobs: MakeJobs, owners: Start, own: tuple[str, ...], what: str
) -> None:
    jobs = make_jobs(own=own)
    first, second = ends(owners(jobs, "meet_and_exchange"))
    assert (first.status, second.status) == (1, 1)
    sentence = f"RendezvousError: node 1 ({socket.gethostname()}) is not like node 0: {what}"
    assert f"rank 0 failed: {sentence}" in first.reason
    assert sentence in second.output
    assert verify(jobs[0].run_dir).damage == ()


def test_what_only_the_owner_uses_may_differ(make_jobs: MakeJobs, owners: Start) -> None:
    own = ("launch.progress=false", "tracker.project=another", "cluster.host=localhost")
    first, second = ends(owners(make_jobs(own=own), "meet_and_exchange"))
    assert first.verdict["aborted"] is None
    assert second.status == 0


def test_a_machine_that_does_not_come_is_waited_for_and_named(make_jobs: MakeJobs, owners: Start) -> None:
    first, second = make_jobs("cluster.wait_s=2", "launch.timeout_s=1")
    (ended,) = ends(owners([first], "meet_and_exchange"))
    assert ended.status == 1
    said = "node 1 of 2 did not come: waited 2 s (cluster.wait_s) in vain for the other machines"
    assert said in ended.reason
    (ended,) = ends(owners([second], "meet_and_exchange"))
    assert ended.status == 1
    assert f"in vain for node 0 to listen at 127.0.0.1:{second.config.cluster.port}" in ended.output


def test_two_machines_with_one_number_are_refused_by_all(make_jobs: MakeJobs, owners: Start) -> None:
    # Three are expected, so that nothing begins before both have come.
    first, second = make_jobs("parallel=cp1_tp1_sp1_dp4", "cluster.nodes=4")
    twin = Job.from_json(second.to_json().replace("machine-1", "machine-2"))
    found = ends(owners([first, second, twin], "meet_and_exchange"))
    assert [ended.status for ended in found] == [1, 1, 1]
    assert all("two machines call themselves node 1" in ended.output for ended in found)


def test_an_address_that_is_taken_is_named(make_jobs: MakeJobs, owners: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        (job, _) = make_jobs(f"cluster.port={taken.getsockname()[1]}")
        (ended,) = ends(owners([job], "meet_and_exchange"))
    assert ended.status == 1
    assert f"RendezvousError: cannot listen at 127.0.0.1:{job.config.cluster.port}" in ended.reason


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_lost_machine_ends_the_other_in_time_with_whole_evidence(
    make_jobs: MakeJobs, owners: Start, lost: int, number: signal.Signals
) -> None:
    jobs = make_jobs()
    both = owners(jobs, "exchange_for_long")
    both[1].await_slot(1, lambda slot: slot.sequence > 2)
    gone, left = both[lost], both[1 - lost]
    left.mark()
    gone.process.send_signal(number)
    ended = left.end()
    gone.process.communicate(timeout=60)
    await_none(jobs)
    assert ended.status == 1
    assert ended.seconds < STOP_LIMIT_S
    if lost == 1:
        assert ended.reason.startswith("rank 0 failed: ")
        assert verify(jobs[0].run_dir).damage == ()
        assert "1     no end reported" in ended.output
        assert "on another machine, in its own logs" in ended.output
    else:
        assert "node 1 of 2, ranks 1 to 1: rank 1 failed: " in ended.output


def test_a_machine_that_hangs_is_found_by_the_time_limit_of_a_collective(
    make_jobs: MakeJobs, owners: Start
) -> None:
    jobs = make_jobs("launch.timeout_s=3")
    both = owners(jobs, "exchange_for_long")
    both[1].await_slot(1, lambda slot: slot.sequence > 2)
    stopped = processes_of(jobs[1])
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    both[0].mark()
    ended = both[0].end()
    for pid in stopped:
        os.kill(pid, signal.SIGKILL)
    both[1].process.communicate(timeout=60)
    await_none(jobs)
    assert ended.status == 1
    assert ended.seconds < 3.0 + STOP_LIMIT_S
    assert ended.reason.startswith("rank 1 did not arrive (at: on another machine, in its own logs")
    assert verify(jobs[0].run_dir).damage == ()


def await_none(jobs: list[Job]) -> None:
    until_s = time.monotonic() + STOP_LIMIT_S
    while any(map(processes_of, jobs)) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert [processes_of(job) for job in jobs] == [[] for _ in jobs]


def commands(
    folder: Path, *environments: dict[str, str], arguments: tuple[str, ...]
) -> list[tuple[int, str]]:
    """Run the console command once for every machine, all in one folder, as on a shared disk."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "rlsp", *arguments, *SMALL],
            cwd=folder,
            env={**environment(), **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for own in environments
    ]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def slurm(node: int) -> dict[str, str]:
    """Return what srun says to the one task of a machine."""
    return {
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_NODEID": str(node),
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
    }


def test_a_run_over_two_machines_leaves_the_bits_of_a_run_on_one(tmp_path: Path) -> None:
    layout = ("parallel=cp1_tp2_sp2", "hydra.run.dir=run")
    both = commands(
        tmp_path, slurm(0), slurm(1), arguments=("cluster=slurm", f"cluster.port={free_port()}", *layout)
    )
    assert [status for status, _ in both] == [0, 0], both
    (alone,) = commands(tmp_path, {}, arguments=("parallel=cp1_tp2_sp2", "hydra.run.dir=alone"))
    assert alone[0] == 0
    assert {path.name for path in tmp_path.iterdir()} == {"run", "run.node-1", "alone"}
    assert sorted(path.name for path in (tmp_path / "run.node-1").iterdir()) == [".hydra", "logs"]
    assert verify(tmp_path / "run").damage == ()
    comparison = compare(tmp_path / "run", tmp_path / "alone")
    assert comparison.outcome.value == "equal", comparison


def torchrun(folder: Path, node: int, port: int, *arguments: str) -> subprocess.Popen[str]:
    agent = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", *agent, f"--node-rank={node}"),
            *("-m", "rlsp", *SMALL, "cluster=torchrun", *arguments),
        ],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_two_agents_of_torchrun_run_one_run(tmp_path: Path) -> None:
    port = free_port()
    agents = [torchrun(tmp_path, node, port, "hydra.run.dir=run") for node in range(2)]
    outputs = [agent.communicate(timeout=240)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert "PASS  default" in outputs[0]
    assert "the verdict is on node 0" in outputs[1]
    assert verify(tmp_path / "run").damage == ()
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["config"]["cluster"]["agent_store"] is True


def test_a_job_of_submitit_has_its_machines_inside(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="the extra `submitit` is absent")
    tasks = (  # submitit's local tasks stand for machines
        "hydra/launcher=submitit_local",
        "hydra.launcher.tasks_per_node=2",
        "cluster.nodes=${oc.env:SUBMITIT_LOCAL_NTASKS,1}",
        "cluster.node=${oc.env:SUBMITIT_LOCAL_GLOBALID,0}",
        f"cluster.port={free_port()}",
        LOOPBACK,
    )
    ((status, output),) = commands(tmp_path, {}, arguments=("-m", "seed=3", "hydra.sweep.dir=swept", *tasks))
    assert status == 0, output
    assert verify(tmp_path / "swept" / "0").damage == ()
    assert sorted(path.name for path in (tmp_path / "swept" / "0.node-1").iterdir()) == [".hydra", "logs"]
    sweep = json.loads((tmp_path / "swept" / "sweep.json").read_text())
    assert [(job["status"], job["folder"]) for job in sweep["jobs"]] == [(0, "0")]


def test_a_sweep_that_starts_on_several_machines_is_refused(tmp_path: Path) -> None:
    ((status, output),) = commands(tmp_path, {}, arguments=("-m", "seed=1,2", "cluster.nodes=2", LOOPBACK))
    assert status == 2
    assert "cluster.nodes=2: legal: 1 in a sweep (hydra/launcher=slurm with cluster=slurm" in output
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    arguments = ("cluster.nodes=2", "cluster.host=no-such-machine.invalid")
    ((status, output),) = commands(tmp_path, {}, arguments=arguments)
    assert status == 2
    assert "cluster.host=no-such-machine.invalid: legal: the name or address of node 0" in output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (1, 0, None, 29400, False, 0)),
        (slurm(1), (2, 1, "127.0.0.1", 29400, False, 0)),
    ],
)
def test_slurm_says_which_machine_this_is(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: tuple[object, ...]
) -> None:
    assert placed(monkeypatch, "slurm", variables) == expected


def test_torchrun_says_which_machine_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        "GROUP_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "node-0.example",
        "MASTER_PORT": "4711",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "3",
    }
    assert placed(monkeypatch, "torchrun", variables) == (2, 1, "node-0.example", 4711, True, 3)
    assert placed(monkeypatch, "torchrun", {}) == (1, 0, None, 29400, False, 0)
    with pytest.raises(RefusalError, match=r"cluster\.port"):
        placed(monkeypatch, "torchrun", {**variables, "MASTER_PORT": "none"})


def placed(monkeypatch: pytest.MonkeyPatch, option: str, variables: dict[str, str]) -> tuple[object, ...]:
    from rlsp.cli.compose import checked

    with monkeypatch.context() as patched, composer() as opened:
        for name in ("GROUP_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
            patched.delenv(name, raising=False)
        for name, value in variables.items():
            patched.setenv(name, value)
        at = checked(opened.compose([f"cluster={option}", "checkpoint.every=0"])).cluster
    return at.nodes, at.node, at.host, at.port, at.agent_store, at.attempt


def test_a_rank_with_another_config_is_named_before_data_are_exchanged(
    compose: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlsp import evidence

    ours, theirs = compose("tracker=none"), compose("tracker=offline", "entropy_coef=0.01")
    assert agreed_hash(ours) == agreed_hash(compose("tracker=offline")) != agreed_hash(theirs)

    def gathered(mine: torch.Tensor, group: object) -> torch.Tensor:
        other = mine.clone()
        other[0, 96:128] = torch.tensor(list(bytes.fromhex(agreed_hash(theirs))), dtype=torch.uint8)
        return torch.cat([mine, other])

    monkeypatch.setattr(evidence.collectives, "gather", gathered)
    models = SimpleNamespace(
        contract=SimpleNamespace(sha256="0" * 64),
        certificate=SimpleNamespace(digest="0" * 64),
        trainer=torch.nn.Linear(1, 1),
    )
    nothing = SimpleNamespace(content_hash="0" * 64)
    with pytest.raises(evidence.DisagreementError) as error:
        evidence.startup_facts(ours, models, SimpleNamespace(world=None), nothing, nothing, "0" * 64)
    first, second = agreed_hash(ours)[:16], agreed_hash(theirs)[:16]
    assert str(error.value) == f"ranks disagree on config: rank 0 {first}, rank 1 {second}"


def test_every_machine_has_as_many_adjacent_ranks(compose: Callable[..., Config]) -> None:
    layout = ("parallel=cp2_tp2_sp2_dp2", "cluster.nodes=4", LOOPBACK)
    found = [compose(*layout, f"cluster.node={node}").local_ranks for node in range(4)]
    assert found == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]


def test_the_way_to_this_machine_is_the_loopback(compose: Callable[..., Config]) -> None:
    assert interface_towards(compose("cluster.nodes=2", "checkpoint.every=0", LOOPBACK).cluster) == "lo"


def test_two_network_namespaces_run_one_run_until_the_cable_is_pulled(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    found = {name: value for name, value in environment().items() if name != "GLOO_SOCKET_IFNAME"}
    done = subprocess.run(
        [
            root / "scripts" / "two_machines",
            "--cut",
            "0",
            tmp_path / "two",
            *SMALL,
            "launch.timeout_s=20",
            "num_rollouts=99",
        ],
        env={**found, "RLSP_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.stdout.endswith("exit status: node 0 1, node 1 1\n"), done.stdout + done.stderr
    run = tmp_path / "two" / "machine-a" / "run"
    nodes = json.loads((run / "logs" / "nodes.json").read_text())
    assert [node["host"] for node in nodes] == ["machine-a", "machine-b"]
    assert "rank 1 did not arrive" in done.stdout
    assert "rank 0 did not arrive" in done.stdout
    assert verify(run).damage == ()
    logs = tmp_path / "two" / "machine-b" / "run.node-1" / "logs"
    assert (logs / "rank-01.log").is_file()


RAY = """
import sys
from ray.cluster_utils import Cluster
import ray

sys.path.insert(0, sys.argv[1])
from on_ray import on_ray

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
cluster.add_node(num_cpus=2)
ray.init(address=cluster.address)
print("statuses", on_ray(2, sys.argv[2:], 2.0, 0.0))
"""


def test_two_nodes_of_a_ray_cluster_run_one_run(tmp_path: Path) -> None:
    pytest.importorskip(
        "ray", reason="the extra `ray` is not installed: it excludes joblib 1.6, so it is run apart"
    )
    run = tmp_path / "run"
    overrides = (*SMALL, f"hydra.run.dir={run}", f"cluster.port={free_port()}")
    done = subprocess.run(
        [sys.executable, "-c", RAY, str(Path(__file__).parents[1] / "scripts"), *overrides],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "statuses [0, 0]" in done.stdout, done.stdout + done.stderr
    assert verify(run).damage == ()
    assert (tmp_path / "run.node-1" / "logs" / "rank-01.log").is_file()
