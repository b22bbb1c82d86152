from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numeric_data import mixed, one_after_the_other, relative_error
from ranks import Outcomes, run_checks
from torch import Tensor

from rlsp.bits import same_bits
from rlsp.groups import Group, Mesh, build_mesh
from rlsp.layout import Layout, RolloutLayout
from rlsp.summation import (
    METRIC_BOUND,
    BoundBreachError,
    Guard,
    Rule,
    Span,
    TokenSum,
    exact_sums,
    gradient,
    reduce_sums,
)

LSB, TOKENS = 40, 24 * 32
LAYOUT = Layout(dp=2, cp=1, tp=2, sp=1)
ALONE = Group("world", (0,), 0)
MATRIX, VECTOR, HEADS = Rule(Span.TOKENS, 32), Rule(Span.TOKENS, 1), Rule(Span.WORLD, 1, copies=4)
LEAVES = mixed(1, 24, 2, 6, 5) * 2.0**-14  # [L, V, N, K]
ROWS = mixed(3, 24, 5) * 2.0**-14
ROWS[::5, 0] = 2.0**-45  # vanishes
CPU = torch.device("cpu")


def accumulator(
    rule: Rule = MATRIX, shape: tuple[int, ...] = (2, 6, 5), guard: Guard | None = None
) -> TokenSum:
    item = TokenSum("weight", torch.empty(shape), rule, LSB, guard or Guard())
    item.begin(TOKENS)
    return item


def total(*calls: Tensor) -> Tensor:
    item = accumulator()
    for leaves in calls:
        item.add(leaves)
    item.guard.settle(ALONE)
    return gradient(item, 100)


@given(st.permutations(range(24)), st.lists(st.integers(1, 23), max_size=4))
def test_no_order_and_no_micro_batch_split_changes_a_gradient(order: list[int], cuts: list[int]) -> None:
    parts = LEAVES[order].tensor_split(sorted(cuts))
    assert same_bits(total(*parts), total(LEAVES))


def test_plain_float_sums_change_with_the_order() -> None:
    """The witness of the test above."""
    assert not same_bits(one_after_the_other(LEAVES.flip(0)), one_after_the_other(LEAVES))


def test_a_gradient_is_the_exact_sum_divided_once() -> None:
    assert relative_error(total(LEAVES), LEAVES.double().sum(dim=0) / 100) < 1e-7


def test_rows_add_up_wherever_a_token_stands() -> None:
    """An embedding's rows: several leaves may belong to one row, in any order."""
    rows = torch.arange(24) * 5 % 3
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    sums = [accumulator(), accumulator()]
    sums[0].add_rows(rows, ROWS)
    sums[1].add_rows(rows[order], ROWS[order])
    assert same_bits(sums[0].total, sums[1].total)
    want = torch.zeros(12, 5, dtype=torch.float64).index_add(0, rows, ROWS.double())
    assert relative_error(sums[0].total.view(12, 5).double() * 2.0**-LSB, want) < 1e-9
    floats = [torch.zeros(12, 5).index_add(0, r, x) for r, x in ((rows, ROWS), (rows[order], ROWS[order]))]
    assert not same_bits(floats[0], floats[1])


def test_a_step_starts_from_nothing() -> None:
    item = accumulator()
    item.add(LEAVES)
    item.begin(TOKENS)
    assert not item.total.any()
    assert not item.counts.any()


def test_a_rank_may_add_no_leaves() -> None:
    item = accumulator()
    item.add(LEAVES[:0])
    item.add_rows(torch.zeros(0, dtype=torch.int64), ROWS[:0])
    item.guard.settle(ALONE)
    assert not gradient(item, 0).any()


def test_large_metrics_are_summed_exactly_in_a_coarser_unit() -> None:
    values = torch.tensor([4548.25, -3.0e6, 0.5])
    assert exact_sums([values, torch.tensor([0.125])], ALONE) == [4548.25 - 3.0e6 + 0.5, 0.125]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30, 2.0**17])
def test_a_planted_breach_is_named(value: float) -> None:
    """24 leaves leave 2^(62 − 40 − 5) = 2^17 for each."""
    leaves = LEAVES.clone()
    leaves[7, 1, 2, 3] = value
    item = accumulator()
    item.add(leaves)
    with pytest.raises(BoundBreachError, match=r"in: weight$"):
        item.guard.settle(ALONE)
    item.guard.settle(ALONE)  # the next step starts anew


def test_every_head_counts_as_a_leaf() -> None:
    """768 tokens of 4 heads leave 2^(62 − 40 − 12) = 2^10 for each; of one head, 2^12."""
    for rule, bound in ((HEADS, 2.0**10), (VECTOR, 2.0**12)):
        item = accumulator(rule, (5,))
        item.add(torch.full((1, 5), math.nextafter(bound, 0), dtype=torch.float64))
        item.guard.settle(ALONE)
        item.add(torch.full((1, 5), bound))
        with pytest.raises(BoundBreachError):
            item.guard.settle(ALONE)


