"""What a person sees of a run says what it did, on a terminal and elsewhere."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from launch_owner import RUN_ID, job_of_two_ranks
from rich.console import Console

from rlsp import progress
from rlsp.board import Slot
from rlsp.config import Config, Job
from rlsp.report.consistency import total
from rlsp.report.gates import Verdict
from rlsp.report.verdict import Judgement

ROW = {
    "rollout": 1,
    "consistency/active_tokens": 4096,
    "consistency/mismatched_tokens": 2,
    "reward/mean": 0.123456,
    "train/gradient_norm": "NaN",
}


@pytest.fixture
def job(compose: Callable[..., Config], tmp_path: Path) -> Job:
    return job_of_two_ranks(compose, tmp_path / RUN_ID, "num_rollouts=3")


def shown(job: Job, *, terminal: bool) -> str:
    text = io.StringIO()
    with progress.open_display(job, Console(file=text, force_terminal=terminal, width=80)) as display:
        display.tick([Slot(0, "rollout 1: generating [not markup]"), Slot(1)])
        display.row(ROW)
        display.tick([Slot(0, "shutting down"), Slot(1)])
    return text.getvalue()


def test_elsewhere_than_on_a_terminal_every_rollout_is_one_plain_line(job: Job) -> None:
    assert shown(job, terminal=False) == (
        "rollout 2/3: 2 of 4096 tokens mismatched, reward 0.1235, gradient norm NaN\n"
    )


def test_a_terminal_shows_phase_and_count_and_keeps_the_lines(job: Job) -> None:
    text = shown(job, terminal=True)
    assert "rollout 1: generating [not markup]" in text
    assert "2/3" in text
    assert "2 of 4096 tokens mismatched" in text


def test_nothing_is_shown_where_progress_is_off(compose: Callable[..., Config], tmp_path: Path) -> None:
    job = job_of_two_ranks(compose, tmp_path / RUN_ID, "launch.progress=false")
    assert shown(job, terminal=True) == ""


def test_the_summary_names_verdict_reasons_tokens_and_folder(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judgement = Judgement(Verdict.ABORTED, ("aborted: rank 1 was killed", "counts: no row"), ())
    monkeypatch.chdir(tmp_path)
    lines = progress.summary(job, judgement, None, ["rank  end", "0     x"]).plain.splitlines()
    assert lines == [
        f"ABORTED  default  {RUN_ID}",
        "  aborted: rank 1 was killed",
        "  rank  end",
        "  0     x",
        "  no rollout was recorded",
        f"  folder: {RUN_ID}",
    ]
    lines = progress.summary(job, Judgement(Verdict.PASS, (), ()), total(()), []).plain.splitlines()
    assert lines[1] == "  0 of 3 rollouts: 0 active tokens, 0 mismatched; 0 rows mismatched"
