"""The native routes' layers: Megatron-Core's own linear and reductions, torch's own norm and activation.

The control of every comparison: what runs here is what a stack without the contract runs. One product over
the rank's whole shard, sums over ranks by the backend, weight gradients by autograd in the model's dtype,
added over micro-batches in float32. Only the storage is rlsp's: weights lie as virtual shards, so that
digests, optimizer and hand-over are the same for both routes.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from rlsp.model.activation import SwiGLU
from rlsp.model.compat import lone_group
from rlsp.model.embedding import LanguageModelEmbedding, VocabParallelEmbedding, owned_rows
from rlsp.model.gradients import NativeParameter, native_parameter
from rlsp.model.head import OutputLayer
from rlsp.model.linear import ColumnParallelLinear, RowParallelLinear
from rlsp.model.wiring import NATIVE, Boundary, Operator, Site, Wiring
from rlsp.summation import Span


class NativeColumnParallelLinear(ColumnParallelLinear):
    """Shard the output: one product of the rank's whole shard, as Megatron-Core's layer of this name."""

    route = NATIVE

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> NativeParameter:
        return native_parameter(shape, dtype, Span.TOKENS)

    def forward(self, x: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        """Return [s, b, V_local·N] for x [s(/tp), b, K], and no bias; a tied head gives its `weight`."""
        shards = self.weight if weight is None else weight
        y = _linear(x, shards.view(-1, shards.shape[-1]), self.wiring, column=True)
        self.wiring.capture(self.site, y)
        return y, None


class NativeRowParallelLinear(RowParallelLinear):
    """Shard the input: one product, rounded, then the backend's reduce-scatter (SP) or all-reduce."""

    route = NATIVE

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> NativeParameter:
        return native_parameter(shape, dtype, Span.TOKENS)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return [s(/tp), b, N] for x [s, b, V_local·K], and no bias."""
        matrix = self.weight.permute(1, 0, 2).reshape(self.weight.shape[1], -1)
        y = reduced(_linear(x, matrix, self.wiring, column=False), self.wiring)
        self.wiring.capture(self.site, y)
        return y, None


class NativeRMSNorm(nn.Module):
    """Normalise by torch's own kernel, as Megatron-Core does where Transformer Engine is absent."""

    route = NATIVE

    def __init__(self, *, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        """Take Megatron-Core's constructor arguments."""
        super().__init__()
        self.wiring: Wiring = config.wiring
        self.site: Site | None = None
        self.epsilon = eps
        self.weight = native_parameter((hidden_size,), config.params_dtype, self._span())

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised `x` [..., hidden_size] in its own dtype."""
        normed = torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.epsilon)
        self.wiring.capture(self.site, normed)
        return normed

    def _span(self) -> Span:
        return Span.WORLD if self.wiring.sequence_parallel else Span.TOKENS


class NativeHeadRMSNorm(NativeRMSNorm):
    """Normalise each head (QK-norm): heads are sharded over TP whether or not SP is on."""

    def _span(self) -> Span:
        return Span.WORLD


class NativeSwiGLU(SwiGLU):
    """Gate by torch's own silu, in the model's dtype."""

    route = NATIVE

    def forward(self, x: Tensor) -> Tensor:
        """Return [s, b, V_local·F] for x [s, b, V_local·2·F]."""
        self.wiring.count(Operator.FFN, self.route)
        shards = self.wiring.contract.virtual_tp // self.wiring.tp.size
        gate, up = x.view(*x.shape[:2], shards, 2, -1).unbind(dim=3)
        gated = (torch.nn.functional.silu(gate) * up).flatten(2)  # noqa: TID251 - the control
        self.wiring.capture(self.site, gated)
        return gated


class NativeOutputLayer(OutputLayer, NativeColumnParallelLinear):
    """Project hidden states to the own vocabulary by one product."""

    route = NATIVE


class NativeVocabParallelEmbedding(VocabParallelEmbedding):
    """Look up by torch's own kernel, and sum over TP by the backend."""

    route = NATIVE

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> NativeParameter:
        return native_parameter(shape, dtype, Span.TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return [s(/tp), b, H] for tokens int64 [b, s]."""
        index, owned = owned_rows(tokens.t().contiguous(), self.weight, self.wiring)
        rows = torch.nn.functional.embedding(index, self.weight.view(-1, self.weight.shape[-1]))
        rows = reduced(torch.where(owned.unsqueeze(-1), rows, 0.0), self.wiring)
        self.wiring.capture(Site(Boundary.EMBEDDING), rows)
        return rows


class NativeLanguageModelEmbedding(LanguageModelEmbedding):
    """Stand in for Megatron-Core's class of this name, with the backend's arithmetic."""

    words = NativeVocabParallelEmbedding


def reduced(x: Tensor, wiring: Wiring) -> Tensor:
    """Sum x [s, b, H] over TP by the backend: own sequence shard under SP, else every row."""
    if wiring.tp.size == 1:
        return x
    group = lone_group(wiring.tp)
    region = (
        reduce_scatter_to_sequence_parallel_region
        if wiring.sequence_parallel
        else reduce_from_tensor_model_parallel_region
    )
    y: Tensor = region(x.contiguous(), group=group)
    return y


def _linear(x: Tensor, matrix: Tensor, wiring: Wiring, *, column: bool) -> Tensor:
    """Multiply x [s(/tp), b, K] by `matrix` [N, K] with Megatron-Core's communication of a column's input."""
    y: Tensor = linear_with_grad_accumulation_and_async_allreduce(
        input=x,
        weight=matrix,
        bias=None,
        gradient_accumulation_fusion=False,
        allreduce_dgrad=column and wiring.tp.size > 1 and not wiring.sequence_parallel,
        sequence_parallel=column and wiring.sequence_parallel,
        tp_group=lone_group(wiring.tp),
    )
    return y
