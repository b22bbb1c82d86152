"""Faults, disagreements and the record of calls, on 1, 2, 3, 4 and 8 gloo ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rank_data import WIRES, over, refused, world
from ranks import Outcomes, RankError, run_checks, run_ranks

from rlsp import collectives
from rlsp.board import Board
from rlsp.collectives import CollectiveError
from rlsp.collectives.agreement import History, compare
from rlsp.groups import REMEMBERED_CALLS, Group, Ledger
from rlsp.messages import CHECKED_BYTES


def faults_name_operation_shape_dtype_and_group_and_are_not_recorded(rank: int, n: int) -> None:
    group = world(rank, n)
    x = torch.ones(2 * n, 3)
    for dtype in (torch.bfloat16, torch.float16, torch.int64, torch.bool):
        for call in (collectives.reduce_scatter, collectives.all_reduce):
            refused((str(dtype)[6:], "float32 or float64", group.label), call, x.to(dtype), group)
    for call in (collectives.sum_integers, collectives.max_integers):
        refused(("float32", "int32 or int64", group.label), call, x, group)
    for call in (collectives.gather, collectives.reduce_scatter, collectives.scatter_slice):
        says = (f"{call.__name__} float32[{2 * n},3] over {group.label}", "no dim 2")
        refused(says, call, x, group, 2)
    refused(("gather float32[]", "no dim 0"), collectives.gather, torch.tensor(1.0), group)
    refused((f"no source {n}", group.label), collectives.broadcast, x, group, n)
    refused(("sparse", group.label), collectives.gather, x.to_sparse(), group)
    refused(("gradient", "autograd pair"), collectives.gather, x.clone().requires_grad_(), group)
    if n > 1:
        odd = torch.ones(n + 1, 3)
        for call in (collectives.reduce_scatter, collectives.scatter_slice, collectives.all_to_all):
            refused((call.__name__, f"dim 0 of {n + 1}", f"{n} ranks", group.label), call, odd, group)
        refused(("meta", "cpu", group.label), collectives.gather, x.to("meta"), group)
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
            collectives.check_agreement,
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
        refused((expected, "first at call 1", f": {last} differ"), other if rank == last else usual, fresh)


def a_rank_that_skipped_a_call_is_named_at_the_next_one(rank: int, n: int) -> None:
    group = world(rank, n)
    if n == 1:
        return
    collectives.gather(torch.ones(1), group)
    if rank != n - 1:
        group.ledger.enter(group, "gather", "gather of what the last rank skips")
    says = (f": {n - 1} differ", "first at call 1", "skips")
    refused(says, collectives.all_reduce, torch.ones(1), group)


def large_calls_that_differ_are_found_at_the_step_boundary(rank: int, n: int) -> None:
    group = world(rank, n)
    if n == 1:
        return
    dtype = torch.int32 if rank == n - 1 else torch.float32  # as many bytes: the wire cannot tell
    collectives.gather(torch.ones(CHECKED_BYTES // 4 + 1, dtype=dtype), group)
    says = (f": {n - 1} differ", "first at call 0", "int32[", "float32[")
    refused(says, collectives.check_agreement, group)


def a_disagreement_older_than_memory_is_still_found(rank: int, n: int) -> None:
    group = world(rank, n)
    if n == 1:
        return
    group.ledger.enter(group, "gather", f"gather {'that' if rank == n - 1 else 'this'}")
    for _ in range(REMEMBERED_CALLS):
        group.ledger.enter(group, "gather", "gather the same")
    refused(("before call", f": {n - 1} differ"), collectives.check_agreement, group)


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
    faults_name_operation_shape_dtype_and_group_and_are_not_recorded,
    small_calls_that_differ_are_named_on_every_rank,
    a_rank_that_skipped_a_call_is_named_at_the_next_one,
    large_calls_that_differ_are_found_at_the_step_boundary,
    a_disagreement_older_than_memory_is_still_found,
    ranks_that_agree_have_one_chain_and_pass,
    the_writer_sees_every_call_before_it_communicates,
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


def a_call_that_one_rank_skips(rank: int, n: int, shape: tuple[int, ...]) -> str:
    group = world(rank, n, timeout_s=1.0)
    collectives.gather(torch.ones(5), group)
    if rank == 0:
        time.sleep(2.5)
        return ""
    with pytest.raises(CollectiveError) as caught:
        collectives.all_reduce(torch.ones(shape), group)
    return str(caught.value)


@pytest.mark.parametrize("columns", [2, CHECKED_BYTES], ids=["behind a header", "rank to rank"])
def test_a_timeout_is_an_error_that_carries_the_call_and_those_before(columns: int) -> None:
    message = run_ranks(2, a_call_that_one_rank_skips, (7, columns))[1]
    call = f"all_reduce float32[7,{columns}]"
    assert f"rank 1: {call} over tp(0..1), call 1 of this group, failed after" in message
    assert f"0 tp gather float32[5] dim=0; 1 tp {call}" in message


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
