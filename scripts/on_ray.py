"""Run one experiment over several machines of a Ray cluster: python scripts/on_ray.py NODES [OVERRIDES].

Ray starts `rlsp` once on each of NODES machines; the exit status is that of node 0. `--address` is the
cluster's, as `ray.init` takes it; `--cpus` and `--gpus` are what the ranks of one machine need.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


def on_ray(nodes: int, overrides: list[str], cpus: float, gpus: float) -> list[int]:
    """Run `rlsp` on machines of the cluster that is connected; return the exit status of each."""
    needed = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
    group = placement_group([needed] * nodes, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    places = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=n) for n in range(nodes)]
    address = ray.remote(num_cpus=0)(ray.util.get_node_ip_address)
    host = ray.get(address.options(scheduling_strategy=places[0]).remote())

    def run(node: int) -> int:
        where = [f"cluster.nodes={nodes}", f"cluster.node={node}", f"cluster.host={host}"]
        return subprocess.run([sys.executable, "-m", "rlsp", *overrides, *where], check=False).returncode

    task = ray.remote(num_cpus=cpus, num_gpus=gpus)(run)
    found: list[int] = ray.get(
        [task.options(scheduling_strategy=place).remote(node) for node, place in enumerate(places)]
    )
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("nodes", type=int, metavar="NODES")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDES")
    parser.add_argument("--address", default="auto")
    parser.add_argument("--cpus", type=float, default=1.0)
    parser.add_argument("--gpus", type=float, default=0.0)
    chosen = parser.parse_args()
    ray.init(address=chosen.address)
    sys.exit(on_ray(chosen.nodes, chosen.overrides, chosen.cpus, chosen.gpus)[0])
