"""How a model's functions leave their gradients: weights' in exact sums, activations' through autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import Function

from rlsp.summation import Rule, TokenSum


class ExactParameter(nn.Parameter):
    """Keep a weight together with its exact gradient: backward adds token leaves and fills no `grad`.

    Attributes:
        rule: What a leaf of the gradient is, and over which ranks the leaves lie.
        token_sum: The accumulator, from `PolicyModel.attach_sums` on.
    """

    rule: Rule
    token_sum: TokenSum


def exact_parameter(shape: tuple[int, ...], dtype: torch.dtype, rule: Rule) -> ExactParameter:
    """Allocate an uninitialised parameter of `shape` and `dtype` under `rule`."""
    parameter = ExactParameter(torch.empty(shape, dtype=dtype))
    parameter.rule = rule
    return parameter


class Differentiable(Function):
    """A function with a gradient of its own; `on` stands for torch's `apply`, which is untyped."""

    @classmethod
    def on(cls, *arguments: Any) -> Any:
        """Apply the function; the caller states what it returns."""
        apply: Callable[..., Any] = cls.apply
        return apply(*arguments)
