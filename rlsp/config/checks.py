"""Every reason to refuse a config, all at once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any, get_args, get_origin

from rlsp.config.choices import ChatUse, CorrectionKind, DeviceKind, ScorerKind, TaskKind, TokenizerKind
from rlsp.config.cluster import CLUSTER_RULES
from rlsp.config.cross import WORLD, CrossRule, divisors
from rlsp.config.external import ENGINE_RULES
from rlsp.config.plain import leaf_kinds, legal_text, rule_of
from rlsp.config.rules import Violation
from rlsp.config.schema import Config

SMALL_PRODUCT = 4096
"""A matrix product of M·N·K up to this is left to another kernel, with other bits (NUMERICS §1.1, rule 1)."""

MAX_RANKS = {DeviceKind.cpu: 64, DeviceKind.cuda: 4096}
"""Most ranks of a run: what one machine can host on its processor, and what torchrun may span with GPUs."""

MAX_SEQUENCES = 10**6
"""Most sequences of one rollout."""

CHARACTERS = 97
"""Tokens of the built-in character tokenizer, which every vocabulary must hold (a test compares the two)."""


def violations(config: Config) -> tuple[Violation, ...]:
    """List everything that is wrong with a config; the empty tuple means that it may run.

    A rule over several keys is tested where the others were not refused already: one mistake is named once.
    """
    single = tuple(_single_violations(config))
    illegal = {violation.key for violation in single}
    crossed: list[Violation] = []
    blamed: set[str] = set()
    for rule in CROSS_RULES:
        named, *others = rule.keys
        if illegal.isdisjoint(rule.keys) and blamed.isdisjoint(others) and not rule.holds(config):
            crossed.append(Violation(named, value_at(config, named), rule.legal(config)))
            blamed.add(named)
    return single + tuple(crossed)


def _queries(config: Config) -> int:
    """Count the query rows of one attention block of one key-value head: they must be whole row tiles."""
    model = config.model
    return config.numerics.q_block * (model.num_attention_heads // model.num_query_groups)


def value_at(config: Config, key: str) -> Any:
    """Look a dotted key up."""
    return reduce(getattr, key.split("."), config)


def _single_violations(config: Config) -> Iterator[Violation]:
    for key, kind in leaf_kinds(Config):
        value = value_at(config, key)
        if get_origin(kind) is tuple:
            kind_of_one, values = get_args(kind)[0], value
        else:
            kind_of_one, values = kind, () if value is None else (value,)
        rule = rule_of(kind_of_one)
        if rule is not None:
            yield from (Violation(key, v, legal_text(kind_of_one)) for v in values if not rule.holds(v))


def _smallest_weight(config: Config) -> int:
    """Return the least N·K of a leaf product: one virtual shard of QKV, projection, FFN or LM head."""
    model, width = config.model, config.numerics.virtual_tp
    heads = config.padded_attention_heads // width
    shards = (heads * model.head_dim, model.ffn_hidden_size // width, config.padded_vocab // width)
    return model.hidden_size * min(shards)


def _rows_above(smallest: int) -> str:
    return (
        f"a power of two above {SMALL_PRODUCT // smallest} (below, this model's leaf products change kernels)"
    )


def _ranks_fit(axis: str) -> CrossRule:
    """Bound the world size; the widest axis is the one that is named."""
    others = [name for name in ("dp", "cp", "tp") if name != axis]

    def holds(config: Config) -> bool:
        widths = {name: getattr(config.parallel, name) for name in (axis, *others)}
        return config.world_size <= MAX_RANKS[config.device.kind] or axis != max(
            widths, key=widths.__getitem__
        )

    def legal(config: Config) -> str:
        kind = config.device.kind
        return f"what makes dp · cp · tp at most {MAX_RANKS[kind]} ranks (for device.kind={kind.name})"

    keys = (f"parallel.{axis}", "device.kind", *(f"parallel.{name}" for name in others))
    return CrossRule(keys, holds, legal)


def _task_key(name: str, kinds: tuple[TaskKind, ...], what: str, *, needed: bool = False) -> CrossRule:
    """Tie a key that may be null to the tasks that read it."""

    def holds(config: Config) -> bool:
        given = getattr(config.task, name) is not None
        return config.task.kind in kinds if given else not (needed and config.task.kind in kinds)

    def legal(config: Config) -> str:
        kind = config.task.kind
        return (
            f"{what} (for task.kind={kind.name})"
            if kind in kinds
            else f"null (task.kind={kind.name} has none)"
        )

    return CrossRule((f"task.{name}", "task.kind"), holds, legal)


def _tokenizer_key(name: str, kinds: tuple[TokenizerKind, ...], empty: str) -> CrossRule:
    """Tie a key that may be empty to the tokenizers that read it."""

    def holds(config: Config) -> bool:
        return config.tokenizer.kind in kinds or not getattr(config.tokenizer, name)

    return CrossRule(
        (f"tokenizer.{name}", "tokenizer.kind"),
        holds,
        lambda c: f"{empty} (tokenizer.kind={c.tokenizer.kind.name} has none)",
    )


def _template_key(name: str, empty: str) -> CrossRule:
    """Tie what goes to a chat template to its use."""
    return CrossRule(
        (f"tokenizer.{name}", "tokenizer.chat"),
        lambda c: c.tokenizer.chat is not ChatUse.never or not getattr(c.tokenizer, name),
        lambda _: f"{empty} (tokenizer.chat=never uses no template)",
    )


def _needs_characters(config: Config) -> bool:
    """Tell whether the tokenizer is the built-in one."""
    kind = config.tokenizer.kind
    return kind is TokenizerKind.character or (kind is TokenizerKind.auto and config.tokenizer_path is None)


_READ = (TokenizerKind.auto, TokenizerKind.hugging_face)
_IN_IDS = (TaskKind.jsonl, TaskKind.custom)
_ASKED = (TaskKind.jsonl, TaskKind.reasoning_gym)
_VIRTUAL = ("numerics.virtual_tp",)
_SHAPES = (
    "numerics.virtual_tp",
    "model.hidden_size",
    "model.num_attention_heads",
    "model.num_query_groups",
    "model.head_dim",
    "model.ffn_hidden_size",
    "model.vocab_size",
)
_BACKENDS = {DeviceKind.cpu: "gloo", DeviceKind.cuda: "nccl"}

CROSS_RULES = (
    CrossRule(
        ("model.vocab_size",),
        lambda c: c.model.vocab_size >= CHARACTERS or not _needs_characters(c),
        lambda _: f"at least {CHARACTERS}, the characters of the built-in tokenizer",
    ),
    CrossRule(
        ("numerics.virtual_tp", "model.num_query_groups", "model.num_attention_heads"),
        lambda c: c.model.pad_heads or c.model.num_query_groups % c.numerics.virtual_tp == 0,
        lambda c: (
            f"a power of two that divides model.num_query_groups={c.model.num_query_groups}, or any with "
            f"model.pad_heads=true: zero heads make it {c.padded_attention_heads} query heads, "
            "and no output changes"
        ),
    ),
    CrossRule(
        ("numerics.virtual_tp", "model.ffn_hidden_size"),
        lambda c: c.model.ffn_hidden_size % c.numerics.virtual_tp == 0,
        lambda c: f"a power of two that divides model.ffn_hidden_size={c.model.ffn_hidden_size}",
    ),
    CrossRule(
        ("numerics.row_tile", "numerics.q_block", "model.num_attention_heads", "model.num_query_groups"),
        lambda c: _queries(c) % c.numerics.row_tile == 0,
        lambda c: f"a divisor of {_queries(c)}, the queries of one block and group of heads",
    ),
    CrossRule(
        ("model.num_attention_heads", "model.num_query_groups"),
        lambda c: c.model.num_attention_heads % c.model.num_query_groups == 0,
        lambda c: f"a multiple of model.num_query_groups={c.model.num_query_groups}",
    ),
    CrossRule(
        ("parallel.tp", *_VIRTUAL),
        lambda c: c.numerics.virtual_tp % c.parallel.tp == 0,
        lambda c: f"{divisors(c.numerics.virtual_tp)} (divisors of numerics.virtual_tp)",
    ),
    _ranks_fit("tp"),
    _ranks_fit("cp"),
    _ranks_fit("dp"),
    CrossRule(
        ("prompts_per_rollout", "samples_per_prompt"),
        lambda c: c.sequences_per_rollout <= MAX_SEQUENCES,
        lambda c: (
            f"at most {MAX_SEQUENCES // c.samples_per_prompt} (samples_per_prompt={c.samples_per_prompt})"
        ),
    ),
    CrossRule(
        ("parallel.sp", "parallel.tp"),
        lambda c: c.parallel.sp in (1, c.parallel.tp),
        lambda c: " or ".join(str(n) for n in sorted({1, c.parallel.tp})) + " (off, or equal to parallel.tp)",
    ),
    CrossRule(
        ("parallel.dp", "prompts_per_rollout", "samples_per_prompt"),
        lambda c: c.parallel.dp <= c.sequences_per_rollout,
        lambda c: f"at most {c.sequences_per_rollout} (prompts_per_rollout × samples_per_prompt)",
    ),
    CrossRule(
        ("rollout.tp", "rollout.engine", *_VIRTUAL),
        lambda c: c.rollout.external or c.numerics.virtual_tp % c.rollout.tp == 0,
        lambda c: f"{divisors(c.numerics.virtual_tp)} (divisors of numerics.virtual_tp)",
    ),
    CrossRule(
        ("warmup.steps", "task.kind"),
        lambda c: c.warmup.steps == 0 or c.task.kind is not TaskKind.constant,
        lambda c: f"0 (task.kind={c.task.kind.name} has no solutions)",
    ),
    CrossRule(
        ("warmup.sequences", "warmup.steps", "parallel.dp"),
        lambda c: c.warmup.steps == 0 or c.parallel.dp <= c.warmup.sequences,
        lambda c: f"at least parallel.dp={c.parallel.dp}",
    ),
    CrossRule(
        ("rollout.tp", "rollout.engine", "rollout.engines", *WORLD),
        lambda c: c.rollout.external or c.rollout.engines is not None or c.world_size % c.rollout.tp == 0,
        lambda c: f"a divisor of the world size {c.world_size}, or any that fits with rollout.engines stated",
    ),
    CrossRule(
        ("rollout.engines", "rollout.engine", "rollout.tp", *WORLD),
        lambda c: c.rollout.external or (c.rollout.engines or 0) * c.rollout.tp <= c.world_size,
        lambda c: f"null, or at most world size {c.world_size} / rollout.tp {c.rollout.tp}",
    ),
    *ENGINE_RULES,
    CrossRule(
        ("numerics.k_block", "numerics.q_block"),
        lambda c: c.numerics.k_block == c.numerics.q_block,
        lambda c: f"{c.numerics.q_block} (equal to numerics.q_block)",
    ),
    CrossRule(
        ("numerics.row_tile", *_SHAPES),
        lambda c: _smallest_weight(c) == 0 or c.numerics.row_tile * _smallest_weight(c) > SMALL_PRODUCT,
        lambda c: _rows_above(_smallest_weight(c)),
    ),
    CrossRule(
        ("numerics.token_block", *_SHAPES),
        lambda c: _smallest_weight(c) == 0 or c.numerics.token_block * _smallest_weight(c) > SMALL_PRODUCT,
        lambda c: _rows_above(_smallest_weight(c)),
    ),
    CrossRule(
        ("numerics.q_block", "numerics.k_block", "model.head_dim"),
        lambda c: c.numerics.q_block * c.numerics.k_block * c.model.head_dim > SMALL_PRODUCT,
        lambda c: (
            f"a power of two with q_block · k_block · head_dim {c.model.head_dim} above {SMALL_PRODUCT}"
        ),
    ),
    CrossRule(
        (
            "correction.kind",
            "rollout.engine",
            "numerics.routes.attention",
            "numerics.routes.ffn",
            "numerics.routes.logp",
        ),
        lambda c: c.correction.kind is CorrectionKind.none or not c.exact,
        lambda _: "none (every route is strict, so all importance ratios are 1)",
    ),
    CrossRule(
        ("correction.kind", "reuse_rollout_logprob"),
        lambda c: c.correction.kind is CorrectionKind.none or not c.reuse_rollout_logprob,
        lambda _: "none with reuse_rollout_logprob=true (the loss's own ratio has the correction in it)",
    ),
    CrossRule(
        ("correction.lower", "correction.upper"),
        lambda c: c.correction.lower < c.correction.upper,
        lambda c: f"a number of at least 0 and below correction.upper={c.correction.upper}",
    ),
    _task_key("path", (TaskKind.jsonl,), "a file of JSON lines", needed=True),
    _task_key("factory", (TaskKind.custom,), "module:function, which makes the task", needed=True),
    _task_key("dataset", (TaskKind.reasoning_gym,), "the name of a generator", needed=True),
    _task_key("prompt_key", _ASKED, "the name of a field"),
    _task_key("label_key", (TaskKind.jsonl,), "the name of a field"),
    _task_key("max_prompt_tokens", _ASKED, "a number of tokens"),
    CrossRule(
        ("task.dataset_config", "task.kind"),
        lambda c: not c.task.dataset_config or c.task.kind is TaskKind.reasoning_gym,
        lambda c: f"{{}} (task.kind={c.task.kind.name} has none)",
    ),
    CrossRule(
        ("task.scorer", "task.kind"),
        lambda c: c.task.scorer is not ScorerKind.math_verify or c.task.kind is TaskKind.jsonl,
        lambda c: (
            f"exact, tag, boxed, hashes, number or text (task.kind={c.task.kind.name} has no labels for it)"
        ),
    ),
    _tokenizer_key("path", _READ, "null"),
    _tokenizer_key("system_prompt", _READ, "null"),
    _tokenizer_key("template_options", _READ, "{}"),
    _tokenizer_key("eos_ids", (*_READ, TokenizerKind.none), "[]"),
    _template_key("system_prompt", "null"),
    _template_key("template_options", "{}"),
    CrossRule(
        ("tokenizer.chat", "tokenizer.kind"),
        lambda c: c.tokenizer.chat is not ChatUse.always or c.tokenizer.kind in _READ,
        lambda c: f"auto or never (tokenizer.kind={c.tokenizer.kind.name} has no chat template)",
    ),
    CrossRule(
        ("tokenizer.kind", "task.kind"),
        lambda c: c.tokenizer.kind is not TokenizerKind.none or c.task.kind in _IN_IDS,
        lambda c: f"auto, character or hugging_face (task.kind={c.task.kind.name} asks in text)",
    ),
    *CLUSTER_RULES,
    CrossRule(
        ("device.backend", "device.kind"),
        lambda c: c.device.backend == _BACKENDS[c.device.kind],
        lambda c: f"{_BACKENDS[c.device.kind]} (for device.kind={c.device.kind.name})",
    ),
)
