"""Kinds of values, each with the rule that it obeys, and what a refusal says."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from math import isfinite
from typing import Annotated, Any


@dataclass(frozen=True)
class Rule:
    """Say in words which values are legal, and test one."""

    legal: str
    holds: Callable[[Any], bool]


def _power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def _matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


Count = Annotated[int, Rule("an integer of at least 1", lambda v: v >= 1)]
Seed = Annotated[int, Rule("an integer in 0..2^63-1", lambda v: 0 <= v < 2**63)]
Width = Annotated[int, Rule("a power of two", _power_of_two)]
Tile = Annotated[int, Rule("a power of two of at least 16", lambda v: v >= 16 and _power_of_two(v))]
Even = Annotated[int, Rule("an even integer of at least 2", lambda v: v >= 2 and v % 2 == 0)]
Vocab = Annotated[int, Rule("an integer of at least 2", lambda v: v >= 2)]
GradLsb = Annotated[int, Rule("an integer in 20..50", lambda v: 20 <= v <= 50)]
Threads = Annotated[
    int, Rule("1 (leaf products in float32 change their bits with threads)", lambda v: v == 1)
]
Finite = Annotated[float, Rule("a finite number", isfinite)]
NotNegative = Annotated[float, Rule("a finite number of at least 0", lambda v: isfinite(v) and v >= 0)]
Positive = Annotated[float, Rule("a finite number above 0", lambda v: isfinite(v) and v > 0)]
Grace = Annotated[float, Rule("a number above 0 and at most 6", lambda v: 0 < v <= 6)]
Normal = Annotated[
    float,
    Rule("a finite number of at least 1.2e-38 (normal in float32)", lambda v: isfinite(v) and v >= 1.2e-38),
]
Fraction = Annotated[float, Rule("a number of at least 0 and below 1", lambda v: 0 <= v < 1)]
Name = Annotated[
    str,
    Rule(
        "1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit",
        _matches(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"),
    ),
]
Project = Annotated[str, Rule("1 to 128 characters without / \\ # ? % :", _matches(r"[^/\\#?%:\n]{1,128}"))]
Label = Annotated[str, Rule("1 to 128 characters", _matches(r".{1,128}"))]
Tag = Annotated[str, Rule("1 to 64 characters", _matches(r".{1,64}"))]
Route = Annotated[
    str,
    Rule(
        "strict or native, for both sides; or training/rollout: strict/native, native/strict",
        _matches(r"(strict|native)(/(strict|native))?"),
    ),
]
Resume = Annotated[str, Rule("null (resuming a run is not supported yet)", lambda _: False)]


@dataclass(frozen=True)
class Violation:
    """Name a key, the value that it was given, and the values that are legal."""

    key: str
    value: object
    legal: str

    def __str__(self) -> str:
        return f"{self.key}={shown(self.value)}: legal: {self.legal}"


class ConfigError(ValueError):
    """Refuse a config; `violations` lists everything that is wrong with it."""

    def __init__(self, found: tuple[Violation, ...]) -> None:
        super().__init__("\n".join(map(str, found)))
        self.violations = found


def shown(value: object) -> str:
    """Write a value as a user would type it."""
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value) or "''"
