"""Models that no machine here holds: built on the meta device, as each rank of a launch would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from model_helpers import build_model
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlsp.config import Config
from rlsp.groups import Group, Mesh, build_mesh
from rlsp.model.assemble import contract_of
from rlsp.model.build import PolicyModel
from rlsp.model.wiring import Phase, Wiring
from rlsp.numerics.products import Products

QWEN3_8B_PARAMETERS = 8_190_735_360
META = torch.device("meta")


@contextmanager
def mesh_of(config: Config, rank: int) -> Iterator[Mesh]:
    """One rank's groups, in a world that nobody else is in."""
    dist.init_process_group("fake", rank=rank, world_size=config.world_size, store=FakeStore())
    try:
        yield build_mesh(config.layout, config.rollout_layout, rank, 60.0)
    finally:
        dist.destroy_process_group()


def models(config: Config, mesh: Mesh) -> tuple[PolicyModel, PolicyModel]:
    """The trainer and the engine of one rank, with shapes and no numbers."""
    contract, products = contract_of(config), Products(config.numerics.row_tile)
    assert mesh.rollout_tp is not None
    alone = Group("rollout_cp", (mesh.world.rank,), 0)
    wirings = (
        Wiring(Phase.TRAIN, contract, products, mesh.tp, mesh.cp, config.layout.sequence_parallel),
        Wiring(Phase.ROLLOUT, contract, products, mesh.rollout_tp, alone, sequence_parallel=False),
    )
    with META:
        trainer, engine = (build_model(config.model, wiring, META) for wiring in wirings)
    return trainer, engine


def shapes(model: PolicyModel) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight, _ in model.named_shards()}


@pytest.mark.parametrize("rank", range(8))
def test_every_rank_of_qwen3_8b_g11_builds_with_its_share(compose: Callable[..., Config], rank: int) -> None:
    config = compose("experiment=qwen3_8b_g11")
    with mesh_of(config, rank) as mesh:
        trainer, engine = models(config, mesh)
        assert (mesh.tp.index, mesh.cp.index) == (rank % 4, rank // 4)
        assert mesh.rollout_tp is not None
        assert (mesh.rollout_tp.ranks, mesh.rollout_tp.index) == (
            (0, 1, 2, 3) if rank < 4 else (4, 5, 6, 7),
            rank % 4,
        )
    found = shapes(trainer)
    assert found == shapes(engine)
    assert all(weight.is_meta and weight.dtype == torch.bfloat16 for _, weight, _ in trainer.named_shards())
    layer = {name.rpartition("layers.7.")[2]: shape for name, shape in found.items() if ".layers.7." in name}
    assert layer == {
        "input_layernorm.weight": (4096,),
        "mlp.linear_fc1.weight": (2, 2 * 12288 // 8, 4096),
        "mlp.linear_fc2.weight": (2, 4096, 12288 // 8),
        "pre_mlp_layernorm.weight": (4096,),
        "self_attention.k_layernorm.weight": (128,),
        "self_attention.linear_proj.weight": (2, 4096, 32 * 128 // 8),
        "self_attention.linear_qkv.weight": (2, (32 + 2 * 8) * 128 // 8, 4096),
        "self_attention.q_layernorm.weight": (128,),
    }
    assert found["output_layer.weight"] == found["embedding.word_embeddings.weight"] == (2, 151936 // 8, 4096)
    assert trainer.vocabulary.first == mesh.tp.index * 151936 // 4
    sharded = sum(weight.numel() for _, weight, cut in trainer.named_shards() if cut)
    copied = sum(weight.numel() for _, weight, cut in trainer.named_shards() if not cut)
    assert 4 * sharded + copied == QWEN3_8B_PARAMETERS


def test_qwen3_8b_g11_is_the_g11_arm_on_eight_gpus(compose: Callable[..., Config]) -> None:
    config = compose("experiment=qwen3_8b_g11")
    parallel, layout = config.parallel, config.rollout_layout
    assert (parallel.cp, parallel.tp, parallel.sp, parallel.dp, config.world_size) == (2, 4, 4, 1, 8)
    assert (layout.tp, layout.engines) == (4, 2)
    assert (config.prompts_per_rollout, config.samples_per_prompt) == (1, 8)
    assert (config.max_response_tokens, config.temperature) == (7168, 1.0)
    assert (config.device.kind.name, config.device.backend) == ("cuda", "nccl")
    assert config.numerics.routes.strict
    assert config.reuse_rollout_logprob


def test_a_rank_with_half_the_shards_is_told_apart(compose: Callable[..., Config]) -> None:
    eight, four = (
        compose("experiment=qwen3_8b_g11"),
        compose("experiment=qwen3_8b_g11", "parallel=cp4_tp2_sp2"),
    )
    with mesh_of(four, 0) as mesh:
        trainer, engine = models(four, mesh)
    assert shapes(trainer)["output_layer.weight"] == (4, 151936 // 8, 4096)
    assert shapes(engine)["output_layer.weight"] == (2, 151936 // 8, 4096)
    assert eight.world_size == four.world_size
