"""Two updates in any layout leave one set of bits: log-probs, gradients, norm, AdamW's state, weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from model_helpers import (
    BF16,
    OBJECTIVE,
    TIED,
    TINY,
    Left,
    alone,
    mesh_of,
    products,
    ragged,
    reordered,
    train,
    trainer,
)
from ranks import run_checks, run_ranks
from torch import Tensor

from rlsp import collectives
from rlsp.config import Config, Job
from rlsp.evidence import DisagreementError, Evidence
from rlsp.groups import Ledger
from rlsp.layout import Layout
from rlsp.model import linear
from rlsp.model.assemble import Models
from rlsp.model.norm import HeadRMSNorm, RMSNorm
from rlsp.model.weights import ReplicaDriftError, weights_digest
from rlsp.numerics.certificate import Certificate
from rlsp.rl import update
from rlsp.rl.batch import RolloutBatch
from rlsp.stopwatch import Stopwatch
from rlsp.summation import Rule, Span

# 30, 31, 33 and 34 tokens: no layout divides them; 70 crosses two blocks; one draws one token, one none.
LENGTHS, RESPONSES = (34, 70, 31, 33, 30, 5, 6), (30, 60, 20, 1, 16, 1, 0)
ADVANTAGES = torch.tensor([1.0, -0.5, 0.7, 2.0, -1.3, 0.4, 1.0])
SHUFFLED = [3, 6, 0, 5, 2, 4, 1]
SHAPES = {"float32": TINY, "tied": TIED, "bfloat16": BF16}


def at(dp: int = 1, cp: int = 1, tp: int = 1, sp: int = 1) -> Layout:
    return Layout(dp=dp, cp=cp, tp=tp, sp=sp)


# By world size: layout, shape, micro-batch size, whether the sequences are shuffled.
CASES: dict[int, list[tuple[Layout, str, int, bool]]] = {
    2: [
        (at(tp=2), "float32", 7, False),
        (at(tp=2, sp=2), "tied", 3, True),
        (at(cp=2), "float32", 4, True),
        (at(dp=2), "bfloat16", 1, False),
    ],
    3: [(at(dp=3), "float32", 2, True)],
    4: [
        (at(tp=4, sp=4), "float32", 7, True),
        (at(cp=4), "float32", 7, False),
        (at(cp=2, tp=2), "bfloat16", 3, False),
        (at(cp=2, tp=2, sp=2), "float32", 7, True),
        (at(dp=2, cp=2), "tied", 2, False),
        (at(dp=2, tp=2, sp=2), "tied", 3, True),
    ],
    8: [
        (at(tp=8, sp=8), "float32", 7, False),
        (at(tp=8), "bfloat16", 7, False),
        (at(cp=2, tp=4, sp=4), "tied", 7, True),
        (at(dp=2, cp=2, tp=2, sp=2), "float32", 2, False),
    ],
}


def batch() -> RolloutBatch:
    return ragged(LENGTHS, RESPONSES)


def left(layout: Layout, rank: int, kind: str, size: int, shuffled: bool) -> Left:
    mesh = mesh_of(layout, rank)
    order = SHUFFLED if shuffled else list(range(len(LENGTHS)))
    of = trainer(mesh, layout, objective=replace(OBJECTIVE, micro_batch_size=size), shape=SHAPES[kind])
    return train(of, reordered(batch(), order), ADVANTAGES[order])


@cache
def reference(kind: str) -> Left:
    return left(at(), 0, kind, 7, False)


def every_case(rank: int, world: int) -> list[Left]:
    return [left(layout, rank, *rest) for layout, *rest in CASES[world]]


@pytest.mark.parametrize("world", CASES)
def test_two_updates_leave_the_same_bits_in_every_layout(world: int) -> None:
    products()
    by_rank = run_ranks(world, every_case, timeout_s=300.0)
    for rank, found in enumerate(by_rank):
        for case, one in zip(CASES[world], found, strict=True):
            assert one == reference(case[1]), (rank, case)


def test_the_case_clips_updates_and_tells_dtypes_apart() -> None:
    one = reference("float32")
    assert all(float.fromhex(clip) < 1 for clip in one.clips)
    assert len({*one.weights, *one.gradients}) == 4
    assert len({reference(kind).weights for kind in SHAPES}) == 3


# Fewer sequences than replicas; no active token on a replica.


def lonely(rank: int, world: int) -> list[Left]:
    found = []
    for rows in ([1], [0, 6]):
        mesh = mesh_of(at(dp=world), rank)
        found.append(train(trainer(mesh, at(dp=world)), reordered(batch(), rows), ADVANTAGES[rows]))
    return found


def test_a_replica_without_sequences_changes_no_bit_and_hangs_nobody() -> None:
    products()
    expected = lonely(0, 1)
    for found in run_ranks(3, lonely):
        assert found == expected


# Boundaries: lengths that nothing divides, and targets across CP shards.


def boundaries(rank: int, world: int) -> list[Left]:
    """30 to 34 tokens, every one a sequence of its own, all of whose tokens but the first count."""
    layout = at(cp=2, tp=2, sp=2) if world > 1 else at()
    mesh = mesh_of(layout, rank)
    found = []
    for length in (30, 31, 33, 34, 128, 129):
        data = ragged([length], [length - 1], seed=length)
        found.append(train(trainer(mesh, layout), data, torch.ones(1), updates=1))
    return found


def test_every_length_and_every_boundary_token_is_right_under_zigzag() -> None:
    """C1, C2, C9: at 128 tokens each of four chunks ends with a target that stands in another shard."""
    products()
    expected = boundaries(0, 1)
    for found in run_ranks(4, boundaries):
        assert found == expected


# Witnesses: a fault of order, or of who adds, planted in two ranks, is seen by the same comparison.


def left_to_right(x: Tensor) -> Tensor:
    total = x[0]
    for part in x[1:]:
        total = total + part
    return total


def planted(owner: object, name: str, value: object, rank: int) -> Left:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        return left(at(tp=2), rank, "float32", 7, False)


def sum_naively(x: Tensor, group: object) -> Tensor:
    """Round each rank's partial sum of a row-parallel product before it is added."""
    return collectives.all_reduce(x.bfloat16().float(), group)


