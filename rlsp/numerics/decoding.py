"""Compiled kernels for the few rows that decoding calls with: norms, products, attention, random numbers.

As in `compiled`, torch's code is the definition, and None or False says that it has to run.
"""

from __future__ import annotations

import ctypes
from functools import partial

import torch
from torch import Tensor

from rlsp import determinism
from rlsp.numerics.compiled import Kernel, library_for

KEYS, QUERIES = 32, 31  # as in the source
LONGEST_NORM = 1 << 13
HEADS = (16, 32, 64, 80, 96, 128, 256)
"""Sizes of a head that cached attention is tried with, and runs for; the source has room for the last."""

_room = partial(determinism.unmarked, dtype=torch.float32)


def uniforms(keys: Tensor, first_index: int, count: int) -> Tensor | None:
    """Return float32 [B, count] in (0, 1) for int64 keys [B] and columns from `first_index` on.

    None where torch's code has to run.
    """
    library = library_for(Kernel.UNIFORMS, keys)
    if library is None:
        return None
    held, out = keys.contiguous(), _room(keys.numel(), count)
    library.rlsp_uniforms(out.data_ptr(), held.data_ptr(), held.numel(), count, first_index)
    return out


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor] | None:
    """Normalise rows; None where torch's code has to run.

    Args:
        x: float32 [..., n], contiguous.
        weight: float32 [n], contiguous.
        epsilon: Added to the mean square.

    Returns:
        float32 [..., n], and the reciprocal root mean squares, float32 [..., 1].
    """
    library = library_for(Kernel.RMS_NORM, x, weight)
    if library is None or x.shape[-1] > LONGEST_NORM or not x.is_contiguous():
        return None
    out, reciprocals = _room(*x.shape), _room(*x.shape[:-1], 1)
    library.rlsp_rms_norm(
        out.data_ptr(),
        reciprocals.data_ptr(),
        x.data_ptr(),
        weight.data_ptr(),
        reciprocals.numel(),
        x.shape[-1],
        epsilon,
    )
    return out, reciprocals


def few_rows(x: Tensor, w: Tensor) -> Tensor | None:
    """Multiply a few rows by every shard's matrix.

    Args:
        x: Floating point [T, V·K]; shard v takes columns v·K to (v+1)·K.
        w: float32 [V, K, N], contiguous.

    Returns:
        float32 [V, T, N]; None where torch's code has to run.
    """
    library = library_for(Kernel.FEW_ROWS, x, w)
    if library is None or w.dtype != torch.float32:
        return None
    rows, (v, k, n) = x.to(torch.float32).contiguous(), w.shape
    out = _room(v, rows.shape[0], n)
    shape = (ctypes.c_int64 * 4)(v, rows.shape[0], k, n)
    library.rlsp_few_rows(out.data_ptr(), rows.data_ptr(), w.data_ptr(), shape)
    return out


def store(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> bool:
    """Write the keys and values of new tokens into a block cache.

    Args:
        keys: float32 [b, G, n_k, D, block], contiguous; changed in place.
        values: float32 [b, G, n_k, block, D], likewise.
        key: Floating point [n, b, G, D].
        value: Likewise.
        positions: int64 [n, b], inside the cache.

    Returns:
        False, and nothing done, where torch's code has to run.
    """
    library = library_for(Kernel.STORE, keys, values, key, value)
    if library is None or values.shape[3] != KEYS:
        return False
    if any(x.dtype != torch.float32 or not x.is_contiguous() for x in (keys, values)):
        return False
    new = [x.to(torch.float32).contiguous() for x in (key, value)]
    places = positions.contiguous()
    library.rlsp_store(
        keys.data_ptr(),
        values.data_ptr(),
        new[0].data_ptr(),
        new[1].data_ptr(),
        places.data_ptr(),
        (ctypes.c_int64 * 4)(*key.shape),
        values.shape[2],
    )
    return True


def cached_attention(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float, masked: float
) -> Tensor | None:
    """Attend a few queries to a block cache, around torch's own exp.

    Args:
        q: float32 [B, R, D].
        k: float32 [B, n_k, D, block]; heads may lie apart.
        v: float32 [B, n_k, block, D], likewise.
        positions: int64 [B, R].
        scale: Factor on the scores.
        masked: The score of a key that is not seen.

    Returns:
        float32 [B, R, D]; None where torch's code has to run: without the kernel, for other blocks, heads or
        dtypes, and for a whole tile of queries.
    """
    library = library_for(Kernel.CACHED_ATTENTION, q, k, v)
    b, r, d = q.shape
    if library is None or v.shape[2] != KEYS or d not in HEADS or r > QUERIES:
        return None
    if any(x.dtype != torch.float32 or not x[0].is_contiguous() for x in (k, v)):
        return None
    rows, seen = q.contiguous(), positions.contiguous()
    blocks = k.shape[1]
    shape = (ctypes.c_int64 * 4)(b, r, blocks, d)
    weights = _room(b, r, blocks, KEYS + 1)
    library.rlsp_cached_scores(
        weights.data_ptr(),
        rows.data_ptr(),
        k.data_ptr(),
        seen.data_ptr(),
        shape,
        k.stride(0),
        scale,
        masked,
    )
    weights.exp_()
    out = _room(b, r, d)
    library.rlsp_cached_values(
        out.data_ptr(), weights.data_ptr(), v.data_ptr(), seen.data_ptr(), shape, v.stride(0)
    )
    return out
