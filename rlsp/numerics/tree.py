"""The one order in which floating-point addends of several shards are summed."""

from __future__ import annotations

import torch
from torch import Tensor

from rlsp.numerics import compiled


def tree_sum(x: Tensor) -> Tensor:
    """Sum the leading dimension by a balanced binary tree of adjacent pairs.

    The order is ((0+1)+(2+3))+((4+5)+(6+7)) …; an aligned power-of-two run of leaves is a subtree, so that a
    rank which holds such a run sums it alone and the ranks' sums continue the same tree. An odd leaf at the
    end of a level moves up unchanged.

    Args:
        x: Addends, shape [n, ...] with n >= 1, floating point. Sums are rounded in this dtype.

    Returns:
        The sum, shape [...], same dtype.
    """
    if (done := compiled.tree_sum(x)) is not None:
        return done
    while x.shape[0] > 1:
        pairs = x.shape[0] // 2
        summed = x[0 : 2 * pairs : 2] + x[1 : 2 * pairs : 2]
        x = summed if x.shape[0] == 2 * pairs else torch.cat((summed, x[-1:]))
    return x[0]
