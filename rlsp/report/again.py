"""Evidence that a resumed run makes again: what a killed segment recorded is the witness of the new one.

A segment that is killed leaves rollouts after its last checkpoint. They are set aside in logs/again/, and
each is compared with what is made in its place, byte by byte: neither file depends on the layout.
"""

from __future__ import annotations

from pathlib import Path

from rlsp.report import tensors as tensor_file
from rlsp.report.digests import FOLDER as DIGESTS_FOLDER
from rlsp.report.digests import digests_path
from rlsp.report.files import EvidenceError, read_regular

ASIDE = Path("logs") / "again"
_KINDS = ((tensor_file.FOLDER, ".safetensors"), (DIGESTS_FOLDER, ".json"))


def set_aside(run_dir: Path, first: int) -> None:
    """Move the files of rollouts from `first` on out of the evidence.

    Raises:
        OSError: The folder cannot be written.
    """
    for folder, suffix in _KINDS:
        for path in sorted((run_dir / folder).glob(f"*{suffix}")):
            if path.stem.isdigit() and int(path.stem) >= first:
                target = run_dir / ASIDE / folder / path.name
                target.parent.mkdir(parents=True, exist_ok=True)
                path.replace(target)


def compare_again(run_dir: Path, index: int, *, judged: bool) -> None:
    """Hold what was made of a rollout against what was set aside, and remove that.

    Args:
        run_dir: The run folder.
        index: The rollout, whose files are written.
        judged: Whether the bits were promised: no route is native.

    Raises:
        EvidenceError: They differ, though the rewards do not: a task need not pay the same twice.
    """
    for made in (tensor_file.rollout_path(run_dir, index), digests_path(run_dir, index)):
        old = run_dir / ASIDE / made.parent.name / made.name
        if not old.exists():
            continue
        same = read_regular(old) == read_regular(made)
        if judged and not same and not _other_rewards(old, made):
            raise EvidenceError(
                f"rollout {index}, made again, has other bits than before: {made.parent.name}/{made.name} "
                f"differs from {ASIDE}/{made.parent.name}/{made.name}"
            )
        old.unlink()
        if not same:
            _forget(run_dir)


def _other_rewards(old: Path, made: Path) -> bool:
    """Tell whether a task paid otherwise for the same responses: other bits are to be expected then."""
    if old.suffix != ".safetensors":
        return False
    before, now = tensor_file.read(old), tensor_file.read(made)
    names = [name for name in tensor_file.SCHEMA if name not in ("rewards", "advantages")]
    alike = all(before[name].tobytes() == now[name].tobytes() for name in names)
    return alike and before["rewards"].tobytes() != now["rewards"].tobytes()


def _forget(run_dir: Path) -> None:
    """Remove what is still set aside: it followed from bits that are no more."""
    for folder, suffix in _KINDS:
        for path in (run_dir / ASIDE / folder).glob(f"*{suffix}"):
            path.unlink()
