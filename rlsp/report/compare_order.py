"""In which order things happen to the tensors of a network: the first difference is the first on that way."""

from __future__ import annotations

import re
from collections.abc import Iterable

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_WITHIN_LAYER = (
    "input_layernorm",
    "self_attention.linear_qkv",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "self_attention.linear_proj",
    "pre_mlp_layernorm",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
_EMBEDDING, _LAYERS, _FINAL_NORM, _HEAD, _ELSEWHERE = range(5)
_ENDS = (("embedding", _EMBEDDING), ("decoder.final_layernorm", _FINAL_NORM), ("output_layer", _HEAD))
_OPTIMIZER_KINDS = ("exp_avg", "exp_avg_sq", "master")

Key = tuple[int, int, int, str]


def forward_order(names: Iterable[str]) -> list[str]:
    """Order tensors as a forward pass meets them; names of no known place come last, by name."""
    return sorted(names, key=_place)


def backward_order(names: Iterable[str]) -> list[str]:
    """Order tensors as a backward pass reaches them, head first; names of no known place come last, by name.

    A fault in the gradient of an activation spoils every gradient below it, so that the first one on this way
    is the one beside the fault.
    """
    forward = forward_order(names)
    known = [name for name in forward if _place(name)[0] != _ELSEWHERE]
    return known[::-1] + forward[len(known) :]


def optimizer_order(names: Iterable[str]) -> list[str]:
    """Order the optimizer's state by tensor in forward order, each first moment, second moment, master."""

    def key(name: str) -> tuple[Key, int, str]:
        kind, _, tensor = name.partition("/")
        rank = _OPTIMIZER_KINDS.index(kind) if kind in _OPTIMIZER_KINDS else len(_OPTIMIZER_KINDS)
        return _place(tensor or name), rank, kind

    return sorted(names, key=key)


def _place(name: str) -> Key:
    if layer := _LAYER.fullmatch(name):
        number, rest = int(layer[1]), layer[2]
        within = next(
            (place for place, part in enumerate(_WITHIN_LAYER) if rest.startswith(part)), len(_WITHIN_LAYER)
        )
        return _LAYERS, number, within, name
    return next((place for start, place in _ENDS if name.startswith(start)), _ELSEWHERE), 0, 0, name
