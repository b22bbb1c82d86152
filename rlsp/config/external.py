"""What is legal with an external engine, and what only with one."""

from __future__ import annotations

from rlsp.config.choices import DeviceKind, EngineKind
from rlsp.config.cross import CrossRule, divisors
from rlsp.config.schema import Config

VLLM_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes for which vLLM 0.32 has attention on a processor (its backend CPU_ATTN)."""

OWN_OPTIONS = frozenset(
    {
        "disable_log_stats",
        "distributed_executor_backend",
        "dtype",
        "enable_prefix_caching",
        "generation_config",
        "kv_cache_memory_bytes",
        "load_format",
        "logprobs_mode",
        "model",
        "seed",
        "skip_tokenizer_init",
        "tensor_parallel_size",
        "tokenizer",
        "worker_extension_cls",
    }
)
"""Options of vLLM that rlsp sets itself: each has another key, or the evidence rests on it."""

_NATIVE_HAS_NONE = "null (rollout.engine=native has none)"


def _external_key(name: str, what: str) -> CrossRule:
    """Tie a key that may be null to external engines: they need it, rlsp's own has none."""

    def holds(config: Config) -> bool:
        return (getattr(config.rollout, name) is not None) == config.rollout.external

    def legal(config: Config) -> str:
        engine = config.rollout.engine.name
        return f"{what} (for rollout.engine={engine})" if config.rollout.external else _NATIVE_HAS_NONE

    return CrossRule((f"rollout.{name}", "rollout.engine"), holds, legal)


def _one_route(operator: str) -> CrossRule:
    """Refuse a route of the rollout where the rollout is not rlsp's."""
    return CrossRule(
        (f"numerics.routes.{operator}", "rollout.engine"),
        lambda c: not c.rollout.external or "/" not in getattr(c.numerics.routes, operator),
        lambda c: f"strict or native: training's (rollout.engine={c.rollout.engine.name} has its own)",
    )


def _vllm_on_cpu(config: Config) -> bool:
    return config.rollout.engine is EngineKind.vllm and config.device.kind is DeviceKind.cpu


ENGINE_RULES = (
    CrossRule(
        ("rollout.engines", "rollout.engine"),
        lambda c: not c.rollout.external or c.rollout.engines in (None, 1),
        lambda c: f"1 or null (rollout.engine={c.rollout.engine.name} is one engine)",
    ),
    CrossRule(
        ("rollout.tp", "rollout.engine", "model.num_attention_heads"),
        lambda c: not c.rollout.external or c.model.num_attention_heads % c.rollout.tp == 0,
        lambda c: f"{divisors(c.model.num_attention_heads)} (divisors of model.num_attention_heads)",
    ),
    _external_key("timeout_s", "seconds in 1..86400"),
    _external_key("kv_cache_gib", "GiB in 0.01..4096"),
    CrossRule(
        ("rollout.options", "rollout.engine"),
        lambda c: c.rollout.external or not c.rollout.options,
        lambda _: "{} (rollout.engine=native has none)",
    ),
    CrossRule(
        ("rollout.options", "rollout.engine"),
        lambda c: OWN_OPTIONS.isdisjoint(c.rollout.options),
        lambda c: f"without {', '.join(sorted(OWN_OPTIONS & c.rollout.options.keys()))}: rlsp sets it",
    ),
    CrossRule(
        ("model.head_dim", "rollout.engine", "device.kind"),
        lambda c: not _vllm_on_cpu(c) or c.model.head_dim in VLLM_HEADS,
        lambda _: f"{', '.join(map(str, VLLM_HEADS))} (for rollout.engine=vllm on a processor)",
    ),
    CrossRule(
        ("temperature", "rollout.engine"),
        lambda c: c.rollout.engine is not EngineKind.vllm or 0.01 <= c.temperature <= 2,
        lambda _: "a number in 0.01..2 (rollout.engine=vllm takes no other)",
    ),
    CrossRule(
        ("diagnose", "rollout.engine"),
        lambda c: not c.rollout.external or not c.diagnose,
        lambda c: f"false (nobody sees into rollout.engine={c.rollout.engine.name})",
    ),
    *map(_one_route, ("attention", "ffn", "logp")),
)
