"""Column- and row-parallel linear layers whose outputs and gradients are the same bits in every layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rlsp import collectives
from rlsp.model.gradients import Differentiable, ExactParameter, Weight, exact_parameter
from rlsp.model.wiring import STRICT, Site, Wiring
from rlsp.numerics.tree import tree_sum
from rlsp.summation import Rule, Span

# Of the gradient leaves that are computed before they are summed: 8 MiB of float32.
LEAF_ELEMENTS = 1 << 21


class ShardedLinear(nn.Module):
    """Hold a weight as virtual shards [V_local, N, K]; refuse what the contract cannot keep."""

    route = STRICT

    def __init__(
        self, shape: tuple[int, int, int], config: Any, bias: bool, is_expert: bool, tp_group: Any
    ) -> None:
        """Allocate the weight uninitialised; `model.build.initialize` draws it shard by shard."""
        super().__init__()
        self.wiring: Wiring = config.wiring
        self.site: Site | None = None
        if bias or is_expert:
            raise ValueError("rlsp's linear layers have no bias and serve no experts")
        own = self.wiring.tp
        if tp_group is not None and (
            tp_group.size() != own.size or (own.size > 1 and tp_group is not own.handle)
        ):
            raise ValueError(
                "an rlsp model keeps its own collectives: tp_group must be the group it was built with"
            )
        self.sequence_parallel = self.wiring.sequence_parallel
        self.weight = self._allocate(shape, config.params_dtype)

    def _allocate(self, shape: tuple[int, int, int], dtype: torch.dtype) -> Weight:
        rule = Rule(Span.TOKENS, self.wiring.contract.token_block)
        return exact_parameter(shape, dtype, rule)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Return nothing: Megatron-Core 0.16's MLP asks every child."""
        return {}


