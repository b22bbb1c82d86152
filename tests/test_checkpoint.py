"""What a checkpoint's files must be to be gone on from, and what is never loaded."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_helpers import alone, mesh_of, policy
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from segment_runs import end, flip, resume, segment

from rlsp import bits
from rlsp.layout import Layout, virtual_shards
from rlsp.model.checkpoint import CheckpointError, ShardFile, read_shards, write_shards
from rlsp.report.checkpoint import Checkpoint, numbered
from rlsp.report.continuation import continuation
from rlsp.report.files import EvidenceError, sha256_file
from rlsp.report.verdict import verify

Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def made(compose: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three rollouts in two ranks, with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("made") / "run"
    segment(folder, compose, "tp2_sp2", "num_rollouts=3", "checkpoint.every=1", "checkpoint.keep=null")
    assert end(folder).verdict.value == "PASS"
    return folder


@pytest.fixture
def run_dir(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "run")


def newest(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / "00003"


def test_a_run_with_checkpoints_verifies_and_each_names_what_it_has(run_dir: Path) -> None:
    assert verify(run_dir).damage == ()
    assert list(numbered(run_dir)) == [1, 2, 3]
    said = Checkpoint.read(newest(run_dir) / "checkpoint.json")
    assert (said.rollouts, said.optimizer_steps, said.prompts) == (3, 6, 6)
    assert set(said.groups) == {"weight", "exp_avg", "exp_avg_sq", "master", "reference"}
    assert [(entry.first, entry.end) for entry in said.files.values()] == [(0, 4), (4, 8)]
    assert continuation(run_dir)[0].rollout == 3


def test_the_newest_are_kept(compose: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    segment(folder, compose, "one", "checkpoint.every=1", "checkpoint.keep=2", "updates_per_rollout=1")
    assert list(numbered(folder)) == [3, 4]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["00003", "00004"]


# Damage -----------------------------------------------------------------------


def truncate(path: Path) -> None:
    shards = path / "shards-0001.safetensors"
    shards.write_bytes(shards.read_bytes()[:-100])


def flip_a_bit(path: Path) -> None:
    flip(path / "shards-0000.safetensors")


def lose_a_file(path: Path) -> None:
    (path / "shards-0001.safetensors").unlink()


def lose_the_document(path: Path) -> None:
    (path / "checkpoint.json").unlink()


def foreign_json(path: Path) -> None:
    (path / "checkpoint.json").write_text('{"step": 3, "model": "other"}')


def deep_json(path: Path) -> None:
    (path / "checkpoint.json").write_text("[" * 100_000)


def add_a_pickle(path: Path) -> None:
    (path / "optimizer.pt").write_bytes(pickle.dumps(Bomb(path)))


def link_a_file(path: Path) -> None:
    shards = path / "shards-0000.safetensors"
    shards.rename(path.parents[1] / "elsewhere")
    shards.symlink_to(path.parents[1] / "elsewhere")


def edited(path: Path, **changes: Any) -> None:
    """Change a checkpoint's document, and seal it again as somebody who knows how would."""
    plain = json.loads((path / "checkpoint.json").read_text()) | changes
    Checkpoint.model_validate_json(json.dumps(plain)).sealed().write(path / "checkpoint.json")


def rewritten(path: Path, change: Callable[[dict[str, torch.Tensor]], None], **changes: Any) -> None:
    """Change a checkpoint's tensors, with hashes that fit."""
    files = json.loads((path / "checkpoint.json").read_text())["files"]
    for name, entry in files.items():
        tensors = load_file(path / name)
        change(tensors)
        metadata = {"virtual_shards": f"{entry['first']}:{entry['end']}"}
        save_file(tensors, path / name, metadata=metadata)
        entry["sha256"] = sha256_file(path / name)
    edited(path, files=files, **changes)


def drop(group: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(f"{group}/")]:
            del tensors[name]

    return change


