"""Put one cell to the test: plant, see how the run ends, let it go on, compare with the undisturbed one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from faults.acts import FILLER, GO
from faults.cells import FAULTS, ONE, REWARDS, ROLLOUTS, Cell, Way
from faults.command import OWN_SUFFIXES, Ended, begin, forget, go_on
from faults.nodes import go_on_with_both, lose_one
from faults.rewards import GIVEN, reward_path
from rlsp.report.compare import compare
from rlsp.report.compare_records import Outcome
from rlsp.report.files import EvidenceError
from rlsp.report.findings import Verdict
from rlsp.report.manifest import Manifest
from rlsp.report.verdict import verify

_DISK_MIB = 48
_CLOSED, _OPEN = 0o555, 0o755
_REFUSED = 2
_TRACKED = ("tracker=online", "tracker.init_timeout_s=5", "tracker.finish_timeout_s=3")


class NotHereError(Exception):
    """A cell that this machine cannot run, and why."""


@dataclass(frozen=True)
class Row:
    """What came of a cell.

    Attributes:
        fault: What was planted.
        moment: When.
        layout: In which layout the run began.
        then: In which it went on, or "restart".
        status: Exit status of the command that met the fault; a signal's name where one killed it.
        seconds: From the fault until no process was left; of a run that goes on by itself, until its end.
        left: Processes left.
        lost: Rows of metrics.jsonl lost, at the fault or at the end.
        goes_on_at: The rollout at which the run went on.
        exact: Whether it ended as the undisturbed run, bit for bit; None where it could not be run.
        wrong: What is not as the policy wants it; empty if all is.
    """

    fault: str
    moment: str
    layout: str
    then: str
    status: str
    seconds: float
    left: int
    lost: int
    goes_on_at: int
    exact: bool | None
    wrong: str


@dataclass(frozen=True)
class Undisturbed:
    """The runs that nothing happened to: with the arithmetic task, and with a reward function of its own."""

    plain: Path
    rewarded: Path

    def of(self, cell: Cell) -> Path:
        """Return the one that a cell's run must equal; made where it is not there yet."""
        own = cell.fault in REWARDS
        path = self.rewarded if own else self.plain
        if not (path / "VERDICT.json").exists():
            ended = begin(path, *_given(cell.fault if own else ""), f"parallel={ONE}").end()
            if ended.status:
                raise RuntimeError(f"the undisturbed run ended with status {ended.status}:\n{ended.output}")
        return path


def attempt(cell: Cell, folder: Path, undisturbed: Undisturbed) -> Row:
    """Run one cell in a folder and say what came of it."""
    run_dir = folder / "run"
    reference = undisturbed.of(cell)
    try:
        with ExitStack() as opened:
            if cell.way is Way.DISK:
                run_dir = opened.enter_context(_small_disk(folder)) / "run"
            forget(run_dir)
            first = _disturb(cell, run_dir)
            then = _go_on(cell, run_dir, first)
            row = _row(cell, first, then, run_dir, reference)
            forget(run_dir)
            return row
    except NotHereError as error:
        return Row(cell.title, cell.moment, cell.layout, cell.then, "–", 0.0, 0, 0, 0, None, str(error))


def equals(run_dir: Path, reference: Path) -> str:
    """Say what tells a run from the undisturbed one; empty where nothing does."""
    try:
        found = verify(run_dir)
        comparison = compare(run_dir, reference)
    except EvidenceError as error:
        return str(error)
    if found.judgement.verdict is not Verdict.PASS or found.damage:
        return f"{found.judgement.verdict.value}: {'; '.join([*found.judgement.reasons, *found.damage])}"
    if comparison.outcome is not Outcome.EQUAL:
        return f"rlsp-compare: {comparison.outcome.value}"
    other = [path for path in _results(reference) if (reference / path).read_bytes() != _read(run_dir / path)]
    return f"other bytes in {', '.join(map(str, other))}" if other else ""


def missing_rows(run_dir: Path, rollouts: int = ROLLOUTS) -> int:
    """Count the rollouts that have no row, or more than one."""
    path = run_dir / "metrics.jsonl"
    rows = [json.loads(line)["rollout"] for line in path.read_text().splitlines()] if path.exists() else []
    return sum(rows.count(index) != 1 for index in range(rollouts))


def _given(fault: str) -> tuple[str, ...]:
    own = FAULTS[fault].given if fault else ()
    return (f"num_rollouts={ROLLOUTS}", *(GIVEN if fault in REWARDS else ()), *own)


def _disturb(cell: Cell, run_dir: Path) -> Ended:
    """Run the command that meets the fault."""
    given = (*_given(cell.fault), f"parallel={cell.layout}")
    if cell.way is Way.RESTART:
        given = (*given, "launch.max_restarts=1")
    if cell.fault in REWARDS:
        reward_path(run_dir).write_text(FAULTS[cell.fault].act)
    if cell.way in (Way.NODES, Way.SHARED):
        return lose_one(cell, run_dir, given)
    if cell.way is Way.TRACKER:
        return _without_tracker(cell, run_dir, given)
    if cell.way is Way.READ_ONLY:
        return _read_only(cell, run_dir, given)
    return begin(run_dir, *given, plants=[cell.plant]).end()


