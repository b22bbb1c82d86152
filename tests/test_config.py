"""The frozen config: every rule has a value that breaks it, and all broken rules are named at once."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from math import inf, nan
from typing import Any, get_args, get_origin

import pytest

from rlsp.config import (
    ChatUse,
    Config,
    ConfigError,
    CorrectionKind,
    DeviceKind,
    Dtype,
    EngineKind,
    Job,
    ScorerKind,
    TaskKind,
    TokenizerKind,
    from_plain,
    leaf_kinds,
    legal_text,
    to_plain,
    violations,
)
from rlsp.config.checks import CROSS_RULES, value_at
from rlsp.config.plain import rule_of
from rlsp.config.rules import Given
from rlsp.layout import Layout, RolloutLayout

Compose = Callable[..., Config]

COUNT, TOKENS, WIDTH = (0, -1, 10**6 + 1, 10**29), (0, -1, 2**17 + 1), (0, -8, 3, 12, 8192, 2**60)
NOT_NEGATIVE, POSITIVE = (-0.1, 1.1e6, nan, inf, -inf), (0.0, -1.0, 1e-13, 1e13, nan, inf)
SECONDS = (0.0, -1.0, 0.9, 86401.0, 1e300, nan, inf)
FRACTION = (-0.1, 1.0, nan, inf)

# For every key with a rule, values that break it.
ILLEGAL: dict[str, tuple[Any, ...]] = {
    "name": ("", "a/b", ".hidden", "a b", "x" * 65),
    "seed": (-1, 2**63),
    "num_rollouts": COUNT,
    "prompts_per_rollout": COUNT,
    "samples_per_prompt": COUNT,
    "max_response_tokens": TOKENS,
    "updates_per_rollout": COUNT,
    "micro_batch_size": COUNT,
    "learning_rate": NOT_NEGATIVE,
    "clip_ratio": NOT_NEGATIVE,
    "kl_coef": NOT_NEGATIVE,
    "entropy_coef": NOT_NEGATIVE,
    "temperature": (0.0, -1.0, 1e-7, 1e7, nan, inf),
    "grad_clip": NOT_NEGATIVE,
    "resume": ("", "x" * 4097, "a\0b"),
    "warmup.steps": (-1, 10**6 + 1),
    "warmup.sequences": COUNT,
    "warmup.learning_rate": NOT_NEGATIVE,
    "model.name": ("", "a/b"),
    "model.num_layers": COUNT,
    "model.hidden_size": COUNT,
    "model.num_attention_heads": COUNT,
    "model.num_query_groups": COUNT,
    "model.head_dim": (0, -2, 15, 4098),
    "model.ffn_hidden_size": COUNT,
    "model.vocab_size": (0, 1, 10**6 + 1),
    "model.rope_base": POSITIVE,
    "model.rope_scaling": (
        {"rope_type": "yarn", "factor": 4.0},
        {"factor": 4.0},
        {"rope_type": "linear"},
        {"rope_type": "linear", "factor": 0},
        {"rope_type": "linear", "factor": nan},
        {"rope_type": "linear", "factor": 2.0, "more": 1.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 4.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "model.path": ("", "x" * 4097, "a\0b"),
    "model.norm_epsilon": POSITIVE,
    "model.init_std": POSITIVE,
    "parallel.cp": COUNT,
    "parallel.tp": COUNT,
    "parallel.sp": COUNT,
    "parallel.dp": COUNT,
    "rollout.tp": COUNT,
    "rollout.engines": COUNT,
    "rollout.timeout_s": SECONDS,
    "rollout.kv_cache_gib": (0.0, 1e-9, 5000.0, nan, inf),
    "rollout.options": ({"a": nan}, {"a": {"b": 1}}, {"a": None}, {"a b": 1}),
    "numerics.virtual_tp": WIDTH,
    "numerics.token_block": WIDTH,
    "numerics.q_block": WIDTH,
    "numerics.k_block": WIDTH,
    "numerics.row_tile": (0, 8, 24, 48, 8192, 2**60),
    "numerics.grad_lsb": (19, 51),
    "numerics.threads": (0, 2),
    "task.max_operand": COUNT,
    "task.reward": (nan, inf, -inf, 1e308, -1e308),
    "optimizer.beta1": FRACTION,
    "optimizer.beta2": FRACTION,
    "optimizer.epsilon": (0.0, -1.0, nan, inf, 1e-300, 1.1),
    "optimizer.weight_decay": NOT_NEGATIVE,
    "tracker.project": ("", "a/b", "a:b", "x" * 129, "a\x1b[2J", ".."),
    "tracker.entity": ("", "a\n"),
    "tracker.group": ("",),
    "tracker.tags": (("",), ("good", "x" * 65)),
    "tracker.init_timeout_s": SECONDS,
    "tracker.finish_timeout_s": SECONDS,
    "launch.timeout_s": SECONDS,
    "checkpoint.every": (-1, 10**6 + 1),
    "checkpoint.keep": COUNT,
    "checkpoint.stop_s": SECONDS,
    "launch.grace_s": (0.0, -1.0, nan, inf, 6.1),
    "launch.max_restarts": (-1, 1001),
    "cluster.nodes": COUNT,
    "cluster.node": (-1, 10**6),
    "cluster.host": ("", "a b", "http://a", "-x", "a" * 254),
    "cluster.port": (0, -1, 65536),
    "cluster.attempt": (-1, 10**6),
    "cluster.wait_s": SECONDS,
    "task.response_limit": TOKENS,
    "task.path": ("", "x" * 4097, "a\0b"),
    "task.prompt_key": ("", "x" * 129),
    "task.label_key": ("", "x" * 129),
    "task.max_prompt_tokens": TOKENS,
    "task.factory": ("", "make", "a.b", ":make", "a:b:c", "a b:c", "a..b:c"),
    "task.timeout_s": SECONDS,
    "task.dataset": ("", "a b"),
    "task.dataset_config": ({"a": nan}, {"a": {"b": 1}}, {"a": [[1]]}, {"a": None}, {"a b": 1}),
    "tokenizer.path": ("", "x" * 4097, "a\0b"),
    "tokenizer.system_prompt": ("", "x" * 65537),
    "tokenizer.template_options": ({"a": nan}, {"a": {"b": 1}}, {"a": None}, {"a b": 1}),
    "tokenizer.eos_ids": ((-1,), (2, 10**6)),
    "numerics.routes.attention": ("fast", "", "strict/", "strict/native/strict", "Native"),
    "numerics.routes.ffn": ("fast",),
    "numerics.routes.logp": ("fast",),
    "correction.upper": POSITIVE,
    "correction.lower": NOT_NEGATIVE,
}

VLLM = {
    "rollout.engine": EngineKind.vllm,
    "rollout.engines": 1,
    "rollout.timeout_s": 600.0,
    "rollout.kv_cache_gib": 1.0,
    "model.head_dim": 32,
}

# For every rule over several keys, changes that break it and the line that says so.
CROSSED = [
    ({"parallel.tp": 3}, "parallel.tp=3: legal: 1, 2, 4, 8 (divisors of numerics.virtual_tp)"),
    ({"parallel.tp": 16}, "parallel.tp=16: legal: 1, 2, 4, 8 (divisors of numerics.virtual_tp)"),
    ({"parallel.tp": 4, "parallel.sp": 2}, "parallel.sp=2: legal: 1 or 4 (off, or equal to parallel.tp)"),
    ({"parallel.tp": 1, "parallel.sp": 2}, "parallel.sp=2: legal: 1 (off, or equal to parallel.tp)"),
    (
        {"parallel.dp": 17},
        "parallel.dp=17: legal: at most 16 (prompts_per_rollout × samples_per_prompt)",
    ),
    (
        {"prompts_per_rollout": 250001},
        "prompts_per_rollout=250001: legal: at most 250000 (samples_per_prompt=4)",
    ),
    (
        {"parallel.cp": 33},
        "parallel.cp=33: legal: what makes dp · cp · tp at most 64 ranks (for device.kind=cpu)",
    ),
    (
        {"parallel.dp": 40, "prompts_per_rollout": 64},
        "parallel.dp=40: legal: what makes dp · cp · tp at most 64 ranks (for device.kind=cpu)",
    ),
    (
        {"parallel.tp": 128, "numerics.virtual_tp": 128, "model.num_query_groups": 128}
        | {"model.num_attention_heads": 128, "model.ffn_hidden_size": 128},
        "parallel.tp=128: legal: what makes dp · cp · tp at most 64 ranks (for device.kind=cpu)",
    ),
    (
        {"parallel.cp": 4000, "device.kind": DeviceKind.cuda, "device.backend": "nccl"},
        "parallel.cp=4000: legal: what makes dp · cp · tp at most 4096 ranks (for device.kind=cuda)",
    ),
    (
        {"model.num_query_groups": 4},
        "numerics.virtual_tp=8: legal: a power of two that divides model.num_query_groups=4, or any with "
        "model.pad_heads=true: zero heads make it 32 query heads, and no output changes",
    ),
    (
        {"model.ffn_hidden_size": 260},
        "numerics.virtual_tp=8: legal: a power of two that divides model.ffn_hidden_size=260",
    ),
    (
        {"model.num_attention_heads": 20},
        "model.num_attention_heads=20: legal: a multiple of model.num_query_groups=8",
    ),
    (
        {"model.vocab_size": 96},
        "model.vocab_size=96: legal: at least 97, the characters of the built-in tokenizer",
    ),
    (
        {"numerics.q_block": 16, "numerics.k_block": 16, "numerics.row_tile": 64},
        "numerics.row_tile=64: legal: a divisor of 32, the queries of one block and group of heads",
    ),
    ({"rollout.tp": 3}, "rollout.tp=3: legal: 1, 2, 4, 8 (divisors of numerics.virtual_tp)"),
    (
        {"rollout.tp": 4},
        "rollout.tp=4: legal: a divisor of the world size 2, or any that fits with rollout.engines stated",
    ),
    (
        {"rollout.engines": 3},
        "rollout.engines=3: legal: null, or at most world size 2 / rollout.tp 1",
    ),
    (
        VLLM | {"rollout.engines": 2},
        "rollout.engines=2: legal: 1 or null (rollout.engine=vllm is one engine)",
    ),
    (
        VLLM | {"rollout.tp": 3},
        "rollout.tp=3: legal: 1, 2, 4, 8, 16 (divisors of model.num_attention_heads)",
    ),
    (
        VLLM | {"rollout.timeout_s": None},
        "rollout.timeout_s=null: legal: seconds in 1..86400 (for rollout.engine=vllm)",
    ),
    ({"rollout.timeout_s": 60.0}, "rollout.timeout_s=60.0: legal: null (rollout.engine=native has none)"),
    (
        VLLM | {"rollout.kv_cache_gib": None},
        "rollout.kv_cache_gib=null: legal: GiB in 0.01..4096 (for rollout.engine=vllm)",
    ),
    (
        {"rollout.options": Given({"max_num_seqs": 4})},
        "rollout.options={'max_num_seqs': 4}: legal: {} (rollout.engine=native has none)",
    ),
    (
        VLLM | {"rollout.options": Given({"dtype": "half", "seed": 1})},
        "rollout.options={'dtype': 'half', 'seed': 1}: legal: without dtype, seed: rlsp sets it",
    ),
    (
        VLLM | {"model.head_dim": 16},
        "model.head_dim=16: legal: 32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512 "
        "(for rollout.engine=vllm on a processor)",
    ),
    (
        VLLM | {"temperature": 3.0},
        "temperature=3.0: legal: a number in 0.01..2 (rollout.engine=vllm takes no other)",
    ),
    (
        VLLM | {"temperature": 0.001},
        "temperature=0.001: legal: a number in 0.01..2 (rollout.engine=vllm takes no other)",
    ),
    (VLLM | {"diagnose": True}, "diagnose=true: legal: false (nobody sees into rollout.engine=vllm)"),
    *(
        (
            VLLM | {f"numerics.routes.{operator}": "strict/native"},
            f"numerics.routes.{operator}=strict/native: legal: strict or native: training's "
            "(rollout.engine=vllm has its own)",
        )
        for operator in ("attention", "ffn", "logp")
    ),
    ({"numerics.k_block": 64}, "numerics.k_block=64: legal: 32 (equal to numerics.q_block)"),
    (
        {"model.hidden_size": 2, "numerics.row_tile": 64},
        "numerics.row_tile=64: legal: a power of two above 128 "
        "(below, this model's leaf products change kernels)",
    ),
    (
        {"numerics.token_block": 2},
        "numerics.token_block=2: legal: a power of two above 2 "
        "(below, this model's leaf products change kernels)",
    ),
    (
        {"numerics.q_block": 16, "numerics.k_block": 16},
        "numerics.q_block=16: legal: a power of two with q_block · k_block · head_dim 16 above 4096",
    ),
    (
        {"correction.kind": CorrectionKind.token_tis, "reuse_rollout_logprob": False},
        "correction.kind=token_tis: legal: none (every route is strict, so all importance ratios are 1)",
    ),
    (
        {"correction.kind": CorrectionKind.token_tis, "numerics.routes.ffn": "native"},
        "correction.kind=token_tis: legal: none with reuse_rollout_logprob=true "
        "(the loss's own ratio has the correction in it)",
    ),
    (
        {"warmup.steps": 2, "task.kind": TaskKind.constant},
        "warmup.steps=2: legal: 0 (task.kind=constant has no solutions)",
    ),
    (
        {"warmup.steps": 2, "warmup.sequences": 3, "parallel.dp": 4},
        "warmup.sequences=3: legal: at least parallel.dp=4",
    ),
    (
        {"correction.lower": 2.0},
        "correction.lower=2.0: legal: a number of at least 0 and below correction.upper=2.0",
    ),
    (
        {"cluster.nodes": 3, "cluster.host": "a"},
        "cluster.nodes=3: legal: a divisor of the world size 2: every machine has as many ranks",
    ),
    ({"cluster.node": 1}, "cluster.node=1: legal: 0 (one machine)"),
    (
        {"cluster.nodes": 2, "cluster.node": 2, "cluster.host": "a"},
        "cluster.node=2: legal: an integer in 0..1",
    ),
    (
        {"cluster.nodes": 2},
        "cluster.host=null: legal: the name or address of node 0, as the other machines reach it",
    ),
    (
        {"cluster.nodes": 2, "cluster.host": "a", "checkpoint.every": 2},
        "checkpoint.every=2: legal: 0 (node 0 writes checkpoints, "
        "and not all parallel.tp=2 shards are there), "
        "or any with cluster.shared_folder=true, where all machines see the run folder",
    ),
    (
        {"cluster.nodes": 2, "cluster.host": "a", "checkpoint.every": 0, "launch.max_restarts": 1},
        "launch.max_restarts=1: legal: 0 (with cluster.nodes=2: each command starts again from outside, "
        "docs/cluster.md)",
    ),
    (
        {"cluster.nodes": 2, "cluster.host": "a", "checkpoint.every": 0, "resume": "outputs/a/b"},
        "resume=outputs/a/b: legal: null (with cluster.nodes=2: only node 0 has the checkpoints), "
        "or any with cluster.shared_folder=true, where all machines see the run folder",
    ),
    ({"task.kind": TaskKind.jsonl}, "task.path=null: legal: a file of JSON lines (for task.kind=jsonl)"),
    ({"task.path": "a.jsonl"}, "task.path=a.jsonl: legal: null (task.kind=arithmetic has none)"),
    (
        {"task.kind": TaskKind.custom},
        "task.factory=null: legal: module:function, which makes the task (for task.kind=custom)",
    ),
    (
        {"task.kind": TaskKind.reasoning_gym},
        "task.dataset=null: legal: the name of a generator (for task.kind=reasoning_gym)",
    ),
    (
        {"task.scorer": ScorerKind.math_verify},
        "task.scorer=math_verify: legal: exact, tag, boxed, hashes, number or text "
        "(task.kind=arithmetic has no labels for it)",
    ),
    ({"task.prompt_key": "q"}, "task.prompt_key=q: legal: null (task.kind=arithmetic has none)"),
    (
        {"task.label_key": "a", "task.kind": TaskKind.reasoning_gym},
        "task.label_key=a: legal: null (task.kind=reasoning_gym has none)",
    ),
    ({"task.max_prompt_tokens": 9}, "task.max_prompt_tokens=9: legal: null (task.kind=arithmetic has none)"),
    ({"task.dataset": "gcd"}, "task.dataset=gcd: legal: null (task.kind=arithmetic has none)"),
    (
        {"task.dataset_config": {"max_terms": 3}},
        "task.dataset_config={'max_terms': 3}: legal: {} (task.kind=arithmetic has none)",
    ),
    ({"task.factory": "a:b"}, "task.factory=a:b: legal: null (task.kind=arithmetic has none)"),
    (
        {"tokenizer.kind": TokenizerKind.character, "tokenizer.path": "a"},
        "tokenizer.path=a: legal: null (tokenizer.kind=character has none)",
    ),
    (
        {"tokenizer.kind": TokenizerKind.character, "tokenizer.system_prompt": "a"},
        "tokenizer.system_prompt=a: legal: null (tokenizer.kind=character has none)",
    ),
    (
        {"tokenizer.kind": TokenizerKind.character, "tokenizer.template_options": {"a": 1}},
        "tokenizer.template_options={'a': 1}: legal: {} (tokenizer.kind=character has none)",
    ),
    (
        {"tokenizer.kind": TokenizerKind.character, "tokenizer.eos_ids": (1,)},
        "tokenizer.eos_ids=[1]: legal: [] (tokenizer.kind=character has none)",
    ),
    (
        {"tokenizer.chat": ChatUse.never, "tokenizer.system_prompt": "a"},
        "tokenizer.system_prompt=a: legal: null (tokenizer.chat=never uses no template)",
    ),
    (
        {"tokenizer.chat": ChatUse.never, "tokenizer.template_options": {"a": 1}},
        "tokenizer.template_options={'a': 1}: legal: {} (tokenizer.chat=never uses no template)",
    ),
    (
        {"tokenizer.kind": TokenizerKind.character, "tokenizer.chat": ChatUse.always},
        "tokenizer.chat=always: legal: auto or never (tokenizer.kind=character has no chat template)",
    ),
    (
        {"tokenizer.kind": TokenizerKind.none},
        "tokenizer.kind=none: legal: auto, character or hugging_face (task.kind=arithmetic asks in text)",
    ),
    ({"device.backend": "nccl"}, "device.backend=nccl: legal: gloo (for device.kind=cpu)"),
    ({"device.kind": DeviceKind.cuda}, "device.backend=gloo: legal: nccl (for device.kind=cuda)"),
]


def changed(config: Any, changes: dict[str, Any]) -> Any:
    for key, value in changes.items():
        name, _, rest = key.partition(".")
        inner = changed(getattr(config, name), {rest: value}) if rest else value
        config = dataclasses.replace(config, **{name: inner})
    return config


def kind_at(key: str) -> Any:
    kind = dict(leaf_kinds(Config))[key]
    return get_args(kind)[0] if get_origin(kind) is tuple else kind


def test_the_default_config_is_legal(compose: Compose) -> None:
    assert violations(compose()) == ()


def test_every_rule_has_a_value_that_breaks_it() -> None:
    assert set(ILLEGAL) == {key for key, _ in leaf_kinds(Config) if rule_of(kind_at(key)) is not None}


@pytest.mark.parametrize("key", ILLEGAL)
def test_a_value_that_breaks_a_rule_is_named_with_what_is_legal(compose: Compose, key: str) -> None:
    for value in ILLEGAL[key]:
        found = violations(changed(compose(), {key: value}))
        assert [violation.key for violation in found] == [key]
        assert found[0].legal == legal_text(kind_at(key))
        wrong = value[-1] if isinstance(value, tuple) else value
        assert found[0].value is wrong
        assert str(found[0]).startswith(f"{key}=")


def test_every_rule_over_several_keys_is_broken_by_a_case(compose: Compose) -> None:
    broken = set()
    for changes, _ in CROSSED:
        config = changed(compose(), changes)
        broken |= {number for number, rule in enumerate(CROSS_RULES) if not _holds(rule.holds, config)}
    assert broken == set(range(len(CROSS_RULES)))


def _holds(rule: Callable[[Config], bool], config: Config) -> bool:
    return rule(config)


@pytest.mark.parametrize(("changes", "line"), CROSSED, ids=[line.split(": ")[0] for _, line in CROSSED])
def test_keys_that_do_not_fit_together_are_refused_in_these_words(
    compose: Compose, changes: dict[str, Any], line: str
) -> None:
    assert line in [str(violation) for violation in violations(changed(compose(), changes))]


def test_all_violations_are_listed_at_once(compose: Compose) -> None:
    changes = {"num_rollouts": 0, "entropy_coef": nan, "parallel.tp": 3, "device.backend": "mpi"}
    found = violations(changed(compose(), changes))
    assert [violation.key for violation in found] == [*list(changes)[:2], "parallel.tp", "device.backend"]
    assert [str(line) for line in found] == str(ConfigError(found)).splitlines()


def test_one_mistake_is_named_once(compose: Compose) -> None:
    # sp=2 was right for the default's tp=2, and rollout.tp divides 2: neither is the mistake.
    assert [v.key for v in violations(changed(compose(), {"parallel.tp": 3}))] == ["parallel.tp"]


@pytest.mark.parametrize("changes", [{"learning_rate": 0.0}, {"grad_clip": 0.0}, {"clip_ratio": 0.0}])
def test_zero_is_legal_where_it_means_something(compose: Compose, changes: dict[str, Any]) -> None:
    assert violations(changed(compose(), changes)) == ()


def test_large_odd_cp_and_dp_are_legal(compose: Compose) -> None:
    assert violations(changed(compose(), {"parallel.cp": 3, "parallel.dp": 5})) == ()


def test_layouts_are_derived(compose: Compose) -> None:
    config = compose("parallel=cp2_tp4_sp4", "rollout.tp=2")
    assert config.world_size == 8
    assert config.layout == Layout(dp=1, cp=2, tp=4, sp=4)
    assert config.rollout_layout == RolloutLayout(tp=2, engines=4, world_size=8)
    fewer = compose("parallel=cp2_tp4_sp4", "rollout.tp=2", "rollout.engines=3")
    assert fewer.rollout_layout == RolloutLayout(tp=2, engines=3, world_size=8)
    assert config.sequences_per_rollout == 16
    assert config.padded_vocab == 128


def test_a_config_survives_plain_json(compose: Compose) -> None:
    config = compose("tracker.tags=[a,b]", "model.dtype=float32", "rollout.engines=1", "tracker.group=g")
    plain = json.loads(json.dumps(to_plain(config), allow_nan=False))
    assert from_plain(plain) == config
    assert plain["model"]["dtype"] == "float32"
    assert config.model.dtype is Dtype.float32
    assert config.tracker.tags == ("a", "b")


def test_a_job_survives_json(compose: Compose) -> None:
    job = Job(
        config=compose(),
        run_id="20260101-000000-abcdef",
        run_dir="/somewhere/run",
        overrides=("seed=1", "name='é'"),
        command_line=("rlsp", "seed=1"),
        started_at="2026-01-01T00:00:00.000+00:00",
    )
    assert Job.from_json(job.to_json()) == job


def test_the_hash_tells_any_two_configs_apart(compose: Compose) -> None:
    config = compose()
    assert config.config_hash == compose().config_hash
    assert len(config.config_hash) == 64
    changes: list[dict[str, Any]] = [{"seed": 1}, {"kl_coef": 1e-300}, {"tracker.tags": ("x",)}]
    hashes = {changed(config, change).config_hash for change in changes} | {config.config_hash}
    assert len(hashes) == 4


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        (("seed",), "1", "seed=1: legal: an integer in 0..2^63-1"),
        (("seed",), True, "seed=true: legal: an integer in 0..2^63-1"),
        (("seed",), 1.0, "seed=1.0: legal: an integer in 0..2^63-1"),
        (("seed",), None, "seed=null: legal: an integer in 0..2^63-1"),
        (("model", "dtype"), "float16", "model.dtype=float16: legal: bfloat16 or float32"),
        (("model", "tie_embeddings"), 1, "model.tie_embeddings=1: legal: true or false"),
        (("model",), 3, "model=3: legal: a mapping of keys to values"),
        (("tracker", "tags"), "a", "tracker.tags=a: legal: a list, each item 1 to 64 printable characters"),
        (("tracker", "tags"), [1], "tracker.tags=1: legal: 1 to 64 printable characters"),
        (("rollout", "engines"), "all", "rollout.engines=all: legal: null or an integer in 1..1000000"),
        (("parallel", "tpp"), 1, "parallel.tpp=1: legal: a known key; did you mean parallel.tp?"),
        (("nonsense_key",), 1, "nonsense_key=1: legal: a known key; `--cfg job` lists them"),
    ],
)
def test_a_wrong_type_or_key_is_never_converted(
    compose: Compose, path: tuple[str, ...], value: object, line: str
) -> None:
    plain = to_plain(compose())
    node = plain
    for name in path[:-1]:
        node = node[name]
    node[path[-1]] = value
    with pytest.raises(ConfigError) as refused:
        from_plain(plain)
    assert str(refused.value) == line


def test_missing_keys_are_all_named(compose: Compose) -> None:
    plain = to_plain(compose())
    del plain["seed"], plain["model"], plain["launch"]["grace_s"]
    with pytest.raises(ConfigError) as refused:
        from_plain(plain)
    assert [violation.key for violation in refused.value.violations] == ["seed", "model", "launch.grace_s"]


def test_an_integer_is_a_legal_number(compose: Compose) -> None:
    plain = to_plain(compose())
    plain["learning_rate"] = 0
    assert repr(from_plain(plain).learning_rate) == "0.0"


def test_the_config_cannot_be_changed(compose: Compose) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        compose().seed = 1  # type: ignore[misc]
    assert hash(compose()) == hash(compose())


def test_every_key_says_what_is_legal() -> None:
    for key, kind in leaf_kinds(Config):
        assert legal_text(kind), key


def test_a_key_is_looked_up_by_its_dotted_name(compose: Compose) -> None:
    assert value_at(compose(), "parallel.tp") == 2