def test_what_is_just_below_the_bound_passes_and_is_summed_without_wrapping() -> None:
    large = torch.full((24, 2, 6, 5), math.nextafter(2.0**17, 0), dtype=torch.float64)
    item = accumulator()
    item.add(large)
    item.guard.settle(ALONE)
    assert float(gradient(item, 1)[0, 0, 0]) == 24 * 2.0**17


def test_an_accumulator_that_was_not_begun_refuses_every_leaf() -> None:
    item = TokenSum("weight", torch.empty(2, 6, 5), MATRIX, LSB, Guard())
    item.add(LEAVES)
    with pytest.raises(BoundBreachError, match="weight"):
        item.guard.settle(ALONE)


def test_every_breached_name_is_listed() -> None:
    guard = Guard()
    for name in ("c", "a", "b"):
        guard.expect(name, CPU)
    for name, reached in (("a", 0.5), ("c", 1.0), ("a", 3.0), ("b", 0.99)):
        guard.note(name, torch.tensor(reached))
    with pytest.raises(BoundBreachError, match=r"in: a, c$"):
        guard.settle(ALONE)


@pytest.mark.parametrize("value", [2.0**17, 2.0**20, 1e6, 1e30])
def test_a_breach_says_by_how_much_the_unit_must_be_coarser(value: float) -> None:
    """The bound is 2^17; with as many bits fewer the same leaf passes, with one more it does not."""
    leaves = LEAVES.clone()
    leaves[7, 1, 2, 3] = value

    def breach_at(lsb: int) -> str:
        item = TokenSum("weight", torch.empty(2, 6, 5), MATRIX, lsb, Guard())
        item.begin(TOKENS)
        item.add(leaves)
        try:
            item.guard.settle(ALONE)
        except BoundBreachError as error:
            return str(error)
        return ""

    said = re.search(r"grad_lsb smaller by (\d+) has room", breach_at(LSB))
    assert said
    assert breach_at(LSB - int(said[1])) == ""
    assert "smaller by 1 has" in breach_at(LSB - int(said[1]) + 1)


def test_what_is_not_finite_is_told_from_what_is_too_large() -> None:
    guard = Guard()
    for name, reached in (("a", math.nan), ("b", 8.0), ("c", math.inf), ("d", 0.0)):
        guard.expect(name, CPU)
        guard.note(name, torch.tensor(reached))
        guard.note(name, torch.tensor(0.25))  # a later, smaller leaf hides nothing
    with pytest.raises(BoundBreachError) as caught:
        guard.settle(ALONE)
    assert str(caught.value) == (
        "gradient leaves not finite, in: a, c; gradient leaves too large for the exact sum "
        "(a numerics.grad_lsb smaller by 4 has room), in: b"
    )


def test_a_name_that_was_not_announced_is_refused() -> None:
    """Otherwise a rank without a sequence would settle fewer names than the others."""
    with pytest.raises(ValueError, match="weight was noted, but not announced"):
        Guard().note("weight", torch.tensor(0.5))


def test_a_guard_without_names_settles() -> None:
    Guard().settle(ALONE)


def test_the_share_of_elements_that_vanish_is_reported() -> None:
    item = accumulator(shape=(1, 2, 2))
    item.add(torch.tensor([[[[1.0, 2.0**-42], [0.0, -(2.0**-42)]]], [[[0.0, 3.0], [0.0, 0.0]]]]))
    assert reduce_sums([item], ALONE, ALONE) == 2 / 4
    assert reduce_sums([accumulator()], ALONE, ALONE) == 0.0


@given(st.permutations(range(30)), st.integers(0, 30))
def test_metric_sums_ignore_order_and_split(order: list[int], cut: int) -> None:
    values = mixed(5, 30).clamp(-1000, 1000)
    shuffled = values[order]
    (whole,) = exact_sums([values], ALONE)
    assert exact_sums([shuffled], ALONE) == [whole]
    assert sum(exact_sums([shuffled[:cut], shuffled[cut:]], ALONE)) == whole
    assert whole == pytest.approx(values.double().sum().item(), abs=30 * 2.0**-32)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, METRIC_BOUND, 1e30])
def test_a_metric_that_cannot_be_summed_is_nan_and_spoils_no_other(value: float) -> None:
    sums = exact_sums([torch.tensor([1.0, value]), torch.tensor([0.5, 0.25])], ALONE)
    assert math.isnan(sums[0])
    assert sums[1] == 0.75


