"""What diagnose/NNNNN.json says, and what `rlsp-diagnose` and its ranks tell each other."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Literal

from rlsp.report.documents import Document

FOLDER = "diagnose"


class State(Enum):
    """What the comparison of one boundary found; UNSEEN where a side does not show it."""

    EQUAL = "equal"
    FIRST = "first"
    AFTER = "after"
    UNSEEN = "unseen"


class Outcome(Enum):
    """What the replay of a sequence found."""

    EQUAL = "equal"
    DIFFERENT = "different"


class Side(Document):
    """One side's value: the ranks that hold it, its bit pattern in hexadecimal, and its number."""

    ranks: tuple[int, ...]
    bits: str
    number: float


class FirstDifference(Document):
    """Where a boundary first differs: the lowest position, there the lowest element (index of a feature)."""

    boundary: str
    layer: int | None
    position: int
    element: int
    dtype: str
    train: Side
    rollout: Side


class BoundaryResult(Document):
    """One boundary: how many positions and elements were compared, and how many of them differ."""

    boundary: str
    layer: int | None
    state: State
    dtype: str | None
    positions: int
    elements: int
    differing_positions: int
    differing_elements: int
    first: FirstDifference | None


class RecordedTokens(Document):
    """How the replay compares with what the run recorded: active tokens, and how many of them differ.

    `drawn` are tokens that the engine draws otherwise than it did; the replay goes on with the recorded ones.
    """

    tokens: int
    train_logprob: int
    train_row: int
    rollout_logprob: int
    rollout_row: int
    drawn: int


class Diagnosis(Document):
    """The file diagnose/NNNNN.json, and what `rlsp-diagnose --json` prints.

    `weights_digest` is the recorded digest that the replay's weights were proved to have, `updates` how many
    updates led to them. Position p is that of an input token; its log-prob is the one of token p + 1.
    """

    schema_version: Literal[1] = 1
    run_id: str
    rollout: int
    sample: int
    prompt_tokens: int
    response_tokens: int
    weights_digest: str
    updates: int
    outcome: Outcome
    first: FirstDifference | None
    boundaries: tuple[BoundaryResult, ...]
    recorded: RecordedTokens
    notes: tuple[str, ...]


class Request(Document):
    """What `rlsp-diagnose` asks of the ranks that it starts."""

    run_dir: str
    rollout: int
    sample: int
    notes: tuple[str, ...]


class Answer(Document):
    """What the ranks answer: a diagnosis, or why there can be none."""

    refusal: str | None
    diagnosis: Diagnosis | None


def request_path(scratch: Path | str) -> Path:
    """Return where the ranks of a diagnosis find what is asked."""
    return Path(scratch) / "request.json"


def answer_path(scratch: Path | str) -> Path:
    """Return where the ranks of a diagnosis leave their answer."""
    return Path(scratch) / "answer.json"


def diagnosis_path(run_dir: Path | str, rollout: int) -> Path:
    """Return where a run keeps the diagnosis of rollout `rollout`."""
    return Path(run_dir) / FOLDER / f"{rollout:05d}.json"
