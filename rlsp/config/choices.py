"""The closed choices of an experiment: an option is one of these names, or it is refused."""

from __future__ import annotations

from enum import Enum


class Dtype(Enum):
    """Dtype of the weights and of matrix products."""

    bfloat16 = "bfloat16"
    float32 = "float32"


class EngineKind(Enum):
    """What generates: rlsp's own engine, in the ranks, or an external one, in a process of its own."""

    native = "native"
    vllm = "vllm"


class TrackerMode(Enum):
    """Where Weights & Biases keeps the mirror of a run."""

    offline = "offline"
    online = "online"
    none = "none"


class DeviceKind(Enum):
    """What the ranks compute on."""

    cpu = "cpu"
    cuda = "cuda"


class TaskKind(Enum):
    """What is asked and how answers are scored."""

    arithmetic = "arithmetic"
    constant = "constant"
    jsonl = "jsonl"
    reasoning_gym = "reasoning_gym"
    custom = "custom"


class TokenizerKind(Enum):
    """What turns text into token ids; `auto` looks at the model."""

    auto = "auto"
    character = "character"
    hugging_face = "hugging_face"
    none = "none"


class ChatUse(Enum):
    """Whether prompts go through a chat template; `auto`: if the tokenizer has one and the task instructs."""

    auto = "auto"
    always = "always"
    never = "never"


class TaskOrder(Enum):
    """In which order an epoch shows the rows of a file."""

    shuffled = "shuffled"
    file = "file"


class ScorerKind(Enum):
    """Where a response must have the answer; `exact` takes its first mark, else its last number."""

    exact = "exact"
    tag = "tag"
    boxed = "boxed"
    hashes = "hashes"
    number = "number"
    text = "text"
    math_verify = "math_verify"


class CorrectionKind(Enum):
    """How the loss makes up for a rollout that computed other log-probabilities than training."""

    none = "none"
    token_tis = "token_tis"
    sequence_tis = "sequence_tis"
    token_mis = "token_mis"
    sequence_mis = "sequence_mis"


class OptimizerKind(Enum):
    """How weights are updated."""

    adamw = "adamw"
