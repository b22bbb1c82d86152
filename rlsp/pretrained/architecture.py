"""Between transformers' config.json and a model's shape: what is carried over, and every reason to refuse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlsp.config import ModelConfig

_QWEN3, _LLAMA = "Qwen3ForCausalLM", "LlamaForCausalLM"
_CARRIED_ROPE = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


class PretrainedError(ValueError):
    """Refuse weights on disk; `lines` says everything that is wrong with them."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("; ".join(lines))
        self.lines = tuple(lines)


@dataclass(frozen=True)
class _Key:
    """A field of config.json, and transformers' value where it is absent (None: there must be one)."""

    name: str
    default: dict[str, Any] | None = None


# ModelConfig's field by config.json's. Defaults: transformers 5, LlamaConfig and Qwen3Config.
_SHAPE = {
    "num_layers": _Key("num_hidden_layers"),
    "hidden_size": _Key("hidden_size"),
    "num_attention_heads": _Key("num_attention_heads"),
    "num_query_groups": _Key("num_key_value_heads", {_LLAMA: None, _QWEN3: 32}),
    "head_dim": _Key("head_dim", {_LLAMA: None, _QWEN3: 128}),
    "ffn_hidden_size": _Key("intermediate_size"),
    "vocab_size": _Key("vocab_size"),
    "norm_epsilon": _Key("rms_norm_eps", {_LLAMA: 1e-6, _QWEN3: 1e-6}),
    "tie_embeddings": _Key("tie_word_embeddings", {_LLAMA: False, _QWEN3: False}),
}
_DEFAULT_THETA = 10000.0


def shape_of(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a ModelConfig that a config.json decides, as plain values.

    Raises:
        PretrainedError: Listing everything that the model does not carry.
    """
    architecture = _architecture(described)
    faults = [] if architecture else [_not_carried(described)]
    faults += _foreign(described)
    fields: dict[str, Any] = {}
    for field, key in _SHAPE.items():
        default = (key.default or {}).get(architecture or _QWEN3)
        if key.name not in described and key.default is None:
            faults.append(f"{key.name} is missing")
        fields[field] = described.get(key.name, default)
    rope, found = _rope(described)
    faults += found
    if faults:
        raise PretrainedError(faults)
    if fields["num_query_groups"] is None:
        fields["num_query_groups"] = fields["num_attention_heads"]
    if fields["head_dim"] is None and fields["num_attention_heads"]:
        fields["head_dim"] = fields["hidden_size"] // fields["num_attention_heads"]
    return {**fields, **rope, "qk_norm": architecture == _QWEN3}


def describe(shape: ModelConfig) -> dict[str, Any]:
    """Write a model's shape as transformers' config.json."""
    architecture, kind = (_QWEN3, "qwen3") if shape.qk_norm else (_LLAMA, "llama")
    said = {key.name: getattr(shape, field) for field, key in _SHAPE.items()}
    rope = {"rope_type": "default", **shape.rope_scaling, "rope_theta": shape.rope_base}
    return {
        "architectures": [architecture],
        "model_type": kind,
        **said,
        "hidden_act": "silu",
        "attention_bias": False,
        **({} if shape.qk_norm else {"mlp_bias": False}),
        "rope_parameters": rope,
    }


def _architecture(described: Mapping[str, Any]) -> str | None:
    named = described.get("architectures")
    return next((one for one in (_QWEN3, _LLAMA) if named == [one]), None)


def _not_carried(described: Mapping[str, Any]) -> str:
    return f"architectures={described.get('architectures')}: legal: [{_QWEN3}] or [{_LLAMA}]"


def _foreign(described: Mapping[str, Any]) -> Iterator[str]:
    """Name whatever the two architectures allow and rlsp's model does not have."""
    for key in ("attention_bias", "mlp_bias"):
        if described.get(key, False):
            yield f"{key}=true: legal: false (the linear layers have no bias)"
    if (act := described.get("hidden_act", "silu")) != "silu":
        yield f"hidden_act={act}: legal: silu"
    if _slides(described):
        yield "a sliding window is in use: legal: full attention in every layer"
    if described.get("attention_dropout", 0.0):
        yield f"attention_dropout={described['attention_dropout']}: legal: 0"
    if described.get("quantization_config") is not None:
        yield "quantization_config: legal: weights in bfloat16, float16 or float32 (or a GGUF file)"


def _slides(described: Mapping[str, Any]) -> bool:
    kinds = described.get("layer_types")
    if kinds is not None:
        return any(kind != "full_attention" for kind in kinds)
    if described.get("sliding_window") is None or not described.get("use_sliding_window", True):
        return False
    first = described.get("max_window_layers") or 0
    return bool(first < described.get("num_hidden_layers", first + 1))


def _rope(described: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Read base and scaling, in transformers 5's form (rope_parameters) or the older one (rope_scaling)."""
    said = {**(described.get("rope_scaling") or {}), **(described.get("rope_parameters") or {})}
    kind = said.get("rope_type", said.get("type", "default"))
    base = said.get("rope_theta", described.get("rope_theta", _DEFAULT_THETA))
    faults = []
    if (part := said.get("partial_rotary_factor", described.get("partial_rotary_factor", 1.0))) != 1.0:
        faults.append(f"partial_rotary_factor={part}: legal: 1 (every pair of a head is rotated)")
    if not isinstance(kind, str) or kind not in _CARRIED_ROPE:
        faults.append(f"rope_type={kind}: legal: {', '.join(_CARRIED_ROPE)}")
        return {}, faults
    longest = described.get("max_position_embeddings")
    found = {"original_max_position_embeddings": longest, **said}
    scaling = {key: found.get(key) for key in _CARRIED_ROPE[kind]}
    faults += [f"rope_type={kind} without {key}" for key, value in scaling.items() if value is None]
    return {"rope_base": base, "rope_scaling": {"rope_type": kind, **scaling}}, faults
