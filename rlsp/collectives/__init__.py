"""Moves and sums across the ranks of a group, with their gradients.

Moves are exact for every dtype. Sums of floats are rounded in one order, the balanced binary tree over the
group's indices (`numerics.tree`), whatever the message size, backend or dimension. Results never alias inputs
and inputs are never modified. Every call is numbered and signed (`groups.Ledger`); ranks that disagree are
told so on every rank.
"""

from __future__ import annotations

from rlsp.collectives.autograd import all_reduce_copy, copy_ar, gather_rs, reduce_scatter_g, slice_gather
from rlsp.collectives.moves import all_to_all, broadcast, gather, gather_many, scatter_slice
from rlsp.collectives.sums import (
    all_reduce,
    backend_all_reduce,
    max_integers,
    reduce_scatter,
    sum_integers,
)
from rlsp.collectives.wire import check_agreement
from rlsp.groups import CollectiveError

__all__ = [
    "CollectiveError",
    "all_reduce",
    "all_reduce_copy",
    "all_to_all",
    "backend_all_reduce",
    "broadcast",
    "check_agreement",
    "copy_ar",
    "gather",
    "gather_many",
    "gather_rs",
    "max_integers",
    "reduce_scatter",
    "reduce_scatter_g",
    "scatter_slice",
    "slice_gather",
    "sum_integers",
]
