"""What a comparison of two runs says: stages, the first difference, and why runs cannot be compared."""

from __future__ import annotations

from enum import Enum
from typing import Literal

from rlsp.report.documents import Document


class Stage(Enum):
    """What is compared, in the order in which it happens; from TOKENS on once a rollout or update."""

    INITIAL_WEIGHTS = "initial weights"
    WARM_UP = "warm-up"
    TOKENS = "tokens"
    ROLLOUT_LOGPROB = "rollout log-prob"
    ROLLOUT_ROWS = "rollout row"
    TRAIN_LOGPROB = "train log-prob"
    TRAIN_ROWS = "train row"
    REWARDS = "rewards"
    ADVANTAGES = "advantages"
    LOSS = "loss"
    GRADIENTS = "gradients"
    GRADIENT_NORM = "gradient norm"
    OPTIMIZER = "optimizer state"
    WEIGHTS = "weights"


class State(Enum):
    """How a stage came out over all that was compared."""

    EQUAL = "equal"
    FIRST = "first difference"
    AFTER = "differs afterwards"
    EMPTY = "nothing to compare"


class Outcome(Enum):
    """How the comparison came out."""

    EQUAL = "equal"
    DIFFERENT = "different"
    NOT_COMPARABLE = "not comparable"


class Side(Document):
    """One run's value: its bits in hex ("absent" where there is none), as a number where it is one.

    `ranks` are the ranks that own it.
    """

    bits: str
    number: float | int | None
    ranks: tuple[int, ...]


class Difference(Document):
    """Where two runs differ; coordinates that a stage does not have are None.

    `tensor` names the tensor of the model, or that of the rollout's file. `explanation` says what is known of
    the cause.
    """

    stage: Stage
    rollout: int | None = None
    update: int | None = None
    sample: int | None = None
    position: int | None = None
    tensor: str | None = None
    virtual_shard: int | None = None
    a: Side
    b: Side
    explanation: str | None = None


class StageResult(Document):
    """One stage over all rollouts and updates: of `compared` items, `unit`s, `differing` differ."""

    stage: Stage
    state: State
    unit: str
    compared: int
    differing: int
    first: Difference | None


class RunFacts(Document):
    """Who was compared: layouts as {"dp": …, "cp": …, "tp": …, "sp": …} and {"tp": …, "engines": …}."""

    run_id: str
    status: str
    verdict: str
    layout: dict[str, int]
    rollout_layout: dict[str, int]
    micro_batch_size: int | None
    rollouts: int


class Comparison(Document):
    """What rlsp-compare found; `stages` is empty where the runs cannot be compared, `refusals` says why.

    `runs` are A and B; it is empty where their manifests cannot be read.
    """

    schema_version: Literal[1] = 1
    outcome: Outcome
    runs: tuple[RunFacts, ...]
    refusals: tuple[str, ...]
    notes: tuple[str, ...]
    rollouts: int
    first: Difference | None
    stages: tuple[StageResult, ...]
