"""The hot loops in plain C (`kernels.c`): one pass over memory, the bits of the torch code that defines them.

torch's code stays the definition, and the path of other devices and dtypes. Which kernels run is a switch of
the process, set by `using`; without it, none does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from rlsp import determinism
from rlsp.numerics import compiler

SOURCE = Path(__file__).with_name("kernels.c")
TREE_LEAVES = 64  # as in the source
_LEVELS = 3  # of strides that a kernel follows through a leaf


class Kernel(Enum):
    """What is compiled, each with a definition in torch."""

    ADD_LEAVES = "add_leaves"
    SHARD_HASHES = "shard_hashes"
    ROW_DIGEST = "row_digest"
    TREE_SUM = "tree_sum"
    UNIFORMS = "uniforms"
    RMS_NORM = "rms_norm"
    FEW_ROWS = "few_rows"
    STORE = "store"
    CACHED_ATTENTION = "cached_attention"
    LAYERS = "layers"


@dataclass(frozen=True)
class Kernels:
    """Compiled kernels and which of them may run.

    Attributes:
        library: None where nothing was compiled.
        allowed: Those that run; the others' torch code does.
        origin: What compiled them, or why there are none.
    """

    library: ctypes.CDLL | None
    allowed: frozenset[Kernel]
    origin: str

    def only(self, allowed: frozenset[Kernel]) -> Kernels:
        """Return these kernels, with none but `allowed` to run."""
        return replace(self, allowed=allowed)

    def paths(self) -> dict[str, str]:
        """Say of every kernel whether it runs compiled or in torch."""
        return {kernel.value: "compiled" if kernel in self.allowed else "torch" for kernel in Kernel}


TORCH = Kernels(None, frozenset(), "not asked for")
_running = TORCH


def running() -> Kernels:
    """Return what this process runs now."""
    return _running


@contextmanager
def using(kernels: Kernels) -> Iterator[None]:
    """Run what `kernels` allows, in all threads of this process, until the end of `with`; nests."""
    global _running  # noqa: PLW0603  (a switch of the process, as torch's own are)
    before, _running = _running, kernels
    try:
        yield
    finally:
        _running = before


@cache
def load(folder: Path | None, source: Path = SOURCE) -> Kernels:
    """Compile or find the kernels; one process does so once, and its forks have them.

    Args:
        folder: Where compiled libraries are kept, or None where there is no such place.
        source: The C file.

    Returns:
        All of them allowed, to be tried first; or none, and why.
    """
    if folder is None:
        return replace(TORCH, origin="no folder to keep compiled kernels in")
    try:
        library, origin = compiler.compiled(source.read_text(), folder, determinism.processor())
        return Kernels(_declared(library), frozenset(Kernel), origin)
    except (compiler.CompilerError, AttributeError) as error:
        return replace(TORCH, origin=str(error))


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare what the functions take, for ctypes to check and to widen."""
    pointer, word, shape = ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(ctypes.c_int64)
    for name, takes in {
        "rlsp_add_leaves": [pointer, pointer, shape, shape, ctypes.c_float, pointer, pointer],
        "rlsp_shard_hashes": [pointer, pointer, word, word],
        "rlsp_row_digest": [pointer, pointer, word, word, word, word, word],
        "rlsp_tree_sum": [pointer, pointer, word, word, word],
        "rlsp_uniforms": [pointer, pointer, word, word, word],
        "rlsp_rms_norm": [pointer, pointer, pointer, pointer, word, word, ctypes.c_float],
        "rlsp_few_rows": [pointer, pointer, pointer, shape],
        "rlsp_store": [pointer, pointer, pointer, pointer, pointer, shape, word],
        "rlsp_cached_scores": [
            pointer,
            pointer,
            pointer,
            pointer,
            shape,
            word,
            ctypes.c_float,
            ctypes.c_float,
        ],
        "rlsp_cached_values": [pointer, pointer, pointer, pointer, shape, word],
        "rlsp_layer_scores": [pointer, pointer],
        "rlsp_layer_gates": [pointer, pointer],
        "rlsp_layer_end": [pointer, pointer],
    }.items():
        function = getattr(library, name)
        function.argtypes, function.restype = takes, None
    return library


def library_for(kernel: Kernel, *tensors: Tensor) -> ctypes.CDLL | None:
    """Return the library where it may run a kernel on these tensors: on the CPU, where no gradient is due."""
    if kernel not in _running.allowed or any(x.device.type != "cpu" or not x.numel() for x in tensors):
        return None
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return None
    return _running.library


