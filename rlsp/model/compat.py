"""What Megatron-Core needs told from outside, each with its reason and version."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from rlsp.groups import Group


@dataclass(frozen=True)
class LoneGroup:
    """Answer as a process group of one.

    Megatron-Core (0.16.1, 0.19.2) asks the groups that it is given for `size()` and `rank()`; a group of one
    rank never communicates and costs no process group.
    """

    def size(self) -> int:
        """Return 1."""
        return 1

    def rank(self) -> int:
        """Return 0."""
        return 0


def lone_group(group: Group | None) -> dist.ProcessGroup | LoneGroup:
    """Return the group's handle, or a stand-in where it has one rank."""
    return LoneGroup() if group is None or group.handle is None else group.handle
