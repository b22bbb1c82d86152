"""Compile C with the machine's own compiler, once for each source, compiler and processor. No torch."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

COMPILERS = ("cc", "gcc", "clang")
# Value-safe, all of them: nothing is contracted or reassociated, subnormals stay. Nobody reads errno or the
# exception flags: saying so lets loops be vectorised.
FLAGS = (
    "-std=c99",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-fast-math",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
)
_LIBRARIES = ("-lm",)
_QUIETLY: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60.0}
# Of SHA-256, behind the library: a torn file that the loader would map could end the process.
_SEAL_BYTES = 32
_WRITABLE_BY_OTHERS = 0o022


class CompilerError(RuntimeError):
    """Nothing was compiled, or what was cannot be loaded; the message says why."""


def compiled(source: str, folder: Path, processor: Mapping[str, object]) -> tuple[ctypes.CDLL, str]:
    """Load the library of a C source, compiled now or earlier; many processes may do so at once.

    Args:
        source: C99.
        folder: Where libraries are kept, of this user alone; made where it is missing.
        processor: What this machine's processor is: another one may lack its instructions.

    Returns:
        The library, and the first line in which the compiler names itself.

    Raises:
        CompilerError: There is no compiler, it fails, or the folder cannot be used.
    """
    compiler, version = _compiler()
    parts = [source, FLAGS, _LIBRARIES, compiler, version, dict(processor)]
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    path = folder / f"{key}.so"
    try:
        _own(folder)
        if not _whole(path):
            _compile(compiler, source, path)
        return ctypes.CDLL(str(path)), version.partition("\n")[0]
    except (OSError, subprocess.SubprocessError) as error:
        raise CompilerError(f"{compiler}: {error}") from error


def _compiler() -> tuple[str, str]:
    """Return the first compiler that is found and answers, and what it says of itself."""
    for name in COMPILERS:
        if (path := shutil.which(name)) is None:
            continue
        try:
            said = subprocess.run([path, "--version"], check=False, **_QUIETLY)
        except (OSError, subprocess.SubprocessError):
            continue
        if said.returncode == 0:
            return path, said.stdout.strip()
    raise CompilerError(f"no C compiler: none of {', '.join(COMPILERS)} was found")


def _own(folder: Path) -> None:
    """Make the folder and refuse one that somebody else may write to: what lies in it is executed.

    Raises:
        PermissionError: It belongs to somebody else, or others may write to it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    held = folder.stat()
    if held.st_uid != os.getuid() or held.st_mode & _WRITABLE_BY_OTHERS:
        raise PermissionError(f"{folder} is not this user's alone")


def _whole(path: Path) -> bool:
    """Tell whether a library lies there as it was written."""
    try:
        held = path.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(held[:-_SEAL_BYTES]).digest() == held[-_SEAL_BYTES:]


def _compile(compiler: str, source: str, path: Path) -> None:
    """Compile aside, seal, and rename: nobody sees a part of it.

    Raises:
        CompilerError: The compiler refuses the source or a flag.
    """
    with tempfile.TemporaryDirectory(prefix="partial-", dir=path.parent) as aside:
        made = Path(aside, path.name)
        command = [compiler, *FLAGS, "-x", "c", "-", "-o", str(made), *_LIBRARIES]
        done = subprocess.run(command, input=source, check=False, **_QUIETLY)
        if done.returncode:
            raise CompilerError(
                f"{compiler} failed: {(done.stderr.strip() or 'no reason given').splitlines()[0]}"
            )
        with made.open("ab") as file:
            file.write(hashlib.sha256(made.read_bytes()).digest())
        made.replace(path)
