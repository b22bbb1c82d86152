"""Process groups of one rank, and the ledger of what it called on them."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from hashlib import blake2b
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from rlsp.layout import Layout, RolloutLayout
from rlsp.lines import Lines, open_lines

CHAIN_BYTES = 16
REMEMBERED_CALLS = 8
_SIGNATURE_CHARS = 200
_BACKEND_DEVICES = {"gloo": "cpu", "nccl": "cuda"}


class CollectiveError(RuntimeError):
    """Say which operation, shape, dtype and group a collective failed on, and why."""


class UnlikeCallsError(CollectiveError):
    """Say which ranks made other calls than the rest: a fault of the program, which comes again."""


class CallWriter(Protocol):
    """Take note of every collective outside this process (`rlsp.board.BoardWriter` is one)."""

    def call(self, sequence: int, signature: str, chain: bytes) -> None:
        """Note a call; the arguments are those of `Ledger.enter`."""


@dataclass
class Trail:
    """What one rank called on one set of ranks, in order.

    Attributes:
        sequence: Calls so far.
        chain: Hash over all their signatures, in order.
        recent: Number and signature of the last few.
    """

    sequence: int = 0
    chain: bytes = bytes(CHAIN_BYTES)
    recent: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=REMEMBERED_CALLS))


class Ledger:
    """Record every collective of one rank: numbered, hash-chained and counted, one ledger a process.

    Attributes:
        sequence: Calls of this rank so far.
        chain: Hash over all their signatures, in order.
        calls: Calls by operation.
        bytes: Payload that this rank received from others, by operation, in bytes.
        wire: Bytes that this rank received from others with their padding and headers, by (axis, operation).
            What Megatron-Core's own layers send in native routes passes elsewhere and is not counted.
    """

    def __init__(self, writer: CallWriter | None = None) -> None:
        """Start empty; every call is shown to `writer`, if there is one, before it communicates."""
        self.sequence = 0
        self.chain = bytes(CHAIN_BYTES)
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.wire: Counter[tuple[str, str]] = Counter()
        self._writer = writer
        self._trails: dict[tuple[int, ...], Trail] = {}

    def attach(self, writer: CallWriter | None) -> None:
        """Show every call from now on to `writer`."""
        self._writer = writer

    def trail(self, group: Group) -> Trail:
        """Return the calls on the ranks of `group`; axes over the same ranks share one."""
        return self._trails.setdefault(group.ranks, Trail())

    def enter(self, group: Group, operation: str, signature: str) -> Trail:
        """Record a call that is about to communicate, and show it to the writer.

        The writer gets this rank's number of the call, the text `group#number-in-group signature`, and the
        *group's* chain: ranks of one group must show the same text and chain, whatever else they called.
        """
        trail = self.trail(group)
        text = f"{group.axis} {signature}".encode()
        self.chain = blake2b(self.chain + text, digest_size=CHAIN_BYTES).digest()
        trail.chain = blake2b(trail.chain + text, digest_size=CHAIN_BYTES).digest()
        trail.recent.append((trail.sequence, f"{group.axis} {signature}"[:_SIGNATURE_CHARS]))
        self.calls[operation] += 1
        if self._writer is not None:
            self._writer.call(self.sequence, f"{group.label}#{trail.sequence} {signature}", trail.chain)
        self.sequence += 1
        trail.sequence += 1
        return trail


@dataclass(frozen=True)
class Group:
    """The ranks of one mesh axis that this rank communicates with; a group of one never communicates.

    Attributes:
        axis: Name of the mesh axis.
        ranks: Global ranks, ascending; a rank's position is its index in every sum and gather.
        index: This rank's position.
        handle: The process group; None exactly where there is one rank.
        ledger: Where this process records its calls.
        lines: Direct lines to the other ranks, where all are on one machine; None where there are none.

    Raises:
        CollectiveError: The ranks do not ascend, or index or handle does not fit them.
    """

    axis: str
    ranks: tuple[int, ...]
    index: int
    handle: ProcessGroup | None = field(default=None, repr=False)
    ledger: Ledger = field(default_factory=Ledger, repr=False, compare=False)
    lines: Lines | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.ranks or list(self.ranks) != sorted(set(self.ranks)):
            raise CollectiveError(f"group {self.axis} {self.ranks}: ranks must ascend and not repeat")
        if not 0 <= self.index < self.size:
            raise CollectiveError(f"group {self.label}: index {self.index} is not inside it")
        if (self.handle is None) != (self.size == 1):
            raise CollectiveError(
                f"group {self.label}: a handle belongs to two ranks or more, and only to those"
            )
        if self.handle is not None and self.handle.size() != self.size:
            raise CollectiveError(
                f"group {self.label}: its handle has {self.handle.size()} ranks, not {self.size}"
            )

    @property
    def size(self) -> int:
        """Count the ranks."""
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """Name this rank globally."""
        return self.ranks[self.index]

    @cached_property
    def label(self) -> str:
        """Name axis and ranks in a few characters: `tp(0..3)`, `cp(1,5)`, `dp(2)`."""
        first, last = self.ranks[0], self.ranks[-1]
        adjacent = self.size > 1 and self.ranks == tuple(range(first, last + 1))
        return f"{self.axis}({f'{first}..{last}' if adjacent else ','.join(map(str, self.ranks))})"

    @cached_property
    def device_type(self) -> str | None:
        """Name the kind of device that the group's backend moves tensors of; None where any will do."""
        return None if self.handle is None else _BACKEND_DEVICES.get(dist.get_backend(self.handle))