class Bomb:
    """Leaves a mark where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.mark = str(path / "exploded")

    def __reduce__(self) -> Any:
        return (Path.touch, (Path(self.mark),))


DAMAGES: list[tuple[Damage, str]] = [
    (truncate, r"shards-0001\.safetensors is damaged.*state groups exp_avg, exp_avg_sq, master, reference"),
    (flip_a_bit, r"shards-0000\.safetensors is damaged: its SHA-256 is another one .*shards 0 to 3"),
    (lose_a_file, r"shards-0001\.safetensors cannot be read: No such file"),
    (lose_the_document, r"checkpoint\.json cannot be read: No such file"),
    (foreign_json, r"checkpoint\.json is damaged: run_id: Field required"),
    (deep_json, r"checkpoint\.json is damaged"),
    (add_a_pickle, r"optimizer\.pt is no part of it"),
    (link_a_file, r"shards-0000\.safetensors is a symbolic link and no regular file"),
    (lambda path: edited(path, contract_hash="0" * 64), "contract_hash is 0000.*, but the run's is "),
    (lambda path: edited(path, run_id="other"), "run_id is other, but the run's is 20260101"),
    (lambda path: edited(path, seed=1), "seed is 1, but the run's is 0"),
    (lambda path: edited(path, prompts=4), "prompts is 4, but the run's is 6"),
    (lambda path: edited(path, optimizer_steps=0), "optimizer_steps is 0, but the run's is 6"),
    (lambda path: edited(path, weights_digest="0" * 64), "weights_digest is 000.*, but the run's is "),
    (lambda path: edited(path, continuation_hash="0" * 64), "continuation_hash is 000"),
    (lambda path: edited(path, files={}), "its files do not make up all virtual shards"),
    (lambda path: rewritten(path, drop("exp_avg_sq")), "state group exp_avg_sq is incomplete in shards-0000"),
    (
        lambda path: rewritten(path, drop("master"), groups={"weight": 19, "exp_avg": 19, "exp_avg_sq": 19}),
        "state group master is missing",
    ),
]


@pytest.mark.parametrize(("damage", "why"), DAMAGES)
def test_a_damaged_checkpoint_is_named_and_passed_over_or_refused(
    run_dir: Path, damage: Damage, why: str
) -> None:
    """F2. The one before it is as good: what follows is made again, bit for bit."""
    damage(newest(run_dir))
    resumed, passed = continuation(run_dir)
    assert (resumed.rollout, resumed.checkpoint) == (2, "00002")
    assert all(line.startswith("checkpoints/00003: ") for line in passed)
    assert any(re.search(why, line) for line in passed), passed
    for number in (1, 2):
        shutil.rmtree(run_dir / "checkpoints" / f"{number:05d}")
    with pytest.raises(EvidenceError, match=f"no checkpoint can be gone on from(.|\n)*{why}"):
        continuation(run_dir)
    assert not (newest(run_dir) / "exploded").exists()


def test_a_pickle_under_a_checkpoints_own_name_is_never_loaded(run_dir: Path) -> None:
    path = newest(run_dir)
    (path / "shards-0000.safetensors").write_bytes(pickle.dumps(Bomb(path)))
    files = json.loads((path / "checkpoint.json").read_text())["files"]
    files["shards-0000.safetensors"]["sha256"] = sha256_file(path / "shards-0000.safetensors")
    edited(path, files=files)
    _, passed = continuation(run_dir)
    assert any("shards-0000.safetensors is no safetensors file" in line for line in passed), passed
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_shards([ShardFile(path / "shards-0000.safetensors", 0, 8)], policy_state(), range(8))
    assert not (path / "exploded").exists()


def test_a_file_that_leads_outside_is_no_name(run_dir: Path) -> None:
    path = newest(run_dir)
    plain = json.loads((path / "checkpoint.json").read_text())
    plain["files"]["../../shards-0000.safetensors"] = plain["files"].pop("shards-0000.safetensors")
    (path / "checkpoint.json").write_text(json.dumps(plain))
    assert "checkpoint.json is damaged: files" in continuation(run_dir)[1][0]


def test_evidence_that_does_not_fit_a_checkpoint_fails_the_evidence_gate(run_dir: Path) -> None:
    edited(newest(run_dir), optimizer_digest="0" * 64)
    gates = {gate.name: gate for gate in verify(run_dir).judgement.gates}
    assert gates["evidence"].verdict.value == "FAIL"
    assert any("checkpoints/00003: optimizer_digest is 000" in reason for reason in gates["evidence"].reasons)


def test_a_checkpoint_that_was_never_finished_is_named_and_removed(run_dir: Path, compose: Any) -> None:
    newest(run_dir).rename(newest(run_dir).with_name("00003.partial"))
    resumed, passed = continuation(run_dir)
    assert (resumed.rollout, passed) == (2, ("checkpoints/00003.partial was never finished",))
    resume(run_dir, compose, "one", "num_rollouts=3", "checkpoint.every=1")
    assert end(run_dir).verdict.value == "PASS"
    assert [path.name for path in sorted((run_dir / "checkpoints").iterdir())] == ["00002", "00003"]


def test_a_run_that_was_killed_in_its_first_save_begins_again(run_dir: Path, compose: Any) -> None:
    """There is no state that it could lose; one that has a damaged checkpoint is refused still."""
    newest(run_dir).rename(newest(run_dir).with_name("00001.partial"))
    flip_a_bit(run_dir / "checkpoints" / "00002")
    flip_a_bit(run_dir / "checkpoints" / "00001")
    with pytest.raises(EvidenceError, match="no checkpoint can be gone on from"):
        continuation(run_dir)
    for number in (1, 2):
        shutil.rmtree(run_dir / "checkpoints" / f"{number:05d}")
    resumed, passed = continuation(run_dir)
    assert (resumed.rollout, passed) == (0, ("checkpoints/00001.partial was never finished",))
    resume(run_dir, compose, "one", "num_rollouts=3", "checkpoint.every=1")
    assert end(run_dir).verdict.value == "PASS"


# Tensors over layouts ---------------------------------------------------------


def policy_state() -> Any:
    return ((name, weight, sharded) for name, weight, sharded in policy(alone()).named_shards())


def write_then_read(rank: int, world: int, folder: str, wide: int) -> bool:
    """Write in two shards, read in `wide`, and compare with the weights drawn whole."""
    writing = policy(mesh_of(Layout(dp=1, cp=1, tp=world, sp=1), rank))
    write_shards(Path(folder) / f"{rank}", writing.named_shards(), virtual_shards(world, rank, 8))
    torch.distributed.barrier()
    files = [ShardFile(Path(folder) / f"{n}", 8 // world * n, 8 // world * (n + 1)) for n in range(world)]
    whole = dict((name, x.detach()) for name, x, _ in policy(alone()).named_shards())
    same = True
    for index in range(wide):
        own = virtual_shards(wide, index, 8)
        read = [
            (name, torch.empty_like(x[own.start : own.stop] if sharded else x), sharded)
            for name, x, sharded in policy(alone()).named_shards()
        ]
        read_shards(files, read, own)
        for name, x, sharded in read:
            part = whole[name][own.start : own.stop] if sharded else whole[name]
            same &= bits.same_bits(x.detach(), part)
    return same


@pytest.mark.parametrize("wide", [1, 2, 4, 8])
def test_any_layout_reads_its_own_shards(tmp_path: Path, wide: int) -> None:
    assert run_ranks(2, write_then_read, str(tmp_path), wide) == [True, True]


def test_a_tensor_of_another_shape_or_dtype_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "shards"
    write_shards(path, policy_state(), range(8))
    files = [ShardFile(path, 0, 8)]
    name, weight, sharded = next(policy_state())
    for wrong in (torch.empty(8, 3, 3), weight.detach().double()):
        with pytest.raises(CheckpointError, match=f"shards: {name} is torch.float32"):
            read_shards(files, [(name, wrong, sharded)], range(8))
    with pytest.raises(CheckpointError, match="shards lacks nothing"):
        read_shards(files, [("nothing", weight, sharded)], range(8))
    with pytest.raises(CheckpointError, match="has the virtual shards 0:8, not 0:4"):
        read_shards([ShardFile(path, 0, 4)], [(name, weight, sharded)], range(4))
