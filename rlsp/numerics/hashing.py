"""Integer hashing: the one source of random bits and of digests, the same on every device and in every batch.

Arithmetic is modulo 2^64 on int64 tensors, whose products and sums wrap; nothing here rounds.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from rlsp.digest import as_int64

GOLDEN: Final = as_int64(0x9E3779B97F4A7C15)
"""2^64 / golden ratio, odd: multiples of it are spread evenly, and distinct for distinct integers."""

SECOND: Final = as_int64(0xD1B54A32D192ED03)
"""An odd multiplier unrelated to GOLDEN, for a second stream of keys."""

_FIRST_FACTOR: Final = as_int64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR: Final = as_int64(0x94D049BB133111EB)


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
            state = mix64_(torch.tensor(as_int64(word) ^ state, dtype=torch.int64) + GOLDEN)
    assert isinstance(state, Tensor)
    return state
