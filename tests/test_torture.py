"""Eight cells of `scripts/torture`: the real command, a real fault, and the run that goes on."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from faults.cells import FAULTS, IN_CI, MOMENTS, Cell, Way, cells
from faults.command import MARK, processes_of
from faults.kills import moments
from faults.plant import HOOKS
from faults.trial import Undisturbed, attempt, equals, missing_rows
from segment_runs import flip

CHOSEN = [cell for cell in cells() if cell.name in IN_CI]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    folder = tmp_path_factory.mktemp("undisturbed")
    return Undisturbed(folder / "run", folder / "rewarded")


@pytest.mark.parametrize("cell", CHOSEN, ids=[cell.name for cell in CHOSEN])
def test_a_run_that_met_a_fault_ends_as_if_nothing_had_happened(
    cell: Cell, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    row = attempt(cell, tmp_path, undisturbed)
    assert row.wrong == ""
    assert (row.left, row.lost, row.exact) == (0, 0, True)


def test_a_difference_from_the_undisturbed_run_is_seen(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """The witness of the table's last columns."""
    reference = undisturbed.of(CHOSEN[0])
    run = shutil.copytree(reference, tmp_path / "run")
    assert (equals(run, reference), missing_rows(run)) == ("", 0)
    flip(run / "rollouts" / "00003.safetensors")
    assert "rollouts/00003.safetensors" in equals(run, reference)
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(rows[:-1]))
    assert missing_rows(run) == 1
    (run / "metrics.jsonl").write_text("".join([*rows, rows[0]]))
    assert missing_rows(run) == 1


def test_a_process_that_is_left_is_counted_whoever_its_parent_is(tmp_path: Path) -> None:
    code = "import os, time\nif os.fork():\n    os._exit(0)\nos.setsid()\ntime.sleep(60)"
    environment = {MARK: str(tmp_path / "run")}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    (left,) = processes_of(tmp_path / "run")
    assert processes_of(tmp_path / "ru") == []
    subprocess.run(["kill", "-KILL", str(left)], check=True)


def test_the_table_has_sixty_cells_of_every_fault_moment_and_step() -> None:
    every = cells()
    assert len(every) >= 60
    assert len({cell.name + cell.then for cell in every}) == len(every)
    assert {cell.fault for cell in every} == FAULTS.keys()
    assert {cell.moment for cell in every} == MOMENTS.keys()
    assert {cell.way for cell in every} == set(Way)
    assert {moment.hook for moment in MOMENTS.values()} - {None} == HOOKS.keys()
    assert [cell.name in IN_CI for cell in every[:9]] == [True] * 8 + [False]
    assert len(IN_CI) == 8


def test_fifty_kills_are_drawn_alike_and_never_let_the_run_end_before_the_last() -> None:
    plants = moments(50, seed=7)
    assert plants == moments(50, seed=7) != moments(50, seed=8)
    first = 0
    for plant in plants:
        phase = plant.settled(first, 20).phase
        if plant.by is not None:
            index = int(phase.split()[1][:-1])
            assert first <= index <= 19
            first = index + (phase.endswith("saving a checkpoint") and index < 19)  # saved at the worst
    assert first > 10
    assert {plant.act for plant in plants} == {"kill", "kill host", "kill owner"}
