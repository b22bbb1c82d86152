"""What code ran, on what machine, with which packages."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

from rlsp.report.documents import Document
from rlsp.report.files import sha256_file

_PACKAGE = Path(__file__).resolve().parents[1]
_SOURCE_SUFFIXES = frozenset({".py", ".yaml", ".c"})
_GIT_TIMEOUT_S = 30.0
# The vector units that choose a kernel; the other hundred flags say nothing about bits.
_CPU_FLAGS = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_tile",
    "amx_bf16",
    "asimd",
    "sve",
    "bf16",
)
UNKNOWN = "unknown"


class CodeRevision(Document):
    """Which code ran. Without a git checkout (a wheel) the revision is unknown and only `source_hash` tells.

    `dirty_diff_hash` hashes the uncommitted changes, untracked files included; None for a clean or unknown
    tree.
    """

    revision: str
    dirty: bool | None
    dirty_diff_hash: str | None
    source_hash: str


class Hardware(Document):
    """The machine of the composing process; no host name, as manifests are published."""

    system: str
    kernel: str
    machine: str
    cpu: str
    cpu_flags: tuple[str, ...]
    cpus_available: int
    memory_bytes: int


def code_revision(package: Path = _PACKAGE) -> CodeRevision:
    """Identify the code in `package`."""
    hashed = source_hash(package)
    # A package folder that git does not track may still lie inside somebody's repository: .venv/ does.
    root = _git(package, "rev-parse", "--show-toplevel")
    tracked = _git(package, "ls-files", "--error-unmatch", "__init__.py")
    revision = _git(package, "rev-parse", "--verify", "HEAD")
    if root is None or tracked is None or revision is None:
        return CodeRevision(revision=UNKNOWN, dirty=None, dirty_diff_hash=None, source_hash=hashed)
    changes = _uncommitted(Path(root.decode().strip()))
    return CodeRevision(
        revision=revision.decode().strip(),
        dirty=changes is not None,
        dirty_diff_hash=changes,
        source_hash=hashed,
    )


def source_hash(package: Path = _PACKAGE) -> str:
    """Hash the package's own Python, C and YAML files by path and content; ranks compare it."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.suffix in _SOURCE_SUFFIXES and path.is_file():
            digest.update(f"{path.relative_to(package).as_posix()}\0{sha256_file(path.resolve())}\n".encode())
    return digest.hexdigest()


@cache
def loaded_source_hash() -> str:
    """Hash the package's files as they were when this process asked first; its forks have the answer."""
    return source_hash()


@cache
def package_versions() -> Mapping[str, str]:
    """List every installed distribution with its version."""
    every = (dist.metadata for dist in metadata.distributions())  # each access parses the file anew
    versions = {about["Name"]: about["Version"] for about in every if about["Name"]}
    return dict(sorted(versions.items(), key=lambda item: item[0].lower()))


def hardware() -> Hardware:
    """Describe this machine."""
    info = _text(Path("/proc/cpuinfo"))
    flags = set((_field(info, "flags") or _field(info, "Features") or "").split())
    return Hardware(
        system=platform.system(),
        kernel=platform.release(),
        machine=platform.machine(),
        cpu=_field(info, "model name") or platform.processor() or UNKNOWN,
        cpu_flags=tuple(flag for flag in _CPU_FLAGS if flag in flags),
        cpus_available=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )


def _uncommitted(root: Path) -> str | None:
    """Hash the difference between the work tree and HEAD; None if there is none."""
    difference = _git(root, "diff", "--binary", "--no-ext-diff", "HEAD") or b""
    untracked = (_git(root, "ls-files", "--others", "--exclude-standard", "-z") or b"").split(b"\0")
    digest, dirty = hashlib.sha256(difference), bool(difference)
    for name in sorted(filter(None, untracked)):
        digest.update(name + b"\0" + _untracked(root / os.fsdecode(name)) + b"\n")
        dirty = True
    return digest.hexdigest() if dirty else None


def _untracked(path: Path) -> bytes:
    """Identify what lies in the work tree: a link by where it leads, as git does; the unreadable by that.

    Whatever lies there, a run does not end over it.
    """
    try:
        return os.fsencode(path.readlink()) if path.is_symlink() else sha256_file(path).encode()
    except OSError as error:
        return str(error.strerror).encode()


def _git(folder: Path, *arguments: str) -> bytes | None:
    """Run git in `folder`; None where there is no git, no repository, or no answer."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, timeout=_GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _field(info: str, name: str) -> str | None:
    """Return the first value of a field of /proc/cpuinfo."""
    found = re.search(rf"^{name}\s*:\s*(.*)$", info, re.MULTILINE)
    return found.group(1).strip() if found else None
