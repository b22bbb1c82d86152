"""The harness for tests on several ranks: it must name the culprit and leave nothing behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import NotReachedError, RankError, run_checks, run_ranks


def sum_of_ranks(rank: int, n: int, offset: int) -> tuple[int, torch.Tensor]:
    total = torch.tensor([rank + offset])
    dist.all_reduce(total)
    return rank, total


def raise_on_the_last(rank: int, n: int, *_: object) -> None:
    if rank == n - 1:
        raise LookupError("only here")
    dist.barrier()


def die_on_the_last(rank: int, n: int, folder: str) -> None:
    Path(folder, str(os.getpid())).touch()
    if rank == n - 1:
        print("last words")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_on_the_last(rank: int, n: int) -> None:
    if rank == n - 1:
        time.sleep(60)


def raise_what_cannot_be_pickled(rank: int, n: int) -> None:
    class LocalError(Exception):
        pass

    raise LocalError("local")


def test_results_come_back_in_rank_order_and_quickly() -> None:
    started = time.monotonic()
    for function in (sum_of_ranks, "test_ranks.sum_of_ranks"):
        results = run_ranks(2, function, 10)
        assert [(rank, total.item()) for rank, total in results] == [(0, 21), (1, 21)]
    assert time.monotonic() - started < 6.0


def test_an_exception_comes_back_as_itself_with_its_rank_and_check() -> None:
    outcomes = run_checks(3, [sum_of_ranks, raise_on_the_last, hang_on_the_last], 10)
    assert [rank for rank, _ in outcomes["sum_of_ranks"]] == [0, 1, 2]
    with pytest.raises(LookupError, match="only here") as caught:
        outcomes["raise_on_the_last"]
    assert "on rank 2 of 3, in raise_on_the_last" in caught.value.__notes__[0]
    with pytest.raises(NotReachedError, match="raise_on_the_last failed"):
        outcomes["hang_on_the_last"]


def test_a_killed_rank_is_named_and_no_process_is_left(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 3 died by signal SIGKILL"):
        run_ranks(4, die_on_the_last, str(tmp_path))
    left = [path.name for path in tmp_path.iterdir()]
    assert len(left) == 4
    assert not any(Path("/proc", pid).exists() for pid in left)


def test_a_rank_that_hangs_shows_its_stack() -> None:
    with pytest.raises(TimeoutError, match="1 in hang_on_the_last") as caught:
        run_ranks(2, hang_on_the_last, timeout_s=2.0)
    assert any("in hang_on_the_last" in note for note in caught.value.__notes__)


def test_an_exception_that_cannot_be_pickled_comes_back_as_text() -> None:
    with pytest.raises(RankError, match="LocalError: local"):
        run_ranks(1, raise_what_cannot_be_pickled)
