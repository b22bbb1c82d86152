"""Collectives on 1, 2, 3, 4 and 8 gloo ranks: one launch a world size runs every function named in CHECKS."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Outcomes, RankError, run_checks, run_ranks
from torch import Tensor

from rlsp import collectives
from rlsp.board import Board
from rlsp.collectives import CollectiveError
from rlsp.collectives.agreement import History, compare
from rlsp.collectives.sums import ONE_GATHER_BYTES, OWN_ALL_REDUCE_BYTES
from rlsp.collectives.wire import CHECKED_BYTES, SMALLEST_BYTES
from rlsp.groups import REMEMBERED_CALLS, Group, Ledger, build_mesh
from rlsp.layout import Layout, RolloutLayout
from rlsp.numerics.tree import tree_sum

DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
)


PERIOD = 4099  # large tensors repeat that many drawn numbers: drawing them all would take most of the time


def world(rank: int, world_size: int, timeout_s: float = 30.0) -> Group:
    layout = Layout(dp=1, cp=1, tp=world_size, sp=1)
    return build_mesh(layout, RolloutLayout(1, world_size, world_size), rank, timeout_s).tp


def addend(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of mixed size and sign: sums of three or more of them depend on the order."""
    source = torch.Generator().manual_seed(1000 + rank)
    scale = torch.exp2(torch.randint(-12, 13, (PERIOD,), generator=source).to(torch.float64))
    return tiled((torch.randn(PERIOD, generator=source, dtype=torch.float64) * scale).to(dtype), *shape)


