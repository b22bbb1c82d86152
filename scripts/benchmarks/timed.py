"""A rank that notes how long its evidence takes; its host preloads, as that of `rlsp.run.run_rank` does."""

from __future__ import annotations

import json
from pathlib import Path

from rlsp.preload import preload

preload()

from benchmarks.runs import timed  # noqa: E402  (what a host does comes first)
from rlsp import bits, evidence, run  # noqa: E402
from rlsp.board import Place  # noqa: E402
from rlsp.config import Job  # noqa: E402
from rlsp.rl import update  # noqa: E402
from rlsp.rl.rollout import dispatch  # noqa: E402

_TARGETS = [
    (bits, "row_digest"),
    (update, "shard_entries"),
    (update, "weight_entries"),
    (dispatch, "weights_digest"),
    (run, "startup_facts"),
    (evidence.Evidence, "bind"),
    (evidence.Evidence, "record"),
]


def rank(job: Job, place: Place) -> None:
    """Live as a rank, and note on rank 0 how long evidence took."""
    spent: dict[str, float] = {}
    with timed(_TARGETS, spent):
        run.run_rank(job, place)
    if place.rank == 0:
        (Path(job.run_dir) / "evidence.json").write_text(json.dumps(spent))
