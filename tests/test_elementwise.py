from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numeric_data import draw, gradients, mixed, relative_error
from torch import Tensor

from rlsp.bits import same_bits
from rlsp.numerics.elementwise import rms_norm, rms_norm_back, rotate, swiglu, swiglu_back

EPSILON = 1e-6
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 3e-7, torch.bfloat16: 4e-3}


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + EPSILON) * weight


def exact_swiglu(x: Tensor) -> Tensor:
    gate, up = x.unbind(dim=-2)
    return gate * torch.sigmoid(gate) * up


def exact_rotation(x: Tensor, angle: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_agrees_with_float64(dtype: torch.dtype) -> None:
    x, weight, dy = draw(1, 9, 48, dtype=dtype), draw(2, 48, dtype=dtype), draw(3, 9, 48, dtype=dtype)
    y, reciprocal = rms_norm(x, weight, EPSILON)
    assert y.dtype == dtype
    assert relative_error(y, exact_norm(x.double(), weight.double())) < TOLERANCE[dtype]
    dx, leaves = rms_norm_back(dy, x, weight, reciprocal)
    want_x, want_weight = gradients(exact_norm, dy, x, weight)
    assert dx.dtype == dtype
    assert leaves.dtype == torch.float32
    assert relative_error(dx, want_x) < 2 * TOLERANCE[dtype]
    assert relative_error(leaves.double().sum(dim=0), want_weight) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_agrees_with_float64(dtype: torch.dtype) -> None:
    x, dy = 3 * draw(1, 9, 8, 2, 24, dtype=dtype), draw(2, 9, 8, 24, dtype=dtype)
    assert relative_error(swiglu(x), exact_swiglu(x.double())) < TOLERANCE[dtype]
    (want,) = gradients(exact_swiglu, dy, x)
    got = swiglu_back(dy, x)
    assert got.dtype == dtype
    assert relative_error(got, want) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rotation_agrees_with_complex_numbers_and_undoes_itself(dtype: torch.dtype) -> None:
    x, angle = draw(1, 9, 4, 16, dtype=dtype), draw(2, 9, 1, 8)
    cosine, sine = angle.cos(), angle.sin()
    turned = rotate(x, cosine, sine)
    assert turned.dtype == dtype
    assert relative_error(turned, exact_rotation(x.double(), angle.double())) < TOLERANCE[dtype]
    assert relative_error(rotate(turned, cosine, -sine), x.double()) < 2 * TOLERANCE[dtype]
    dy = draw(3, 9, 4, 16, dtype=dtype)
    (want,) = gradients(lambda q: exact_rotation(q, angle.double()), dy, x)
    assert relative_error(rotate(dy, cosine, -sine), want) < TOLERANCE[dtype]


@given(st.integers(1, 70), st.integers(0, 69), st.sampled_from(DTYPES))
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(rows: int, first: int, dtype: torch.dtype) -> None:
    first = min(first, rows - 1)
    one = slice(first, first + 1)
    x, dy = mixed(1, 70, 41, dtype=dtype)[:rows], draw(2, 70, 41, dtype=dtype)[:rows]
    weight = draw(3, 41, dtype=dtype)
    y, reciprocal = rms_norm(x, weight, EPSILON)
    alone = rms_norm(x[one].clone(), weight, EPSILON)
    assert same_bits(alone[0], y[one])
    assert same_bits(alone[1], reciprocal[one])
    for whole, part in zip(
        rms_norm_back(dy, x, weight, reciprocal),
        rms_norm_back(dy[one].clone(), x[one].clone(), weight, reciprocal[one].clone()),
        strict=True,
    ):
        assert same_bits(part, whole[one])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 24, 31, 32, 41])
def test_a_shard_has_the_same_bits_alone_and_beside_others(width: int, dtype: torch.dtype) -> None:
    """Any width, so that every element is once in a vector and once in a kernel's tail."""
    x, dy = 4 * draw(1, 5, 8, 2, width, dtype=dtype), draw(2, 5, 8, width, dtype=dtype)
    y, dx = swiglu(x), swiglu_back(dy, x)
    for shard in range(8):
        own, own_dy = x[:3, shard : shard + 1].clone(), dy[:3, shard : shard + 1].clone()
        assert same_bits(swiglu(own), y[:3, shard : shard + 1])
        assert same_bits(swiglu_back(own_dy, own), dx[:3, shard : shard + 1])


def test_evaluating_in_bfloat16_leaves_other_bits() -> None:
    """The witness: everything is computed in float32 and rounded once."""
    x = 3 * draw(1, 64, 2, 64, dtype=torch.bfloat16)
    gate, up = x.unbind(dim=-2)
    assert not same_bits(gate / (1 + torch.exp(-gate)) * up, swiglu(x))
    rows, weight = draw(2, 64, 64, dtype=torch.bfloat16), draw(3, 64, dtype=torch.bfloat16)
    assert not same_bits(exact_norm(rows, weight), rms_norm(rows, weight, EPSILON)[0])


def test_a_norm_over_another_order_of_the_row_leaves_other_bits() -> None:
    """The witness: mean squares of the same numbers in another order."""
    x = mixed(1, 64, 256)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(2))
    one = torch.ones(256)
    assert not same_bits(rms_norm(x[:, order], one, EPSILON)[1], rms_norm(x, one, EPSILON)[1])


@pytest.mark.parametrize("gate", [-1e30, -1000.0, -90.0, 90.0, 1e30])
def test_extreme_gates_leave_finite_numbers(gate: float) -> None:
    x = torch.tensor([[gate], [2.0]]).view(1, 2, 1)
    assert swiglu(x).item() == pytest.approx(max(2 * gate, 0.0), rel=1e-6, abs=1e-30)
    assert swiglu_back(torch.ones(1, 1), x).isfinite().all()


def test_a_row_of_zeros_has_a_finite_norm() -> None:
    y, reciprocal = rms_norm(torch.zeros(1, 8), torch.ones(8), EPSILON)
    assert not y.any()
    dx, leaves = rms_norm_back(torch.ones(1, 8), torch.zeros(1, 8), torch.ones(8), reciprocal)
    assert dx.isfinite().all()
    assert not leaves.any()
