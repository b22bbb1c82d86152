"""Naive sums to plant in a rank: each replaces one rule of the contract by what is usually done."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from rlsp import collectives
from rlsp.model.attention import _sum_over_context
from rlsp.model.wiring import Wiring
from rlsp.numerics.attention import KeyValueGradient
from rlsp.numerics.fixed import from_fixed, to_fixed
from rlsp.numerics.products import Combine, Products, widened
from rlsp.summation import TokenSum

Patch = Callable[[], Any]


@dataclass(frozen=True)
class Plant:
    """A naive sum, two layouts that it tells apart, and what rlsp-compare must name.

    Attributes:
        patch: Makes the context manager that plants it.
        overrides: Overrides of the two runs, space-separated.
        stage: The stage of the first difference.
        tensor: The end of the tensor's name, where the stage is about tensors.
    """

    patch: Patch
    overrides: tuple[str, str]
    stage: str
    tensor: str | None = None


def one_product_over_the_local_k(self: Products, x: Tensor, weight: Tensor, combine: Combine) -> Tensor:
    """Multiply a row-parallel layer's local shard in one product: its partial sum depends on TP."""
    return combine((widened(x) @ widened(weight.permute(1, 0, 2)).flatten(1).t()).unsqueeze(0))


def one_product_over_the_local_n(self: Products, dy: Tensor, weight: Tensor, combine: Combine) -> Tensor:
    """Multiply a column-parallel layer's local output gradient in one product."""
    return combine((widened(dy) @ widened(weight).flatten(0, 1)).unsqueeze(0))


def statistics_of_the_rank(x: Tensor, valid: Tensor) -> Tensor:
    """Reduce all local vocabulary in one row: the usual vocabulary-parallel log-sum-exp."""
    row, mask = x.flatten(1), valid.flatten()
    top = row.amax(dim=-1, keepdim=True)
    shifted = torch.where(mask, row - top, 0.0)
    weight = torch.where(mask, torch.exp(shifted), 0.0)
    sums = (weight.sum(dim=-1, keepdim=True), (weight * shifted).sum(dim=-1, keepdim=True))
    return torch.cat((top, *sums), dim=-1).unsqueeze(1)


def rounded_partials(exact: KeyValueGradient, batch: int, wiring: Wiring) -> tuple[Tensor, Tensor]:
    """Round every rank's share of dK and dV to float32 before it is added."""
    lsb = wiring.contract.grad_lsb
    dk, dv = (to_fixed(from_fixed(x, lsb), lsb) for x in (exact.dk, exact.dv))
    return _sum_over_context(replace(exact, dk=dk, dv=dv), batch, wiring)


def norm_of_the_ranks(gradients: Mapping[str, tuple[Tensor, bool]], tp: Any) -> float:
    """Combine the ranks' own float32 norms, copies on the first rank only."""
    mine = [g.flatten() for g, sharded in gradients.values() if sharded or tp.index == 0]
    norms = collectives.gather(torch.cat(mine).norm().view(1), tp)
    return math.sqrt(float(norms.double().square().sum()))


def in_float32(name: str) -> Patch:
    """Return the patch that accumulates one tensor's leaves in float32, in the order in which they come."""
    add, add_rows = TokenSum.add, TokenSum.add_rows
    running: dict[str, Tensor] = {}

    def begin(self: TokenSum, tokens: int) -> None:
        running.pop(self.name, None)
        original_begin(self, tokens)

    def float_add(self: TokenSum, leaves: Tensor) -> None:
        if not self.name.endswith(name):
            add(self, leaves)
            return
        total = running.setdefault(self.name, torch.zeros(self.total.shape))
        for leaf in leaves:
            total += leaf
        self.total.copy_(to_fixed(total, self.lsb))

    def float_add_rows(self: TokenSum, rows: Tensor, leaves: Tensor) -> None:
        if not self.name.endswith(name):
            add_rows(self, rows, leaves)
            return
        total = running.setdefault(self.name, torch.zeros(self.total.shape))
        total.view(-1, leaves.shape[-1]).index_add_(0, rows, leaves)
        self.total.copy_(to_fixed(total, self.lsb))

    original_begin = TokenSum.begin
    return lambda: mock.patch.multiple(TokenSum, begin=begin, add=float_add, add_rows=float_add_rows)


def replaced(target: str, naive: Any) -> Patch:
    """Return the patch that puts `naive` in the place of the dotted `target`."""
    return lambda: mock.patch(target, naive)


TP = ("parallel=cp1_tp1_sp1", "parallel=cp1_tp2_sp2")
CP = ("parallel=cp1_tp1_sp1", "parallel=cp2_tp1_sp1")
DP = ("parallel=cp1_tp1_sp1", "parallel=cp1_tp1_sp1_dp2")
FP32_TP = (f"{TP[0]} model.dtype=float32", f"{TP[1]} model.dtype=float32")  # rounding to bfloat16 hides it
FP32_CP = (f"{CP[0]} model.dtype=float32", f"{CP[1]} model.dtype=float32")  # bfloat16 rows add up exactly
MICRO = ("parallel=cp1_tp1_sp1 micro_batch_size=2", "parallel=cp1_tp1_sp1 micro_batch_size=3")

PLANTS: Mapping[str, Plant] = {
    "row-parallel products": Plant(
        replaced("rlsp.numerics.products.Products.row", one_product_over_the_local_k), TP, "train log-prob"
    ),
    "input gradients of column-parallel products": Plant(
        replaced("rlsp.numerics.products.Products.column_back", one_product_over_the_local_n),
        FP32_TP,
        "gradients",
        "final_layernorm.weight",
    ),
    "log-sum-exp": Plant(
        replaced("rlsp.numerics.logprob.shard_statistics", statistics_of_the_rank), TP, "train log-prob"
    ),
    "keys and values over CP": Plant(
        replaced("rlsp.model.attention._sum_over_context", rounded_partials),
        CP,
        "gradients",
        "layers.1.self_attention.k_layernorm.weight",
    ),
    "a weight over micro-batches": Plant(
        in_float32("layers.0.mlp.linear_fc2.weight"), MICRO, "gradients", "layers.0.mlp.linear_fc2.weight"
    ),
    "a weight over DP": Plant(in_float32("output_layer.weight"), DP, "gradients", "output_layer.weight"),
    "a norm over SP": Plant(
        in_float32("layers.1.pre_mlp_layernorm.weight"), TP, "gradients", "layers.1.pre_mlp_layernorm.weight"
    ),
    "a head norm over TP": Plant(
        in_float32("layers.0.self_attention.q_layernorm.weight"),
        TP,
        "gradients",
        "layers.0.self_attention.q_layernorm.weight",
    ),
    "embedding rows over CP": Plant(
        in_float32("word_embeddings.weight"), FP32_CP, "gradients", "word_embeddings.weight"
    ),
    "the gradient norm": Plant(
        replaced("rlsp.rl.update.gradient_norm", norm_of_the_ranks), TP, "gradient norm"
    ),
}
