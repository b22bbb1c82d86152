"""Weights in transformers' names, into a model's virtual shards and out of them."""

from __future__ import annotations

from rlsp.model.hf.export import EXPORT_NAME, write_folder
from rlsp.model.hf.sources import load_path
from rlsp.model.hf.weights import (
    WeightMismatchError,
    hugging_face_weights,
    load_hugging_face,
    load_weights,
    logical_weights,
    zero_padding,
)

__all__ = [
    "EXPORT_NAME",
    "WeightMismatchError",
    "hugging_face_weights",
    "load_hugging_face",
    "load_path",
    "load_weights",
    "logical_weights",
    "write_folder",
    "zero_padding",
]
