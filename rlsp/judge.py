"""The process in which foreign rewards are computed: `python -m rlsp.judge`, told what to build on its stdin.

It is started by rank 0 alone, knows nothing of the other ranks, and dies with the rank. What it prints goes
to the rank's log.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import traceback

from rlsp.config import from_plain
from rlsp.host import die_with_parent
from rlsp.rl.reward import NoRewardError, faulty, serve
from rlsp.task import open_task


def main() -> int:
    """Build the task and answer until stdin ends."""
    protocol = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    faulthandler.register(signal.SIGUSR1)

    def reply(line: str) -> None:
        data = f"{line}\n".encode()
        while data:
            data = data[os.write(protocol, data) :]

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
