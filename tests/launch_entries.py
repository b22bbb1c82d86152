"""Rank functions that stand in for `rlsp.run.run_rank`: each does one thing that a rank may do."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from rlsp.board import Place
from rlsp.config import Job

STEP_S = 0.02


def finish(job: Job, place: Place) -> None:
    place.board.phase("working")


def raise_at_once(job: Job, place: Place) -> None:
    raise ValueError("at once")


def chatter(job: Job, place: Place) -> None:
    """Print what looks like the host's own events, through every channel that a library has."""
    forged = json.dumps(
        {"event": "end", "rank": 0, "code": 7, "signal": None, "asked": False, "finished": False}
    )
    print(forged)
    os.write(1, f"{forged}\n".encode())
    os.write(2, b"a warning of a library\n")
    os.system(f"echo '{forged}'")  # a child inherits the descriptors
    sys.stdout.write("no newline at the end")


def rows(job: Job, place: Place) -> None:
    """Write two rows of metrics as rank 0, then wait for rank 1 to fail."""
    if place.rank == 0:
        with (Path(job.run_dir) / "metrics.jsonl").open("a") as file:
            for index in range(2):
                figures = {
                    "reward/mean": 0.25,
                    "consistency/active_tokens": 32,
                    "consistency/mismatched_tokens": 0,
                }
                file.write(json.dumps({"rollout": index, **figures}) + "\n")
        (Path(job.run_dir) / "two-rows").touch()
    else:
        _await(Path(job.run_dir) / "two-rows")
        raise RuntimeError("after two rows")
    time.sleep(60)


def raise_on_one(job: Job, place: Place) -> None:
    place.board.phase("rollout 3: scoring")
    place.board.call(17, f"world(0..1)#{17 + place.rank} gather float32[4]", bytes(16))
    if place.rank == 1:
        raise ValueError("the reward of prompt 5 is no number\nand a second line")
    time.sleep(60)


def leave_early(job: Job, place: Place) -> None:
    if place.rank == 1:
        os._exit(0)
    time.sleep(60)


def stop_self(job: Job, place: Place) -> None:
    """Hang as a process does that a debugger, or a full disk of a hypervisor, has stopped."""
    place.board.phase("rollout 0: generating")
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)


def ignore_sigterm(job: Job, place: Place) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def compute_silently(job: Job, place: Place) -> None:
    """Work for longer than any timeout without a word to the board."""
    until_s = time.monotonic() + 6.0
    while time.monotonic() < until_s:
        sum(range(10000))


def wait_for_the_end(job: Job, place: Place) -> None:
    place.board.phase("rollout 1: generating")
    (Path(job.run_dir) / f"up-{place.rank}").touch()
    time.sleep(60)


def certify_for_long(job: Job, place: Place) -> None:
    place.board.phase("certifying kernels and building the model")
    (Path(job.run_dir) / f"up-{place.rank}").touch()
    time.sleep(60)


def kill_in_collective(job: Job, place: Place) -> None:
    """Exchange with gloo until rank 1 is killed, at a time of nobody's choice."""
    for number in _exchanges(job, place, timeout_s=60.0):
        if number == 3 and place.rank == 1:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()


def ask_for_different_things(job: Job, place: Place) -> None:
    """Let rank 1 enter another collective than rank 0, which gloo leaves hanging until its timeout."""
    import torch
    import torch.distributed as dist

    for number in _exchanges(job, place, timeout_s=job.config.launch.timeout_s):
        if number == 3:
            break
    signature = "broadcast" if place.rank else "all_to_all"
    place.board.call(4, f"world(0..1)#4 {signature} float32[4]", bytes(16))
    if place.rank:
        dist.recv(torch.zeros(4), src=0, tag=9)
    else:
        dist.recv(torch.zeros(4), src=1, tag=8)


def stay_away(job: Job, place: Place) -> None:
    """Let rank 1 compute on while rank 0 waits for it in a collective."""
    for number in _exchanges(job, place, timeout_s=job.config.launch.timeout_s):
        if number == 3 and place.rank == 1:
            place.board.phase("rollout 0: scoring")
            compute_silently(job, place)
            time.sleep(60)


def meet_and_exchange(job: Job, place: Place) -> None:
    """Meet the other machines as a run does, exchange twice, and leave the shutdown to the worker."""
    import torch
    import torch.distributed as dist

    from rlsp.run import join

    join(job, place)
    both = torch.zeros(4 * place.world_size)
    for number in range(2):
        place.board.call(number, f"world(0..1)#{number} gather float32[4]", number.to_bytes(16))
        dist.all_gather_into_tensor(both, torch.full((4,), float(place.rank)))
    assert both.tolist() == [float(rank) for rank in range(place.world_size) for _ in range(4)]


def exchange_for_long(job: Job, place: Place) -> None:
    """Meet the other machines, and exchange until one of them is lost."""
    import torch
    import torch.distributed as dist

    from rlsp.run import join

    join(job, place)
    both = torch.zeros(4 * place.world_size)
    for number in range(3000):
        place.board.call(number, f"world(0..1)#{number} gather float32[4]", number.to_bytes(16))
        dist.all_gather_into_tensor(both, torch.ones(4))
        time.sleep(STEP_S)


def _exchanges(job: Job, place: Place, timeout_s: float):
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=place.init_method,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    mine, both = torch.ones(4), torch.zeros(4 * place.world_size)
    place.board.phase("rollout 0: generating")
    number = 0
    while True:
        yield number
        place.board.call(number, f"world(0..1)#{number} gather float32[4]", number.to_bytes(16))
        dist.all_gather_into_tensor(both, mine)
        number += 1


def _await(path: Path) -> None:
    while not path.exists():
        time.sleep(STEP_S)
