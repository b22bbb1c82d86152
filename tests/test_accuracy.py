"""Gradients must also be good: at least as near to float64 as Megatron-Core's own in the same dtype."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from dataclasses import replace
from typing import Any

import oracles
import pytest
import torch
from ranks import run_ranks

from rlsp.config import Config, Dtype, ModelConfig
from rlsp.groups import Group
from rlsp.model.assemble import contract_of
from rlsp.model.attention import Channel
from rlsp.model.build import PolicyModel, build_model, initialize
from rlsp.model.head import score_tokens
from rlsp.model.wiring import Phase, Wiring
from rlsp.numerics.products import Products
from rlsp.summation import Guard, gradient

BATCHES = (
    16  # errors are root mean squares over these: of one batch, a 16-element norm's error is mostly luck
)
SIZES = {"nano": (2, 128, 256, 64), "wider and deeper": (4, 256, 512, 96)}  # layers, hidden, FFN, tokens


def own_gradients(
    model: PolicyModel, sums: list[Any], guard: Guard, batch: tuple[torch.Tensor, ...]
) -> dict[str, torch.Tensor]:
    """Return rlsp's gradients of `oracles.loss`, by name, in Megatron-Core's layout."""
    tokens, targets, advantage = batch
    for item in sums:
        item.begin(tokens.numel())
    positions = torch.arange(tokens.shape[1]).unsqueeze(1)
    channel = Channel(qkv_format="sbhd", positions=positions, guard=guard, bound=1e6)
    logits = model.logits(model.hidden(tokens, channel))
    scores = score_tokens(logits, targets.t().reshape(-1), 1.0, model.vocabulary, model.wiring)
    weight = advantage.t().reshape(-1)
    loss = weight * scores.logp - 0.01 * scores.entropy * (weight != 0)
    torch.autograd.backward(loss, torch.ones_like(loss))
    return {item.name: oracles.in_megatron_layout(item.name, gradient(item, 1)) for item in sums}


def errors(
    rank: int, world_size: int, config: Config, shape: ModelConfig, length: int
) -> dict[str, tuple[float, float]]:
    """Measure relative errors of every tensor against float64: (rlsp, Megatron-Core)."""
    alone = Group("tp", (0,), 0)
    contract = contract_of(replace(config, model=shape))
    wiring = Wiring(Phase.TRAIN, contract, Products(contract.row_tile), alone, alone, sequence_parallel=False)
    model = build_model(shape, wiring, torch.device("cpu"))
    guard = Guard()
    sums = model.attach_sums(guard)
    squares: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with oracles.megatron_on_cpu():
        stock = oracles.megatron_model(shape, contract.padded_vocab, getattr(torch, shape.dtype.value))
        for seed in range(BATCHES):
            initialize(model, seed, shape.init_std, shape.num_layers)
            exact = {name: oracles.in_megatron_layout(name, p) for name, p, _ in model.named_shards()}
            batch = draw_batch(seed, length, shape.vocab_size)
            mine = own_gradients(model, sums, guard, batch)
            theirs = megatron_gradients(stock, exact, batch, shape.vocab_size)
            true = float64_gradients(shape, exact, batch)
            for name, reference in true.items():
                pair = [
                    float(((g[name].double() - reference).norm() / reference.norm()) ** 2)
                    for g in (mine, theirs)
                ]
                squares[name].append((pair[0], pair[1]))
    return {name: (root(a for a, _ in pairs), root(b for _, b in pairs)) for name, pairs in squares.items()}


def draw_batch(seed: int, length: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw tokens, targets and advantages [4, length]; a prompt and the last position carry no loss."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab_size, (4, length), generator=generator)
    advantage = torch.empty(4, length).normal_(generator=generator)
    advantage[:, :8] = 0
    advantage[:, -1] = 0
    return tokens, tokens.roll(-1, 1), advantage


def megatron_gradients(
    stock: Any, exact: Any, batch: tuple[torch.Tensor, ...], vocab_size: int
) -> dict[str, torch.Tensor]:
    """Return Megatron-Core's gradients by name."""
    stock.zero_grad()
    with torch.no_grad():
        for name, parameter in stock.named_parameters():
            parameter.copy_(exact[name])
    oracles.loss(oracles.megatron_logits(stock, batch[0]).float(), batch[1], batch[2], vocab_size).backward()
    return {name: parameter.grad for name, parameter in stock.named_parameters()}


def float64_gradients(
    shape: ModelConfig, exact: Any, batch: tuple[torch.Tensor, ...]
) -> dict[str, torch.Tensor]:
    """Return the oracle's gradients by name."""
    weights = {name: w.clone().requires_grad_() for name, w in exact.items()}
    logits = oracles.float64_logits(shape, weights, batch[0])
    oracles.loss(logits, batch[1], batch[2].double(), shape.vocab_size).backward()
    return {name: w.grad for name, w in weights.items() if w.grad is not None}


def root(squares: Any) -> float:
    """Return the root mean square."""
    return math.sqrt(statistics.fmean(squares))


@pytest.mark.parametrize("dtype", [Dtype.bfloat16, Dtype.float32])
@pytest.mark.parametrize("size", SIZES)
def test_every_gradient_is_as_near_to_float64_as_megatrons_own(size: str, dtype: Dtype, compose: Any) -> None:
    layers, hidden, ffn, length = SIZES[size]
    config = compose("parallel=cp1_tp1_sp1")
    shape = replace(config.model, num_layers=layers, hidden_size=hidden, ffn_hidden_size=ffn, dtype=dtype)
    measured = run_ranks(1, errors, config, shape, length, timeout_s=300)[0]
    ratios = {name: mine / theirs for name, (mine, theirs) in measured.items()}
    worst = max(ratios, key=ratios.__getitem__)
    assert len(ratios) == 3 + 8 * layers
    assert ratios[worst] <= 1.1, (
        f"{worst}: rlsp {measured[worst][0]:.2e}, Megatron-Core {measured[worst][1]:.2e}"
    )
    assert statistics.median(ratios.values()) <= 1.0
