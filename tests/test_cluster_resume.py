"""Nothing is lost on several machines, here as several commands on one: they save and go on together."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from command import Console
from faults.cells import CP, KILLED, ONE, TP
from faults.command import SMALL, begin, go_on
from faults.nodes import on_both
from faults.plant import Plant
from faults.trial import equals
from launch_owner import environment, job_of_two_ranks
from segment_runs import flip, segment
from test_cluster import LOOPBACK, free_port
from test_resume_command import cut_off

from rlsp.board import Board, Place
from rlsp.cards import NodeCard
from rlsp.config import Config, Job, Resumption
from rlsp.rendezvous import RendezvousError, meet
from rlsp.report import checkpoint, manifest
from rlsp.report.checkpoint import Checkpoint, ShardEntry, numbered
from rlsp.report.files import EvidenceError, sha256_file
from rlsp.segments import begin as begin_segment
from rlsp.segments import hint

SHARED = ("cluster.nodes=2", LOOPBACK, "cluster.shared_folder=true")
LONG = ("num_rollouts=5", "checkpoint.every=1")


def lost(rollout: int, rank: int) -> Plant:
    """Plant the loss of the machine that has a rank, in the update of a rollout."""
    return Plant("kill owner", f"rollout {rollout}: update", rank, calls=3)


def test_a_run_goes_on_from_one_machine_on_two_and_back_as_if_nothing_had_happened(tmp_path: Path) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert begin(run, *LONG, f"parallel={ONE}", plants=[lost(1, 0)]).end().status == KILLED
    ends = on_both(run, (f"resume={run}", f"parallel={TP}", *SHARED), {1: [lost(2, 1)]})
    assert [end.status for end in ends] == [1, KILLED], [end.output for end in ends]
    assert f"resume with: rlsp resume={run.name}  (on every machine; goes on at rollout 2)" in ends[0].output
    saved = Checkpoint.read(run / "checkpoints" / "00002" / "checkpoint.json")
    assert (saved.layout["tp"], len(saved.files)) == (2, 2)  # each machine wrote a file
    ends = on_both(run, (f"resume={run}", f"parallel={CP}"), {0: [None, None, lost(3, 0)]})
    assert [end.status for end in ends] == [KILLED, 1], [end.output for end in ends]
    ended = go_on(run, f"parallel={ONE}", "cluster.nodes=1").end()
    assert ended.status == 0, ended.output
    segments = manifest.Manifest.read(run / "manifest.json").segments
    found = [(at.first_rollout, at.config["cluster"]["nodes"], at.layout.tp, at.layout.cp) for at in segments]
    assert found == [(0, 1, 1, 1), (1, 2, 2, 1), (2, 2, 1, 2), (3, 1, 1, 1)]
    assert sorted(path.name for path in (tmp_path / "run.node-1").iterdir()) == [".hydra", "logs"]
    assert begin(whole, *LONG, f"parallel={ONE}").end().status == 0
    assert equals(run, whole) == ""
    flip(run / "rollouts" / "00002.safetensors")  # the witness: of a rollout that two machines made
    assert "rollouts/00002.safetensors" in equals(run, whole)


def test_a_signal_to_any_machine_lets_the_rollout_be_saved_and_all_go_on_in_another_layout(
    tmp_path: Path,
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    small = (*SMALL, f"hydra.run.dir={run}", f"parallel={TP}", *SHARED, "num_rollouts=3")
    preempted = Plant("SIGTERM", "rollout 0: update", 1, calls=3)
    ends = on_both(run, small, {1: [preempted]})
    assert [end.status for end in ends] == [1, 1], [end.output for end in ends]
    assert "aborted: stopped by another machine, saved after rollout 0" in ends[0].output
    assert "ranks 1 to 1: stopping once this rollout is done and saved" in ends[1].output
    ends = on_both(run, (f"resume={run}", f"parallel={CP}"))
    assert [end.status for end in ends] == [0, 0], [end.output for end in ends]
    assert manifest.Manifest.read(run / "manifest.json").first_rollout == 1
    assert begin(whole, "num_rollouts=3", f"parallel={ONE}").end().status == 0
    assert equals(run, whole) == ""
    ends = on_both(run, (f"resume={run}",))
    assert [end.status for end in ends] == [0, 0]
    assert all("all 3 rollouts are there: nothing to do" in end.output for end in ends)


Meet = Callable[..., list[object]]


@pytest.fixture
def meeting(compose: Callable[..., Config], tmp_path: Path) -> Meet:
    """Let two machines meet in this process; node 0 goes on from a checkpoint, or begins.

    Returns what each comes to: node 0's card, or the error.
    """

    def let(
        resumed: Resumption | None = None, *, others: str | None = None, given: tuple[str, ...] = ()
    ) -> list[object]:
        shared = (*SHARED, f"cluster.port={free_port()}", "cluster.wait_s=4", *given)
        jobs = []
        for node in range(2):
            job = job_of_two_ranks(compose, tmp_path / f"m{node}", *shared, f"cluster.node={node}")
            jobs.append(job if node == 0 else replace(job, run_id=others or job.run_id))
        jobs[0] = replace(jobs[0], resumed=resumed)
        found: list[object] = [None, None]
        stores = []  # node 0's is there for as long as somebody may ask

        def come(node: int) -> None:
            board = Board.create(tmp_path / f"board-{node}", 2)
            try:
                store, cards = meet(jobs[node], Place(node, 2, 0, "", board.writer(node)))
                stores.append(store)
                found[node] = cards[0]
            except RendezvousError as error:
                found[node] = str(error)

        threads = [threading.Thread(target=come, args=(node,)) for node in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    return let


def owned(tmp_path: Path, compose: Callable[..., Config]) -> Job:
    """Begin the run of node 0 and return its job."""
    job = job_of_two_ranks(compose, tmp_path / "m0")
    manifest.begin(job, {})
    return job


def named(difference: str) -> list[object]:
    return [f"node 1 ({socket.gethostname()}) is not like node 0: {difference}"] * 2


def test_another_machine_goes_on_from_where_node_0_says(
    meeting: Meet, compose: Callable[..., Config], tmp_path: Path
) -> None:
    job = owned(tmp_path, compose)
    path = tmp_path / "m0" / "checkpoints" / "00003"
    path.mkdir(parents=True)
    saved = checkpoint_of(job, 3, {})
    saved.write(path / "checkpoint.json")
    point = Resumption(3, "00003", saved.digest())
    for card in meeting(point):
        assert isinstance(card, NodeCard)
        assert (card.run_dir, card.resumed) == (job.run_dir, point)


def test_a_folder_that_is_not_shared_is_named_on_both(
    meeting: Meet, compose: Callable[..., Config], tmp_path: Path
) -> None:
    place = f"the run in {tmp_path / 'm0'}"
    gone = "manifest.json cannot be read: No such file or directory"
    assert meeting() == named(f'{place} is "{gone}", on node 0 "20260101-000000-abcdef"')
    manifest.begin(replace(job_of_two_ranks(compose, tmp_path / "m0"), run_id="20250101-000000-fedcba"), {})
    assert meeting() == named(f'{place} is "20250101-000000-fedcba", on node 0 "20260101-000000-abcdef"')


def test_another_checkpoint_than_that_of_node_0_is_named_on_both(
    meeting: Meet, compose: Callable[..., Config], tmp_path: Path
) -> None:
    job = owned(tmp_path, compose)
    point = Resumption(3, "00003", "0" * 64)
    gone = "checkpoint.json cannot be read: No such file or directory"
    said = f'the digest of checkpoint 00003 is "{{}}", on node 0 "{point.digest}"'
    assert meeting(point) == named(said.format(gone))
    path = tmp_path / "m0" / "checkpoints" / "00003"
    path.mkdir(parents=True)
    other = checkpoint_of(job, 3, {})
    other.write(path / "checkpoint.json")
    assert meeting(point) == named(said.format(other.digest()))


def test_machines_that_resume_different_runs_say_so_on_both(
    meeting: Meet, compose: Callable[..., Config], tmp_path: Path
) -> None:
    owned(tmp_path, compose)
    said = 'resume is "20250101-000000-fedcba", on node 0 "20260101-000000-abcdef"'
    assert meeting(others="20250101-000000-fedcba", given=("resume=run",)) == named(said)
    assert all(isinstance(card, NodeCard) for card in meeting(given=("resume=run",)))


def test_a_folder_that_a_file_system_shows_late_is_waited_for(
    meeting: Meet, compose: Callable[..., Config], tmp_path: Path
) -> None:
    owned(tmp_path, compose)
    hidden = (tmp_path / "m0" / "manifest.json").rename(tmp_path / "hidden")

    def show() -> None:
        time.sleep(1.0)
        hidden.rename(tmp_path / "m0" / "manifest.json")

    late = threading.Thread(target=show)
    late.start()
    found = meeting()
    late.join()
    assert all(isinstance(card, NodeCard) for card in found), found


def checkpoint_of(job: Job, rollouts: int, files: dict[str, ShardEntry]) -> Checkpoint:
    return Checkpoint(
        run_id=job.run_id,
        rollouts=rollouts,
        optimizer_steps=rollouts,
        prompts=rollouts,
        seed=0,
        contract_hash="",
        config_hash="",
        continuation_hash="",
        initial_weights_digest="",
        weights_digest="",
        optimizer_digest="",
        reference_digest=None,
        groups={},
        layout={},
        files=files,
    ).sealed()


def test_no_checkpoint_gets_its_name_before_every_file_is_there_as_it_was_written(
    compose: Callable[..., Config], tmp_path: Path
) -> None:
    names = [checkpoint.file_name(number) for number in range(3)]
    for name in names:
        (tmp_path / name).write_bytes(name.encode())
    files = {
        name: ShardEntry(sha256=sha256_file(tmp_path / name), first=number, end=number + 1)
        for number, name in enumerate(names)
    }
    document = checkpoint_of(job_of_two_ranks(compose, tmp_path), 1, files)
    checkpoint.require_files(tmp_path, document)
    (tmp_path / names[0]).unlink()
    flip(tmp_path / names[2])
    with pytest.raises(EvidenceError) as error:
        checkpoint.require_files(tmp_path, document)
    assert "shards-0000.safetensors cannot be read: No such file" in str(error.value)
    assert "shards-0002.safetensors has another SHA-256" in str(error.value)
    assert names[1] not in str(error.value)


def hash_wrongly(rank: int) -> AbstractContextManager[object]:
    """Let rank 1 say another hash of its file than node 0 will find."""
    return mock.patch("rlsp.checkpoints.sha256_file", return_value="0" * 64) if rank else nullcontext()


def test_a_file_of_another_machine_that_node_0_sees_otherwise_ends_the_run_without_a_checkpoint(
    compose: Callable[..., Config], tmp_path: Path
) -> None:
    small = ("num_rollouts=1", "checkpoint.every=1")
    with pytest.raises(EvidenceError, match=r"shards-0001\.safetensors has another SHA-256"):
        segment(tmp_path / "two", compose, "tp2_sp2", *small, *SHARED, plant=hash_wrongly)
    assert numbered(tmp_path / "two") == {}
    segment(tmp_path / "one", compose, "tp2_sp2", *small, plant=hash_wrongly)  # one machine trusts itself
    assert list(numbered(tmp_path / "one")) == [1]


@pytest.mark.parametrize(
    ("given", "how"),
    [
        (("cluster.nodes=1",), "rlsp resume={}  (goes on at rollout 0)"),
        (SHARED, "rlsp resume={}  (on every machine; goes on at rollout 0)"),
        (SHARED[:2], "rlsp resume={} cluster.nodes=1  (goes on at rollout 0)"),
    ],
)
def test_an_aborted_run_says_how_it_goes_on(
    compose: Callable[..., Config], tmp_path: Path, given: tuple[str, ...], how: str
) -> None:
    job = job_of_two_ranks(compose, tmp_path / "run", *given)
    manifest.begin(job, {})
    assert hint(job) == f"resume with: {how.format(job.run_dir)}"


@pytest.fixture
def assisted(rlsp_command: Console, monkeypatch: pytest.MonkeyPatch) -> Console:
    """A run of `rlsp_command` in run/, and a stand-in for the launcher of other machines, too."""
    monkeypatch.setattr("rlsp.node.assist", rlsp_command._execute)
    rlsp_command.outcome = cut_off
    assert rlsp_command("entropy_coef=0.01", "tracker=none", "hydra.run.dir=run") == 1
    rlsp_command.outcome = lambda job: 0
    return rlsp_command


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_another_machine_resumes_beside_the_run_and_touches_nothing_in_it(assisted: Console) -> None:
    run = assisted.folder / "run"
    before = contents(run)
    assert assisted("resume=run", *SHARED, "cluster.node=1", "parallel=cp2_tp1_sp1") == 0
    first, then = assisted.jobs
    assert (then.run_dir, then.run_id) == (f"{run}.node-1", first.run_id)
    assert then.resumed is None  # node 0 will tell
    assert (then.config.entropy_coef, then.config.parallel.cp) == (0.01, 2)
    assert contents(run) == before
    assert assisted("resume=run", *SHARED, "cluster.node=1", "parallel=cp2_tp1_sp1") == 0
    assert contents(run) == before


def test_a_machine_composes_the_same_before_node_0_has_begun_and_after(assisted: Console) -> None:
    given = ("resume=run", *SHARED, "parallel=cp2_tp1_sp1", "num_rollouts=9", "micro_batch_size=3")
    assisted(*given, "cluster.node=1")
    assisted(*given, "cluster.node=0")
    begin_segment(assisted.jobs[-1], {})
    assisted(*given, "cluster.node=1")
    before, node_0, after = assisted.jobs[-3:]
    assert before.config == after.config
    assert node_0.resumed == Resumption(0, None, None)
    assert node_0.config == replace(before.config, cluster=replace(before.config.cluster, node=0))


def test_without_a_shared_folder_the_refusals_name_the_way_out(assisted: Console) -> None:
    alone = tuple(text for text in SHARED if "shared" not in text)
    assert assisted("resume=run", *alone, "cluster.node=1") == 2
    assert "cluster.shared_folder=true, where all machines see the run folder" in assisted.errors
    assert not (assisted.folder / "run.node-1").exists()


def test_torchrun_starts_a_run_that_lost_a_machine_again_and_it_goes_on(tmp_path: Path) -> None:
    run, whole, port = tmp_path / "run", tmp_path / "whole", free_port()
    agent = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=2", "--master-addr=127.0.0.1"]
    given = (*SMALL, *LONG, f"parallel={TP}", "cluster=torchrun", "cluster.shared_folder=true")
    agents = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", *agent, f"--master-port={port}"),
                *(f"--node-rank={node}", "-m", "rlsp", *given, "resume=auto", f"hydra.run.dir={run}"),
            ],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    while not (run / "checkpoints" / "00001").exists():
        assert agents[1].poll() is None, agents[1].communicate()
        time.sleep(0.05)
    (owner,) = Path(f"/proc/{agents[1].pid}/task/{agents[1].pid}/children").read_text().split()
    os.kill(int(owner), signal.SIGKILL)
    outputs = [process.communicate(timeout=480)[0] for process in agents]
    assert [process.returncode for process in agents] == [0, 0], outputs
    segments = manifest.Manifest.read(run / "manifest.json").segments
    assert [at.begun_by.value for at in segments] == ["started", "resumed"]
    assert segments[1].first_rollout > 0
    assert segments[1].config["cluster"]["attempt"] == 1
    assert begin(whole, *LONG, f"parallel={ONE}").end().status == 0
    assert equals(run, whole) == ""
