"""The folder of a run or a sweep: taken by exactly one command, and given back when nothing came of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlsp.cli.refusal import RefusalError

HYDRA_NAME = ".hydra"
SWEEP_RECORD = "multirun.yaml"
_LOGS = "logs"
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


@contextmanager
def taken_run(run_dir: Path) -> Iterator[None]:
    """Take an empty folder for one run; of several commands that try at once, one succeeds.

    What the block wrote into .hydra/ goes again if it raises.

    Raises:
        RefusalError: The folder holds something already.
    """
    try:
        (run_dir / _LOGS).mkdir()  # made once, by whoever comes first: this is the claim
    except FileExistsError as error:
        raise RefusalError([f"run folder {run_dir}: {_LEGAL}"]) from error
    if [entry.name for entry in run_dir.iterdir()] != [_LOGS]:
        remove_empty([run_dir / _LOGS])
        raise RefusalError([f"run folder {run_dir}: {_LEGAL}"])
    try:
        yield
    except BaseException:
        shutil.rmtree(run_dir / HYDRA_NAME, ignore_errors=True)
        remove_empty([run_dir / _LOGS])
        raise


@contextmanager
def taken_sweep(sweep_dir: Path) -> Iterator[None]:
    """Take an empty folder for one sweep; of several commands that try at once, one succeeds.

    If no job leaves anything there, the sweep's record goes again.

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
        if [entry.name for entry in sweep_dir.iterdir()] == [SWEEP_RECORD]:
            record.unlink()


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
    """Write what was composed into a run folder's .hydra/, which is this command's own to fill."""
    folder = run_dir / HYDRA_NAME
    folder.mkdir()
    for name, content in (
        ("config", cfg),
        ("hydra", hydra),
        ("overrides", OmegaConf.create(list(overrides))),
    ):
        (folder / f"{name}.yaml").write_text(OmegaConf.to_yaml(content), encoding="utf-8")
