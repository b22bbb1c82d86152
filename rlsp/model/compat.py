"""What Megatron-Core needs told from outside, each with its reason and version."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import layers

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


@contextmanager
def native_layers(device: torch.device) -> Iterator[None]:
    """Let Megatron-Core's own linear layers and reductions run on `device`; undone at the end.

    They (0.16.1, 0.19.2) allocate on `torch.cuda.current_device()`, also where the tensors lie on the CPU;
    take sequence parallelism's buffer from a global that only `initialize_model_parallel` makes; advise about
    a CUDA environment variable that concerns overlap alone; and call functions that newer torch deprecates.
    """
    linear: Any = layers.linear_with_grad_accumulation_and_async_allreduce
    warned, current_device = linear.warned, torch.cuda.current_device
    own_buffer = parallel_state._GLOBAL_MEMORY_BUFFER is None
    if own_buffer:
        parallel_state._set_global_memory_buffer()
    linear.warned = True
    if device.type == "cpu":
        torch.cuda.current_device = lambda: device  # type: ignore[assignment, return-value]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r".*torch\.distributed\..* is deprecated")
            yield
    finally:
        linear.warned, torch.cuda.current_device = warned, current_device
        if own_buffer:
            parallel_state.destroy_global_memory_buffer()
