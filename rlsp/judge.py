"""The process in which foreign rewards are computed: `python -m rlsp.judge`, told what to build on its stdin.

It is started by rank 0 alone, knows nothing of the other ranks, and dies with the rank. What it prints goes
to the rank's log.
"""

from __future__ import annotations

import json
import sys
import traceback

from rlsp.config import from_plain
from rlsp.host import die_with_parent
from rlsp.rl.apart import answering
from rlsp.rl.reward import NoRewardError, faulty, serve
from rlsp.task import open_task


def main() -> int:
    """Build the task and answer until stdin ends."""
    reply = answering()
    opening = json.loads(sys.stdin.readline())
    die_with_parent(opening["parent"])
    try:
        _, task = open_task(from_plain(opening["config"]))
        task.prompt(0)  # what it imports late must not take time from the first reward
    except Exception as error:
        traceback.print_exc()
        fault = NoRewardError(
            f"the process of the reward function cannot build the task: {type(error).__name__}: {error}"
        )
        fault.__cause__ = error
        reply(json.dumps(faulty(fault)))
        return 1
    serve(task, sys.stdin, reply)
    return 0


if __name__ == "__main__":
    sys.exit(main())
