"""Bit equality and digests: what "the same" means here, and how it is proved without gathering anything.

Equality is equality of bit patterns: -0.0 differs from 0.0, and a NaN equals only the same NaN. Digests are
sums, modulo 2^64, of hashes of (position, pattern), so that shards are digested where they live and the
order of the additions cannot matter. They are made to catch faults, not adversaries.
"""

from __future__ import annotations

import hashlib
from typing import Final

import torch
from torch import Tensor

from rlsp.digest import as_int64, digest
from rlsp.numerics import compiled
from rlsp.numerics.hashing import GOLDEN, SECOND, mix64_

__all__ = [
    "bit_pattern",
    "differing",
    "digest",
    "row_digest",
    "same_bits",
    "shard_hashes",
    "ulp_distance",
]

_CHUNK: Final = 1 << 16
"""Words hashed at a time: bounds the memory, and fits a core's cache (2^20 took three times as long)."""

_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ULP_MAX: Final = (1 << 63) - 1


def bit_pattern(x: Tensor) -> Tensor:
    """View a tensor as the integers of its bits.

    Args:
        x: Any shape and strides; floating point, integer or bool.

    Returns:
        A view without gradient: float64 as int64, float32 as int32, bfloat16 and float16 as int16, 8-bit
        floats as int8; integers and bools as they are.

    Raises:
        TypeError: If `x` is complex or quantised.
    """
    x = x.detach()
    if x.is_floating_point():
        return x.view(_INTEGERS[x.element_size()])
    if x.is_complex() or x.is_quantized:
        raise TypeError(f"no bit pattern is defined for {x.dtype}")
    return x


def differing(a: Tensor, b: Tensor) -> Tensor:
    """Mark the elements whose bit patterns differ.

    Args:
        a: Any shape.
        b: Same shape and dtype as `a`.

    Returns:
        bool, same shape.

    Raises:
        ValueError: If shapes or dtypes differ, since broadcasting or promotion would hide the difference.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        sides = f"{a.dtype} {tuple(a.shape)} with {b.dtype} {tuple(b.shape)}"
        raise ValueError(f"cannot compare {sides} bit by bit")
    return bit_pattern(a) != bit_pattern(b)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors have the same shape, dtype and bit patterns."""
    return a.shape == b.shape and a.dtype == b.dtype and not bool(differing(a, b).any())


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """Count the representable numbers between two floating-point tensors, element by element.

    Args:
        a: Floating point, any shape.
        b: Same shape and dtype as `a`.

    Returns:
        int64, same shape. Neighbours are 1 apart, and so are -0.0 and 0.0: without NaN, the distance is 0
        exactly where the bits are equal. 2^63 - 1 where either side is NaN or the distance does not fit.

    Raises:
        TypeError: If `a` is not floating point.
        ValueError: If shapes or dtypes differ.
    """
    if not a.is_floating_point():
        raise TypeError(f"ulps are defined for floating point, not for {a.dtype}")
    differing(a, b)
    first, second = _ordered(a), _ordered(b)
    distance = torch.maximum(first, second) - torch.minimum(first, second)
    return distance.masked_fill((distance < 0) | a.isnan() | b.isnan(), _ULP_MAX)


def _ordered(x: Tensor) -> Tensor:
    """Map floats to int64 such that the order is kept and neighbours differ by 1."""
    pattern = bit_pattern(x)
    smallest = torch.iinfo(pattern.dtype).min
    # A negative float is its magnitude m with the sign bit set; ~m = -m - 1 puts -0.0 just below 0.0.
    return torch.where(pattern < 0, ~(pattern ^ smallest), pattern).to(torch.int64)


def shard_hashes(x: Tensor) -> Tensor:
    """Hash the bits of every virtual shard to 128 bits.

    A shard's bytes are read as little-endian 64-bit words, zero-filled at the end; the hash is a pair of
    sums of `mix64` of (position of the word in the shard, word), with unrelated keys, started from the
    dtype and the shape of a shard. It depends on nothing but the shard: not on how many lie together, nor
    on strides.

    Args:
        x: Shards, shape [V_local, ...], any real dtype. Read in place when contiguous.

    Returns:
        int64, shape [V_local, 2].

    Raises:
        ValueError: If `x` has no leading dimension of shards.
    """
    if x.dim() == 0:
        raise ValueError("shard_hashes needs a leading dimension of virtual shards, [V_local, ...]")
    header = hashlib.sha256(f"{x.dtype}{tuple(x.shape[1:])}".encode()).digest()
    shards = x.shape[0]
    start = [_word(header[:8]), _word(header[8:16])]
    total = torch.tensor([start] * shards, dtype=torch.int64, device=x.device).view(shards, 2)
    if x.numel() == 0:
        return total
    pattern = bit_pattern(x.view(torch.uint8) if x.dtype == torch.bool else x).reshape(shards, -1)
    if compiled.shard_hashes(total, pattern):
        return total
    per_word = 8 // pattern.element_size()
    step = max(_CHUNK // shards, 1)
    for first in range(0, -(-pattern.shape[1] // per_word), step):
        words = _words(pattern[:, first * per_word : (first + step) * per_word], per_word)
        position = torch.arange(first + 1, first + 1 + words.shape[1], device=x.device)
        for stream, multiplier in enumerate((GOLDEN, SECOND)):
            total[:, stream] += mix64_(words ^ (position * multiplier)).sum(-1)
    return total


def _word(octets: bytes) -> int:
    return as_int64(int.from_bytes(octets, "little"))


def _words(pattern: Tensor, per_word: int) -> Tensor:
    """Pack integers [V, n] into fresh int64 words [V, ceil(n / per_word)], zero-filled at the end."""
    missing = -pattern.shape[1] % per_word
    # The copy is what makes the reinterpretation legal: a slice may start in the middle of a word.
    packed = torch.cat((pattern, pattern.new_zeros(pattern.shape[0], missing)), dim=1)
    return packed.view(torch.int64)


def row_digest(logits: Tensor, first_index: int, valid: int) -> Tensor:
    """Hash the bits of each token's logits, keyed by the vocabulary index.

    Adding the digests of a vocabulary's shards (int64, wrapping) gives the digest of the whole.

    Args:
        logits: One or more adjacent shards, shape [T, n], floating point, columns in order of the vocabulary.
        first_index: Vocabulary index of column 0.
        valid: Size of the true vocabulary; columns whose index is not below it are padding and do not count.

    Returns:
        int64, shape [T].
    """
    tokens, columns = logits.shape
    width = min(max(valid - first_index, 0), columns)
    result = torch.zeros(tokens, dtype=torch.int64, device=logits.device)
    if width == 0:
        return result
    pattern = bit_pattern(logits)[:, :width]
    if compiled.row_digest(result, pattern, first_index):
        return result
    key = mix64_(torch.arange(first_index + 1, first_index + 1 + width, device=logits.device) * GOLDEN)
    step = max(_CHUNK // width, 1)
    for first in range(0, tokens, step):
        words = pattern[first : first + step].to(torch.int64)
        result[first : first + step] = mix64_(words ^ key).sum(-1)
    return result