def mesh_of(rank: int) -> Mesh:
    return build_mesh(LAYOUT, RolloutLayout(1, 1, LAYOUT.world_size), rank, 30.0)


def sums_of(guard: Guard) -> list[TokenSum]:
    """A sharded matrix, a vector that all TP ranks hold, and one whose leaves lie on all ranks."""
    named = {"matrix": (MATRIX, (1, 6, 5)), "vector": (VECTOR, (5,)), "heads": (HEADS, (5,))}
    items = [TokenSum(name, torch.empty(shape), rule, LSB, guard) for name, (rule, shape) in named.items()]
    for item in items:
        item.begin(TOKENS)
    return items


def add_share(items: list[TokenSum], tokens: slice, shard: slice, heads: slice) -> None:
    matrix, vector, head = items
    matrix.add(LEAVES[tokens, shard])
    vector.add(ROWS[tokens])
    head.add(ROWS[tokens][heads])


def spread(rank: int, _world_size: int) -> tuple[list[Tensor], float]:
    """Every rank adds its share: of dp the tokens, of tp the shards and heads."""
    mesh, guard = mesh_of(rank), Guard()
    items = sums_of(guard)
    place = LAYOUT.coords(rank)
    tokens = slice(0, 7) if place.dp == 0 else slice(7, 24)
    add_share(items, tokens, slice(place.tp, place.tp + 1), slice(place.tp, None, 2))
    guard.settle(mesh.world)
    share = reduce_sums(items, mesh.token, mesh.world)
    return [gradient(item, 100) for item in items], share


def idle(rank: int, _world_size: int) -> tuple[list[Tensor], list[float]]:
    """The second data-parallel replica has no sequence at all."""
    mesh, guard = mesh_of(rank), Guard()
    items = sums_of(guard)
    guard.expect("attention", CPU)
    place = LAYOUT.coords(rank)
    if place.dp == 0:
        add_share(items, slice(0, 24), slice(place.tp, place.tp + 1), slice(place.tp, None, 2))
        guard.note("attention", torch.tensor(0.5))
    guard.settle(mesh.world)
    reduce_sums(items, mesh.token, mesh.world)
    metrics = exact_sums([ROWS if place.dp == 0 else torch.zeros(1)], mesh.token)
    return [gradient(item, 100) for item in items], metrics


def breach(rank: int, _world_size: int) -> str:
    """One rank's leaf is not a number; another rank notes nothing."""
    mesh, guard = mesh_of(rank), Guard()
    items = sums_of(guard)
    if rank != 3:
        leaves = LEAVES[:, :1].clone()
        leaves[3, 0, 2, 2] = math.nan if rank == 1 else 0.0
        items[0].add(leaves)
        items[1].add(ROWS)
    try:
        guard.settle(mesh.world)
    except BoundBreachError as error:
        return str(error)
    return "no breach"


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return run_checks(LAYOUT.world_size, [spread, idle, breach])


def alone() -> tuple[list[Tensor], float]:
    """One rank with everything: both shards of the matrix, every head."""
    guard = Guard()
    matrix, vector, heads = sums_of(guard)
    matrix = TokenSum("matrix", torch.empty(2, 6, 5), MATRIX, LSB, guard)
    matrix.begin(TOKENS)
    matrix.add(LEAVES)
    vector.add(ROWS)
    for part in (ROWS[0::2], ROWS[1::2]):
        heads.add(part)
    items = [matrix, vector, heads]
    share = reduce_sums(items, ALONE, ALONE)
    return [gradient(item, 100) for item in items], share


@pytest.mark.parametrize("check", ["spread", "idle"])
def test_gradients_over_ranks_have_the_bits_of_one_rank(outcomes: Outcomes, check: str) -> None:
    (matrix, vector, heads), _ = alone()
    for rank, (gradients, _) in enumerate(outcomes[check]):
        tp = LAYOUT.coords(rank).tp
        assert same_bits(gradients[0], matrix[tp : tp + 1]), rank
        assert same_bits(gradients[1], vector), rank
        if check == "idle":
            assert same_bits(gradients[2], heads), rank


def test_the_vanished_share_is_the_same_on_every_rank_and_in_every_layout(outcomes: Outcomes) -> None:
    _, share = alone()
    assert 0 < share < 1
    assert [got for _, got in outcomes["spread"]] == [share] * LAYOUT.world_size


def test_metrics_of_a_rank_without_a_sequence_count_as_nothing(outcomes: Outcomes) -> None:
    want = exact_sums([ROWS], ALONE)
    assert [metrics for _, metrics in outcomes["idle"]] == [want] * LAYOUT.world_size


def test_a_breach_on_one_rank_is_named_on_every_rank(outcomes: Outcomes) -> None:
    assert len(set(outcomes["breach"])) == 1
    assert outcomes["breach"][0].endswith("in: matrix")
