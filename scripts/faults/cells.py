"""The cells of the table: which fault, when, in which layout, and what the failure policy wants."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from faults.plant import Plant

ROLLOUTS = 5
ONE, TP, CP, FOUR = "cp1_tp1_sp1", "cp1_tp2_sp2", "cp2_tp1_sp1", "cp2_tp2_sp2"
_WORLD = {ONE: 1, TP: 2, CP: 2, FOUR: 4}
_HANG = ("launch.timeout_s=10",)
KILLED = -9


class Way(Enum):
    """What a cell needs besides a plant, and how its run goes on."""

    RESUME = "resume"
    RESTART = "restart"
    DAMAGE = "damage"
    NODES = "nodes"
    SHARED = "shared folder"
    DISK = "disk"
    READ_ONLY = "read-only"
    TRACKER = "tracker"


@dataclass(frozen=True)
class Moment:
    """When a fault happens.

    Attributes:
        phase: What the rank's phase begins with; empty: before the run has a folder.
        kept: Rollouts in the newest whole checkpoint by then.
        calls: Collectives before it.
        hook: A step of `faults.plant.HOOKS`.
    """

    phase: str
    kept: int = 2
    calls: int = 0
    hook: str | None = None


MOMENTS = {
    "before the start": Moment("", 0),
    "certifying": Moment("certifying", 0),
    "generating": Moment("rollout 2: generating", calls=5),
    "scoring": Moment("rollout 2: scoring"),
    "update": Moment("rollout 2: update", calls=3),
    "evidence": Moment("rollout 2: writing", hook="tensors written"),
    "before a row": Moment("rollout 2: writing", hook="row missing"),
    "in a row": Moment("rollout 2: writing", hook="row torn"),
    "first save": Moment("rollout 1: saving", 0, hook="shards written"),
    "saving": Moment("rollout 3: saving", 2, hook="shards written"),
    "saving, torn": Moment("rollout 3: saving", 2, hook="shards torn"),
    "before its name": Moment("rollout 3: saving", 2, hook="not named"),
    "just saved": Moment("rollout 3: saving", 4, hook="named"),
    "removing an old one": Moment("rollout 4: saving", 5, hook="removing an old one"),
    "last update": Moment("rollout 4: update", 4, calls=3),
    "after the last": Moment("done", 5),
}


@dataclass(frozen=True)
class Fault:
    """What happens, and what the policy says that comes of it.

    Attributes:
        act: A name of `faults.acts.ACTS`; or what is damaged, or when the W&B server goes away.
        status: Exit statuses that are right.
        given: Overrides of the run.
        saves: Whether the rollout is finished and saved first.
        first_rank: Whether it is rank 0's and not the last one's.
    """

    act: str
    status: tuple[int, ...] = (1,)
    given: tuple[str, ...] = ()
    saves: bool = False
    first_rank: bool = False


FAULTS = {
    "SIGKILL of a rank": Fault("kill"),
    "SIGKILL of rank 0": Fault("kill", first_rank=True),
    "SIGSTOP of a rank": Fault("stop", given=_HANG),
    "SIGKILL of the host": Fault("kill host"),
    "SIGSTOP of the host": Fault("stop host", given=_HANG),
    "SIGKILL of the owner": Fault("kill owner", status=(KILLED,)),
    "SIGINT": Fault("SIGINT", saves=True),
    "SIGTERM": Fault("SIGTERM", saves=True),
    "SIGHUP": Fault("SIGHUP", saves=True),
    "SIGINT twice": Fault("SIGINT twice"),
    "exception on one rank": Fault("raise"),
    "another call on one rank": Fault("disagree"),
    "no memory": Fault("exhaust"),
    "no file may grow": Fault("limit files", first_rank=True),
    "full disk": Fault("fill", first_rank=True),
    "read-only folder": Fault("forbid", first_rank=True),
    "reward is NaN": Fault("nan", first_rank=True),
    "reward raises": Fault("raises", first_rank=True),
    "reward hangs": Fault("hangs", first_rank=True),
    "newest checkpoint: a bit flipped": Fault("flip"),
    "newest checkpoint: cut short": Fault("cut"),
    "newest checkpoint: a file missing": Fault("missing"),
    "newest checkpoint: edited": Fault("edit"),
    "node 1 is lost": Fault("kill owner"),
    "node 0 is lost": Fault("kill owner", status=(KILLED,)),
    "W&B is down": Fault("wait", status=(0,)),
}
REWARDS = frozenset({"reward is NaN", "reward raises", "reward hangs"})


@dataclass(frozen=True)
class Cell:
    """One row of the table.

    Attributes:
        fault: A key of FAULTS.
        moment: A key of MOMENTS.
        layout: In which the run begins.
        then: In which it goes on; the same one where it starts again by itself.
        way: What it needs.
    """

    fault: str
    moment: str
    layout: str = TP
    then: str = TP
    way: Way = Way.RESUME

    @property
    def name(self) -> str:
        """Name it for people and for `--only`."""
        how = {Way.RESTART: ", restarts", Way.SHARED: ", shared folder"}.get(self.way, "")
        return f"{self.fault}, {self.moment}, {self.layout}{how}"

    @property
    def title(self) -> str:
        """Name the fault in the table, where nothing else tells a shared folder from two."""
        return self.fault if self.way is not Way.SHARED else f"{self.fault}, {self.way.value}"

    @property
    def status(self) -> tuple[int, ...]:
        """Return the right exit statuses."""
        if self.way is Way.RESTART and self.fault != "exception on one rank":
            return (0,)
        if self.moment == "before the start":
            return (2,)
        # After the last rollout a run that is asked to stop may just as well have ended.
        return (
            (0, 1)
            if FAULTS[self.fault].saves and self.moment == "after the last"
            else FAULTS[self.fault].status
        )

    @property
    def goes_on_at(self) -> int:
        """Return the rollout at which the run must go on."""
        moment, fault = MOMENTS[self.moment], FAULTS[self.fault]
        if self.way is Way.DAMAGE:
            return 2
        if fault.saves and moment.phase.startswith("rollout"):
            asked_too_late = moment.phase.endswith("saving")  # for this boundary, so at the next one
            return int(moment.phase.split()[1][0]) + 1 + asked_too_late
        return moment.kept

    @property
    def plant(self) -> Plant | None:
        """Return what is planted in the first segment."""
        moment, fault = MOMENTS[self.moment], FAULTS[self.fault]
        if not moment.phase:
            return None
        # Evidence is rank 0's, and so is a checkpoint's name.
        zero = {"tensors written", "row missing", "row torn", "not named", "named", "removing an old one"}
        first = fault.first_rank or moment.hook in zero or self.fault == "node 0 is lost"
        rank = 0 if first else _WORLD[self.layout] - 1
        if self.layout in (CP, FOUR) and moment.hook in ("shards written", "shards torn"):
            rank = 0  # those of CP rank 0 save
        act = "kill" if self.way is Way.DAMAGE else "note" if self.fault in REWARDS else fault.act
        return Plant(act, moment.phase, rank, moment.calls, moment.hook)


def _of(fault: str, *moments: str, layout: str = TP, then: str = TP, way: Way = Way.RESUME) -> list[Cell]:
    return [Cell(fault, moment, layout, then, way) for moment in moments]


def cells() -> list[Cell]:
    """List all cells; those that the tests run come first, then one of each fault after the other."""
    every = _every()
    chosen = [cell for cell in every if cell.name in IN_CI]
    rest = [cell for cell in every if cell.name not in IN_CI]
    turn: dict[int, int] = {}
    seen: dict[tuple[str, Way], int] = {}
    for cell in rest:
        turn[id(cell)] = seen.get((cell.fault, cell.way), 0)
        seen[cell.fault, cell.way] = turn[id(cell)] + 1
    return chosen + sorted(rest, key=lambda cell: turn[id(cell)])


IN_CI = frozenset(
    {
        f"SIGKILL of a rank, update, {TP}",
        f"SIGKILL of a rank, evidence, {TP}, restarts",
        f"SIGKILL of the owner, first save, {TP}",
        f"SIGSTOP of a rank, generating, {TP}",
        f"SIGTERM, update, {TP}",
        f"exception on one rank, saving, {ONE}",
        f"newest checkpoint: a bit flipped, last update, {ONE}",
        f"no memory, update, {ONE}, restarts",
    }
)


def _every() -> list[Cell]:
    rank, restart = "SIGKILL of a rank", Way.RESTART
    life = ("certifying", "generating", "update", "evidence", "saving", "after the last")
    return [
        *_of(rank, "certifying", "generating", "update", then=TP),
        *_of(rank, "update", "saving", then=CP)[1:],
        *_of(rank, "after the last", then=ONE),
        *_of(rank, "generating", "update", "saving", layout=CP, then=TP),
        *_of(rank, "update", "saving, torn", "in a row", layout=ONE, then=TP),
        *_of(rank, "generating", "saving", layout=FOUR, then=ONE),
        *_of(rank, *life, way=restart),
        *_of(rank, "update", "saving", layout=CP, then=CP, way=restart),
        *_of(rank, "update", layout=FOUR, then=FOUR, way=restart),
        *_of("SIGKILL of rank 0", "evidence", "before a row", "in a row", "before its name", then=CP),
        *_of("SIGKILL of rank 0", "just saved", "removing an old one", "first save", then=ONE),
        *_of("SIGSTOP of a rank", "certifying", "generating", "update", "saving"),
        *_of("SIGSTOP of a rank", "generating", layout=CP, then=ONE),
        *_of("SIGSTOP of a rank", "update", way=restart),
        *_of("SIGKILL of the host", "certifying", "generating", "update", "saving", then=CP),
        *_of("SIGKILL of the host", "update", way=restart),
        *_of("SIGSTOP of the host", "generating", then=ONE),
        *_of("SIGSTOP of the host", "update", way=restart),
        *_of("SIGKILL of the owner", *life, "first save"),
        *_of("SIGKILL of the owner", "update", layout=CP, then=TP),
        *_of("SIGKILL of the owner", "update", layout=FOUR, then=CP),
        *_of("SIGINT", "certifying", "generating", "update", "first save", "after the last", then=CP),
        *_of("SIGINT", "generating", layout=ONE, then=TP),
        *_of("SIGTERM", "generating", "update", then=TP),
        *_of("SIGTERM", "evidence", layout=CP, then=ONE),
        *_of("SIGHUP", "update"),
        *_of("SIGINT twice", "generating", "update"),
        *_of("exception on one rank", "certifying", "generating", "update", "saving"),
        *_of("exception on one rank", "saving", layout=ONE, then=TP),
        *_of("exception on one rank", "update", way=restart),
        *_of("another call on one rank", "generating", "update"),
        *_of("another call on one rank", "update", layout=CP, then=TP),
        *_of("no memory", "update", then=ONE),
        *_of("no memory", "update", layout=ONE, then=ONE, way=restart),
        *_of("no file may grow", "scoring", then=ONE),
        *_of("full disk", "scoring", "saving", way=Way.DISK),
        *_of("read-only folder", "before the start", "scoring", "saving", way=Way.READ_ONLY),
        *_of("reward is NaN", "scoring", layout=ONE, then=TP),
        *_of("reward raises", "scoring", then=ONE),
        *_of("reward hangs", "scoring", layout=ONE, then=ONE),
        *_of("newest checkpoint: a bit flipped", "last update", layout=ONE, then=TP, way=Way.DAMAGE),
        *_of("newest checkpoint: cut short", "last update", then=CP, way=Way.DAMAGE),
        *_of("newest checkpoint: a file missing", "last update", then=ONE, way=Way.DAMAGE),
        *_of("newest checkpoint: edited", "last update", way=Way.DAMAGE),
        *_of("node 1 is lost", "generating", "update", layout=CP, then=TP, way=Way.NODES),
        *_of("node 0 is lost", "update", layout=CP, then=ONE, way=Way.NODES),
        *_of("node 1 is lost", "update", then=CP, way=Way.SHARED),
        *_of("node 0 is lost", "update", layout=CP, then=TP, way=Way.SHARED),
        *_of("W&B is down", "certifying", "update", "after the last", layout=ONE, then=ONE, way=Way.TRACKER),
    ]
