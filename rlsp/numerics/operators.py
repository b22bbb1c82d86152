"""The elementwise operators and row reductions that a model uses, and whether their bits ignore the call.

Kernels take full vectors, then a tail; threads take chunks. An operator is safe where the tail and the ends
of the chunks leave the same bits as the vectors do (NUMERICS section 1.3).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlsp.numerics.operands import agree, noise

LENGTHS = range(1, 68)
OFFSETS = 32
ROOM = 128  # elements for each span, so that no two see the same numbers
PIECE = 4096  # a multiple of every vector, and short enough for one thread
LONG = 16 * PIECE + 37  # above what one thread takes, with a tail
ROWS = 32
LONGEST_ROW = 1 << 15  # NUMERICS rule 3
NORM_ROW = 4096  # NUMERICS rule 4
SCALES = (4.0, 80.0, 0.01, 2.0**-130)  # of every fourth element: the last is denormal

OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "log": lambda x: torch.log(x.abs() + 0.5),
    "sqrt": lambda x: torch.sqrt(x.abs()),
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 0.5),
    "sin": torch.sin,
    "cos": torch.cos,
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "reciprocal": lambda x: 1 / (x.abs() + 0.5),
    "bfloat16": lambda x: x.to(torch.bfloat16).float(),
    "fixed": lambda x: torch.round(x.to(torch.float64) * 2.0**40),
}

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(dim=-1),
    "float64 sum": lambda x: x.double().sum(dim=-1),
    "maximum": lambda x: x.amax(dim=-1),
}


def unsafe_operators(device: torch.device) -> list[str]:
    """Return what was found of operators whose bits depend on length, offset or stride, in words."""
    whole = -(-LONG // 64) * 64
    source = noise(40, (whole,), device) * torch.tensor(SCALES, device=device).repeat(whole // len(SCALES))
    spans = _spans()
    found = []
    for name, operator in OPERATORS.items():
        reference = torch.cat([operator(piece) for piece in source.split(PIECE)])
        short = torch.cat([operator(source[span]) for span in spans])
        if not agree(short, torch.cat([reference[span] for span in spans])):
            found.append(f"{name} depends on the length or the offset of its operand")
        if not agree(operator(source[:LONG]), reference[:LONG]):
            found.append(f"{name} depends on where threads cut its operand")
        table = source[:PIECE].view(64, 64)[:, :37]
        if not agree(operator(table), reference[:PIECE].view(64, 64)[:, :37]):
            found.append(f"{name} depends on the strides of its operand")
    return found


def unsafe_reductions(widths: set[int], device: torch.device) -> list[str]:
    """Return what was found of row reductions whose bits depend on the number of rows, in words.

    Args:
        widths: Lengths of the rows that a run reduces in one call.
        device: Where the run computes.
    """
    found = []
    for width in sorted(widths):
        x = noise(42, (ROWS, width), device)
        for name, reduce in REDUCTIONS.items():
            whole = reduce(x)
            rows = [reduce(x[i : i + 1].clone()) for i in (0, 1, ROWS - 1)]
            if not agree(torch.cat(rows), whole[[0, 1, ROWS - 1]]):
                found.append(f"the {name} of a row of {width} depends on the number of rows")
    return found


def _spans() -> list[slice]:
    """Return pieces of every length; each has four offsets, and all lengths together have every offset."""
    kinds = [(length, (5 * length + 8 * i) % OFFSETS) for length in LENGTHS for i in range(4)]
    return [slice(ROOM * i + offset, ROOM * i + offset + length) for i, (length, offset) in enumerate(kinds)]
