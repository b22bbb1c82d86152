from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ranks import run_ranks

from rlsp import collectives
from rlsp.groups import CollectiveError, Group, Ledger, Mesh, build_mesh
from rlsp.layout import Layout, RolloutLayout

LAYOUTS = [
    (Layout(dp=1, cp=2, tp=4, sp=4), RolloutLayout(tp=4, engines=2, world_size=8)),
    (Layout(dp=2, cp=2, tp=2, sp=1), RolloutLayout(tp=1, engines=8, world_size=8)),
    (Layout(dp=1, cp=1, tp=8, sp=8), RolloutLayout(tp=2, engines=3, world_size=8)),
    (Layout(dp=4, cp=1, tp=2, sp=2), RolloutLayout(tp=8, engines=1, world_size=8)),
    (Layout(dp=1, cp=8, tp=1, sp=1), RolloutLayout(tp=2, engines=4, world_size=8)),
]


def groups(mesh: Mesh) -> list[Group]:
    every = [mesh.world, mesh.tp, mesh.cp, mesh.dp, mesh.token, mesh.rollout_tp]
    return [group for group in every if group is not None]


def every_group_reaches_its_own_ranks(rank: int, n: int) -> list[tuple[object, ...]]:
    rows = []
    for layout, rollout_layout in LAYOUTS:
        ledger = Ledger()
        mesh = build_mesh(layout, rollout_layout, rank, 30.0, ledger)
        for group in groups(mesh):
            met = collectives.gather(torch.tensor([rank]), group)
            assert tuple(met.tolist()) == group.ranks
            assert group.rank == rank
            assert group.ledger is mesh.ledger is ledger
        handles = {group.ranks: group.handle for group in groups(mesh)}
        assert all(group.handle is handles[group.ranks] for group in groups(mesh))  # the same ranks share one
        assert {group.ranks for group in mesh.groups} == {ranks for ranks in handles if len(ranks) > 1}
        assert len(mesh.groups) == len({group.ranks for group in mesh.groups})
        for group in mesh.groups:
            collectives.check_agreement(group)
        rows.append(tuple(None if group is None else group.ranks for group in (mesh.token, mesh.rollout_tp)))
    return rows


def test_every_group_reaches_its_own_ranks_in_every_layout() -> None:
    results = run_ranks(8, every_group_reaches_its_own_ranks)
    for rank, rows in enumerate(results):
        for (layout, rollout_layout), (token, rollout_tp) in zip(LAYOUTS, rows, strict=True):
            at = layout.coords(rank)
            assert token == tuple(
                layout.rank(dp, cp, at.tp) for dp in range(layout.dp) for cp in range(layout.cp)
            )
            idle = rollout_layout.coords(rank) is None
            assert rollout_tp is None if idle else rank in rollout_tp
    assert [rows[2][1] for rows in results[6:]] == [None, None]  # 3 engines of 2 leave two of 8 ranks idle


def a_mesh_that_does_not_fit_the_world(rank: int, n: int) -> list[str]:
    two = Layout(dp=1, cp=1, tp=2, sp=1)
    asked: list[Callable[[], object]] = [
        lambda: build_mesh(Layout(1, 1, 4, 1), RolloutLayout(1, 4, 4), rank, 30.0),
        lambda: build_mesh(two, RolloutLayout(1, 4, 4), rank, 30.0),
        lambda: build_mesh(two, RolloutLayout(1, 2, 2), 1 - rank, 30.0),
        lambda: build_mesh(two, RolloutLayout(1, 2, 2), 2, 30.0),
        lambda: build_mesh(two, RolloutLayout(1, 2, 2), rank, 0.0),
    ]
    messages = []
    for ask in asked:
        with pytest.raises(CollectiveError) as caught:
            ask()
        messages.append(str(caught.value))
    return messages


def test_a_mesh_that_does_not_fit_the_world_is_refused_on_every_rank() -> None:
    for rank, messages in enumerate(run_ranks(2, a_mesh_that_does_not_fit_the_world)):
        assert f"asked for rank {rank} of 4" in messages[0]
        assert "training has 2 ranks, rollout 4" in messages[1]
        assert f"initialised as rank {rank} of 2" in messages[2]
        assert "rank 2 is not one of 2" in messages[3]
        assert "timeout_s" in messages[4]


def test_one_rank_needs_no_process_group() -> None:
    mesh = build_mesh(Layout(1, 1, 1, 1), RolloutLayout(1, 1, 1), 0, 30.0)
    assert all(
        (group.handle, group.size, group.label) == (None, 1, f"{group.axis}(0)") for group in groups(mesh)
    )
    x = torch.arange(3.0)
    assert collectives.all_reduce(x, mesh.world).tolist() == x.tolist()
    collectives.check_agreement(mesh.world)
    assert mesh.ledger.bytes.total() == 0
    assert mesh.groups == ()


def test_more_ranks_without_an_initialised_backend_are_refused() -> None:
    with pytest.raises(CollectiveError, match="initialised first"):
        build_mesh(Layout(1, 1, 2, 1), RolloutLayout(1, 2, 2), 0, 30.0)


@pytest.mark.parametrize(
    ("ranks", "index", "message"),
    [
        ((), 0, "ascend"),
        ((1, 0), 0, "ascend"),
        ((2, 2), 0, "ascend"),
        ((3,), 1, "index 1"),
        ((0, 1), 0, "handle"),
    ],
)
def test_a_group_that_contradicts_itself_is_refused(ranks: tuple[int, ...], index: int, message: str) -> None:
    with pytest.raises(CollectiveError, match=message):
        Group("tp", ranks, index)