class ColumnParallelLinear(ShardedLinear):
    """Shard the output: gather the sequence (SP), one leaf product a virtual shard with whole K.

    Backward: the input's gradient is the tree over V of the shards' partial products, reduce-scattered under
    SP; the weight's gradient is the exact sum of token leaves.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        bias: bool = False,
        is_expert: bool = False,
        tp_group: Any = None,
        **_: Any,
    ) -> None:
        """Take Megatron-Core's constructor arguments; sizes are those of the logical tensor."""
        virtual = config.wiring.contract.virtual_tp
        shape = (virtual // config.wiring.tp.size, output_size // virtual, input_size)
        super().__init__(shape, config, bias, is_expert, tp_group)

    def forward(self, x: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        """Return [s, b, V_local·N] for x [s(/tp), b, K], and no bias; a tied head gives its `weight`."""
        out: Tensor = _Column.on(x, self.weight if weight is None else weight, self.wiring)
        self.wiring.capture(self.site, out)
        return out, None


class RowParallelLinear(ShardedLinear):
    """Shard the input: one leaf product a virtual shard, then the tree over V, then one rounding.

    The tree ends in a reduce-scatter (SP) or an all-reduce over the ranks of TP.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        bias: bool = False,
        input_is_parallel: bool = True,
        is_expert: bool = False,
        tp_group: Any = None,
        **_: Any,
    ) -> None:
        """Take Megatron-Core's constructor arguments; sizes are those of the logical tensor."""
        if not input_is_parallel:
            raise ValueError("rlsp's row-parallel linear takes an input that is already sharded")
        virtual = config.wiring.contract.virtual_tp
        shape = (virtual // config.wiring.tp.size, output_size, input_size // virtual)
        super().__init__(shape, config, bias, is_expert, tp_group)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return [s(/tp), b, N] for x [s, b, V_local·K], and no bias."""
        out: Tensor = _Row.on(x, self.weight, self.wiring)
        self.wiring.capture(self.site, out)
        return out, None


class _Column(Differentiable):
    """y_v = x·w_vᵀ."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, wiring: Wiring) -> Tensor:
        """Keep the gathered input: to gather it again would cost one more collective."""
        full = collectives.gather(x, wiring.tp, dim=0) if wiring.sequence_parallel else x
        ctx.save_for_backward(full, weight)
        ctx.wiring = wiring
        return wiring.products.column(rows(full), weight, x.dtype).view(*full.shape[:2], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        """Sum the input's gradient over the tree of virtual shards; add the weight's token leaves."""
        full, weight = ctx.saved_tensors
        wiring: Wiring = ctx.wiring
        v = weight.shape[0]
        partial = wiring.products.column_back(rows(dy), weight, tree_sum).view(full.shape)
        add_token_leaves(wiring, weight, by_shard(dy, v), by_shard(full, 1))
        return reduce_rows(partial, wiring).to(full.dtype), None, None


class _Row(Differentiable):
    """y = tree over v of x_v·w_vᵀ."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, wiring: Wiring) -> Tensor:
        """Sum the local subtree, then the ranks' part of the same tree, then round once."""
        ctx.save_for_backward(x, weight)
        ctx.wiring = wiring
        partial = wiring.products.row(rows(x), weight, tree_sum).view(*x.shape[:2], -1)
        return reduce_rows(partial, wiring).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        """Gather the output's gradient (SP); whole N inside a leaf; add the weight's token leaves."""
        x, weight = ctx.saved_tensors
        wiring: Wiring = ctx.wiring
        full = collectives.gather(dy, wiring.tp, dim=0) if wiring.sequence_parallel else dy
        dx = wiring.products.row_back(rows(full), weight, x.dtype).view(x.shape)
        add_token_leaves(wiring, weight, by_shard(full, 1), by_shard(x, weight.shape[0]))
        return dx, None, None


def rows(x: Tensor) -> Tensor:
    """View [s, b, n] as rows [s·b, n]."""
    return x.reshape(-1, x.shape[-1])


def by_shard(x: Tensor, shards: int) -> Tensor:
    """View [s, b, V·n] as [s, b, V, n]."""
    return x.reshape(x.shape[0], x.shape[1], shards, -1)


def reduce_rows(partial: Tensor, wiring: Wiring) -> Tensor:
    """Continue the tree over the ranks of TP, in float32: own sequence shard under SP, else every row."""
    if wiring.tp.size == 1:
        return partial
    if wiring.sequence_parallel:
        return collectives.reduce_scatter(partial, wiring.tp, dim=0)
    return collectives.all_reduce(partial, wiring.tp)


def add_token_leaves(wiring: Wiring, weight: ExactParameter, dy: Tensor, x: Tensor) -> None:
    """Add a weight's gradient leaves: token_block consecutive tokens of one sequence each.

    Args:
        wiring: The model's wiring.
        weight: The parameter, with its accumulator.
        dy: [s, b, V or 1, N] output gradients; s is a multiple of the token block.
        x: [s, b, V or 1, K] inputs.
    """
    block = wiring.contract.token_block
    add_token_products(wiring, weight, leaves_of(dy, block), leaves_of(x, block))


def add_token_products(wiring: Wiring, weight: ExactParameter, left: Tensor, right: Tensor) -> None:
    """Add the products of output gradients and inputs that are cut into leaves, [L, block, V or 1, n]."""
    at_once = max(1, LEAF_ELEMENTS // weight.numel())
    for a, b in zip(left.split(at_once), right.split(at_once), strict=True):
        weight.token_sum.add(wiring.products.token(a, b))


def leaves_of(x: Tensor, block: int) -> Tensor:
    """Cut [s, b, V, n] into leaves [s/block·b, block, V, n]."""
    s, b, v, n = x.shape
    return x.view(s // block, block, b, v, n).transpose(1, 2).reshape(-1, block, v, n)


def rows_of(x: Tensor, b: int, block: int) -> Tensor:
    """Undo `leaves_of` for rows [s/block·b·block, …] into [s·b, …]."""
    return x.view(-1, b, block, *x.shape[1:]).transpose(1, 2).reshape(x.shape)
