"""The rate of this machine's matrix products, and what a step would take if it were nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.ranks import Options, compose, on_ranks, rank_function
from benchmarks.step import CPU, LENGTH, SEQUENCES
from rlsp.board import Place
from rlsp.config import Config
from rlsp.numerics.operands import noise

_SIDE = 1024
_BYTES = 256 << 20
_REPEATS = 5


@rank_function
def rates(config: Config, place: Place, options: Options) -> dict[str, float]:
    """Return GFLOP/s of one core's products, and GB/s that it copies."""
    x = noise(1, (_SIDE, _SIDE), CPU)
    narrow, wide = x.to(torch.bfloat16), torch.zeros(_BYTES, dtype=torch.uint8)
    room = torch.zeros_like(wide)
    flops = 2 * _SIDE**3
    return {
        "float32 GFLOP/s": flops / _best(lambda: torch.mm(x, x)) / 1e9,
        "bfloat16 GFLOP/s": flops / _best(lambda: torch.mm(narrow, narrow)) / 1e9,
        "copy GB/s": 2 * _BYTES / _best(lambda: room.copy_(wide)) / 1e9,
    }


def tables() -> list[dict[str, Any]]:
    """Return the rates, and the least time of the products of the steps that `step` compares, at one rank."""
    config = compose("parallel=cp1_tp1_sp1")
    (found,) = on_ranks(config, "benchmarks.roofline:rates")
    gflop = step_flops(config) / 1e9
    least = 1e3 * gflop / found["float32 GFLOP/s"]
    return [
        {"title": "rates of one core", "values": found},
        {
            "title": "products of a strict step at one rank",
            "values": {"GFLOP": gflop, "ms at the float32 rate": least},
        },
    ]


def step_flops(config: Config) -> float:
    """Count the multiplications and additions in the products of a strict step.

    Three products with every weight; of attention's, two forward and five backward, over the visible blocks.
    """
    shape = config.model
    heads = shape.num_attention_heads * shape.head_dim
    keys = 2 * shape.num_query_groups * shape.head_dim
    layer = shape.hidden_size * (2 * heads + keys + 3 * shape.ffn_hidden_size)
    weights = shape.num_layers * layer + shape.hidden_size * config.padded_vocab
    tokens, block = SEQUENCES * LENGTH, config.numerics.k_block
    visible = (LENGTH + block) / 2
    attention = 7 * shape.num_layers * heads * visible
    return 2.0 * tokens * (3 * weights + attention)


def _best(call: Callable[[], object]) -> float:
    times = []
    for _ in range(_REPEATS + 1):
        started = time.process_time()
        call()
        times.append(time.process_time() - started)
    return min(times[1:])
