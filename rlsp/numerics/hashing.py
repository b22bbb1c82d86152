"""Integer hashing: the one source of random bits and of digests, the same on every device and in every batch.

Arithmetic is modulo 2^64 on int64 tensors, whose products and sums wrap; nothing here rounds.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rlsp.digest import as_int64
from rlsp.numerics import decoding

GOLDEN: Final = as_int64(0x9E3779B97F4A7C15)
"""2^64 / golden ratio, odd: multiples of it are spread evenly, and distinct for distinct integers."""

SECOND: Final = as_int64(0xD1B54A32D192ED03)
"""An odd multiplier unrelated to GOLDEN, for a second stream of keys."""

_FIRST_FACTOR: Final = as_int64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR: Final = as_int64(0x94D049BB133111EB)
_ALL: Final = (1 << 64) - 1
_MANTISSA_BITS: Final = 24


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift int64 words right by `bits` in 1 … 63, filling with zeros (torch's own shift copies the sign)."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def mix64_(x: Tensor) -> Tensor:
    """Apply `mix64` to int64 words in place, and return them."""
    x.bitwise_xor_(shift_right(x, 30)).mul_(_FIRST_FACTOR)
    x.bitwise_xor_(shift_right(x, 27)).mul_(_SECOND_FACTOR)
    return x.bitwise_xor_(shift_right(x, 31))


def mix64(x: Tensor) -> Tensor:
    """Scramble 64-bit words by a bijection in which every bit of the input moves about half of the output's.

    Args:
        x: Words, int64, any shape.

    Returns:
        int64, same shape. The finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014; variant 13 of
        Stafford).
    """
    return mix64_(x.clone())


def hash_words(*words: Tensor | int) -> Tensor:
    """Hash a tuple of 64-bit words; order and number of the words matter.

    Args:
        words: int64 tensors of shapes that broadcast, or integers of 64 bits (signed or unsigned).

    Returns:
        int64 of the broadcast shape; a scalar tensor if every word is an integer.

    Raises:
        TypeError: If a tensor is not int64 (a float key would round).
        ValueError: If an integer does not fit in 64 bits, or there is no word.
    """
    if not words:
        raise ValueError("hash_words needs at least one word")
    state: Tensor | int = len(words)
    for word in words:
        if isinstance(word, Tensor):
            if word.dtype != torch.int64:
                raise TypeError(f"hash_words takes int64 tensors, not {word.dtype}")
            state = mix64_((word ^ state) + GOLDEN)
        elif isinstance(state, Tensor):
            state = mix64_((state ^ as_int64(word)) + GOLDEN)
        else:
            state = _mix64_integer((as_int64(word) ^ state) + GOLDEN)
    return state if isinstance(state, Tensor) else torch.tensor(state, dtype=torch.int64)


def _mix64_integer(word: int) -> int:
    """Apply `mix64` to a Python integer, modulo 2^64; signed."""
    word &= _ALL
    word = (word ^ word >> 30) * (_FIRST_FACTOR & _ALL) & _ALL
    word = (word ^ word >> 27) * (_SECOND_FACTOR & _ALL) & _ALL
    return as_int64(word ^ word >> 31)


def uniform(keys: Tensor, first_index: int, count: int) -> Tensor:
    """Return odd multiples of 2^-24, exact in float32 and strictly inside (0, 1).

    Args:
        keys: int64 [B].
        first_index: Index of the first column.
        count: Columns.

    Returns:
        float32 [B, count]; element [b, i] is a function of keys[b] and first_index + i alone.
    """
    if (done := decoding.uniforms(keys, first_index, count)) is not None:
        return done
    columns = torch.arange(first_index + 1, first_index + 1 + count, device=keys.device) * GOLDEN
    words = mix64_(keys[:, None] ^ mix64_(columns))
    odd = shift_right(words, 64 - _MANTISSA_BITS).bitwise_or_(1)
    return odd.to(torch.float32) * 2.0**-_MANTISSA_BITS
