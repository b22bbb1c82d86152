"""Gradients of collectives on 1, 2, 3, 4 and 8 gloo ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from rank_data import addend, addends, backwards, refused, same, world
from ranks import Outcomes, run_checks

from rlsp import collectives
from rlsp.numerics.tree import tree_sum


def gather_rs_returns_the_tree_sum_of_all_uses(rank: int, n: int) -> None:
    group = world(rank, n)
    for dim in (0, 1):
        x = addend(rank, 20, 30).requires_grad_()
        uses = addends(n, *(20 * n, 30) if dim == 0 else (20, 30 * n))
        whole = collectives.gather_rs(x, group, dim)
        assert same(whole, torch.cat([addend(each, 20, 30) for each in range(n)], dim))
        whole.backward(uses[rank])
        assert same(x.grad, tree_sum(uses).chunk(n, dim)[rank])
        assert n <= 2 or not same(x.grad, backwards(uses).chunk(n, dim)[rank])


def reduce_scatter_g_returns_every_slice_of_the_gradient(rank: int, n: int) -> None:
    group = world(rank, n)
    x = addends(n, 2, 3 * n)
    own = x[rank].clone().requires_grad_()
    part = collectives.reduce_scatter_g(own, group, dim=1)
    assert same(part, tree_sum(x).chunk(n, 1)[rank])
    part.backward(addend(rank, 2, 3))
    assert same(own.grad, torch.cat([addend(each, 2, 3) for each in range(n)], 1))


def copy_ar_sums_the_gradients_of_all_copies(rank: int, n: int) -> None:
    group = world(rank, n)
    x = torch.ones(4, 3, requires_grad=True)
    copy = collectives.copy_ar(x, group)
    assert same(copy, x.detach())
    uses = addends(n, 4, 3)
    copy.backward(uses[rank])
    assert same(x.grad, tree_sum(uses))


def all_reduce_copy_reaches_the_shards_of_ranks_that_own_no_token(rank: int, n: int) -> None:
    group = world(rank, n)
    logits = addend(rank, 5, 3).requires_grad_()
    total = collectives.all_reduce_copy(logits, group)
    (total * 2.0)[:1].sum().backward()
    expected = torch.zeros(5, 3)
    expected[0] = 2.0
    assert same(logits.grad, expected)
    # Outside autograd the sum has no gradient: refused, where a plain backend call would lose it in silence.
    refused(("all_reduce float32[5,3]", "gradient", group.label), collectives.all_reduce, logits, group)


def slice_gather_returns_every_ranks_gradient(rank: int, n: int) -> None:
    group = world(rank, n)
    x = addend(0, 2 * n, 3).requires_grad_()
    part = collectives.slice_gather(x, group)
    assert same(part, x.detach()[2 * rank : 2 * rank + 2])
    part.backward(addend(rank, 2, 3))
    assert same(x.grad, torch.cat([addend(each, 2, 3) for each in range(n)]))


def gradients_that_are_summed_are_rounded_once(rank: int, n: int) -> None:
    group = world(rank, n)
    uses = addends(n, 64 * n, 8, dtype=torch.bfloat16)
    wide = tree_sum(uses.to(torch.float32)).to(torch.bfloat16)
    for pair, expected in ((collectives.gather_rs, wide.chunk(n)[rank]), (collectives.copy_ar, wide)):
        x = torch.zeros(expected.shape, dtype=torch.bfloat16, requires_grad=True)
        pair(x, group).backward(uses[rank])
        assert same(x.grad, expected)
    assert n <= 2 or not same(tree_sum(uses), wide)  # rounding at every addition gives other bits


def chained_pairs_equal_one_process(rank: int, n: int) -> None:
    """Gather sequence shards, multiply by a column and a row shard, reduce-scatter: a Megatron layer."""
    group = world(rank, n)
    source = torch.Generator().manual_seed(7)
    shapes = ((n, 4), (4, 2 * n), (2 * n, 3))
    draw = [torch.randint(-8, 9, shape, generator=source).to(torch.float64) for shape in shapes]
    x, up, down = (each.clone().requires_grad_() for each in draw)
    ((x @ up) @ down).pow(2).sum().backward()
    own = [draw[0].chunk(n)[rank], draw[1].chunk(n, 1)[rank], draw[2].chunk(n)[rank]]
    shard, up_shard, down_shard = (each.clone().requires_grad_() for each in own)
    hidden = collectives.gather_rs(shard, group) @ up_shard
    collectives.reduce_scatter_g(hidden @ down_shard, group).pow(2).sum().backward()
    assert torch.equal(shard.grad, x.grad.chunk(n)[rank])
    assert torch.equal(up_shard.grad, up.grad.chunk(n, 1)[rank])
    assert torch.equal(down_shard.grad, down.grad.chunk(n)[rank])


CHECKS = [
    gather_rs_returns_the_tree_sum_of_all_uses,
    reduce_scatter_g_returns_every_slice_of_the_gradient,
    copy_ar_sums_the_gradients_of_all_copies,
    all_reduce_copy_reaches_the_shards_of_ranks_that_own_no_token,
    slice_gather_returns_every_ranks_gradient,
    gradients_that_are_summed_are_rounded_once,
    chained_pairs_equal_one_process,
]


@pytest.fixture(scope="module", params=[1, 2, 3, 4, 8], ids="{}_ranks".format)
def outcomes(request: pytest.FixtureRequest) -> Outcomes:
    return run_checks(request.param, CHECKS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_every_rank(outcomes: Outcomes, check: Callable[..., object]) -> None:
    results = outcomes[check.__name__]
    assert all(result == results[0] for result in results)  # None, or what all ranks must agree on
