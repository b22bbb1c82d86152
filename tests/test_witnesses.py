"""Each rule is needed: replaced by the naive sum, two layouts part, and rlsp-compare names where."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from naive import PLANTS, Plant
from ranks import run_ranks

from rlsp import run
from rlsp.board import Board, Place
from rlsp.config import Job
from rlsp.model.assemble import assemble
from rlsp.report import manifest, verdict
from rlsp.report.compare import compare
from rlsp.report.compare_records import Outcome

SMALL = (
    "num_rollouts=1",
    "prompts_per_rollout=2",
    "samples_per_prompt=3",
    "max_response_tokens=90",
    "entropy_coef=0.01",
    "rollout.ignore_eos=true",
    "tracker=none",
)


def live(rank: int, world_size: int, job: Job, name: str | None) -> None:
    """Live a rank in the harness's process group; planted after the certificate, which would see it."""
    board = Board.join(Path(job.run_dir) / "logs" / "board", world_size).writer(rank)
    with ExitStack() as planted:

        def assemble_then_plant(*arguments: Any) -> Any:
            models = assemble(*arguments)
            if name:
                planted.enter_context(PLANTS[name].patch())
            return models

        planted.enter_context(mock.patch.object(run, "assemble", assemble_then_plant))
        run.live(job, Place(rank=rank, world_size=world_size, local_rank=rank, init_method="", board=board))


def sealed_run(folder: Path, compose: Any, overrides: str, name: str | None) -> Path:
    """Run one small experiment and seal its folder."""
    (folder / "logs").mkdir(parents=True)
    config = compose(*SMALL, *overrides.split())
    started = "2026-01-01T00:00:00+00:00"
    job = Job(config, "20260101-000000-abcdef", str(folder), (), ("rlsp",), started)
    manifest.begin(job, {})
    Board.create(folder / "logs" / "board", config.world_size)
    run_ranks(config.world_size, live, job, name, timeout_s=120)
    manifest.finish(folder, started, manifest.Status.FINISHED)
    verdict.seal(folder)
    return folder


@pytest.fixture(scope="module")
def exact_runs(tmp_path_factory: pytest.TempPathFactory, compose: Any) -> dict[str, Path]:
    """Run every layout of the plants once without a plant."""
    wanted = dict.fromkeys(overrides for plant in PLANTS.values() for overrides in plant.overrides)
    return {
        overrides: sealed_run(tmp_path_factory.mktemp("exact") / str(i), compose, overrides, None)
        for i, overrides in enumerate(wanted)
    }


def test_without_a_plant_every_layout_is_equal_to_the_last_bit(exact_runs: dict[str, Path]) -> None:
    first, *others = (run for overrides, run in exact_runs.items() if "float32" not in overrides)
    assert len(others) >= 4
    assert [compare(first, other).outcome for other in others] == [Outcome.EQUAL] * len(others)


@pytest.mark.parametrize(("name", "plant"), PLANTS.items())
def test_the_naive_sum_parts_two_layouts_where_it_is_planted(
    name: str, plant: Plant, tmp_path: Path, compose: Any
) -> None:
    a, b = (
        sealed_run(tmp_path / str(i), compose, overrides, name) for i, overrides in enumerate(plant.overrides)
    )
    found = compare(a, b)
    assert found.outcome is Outcome.DIFFERENT, found.refusals
    assert found.first is not None
    assert found.first.stage.value == plant.stage
    assert plant.tensor is None or (found.first.tensor or "").endswith(plant.tensor)