def addends(world_size: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.stack([addend(rank, *shape, dtype=dtype) for rank in range(world_size)])


def patterned(rank: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """Arbitrary bits, so that NaN payloads, -0.0 and denormals occur; bools are true or false."""
    source = torch.Generator().manual_seed(rank)
    bits = torch.randint(0, 256, (PERIOD * dtype.itemsize,), generator=source, dtype=torch.uint8)
    return tiled((bits & 1 if dtype == torch.bool else bits).view(dtype), *shape)


def tiled(x: Tensor, *shape: int) -> Tensor:
    count = torch.Size(shape).numel()
    return x.repeat(-(-count // PERIOD))[:count].view(shape)


def same(a: Tensor, b: Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(*(x.detach().contiguous().view(-1).view(torch.uint8) for x in (a, b)))


def backwards(x: Tensor) -> Tensor:
    """Add one after the other from the last: an order, as of a ring, that the tree must not be confused with."""
    total = x[-1]
    for each in x.flip(0)[1:]:
        total = total + each
    return total


def refused(call: Callable[[], object], *parts: str) -> None:
    with pytest.raises(CollectiveError) as caught:
        call()
    assert all(part in str(caught.value) for part in parts), caught.value


# Moves


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


# Sums


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


# Gradients


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
    # Outside autograd the sum has no gradient at all: refused, where a plain backend call would lose it in silence.
    refused(
        lambda: collectives.all_reduce(logits, group), "all_reduce", "gradient", "float32[5,3]", group.label
    )


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
    for pair, expected in (
        (collectives.gather_rs, wide.chunk(n)[rank]),
        (collectives.copy_ar, wide),
    ):
        x = torch.zeros(
            64 if pair is collectives.gather_rs else 64 * n, 8, dtype=torch.bfloat16, requires_grad=True
        )
        pair(x, group).backward(uses[rank])
        assert same(x.grad, expected)
    assert n <= 2 or not same(tree_sum(uses), wide)  # rounding at every addition gives other bits


def chained_pairs_equal_one_process(rank: int, n: int) -> None:
    """Sequence shards gathered, multiplied by a column shard, by a row shard, reduce-scattered: a Megatron layer."""
    group = world(rank, n)
    exact = {"dtype": torch.float64}
    draw = [
        torch.randint(-8, 9, s, generator=torch.Generator().manual_seed(7)).to(**exact)
        for s in ((n, 4), (4, 2 * n), (2 * n, 3))
    ]
    x, up, down = (each.clone().requires_grad_() for each in draw)
    ((x @ up) @ down).pow(2).sum().backward()
    own = [draw[0].chunk(n)[rank], draw[1].chunk(n, 1)[rank], draw[2].chunk(n)[rank]]
    shard, up_shard, down_shard = (each.clone().requires_grad_() for each in own)
    hidden = collectives.gather_rs(shard, group) @ up_shard
    collectives.reduce_scatter_g(hidden @ down_shard, group).pow(2).sum().backward()
    assert torch.equal(shard.grad, x.grad.chunk(n)[rank])
    assert torch.equal(up_shard.grad, up.grad.chunk(n, 1)[rank])
    assert torch.equal(down_shard.grad, down.grad.chunk(n)[rank])


# No aliasing


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


# Faults, agreement, ledger


def faults_name_operation_shape_dtype_and_group_and_are_not_recorded(rank: int, n: int) -> None:
    group = world(rank, n)
    x = torch.ones(2 * n, 3)
    for dtype in (torch.bfloat16, torch.float16, torch.int64, torch.bool):
        for call in (collectives.reduce_scatter, collectives.all_reduce):
            refused(lambda: call(x.to(dtype), group), str(dtype)[6:], "float32 or float64", group.label)  # noqa: B023
    for call in (collectives.sum_integers, collectives.max_integers):
        refused(lambda: call(x, group), "float32", "int32 or int64", group.label)  # noqa: B023
    for call in (collectives.gather, collectives.reduce_scatter, collectives.scatter_slice):
        refused(lambda: call(x, group, 2), "no dim 2", call.__name__, f"float32[{2 * n},3]", group.label)  # noqa: B023
    refused(lambda: collectives.gather(torch.tensor(1.0), group), "gather float32[]", "no dim 0")
    refused(lambda: collectives.broadcast(x, group, n), f"no source {n}", group.label)
    refused(lambda: collectives.gather(x.to_sparse(), group), "sparse", group.label)
    refused(lambda: collectives.gather(x.clone().requires_grad_(), group), "gradient", "autograd pair")
    if n > 1:
        odd = torch.ones(n + 1, 3)
        for call in (collectives.reduce_scatter, collectives.scatter_slice, collectives.all_to_all):
            refused(lambda: call(odd, group), f"dim 0 of {n + 1}", f"{n} ranks", call.__name__)  # noqa: B023
        refused(lambda: collectives.gather(x.to("meta"), group), "meta", "cpu", group.label)
    assert group.ledger.sequence == 0
    collectives.check_agreement(group)


def small_calls_that_differ_are_named_on_every_rank(rank: int, n: int) -> None:
    group = world(rank, n)
    last = n - 1
    pairs: dict[str, tuple[Callable[[Group], object], Callable[[Group], object]]] = {
        "float32[2,3]": (
            lambda group: collectives.gather(torch.ones(2, 3), group),
            lambda group: collectives.gather(torch.ones(3, 2), group),
        ),
        "all_reduce float32[4]": (
            lambda group: collectives.all_reduce(torch.ones(4), group),
            lambda group: collectives.gather(torch.ones(1), group),
        ),
        "check_agreement": (
            lambda group: collectives.check_agreement(group),
            lambda group: collectives.reduce_scatter(torch.ones(n), group),
        ),
        "broadcast int64[1] source=0": (
            lambda group: collectives.broadcast(torch.ones(1, dtype=torch.int64), group, 0),
            lambda group: collectives.broadcast(torch.ones(1, dtype=torch.int64), group, 1),
        ),
    }
    for expected, (usual, other) in pairs.items():
        fresh = replace(group, ledger=Ledger())
        collectives.gather(torch.ones(1), fresh)
        if n == 1:
            continue
        refused(
            lambda: (other if rank == last else usual)(fresh), expected, "first at call 1", f": {last} differ"
        )


def a_rank_that_skipped_a_call_is_named_at_the_next_one(rank: int, n: int) -> None:
    group = world(rank, n)
    if n == 1:
        return
    collectives.gather(torch.ones(1), group)
    if rank != n - 1:
        group.ledger.enter(group, "gather", "gather of what the last rank skips")
    refused(
        lambda: collectives.all_reduce(torch.ones(1), group), f": {n - 1} differ", "first at call 1", "skips"
    )


def large_calls_that_differ_are_found_at_the_step_boundary(rank: int, n: int) -> None:
    group = world(rank, n)
    if n == 1:
        return
    dtype = torch.int32 if rank == n - 1 else torch.float32  # as many bytes: the wire cannot tell
    collectives.gather(torch.ones(CHECKED_BYTES // 4 + 1, dtype=dtype), group)
    refused(
        lambda: collectives.check_agreement(group),
        f": {n - 1} differ",
        "first at call 0",
        "int32[",
        "float32[",
    )


def a_disagreement_older_than_memory_is_still_found(rank: int, n: int) -> None:
    group = world(rank, n)
    if n == 1:
        return
    group.ledger.enter(group, "gather", f"gather {'that' if rank == n - 1 else 'this'}")
    for _ in range(REMEMBERED_CALLS):
        group.ledger.enter(group, "gather", "gather the same")
    refused(lambda: collectives.check_agreement(group), "before call", f": {n - 1} differ")


def ranks_that_agree_have_one_chain_and_pass(rank: int, n: int) -> tuple[int, str, str, dict[str, int]]:
    group = world(rank, n)
    collectives.check_agreement(group)
    collectives.gather(torch.ones(10), group)
    collectives.all_reduce(torch.ones(CHECKED_BYTES), group)
    collectives.reduce_scatter(torch.ones(8 * n), group)
    collectives.sum_integers(torch.ones(2, dtype=torch.int64), group)
    collectives.check_agreement(group)
    ledger = group.ledger
    assert ledger.sequence == ledger.trail(group).sequence == ledger.calls.total() == 6
    assert ledger.bytes["gather"] == 40 * (n - 1)
    assert ledger.bytes["reduce_scatter"] == 32 * (n - 1)
    assert ledger.bytes["all_reduce"] == 2 * (n - 1) * 4 * -(-CHECKED_BYTES // n)
    return ledger.sequence, ledger.chain.hex(), ledger.trail(group).chain.hex(), dict(ledger.bytes)


def the_writer_sees_every_call_before_it_communicates(rank: int, n: int) -> None:
    seen: list[tuple[int, str, bytes]] = []

    class Writer:
        def call(self, sequence: int, signature: str, chain: bytes) -> None:
            seen.append((sequence, signature, chain))

    group = world(rank, n)
    group.ledger.attach(Writer())
    collectives.gather(torch.ones(2, 3, dtype=torch.bfloat16), group, dim=1)
    collectives.sum_integers(torch.ones(1, dtype=torch.int64), group)
    assert [(number, text) for number, text, _ in seen] == [
        (0, f"{group.label}#0 gather bfloat16[2,3] dim=1"),
        (1, f"{group.label}#1 sum_integers int64[1]"),
    ]
    assert seen[1][2] == group.ledger.trail(group).chain


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
    gather_rs_returns_the_tree_sum_of_all_uses,
    reduce_scatter_g_returns_every_slice_of_the_gradient,
    copy_ar_sums_the_gradients_of_all_copies,
    all_reduce_copy_reaches_the_shards_of_ranks_that_own_no_token,
    slice_gather_returns_every_ranks_gradient,
    gradients_that_are_summed_are_rounded_once,
    chained_pairs_equal_one_process,
    results_share_no_memory_with_inputs_and_inputs_stay_as_they_were,
    faults_name_operation_shape_dtype_and_group_and_are_not_recorded,
    small_calls_that_differ_are_named_on_every_rank,
    a_rank_that_skipped_a_call_is_named_at_the_next_one,
    large_calls_that_differ_are_found_at_the_step_boundary,
    a_disagreement_older_than_memory_is_still_found,
    ranks_that_agree_have_one_chain_and_pass,
    the_writer_sees_every_call_before_it_communicates,
]


@pytest.fixture(scope="module", params=[1, 2, 3, 4, 8], ids="{}_ranks".format)
def outcomes(request: pytest.FixtureRequest) -> Outcomes:
    return run_checks(request.param, CHECKS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_every_rank(outcomes: Outcomes, check: Callable[..., object]) -> None:
    results = outcomes[check.__name__]
    assert all(result == results[0] for result in results)  # None, or what all ranks must agree on


def a_call_that_one_rank_skips(rank: int, n: int) -> str:
    group = world(rank, n, timeout_s=1.0)
    collectives.gather(torch.ones(5), group)
    if rank == 0:
        time.sleep(2.5)
        return ""
    with pytest.raises(CollectiveError) as caught:
        collectives.all_reduce(torch.ones(7, 2), group)
    return str(caught.value)


def test_a_timeout_is_an_error_that_carries_the_call_and_those_before() -> None:
    message = run_ranks(2, a_call_that_one_rank_skips)[1]
    assert "rank 1: all_reduce float32[7,2] over tp(0..1), call 1 of this group, failed after" in message
    assert "0 tp gather float32[5] dim=0; 1 tp all_reduce float32[7,2]" in message


def large_messages_of_different_sizes(rank: int, n: int, board: str) -> None:
    group = world(rank, n, timeout_s=5.0)
    group.ledger.attach(Board.open(board).writer(rank))
    collectives.gather(torch.ones(5), group)
    collectives.gather(torch.ones(4096 * (rank + 1)), group)


def test_ranks_that_gloo_aborts_leave_their_last_signatures_on_the_board(tmp_path: Path) -> None:
    Board.create(tmp_path / "board", 2)
    with pytest.raises((RankError, CollectiveError)):
        run_ranks(2, large_messages_of_different_sizes, str(tmp_path / "board"))
    slots = Board.open(tmp_path / "board").read()
    assert [(slot.sequence, slot.signature) for slot in slots] == [
        (1, "tp(0..1)#1 gather float32[4096] dim=0"),
        (1, "tp(0..1)#1 gather float32[8192] dim=0"),
    ]
    assert slots[0].chain_hex != slots[1].chain_hex


def test_the_first_difference_is_named_with_the_minority() -> None:
    text = compare(
        "tp(0..2)",
        [
            History(0, "a", ((3, "x"), (4, "y"), (5, "z"))),
            History(1, "b", ((2, "w"), (3, "x"), (4, "q"))),
            History(2, "a", ((3, "x"), (4, "y"), (5, "z"))),
        ],
    )
    assert "first at call 4: 1 differ" in text
    assert "rank 1: 2 w; 3 x; 4 q" in text


def test_equal_calls_in_another_order_give_another_chain() -> None:
    chains = []
    for order in (("gather a", "gather b"), ("gather b", "gather a")):
        group = Group("tp", (0,), 0)
        for signature in order:
            group.ledger.enter(group, "gather", signature)
        chains.append((group.ledger.chain, group.ledger.trail(group).chain))
    assert chains[0][0] != chains[1][0]
    assert chains[0][1] != chains[1][1]
