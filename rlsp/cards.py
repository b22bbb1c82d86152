"""What each machine of a run says about itself before anything is exchanged, and how two of them differ."""

from __future__ import annotations

import json
import platform
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rlsp.config import AUTO, Job, Resumption
from rlsp.config.agreed import agreed
from rlsp.report.checkpoint import DOCUMENT_NAME, Checkpoint, checkpoint_path
from rlsp.report.files import EvidenceError
from rlsp.report.manifest import MANIFEST_NAME, Manifest
from rlsp.report.provenance import loaded_source_hash

_PACKAGES = ("torch", "megatron-core", "numpy")
_SHOWN = 6


@dataclass(frozen=True)
class NodeCard:
    """What one machine says about itself.

    Attributes:
        node: Its number.
        host: Its name.
        first_rank: The first of its ranks.
        last_rank: The last of them.
        run_dir: Where its logs are.
        facts: What must be the same on all machines, by name: config, code, versions, the run in a folder
            that all of them see.
        resumed: Where the run goes on; node 0 alone says it.
    """

    node: int
    host: str
    first_rank: int
    last_rank: int
    run_dir: str
    facts: Mapping[str, Any]
    resumed: Resumption | None

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> NodeCard:
        """Read a card back from what `dataclasses.asdict` makes of it."""
        resumed = plain.get("resumed")
        return cls(**{**plain, "resumed": Resumption(**resumed) if resumed else None})

    def describe(self) -> str:
        """Name the machine."""
        return f"node {self.node} ({self.host})"


def card_of(job: Job, folder: Mapping[str, str | None]) -> NodeCard:
    """Write this machine's card.

    Args:
        job: The run, as this machine composed it.
        folder: What is said of the run folder, where all machines see it: `stated` or `seen`.
    """
    ranks = job.config.local_ranks
    facts = agreed(job.config) | dict(folder)
    named = job.config.resume not in (None, AUTO)
    facts["resume"] = job.run_id if named else job.config.resume
    facts["code"] = loaded_source_hash()[:16]
    facts["python"] = platform.python_version()
    facts |= {package: version(package) for package in _PACKAGES}
    host = socket.gethostname()
    return NodeCard(job.config.cluster.node, host, ranks[0], ranks[-1], job.run_dir, facts, job.resumed)


def stated(job: Job) -> dict[str, str | None]:
    """Say, on node 0, which run the folder holds, and from which checkpoint it goes on."""
    return _of_folder(job.run_dir, job.resumed, job.run_id, job.resumed.digest if job.resumed else None)


def seen(owner: NodeCard) -> dict[str, str | None]:
    """Read, on another machine, what node 0 says to be in its folder, or why it cannot be read."""
    folder, resumed, digest = Path(owner.run_dir), owner.resumed, None
    try:
        run_id = Manifest.read(folder / MANIFEST_NAME).run_id
    except EvidenceError as error:
        run_id = str(error)
    if resumed is not None and resumed.checkpoint is not None:
        try:
            digest = Checkpoint.read(checkpoint_path(folder, resumed.rollout) / DOCUMENT_NAME).digest()
        except EvidenceError as error:
            digest = str(error)
    return _of_folder(owner.run_dir, resumed, run_id, digest)


def differences(first: NodeCard, other: NodeCard) -> list[str]:
    """Say in one line in what a machine differs from node 0."""
    keys = sorted(first.facts.keys() | other.facts.keys())
    found = [
        f"{key} is {_shown(other.facts.get(key))}, on node 0 {_shown(first.facts.get(key))}"
        for key in keys
        if first.facts.get(key) != other.facts.get(key)
    ]
    more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return [f"{other.describe()} is not like node 0: " + ", ".join(found[:_SHOWN] + more)] if found else []


def _of_folder(
    run_dir: str, resumed: Resumption | None, run_id: str, digest: str | None
) -> dict[str, str | None]:
    facts: dict[str, str | None] = {f"the run in {run_dir}": run_id}
    if resumed is not None and resumed.checkpoint is not None:
        facts[f"the digest of checkpoint {resumed.checkpoint}"] = digest
    return facts


def _shown(value: object) -> str:
    return "absent" if value is None else json.dumps(value)
