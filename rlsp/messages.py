"""How many bytes travel for a payload: the one home of message sizes, for collectives and for their plan."""

from __future__ import annotations

CHECKED_BYTES = 1 << 20
"""A message up to this goes behind a header that is compared, where reading one waits for no device."""

SMALLEST_BYTES = 4096
"""What a message with a header is padded to at least."""

HEADER_BYTES = 64

ALIGNMENT_BYTES = 64

BUCKET_BYTES = 64 << 20
"""Weights that are handed over are gathered in buckets of about this size, over all ranks."""

# Gathering everything and adding it locally is one exchange instead of two, but moves n/2 times as much.
# Measured on 2 cores over lines, medians, one | two: 4 ranks of 128 KiB 1.7 | 1.6 ms, of 256 KiB 2.7 | 2.0; 8
# ranks of 64 KiB 4.2 | 4.7, of 128 KiB 4.9 | 4.8. Over gloo one exchange is the faster for twice as long.
# Both give the same bits: it is about time.
ONE_GATHER_BYTES = 1 << 19

# Integers have no order to keep, so above this size the backend's own all-reduce serves: it needs no second
# copy of the tensor. Below, two exchanges are faster (backend | two: gloo, 8 ranks of 1 MiB 30 | 16 ms, of 4
# MiB 41 | 30; 4 ranks of 4 MiB 15 | 18).
OWN_ALL_REDUCE_BYTES = 4 << 20


def aligned(count: int) -> int:
    """Round a count of bytes up to where any dtype, and any vector load, may start."""
    return -(-count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def row_bytes(payload: int) -> int:
    """Count the bytes of one message behind a header."""
    return max(SMALLEST_BYTES, HEADER_BYTES + aligned(payload))


def exchanged(payload: int, ranks: int, *, headers: bool) -> int:
    """Count what a rank receives where each of `ranks` sends every other one a message of `payload` bytes.

    Args:
        payload: Of one message.
        ranks: Of the group; one rank receives nothing.
        headers: Whether messages that are small enough go behind a header (on the CPU).
    """
    return (ranks - 1) * (row_bytes(payload) if headers and payload <= CHECKED_BYTES else payload)


def added_in_place(total: int, ranks: int) -> int:
    """Count what the backend's own all-reduce moves a rank, as a ring has it: 2·(n−1)/n of the tensor."""
    return 2 * (ranks - 1) * total // ranks


def reduced(items: int, item_bytes: int, ranks: int, *, headers: bool) -> int:
    """Count what a rank receives for one reduction that every rank gets whole.

    Up to ONE_GATHER_BYTES over all ranks everything is gathered; else each rank reduces its share, then the
    shares are gathered.
    """
    if ranks * items * item_bytes <= ONE_GATHER_BYTES:
        return exchanged(items * item_bytes, ranks, headers=headers)
    return 2 * exchanged(-(-items // ranks) * item_bytes, ranks, headers=headers)
