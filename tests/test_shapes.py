"""Shapes in signatures are checked while tests run."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import TypeCheckError

from rlsp.rl.sampling import gumbel


def test_a_wrong_dtype_or_shape_is_an_error_at_the_call() -> None:
    assert gumbel(torch.arange(3), 0, 4).shape == (3, 4)
    with pytest.raises(TypeCheckError):
        gumbel(torch.zeros(3), 0, 4)
    with pytest.raises(TypeCheckError):
        gumbel(torch.zeros(3, 1, dtype=torch.int64), 0, 4)
