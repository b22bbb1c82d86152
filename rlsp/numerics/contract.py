"""The numeric contract: everything that fixes a bit, in one frozen object."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

ELEMENTWISE = (
    "silu: x/(1+exp(-x)) in float32",
    "softmax weights: where(mask, exp(s-m), 0) in float32",
    "softmax gradients: attention exp(s-m)/S, vocabulary exp((s-m)-log S), in float32",
    "gumbel: -log(-log(u)), u=(k+0.5)*2^-24, in float32",
    "transcendentals: exp log rsqrt sin cos in float32 only",
)


def contract_sha256(fields: Mapping[str, object]) -> str:
    """Hash a contract's fields, as they are or as a manifest lists them; 64 hex characters."""
    return hashlib.sha256(json.dumps(dict(fields), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Contract:
    """Fix widths, block sizes, rounding points and kernel definitions of every sum.

    Two runs are comparable bit for bit only where `sha256` is equal. Nothing here depends on the layout.

    Attributes:
        virtual_tp: Virtual width V: every axis that TP shards is cut into V equal virtual shards of the
            logical tensor.
        token_block: Consecutive tokens of one sequence in one leaf of a weight gradient.
        q_block: Queries in one attention block.
        k_block: Keys in one attention block; a multiple of q_block's grid (both start at the first token).
        row_tile: Rows of a leaf product; calls have whole tiles, zero-padded.
        grad_lsb: Exact sums count in units of 2^-grad_lsb.
        threads: Intra-op threads of every rank.
        dtype: Storage dtype of weights and activations: `bfloat16` or `float32`.
        leaf_operand: dtype to which the operands of a leaf product are widened (exact) before the product.
        leaf_output: dtype that a leaf product leaves; sums over leaves are taken in it, then rounded once to
            `dtype`.
        optimizer: The AdamW variant: written out elementwise in float32.
        padded_vocab: Logical vocabulary after padding; depends on virtual_tp only.
    """

    virtual_tp: int
    token_block: int
    q_block: int
    k_block: int
    row_tile: int
    grad_lsb: int
    threads: int
    dtype: str
    padded_vocab: int
    leaf_operand: str = "float32"
    leaf_output: str = "float32"
    optimizer: str = "adamw: elementwise float32, bias corrections in float64"
    reductions: str = "rows over a contiguous last dimension, at most 32768 elements, then the balanced tree"
    norm: str = "squares in float64, rows of 4096, balanced tree in (name, virtual shard, row) order"
    row_tree: str = "balanced binary tree over V in float32, one rounding to dtype"
    token_sum: str = (
        "int64, unit 2^-grad_lsb, half to even from float64, divided by the token count once in float64"
    )
    attention: str = (
        "online softmax over key blocks in position order, float32; dK and dV exact over query blocks; "
        "q and k rounded to dtype once, after norm and rotation; dQ and dK reach the norm in float32"
    )
    sampling: str = (
        "gumbel maximum, lowest index on ties, "
        "key (seed, rollout, prompt, sample, position, vocabulary index)"
    )
    elementwise: tuple[str, ...] = field(default=ELEMENTWISE)
    version: int = 1

    @property
    def sha256(self) -> str:
        """Return the contract's SHA-256, 64 hex characters, over its canonical JSON."""
        return contract_sha256(asdict(self))

    @property
    def block(self) -> int:
        """Return the grid to which sequences are cut: a multiple of every block size."""
        return math.lcm(self.token_block, self.q_block, self.k_block)
