"""What is legal with several machines."""

from __future__ import annotations

from rlsp.config.cross import WORLD, CrossRule
from rlsp.config.schema import Config

_WAY_OUT = "or any with cluster.shared_folder=true, where all machines see the run folder"


def _sees_all(config: Config) -> bool:
    """Tell whether every machine sees the run folder that node 0 owns."""
    return config.cluster.nodes == 1 or config.cluster.shared_folder


CLUSTER_RULES = (
    CrossRule(
        ("cluster.nodes", *WORLD),
        lambda c: c.world_size % c.cluster.nodes == 0,
        lambda c: f"a divisor of the world size {c.world_size}: every machine has as many ranks",
    ),
    CrossRule(
        ("cluster.node", "cluster.nodes"),
        lambda c: c.cluster.node < c.cluster.nodes,
        lambda c: f"an integer in 0..{c.cluster.nodes - 1}" if c.cluster.nodes > 1 else "0 (one machine)",
    ),
    CrossRule(
        ("cluster.host", "cluster.nodes"),
        lambda c: c.cluster.nodes == 1 or c.cluster.host is not None,
        lambda _: "the name or address of node 0, as the other machines reach it",
    ),
    CrossRule(
        ("checkpoint.every", "cluster.nodes", "cluster.shared_folder", *WORLD),
        lambda c: _sees_all(c) or not c.checkpoint.every or c.parallel.tp <= len(c.local_ranks),
        lambda c: (
            f"0 (node 0 writes checkpoints, and not all parallel.tp={c.parallel.tp} shards are there), "
            f"{_WAY_OUT}"
        ),
    ),
    CrossRule(
        ("resume", "cluster.nodes", "cluster.shared_folder"),
        lambda c: _sees_all(c) or c.resume is None,
        lambda c: f"null (with cluster.nodes={c.cluster.nodes}: only node 0 has the checkpoints), {_WAY_OUT}",
    ),
    CrossRule(
        ("launch.max_restarts", "cluster.nodes"),
        lambda c: c.cluster.nodes == 1 or c.launch.max_restarts == 0,
        lambda c: (
            f"0 (with cluster.nodes={c.cluster.nodes}: each command starts again from outside, "
            "docs/cluster.md)"
        ),
    ),
)
