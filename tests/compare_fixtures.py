"""Two runs in different layouts whose reports and tables agree, whatever difference is planted in one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from report_fixtures import (
    ROLLOUTS,
    SEQUENCES,
    Tensors,
    fit_facts,
    make_digests,
    make_tensors,
    write_run,
)

from rlsp.report.verdict import seal

HIT = 1  # the rollout that most faults are planted in
LENGTH = 16
BLOCKS = {"numerics__token_block": 1, "numerics__q_block": 1, "numerics__k_block": 1}
# Four ranks, engines of one rank each; and eight ranks in another layout, engines of two.
LAYOUT_A = {**BLOCKS, "parallel__cp": 2, "parallel__tp": 2, "parallel__sp": 2, "parallel__dp": 1}
LAYOUT_A |= {"rollout__tp": 1, "rollout__engines": 3, "micro_batch_size": 4}
LAYOUT_B = {**BLOCKS, "parallel__cp": 1, "parallel__tp": 4, "parallel__sp": 1, "parallel__dp": 2}
LAYOUT_B |= {"rollout__tp": 2, "rollout__engines": 4, "micro_batch_size": 2, "name": "other"}

ChangeTensors = Callable[[int, Tensors], None]
ChangeDigests = Callable[[int, dict[str, Any]], None]


def full_tensors(index: int) -> Tensors:
    """Return a rollout of which every sequence has its full length, so that owners can be told by hand."""
    random = np.random.default_rng(index)
    shape = (SEQUENCES, LENGTH)
    active = np.broadcast_to(np.arange(LENGTH) >= 5, shape).copy()
    logprob = np.where(active, -random.exponential(1.5, shape), 0).astype(np.float32)
    rows = np.where(active, random.integers(-(2**62), 2**62, shape), 0)
    return make_tensors(index) | {
        "active_mask": active,
        "lengths": np.full(SEQUENCES, LENGTH),
        "rollout_logprob": logprob,
        "train_logprob": logprob.copy(),
        "rollout_row_digest": rows,
        "train_row_digest": rows.copy(),
    }


def make_run(
    folder: Path,
    layout: Mapping[str, Any],
    *,
    tensors: ChangeTensors = lambda index, tensors: None,
    digests: ChangeDigests = lambda index, digests: None,
    startup: Callable[[dict[str, Any]], None] = lambda startup: None,
    rollouts: int = ROLLOUTS,
    aborted: str | None = None,
    **config: Any,
) -> Path:
    """Write and seal a run in which reports and tables agree, whatever was planted."""
    planned: dict[int, dict[str, Any]] = {}

    def plant(index: int, arrays: Tensors) -> None:
        arrays.update(full_tensors(index))
        tensors(index, arrays)

    def fit(index: int, facts: dict[str, Any]) -> None:
        planned[index] = make_digests(index, facts)
        digests(index, planned[index])
        fit_facts(facts, planned[index])
        cp = layout["parallel__cp"]
        facts["cp_tokens"] = (SEQUENCES * (LENGTH - 5) // cp,) * cp

    write_run(
        folder,
        tensors=plant,
        facts=fit,
        digests=lambda index, said: said.update(planned[index]),
        startup=startup,
        rollouts=rollouts,
        aborted=aborted,
        config={**layout, **config},
    )
    seal(folder, aborted)
    return folder


def in_rollout(change: Callable[[Any], None], hit: int = HIT) -> Callable[[int, Any], None]:
    return lambda index, planted: change(planted) if index == hit else None


def in_update(change: Callable[[dict[str, Any]], None], hit: int = HIT) -> ChangeDigests:
    return in_rollout(lambda digests: change(digests["updates"][-1]), hit)


def flip(table: dict[str, list[str]], name: str, shard: int = 0) -> None:
    table[name][shard] = f"{int(table[name][shard], 16) ^ 1:032x}"