def _go_on(cell: Cell, run_dir: Path, first: Ended) -> Ended | None:
    """Put right what is wrong outside the run, and resume it; None where it went on by itself."""
    reward_path(run_dir).unlink(missing_ok=True)
    (run_dir.parent / FILLER).unlink(missing_ok=True)
    if cell.way is Way.DAMAGE:
        _damage(FAULTS[cell.fault].act, run_dir / "checkpoints" / "00004")
    if first.status == 0:
        return None
    layout = f"parallel={cell.then}"
    if first.status == _REFUSED:
        return begin(run_dir, *_given(cell.fault), layout).end()
    if cell.way is Way.SHARED:
        return go_on_with_both(run_dir, layout, "launch.timeout_s=60")
    alone = ["cluster=single"] if cell.way is Way.NODES else []
    return go_on(run_dir, layout, "launch.timeout_s=60", *alone).end()


def _row(cell: Cell, first: Ended, then: Ended | None, run_dir: Path, reference: Path) -> Row:
    difference = equals(run_dir, reference)
    lost = first.lost + missing_rows(run_dir)
    segments = Manifest.read(run_dir / "manifest.json").segments
    goes_on_at = segments[-1].first_rollout if len(segments) > 1 or first.status == _REFUSED else ROLLOUTS
    left = first.left + (then.left if then else 0)
    wanted = cell.goes_on_at if then or cell.way is Way.RESTART else ROLLOUTS
    wrong = {
        f"status {first.status} and not {cell.status}": first.status not in cell.status,
        f"then status {then.status if then else 0}": then is not None and then.status != 0,
        f"{left} processes left": left > 0,
        f"{lost} rows lost": lost > 0,
        f"goes on at {goes_on_at} and not {wanted}": goes_on_at != wanted,
        difference: bool(difference),
        "nothing happened": not first.fired and cell.plant is not None,
    }
    return Row(
        fault=cell.title,
        moment=cell.moment,
        layout=cell.layout,
        then=cell.then if then else "restart" if cell.way is Way.RESTART else "–",
        status=str(first.status) if first.status >= 0 else "SIGKILL",
        seconds=round(first.seconds, 1),
        left=left,
        lost=lost,
        goes_on_at=goes_on_at,
        exact=not difference,
        wrong="; ".join(text for text, holds in wrong.items() if holds),
    )


def _damage(how: str, checkpoint: Path) -> None:
    shards = sorted(checkpoint.glob("*.safetensors"))[-1]
    if how == "missing":
        shards.unlink()
    elif how == "cut":
        with shards.open("r+b") as file:
            file.truncate(shards.stat().st_size // 2)
    elif how == "flip":
        content = bytearray(shards.read_bytes())
        content[-1] ^= 1
        shards.write_bytes(content)
    else:
        document = checkpoint / "checkpoint.json"
        document.write_text(document.read_text().replace('"optimizer_steps": 4', '"optimizer_steps": 5'))


def _without_tracker(cell: Cell, run_dir: Path, given: Sequence[str]) -> Ended:
    """Let the W&B server go away at the moment of the cell."""
    from wandb_server import WandbServer, client_environment

    server = WandbServer()
    home = run_dir.parent / "home"
    home.mkdir(exist_ok=True)
    variables = client_environment(home, server.url)
    if cell.moment == "certifying":
        server.close()
    command = begin(run_dir, *given, *_TRACKED, plants=[cell.plant], variables=variables)
    command.await_fault()
    if cell.moment != "certifying":
        server.close()
    run_dir.with_name(run_dir.name + GO).touch()
    return command.end()


def _read_only(cell: Cell, run_dir: Path, given: Sequence[str]) -> Ended:
    """Run as one for whom permissions hold, and give them back afterwards."""
    if cell.plant is None:
        for suffix in OWN_SUFFIXES:  # what this script itself writes there
            run_dir.with_name(run_dir.name + suffix).touch()
        run_dir.parent.chmod(_CLOSED)
    try:
        return begin(run_dir, *given, plants=[cell.plant], as_user=True).end()
    finally:
        for folder in (run_dir.parent, *(path for path in run_dir.parent.rglob("*") if path.is_dir())):
            folder.chmod(_OPEN)


@contextmanager
def _small_disk(folder: Path) -> Iterator[Path]:
    """Mount a disk of a few MiB, in memory."""
    disk = folder / "disk"
    disk.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_MIB}m", "tmpfs", str(disk)]
    if sys.platform != "linux" or not shutil.which("mount") or subprocess.run(mount, check=False).returncode:
        raise NotHereError("not run: a file system cannot be mounted here (root, CAP_SYS_ADMIN)")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def _results(folder: Path) -> list[Path]:
    """List the files that no layout and no fault may change."""
    found = [*(folder / "rollouts").iterdir(), *(folder / "digests").iterdir()]
    return sorted(path.relative_to(folder) for path in found)


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