@dataclass(frozen=True)
class Mesh:
    """Every group that one rank belongs to.

    Attributes:
        world: All ranks.
        tp: Ranks that share a token range and split the weights.
        cp: Ranks that share sequences and a weight shard, and split each sequence.
        dp: Ranks that share a chunk index and a weight shard, and split the sequences.
        token: Ranks that share a weight shard and split all tokens (dp × cp, dp-major).
        rollout_tp: Ranks of this rank's rollout engine; None where it idles during rollout.
    """

    world: Group
    tp: Group
    cp: Group
    dp: Group
    token: Group
    rollout_tp: Group | None

    @property
    def groups(self) -> tuple[Group, ...]:
        """List the groups that communicate, one for each set of ranks, in an order that all ranks share."""
        distinct: dict[tuple[int, ...], Group] = {}
        for group in (self.world, self.tp, self.cp, self.dp, self.token, self.rollout_tp):
            if group is not None and group.size > 1:
                distinct.setdefault(group.ranks, group)
        return tuple(distinct.values())

    @property
    def ledger(self) -> Ledger:
        """Return the record of this process, which all groups share."""
        return self.world.ledger


def build_mesh(
    layout: Layout, rollout_layout: RolloutLayout, rank: int, timeout_s: float, ledger: Ledger | None = None
) -> Mesh:
    """Open this rank's groups; every rank of the launch calls it at the same point, with the same layouts.

    Every rank opens every process group in the same order, whether it belongs or not; groups over the same
    ranks share one. torch.distributed must be initialised where there is more than one rank.

    Args:
        layout: Where the ranks of training stand.
        rollout_layout: Where the ranks of rollout stand, over the same world.
        rank: This rank.
        timeout_s: How long a collective may take before it fails (and, on NCCL, ends the process).
        ledger: Where to record calls; a new one if None.

    Raises:
        CollectiveError: The layouts, the rank and the initialised world do not fit together.
    """
    _check_world(layout, rollout_layout, rank, timeout_s)
    partitions = {
        "world": [tuple(range(layout.world_size))],
        "tp": layout.tp_groups(),
        "cp": layout.cp_groups(),
        "dp": layout.dp_groups(),
        "token": layout.token_groups(),
        "rollout_tp": rollout_layout.tp_groups(),
    }
    every = dict.fromkeys(ranks for partition in partitions.values() for ranks in partition if len(ranks) > 1)
    handles = {ranks: dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s)) for ranks in every}
    ledger = Ledger() if ledger is None else ledger
    lines = _lines(rank, tuple(every), handles, timeout_s)
    own = {
        axis: Group(axis, ranks, ranks.index(rank), handles.get(ranks), ledger, lines.get(ranks))
        for axis, partition in partitions.items()
        for ranks in partition
        if rank in ranks
    }
    return Mesh(own["world"], own["tp"], own["cp"], own["dp"], own["token"], own.get("rollout_tp"))


def _lines(
    rank: int,
    every: tuple[tuple[int, ...], ...],
    handles: dict[tuple[int, ...], ProcessGroup],
    timeout_s: float,
) -> dict[tuple[int, ...], Lines]:
    """Open direct lines, where tensors of the processor travel; ranks meet over the group of the world."""
    if not every or _BACKEND_DEVICES.get(dist.get_backend(handles[every[0]])) != "cpu":
        return {}

    def meet(own: bytes) -> list[bytes]:
        received = torch.empty((len(every[0]), len(own)), dtype=torch.uint8)
        sent = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        dist.all_gather_single(received.view(-1), sent, group=handles[every[0]])
        return [bytes(row) for row in received.numpy()]

    return open_lines(rank, every, meet, timeout_s)


def _check_world(layout: Layout, rollout_layout: RolloutLayout, rank: int, timeout_s: float) -> None:
    size = layout.world_size
    if rollout_layout.world_size != size:
        raise CollectiveError(f"mesh: training has {size} ranks, rollout {rollout_layout.world_size}")
    if not 0 <= rank < size:
        raise CollectiveError(f"mesh: rank {rank} is not one of {size}")
    if not timeout_s > 0:
        raise CollectiveError(f"mesh: timeout_s must be above 0, not {timeout_s}")
    if size == 1:
        return
    if not dist.is_initialized():
        raise CollectiveError(f"mesh: {size} ranks need torch.distributed to be initialised first")
    if (dist.get_rank(), dist.get_world_size()) != (rank, size):
        raise CollectiveError(
            f"mesh: asked for rank {rank} of {size}, but torch.distributed was initialised as"
            f" rank {dist.get_rank()} of {dist.get_world_size()}"
        )
