"""Exact, order-free sums of canonical token leaves: one int64 accumulator a parameter, one guard a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from rlsp import collectives
from rlsp.groups import Group
from rlsp.numerics.fixed import add_leaves, from_fixed, leaf_bound, reach, to_fixed, vanished, within

METRIC_LSBS = (32, 8)
METRIC_ADDENDS = 1 << 20  # of one metric and step, over all ranks, for which the sum cannot overflow
METRIC_BOUND = leaf_bound(METRIC_LSBS[-1], METRIC_ADDENDS)
_NOT_FINITE = 1 << 16  # in place of a number of bits: more than any float is out of bound


class Span(Enum):
    """Over which ranks a gradient's leaves lie."""

    TOKENS = "ranks with other tokens (dp × cp)"
    WORLD = "those and the TP ranks with other sequence shards or heads (dp × cp × tp)"


@dataclass(frozen=True)
class Rule:
    """Say what a leaf of one parameter's gradient is.

    Attributes:
        span: The ranks whose leaves are added.
        block: Tokens in a leaf: `numerics.token_block` for products, 1 for elementwise sums.
        copies: Leaves that one block leaves for one element (heads, for a norm shared by all heads).
    """

    span: Span
    block: int
    copies: int = 1


class BoundBreachError(ArithmeticError):
    """A leaf was not finite or too large for the exact sum; the message names the tensors."""


class Guard:
    """Collect, by tensor name, how near to its bound the largest leaf of a step came.

    Names are announced when the model is built, so that a rank without a sequence, which notes nothing,
    settles the same list as the others.
    """

    def __init__(self) -> None:
        """Start with no name."""
        self._reach: dict[str, Tensor] = {}

    def expect(self, name: str, device: torch.device) -> None:
        """Announce a name whose leaves will lie on `device`; every rank announces the same names."""
        self._reach[name] = torch.zeros((), dtype=torch.float64, device=device)

    def note(self, name: str, reached: Tensor) -> None:
        """Add one float scalar, the `reach` of some leaves, under an announced name.

        Raises:
            ValueError: Nobody announced it: ranks that note nothing would settle another list.
        """
        before = self._reach.get(name)
        if before is None:
            raise ValueError(f"{name} was noted, but not announced by Guard.expect when the model was built")
        self._reach[name] = torch.maximum(before, reached.to(torch.float64))  # NaN stays

    def settle(self, group: Group) -> None:
        """Agree with every rank of `group` and start anew; every rank calls it once a step.

        Raises:
            BoundBreachError: On every rank, naming each tensor with a leaf that was out of bound on any rank,
                and the unit that has room for it.
        """
        names = sorted(self._reach)
        if not names:
            return
        reached = torch.stack([self._reach[name] for name in names])
        self._reach = dict(zip(names, torch.zeros_like(reached).unbind(), strict=True))
        bits = torch.frexp(reached).exponent.clamp(min=0).to(torch.int64)  # of 1 to below 2: one bit
        missing = collectives.max_integers(torch.where(reached.isfinite(), bits, _NOT_FINITE), group).tolist()
        if any(missing):
            raise BoundBreachError(_breach(dict(zip(names, missing, strict=True))))


def _breach(missing_bits: dict[str, int]) -> str:
    """Say which tensors lack bits, or are not finite."""
    broken = [name for name, bits in missing_bits.items() if bits == _NOT_FINITE]
    large = {name: bits for name, bits in missing_bits.items() if 0 < bits < _NOT_FINITE}
    said = []
    if broken:
        said.append(f"gradient leaves not finite, in: {', '.join(broken)}")
    if large:
        most = max(large.values())
        said.append(
            f"gradient leaves too large for the exact sum (a numerics.grad_lsb smaller by {most} has room), "
            f"in: {', '.join(large)}"
        )
    return "; ".join(said)


