from __future__ import annotations

import pytest
import torch
from numeric_data import draw
from ranks import Outcomes, run_checks
from torch import Tensor

from rlsp.bits import same_bits
from rlsp.groups import Group, build_mesh
from rlsp.layout import Layout, RolloutLayout, zigzag_positions
from rlsp.sequence import gather_positions, local_blocks, local_positions, own_positions

CP, LENGTH, BLOCK = 4, 64, 8
CPU = torch.device("cpu")
ALONE = Group("cp", (0,), 0)
WHOLE = draw(1, LENGTH, 3, 5)


def context_group(rank: int) -> Group:
    layout = Layout(dp=1, cp=CP, tp=1, sp=1)
    return build_mesh(layout, RolloutLayout(1, CP, CP), rank, 30.0).cp


def places(rank: int, _world_size: int) -> tuple[Tensor, tuple[int, ...]]:
    group = context_group(rank)
    return local_positions(LENGTH, group, CPU), local_blocks(LENGTH, BLOCK, group)


def moved(rank: int, _world_size: int) -> tuple[Tensor, Tensor]:
    group = context_group(rank)
    own = own_positions(WHOLE, group)
    return own, gather_positions(own, group)


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return run_checks(CP, [places, moved])


def test_ranks_own_all_positions_between_them_in_the_zigzag(outcomes: Outcomes) -> None:
    owned = [positions for positions, _ in outcomes["places"]]
    assert [x.tolist() for x in owned] == [zigzag_positions(LENGTH, CP, rank) for rank in range(CP)]
    assert sorted(torch.cat(owned).tolist()) == list(range(LENGTH))
    assert all(x.dtype == torch.int64 and bool((x.diff() > 0).all()) for x in owned)


def test_a_ranks_query_blocks_are_those_of_its_positions(outcomes: Outcomes) -> None:
    for positions, blocks in outcomes["places"]:
        assert list(blocks) == sorted({p // BLOCK for p in positions.tolist()})
        covered = [block * BLOCK + i for block in blocks for i in range(BLOCK)]
        assert covered == positions.tolist()


def test_own_positions_are_the_rows_at_the_ranks_positions(outcomes: Outcomes) -> None:
    for (positions, _), (own, _) in zip(outcomes["places"], outcomes["moved"], strict=True):
        assert same_bits(own, WHOLE[positions])


def test_gathering_restores_the_order_of_positions_on_every_rank(outcomes: Outcomes) -> None:
    for _, whole in outcomes["moved"]:
        assert same_bits(whole, WHOLE)


def test_shards_in_the_order_of_ranks_are_not_in_the_order_of_positions(outcomes: Outcomes) -> None:
    """The witness: a plain gather is not enough."""
    assert not same_bits(torch.cat([own for own, _ in outcomes["moved"]]), WHOLE)


def test_one_context_rank_owns_everything_as_it_is() -> None:
    assert local_positions(LENGTH, ALONE, CPU).tolist() == list(range(LENGTH))
    assert local_blocks(LENGTH, BLOCK, ALONE) == tuple(range(LENGTH // BLOCK))
    assert same_bits(own_positions(WHOLE, ALONE), WHOLE)
    assert same_bits(gather_positions(WHOLE, ALONE), WHOLE)
