"""The tensor file of one rollout: names, dtypes and shapes, and what its values must satisfy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import safetensors.numpy
from safetensors import SafetensorError

from rlsp.report.files import EvidenceError, read_regular

Array = npt.NDArray[np.generic]

FOLDER = "rollouts"
# Entry t of a [N, S] tensor belongs to token t; sequences stand in column 0 and are padded on the right.
SCHEMA: Mapping[str, tuple[type[np.generic], int]] = {
    "tokens": (np.int64, 2),
    "active_mask": (np.bool_, 2),
    "rollout_logprob": (np.float32, 2),
    "train_logprob": (np.float32, 2),
    "rewards": (np.float32, 1),
    "advantages": (np.float32, 1),
    "lengths": (np.int64, 1),
    "rollout_row_digest": (np.int64, 2),
    "train_row_digest": (np.int64, 2),
}
_SHAPES = {1: "[N]", 2: "[N, S]"}
# A side that was never recorded leaves nothing to compare, which is not the same as a damaged file.
COMPARED = frozenset({"rollout_logprob", "train_logprob", "rollout_row_digest", "train_row_digest"})


def rollout_path(run_dir: Path, index: int) -> Path:
    """Return where the tensors of rollout `index` lie."""
    return run_dir / FOLDER / f"{index:05d}.safetensors"


def form_faults(tensors: Mapping[str, Array]) -> list[str]:
    """List every tensor that is missing, unknown, or of the wrong dtype or shape."""
    faults = [f"{name} is missing" for name in SCHEMA if name not in tensors]
    faults += [f"{name} is not a tensor of this file" for name in tensors if name not in SCHEMA]
    shape = tensors["tokens"].shape if "tokens" in tensors and tensors["tokens"].ndim == 2 else None
    for name, (dtype, dims) in SCHEMA.items():
        if name not in tensors:
            continue
        array = tensors[name]
        wanted = shape[:dims] if shape is not None else None
        if array.dtype != dtype or array.ndim != dims or (wanted is not None and array.shape != wanted):
            faults.append(
                f"{name} is {array.dtype} {list(array.shape)}, expected {np.dtype(dtype)} {_SHAPES[dims]}"
                f"{f' with [N, S] = {list(shape)}' if shape is not None else ''}"
            )
    return faults


def value_faults(tensors: Mapping[str, Array]) -> list[str]:
    """List what well-formed tensors say that cannot be: a token active where there is none, a stray value."""
    mask, lengths = tensors["active_mask"].astype(np.bool_), tensors["lengths"].astype(np.int64)
    columns = np.arange(mask.shape[1])
    faults = []
    if ((lengths < 1) | (lengths > mask.shape[1])).any():
        faults.append(f"lengths must lie in 1 to {mask.shape[1]}")
    if (mask & (columns >= lengths[:, None])).any():
        faults.append("active_mask marks a token behind the end of its sequence")
    if mask[:, :1].any():
        faults.append("active_mask marks token 0, which no token precedes")
    drawn = np.count_nonzero(mask, axis=1)[:, None]
    if (mask != ((columns >= lengths[:, None] - drawn) & (columns < lengths[:, None]))).any():
        faults.append("active_mask does not mark the last tokens of a sequence, one beside the other")
    faults += [
        f"{name} is not 0 where inactive"
        for name in sorted(COMPARED)
        if name in tensors and (tensors[name][~mask] != 0).any()
    ]
    faults += [
        f"{name} is not finite"
        for name in ("rewards", "advantages")
        if not np.isfinite(tensors[name].astype(np.float32)).all()
    ]
    return faults


def encode(tensors: Mapping[str, Array]) -> bytes:
    """Encode the tensors of a rollout as a safetensors file.

    Raises:
        EvidenceError: A tensor is missing, unknown, or of the wrong dtype or shape; all of them are named.
    """
    if faults := form_faults(tensors):
        raise EvidenceError("the rollout's tensors are malformed: " + "; ".join(faults))
    return bytes(safetensors.numpy.save({name: np.ascontiguousarray(tensors[name]) for name in SCHEMA}))


def read(path: Path) -> dict[str, Array]:
    """Read the tensors of a rollout as they lie in the file.

    Raises:
        EvidenceError: The file is missing or is no safetensors file.
    """
    try:
        return dict(safetensors.numpy.load(read_regular(path)))
    except OSError as error:
        raise EvidenceError(f"{path.name} cannot be read: {error.strerror or error}") from error
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise EvidenceError(f"{path.name} is damaged: {error}") from error
