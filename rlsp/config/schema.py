"""The schema of an experiment: types and no values; the values live in conf/."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, is_dataclass
from typing import TYPE_CHECKING, get_origin, get_type_hints

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
from rlsp.config.plain import read_plain, to_plain
from rlsp.config.rules import (
    Count,
    Even,
    Every,
    Factory,
    FilePath,
    Fraction,
    Gibibytes,
    Grace,
    GradLsb,
    Host,
    Index,
    Label,
    Name,
    Normal,
    NotNegative,
    Options,
    Port,
    Positive,
    Project,
    Restarts,
    Reward,
    RopeScaling,
    Route,
    Run,
    Seconds,
    Seed,
    Steps,
    Tag,
    Temperature,
    Text,
    Threads,
    Tile,
    TokenId,
    Tokens,
    Vocab,
    Width,
)
from rlsp.layout import Layout, RolloutLayout, padded_groups, padded_vocab

if TYPE_CHECKING:
    from omegaconf import DictConfig

SCHEMA_NAME = "rlsp_schema"


@dataclass(frozen=True)
class ModelConfig:
    """Shape a model of Qwen3's architecture, or of Llama's (without qk_norm).

    Its name is that of the file in conf/model. path is where its weights come from, null for fresh ones.
    rope_scaling is as config.json has it; empty for frequencies in float64, rounded once. pad_heads adds
    groups of zero heads where virtual_tp does not divide num_query_groups.
    """

    name: Name
    num_layers: Count
    hidden_size: Count
    num_attention_heads: Count
    num_query_groups: Count
    head_dim: Even
    ffn_hidden_size: Count
    vocab_size: Vocab
    qk_norm: bool
    rope_base: Positive
    rope_scaling: RopeScaling
    norm_epsilon: Positive
    tie_embeddings: bool
    init_std: Positive
    pad_heads: bool
    path: FilePath | None
    dtype: Dtype


@dataclass(frozen=True)
class ParallelConfig:
    """Lay out training.

    Shards of a sequence (cp), of a weight (tp) and of the residual stream (sp); replicas (dp).
    """

    cp: Count
    tp: Count
    sp: Count
    dp: Count


@dataclass(frozen=True)
class RolloutConfig:
    """Lay out generation; engines is null for as many as fit, ignore_eos generates to the full length.

    Of an external engine: timeout_s bounds its start, a hand-over of weights and a rollout, kv_cache_gib is
    what its key-value cache may take, options go to it as they are.
    """

    engine: EngineKind
    tp: Count
    engines: Count | None
    ignore_eos: bool
    timeout_s: Seconds | None
    kv_cache_gib: Gibibytes | None
    options: Options

    @property
    def external(self) -> bool:
        """Tell whether the engine is not rlsp's own: its bits may differ from training's."""
        return self.engine is not EngineKind.native


@dataclass(frozen=True)
class RoutesConfig:
    """Declare whose arithmetic each operator runs by: rlsp's contract (strict) or the backend's (native)."""

    attention: Route
    ffn: Route
    logp: Route

    def declared(self) -> dict[str, str]:
        """Return the route of every operator on both sides: `train.attention` to `rollout.logp`."""
        pairs = {"attention": self.attention, "ffn": self.ffn, "logp": self.logp}
        sides = {"train": 0, "rollout": -1}
        return {
            f"{side}.{operator}": route.split("/")[place]
            for side, place in sides.items()
            for operator, route in pairs.items()
        }

    @property
    def strict(self) -> bool:
        """Tell whether no route is native: only then do the bits not depend on the layout."""
        return set(self.declared().values()) == {"strict"}


@dataclass(frozen=True)
class NumericsConfig:
    """Fix the numeric contract: blocks in tokens, row_tile in rows, gradient sums in units of 2^-grad_lsb.

    compiled changes no bit: whether hot loops run as C that this machine compiled.
    """

    routes: RoutesConfig
    virtual_tp: Width
    token_block: Width
    q_block: Width
    k_block: Width
    row_tile: Tile
    grad_lsb: GradLsb
    threads: Threads
    compiled: bool


@dataclass(frozen=True)
class CorrectionConfig:
    """Weigh the loss by importance ratios, training over rollout, cut at `upper` or dropped outside.

    `lower` is the least ratio that the masked kinds keep.
    """

    kind: CorrectionKind
    upper: Positive
    lower: NotNegative


@dataclass(frozen=True)
class TaskConfig:
    """Choose the task.

    max_operand bounds arithmetic's numbers, reward is what the constant task pays, response_limit (tokens)
    gives every prompt a limit of its own, drawn from 1 up to it (0 for one prompt in eight); null for none.
    path is a file of JSON lines, prompt_key and label_key name fields of it (null: the usual names).
    dataset names a generator of reasoning-gym, dataset_config goes to it as it is. factory makes a task of
    one's own. timeout_s bounds one reward that is computed in a process of its own.
    """

    kind: TaskKind
    max_operand: Count
    reward: Reward
    response_limit: Tokens | None
    path: FilePath | None
    prompt_key: Label | None
    label_key: Label | None
    order: TaskOrder
    scorer: ScorerKind
    max_prompt_tokens: Tokens | None
    dataset: Name | None
    dataset_config: Options
    factory: Factory | None
    timeout_s: Seconds


@dataclass(frozen=True)
class TokenizerConfig:
    """Choose what turns text into token ids.

    path is a folder with tokenizer.json or a GGUF file (null: that of the model), system_prompt and
    template_options go to its chat template, eos_ids end a response (empty: those that tokenizer and model
    name).
    """

    kind: TokenizerKind
    path: FilePath | None
    chat: ChatUse
    system_prompt: Text | None
    template_options: Options
    eos_ids: tuple[TokenId, ...]


@dataclass(frozen=True)
class WarmupConfig:
    """Take supervised steps on the task's own solutions before the first rollout; 0 steps for none.

    sequences counts those of a step; the learning rate is the warm-up's own.
    """

    steps: Steps
    sequences: Count
    learning_rate: NotNegative


@dataclass(frozen=True)
class DeviceConfig:
    """Choose the device and the process-group backend that serves it."""

    kind: DeviceKind
    backend: str


@dataclass(frozen=True)
class OptimizerConfig:
    """Parametrise the optimizer; the learning rate is a flat knob."""

    kind: OptimizerKind
    beta1: Fraction
    beta2: Fraction
    epsilon: Normal
    weight_decay: NotNegative


@dataclass(frozen=True)
class TrackerConfig:
    """Address the Weights & Biases run, and bound how long opening and finishing it may take."""

    mode: TrackerMode
    project: Project
    entity: Label | None
    group: Label | None
    tags: tuple[Tag, ...]
    init_timeout_s: Seconds
    finish_timeout_s: Seconds


@dataclass(frozen=True)
class CheckpointConfig:
    """Save every so many rollouts (0: never) and keep the newest (null: all).

    stop_s is what a run that is asked to stop gets to finish its rollout and save it.
    """

    every: Every
    keep: Count | None
    stop_s: Seconds


@dataclass(frozen=True)
class LaunchConfig:
    """Bound how long a collective may take (timeout_s) and how long ranks get to stop (grace_s).

    max_restarts bounds how often the whole job starts again after a rank died or hung.
    """

    timeout_s: Seconds
    grace_s: Grace
    progress: bool
    max_restarts: Restarts


@dataclass(frozen=True)
class ClusterConfig:
    """Place this command among the machines of one run: number `node` of `nodes`, which meet at host:port.

    Node 0 listens there and owns the run; with agent_store torchrun's agent listens already. attempt tells
    the restarts of one launch apart; wait_s bounds how long the machines wait for each other at the start.
    shared_folder says that all of them see the run folder, under one path: checkpoints are everybody's then.
    """

    nodes: Count
    node: Index
    host: Host | None
    port: Port
    agent_store: bool
    attempt: Index
    wait_s: Seconds
    shared_folder: bool


@dataclass(frozen=True)
class Config:
    """One experiment, checked once and never changed."""

    name: Name
    seed: Seed
    num_rollouts: Count
    prompts_per_rollout: Count
    samples_per_prompt: Count
    max_response_tokens: Tokens
    updates_per_rollout: Count
    micro_batch_size: Count
    learning_rate: NotNegative
    clip_ratio: NotNegative
    kl_coef: NotNegative
    entropy_coef: NotNegative
    temperature: Temperature
    grad_clip: NotNegative
    reuse_rollout_logprob: bool
    resume: Run | None
    diagnose: bool
    export: bool
    model: ModelConfig
    parallel: ParallelConfig
    rollout: RolloutConfig
    numerics: NumericsConfig
    task: TaskConfig
    tokenizer: TokenizerConfig
    warmup: WarmupConfig
    device: DeviceConfig
    optimizer: OptimizerConfig
    correction: CorrectionConfig
    tracker: TrackerConfig
    checkpoint: CheckpointConfig
    launch: LaunchConfig
    cluster: ClusterConfig

    @property
    def world_size(self) -> int:
        """Count the ranks that train; rollout uses them or a part of them."""
        return self.parallel.dp * self.parallel.cp * self.parallel.tp

    @property
    def local_ranks(self) -> range:
        """Derive the ranks of this machine: every machine has as many, adjacent ones."""
        here = self.world_size // self.cluster.nodes
        return range(self.cluster.node * here, (self.cluster.node + 1) * here)

    @property
    def layout(self) -> Layout:
        """Derive the training layout."""
        return Layout(dp=self.parallel.dp, cp=self.parallel.cp, tp=self.parallel.tp, sp=self.parallel.sp)

    @property
    def rollout_layout(self) -> RolloutLayout:
        """Derive the rollout layout: without a stated count, as many engines as fit.

        An external engine is one process, whatever it is made of, to which rank 0 speaks.
        """
        if self.rollout.external:
            return RolloutLayout(tp=1, engines=1, world_size=self.world_size)
        engines = self.rollout.engines or self.world_size // self.rollout.tp
        return RolloutLayout(tp=self.rollout.tp, engines=engines, world_size=self.world_size)

    @property
    def declared_routes(self) -> dict[str, str]:
        """Return the route of every operator that is rlsp's: an external engine's are not seen."""
        routes = self.numerics.routes.declared()
        if self.rollout.external:
            return {name: route for name, route in routes.items() if name.startswith("train.")}
        return routes

    @property
    def exact(self) -> bool:
        """Tell whether rollout and training promise the same bits: every operator is rlsp's and strict."""
        return self.numerics.routes.strict and not self.rollout.external

    @property
    def sequences_per_rollout(self) -> int:
        """Count the sequences of one rollout."""
        return self.prompts_per_rollout * self.samples_per_prompt

    def first_prompt(self, rollout: int) -> int:
        """Return the index of a rollout's first prompt: rollouts go on where the warm-up ends."""
        return self.warmup.steps * self.warmup.sequences + rollout * self.prompts_per_rollout

    @property
    def padded_vocab(self) -> int:
        """Derive the vocabulary that the embedding and the head store."""
        return padded_vocab(self.model.vocab_size, self.numerics.virtual_tp)

    @property
    def padded_query_groups(self) -> int:
        """Derive the key-value heads that attention computes with, zero heads included."""
        return padded_groups(self.model.num_query_groups, self.numerics.virtual_tp)

    @property
    def padded_attention_heads(self) -> int:
        """Derive the query heads that attention computes with, zero heads included."""
        return self.model.num_attention_heads // self.model.num_query_groups * self.padded_query_groups

    @property
    def tokenizer_path(self) -> str | None:
        """Derive where the tokenizer lies: its own place, or the model's; None where neither is stated."""
        return self.tokenizer.path or self.model.path

    @property
    def config_hash(self) -> str:
        """Hash the whole config: SHA-256 of its canonical JSON, 64 hex characters."""
        canonical = json.dumps(to_plain(self), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(canonical.encode()).hexdigest()


def from_plain(plain: object) -> Config:
    """Read a config back from what `to_plain` or Hydra's container wrote.

    Raises:
        ConfigError: A key is unknown or missing, or a value has the wrong type; all of them are listed.
    """
    return read_plain(Config, plain)


def register_schema() -> None:
    """Give Hydra the types, under the name that conf/config.yaml begins with."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    schema = OmegaConf.structured(Config)
    _thaw(schema)
    ConfigStore.instance().store(name=SCHEMA_NAME, node=schema)


def _thaw(node: DictConfig) -> None:
    """Lift the read-only flag that a frozen dataclass leaves, so that YAML can fill the node in.

    A section of a section is made here: OmegaConf would make it, read-only, as the first value arrives.
    """
    from omegaconf import DictConfig, OmegaConf

    OmegaConf.set_readonly(node, None)
    for name, kind in get_type_hints(OmegaConf.get_type(node) or object).items():
        if get_origin(kind) is dict:
            node[name] = {}
            OmegaConf.set_struct(node[name], False)  # its names are for others to know
        elif is_dataclass(kind):
            if OmegaConf.is_missing(node, name):
                node[name] = OmegaConf.structured(kind)
            child = node._get_node(name)
            assert isinstance(child, DictConfig)
            _thaw(child)
