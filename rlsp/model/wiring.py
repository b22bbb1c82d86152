"""What every injected module is given: the contract, its groups and where to count its calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

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
    """

    phase: Phase
    contract: Contract
    products: Products
    tp: Group
    cp: Group
    sequence_parallel: bool
    routes: Mapping[str, str] = field(default_factory=dict)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter, compare=False)

    def native(self, operator: Operator) -> bool:
        """Tell whether an operator's declared route on this side is the backend's."""
        return self.routes.get(f"{self.phase.value}.{operator.value}", STRICT) == NATIVE

    def count(self, operator: Operator, route: str = STRICT) -> None:
        """Count one executed call of an operator's route."""
        self.calls[(f"{self.phase.value}.{operator.value}", route)] += 1

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
