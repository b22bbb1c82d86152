"""What every injected module is given: the contract, its groups and where to count its calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

from torch import Tensor

from rlsp.groups import Group
from rlsp.numerics.contract import Contract
from rlsp.numerics.products import Products


class Phase(Enum):
    """Which side of the comparison a model computes."""

    TRAIN = "train"
    ROLLOUT = "rollout"


class Operator(Enum):
    """The operators whose routes are declared and counted."""

    ATTENTION = "attention"
    FFN = "ffn"
    LOGP = "logp"


STRICT = "strict"
NATIVE = "native"


class Boundary(Enum):
    """The points of a forward pass, in its order, at which both sides of the comparison can be laid together.

    `s` counts this CP rank's positions in training and the new positions of one call in the rollout, `b` the
    sequences of the call. A *sharded* tensor is [s, b, n]: every row, and the adjacent n of all features that
    this TP rank owns, in the order of virtual shards. A *residual* tensor is [s, b, H]: every feature, and
    under SP the adjacent s/tp rows that this TP rank holds, else all rows (each TP rank has a copy).
    """

    EMBEDDING = "embedding"
    ATTENTION_NORM = "attention norm"
    QKV = "qkv"
    QUERY = "query"
    KEY = "key"
    CORE_ATTENTION = "core attention"
    PROJECTION = "projection"
    MLP_NORM = "mlp norm"
    FC1 = "fc1"
    ACTIVATION = "activation"
    FC2 = "fc2"
    FINAL_NORM = "final norm"
    LOGITS = "logits"
    LOGP = "log-prob"

    @property
    def sharded(self) -> bool:
        """Tell whether the features lie on the ranks of TP; else the tensor is residual."""
        return self in _SHARDED


_SHARDED = frozenset(
    {
        Boundary.QKV,  # each group's queries, key and value side by side
        Boundary.QUERY,  # after norm and rotation, [s, b, heads, D]
        Boundary.KEY,  # likewise, [s, b, groups, D]
        Boundary.CORE_ATTENTION,
        Boundary.FC1,  # each virtual shard's gate and up side by side
        Boundary.ACTIVATION,
        Boundary.LOGITS,  # before the temperature, padded vocabulary included
    }
)


@dataclass(frozen=True)
class Site:
    """Name one boundary of one model: a layer (from 0), or None outside of the layers."""

    boundary: Boundary
    layer: int | None = None


class Recorder(Protocol):
    """Take what passes a boundary."""

    def record(self, site: Site, tensor: Tensor) -> None:
        """Take a tensor, without gradient, of the form that `Boundary` states; LOGP is [s·b], s-major."""


@dataclass
class Tap:
    """Hold the recorder that listens to a model, if one does."""

    recorder: Recorder | None = None


@dataclass(frozen=True)
class Wiring:
    """Hold what a model's modules share.

    Attributes:
        phase: The side that this model computes.
        contract: The numeric contract.
        products: Leaf products with their certified paths.
        tp: The tensor-parallel group of this model.
        cp: The context-parallel group (of one in the rollout).
        sequence_parallel: Whether the residual stream is sharded over `tp` along the sequence.
        routes: The declared route of every operator and phase (`train.attention`); strict where absent.
        calls: Calls counted so far by (operator, route), shared with every copy of this object.
        tap: Who listens at the boundaries, shared likewise.
    """

    phase: Phase
    contract: Contract
    products: Products
    tp: Group
    cp: Group
    sequence_parallel: bool
    routes: Mapping[str, str] = field(default_factory=dict)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter, compare=False)
    tap: Tap = field(default_factory=Tap, compare=False)

    def native(self, operator: Operator) -> bool:
        """Tell whether an operator's declared route on this side is the backend's."""
        return self.routes.get(f"{self.phase.value}.{operator.value}", STRICT) == NATIVE

    def count(self, operator: Operator, route: str = STRICT) -> None:
        """Count one executed call of an operator's route."""
        self.calls[(f"{self.phase.value}.{operator.value}", route)] += 1

    def capture(self, site: Site | None, tensor: Tensor) -> None:
        """Show a tensor to the recorder, if one listens; a module outside of a model has no site."""
        if self.tap.recorder is not None and site is not None:
            self.tap.recorder.record(site, tensor.detach())

    @contextmanager
    def recording(self, recorder: Recorder) -> Iterator[None]:
        """Let `recorder` listen at every boundary of the models that share this wiring."""
        before, self.tap.recorder = self.tap.recorder, recorder
        try:
            yield
        finally:
            self.tap.recorder = before

    def with_products(self, products: Products) -> Wiring:
        """Return a copy that uses other (certified) products and shares the counts."""
        return replace(self, products=products)

    def take_counts(self) -> dict[str, dict[str, int]]:
        """Return the calls by operator and route since the last time, and start anew."""
        out: dict[str, dict[str, int]] = {}
        for (operator, route), calls in sorted(self.calls.items()):
            out.setdefault(operator, {})[route] = calls
        self.calls.clear()
        return out
