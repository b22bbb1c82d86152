"""The command `rlsp` as users start it, but that its ranks live by `faults.plant`.

With `--user` before its overrides, root gives up that file permissions do not hold for it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from functools import partial

USER = "--user"
_PR_CAPBSET_DROP = 24
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 1, 2


def main() -> int:
    """Run the command line in `sys.argv` and return the exit status."""
    if sys.argv[1:2] == [USER]:
        _become_user([sys.executable, "-m", "faults.start", *sys.argv[2:]])
    # What a shell puts into the background ignores SIGINT, what nohup starts SIGHUP; both are inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    from faults.plant import ENTRY
    from rlsp import launch, node
    from rlsp.cli.main import main as command

    launch.execute = partial(launch.execute, entry=ENTRY)
    node.assist = partial(node.assist, entry=ENTRY)
    return command()


def _become_user(command: list[str]) -> None:
    for capability in (_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH):
        ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    os.execv(command[0], command)


if __name__ == "__main__":
    sys.exit(main())
