"""One experiment as a frozen, checked object: types and rules here, values in conf/."""

from __future__ import annotations

from rlsp.config.checks import SMALL_PRODUCT, violations
from rlsp.config.choices import (
    ChatUse,
    CorrectionKind,
    DeviceKind,
    Dtype,
    EngineKind,
    OptimizerKind,
    ScorerKind,
    TaskKind,
    TaskOrder,
    TokenizerKind,
    TrackerMode,
)
from rlsp.config.job import JOB_PATH, Job
from rlsp.config.plain import leaf_kinds, legal_text, to_plain, unknown_key
from rlsp.config.rules import ConfigError, Given, Violation
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
    TokenizerConfig,
    TrackerConfig,
    from_plain,
    register_schema,
)

__all__ = [
    "JOB_PATH",
    "SCHEMA_NAME",
    "SMALL_PRODUCT",
    "ChatUse",
    "Config",
    "ConfigError",
    "CorrectionKind",
    "DeviceConfig",
    "DeviceKind",
    "Dtype",
    "EngineKind",
    "Given",
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
    "TokenizerConfig",
    "TokenizerKind",
    "TrackerConfig",
    "TrackerMode",
    "Violation",
    "from_plain",
    "leaf_kinds",
    "legal_text",
    "register_schema",
    "to_plain",
    "unknown_key",
    "violations",
]
