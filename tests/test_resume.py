"""A run that is stopped or killed and gone on with, in the same or another layout, is the undisturbed run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from ranks import RankError
from segment_runs import LAYOUTS, ROLLOUTS, end, files_of, flip, killed_in, resume, segment

from rlsp import checkpoints, run
from rlsp.checkpoints import Checkpoints
from rlsp.model.checkpoint import CheckpointError, read_shards
from rlsp.model.weights import Named
from rlsp.report.compare import compare
from rlsp.report.compare_records import Outcome, Stage
from rlsp.report.files import EvidenceError
from rlsp.report.manifest import Beginning, Manifest, Status
from rlsp.report.verdict import verify
from rlsp.summation import BoundBreachError

WORLDS = {"one": 1, "tp2_sp2": 2, "tp2": 2, "cp2": 2, "dp2": 2, "tp4_sp4": 4, "cp2_tp2_sp2": 4}


@pytest.fixture(scope="module")
def undisturbed(compose: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    segment(folder, compose, "one")
    assert end(folder).verdict.value == "PASS"
    return folder


@pytest.fixture(scope="module")
def cut(compose: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in one process that was killed in rollout 3; its newest checkpoint is that after rollout 1."""
    folder = tmp_path_factory.mktemp("cut") / "run"
    with pytest.raises(RankError, match="died by signal SIGKILL"):
        segment(folder, compose, "one", plant=killed_in(3, 1))
    return folder


@pytest.fixture
def killed(cut: Path, tmp_path: Path) -> Path:
    return shutil.copytree(cut, tmp_path / "run")


def assert_undisturbed(folder: Path, undisturbed: Path) -> None:
    """Compare all that a layout may not change, and ask every command."""
    assert files_of(folder) == files_of(undisturbed)
    found = verify(folder)
    assert (found.judgement.verdict.value, found.damage) == ("PASS", ()), found.judgement.reasons
    comparison = compare(folder, undisturbed)
    assert (comparison.outcome, comparison.rollouts) == (Outcome.EQUAL, ROLLOUTS), comparison.refusals


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("one", "one"),
        ("one", "tp2_sp2"),
        ("tp2_sp2", "cp2"),
        ("dp2", "tp4_sp4"),
        ("tp4_sp4", "tp2"),
        ("cp2_tp2_sp2", "one"),
    ],
)
def test_a_killed_run_goes_on_in_any_layout_bit_for_bit(
    compose: Any, tmp_path: Path, undisturbed: Path, first: str, then: str
) -> None:
    """F1, F2: the rows, moments and data position of a killed run; rollout 2 is made again and compared."""
    folder = tmp_path / "run"
    with pytest.raises(RankError, match="died by signal SIGKILL"):
        segment(folder, compose, first, plant=killed_in(3, WORLDS[first]))
    assert (folder / "rollouts" / "00002.safetensors").exists()
    assert resume(folder, compose, then).rollout == 2
    assert not list((folder / "logs" / "again").rglob("*.*"))
    assert end(folder).verdict.value == "PASS"
    assert_undisturbed(folder, undisturbed)
    manifest = Manifest.read(folder / "manifest.json")
    assert [s.begun_by for s in manifest.segments] == [Beginning.STARTED, Beginning.RESUMED]
    assert [s.first_rollout for s in manifest.segments] == [0, 2]
    assert (manifest.checkpoint, manifest.earlier[0].status) == ("00002", Status.RUNNING)
    assert [manifest.number_of(index) for index in range(4)] == [0, 0, 1, 1]


def test_three_segments_in_three_layouts_are_one_run(compose: Any, tmp_path: Path, undisturbed: Path) -> None:
    """The first is asked to stop and saves at its next boundary; the second finishes, and is extended."""
    folder = tmp_path / "run"
    segment(folder, compose, "cp2", "checkpoint.every=100", "num_rollouts=2", stop=True)
    assert end(folder, "stopped by SIGTERM").verdict.value == "ABORTED"
    assert resume(folder, compose, "tp2_sp2", "num_rollouts=2").rollout == 1
    assert end(folder).verdict.value == "PASS"
    assert resume(folder, compose, "one").rollout == 2
    assert end(folder).verdict.value == "PASS"
    assert_undisturbed(folder, undisturbed)
    assert "Segments of the run" in (folder / "report.html").read_text()
    assert "Segments of the run" not in (undisturbed / "report.html").read_text()
    assert Manifest.read(folder / "manifest.json").earlier[0].aborted == "stopped by SIGTERM"
    said = compare(folder, undisturbed).notes
    assert any(
        "run A has 3 segments: from rollout 0 in cp2_tp1_sp1, started; from rollout 1 in" in n for n in said
    )


