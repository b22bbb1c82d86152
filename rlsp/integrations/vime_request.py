"""vime's request to a log-prob provider, read structurally: all violations at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlsp.groups import Group

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Partition:
    """Columns `start` to `start + size` of the padded vocabulary, of which the first `real` are words."""

    start: int
    size: int
    real: int
    padded: int


@dataclass(frozen=True)
class Asked:
    """A well-formed request.

    Attributes:
        targets: int64 [T].
        logits: [T, V_local·n], already divided by the temperature; None where `hidden` is to be projected.
        hidden: [T or T/tp, H]; its logits are divided by `temperature`.
        weight: [V_local·n, H].
        partition: This rank's columns.
        temperature: One divisor, or float32 [T, 1, 1].
        entropy: Whether the entropy is wanted.
        entropy_gradient: Whether it is to be differentiable.
        token_layout: Which of the tokens these are: nothing here depends on it.
    """

    targets: Tensor
    logits: Tensor | None
    hidden: Tensor | None
    weight: Tensor | None
    partition: Partition
    temperature: float | Tensor
    entropy: bool
    entropy_gradient: bool
    token_layout: tuple[int, int, str]

    @property
    def source(self) -> Tensor:
        """Return what the log-probabilities are made from."""
        source = self.logits if self.hidden is None else self.hidden
        assert source is not None
        return source

    @property
    def sharded_sequence(self) -> bool:
        """Tell whether `hidden` has this rank's rows only."""
        return self.hidden is not None and self.hidden.shape[0] != self.targets.shape[0]

    def facts(self) -> dict[str, object]:
        """Return what the ranks of one tensor-parallel group must say alike."""
        temperature = self.temperature
        same = temperature if isinstance(temperature, float) else _octets(temperature)
        return {
            "tokens": self.targets.shape[0],
            "target_ids": _octets(self.targets),
            "source": "logits" if self.hidden is None else "hidden",
            "dtype": str(self.source.dtype),
            "rows of hidden": self.source.shape[0],
            "hidden size": 0 if self.hidden is None else self.hidden.shape[1],
            "real_vocab_size": self.partition.real,
            "padded_vocab_size": self.partition.padded,
            "temperature": same,
            "with_entropy": self.entropy,
            "with_entropy_grad": self.entropy_gradient,
            "token_layout": self.token_layout,
            "autograd": torch.is_grad_enabled() and self.source.requires_grad,
        }


def read(request: Any, tp: Group, virtual_tp: int) -> tuple[Asked | None, list[str]]:
    """Read a request; return it, or None and every violation in words.

    Args:
        request: vime's object, or anything with its attributes.
        tp: The tensor-parallel ranks.
        virtual_tp: Virtual shards of the vocabulary.
    """
    context = getattr(request, "context", None)
    targets = getattr(request, "target_ids", None)
    bad = _unsupported(request, context)
    if (
        not isinstance(targets, Tensor)
        or targets.dim() != 1
        or targets.dtype not in (torch.int64, torch.int32)
    ):
        return None, [*bad, "target_ids must be int64 or int32 [T]"]
    targets = targets.to(torch.int64)
    matrices, found = _matrices(request, context, targets, tp)
    bad += found
    partition, found = _partition(request, context, matrices, tp, virtual_tp)
    bad += found
    if (
        partition is not None
        and targets.numel()
        and not 0 <= int(targets.min()) <= int(targets.max()) < partition.real
    ):
        bad.append(f"target_ids must lie in 0 … {partition.real - 1}, the true vocabulary")
    temperature, found = _temperature(getattr(request, "temperature", None), targets)
    bad += found
    layout, found = _token_layout(getattr(request, "token_layout", None))
    bad += found
    if bad or partition is None:
        return None, bad
    entropy = bool(getattr(request, "with_entropy", False))
    return Asked(
        targets,
        *matrices,
        partition=partition,
        temperature=1.0 if matrices[0] is not None else temperature,
        entropy=entropy,
        entropy_gradient=entropy and bool(getattr(request, "with_entropy_grad", False)),
        token_layout=layout,
    ), []


def _unsupported(request: Any, context: Any) -> list[str]:
    bad = []
    if getattr(request, "log_prob_keep_mask", None) is not None:
        bad.append(
            "log_prob_keep_mask: top-p replay is not supported, log-probs are over the whole vocabulary"
        )
    projection = getattr(context, "projection", None)
    if getattr(projection, "bias", None) is not None:
        bad.append("projection.bias: a head with a bias is not supported")
    if context is not None and torch.get_float32_matmul_precision() != "highest":
        bad.append(
            "torch.get_float32_matmul_precision() is "
            f"{torch.get_float32_matmul_precision()!r}: leaf products need 'highest'"
        )
    return bad


Matrices = tuple[Tensor | None, Tensor | None, Tensor | None]


