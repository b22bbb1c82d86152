"""How the machines of one run find each other, and prove that they are about to do the same thing.

Everything goes through a store of `torch.distributed` at the address of node 0, before there is a process
group: the first rank of every machine leaves a card there, rank 0 compares them all and answers all. Nothing
is assumed to be equal, so no collective is entered in different layouts, and nothing waits without a limit.

Where a run goes on is node 0's to say. Its card is the first, and is written once its folder is rewound and
has the new segment; another machine takes the point from there, whatever it saw in that folder before, and
puts into its own card what it reads of it.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from rlsp.board import BoardWriter, Place
from rlsp.cards import NodeCard, card_of, differences, seen, stated
from rlsp.config import ClusterConfig, Job

NODES_NAME = "nodes.json"
_TICK_S = 0.2
_LINGER_S = 5.0
_APPEARS_S = 60.0  # a network file system may show a new file late: NFS keeps what it saw for half as long


class RendezvousError(RuntimeError):
    """The machines of a run did not come together, or are not alike; on every rank that came."""


def join(job: Job, place: Place) -> Job:
    """Meet the other machines, open the process group over all ranks, and note who is who.

    Returns:
        The job; where all machines see the run folder, with that folder and with the point from which node 0
        goes on.

    Raises:
        RendezvousError: As `meet` does.
    """
    config = job.config
    store, cards = meet(job, place)
    place.board.phase("connecting to the ranks of all machines")
    dist.init_process_group(
        config.device.backend,
        store=PrefixStore("group", store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=config.launch.timeout_s),
    )
    if place.rank == 0:
        kept = ("node", "host", "first_rank", "last_rank", "run_dir")
        nodes = [{name: getattr(card, name) for name in kept} for card in cards]
        # In logs/: a manifest, which may be published, names no machine.
        (Path(job.run_dir) / "logs" / NODES_NAME).write_text(json.dumps(nodes, indent=2) + "\n")
    if config.cluster.node and config.cluster.shared_folder:
        return replace(job, resumed=cards[0].resumed, owner_dir=cards[0].run_dir)
    return job


def meet(job: Job, place: Place) -> tuple[Store, tuple[NodeCard, ...]]:
    """Wait for all machines, compare them, and return the store for the process group and their cards.

    Every rank of the run calls it, before it joins the process group.

    Raises:
        RendezvousError: A machine is missing after `cluster.wait_s`, came twice, or differs from node 0.
    """
    cluster, first_rank = job.config.cluster, job.config.local_ranks[0]
    wait = _Wait(place.board, cluster.wait_s)
    store = PrefixStore(f"rlsp/{cluster.attempt}", _open_store(cluster, place, wait))
    try:
        mine = card_of(job, _found(job, place, store, wait))
        if place.rank == first_rank:
            if store.add(f"count/{cluster.node}", 1) > 1:
                raise RendezvousError(_twice(cluster.node))
            store.set(f"card/{cluster.node}", json.dumps(asdict(mine)))
        if place.rank == 0:
            store.set("answer", _collected(store, cluster.nodes, wait))
        wait.until(lambda: store.check(["answer"]), f"node 0 at {cluster.host}:{cluster.port} to answer")
        answer = json.loads(store.get("answer"))
        if place.rank == first_rank:
            store.add("heard", 1)
        if place.rank == 0 and answer["faults"]:
            _linger(store, cluster.nodes)
    except DistError as error:
        raise RendezvousError(f"the machines lost each other while they met: {_first_line(error)}") from error
    cards = tuple(map(NodeCard.read, answer["cards"]))
    # Node 0 need not know of this machine at all: it may count fewer, or stand for another run.
    faults = answer["faults"] or differences(cards[0], mine)
    if faults:
        raise RendezvousError("; ".join(faults))
    return store, cards


def _found(job: Job, place: Place, store: Store, wait: _Wait) -> dict[str, str | None]:
    """Say what is in the run folder: node 0 what is to be there, another machine what it sees of that."""
    cluster = job.config.cluster
    if not cluster.shared_folder:
        return {}
    if not cluster.node:
        return stated(job)
    wait.until(lambda: store.check(["card/0"]), f"node 0 at {cluster.host}:{cluster.port} to say what is run")
    owner = _read(store, 0)
    patient = _Wait(place.board, min(_APPEARS_S, cluster.wait_s / 2))
    with suppress(RendezvousError):  # what is not there is named as a difference
        patient.until(
            lambda: seen(owner).items() <= owner.facts.items(), "the run folder of node 0 to appear"
        )
    return seen(owner)


class _Wait:
    """Wait with one limit for all, and let the board show that this is no hang."""

    def __init__(self, board: BoardWriter, limit_s: float) -> None:
        self._board = board
        self._until_s = time.monotonic() + limit_s
        self._limit_s = limit_s

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until something holds.

        Raises:
            RendezvousError: Time is up.
        """
        while not holds():
            if time.monotonic() > self._until_s:
                raise RendezvousError(f"waited {self._limit_s:g} s (cluster.wait_s) in vain for {what}")
            self._board.phase(f"waiting for {what}")
            time.sleep(_TICK_S)


def _open_store(cluster: ClusterConfig, place: Place, wait: _Wait) -> Store:
    """Listen on node 0, or wait for whoever does."""
    address = f"{cluster.host}:{cluster.port}"
    listens = place.rank == 0 and not cluster.agent_store
    if not listens:
        wait.until(lambda: _is_open(cluster), f"node 0 to listen at {address}")
    try:
        return TCPStore(
            str(cluster.host),
            cluster.port,
            is_master=listens,
            wait_for_workers=False,
            timeout=timedelta(seconds=cluster.wait_s),
        )
    except DistError as error:
        doing = "listen" if listens else "speak with node 0"
        raise RendezvousError(f"cannot {doing} at {address}: {_first_line(error)}") from error


def _is_open(cluster: ClusterConfig) -> bool:
    try:
        with socket.create_connection((cluster.host, cluster.port), timeout=1.0):
            return True
    except OSError:
        return False


def _collected(store: Store, nodes: int, wait: _Wait) -> str:
    """Wait for the cards of all machines, and make the answer that all are given."""

    def missing() -> list[int]:
        return [node for node in range(nodes) if not store.check([f"card/{node}"])]

    def twice() -> list[str]:
        return [_twice(node) for node in range(nodes) if store.add(f"count/{node}", 0) > 1]

    try:
        wait.until(lambda: bool(twice()) or not missing(), "the other machines")
    except RendezvousError as error:
        absent = ", ".join(f"node {node}" for node in missing())
        return _answer([f"{absent} of {nodes} did not come: {error}"], [_read(store, 0)])
    if faults := twice():
        return _answer(faults, [_read(store, 0)])
    cards = [_read(store, node) for node in range(nodes)]
    return _answer([line for card in cards[1:] for line in differences(cards[0], card)], cards)


def _linger(store: Store, nodes: int) -> None:
    """Let every machine that came hear why it was refused: the store goes with this process."""
    until_s = time.monotonic() + _LINGER_S
    came = sum(store.check([f"card/{node}"]) for node in range(nodes))
    while store.add("heard", 0) < came and time.monotonic() < until_s:
        time.sleep(_TICK_S)


def _twice(node: int) -> str:
    return f"two machines call themselves node {node}"


def _read(store: Store, node: int) -> NodeCard:
    return NodeCard.read(json.loads(store.get(f"card/{node}")))


def _answer(faults: Sequence[str], cards: Sequence[NodeCard]) -> str:
    return json.dumps({"faults": list(faults), "cards": [asdict(card) for card in cards]})


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
