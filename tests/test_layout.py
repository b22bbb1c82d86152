"""Where ranks, tokens and shards sit: exhaustive over small layouts, property-tested beyond."""

from __future__ import annotations

from itertools import combinations, product
from math import lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsp.layout import (
    Coords,
    EngineCoords,
    Layout,
    RolloutLayout,
    assign_prompts,
    assign_sequences,
    padded_length,
    padded_vocab,
    virtual_shards,
    zigzag_chunks,
    zigzag_positions,
)

AXES = (1, 2, 3, 4, 8)
LAYOUTS = [
    Layout(dp=dp, cp=cp, tp=tp, sp=sp)
    for dp, cp, tp in product((1, 2, 3), AXES, AXES)
    for sp in sorted({1, tp})
]
small = st.integers(1, 8)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_and_places_are_one_to_one(layout: Layout) -> None:
    places = [layout.coords(rank) for rank in range(layout.world_size)]
    assert len(set(places)) == layout.world_size
    assert [layout.rank(place.dp, place.cp, place.tp) for place in places] == list(range(layout.world_size))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_tp_varies_fastest_then_cp_then_dp(layout: Layout) -> None:
    expected = [
        Coords(dp=dp, cp=cp, tp=tp)
        for dp, cp, tp in product(range(layout.dp), range(layout.cp), range(layout.tp))
    ]
    assert [layout.coords(rank) for rank in range(layout.world_size)] == expected


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_groups_of_each_axis_part_the_ranks_and_vary_that_axis_alone(layout: Layout) -> None:
    cases = {
        "tp": (layout.tp_groups(), layout.tp, ("dp", "cp")),
        "cp": (layout.cp_groups(), layout.cp, ("dp", "tp")),
        "dp": (layout.dp_groups(), layout.dp, ("cp", "tp")),
        "token": (layout.token_groups(), layout.dp * layout.cp, ("tp",)),
    }
    for groups, size, fixed in cases.values():
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
        for group in groups:
            assert len(group) == size
            assert group == tuple(sorted(group))
            for axis in fixed:
                assert len({getattr(layout.coords(rank), axis) for rank in group}) == 1


def test_a_token_group_lists_its_ranks_dp_major() -> None:
    layout = Layout(dp=2, cp=3, tp=4, sp=4)
    places = [layout.coords(rank) for rank in layout.token_groups()[1]]
    assert [(place.dp, place.cp) for place in places] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert {place.tp for place in places} == {1}


def test_the_table_gives_each_rank_its_residual_shard_only_where_sp_is_on() -> None:
    on, off = Layout(dp=1, cp=2, tp=2, sp=2), Layout(dp=1, cp=2, tp=2, sp=1)
    assert on.sequence_parallel
    assert not off.sequence_parallel
    assert [row["sp"] for row in on.table()] == [0, 1, 0, 1]
    assert [row["sp"] for row in off.table()] == [0, 0, 0, 0]
    assert on.table()[3] == {"rank": 3, "dp": 0, "cp": 1, "tp": 1, "sp": 1}