def _matrices(request: Any, context: Any, targets: Tensor, tp: Group) -> tuple[Matrices, list[str]]:
    """Return logits, or hidden and weight; logits that a context brings too are not read."""
    tokens = targets.shape[0]
    if context is None:
        logits = getattr(request, "logits", None)
        bad = _matrix("logits", logits)
        if not bad and isinstance(logits, Tensor) and logits.shape[0] != tokens:
            bad.append(f"logits have {logits.shape[0]} rows, target_ids {tokens}")
        return (logits, None, None), bad
    hidden, weight = (
        getattr(context, "hidden", None),
        getattr(getattr(context, "projection", None), "weight", None),
    )
    bad = _matrix("context.hidden", hidden) + _matrix("context.projection.weight", weight)
    if bad or not isinstance(hidden, Tensor) or not isinstance(weight, Tensor):
        return (None, None, None), bad
    if (hidden.dtype, hidden.device, hidden.shape[1]) != (weight.dtype, weight.device, weight.shape[1]):
        bad.append(
            f"context.hidden ({hidden.dtype}, {hidden.device}, width {hidden.shape[1]}) does not fit "
            f"projection.weight ({weight.dtype}, {weight.device}, width {weight.shape[1]})"
        )
    if hidden.shape[0] not in (tokens, tokens / tp.size):
        bad.append(
            f"context.hidden has {hidden.shape[0]} rows: {tokens} tokens need {tokens}, or under sequence "
            f"parallelism {tokens}/{tp.size}"
        )
    return (None, hidden, weight), bad


def _matrix(name: str, x: object) -> list[str]:
    if not isinstance(x, Tensor) or x.dim() != 2:
        return [f"{name} must be a tensor of two dimensions"]
    return [] if x.dtype in DTYPES else [f"{name} is {x.dtype}; legal: float32, bfloat16"]


def _partition(
    request: Any, context: Any, matrices: Matrices, tp: Group, virtual_tp: int
) -> tuple[Partition | None, list[str]]:
    """Return this rank's columns: the context's, or rank-contiguous ones of the metadata's sizes."""
    metadata = getattr(request, "metadata", None) or {}
    if not isinstance(metadata, Mapping):
        return None, ["metadata must be a mapping"]
    given = getattr(context, "vocab_partition", None)
    logits, _, weight = matrices
    width = logits.shape[1] if logits is not None and logits.dim() == 2 else 0
    width = width if weight is None else weight.shape[0]
    found = {
        "local_start": getattr(given, "local_start", tp.index * width),
        "local_size": getattr(given, "local_size", width),
        "real_size": getattr(given, "real_size", metadata.get("real_vocab_size")),
        "padded_size": getattr(given, "padded_size", metadata.get("padded_vocab_size")),
    }
    bad = [
        f"{name} must be an integer, not {value!r}" for name, value in found.items() if type(value) is not int
    ]
    bad += _contradictions(metadata, found, tp)
    if bad:
        return None, bad
    it = Partition(*(int(value) for value in found.values() if value is not None))
    if it.size != width:
        bad.append(f"local_size is {it.size}, but this rank has {width} columns")
    if it.size * tp.size != it.padded or it.start != tp.index * it.size:
        bad.append(
            f"columns {it.start} … {it.start + it.size - 1} on rank {tp.index} of {tp.size} leave a gap or "
            "overlap: "
            f"the ranks must cover the padded vocabulary of {it.padded} in order, "
            f"{it.padded / tp.size:g} columns each"
        )
    if not 0 < it.real <= it.padded:
        bad.append(f"real_size must be in 1 … padded_size {it.padded}, not {it.real}")
    if virtual_tp % tp.size or it.padded % virtual_tp:
        bad.append(
            f"the tensor-parallel size {tp.size} must divide virtual_tp {virtual_tp}, and that the padded "
            f"vocabulary of {it.padded}"
        )
    return (None if bad else it), bad


def _contradictions(metadata: Mapping[str, object], found: Mapping[str, object], tp: Group) -> list[str]:
    known = {
        "tp_rank": tp.index,
        "tp_world_size": tp.size,
        "real_vocab_size": found["real_size"],
        "padded_vocab_size": found["padded_size"],
    }
    return [
        f"metadata[{name!r}] is {metadata[name]!r}, but the request's groups and shapes say {value!r}"
        for name, value in known.items()
        if metadata.get(name) is not None and metadata[name] != value
    ]


def _temperature(value: object, targets: Tensor) -> tuple[float | Tensor, list[str]]:
    """Return one number where all tokens have it: it divides as rlsp's own does; else float32 [T, 1, 1]."""
    if isinstance(value, Tensor):
        if value.numel() not in (1, targets.numel()):
            return 1.0, [f"temperature has {value.numel()} values for {targets.numel()} tokens"]
        distinct = value.detach().to(targets.device, torch.float32).flatten()
        if distinct.numel() and not bool((distinct.isfinite() & (distinct > 0)).all()):
            return 1.0, ["temperature must be positive and finite"]
        if distinct.numel() and bool((distinct != distinct[0]).any()):
            return distinct.view(-1, 1, 1), []
        value = float(distinct[0]) if distinct.numel() else 1.0
    number = 1.0 if value is None else value
    if not isinstance(number, int | float) or not math.isfinite(number) or number <= 0:
        return 1.0, ["temperature must be positive and finite"]
    return float(number), []


def _token_layout(layout: Any) -> tuple[tuple[int, int, str], list[str]]:
    size, rank = getattr(layout, "world_size", None), getattr(layout, "rank", None)
    kind = getattr(layout, "layout", None)
    legal = {"single"} if size == 1 else {"zigzag", "allgather"}
    if type(size) is not int or type(rank) is not int or not 0 <= rank < size or kind not in legal:
        return (1, 0, "single"), [
            f"token_layout {size!r}, {rank!r}, {kind!r} must be (1, 0, single), or a rank of several with "
            "zigzag or allgather"
        ]
    return (size, rank, str(kind)), []


def _octets(x: Tensor) -> bytes:
    return x.detach().cpu().contiguous().numpy().tobytes()
