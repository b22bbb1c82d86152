"""What the composing process hands to the ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass

from rlsp.config.plain import read_plain, to_plain
from rlsp.config.schema import Config

JOB_PATH = ".hydra/job.json"
"""Where a run folder keeps its job."""


@dataclass(frozen=True)
class Resumption:
    """Where a job goes on in a run folder that has evidence already.

    Attributes:
        rollout: The first rollout to come; what the folder had of it and of later ones is made again.
        checkpoint: Name of the checkpoint to start from; None where a run begins again at rollout 0.
        digest: What that checkpoint's document must have as its digest.
    """

    rollout: int
    checkpoint: str | None
    digest: str | None


@dataclass(frozen=True)
class Job:
    """One run to be executed.

    Attributes:
        config: The checked config.
        run_id: `<UTC yyyymmdd-hhmmss>-<6 hex>`; names folder, W&B run and manifest.
        run_dir: Absolute path of the run folder.
        overrides: What the user asked for on top of conf/, as typed.
        command_line: The whole command.
        started_at: UTC, ISO 8601.
        resumed: Where it goes on; None for a run from its start in a fresh folder.
        owner_dir: On another machine than node 0, the run folder that node 0 owns, where this machine sees
            it; None where that is `run_dir`, or cannot be seen.
    """

    config: Config
    run_id: str
    run_dir: str
    overrides: tuple[str, ...]
    command_line: tuple[str, ...]
    started_at: str
    resumed: Resumption | None = None
    owner_dir: str | None = None

    @property
    def saved_dir(self) -> str:
        """Return the run folder in which checkpoints lie."""
        return self.owner_dir or self.run_dir

    @property
    def first_rollout(self) -> int:
        """Return the first rollout to come."""
        return self.resumed.rollout if self.resumed else 0

    def to_json(self) -> str:
        """Write the job as JSON text that `from_json` reads back equal."""
        return json.dumps(to_plain(self), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Read a job back.

        Raises:
            ConfigError: A key is unknown or missing, or a value has the wrong type; all of them are listed.
        """
        return read_plain(cls, json.loads(text))