def add_leaves(total: Tensor, leaves: Tensor, dim: int, unit: float) -> tuple[Tensor, Tensor] | None:
    """Add float32 leaves, rounded half to even to units of 1 / `unit`, to `total`.

    Args:
        total: int64 [...], contiguous; changed in place.
        leaves: As `total`, with one dimension more at `dim`.
        dim: The dimension over which leaves are added.
        unit: A power of 2.

    Returns:
        The largest magnitude, NaN where one is; and int64 [2], nonzero elements and those of them that
        rounded to zero. None, and nothing done, where torch's code has to run.
    """
    library = library_for(Kernel.ADD_LEAVES, total, leaves)
    if library is None or leaves.dtype != torch.float32 or not total.is_contiguous():
        return None
    shape, strides = list(leaves.shape), list(leaves.stride())
    count, step = shape.pop(dim), strides.pop(dim)
    levels = _merged(shape, strides)
    if not leaves.is_contiguous() and (len(levels) > _LEVELS or levels[-1][1] != 1):
        return add_leaves(total, leaves.contiguous(), dim, unit)
    if levels[-1][1] != 1:
        levels.append((1, 1))
    (outer, over), (rows, down), (n, _) = [(1, 0)] * (_LEVELS - len(levels)) + levels
    largest, counts = torch.zeros(()), torch.zeros(2, dtype=torch.int64)
    words = ctypes.c_int64
    library.rlsp_add_leaves(
        total.data_ptr(),
        leaves.data_ptr(),
        (words * 4)(outer, count, rows, n),
        (words * 3)(over, step, down),
        unit,
        largest.data_ptr(),
        counts.data_ptr(),
    )
    return largest, counts


def _merged(shape: list[int], strides: list[int]) -> list[tuple[int, int]]:
    """Merge neighbouring dimensions that one stride runs through: (size, stride) of what is left."""
    levels: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if levels and levels[-1][1] == size * stride:
            levels[-1] = (levels[-1][0] * size, stride)
        else:
            levels.append((size, stride))
    return levels or [(1, 1)]


def shard_hashes(total: Tensor, pattern: Tensor) -> bool:
    """Add the two streams of hashes of every row's bytes to `total` int64 [V, 2], contiguous.

    Args:
        total: Changed in place.
        pattern: Integers [V, n].

    Returns:
        False, and nothing done, where torch's code has to run.
    """
    library = library_for(Kernel.SHARD_HASHES, total, pattern)
    if library is None:
        return False
    held = pattern.contiguous()
    library.rlsp_shard_hashes(
        total.data_ptr(), held.data_ptr(), held.shape[0], held.shape[1] * held.element_size()
    )
    return True


def row_digest(digests: Tensor, pattern: Tensor, first_index: int) -> bool:
    """Add the hashes of every row's words, keyed by the index from `first_index` on, to int64 [T].

    Args:
        digests: Contiguous; changed in place.
        pattern: int16 or int32 [T, n].
        first_index: Index of column 0.

    Returns:
        False, and nothing done, where torch's code has to run.
    """
    library = library_for(Kernel.ROW_DIGEST, digests, pattern)
    if library is None or pattern.dtype not in (torch.int16, torch.int32):
        return False
    held = pattern if pattern.stride(1) == 1 else pattern.contiguous()
    rows, columns = held.shape
    library.rlsp_row_digest(
        digests.data_ptr(),
        held.data_ptr(),
        held.element_size(),
        rows,
        columns,
        held.stride(0),
        first_index,
    )
    return True


def tree_sum(x: Tensor) -> Tensor | None:
    """Sum the leading dimension of float32 [n, ...] by the balanced tree of adjacent pairs.

    Returns:
        [...], contiguous; None where torch's code has to run: without the kernel, dense leaves or few enough
        of them, and where a gradient is due.
    """
    library = library_for(Kernel.TREE_SUM, x)
    if library is None or x.dtype != torch.float32 or not 2 <= x.shape[0] <= TREE_LEAVES:
        return None
    if not x[0].is_contiguous():
        return None
    out = determinism.unmarked(*x.shape[1:], dtype=x.dtype)
    library.rlsp_tree_sum(out.data_ptr(), x.data_ptr(), x.shape[0], out.numel(), x.stride(0))
    return out
