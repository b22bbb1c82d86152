"""The folder of a run or a sweep: taken by exactly one command, and given back when nothing came of it."""

from __future__ import annotations

import fcntl
import os
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


def take_run(run_dir: Path) -> None:
    """Take an empty folder for one run; of several commands that try at once, one succeeds.

    Raises:
        RefusalError: The folder holds something already.
        OSError: It cannot be written.
    """
    try:
        (run_dir / _LOGS).mkdir()  # made once, by whoever comes first: this is the claim
    except FileExistsError as error:
        raise RefusalError([f"run folder {run_dir}: {_LEGAL}"]) from error
    if [entry.name for entry in run_dir.iterdir()] != [_LOGS]:
        remove_empty([run_dir / _LOGS])
        raise RefusalError([f"run folder {run_dir}: {_LEGAL}"])


@contextmanager
def owned_run(run_dir: Path) -> Iterator[None]:
    """Hold a lock in a run folder while the run has an owner; the kernel gives it up with the process."""
    with ExitStack() as held:
        with suppress(OSError):  # full, or without locks: whoever asks will learn nothing
            file = held.enter_context((run_dir / _LOGS / _LOCK_NAME).open("w"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def await_owner(run_dir: Path, limit_s: float) -> bool:
    """Wait until a run has no owner any more; return whether that is so.

    Args:
        run_dir: The run folder.
        limit_s: How long to wait at most, seconds.
    """
    until_s = time.monotonic() + limit_s
    while True:
        try:
            with (run_dir / _LOGS / _LOCK_NAME).open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
        except FileNotFoundError:
            return True
        except BlockingIOError:
            if time.monotonic() > until_s:
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
    contents = {"config": cfg, "hydra": hydra, "overrides": OmegaConf.create(list(overrides))}
    try:
        folder.mkdir()
        for name, content in contents.items():
            (folder / f"{name}.yaml").write_text(OmegaConf.to_yaml(content), encoding="utf-8")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        remove_empty([run_dir / _LOGS])
        raise
