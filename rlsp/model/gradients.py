"""How a model's functions leave their gradients: weights' in sums, activations' through autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from rlsp.summation import Rule, Span, TokenSum


class ExactParameter(nn.Parameter):
    """Keep a weight together with its exact gradient: backward adds token leaves and fills no `grad`.

    Attributes:
        rule: What a leaf of the gradient is, and over which ranks the leaves lie.
        token_sum: The accumulator, from `PolicyModel.attach_sums` on.
    """

    rule: Rule
    token_sum: TokenSum


class NativeParameter(nn.Parameter):
    """Keep a weight of a native route: autograd's gradients of every micro-batch add up in float32.

    Attributes:
        span: The ranks whose gradients are added, by the backend's own reduction.
        main_grad: The sum so far, float32, from `PolicyModel.attach_sums` on (Megatron-Core's name for it).
    """

    span: Span
    main_grad: Tensor

    def attach(self) -> None:
        """Collect every gradient that autograd leaves from now on."""
        self.main_grad = torch.zeros_like(self, dtype=torch.float32, requires_grad=False)
        self.register_post_accumulate_grad_hook(_collect)


Weight = ExactParameter | NativeParameter


def native_parameter(shape: tuple[int, ...], dtype: torch.dtype, span: Span) -> NativeParameter:
    """Allocate an uninitialised parameter of `shape` and `dtype` whose gradients `span` adds."""
    parameter = NativeParameter(torch.empty(shape, dtype=dtype))
    parameter.span = span
    return parameter


def _collect(parameter: Tensor) -> None:
    assert isinstance(parameter, NativeParameter)
    if parameter.grad is not None:
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None


def exact_parameter(shape: tuple[int, ...], dtype: torch.dtype, rule: Rule) -> ExactParameter:
    """Allocate an uninitialised parameter of `shape` and `dtype` under `rule`."""
    parameter = ExactParameter(torch.empty(shape, dtype=dtype))
    parameter.rule = rule
    return parameter


class _Unsaved:
    """Stand in for the context of a function that nobody will differentiate."""

    def save_for_backward(self, *_: Tensor) -> None:
        """Save nothing."""

    def mark_non_differentiable(self, *_: Tensor) -> None:
        """Mark nothing."""


class Differentiable(Function):
    """A function with a gradient of its own; `on` stands for torch's `apply`, which is untyped."""

    @classmethod
    def on(cls, *arguments: Any) -> Any:
        """Apply the function; the caller states what it returns."""
        if (
            not torch.is_grad_enabled()
        ):  # decoding makes thousands of calls, and autograd's wrapping costs each
            return cls.forward(_Unsaved(), *arguments)
        apply: Callable[..., Any] = cls.apply
        return apply(*arguments)
