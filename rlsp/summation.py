"""Exact, order-free sums of canonical token leaves: one int64 accumulator a parameter, one guard a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from rlsp import collectives
from rlsp.groups import Group
from rlsp.numerics.fixed import from_fixed, leaf_bound, to_fixed, vanished, within


METRIC_LSB = 32


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
    """Collect, by tensor name, whether every leaf of a step stayed finite and in bound."""

    def __init__(self) -> None:
        """Start with nothing noted."""
        self._inside: dict[str, Tensor] = {}

    def note(self, name: str, inside: Tensor) -> None:
        """Add one bool scalar under `name`."""
        before = self._inside.get(name)
        self._inside[name] = inside if before is None else before & inside

    def settle(self, group: Group) -> None:
        """Agree with every rank of `group` and start anew; every rank calls it once a step.

        Raises:
            BoundBreachError: On every rank, naming each tensor with a leaf that was out of bound on any rank.
        """
        names = sorted(self._inside)
        flags = torch.stack([~self._inside[name] for name in names]).to(torch.int64)
        self._inside.clear()
        breached = collectives.max_integers(flags, group).tolist()
        if any(breached):
            bad = ", ".join(name for name, flag in zip(names, breached, strict=True) if flag)
            raise BoundBreachError(f"gradient leaves not finite, or too large for the exact sum, in: {bad}")


class TokenSum:
    """Sum one parameter's gradient leaves exactly, in units of 2^-lsb of d(sum over tokens)/dW."""

    def __init__(self, name: str, weight: Tensor, rule: Rule, lsb: int, guard: Guard) -> None:
        """Make an accumulator of the weight's shape; `begin` must be called before each step."""
        self.name, self.rule, self.lsb, self.guard = name, rule, lsb, guard
        self.total = torch.zeros(weight.shape, dtype=torch.int64, device=weight.device)
        self.nonzero = self.vanished = 0
        self._bound = 0.0

    def begin(self, tokens: int) -> None:
        """Clear the sum and set the bound for a step over `tokens` tokens (every sequence rounded up to its blocks)."""
        self.total.zero_()
        self.nonzero = self.vanished = 0
        self._bound = leaf_bound(self.lsb, tokens // self.rule.block * self.rule.copies)

    def add(self, leaves: Tensor) -> None:
        """Add float leaves [L, *shape of the weight]."""
        self.total += self._fixed(leaves).sum(dim=0)

    def add_rows(self, rows: Tensor, leaves: Tensor) -> None:
        """Add float leaves [L, H] to the rows `rows` (int64 [L]) of the weight seen as [rows, H]."""
        self.total.view(-1, leaves.shape[-1]).index_add_(0, rows, self._fixed(leaves))

    def _fixed(self, leaves: Tensor) -> Tensor:
        self.guard.note(self.name, within(leaves, self._bound))
        fixed = to_fixed(leaves, self.lsb)
        nonzero, lost = vanished(leaves, fixed)
        self.nonzero += nonzero
        self.vanished += lost
        return fixed


def reduce_sums(sums: list[TokenSum], tokens: Group, world: Group) -> None:
    """Complete every accumulator over the ranks of its span: one integer all-reduce a span."""
    for span, group in ((Span.TOKENS, tokens), (Span.WORLD, world)):
        members = [item for item in sums if item.rule.span is span]
        if not members or group.size == 1:
            continue
        flat = collectives.sum_integers(torch.cat([item.total.view(-1) for item in members]), group)
        parts = flat.split([item.total.numel() for item in members])
        for item, part in zip(members, parts, strict=True):
            item.total.copy_(part.view(item.total.shape))


def exact_sums(columns: list[Tensor], group: Group) -> list[float]:
    """Return the exact sum of each float tensor over all its elements and all ranks of `group`, in one exchange.

    Units are 2^-32, sums int64: metrics that no layout changes. A sum with an element that is not finite is NaN.
    """
    finite = torch.stack([x.isfinite().all() for x in columns]).to(torch.int64)
    totals = torch.stack([to_fixed(torch.nan_to_num(x, 0.0, 0.0, 0.0), METRIC_LSB).sum() for x in columns])
    every = collectives.sum_integers(torch.cat((totals, 1 - finite)), group)
    sums = (every[: len(columns)].to(torch.float64) * 2.0**-METRIC_LSB).tolist()
    return [
        math.nan if broken else value
        for value, broken in zip(sums, every[len(columns) :].tolist(), strict=True)
    ]


def gradient(item: TokenSum, active_tokens: int) -> Tensor:
    """Return the completed gradient divided once by the global count of active tokens, float32."""
    return from_fixed(item.total, item.lsb, max(active_tokens, 1))
