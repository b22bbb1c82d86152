"""Logits that do not lie in memory at once leave the bits of those that do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from model_helpers import BF16, OBJECTIVE, TIED, TINY, Left, alone, mesh_of, ragged, train, trainer
from ranks import run_ranks
from torch import Tensor

from rlsp.groups import Mesh
from rlsp.layout import Layout
from rlsp.model import build, large_vocabulary

SHAPES = {"float32": TINY, "bfloat16": BF16, "tied": TIED}
ONE, FOUR = Layout(dp=1, cp=1, tp=1, sp=1), Layout(dp=1, cp=2, tp=2, sp=2)
BATCH = ragged([70, 40, 33], [60, 20, 0])
ADVANTAGES = torch.tensor([1.0, -0.5, 2.0])


@contextmanager
def in_parts() -> Iterator[mock.Mock]:
    """Keep no logits whole, and no more than two leaves' at a time."""
    two_leaves = 2 * 32 * 128
    with (
        mock.patch.object(build, "WHOLE_LOGITS", 0),
        mock.patch.object(large_vocabulary, "LOGITS_AT_ONCE", two_leaves),
        mock.patch.object(build, "score_hidden", wraps=large_vocabulary.score_hidden) as used,
    ):
        yield used


def left(mesh: Mesh, layout: Layout, kind: str) -> Left:
    objective = replace(OBJECTIVE, micro_batch_size=2)
    return train(trainer(mesh, layout, objective=objective, shape=SHAPES[kind]), BATCH, ADVANTAGES)


@pytest.mark.parametrize("kind", SHAPES)
def test_two_updates_leave_the_same_bits_without_whole_logits(kind: str) -> None:
    whole = left(alone(), ONE, kind)
    with in_parts() as used:
        assert left(alone(), ONE, kind) == whole
    assert used.call_count == 8  # two micro-batches of two updates, policy and reference


def in_parts_on_ranks(rank: int, world: int) -> Left:
    with in_parts():
        return left(mesh_of(FOUR, rank), FOUR, "bfloat16")


def test_shards_of_sequence_and_vocabulary_change_no_bit() -> None:
    whole = left(alone(), ONE, "bfloat16")
    assert run_ranks(4, in_parts_on_ranks) == [whole] * 4


def left_to_right(x: Tensor) -> Tensor:
    total = x[0]
    for addend in x[1:]:
        total = total + addend
    return total


def test_another_order_over_the_shards_would_show() -> None:
    """The witness."""
    with in_parts(), mock.patch.object(large_vocabulary, "tree_sum", left_to_right):
        naive = left(alone(), ONE, "float32")
    exact = left(alone(), ONE, "float32")
    assert naive.logps[0] == exact.logps[0]
    assert naive.gradients[0] != exact.gradients[0]
