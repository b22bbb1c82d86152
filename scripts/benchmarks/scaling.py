"""How the cost of a training step grows with the sequence length and with the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.ranks import Options, Times, alternate, compose, cpu_total, on_ranks, rank_function, slowest
from benchmarks.step import SEQUENCES, advantages_of, batch_of, trainer
from rlsp.board import Place
from rlsp.config import Config
from rlsp.rl.update import Trainer
from rlsp.run import mesh_of

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
CONTEXTS = {1: "cp1_tp1_sp1", 2: "cp2_tp1_sp1", 4: "cp4_tp1_sp1"}
RANKS = {1: "cp1_tp1_sp1", 2: "cp1_tp2_sp2", 4: "cp1_tp4_sp4", 8: "cp2_tp4_sp4"}


@rank_function
def lengths(config: Config, place: Place, options: Options) -> dict[str, Times]:
    """Time updates on one sequence of every length."""
    made = trainer(config, mesh_of(config, place))
    return {
        str(n): alternate({"strict": _update(made, config, 1, n)}, options["repeats"])
        for n in options["lengths"]
    }


@rank_function
def whole(config: Config, place: Place, options: Options) -> Times:
    """Time updates on the batch of the step ratios."""
    made = trainer(config, mesh_of(config, place))
    return alternate({"strict": _update(made, config, SEQUENCES, LENGTHS[0])}, options["repeats"])


def tables(repeats: int) -> list[dict[str, Any]]:
    """Return milliseconds by length and CP, and by ranks, each with the exponent of a power law."""
    made = []
    for cp, layout in CONTEXTS.items():
        config = compose(f"parallel={layout}")
        every: list[Any] = on_ranks(
            config, "benchmarks.scaling:lengths", {"repeats": repeats, "lengths": LENGTHS}
        )
        walls = {n: 1e3 * slowest([rank[str(n)] for rank in every], "strict") for n in LENGTHS}
        made.append(_table(f"ms of a step on one sequence of so many tokens, CP={cp}", walls))
    walls, cpus = {}, {}
    for ranks, layout in RANKS.items():
        every = on_ranks(compose(f"parallel={layout}"), "benchmarks.scaling:whole", {"repeats": repeats})
        walls[ranks], cpus[ranks] = 1e3 * slowest(every, "strict"), 1e3 * cpu_total(every, "strict")
    made.append(_table("ms of a step on the same tokens by ranks", walls))
    made.append(_table("CPU ms of that step, all ranks together", cpus))
    return made


def exponent(found: Mapping[int, float]) -> float:
    """Return p of the least-squares fit value ~ key^p on logarithms."""
    xs, ys = [math.log(key) for key in found], [math.log(value) for value in found.values()]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def _table(title: str, found: Mapping[int, float]) -> dict[str, Any]:
    last = dict(list(found.items())[-2:])
    return {
        "title": title,
        "values": {str(key): value for key, value in found.items()},
        "exponent": exponent(found),
        "last_exponent": exponent(last),
    }


def _update(of: Trainer, config: Config, sequences: int, length: int) -> Callable[[], object]:
    batch, advantages = batch_of(config, sequences, length), advantages_of(sequences)
    return lambda: of.update(batch, advantages)
