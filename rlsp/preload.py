"""What a rank imports: once, before ranks are forked, and without what none of them uses."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


def preload() -> None:
    """Import torch and Megatron-Core into a process that will be ranks."""
    import torch

    with _without_compiler(torch), _without_wandb():
        importlib.import_module("megatron.core.models.gpt")


@contextmanager
def _without_compiler(torch: Any) -> Iterator[None]:
    """Leave functions that `torch.compile` decorates as they are.

    Megatron-Core (0.16.1, 0.19.2) decorates its fused functions while it is imported, and loads the compiler
    for them: a quarter of the time that all imports take. rlsp's models are built with fusions off.
    """

    def compile(model: Callable[..., Any] | None = None, **_options: Any) -> Any:
        """Stand in for `torch.compile`, as a decorator with options and without."""
        return (lambda decorated: decorated) if model is None else model

    with mock.patch.object(torch, "compile", compile):
        yield


@contextmanager
def _without_wandb() -> Iterator[None]:
    """Let Megatron-Core find no wandb, which it imports in passing: ranks own no W&B run."""
    if "wandb" in sys.modules:
        yield
        return
    modules: dict[str, Any] = sys.modules
    modules["wandb"] = None  # Python's own way to refuse an import
    try:
        yield
    finally:
        del modules["wandb"]
