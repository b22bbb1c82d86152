"""rlsp's reductions over gloo against gloo's own, side by side in the same ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.ranks import Options, Times, alternate, compose, on_ranks, rank_function, slowest
from rlsp import collectives
from rlsp.board import Place
from rlsp.config import Config
from rlsp.numerics.operands import noise
from rlsp.run import mesh_of

SIZES = tuple(1 << bits for bits in range(10, 23, 2))  # floats of one message
RANKS = {4: "parallel=cp1_tp4_sp4", 8: "parallel=cp2_tp4_sp4"}
Sides = dict[str, Callable[[], object]]
OPERATIONS = ("reduce_scatter", "all_reduce")


@rank_function
def compare(config: Config, place: Place, options: Options) -> dict[str, Times]:
    """Time one reduction of every size on this rank."""
    world = mesh_of(config, place).world
    found = {}
    for size in SIZES:
        x = noise(place.rank, (size,), torch.device("cpu"))
        part = torch.empty(size // world.size)
        ours: Callable[..., object] = getattr(collectives, options["operation"])
        theirs: Sides = {
            "reduce_scatter": partial(dist.reduce_scatter_tensor, part, x),
            "all_reduce": partial(_all_reduced, x),
        }
        sides: Sides = {"rlsp": partial(ours, x, world), "gloo": theirs[options["operation"]]}
        found[str(size)] = alternate(sides, options["repeats"])
    return found


def _all_reduced(x: Tensor) -> None:
    dist.all_reduce(x.clone())


def ratio(operation: str, repeats: int) -> tuple[float, str]:
    """Return the worst ratio over all sizes and numbers of ranks, and which one it is."""
    ratios = {}
    for ranks, layout in RANKS.items():
        options = {"operation": operation, "repeats": repeats}
        every: list[Any] = on_ranks(compose(layout), "benchmarks.exchange:compare", options)
        for size in SIZES:
            times = [rank[str(size)] for rank in every]
            ratios[ranks, size] = slowest(times, "rlsp") / slowest(times, "gloo")
    worst = max(ratios, key=lambda key: ratios[key])
    listed = ", ".join(f"{ranks} × {size}: {value:.2f}" for (ranks, size), value in ratios.items())
    sizes = f"{SIZES[0]} … {SIZES[-1]} floats over 4 and 8 ranks"
    how = f"worst of {sizes}, medians of {repeats} interleaved repeats; "
    return ratios[worst], f"{how}worst is {worst[0]} ranks × {worst[1]} floats; ranks × floats: {listed}"