class TokenSum:
    """Sum one parameter's gradient leaves exactly, in units of 2^-lsb of d(sum over tokens)/dW.

    Attributes:
        name: The parameter's.
        rule: What a leaf is.
        lsb: The unit is 2^-lsb.
        guard: Where a leaf out of bound is noted.
        total: The sum so far, int64, the weight's shape.
        counts: int64 [2], this rank's nonzero leaf elements so far, and those of them that rounded to zero.
        replicated: Whether the ranks of TP hold the same tokens' leaves: a vector that lies on all of them.
    """

    def __init__(self, name: str, weight: Tensor, rule: Rule, lsb: int, guard: Guard) -> None:
        """Make an accumulator of the weight's shape; `begin` must be called before each step."""
        self.name, self.rule, self.lsb, self.guard = name, rule, lsb, guard
        self.total = torch.zeros(weight.shape, dtype=torch.int64, device=weight.device)
        self.counts = torch.zeros(2, dtype=torch.int64, device=weight.device)
        self.replicated = rule.span is Span.TOKENS and weight.dim() == 1
        self._bound = 0.0
        guard.expect(name, weight.device)

    def begin(self, tokens: int) -> None:
        """Clear the sum and set the bound for a step.

        Args:
            tokens: Tokens of the step over all ranks, every sequence rounded up to its blocks.
        """
        self.total.zero_()
        self.counts.zero_()
        self._bound = leaf_bound(self.lsb, -(-tokens // self.rule.block) * self.rule.copies)

    def add(self, leaves: Tensor) -> None:
        """Add float leaves [L, *shape of the weight]."""
        reached, counts = add_leaves(self.total, leaves, self.lsb, self._bound)
        self.guard.note(self.name, reached)
        self.counts += counts

    def add_rows(self, rows: Tensor, leaves: Tensor) -> None:
        """Add float leaves [L, H] to the rows `rows` (int64 [L]) of the weight seen as [rows, H]."""
        self.guard.note(self.name, reach(leaves, self._bound))
        fixed = to_fixed(leaves, self.lsb)
        self.counts += vanished(leaves, fixed)
        self.total.view(-1, leaves.shape[-1]).index_add_(0, rows, fixed)


def reduce_sums(sums: list[TokenSum], tokens: Group, world: Group) -> float:
    """Complete every accumulator over the ranks of its span: one exchange a span.

    Args:
        sums: One accumulator a parameter, the same list on every rank.
        tokens: This rank's group of ranks that share a weight shard (dp × cp).
        world: All ranks.

    Returns:
        The share of nonzero leaf elements that rounded to zero, over all ranks; the same in every layout.
    """
    first_of_tp = world.ranks[0] in tokens.ranks
    if not sums:
        return 0.0
    counts = torch.zeros_like(sums[0].counts)
    for item in sums:
        if first_of_tp or not item.replicated:
            counts += item.counts
    _add_over([item.total for item in sums if item.rule.span is Span.TOKENS], tokens)
    _add_over([counts, *(item.total for item in sums if item.rule.span is Span.WORLD)], world)
    nonzero, lost = (int(count) for count in counts)
    return lost / max(nonzero, 1)


def _add_over(totals: list[Tensor], group: Group) -> None:
    """Add int64 tensors over the ranks of a group, in place and in one message."""
    if not totals or group.size == 1:
        return
    flat = collectives.sum_integers(torch.cat([x.view(-1) for x in totals]), group)
    for x, part in zip(totals, flat.split([x.numel() for x in totals]), strict=True):
        x.view(-1).copy_(part)


def exact_sums(columns: list[Tensor], group: Group) -> list[float]:
    """Return the exact sum of each float tensor over its elements and all ranks of `group`, in one exchange.

    Sums are int64, in units of 2^-32 where every element is below 1,024 on every rank, else of 2^-8 (below
    2^34): metrics that no layout changes. A sum is NaN where an element is not finite or larger still.
    """
    parts = []
    for lsb in METRIC_LSBS:
        bound = leaf_bound(lsb, METRIC_ADDENDS)
        parts.append(
            torch.stack([to_fixed(torch.where(x.abs() < bound, x, 0.0), lsb).sum() for x in columns])
        )
        parts.append(torch.stack([~within(x, bound) for x in columns]).to(torch.int64))
    every = collectives.sum_integers(torch.cat(parts), group).view(len(METRIC_LSBS), 2, len(columns)).tolist()
    return [_first_whole([(total[i], broken[i]) for total, broken in every]) for i in range(len(columns))]


def _first_whole(sums: list[tuple[int, int]]) -> float:
    """Return the sum in the finest unit that every element fitted into, or NaN."""
    for lsb, (total, broken) in zip(METRIC_LSBS, sums, strict=True):
        if not broken:
            return float(total) * 2.0**-lsb
    return math.nan


def gradient(item: TokenSum, active_tokens: int) -> Tensor:
    """Return the completed gradient divided once by the global count of active tokens, float32."""
    return from_fixed(item.total, item.lsb, max(active_tokens, 1))