def unordered_tree(rank: int, world: int) -> Left:
    return planted(linear, "tree_sum", left_to_right, rank)


def rounded_partials(rank: int, world: int) -> Left:
    return planted(linear, "reduce_rows", lambda x, wiring: sum_naively(x, wiring.tp), rank)


def uncounted_norms(rank: int, world: int) -> str:
    """D4: take what lies on this rank for all there is, so that every rank clips by another norm."""
    original, lone = update.gradient_norm, alone().tp
    with pytest.raises(ReplicaDriftError) as caught:
        planted(update, "gradient_norm", lambda named, _: original(named, lone), rank)
    return str(caught.value)


def drifting_norm(rank: int, world: int, which: type[RMSNorm]) -> str:
    """D1: leave a norm's gradient on each rank of TP as it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(which, "_rule", staticmethod(lambda _wiring, _heads: Rule(Span.TOKENS, block=1)))
        with pytest.raises(ReplicaDriftError) as caught:
            left(at(tp=2, sp=2), rank, "float32", 7, False)
    return str(caught.value)


def drifting_layer_norm(rank: int, world: int) -> str:
    return drifting_norm(rank, world, RMSNorm)


def drifting_head_norm(rank: int, world: int) -> str:
    return drifting_norm(rank, world, HeadRMSNorm)


def drifting_replica(rank: int, world: int, config: Config, folder: str) -> str:
    """D12: take a step of another size on one replica; evidence is brought together after every update."""
    mesh = mesh_of(at(dp=2), rank)
    of = trainer(mesh, at(dp=2), objective=replace(OBJECTIVE, learning_rate=1e-2 * (1 + 1e-6 * rank)))
    job = Job(config, "20260101-000000-abcdef", folder, (), (), "2026-01-01T00:00:00+00:00")
    models = Models(of.model, None, None, of.model.wiring.contract, Certificate(frozenset(), (), 0, "0" * 64))
    evidence = Evidence(job, mesh, models, eos_ids=(96,))
    data = batch()
    evidence.bind(data, ADVANTAGES)
    steps = [of.update(data, ADVANTAGES)]
    digest = weights_digest(of.model)
    watch = Stopwatch(Ledger())
    with pytest.raises(DisagreementError) as caught:
        evidence.record(0, data, [0.0] * 7, ADVANTAGES, steps, (digest, digest), (0, 0), watch, data.logp, {})
    return str(caught.value)


def test_replicas_that_drift_apart_are_named_on_every_rank_after_the_update(
    compose: Callable[..., Config], tmp_path: Path
) -> None:
    products()
    for said in run_ranks(2, drifting_replica, compose(), str(tmp_path)):
        assert said.startswith("replicas drifted apart: ranks [1] hold other")
    assert (tmp_path / "metrics.jsonl").read_text() == ""


WITNESSES: list[Callable[[int, int], object]] = [
    unordered_tree,
    rounded_partials,
    uncounted_norms,
    drifting_layer_norm,
    drifting_head_norm,
]


def test_what_breaks_the_contract_shows() -> None:
    products()
    found = run_checks(2, WITNESSES)
    expected = reference("float32")
    for one in found["unordered_tree"] + found["rounded_partials"]:
        assert one.logps != expected.logps
    for said in found["uncounted_norms"] + found["drifting_layer_norm"]:
        assert "decoder.final_layernorm.weight (ranks [1])" in said
    for said in found["drifting_head_norm"]:
        assert "self_attention.q_layernorm.weight (ranks [1])" in said
        assert "input_layernorm" not in said
