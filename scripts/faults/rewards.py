"""A task whose reward function goes wrong while a file beside the run folder says so: `task.factory`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from faults.command import MARK
from rlsp.rl.task import Prompt, Tokenizer
from rlsp.rl.task.protocol import hash_content

FACTORY = "faults.rewards:spoilt"
GIVEN = ("task=custom", f"task.factory={FACTORY}", "task.timeout_s=2")
_BAD_FROM = 4  # the first prompt of rollout 2


def reward_path(run_dir: Path) -> Path:
    """Return the file that says how the rewards of a run go wrong."""
    return run_dir.with_name(f"{run_dir.name}.reward")


@dataclass(frozen=True)
class Spoilt:
    """Reward by the sum of the tokens, as long as nothing is wrong."""

    tokenizer: Tokenizer
    seed: int

    @property
    def name(self) -> str:
        """Name the task."""
        return "spoilt"

    @property
    def content_hash(self) -> str:
        """Hash what prompts and rewards depend on while nothing is wrong."""
        return hash_content({"generator": self.name, "tokenizer": self.tokenizer.content_hash})

    def prompt(self, index: int) -> Prompt:
        """Ask the same every time."""
        return Prompt(tokens=self.tokenizer.encode("go"), text="go")

    def reward(self, index: int, response: Sequence[int]) -> float:
        """Score a response."""
        path = reward_path(Path(os.environ[MARK]))
        how = path.read_text() if index >= _BAD_FROM and path.exists() else ""
        if how == "raises":
            raise KeyError("planted")
        if how == "hangs":
            time.sleep(600)
        return float("nan") if how == "nan" else float(sum(response) % 7)


def spoilt(tokenizer: Tokenizer, seed: int) -> Spoilt:
    """Make the task."""
    return Spoilt(tokenizer, seed)