def test_a_run_without_a_checkpoint_begins_again(compose: Any, tmp_path: Path, undisturbed: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(RankError):
        segment(folder, compose, "one", "checkpoint.every=0", plant=killed_in(2, 1))
    assert resume(folder, compose, "tp2_sp2").rollout == 0
    end(folder)
    assert_undisturbed(folder, undisturbed)


# Witnesses: each part of the state matters, and its loss is noticed ------------


def without(*groups: str) -> Any:
    """Read a checkpoint back but for some groups of state."""

    @contextmanager
    def plant(_rank: int) -> Iterator[None]:
        def partly(files: Any, named: Any, shards: range) -> None:
            kept: list[Named] = [entry for entry in named if entry[0].partition("/")[0] not in groups]
            read_shards(files, kept, shards)

        with mock.patch.object(checkpoints, "read_shards", partly):
            yield

    return plant


def unchecked(plant: Any) -> Any:
    """Take away the comparison of what was read with what was saved."""

    @contextmanager
    def both(rank: int) -> Iterator[None]:
        digests, armed = Checkpoints._digests, [True]

        def blind(self: Checkpoints) -> dict[str, str]:
            return {} if armed and armed.pop() else digests(self)

        with plant(rank), mock.patch.object(Checkpoints, "_digests", blind):
            yield

    return both


@pytest.mark.parametrize(
    ("group", "named"),
    [
        ("exp_avg", "optimizer"),
        ("exp_avg_sq", "optimizer"),
        ("master", "optimizer"),
        ("weight", "weights"),
    ],
)
def test_a_group_of_state_that_is_not_read_back_is_noticed_and_matters(
    compose: Any, killed: Path, undisturbed: Path, group: str, named: str
) -> None:
    """F2, F3. Without the check the run differs: at once in what was recorded before, or at its end."""
    with pytest.raises(CheckpointError, match=f"checkpoints/00002: {named}, read back, has the digest"):
        resume(killed, compose, "one", plant=without(group))
    if group == "exp_avg_sq":  # a first moment over nothing: the very next step is out of all bounds
        with pytest.raises(BoundBreachError):
            resume(killed, compose, "one", plant=unchecked(without(group)))
        return
    with pytest.raises(EvidenceError, match="rollout 2, made again, has other bits than before"):
        resume(killed, compose, "one", plant=unchecked(without(group)))
    shutil.rmtree(killed / "logs" / "again")  # without the witness, too
    resume(killed, compose, "one", plant=unchecked(without(group)))
    judgement = end(killed)
    assert files_of(killed) != files_of(undisturbed)
    comparison = compare(killed, undisturbed)
    if group == "weight":
        assert any(
            reason.startswith("version: rollout 2: the trainer had weights") for reason in judgement.reasons
        )
        return
    assert comparison.outcome is Outcome.DIFFERENT
    assert comparison.first is not None
    assert (comparison.first.stage, comparison.first.rollout) == (Stage.OPTIMIZER, 2)


def test_a_data_position_that_is_not_restored_would_show(compose: Any, killed: Path) -> None:
    """F1, F2: the rollouts' indices begin again at 0, as those of a loader do that was not restored."""

    def from_the_start(_rank: int) -> Any:
        exact = run.sequences_of
        return mock.patch.object(
            run, "sequences_of", lambda config, task, index: exact(config, task, index - 2)
        )

    with pytest.raises(EvidenceError, match="rollout 2, made again, has other bits than before"):
        resume(killed, compose, "one", plant=from_the_start)


def test_a_reference_that_followed_the_policy_would_show(compose: Any, killed: Path) -> None:
    with pytest.raises(CheckpointError, match="reference, read back, has the digest"):
        resume(killed, compose, "one", "seed=0", plant=wrong_reference)


@contextmanager
def wrong_reference(_rank: int) -> Iterator[None]:
    """Read the reference from the policy's weights."""

    def mixed(files: Any, named: Any, shards: range) -> None:
        kept = list(named)
        read_shards(files, kept, shards)
        weights = {name.partition("/")[2]: x for name, x, _ in kept if name.startswith("weight/")}
        for name, x, _ in kept:
            if name.startswith("reference/"):
                x.data.copy_(weights[name.partition("/")[2]])

    with mock.patch.object(checkpoints, "read_shards", mixed):
        yield


def test_rows_that_a_killed_run_left_are_the_witness_of_those_made_again(compose: Any, killed: Path) -> None:
    flip(killed / "rollouts" / "00002.safetensors")
    with pytest.raises(EvidenceError, match=r"differs from logs/again/rollouts/00002\.safetensors"):
        resume(killed, compose, "one")


def test_a_bit_that_changed_after_the_choice_is_noticed_by_the_ranks(compose: Any, killed: Path) -> None:
    """Between the owner's look and the ranks' reading; the SHA-256 is not asked twice, the digests are."""

    @contextmanager
    def late(_rank: int) -> Iterator[None]:
        flip(killed / "checkpoints" / "00002" / "shards-0000.safetensors")
        yield

    with pytest.raises(CheckpointError, match="read back, has the digest"):
        resume(killed, compose, "one", plant=late)


def test_every_layout_of_the_matrix_is_legal(compose: Any) -> None:
    assert {name: compose(*LAYOUTS[name]).world_size for name in LAYOUTS} == WORLDS
