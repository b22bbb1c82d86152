"""The folder of a run or a sweep: taken by exactly one command, and given back when nothing came of it."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlsp.cli.refusal import RefusalError

HYDRA_NAME = ".hydra"
SWEEP_RECORD = "multirun.yaml"
LAUNCHER_NAME = ".submitit"
_LOGS = "logs"
_LOCK_NAME = "owner.lock"
_CLAIM = ".claim-"
_TICK_S = 0.1
_LEGAL = "legal: a folder that is absent or empty"


def folder_of(cfg: DictConfig, key: str) -> Path:
    """Return the absolute path that a key names.

    Raises:
        RefusalError: The key is empty, missing or leads nowhere.
    """
    try:
        text = OmegaConf.select(cfg, key, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise RefusalError([f"{key}: {str(error).splitlines()[0]}"]) from error
    if not text:
        shown = "null" if text is None else "''"
        raise RefusalError([f"{key}={shown}: {_LEGAL}"])
    if "${" in str(text):  # Hydra would take it for a reference, later on
        raise RefusalError([f"{key}={text}: legal: a path without ${{"])
    return Path(os.path.abspath(str(text)))


def of_node(folder: Path, node: int) -> Path:
    """Return the folder of a machine: beside that of the run, which node 0 owns, as disks may be shared."""
    return folder.with_name(f"{folder.name}.node-{node}") if node else folder


def pinned(key: str, folder: Path) -> str:
    """Write the override that fixes a folder, whatever the config would make of it a second later."""
    return f"{key}={QuotedString(str(folder), Quote.single).with_quotes()}"


@contextmanager
def made(folder: Path) -> Iterator[None]:
    """Make a folder that must be absent or empty; give back what was made if it is left empty.

    Raises:
        RefusalError: It holds something, or cannot be made.
    """
    new: list[Path] = []
    try:
        with refusing(folder):
            require_free(folder)
            for path in reversed((folder, *folder.parents)):
                with suppress(FileExistsError):
                    path.mkdir()
                    new.insert(0, path)
        yield
    finally:
        remove_empty(new)


def require_free(folder: Path) -> None:
    """Refuse a folder that holds anything: a run never mixes with another.

    Raises:
        RefusalError: It does, or it is no folder.
        OSError: It cannot be read.
    """
    if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise RefusalError([f"run folder {folder}: {_LEGAL}"])


@contextmanager
def taken_run(run_dir: Path) -> Iterator[None]:
    """Take an empty folder for one run, and hold its lock; the kernel gives that up with the process.

    Of several commands that try at once, one succeeds. The lock is held before anybody can see that the
    folder is taken: a run that is just starting is never mistaken for one whose owner is gone.

    Raises:
        RefusalError: The folder holds something already.
        OSError: It cannot be written.
    """
    claim = run_dir / f"{_CLAIM}{secrets.token_hex(8)}"
    with ExitStack() as held:
        claim.mkdir()
        try:
            file = held.enter_context((claim / _LOCK_NAME).open("w"))
            with suppress(OSError):  # without locks: whoever asks will learn nothing
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                claim.rename(run_dir / _LOGS)  # what holds a lock already is not replaced
            except OSError as error:
                if not is_taken(run_dir):
                    raise
                raise RefusalError([f"run folder {run_dir}: {_LEGAL}"]) from error
        except BaseException:
            shutil.rmtree(claim, ignore_errors=True)
            raise
        if {entry.name for entry in run_dir.iterdir() if not entry.name.startswith(_CLAIM)} != {_LOGS}:
            _give_back(run_dir)
            raise RefusalError([f"run folder {run_dir}: {_LEGAL}"])
        yield


@contextmanager
def retaken_run(run_dir: Path) -> Iterator[None]:
    """Hold the lock of a run that is to go on.

    Raises:
        RefusalError: Another command holds it: the run has not ended.
        OSError: The folder cannot be written.
    """
    (run_dir / _LOGS).mkdir(parents=True, exist_ok=True)
    with (run_dir / _LOGS / _LOCK_NAME).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RefusalError([f"run folder {run_dir}: the run is still going on"]) from error
        except OSError:  # without locks: whoever asks will learn nothing
            pass
        yield


def is_taken(run_dir: Path) -> bool:
    """Tell whether a command has taken a folder for a run."""
    return os.path.lexists(run_dir / _LOGS)


def is_only_taken(run_dir: Path) -> bool:
    """Tell whether a folder was taken, and whoever took it ended before there was a run."""
    if not (run_dir / _LOGS / _LOCK_NAME).is_file():
        return False
    return {entry.name for entry in run_dir.iterdir()} <= {_LOGS, HYDRA_NAME}


def _give_back(run_dir: Path) -> None:
    """Leave a folder that was taken as it was found."""
    (run_dir / _LOGS / _LOCK_NAME).unlink(missing_ok=True)
    remove_empty([run_dir / _LOGS])


def await_owner(run_dir: Path, limit_s: float | None) -> bool:
    """Wait until a run has no owner any more; return whether that is so.

    Args:
        run_dir: The run folder.
        limit_s: How long to wait at most, seconds; None: as long as it takes.
    """
    until_s = None if limit_s is None else time.monotonic() + limit_s
    while True:
        try:
            with (run_dir / _LOGS / _LOCK_NAME).open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
        except FileNotFoundError:
            return True
        except BlockingIOError:
            if until_s is not None and time.monotonic() > until_s:
                return False
            time.sleep(_TICK_S)
        except OSError:
            return False


@contextmanager
def taken_sweep(sweep_dir: Path) -> Iterator[None]:
    """Take an empty folder for one sweep; of several commands that try at once, one succeeds.

    If no job leaves anything there, the sweep's record goes again, and what its launcher noted for itself.

    Raises:
        RefusalError: The folder holds something already.
    """
    record = sweep_dir / SWEEP_RECORD
    try:
        record.open("x").close()
    except FileExistsError as error:
        raise RefusalError([f"sweep folder {sweep_dir}: {_LEGAL}"]) from error
    try:
        if len(list(sweep_dir.iterdir())) > 1:
            raise RefusalError([f"sweep folder {sweep_dir}: {_LEGAL}"])
        yield
    finally:
        if {entry.name for entry in sweep_dir.iterdir()} <= {SWEEP_RECORD, LAUNCHER_NAME}:
            shutil.rmtree(sweep_dir / LAUNCHER_NAME, ignore_errors=True)
            record.unlink(missing_ok=True)


@contextmanager
def refusing(folder: Path) -> Iterator[None]:
    """Turn what the system has against a folder into a refusal."""
    try:
        yield
    except OSError as error:
        raise RefusalError([f"folder {folder}: cannot be written: {error.strerror or error}"]) from error


def prune(folder: Path, top: Path) -> None:
    """Remove a folder below `top` and its parents up to there, as far as they are empty."""
    if folder != top and folder.is_relative_to(top):
        remove_empty([folder, *(path for path in folder.parents if path != top and path.is_relative_to(top))])


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove those of some folders that are empty, in this order."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def write_record(run_dir: Path, cfg: DictConfig, hydra: DictConfig, overrides: Sequence[str]) -> None:
    """Write what was composed into the .hydra/ of a folder that was taken, or give the folder back.

    Raises:
        OSError: The folder cannot be written.
    """
    folder = run_dir / HYDRA_NAME
    try:
        folder.mkdir()
        rewrite_record(run_dir, cfg, hydra, overrides)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        _give_back(run_dir)
        raise


def rewrite_record(run_dir: Path, cfg: DictConfig, hydra: DictConfig, overrides: Sequence[str]) -> None:
    """Write what was composed last into the .hydra/ of a run.

    Raises:
        OSError: The folder cannot be written.
    """
    (run_dir / HYDRA_NAME).mkdir(exist_ok=True)
    contents = {"config": cfg, "hydra": hydra, "overrides": OmegaConf.create(list(overrides))}
    for name, content in contents.items():
        (run_dir / HYDRA_NAME / f"{name}.yaml").write_text(OmegaConf.to_yaml(content), encoding="utf-8")
