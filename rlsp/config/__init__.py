"""One experiment as a frozen, checked object: types and rules here, values in conf/."""

from __future__ import annotations

from rlsp.config.checks import SMALL_PRODUCT, violations
from rlsp.config.choices import (
    CorrectionKind,
    DeviceKind,
    Dtype,
    EngineKind,
    OptimizerKind,
    ScorerKind,
    TaskKind,
    TaskOrder,
    TrackerMode,
)
from rlsp.config.job import JOB_PATH, Job
from rlsp.config.plain import leaf_kinds, legal_text, to_plain, unknown_key
from rlsp.config.rules import ConfigError, Violation
from rlsp.config.schema import (
    SCHEMA_NAME,
    Config,
    DeviceConfig,
    LaunchConfig,
    ModelConfig,
    NumericsConfig,
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
    RoutesConfig,
    TaskConfig,
    TrackerConfig,
    WarmupConfig,
    from_plain,
    register_schema,
)

__all__ = [
    "JOB_PATH",
    "SCHEMA_NAME",
    "SMALL_PRODUCT",
    "Config",
    "ConfigError",
    "CorrectionKind",
    "DeviceConfig",
    "DeviceKind",
    "Dtype",
    "EngineKind",
    "Job",
    "LaunchConfig",
    "ModelConfig",
    "NumericsConfig",
    "OptimizerConfig",
    "OptimizerKind",
    "ParallelConfig",
    "RolloutConfig",
    "RoutesConfig",
    "ScorerKind",
    "TaskConfig",
    "TaskKind",
    "TaskOrder",
    "TrackerConfig",
    "TrackerMode",
    "Violation",
    "WarmupConfig",
    "from_plain",
    "leaf_kinds",
    "legal_text",
    "register_schema",
    "to_plain",
    "unknown_key",
    "violations",
]
