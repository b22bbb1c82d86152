"""Who waits for whom, read from the last calls of all ranks: names the rank that a hanging collective lacks.

A slot shows the last call of its rank as `axis(ranks)#number operation …` (`groups.Ledger.enter`): numbers
count the calls on those ranks. A slot that reads otherwise is taken for a call of all ranks, numbered by the
rank itself.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlsp.board import Slot

_CALL = re.compile(r"\w+\((?:(\d+)\.\.(\d+)|(\d+(?:,\d+)*))\)#(\d+) ")
_STOPPED = ("stopped", "traced")


@dataclass(frozen=True)
class LastCall:
    """The call that a rank's slot shows.

    Attributes:
        slot: The slot.
        ranks: Who takes part.
        number: Which of the calls of those ranks it is; -1 before the first.
    """

    slot: Slot
    ranks: tuple[int, ...]
    number: int

    @property
    def key(self) -> tuple[tuple[int, ...], int]:
        """Return what must be equal for two ranks to be in one call."""
        return self.ranks, self.number


def last_calls(slots: Sequence[Slot]) -> dict[int, LastCall]:
    """Read the last call of every rank."""
    everyone = tuple(slot.rank for slot in slots)
    calls = {}
    for slot in slots:
        match = _CALL.match(slot.signature)
        if match is None:
            calls[slot.rank] = LastCall(slot, everyone, slot.sequence)
            continue
        first, last, listed, number = match.groups()
        ranks = range(int(first), int(last) + 1) if first else map(int, listed.split(","))
        calls[slot.rank] = LastCall(slot, tuple(ranks), int(number))
    return calls


def disagreements(slots: Sequence[Slot]) -> list[str]:
    """Name the ranks that are in the same call and ask for different things, with what each asks for."""
    shared = defaultdict(list)
    for call in last_calls(slots).values():
        if call.number >= 0:
            shared[call.key].append(call.slot)
    found = []
    for (ranks, number), members in shared.items():
        signatures = [slot.signature for slot in members]
        if len(set(signatures)) > 1:
            usual = max(signatures, key=signatures.count)
            odd = [slot for slot in members if slot.signature != usual]
            who = " and ".join(
                f"rank {slot.rank}" for slot in (odd if 2 * len(odd) < len(members) else members)
            )
            asked = "; ".join(f"rank {slot.rank} asks for {slot.signature}" for slot in members)
            found.append(f"{who} {'disagrees' if ' and ' not in who else 'disagree'}: {asked}")
        elif len({slot.chain_hex for slot in members}) > 1:
            names = ", ".join(map(str, ranks))
            found.append(f"ranks {names} agree on their call {number} and disagree on an earlier one")
    return found


def missing(slots: Sequence[Slot], states: Mapping[int, str]) -> list[str]:
    """Name the ranks that others wait for in vain, with the last call of each.

    Args:
        slots: The status board.
        states: What each living rank's process was doing; a stopped one explains every wait.
    """
    stopped = [slot for slot in slots if states.get(slot.rank) in _STOPPED]
    if stopped:
        return [f"rank {s.rank} did not arrive: its process is {states[s.rank]} ({_at(s)})" for s in stopped]
    calls = last_calls(slots)
    waits = {rank: _awaited(call, calls) for rank, call in calls.items() if not call.slot.done}
    awaited = {rank for others in waits.values() for rank in others}
    roots = [rank for rank in sorted(awaited) if not waits.get(rank)]
    if roots:
        return [f"rank {rank} did not arrive ({_at(calls[rank].slot)})" for rank in roots]
    if awaited:
        quietest_first = sorted((calls[rank].slot for rank in awaited), key=lambda slot: slot.updated_at_s)
        listed = "; ".join(f"rank {slot.rank} ({_at(slot)})" for slot in quietest_first)
        return [f"the ranks wait for each other, the longest quiet first: {listed}"]
    return []


def _awaited(call: LastCall, calls: Mapping[int, LastCall]) -> tuple[int, ...]:
    """Return the ranks that have not come to a call, as far as their own last calls tell."""
    if call.number < 0:
        return ()
    others = [calls[rank] for rank in call.ranks if rank in calls]
    return tuple(
        other.slot.rank for other in others if not (other.ranks == call.ranks and other.number >= call.number)
    )


def _at(slot: Slot) -> str:
    return f"at: {slot.describe()}"
