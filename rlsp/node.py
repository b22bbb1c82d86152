"""A machine that helps in a run which node 0 owns: its ranks and their logs, and no evidence. No torch."""

from __future__ import annotations

import sys
from pathlib import Path

from rlsp.config import Job
from rlsp.launch import compute
from rlsp.report.statuses import CRASHED, PASSED
from rlsp.worker import RUN_RANK


def assist(job: Job, entry: str = RUN_RANK) -> int:
    """Run this machine's ranks of a run that node 0 owns.

    Args:
        job: The run, as this machine composed it; its folder takes the logs.
        entry: The function that each rank runs, as module:function.

    Returns:
        0 where every rank did its work, whatever the verdict, which node 0 has; 1 where one did not.

    Raises:
        KeyboardInterrupt: SIGINT, SIGTERM or SIGHUP came; no rank is left here, and node 0 aborts the run,
            saved where there was time for it.
    """
    cluster, ranks = job.config.cluster, job.config.local_ranks
    here = f"node {cluster.node} of {cluster.nodes}, ranks {ranks[0]} to {ranks[-1]}"
    print(f"{here}: the run is owned by node 0 at {cluster.host}:{cluster.port}", flush=True)
    abort = compute(job, entry, lambda text: print(f"{here}: {text}", flush=True))
    if abort is not None:
        lines = [f"{here}: {abort.reason}", *abort.lines]
        (Path(job.run_dir) / "logs" / "abort.txt").write_text("\n".join([*lines, ""]))
        print("\n  ".join([*lines, f"folder: {job.run_dir}"]), file=sys.stderr)
        return CRASHED
    print(f"{here}: all ranks did their work; the verdict is on node 0\n  folder: {job.run_dir}")
    return PASSED
