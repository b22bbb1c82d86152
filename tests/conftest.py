"""What all tests share: shapes checked at run time, reproducible properties, composed configs."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
from hydra._internal.utils import get_args_parser
from hypothesis import settings
from jaxtyping import install_import_hook

# Before anything of rlsp is imported: every annotated shape of these packages is checked at each call.
install_import_hook(("rlsp.rl", "rlsp.bits", "rlsp.numerics"), "beartype.beartype")

from command import Console, light  # noqa: E402

from rlsp.cli.compose import Composer, checked, open_composer  # noqa: E402
from rlsp.config import Config  # noqa: E402

settings.register_profile("rlsp", deadline=None, derandomize=True)
settings.load_profile("rlsp")


@pytest.fixture(scope="module")
def sealed_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sealed run folder, which no test may change."""
    from report_fixtures import write_run

    from rlsp.report.findings import Verdict
    from rlsp.report.verdict import seal

    run_dir = write_run(tmp_path_factory.mktemp("sealed") / "run")
    assert seal(run_dir).verdict is Verdict.PASS
    return run_dir


@pytest.fixture
def sealed(sealed_once: Path, tmp_path: Path) -> Path:
    """A copy of it to change."""
    return Path(shutil.copytree(sealed_once, tmp_path / "run"))


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Compute as ranks do, with the contract's one thread: more may change bits, and wait for each other."""
    torch.set_num_threads(1)


@contextmanager
def composer() -> Iterator[Composer]:
    """Open Hydra as the command line without options does."""
    with open_composer(get_args_parser().parse_args([])) as opened:
        yield opened


@pytest.fixture(scope="session")
def compose() -> Callable[..., Config]:
    """Compose and check a config from overrides, as the command line would; configs are frozen, so shared.

    Without a task or an experiment among them the task is the light one (`command.LIGHT`).
    """

    @cache
    def composed(*overrides: str) -> Config:
        with composer() as opened:
            return checked(opened.compose(light(overrides)))

    return composed


@pytest.fixture
def rlsp_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Console]:
    handlers, level = list(logging.root.handlers), logging.root.level
    yield Console(monkeypatch, capsys, tmp_path)
    # Hydra leaves a handler on the stream that ends with this test.
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
