"""Two commands that are two machines on the loopback, of which one may be lost."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from faults.cells import KILLED, Cell, Way
from faults.command import SMALL, Command, Ended
from faults.plant import Plant

_LOST = 1  # exit status of the machine that is left


def lose_one(cell: Cell, run_dir: Path, given: tuple[str, ...]) -> Ended:
    """Begin a run on two machines and lose one; the end is node 0's, if the other's is right."""
    lost = int(cell.fault.split()[1])
    place = () if cell.way is Way.NODES else ("cluster.shared_folder=true",)
    words = (*SMALL, f"hydra.run.dir={run_dir}", *given, *place, "cluster.nodes=2", "cluster.host=127.0.0.1")
    ends = on_both(run_dir, words, {lost: [cell.plant]})
    acted = ends[lost].fired
    seconds = time.time() - acted[-1].at_s if acted else 0.0
    wanted = KILLED if lost else _LOST
    status = ends[0].status if ends[1].status == wanted else ends[1].status
    left = sum(end.left for end in ends)
    return replace(ends[0], status=status, fired=acted, seconds=seconds, left=left)


def go_on_with_both(run_dir: Path, *overrides: str) -> Ended:
    """Resume a run on two machines; the end is that of the one whose status is worse."""
    ends = on_both(run_dir, (f"resume={run_dir}", *overrides))
    worse = max(ends, key=lambda end: abs(end.status))
    return replace(worse, left=sum(end.left for end in ends))


def on_both(
    run_dir: Path, overrides: tuple[str, ...], plants: Mapping[int, Sequence[Plant | None]] | None = None
) -> list[Ended]:
    """Start one command with its own number on each of two machines, and wait for both.

    Args:
        run_dir: The run's folder.
        overrides: What both are given.
        plants: What is planted in a machine, by segment; another than node 0 is always in its first.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    places = [run_dir, run_dir.with_name(f"{run_dir.name}.node-1")]
    words = (*overrides, f"cluster.port={port}")
    commands = [
        Command(place, (*words, f"cluster.node={node}"), (plants or {}).get(node, ()))
        for node, place in enumerate(places)
    ]
    return [command.end() for command in commands]
