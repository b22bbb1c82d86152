"""What a configuration would need and move, on every rank and in every layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from rlsp.config import Config, ParallelConfig, violations
from rlsp.layout import layout_word
from rlsp.report.plan_memory import Memory, memory
from rlsp.report.plan_shapes import Rank, Work
from rlsp.report.plan_traffic import PHASES, Moved, traffic


@dataclass(frozen=True)
class Need:
    """What one rank needs: memory, and the bytes that it receives in one rollout with its updates."""

    rank: int
    memory: Memory
    moved: Moved

    @property
    def received(self) -> int:
        """Add the bytes of all phases."""
        return self.moved.total()

    def by_axis(self, *phases: str) -> Counter[str]:
        """Add the bytes of some phases by mesh axis."""
        found: Counter[str] = Counter()
        for (phase, axis, _), octets in self.moved.items():
            found[axis] += octets * (phase in phases)
        return found

    def plain(self) -> dict[str, Any]:
        """Write it as JSON values."""
        return {
            "rank": self.rank,
            "memory_bytes": {**asdict(self.memory), "held": self.memory.held, "peak": self.memory.peak},
            "received_bytes": [
                {"phase": phase, "axis": axis, "operation": operation, "bytes": octets}
                for (phase, axis, operation), octets in sorted(
                    self.moved.items(), key=lambda item: (PHASES.index(item[0][0]), item[0])
                )
            ],
        }


@dataclass(frozen=True)
class Plan:
    """A configuration's needs, one entry a rank."""

    config: Config
    work: Work
    needs: tuple[Need, ...]

    @property
    def largest(self) -> Need:
        """Return the rank with the highest peak, the first of several."""
        return max(self.needs, key=lambda need: (need.memory.peak, -need.rank))

    @property
    def busiest(self) -> Need:
        """Return the rank that receives most, the first of several."""
        return max(self.needs, key=lambda need: (need.received, -need.rank))

    @property
    def word(self) -> str:
        """Name the training layout as its file would be."""
        at = self.config.parallel
        return layout_word(cp=at.cp, tp=at.tp, sp=at.sp, dp=at.dp)

    def plain(self) -> dict[str, Any]:
        """Write it as JSON values."""
        return {
            "model": self.config.model.name,
            "layout": self.word,
            "rollout": {
                "tp": self.config.rollout_layout.tp,
                "engines": self.config.rollout_layout.engines,
            },
            "device": self.config.device.kind.name,
            "strict": self.config.numerics.routes.strict,
            "config_hash": self.config.config_hash,
            "sequences": len(self.work.prompts),
            "tokens": sum(self.work.lengths),
            "ranks": [need.plain() for need in self.needs],
        }


def plan(config: Config, work: Work) -> Plan:
    """Predict what every rank of a checked configuration needs for one rollout with its updates."""
    known: dict[object, tuple[Memory, Moved]] = {}
    needs = []
    for number in range(config.world_size):
        engine = config.rollout_layout.coords(number)
        # Ranks of one replica and one engine have equal shares; rank 0 alone sends the rewards.
        alike = (config.layout.coords(number).dp, engine and engine.engine, number == 0)
        if alike not in known:
            rank = Rank(config, work, number)
            known[alike] = memory(rank), traffic(rank)
        needs.append(Need(number, *known[alike]))
    return Plan(config, work, tuple(needs))


def layouts(config: Config, ranks: int) -> Iterator[tuple[Config, tuple[str, ...]]]:
    """Yield the configuration in every training layout of `ranks` ranks, and why it would be refused."""
    for tp in _divisors(ranks):
        for cp in _divisors(ranks // tp):
            for sp in sorted({1, tp}):
                parallel = ParallelConfig(cp=cp, tp=tp, sp=sp, dp=ranks // tp // cp)
                at = replace(config, parallel=parallel)
                yield at, tuple(str(violation) for violation in violations(at))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
