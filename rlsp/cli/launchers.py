"""Hydra's launchers: which ones run jobs on this machine, and the jobs of those that give up too early."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from hydra.core.utils import JobReturn

_PLUGINS = "hydra_plugins.hydra_{0}_launcher.{0}_launcher.{1}".format
_BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
_LOCAL = _PLUGINS("submitit", "LocalLauncher")
_SUBMITIT = frozenset({_LOCAL, _PLUGINS("submitit", "SlurmLauncher")})
JOBLIB = _PLUGINS("joblib", "JoblibLauncher")
HERE = frozenset({_BASIC, JOBLIB, _LOCAL})
"""Launchers whose jobs run on this machine."""


class Submitted:
    """The jobs that submitit has started, in order."""

    def __init__(self) -> None:
        """Start without any."""
        self.jobs: list[Any] = []

    def returned(self) -> list[JobReturn]:
        """Wait until every job has ended, and return what came back from those that could say it."""
        found = []
        for job in self.jobs:
            with suppress(Exception):  # killed, or out of time: its folder says the rest
                found.append(job.results()[0])
        return found


@contextmanager
def noted_submissions(launcher: str) -> Iterator[Submitted]:
    """Note the jobs that submitit starts (1.5): its plugin drops the others once one fails.

    Args:
        launcher: Hydra's `_target_`; nothing is noted for one that does not use submitit.
    """
    noted = Submitted()
    if launcher not in _SUBMITIT:
        yield noted
        return
    from submitit import Executor

    patched: Any = Executor
    original = patched.map_array

    def map_array(executor: Any, *arguments: Any) -> Any:
        jobs = original(executor, *arguments)
        noted.jobs += jobs
        return jobs

    patched.map_array = map_array
    try:
        yield noted
    finally:
        patched.map_array = original
