"""The `rlsp` command in this process, with a stand-in for the launcher."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import rlsp.launch
from rlsp.cli.main import main
from rlsp.config import Job

LIGHT = "task=arithmetic"
"""What tests run in the place of the default task: no extra to install, no warm-up, less to wait for."""


def light(arguments: Sequence[str]) -> tuple[str, ...]:
    """Add the light task to the arguments of a command, unless they choose one or ask Hydra about itself."""
    chosen = any(text.startswith(("task=", "experiment=", "--hydra-help")) for text in arguments)
    return tuple(arguments) if chosen else (*arguments, LIGHT)


class Console:
    """Run the command in an empty folder with a stand-in for the launcher."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
    ) -> None:
        self._monkeypatch, self._capsys, self.folder = monkeypatch, capsys, folder
        self.jobs: list[Job] = []
        self.outcome: Callable[[Job], int] = lambda job: 0
        self.errors = ""
        monkeypatch.chdir(folder)
        monkeypatch.setattr(rlsp.launch, "execute", self._execute)

    def __call__(self, *arguments: str) -> int:
        self._monkeypatch.setattr(sys, "argv", ["rlsp", *light(arguments)])
        status = main()
        self.printed, self.errors = self._capsys.readouterr()
        assert "Traceback" not in self.errors
        return status

    def left(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*"))

    def _execute(self, job: Job) -> int:
        self.jobs.append(job)
        return self.outcome(job)


def raising(error: BaseException) -> Callable[[Job], int]:
    def outcome(job: Job) -> int:
        raise error

    return outcome