@pytest.mark.parametrize("axes", [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 4, 2), (1, 1, 1, 4)])
def test_a_layout_without_ranks_or_with_another_sp_is_refused(axes: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Layout(*axes)


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_the_world_has_no_place(rank: int) -> None:
    with pytest.raises(ValueError, match=r"0\.\.7"):
        Layout(dp=1, cp=2, tp=4, sp=1).coords(rank)
    with pytest.raises(ValueError, match=r"0\.\.7"):
        RolloutLayout(tp=4, engines=2, world_size=8).coords(rank)


@given(tp=small, engines=small, idle=st.integers(0, 5))
def test_engines_hold_adjacent_ranks_and_the_rest_idle(tp: int, engines: int, idle: int) -> None:
    layout = RolloutLayout(tp=tp, engines=engines, world_size=tp * engines + idle)
    places = [layout.coords(rank) for rank in range(layout.world_size)]
    busy = [EngineCoords(engine=engine, tp=index) for engine, index in product(range(engines), range(tp))]
    assert places == busy + [None] * idle
    assert [rank for group in layout.tp_groups() for rank in group] == list(range(tp * engines))
    assert {len(group) for group in layout.tp_groups()} == {tp}


@pytest.mark.parametrize("counts", [(0, 1, 1), (1, 0, 1), (4, 3, 8)])
def test_engines_that_do_not_fit_are_refused(counts: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"at least 1|need more than 8 ranks"):
        RolloutLayout(*counts)


@given(exponent=st.integers(0, 4), smaller=st.integers(0, 4))
def test_virtual_shards_part_the_width_in_adjacent_aligned_runs(exponent: int, smaller: int) -> None:
    virtual_tp, tp = 2**exponent, 2 ** min(exponent, smaller)
    owned = [virtual_shards(tp, index, virtual_tp) for index in range(tp)]
    assert [shard for run in owned for shard in run] == list(range(virtual_tp))
    assert all(run.start % len(run) == 0 for run in owned)


def test_a_tp_that_does_not_divide_the_width_owns_no_shards() -> None:
    with pytest.raises(ValueError, match="does not divide the virtual width 8"):
        virtual_shards(3, 0, 8)
    with pytest.raises(ValueError, match="does not divide"):
        virtual_shards(16, 0, 8)


@given(cp=small, chunk=st.integers(0, 9))
def test_zigzag_parts_the_positions_evenly(cp: int, chunk: int) -> None:
    length = 2 * cp * chunk
    held = [zigzag_positions(length, cp, index) for index in range(cp)]
    assert sorted(position for rank in held for position in rank) == list(range(length))
    assert {len(rank) for rank in held} == {2 * chunk}


@given(cp=small, chunk=st.integers(1, 9))
def test_zigzag_gives_every_rank_the_same_causal_work(cp: int, chunk: int) -> None:
    length = 2 * cp * chunk
    work = {sum(position + 1 for position in zigzag_positions(length, cp, index)) for index in range(cp)}
    assert len(work) == 1
    # The naive split in order does not.
    naive = {sum(range(index * 2 * chunk + 1, (index + 1) * 2 * chunk + 1)) for index in range(cp)}
    assert len(naive) == cp


def test_zigzag_is_megatrons() -> None:
    assert [zigzag_chunks(4, index) for index in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert zigzag_positions(8, 2, 1) == [2, 3, 4, 5]
    with pytest.raises(ValueError, match="multiple of 2·cp = 4"):
        zigzag_positions(6, 2, 0)


@given(
    length=st.integers(0, 3000),
    cp=small,
    tp=st.sampled_from((1, 2, 4, 8)),
    blocks=st.lists(st.sampled_from((1, 8, 32, 48)), min_size=1, max_size=3).map(tuple),
)
def test_a_padded_length_is_the_least_that_blocks_chunks_and_shards_divide(
    length: int, cp: int, tp: int, blocks: tuple[int, ...]
) -> None:
    padded = padded_length(length, cp, tp, blocks)
    unit = lcm(2 * cp * lcm(*blocks), cp * tp)
    assert padded % unit == 0
    assert length <= padded < length + unit
    assert all((padded // (2 * cp)) % block == 0 for block in blocks)
    assert (padded // cp) % tp == 0
    assert padded_length(padded, cp, tp, blocks) == padded


@given(
    length=st.integers(0, 500),
    cp=st.integers(1, 4),
    blocks=st.lists(st.sampled_from((8, 32)), min_size=1, max_size=2).map(tuple),
)
def test_every_padded_length_of_a_layout_starts_with_the_same_blocks(
    length: int, cp: int, blocks: tuple[int, ...]
) -> None:
    # Blocks start at multiples of their size from the first token: padding adds blocks, it moves none.
    for one, other in combinations((1, 2, 4), 2):
        assert padded_length(length, cp, one, blocks) % lcm(*blocks) == 0
        assert padded_length(length, cp, other, blocks) % lcm(*blocks) == 0


@given(vocab=st.integers(1, 200_000), exponent=st.integers(0, 4))
def test_a_padded_vocabulary_cuts_into_equal_shards_of_whole_rows(vocab: int, exponent: int) -> None:
    padded = padded_vocab(vocab, 2**exponent)
    assert padded % (2**exponent * 16) == 0
    assert vocab <= padded < vocab + 2**exponent * 16


def test_known_vocabularies() -> None:
    assert padded_vocab(97, 8) == 128
    assert padded_vocab(151936, 8) == 151936


lengths = st.lists(st.integers(0, 400), max_size=40)


@given(lengths=lengths, dp=small)
def test_each_sequence_goes_to_one_replica(lengths: list[int], dp: int) -> None:
    shares = assign_sequences(lengths, dp)
    assert len(shares) == dp
    assert sorted(index for share in shares for index in share) == list(range(len(lengths)))
    assert all(share == tuple(sorted(share)) for share in shares)


@given(lengths=lengths, dp=small)
def test_no_replica_idles_while_there_are_sequences(lengths: list[int], dp: int) -> None:
    shares = assign_sequences(lengths, dp)
    assert sum(1 for share in shares if share) == min(dp, len(lengths))


@given(lengths=st.lists(st.integers(1, 400), min_size=1, max_size=40), dp=small)
def test_replicas_differ_by_at_most_the_longest_sequence(lengths: list[int], dp: int) -> None:
    tokens = [sum(lengths[index] for index in share) for share in assign_sequences(lengths, dp)]
    assert max(tokens) - min(tokens) <= max(lengths)


def test_sharing_in_order_would_not_balance() -> None:
    sequences = [400, 300, 10, 10]
    balanced = [sum(sequences[i] for i in share) for share in assign_sequences(sequences, 2)]
    assert sorted(balanced) == [320, 400]
    assert sorted([sum(sequences[:2]), sum(sequences[2:])]) == [20, 700]


@given(count=st.integers(0, 60), engines=small)
def test_engines_get_adjacent_prompts_in_shares_that_differ_by_one(count: int, engines: int) -> None:
    shares = assign_prompts(count, engines)
    assert [prompt for share in shares for prompt in share] == list(range(count))
    sizes = [len(share) for share in shares]
    assert len(sizes) == engines
    assert max(sizes) - min(sizes) <= 1
