"""AdamW on float32 masters against torch's own, and a gradient norm that no layout and no copy changes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from model_helpers import (
    BF16,
    HYPER,
    TINY,
    alone,
    mesh_of,
    policy,
    products,
)
from ranks import run_ranks
from torch import Tensor

from rlsp import bits
from rlsp.config import ModelConfig
from rlsp.groups import Group
from rlsp.layout import Layout
from rlsp.model.build import PolicyModel
from rlsp.rl.optimizer import AdamW, clip_coefficient, gradient_norm


def gradients(model: PolicyModel, step: int = 0) -> dict[str, Tensor]:
    """Of mixed magnitudes; keyed by name and element, so that equal in every layout of one width."""
    found = {}
    for name, weight, _ in model.named_shards():
        source = torch.Generator().manual_seed(step)
        scale = torch.exp2(torch.randint(-8, 8, weight.shape, generator=source).float())
        found[name] = torch.randn(weight.shape, generator=source) * scale
    return found


def stepped(shape: ModelConfig = TINY, *, clip: float = 1.0, steps: int = 3, rate: float = 1e-2) -> AdamW:
    model = policy(alone(), shape=shape)
    optimizer = AdamW(model, HYPER)
    for step in range(steps):
        optimizer.step(gradients(model, step), rate, clip)
    return optimizer


def test_masters_follow_torchs_adamw() -> None:
    model = policy(alone())
    matrices, vectors = {}, {}
    for name, weight, sharded in model.named_shards():
        (matrices if sharded else vectors)[name] = weight.detach().double().requires_grad_()
    exact = torch.optim.AdamW(
        [
            {"params": list(matrices.values()), "weight_decay": HYPER.weight_decay},
            {"params": list(vectors.values()), "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(HYPER.beta1, HYPER.beta2),
        eps=HYPER.epsilon,
    )
    optimizer = AdamW(model, HYPER)
    for step in range(5):
        for name, gradient in gradients(model, step).items():
            (matrices | vectors)[name].grad = gradient.double()
        exact.step()
        optimizer.step(gradients(model, step), 1e-2, 1.0)
    for name, weight in (matrices | vectors).items():
        assert torch.allclose(optimizer.masters[name].double(), weight, rtol=1e-5, atol=1e-6), name


def test_weights_are_the_masters_rounded_and_small_steps_add_up() -> None:
    model = policy(alone(), shape=BF16)
    before = {name: weight.detach().clone() for name, weight, _ in model.named_shards()}
    optimizer = AdamW(model, replace(HYPER, weight_decay=0.0))
    name = "decoder.final_layernorm.weight"
    ones = {key: torch.ones(x.shape) for key, x in before.items()}
    optimizer.step(ones, 1e-4, 1.0)
    assert bits.same_bits(
        dict(model.gpt.named_parameters())[name].detach(), before[name]
    )  # below bf16's grid
    for _ in range(40):
        optimizer.step(ones, 1e-4, 1.0)
    for key, weight, _ in model.named_shards():
        assert bits.same_bits(weight.detach(), optimizer.masters[key].bfloat16())
    assert bool((dict(model.gpt.named_parameters())[name] < 1).all())


def test_a_learning_rate_of_zero_moves_moments_and_no_master() -> None:
    start, end = AdamW(policy(alone()), HYPER), stepped(rate=0.0)
    for name, master in start.masters.items():
        assert bits.same_bits(master, end.masters[name])
        assert bool((end.first[name] != 0).any())


def test_the_clip_coefficient_scales_the_gradient() -> None:
    model = policy(alone())
    halved = AdamW(model, HYPER)
    halved.step({name: x * 0.5 for name, x in gradients(model).items()}, 1e-2, 1.0)
    clipped = stepped(clip=0.5, steps=1)
    for name, master in halved.masters.items():
        assert bits.same_bits(master, clipped.masters[name])
        assert bits.same_bits(halved.second[name], clipped.second[name])


def test_one_ulp_in_the_clip_coefficient_changes_weights_everywhere() -> None:
    """D8: why the norm must have the same bits on every rank."""
    one, other = stepped(clip=0.3), stepped(clip=0.3 * (1 + 2**-23))
    changed = [name for name, x in one.masters.items() if not bits.same_bits(x, other.masters[name])]
    assert len(changed) > len(one.masters) // 2


def test_the_state_has_a_name_for_every_moment_and_master() -> None:
    optimizer = stepped()
    state = {name: (x, sharded) for name, x, sharded in optimizer.named_state()}
    assert len(state) == 3 * len(optimizer.masters)
    name = "embedding.word_embeddings.weight"
    assert state[f"exp_avg_sq/{name}"] == (optimizer.second[name], True)
    assert state["master/decoder.final_layernorm.weight"][1] is False


# The norm.


def named(model: PolicyModel) -> dict[str, tuple[Tensor, bool]]:
    """Gradients that only depend on name and virtual shard."""
    found = {}
    first = model.wiring.tp.index * (8 // model.wiring.tp.size)
    for key, (name, weight, sharded) in enumerate(model.named_shards()):
        shards = []
        for local in range(weight.shape[0] if sharded else 1):
            source = torch.Generator().manual_seed(100 * key + first + local)
            size = weight.shape[1:] if sharded else weight.shape
            shards.append(torch.randn(size, generator=source) * 10.0 ** ((key + first + local) % 5))
        found[name] = (torch.stack(shards) if sharded else shards[0], sharded)
    return found


def norms(rank: int, world: int) -> list[str]:
    found = []
    for tp in {1, world}:
        layout = Layout(dp=world // tp, cp=1, tp=tp, sp=tp)
        mesh = mesh_of(layout, rank)
        found.append(gradient_norm(named(policy(mesh, sp=tp > 1)), mesh.tp).hex())
    return found


def naive_norm(rank: int, world: int) -> float:
    """What frameworks do: a norm of what each rank holds, then of the norms; copies count on rank 0 only."""
    mesh = mesh_of(Layout(dp=1, cp=1, tp=world, sp=world), rank)
    own = [x for x, sharded in named(policy(mesh, sp=True)).values() if sharded or rank == 0]
    return float(torch.stack([x.norm() for x in own]).norm() ** 2)


def exact_norm() -> float:
    every = [float(v) ** 2 for x, _ in named(policy(alone())).values() for v in x.view(-1).tolist()]
    return math.sqrt(math.fsum(every))


def test_the_norm_counts_every_element_once() -> None:
    """D4."""
    assert float.fromhex(norms(0, 1)[0]) == pytest.approx(exact_norm(), rel=1e-14)


def test_the_norm_has_the_same_bits_in_every_layout() -> None:
    products()
    expected = norms(0, 1)[0]
    for found in run_ranks(4, norms):
        assert found == [expected] * 2


def test_a_norm_of_norms_depends_on_the_layout() -> None:
    """Witness."""
    products()
    by_two, by_four = (math.sqrt(sum(run_ranks(world, naive_norm))) for world in (2, 4))
    assert by_two != by_four
    assert by_two == pytest.approx(by_four, rel=1e-5)


def test_the_norm_depends_on_neither_copies_nor_order() -> None:
    tp = Group("tp", (0,), 0)
    one = named(policy(alone()))
    backwards = dict(reversed(one.items()))
    assert gradient_norm(one, tp) == gradient_norm(backwards, tp)
    assert gradient_norm({name: (torch.zeros_like(x), s) for name, (x, s) in one.items()}, tp) == 0.0
    huge = {"a": (torch.full((2, 5000), 1e30), False)}  # its square overflows float32
    assert gradient_norm(huge, tp) == pytest.approx(1e32, rel=1e-6)


@pytest.mark.parametrize(
    ("norm", "limit", "coefficient"),
    [(2.0, 1.0, 1.0 / (2.0 + 1e-6)), (0.5, 1.0, 1.0), (0.0, 1.0, 1.0), (5.0, 0.0, 1.0)],
)
def test_a_norm_is_brought_down_to_the_limit_and_0_is_no_limit(
    norm: float, limit: float, coefficient: float
) -> None:
    assert clip_coefficient(norm, limit) == coefficient
