"""A host imports what its ranks need before it forks them, and neither torch's compiler nor wandb."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from launch_owner import RUN_ID, job_of_two_ranks, run

from rlsp.config import Config


def test_ranks_import_nothing_heavy_of_their_own(compose: Callable[..., Config], tmp_path: Path) -> None:
    job = job_of_two_ranks(compose, tmp_path / RUN_ID, "num_rollouts=1", "entropy_coef=0.01")
    ended = run(job, "preloaded_entries:list_imports")
    assert ended.status in (0, 4), ended.output
    for rank in range(2):
        found = json.loads((tmp_path / RUN_ID / f"imports-{rank}.json").read_text())
        assert found == {"heavy": [], "restored": True, "late": []}
