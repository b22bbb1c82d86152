"""Kill a run again and again at seeded moments; it must end with what an undisturbed run ends with."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from faults.cells import TP
from faults.command import begin, go_on
from faults.plant import Plant, fired
from faults.trial import equals, missing_rows
from rlsp.report.checkpoint import DOCUMENT_NAME, Checkpoint, checkpoint_path

ROLLOUTS = 20
_EVERY = 1
_PHASES = (
    *("handing over", "generating", "scoring", "old policy", "update 0", "writing evidence"),
    "saving a checkpoint",
)
_VICTIMS = ("kill", "kill", "kill", "kill host", "kill owner")
_LATER_S = 0.2
_HOW_OFTEN_BEFORE = 0.1


@dataclass(frozen=True)
class Outcome:
    """What came of a run that was killed.

    Attributes:
        kills: How many plants acted.
        acts: How many of each kind.
        resumed: How often the command was given again, as its owner had been killed.
        left: Processes left, at any time.
        digest: Of the final weights.
        undisturbed: Of those of the run that nothing happened to.
        wrong: What else is not as it should be; empty if all is.
    """

    kills: int
    acts: dict[str, int]
    resumed: int
    left: int
    digest: str
    undisturbed: str
    wrong: str


def kill(folder: Path, kills: int, seed: int) -> Outcome:
    """Kill a run of 20 rollouts `kills` times, in a folder, and compare it with an undisturbed one."""
    reference, run_dir = folder / "undisturbed-20", folder / "killed"
    given = (f"num_rollouts={ROLLOUTS}", f"checkpoint.every={_EVERY}", f"parallel={TP}")
    ended = begin(reference, *given).end()
    if ended.status:
        raise RuntimeError(f"the undisturbed run ended with status {ended.status}:\n{ended.output}")
    plants = moments(kills, seed)
    ended = begin(run_dir, *given, f"launch.max_restarts={kills}", plants=plants).end()
    resumed, left = 0, ended.left
    while ended.status < 0 and resumed <= kills:
        resumed += 1
        ended = go_on(run_dir, plants=plants).end()
        left += ended.left
    acted = [plants[each.segment].act for each in fired(run_dir)]
    wrong = [equals(run_dir, reference)]
    wrong += [f"status {ended.status}"] if ended.status else []
    wrong += [f"{lost} rows lost"] if (lost := missing_rows(run_dir, ROLLOUTS)) else []
    wrong += [f"{len(acted)} kills and not {kills}"] if len(acted) != kills else []
    wrong += [f"{left} processes left"] if left else []
    return Outcome(
        kills=len(acted),
        acts=dict(sorted(Counter(acted).items())),
        resumed=resumed,
        left=left,
        digest=_digest(run_dir),
        undisturbed=_digest(reference),
        wrong="; ".join(filter(None, wrong)),
    )


def moments(kills: int, seed: int) -> list[Plant]:
    """Draw when each life of the run ends: in which part of its first or second rollout, or before them.

    It gains a rollout in a life where the pace allows it, so that it does not finish before its last kill.
    """
    draw = random.Random(seed)
    plants = []
    for number in range(kills):
        early = draw.random() < _HOW_OFTEN_BEFORE
        plants.append(
            Plant(
                act=draw.choice(_VICTIMS),
                phase="certifying" if early else draw.choice(_PHASES),
                rank=draw.randrange(2),
                calls=draw.randrange(4),
                wait_s=draw.choice((0.0, draw.uniform(0.0, _LATER_S))),
                by=None if early else (ROLLOUTS - 2) * (number + 1) // kills,
            )
        )
    return plants


def _digest(run_dir: Path) -> str:
    return Checkpoint.read(checkpoint_path(run_dir, ROLLOUTS) / DOCUMENT_NAME).weights_digest
