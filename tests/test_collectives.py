"""Moves and sums on 1, 2, 3, 4 and 8 gloo ranks: one launch a world size runs every function of CHECKS."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from rank_data import DTYPES, WIRES, addends, backwards, over, patterned, same, world
from ranks import Outcomes, run_checks
from torch import Tensor

from rlsp import collectives
from rlsp.messages import CHECKED_BYTES, ONE_GATHER_BYTES, OWN_ALL_REDUCE_BYTES, SMALLEST_BYTES
from rlsp.numerics.tree import tree_sum


def gather_moves_the_bits_of_every_dtype_along_every_dim(rank: int, n: int) -> None:
    group = world(rank, n)
    for dtype in DTYPES:
        for dim in (0, 1, 2, -1):
            parts = [patterned(each, dtype, 3, 1, 4) for each in range(n)]
            assert same(collectives.gather(parts[rank], group, dim), torch.cat(parts, dim)), (dtype, dim)
    strided = [patterned(each, torch.float32, 6, 5).t()[::2] for each in range(n)]
    assert same(collectives.gather(strided[rank], group, 1), torch.cat(strided, 1))
    assert collectives.gather(torch.ones(0, 3), group, 1).shape == (0, 3 * n)


def gather_moves_the_same_bits_below_and_above_the_checked_size(rank: int, n: int) -> None:
    group = world(rank, n)
    for count in (SMALLEST_BYTES, CHECKED_BYTES, CHECKED_BYTES + 1):
        parts = [patterned(each, torch.uint8, count) for each in range(n)]
        assert torch.equal(collectives.gather(parts[rank], group), torch.cat(parts)), count


def gather_many_sends_one_message_for_any_dtypes_and_shapes(rank: int, n: int) -> None:
    group = world(rank, n)
    shapes: list[tuple[int, ...]] = [(), (3,), (2, 0), (5, 7)]
    mine = [patterned(rank, dtype, *shape) for dtype in DTYPES for shape in shapes]
    results = collectives.gather_many(mine, group)
    for i, (dtype, shape) in enumerate((dtype, shape) for dtype in DTYPES for shape in shapes):
        expected = torch.stack([patterned(each, dtype, *shape) for each in range(n)])
        assert same(results[i], expected)
        assert results[i].is_contiguous()
    assert group.ledger.calls == {"gather_many": 1}
    assert collectives.gather_many([], group) == ()


def scatter_slice_undoes_gather_and_communicates_nothing(rank: int, n: int) -> None:
    group = world(rank, n)
    for dim in (0, 1, -1):
        x = patterned(rank, torch.bfloat16, 2, 4, 3)
        assert same(collectives.scatter_slice(collectives.gather(x, group, dim), group, dim), x)
    assert group.ledger.calls == {"gather": 3}


def all_to_all_sends_slice_i_to_rank_i(rank: int, n: int) -> None:
    group = world(rank, n)
    for dtype in DTYPES:
        sent = [patterned(each, dtype, 2 * n, 3) for each in range(n)]
        expected = torch.cat([x[2 * rank : 2 * rank + 2] for x in sent])
        assert same(collectives.all_to_all(sent[rank], group), expected)


def broadcast_hands_out_the_bits_of_the_source(rank: int, n: int) -> None:
    group = world(rank, n)
    for source in {0, n // 2, n - 1}:
        for dtype in DTYPES:
            result = collectives.broadcast(patterned(rank, dtype, 3, 2), group, source)
            assert same(result, patterned(source, dtype, 3, 2))
    large = [patterned(each, torch.uint8, CHECKED_BYTES + 3) for each in range(n)]
    assert torch.equal(collectives.broadcast(large[rank], group, n - 1), large[n - 1])


def reduce_scatter_sums_in_the_tree_along_every_dim(rank: int, n: int) -> None:
    group = world(rank, n)
    for dtype in (torch.float32, torch.float64):
        for dim in (0, 1, -1):
            every = addends(n, 2 * n, n, 3 * n, dtype=dtype)
            expected = tree_sum(every).chunk(n, dim)[rank]
            assert same(collectives.reduce_scatter(every[rank], group, dim), expected), (dtype, dim)
            strided = every[rank].transpose(0, 2).contiguous().transpose(0, 2)
            assert same(collectives.reduce_scatter(strided, group, dim), expected)
            assert n <= 2 or not same(backwards(every).chunk(n, dim)[rank], expected)
    every = addends(n, n, CHECKED_BYTES // 4 + 1)  # a slice too large for the header
    assert torch.equal(collectives.reduce_scatter(every[rank], group), tree_sum(every)[rank : rank + 1])


def all_reduce_gives_the_same_bits_on_both_sides_of_the_threshold(rank: int, n: int) -> None:
    group = world(rank, n)
    count = ONE_GATHER_BYTES // 4 // n
    for extra in (0, 1, 2 * n + 1, 5000):  # the first is gathered in one go, the others are not
        every = addends(n, count + extra)
        expected = tree_sum(every)
        assert torch.equal(collectives.all_reduce(every[rank], group), expected), extra
        halves = [collectives.all_reduce(half, group) for half in every[rank].split(count // 2 + 7)]
        assert torch.equal(torch.cat(halves), expected)
    if n > 2:
        assert not torch.equal(backwards(every), expected)
        backend = every[rank].clone()
        dist.all_reduce(backend)
        assert not torch.equal(backend, expected)


def all_reduce_keeps_shapes_and_the_sign_of_zero(rank: int, n: int) -> None:
    group = world(rank, n)
    zeros = torch.tensor([[-0.0, 0.0], [float("inf"), float("nan")]])
    assert same(collectives.all_reduce(zeros, group), tree_sum(zeros.expand(n, 2, 2)))
    assert collectives.all_reduce(torch.tensor(1.5), group).item() == 1.5 * n
    assert collectives.all_reduce(torch.ones(0, 4), group).shape == (0, 4)
    square = addends(n, 4, 6)
    assert same(collectives.all_reduce(square[rank].t(), group), tree_sum(square).t().contiguous())


def integers_are_summed_and_compared_exactly_at_every_size(rank: int, n: int) -> None:
    group = world(rank, n)
    for count in (3, ONE_GATHER_BYTES // 8 // n + 1, OWN_ALL_REDUCE_BYTES // 8 + 1):
        index = torch.arange(count)
        every = torch.stack(
            [(index * 2654435761 + each * 40503) % (1 << 58) - (1 << 57) for each in range(n)]
        )
        assert torch.equal(collectives.sum_integers(every[rank], group), every.sum(0))
        assert torch.equal(collectives.max_integers(every[rank], group), every.amax(0))
        floats = every.to(torch.float64).sum(0).to(torch.int64)
        assert n == 1 or not torch.equal(floats, every.sum(0))  # exactness is not for free
    narrow = torch.tensor([rank, -rank], dtype=torch.int32)
    assert collectives.sum_integers(narrow, group).dtype == torch.int32
    assert collectives.max_integers(narrow, group).tolist() == [n - 1, 0]


def results_share_no_memory_with_inputs_and_inputs_stay_as_they_were(rank: int, n: int) -> None:
    group = world(rank, n)
    integers = {"sum_integers", "max_integers"}
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "gather": lambda x: collectives.gather(x, group),
        "gather_many": lambda x: collectives.gather_many([x], group)[0],
        "scatter_slice": lambda x: collectives.scatter_slice(x, group),
        "all_to_all": lambda x: collectives.all_to_all(x, group),
        "broadcast": lambda x: collectives.broadcast(x, group, n - 1),
        "reduce_scatter": lambda x: collectives.reduce_scatter(x, group),
        "all_reduce": lambda x: collectives.all_reduce(x, group),
        "sum_integers": lambda x: collectives.sum_integers(x, group),
        "max_integers": lambda x: collectives.max_integers(x, group),
        "gather_rs": lambda x: collectives.gather_rs(x, group),
        "reduce_scatter_g": lambda x: collectives.reduce_scatter_g(x, group),
        "copy_ar": lambda x: collectives.copy_ar(x, group),
        "all_reduce_copy": lambda x: collectives.all_reduce_copy(x, group),
        "slice_gather": lambda x: collectives.slice_gather(x, group),
    }
    for name, call in calls.items():
        large = OWN_ALL_REDUCE_BYTES if name == "sum_integers" else ONE_GATHER_BYTES // n
        for rows in (n, n * (large // 8 // n + 1)):
            x = torch.arange(rows, dtype=torch.int64 if name in integers else torch.float64)
            before = x.clone()
            result = call(x)
            assert result.untyped_storage().data_ptr() != x.untyped_storage().data_ptr(), name
            assert result.is_contiguous(), name
            result.fill_(-1)
            assert torch.equal(x, before), name


CHECKS = [
    gather_moves_the_bits_of_every_dtype_along_every_dim,
    gather_moves_the_same_bits_below_and_above_the_checked_size,
    gather_many_sends_one_message_for_any_dtypes_and_shapes,
    scatter_slice_undoes_gather_and_communicates_nothing,
    all_to_all_sends_slice_i_to_rank_i,
    broadcast_hands_out_the_bits_of_the_source,
    reduce_scatter_sums_in_the_tree_along_every_dim,
    all_reduce_gives_the_same_bits_on_both_sides_of_the_threshold,
    all_reduce_keeps_shapes_and_the_sign_of_zero,
    integers_are_summed_and_compared_exactly_at_every_size,
    results_share_no_memory_with_inputs_and_inputs_stay_as_they_were,
]


@pytest.fixture(scope="module", params=WIRES, ids="{0[0]}_ranks over {0[1]}".format)
def outcomes(request: pytest.FixtureRequest) -> Outcomes:
    ranks, wire = request.param
    with over(wire):
        return run_checks(ranks, CHECKS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_every_rank(outcomes: Outcomes, check: Callable[..., object]) -> None:
    results = outcomes[check.__name__]
    assert all(result == results[0] for result in results)  # None, or what all ranks must agree on
