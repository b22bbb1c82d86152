"""Kinds of values, each with the rule that it obeys, and what a refusal says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
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


def _printable(pattern: str) -> Callable[[str], bool]:
    """Match a pattern without what a terminal or a page would act on."""
    return lambda text: text.isprintable() and re.fullmatch(pattern, text) is not None


# Bounds keep what cannot run out: a number that no machine holds would be accepted first and abort later.
_MAX_COUNT = 10**6
_MAX_TOKENS = 2**17  # the longest context of Qwen3's family
_MAX_BLOCK = 4096
_MAX_SIZE = 1e6  # far below where a float32 square overflows
_DAY_S = 86400.0


def _within(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: low <= value <= high  # false for NaN


def _block(low: int) -> Callable[[int], bool]:
    return lambda value: low <= value <= _MAX_BLOCK and _power_of_two(value)


def _is_flat(options: Mapping[str, Any]) -> bool:
    """Tell whether a mapping holds nothing but names with scalars, or with lists of them."""
    values = [item for value in options.values() for item in (value if isinstance(value, list) else [value])]
    scalars = all(isinstance(value, bool | int | str) or _is_finite(value) for value in values)
    return scalars and all(re.fullmatch(r"[A-Za-z_]\w*", name) for name in options)


_SCALED = {
    "default": set[str](),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}


def _is_scaling(options: Mapping[str, Any]) -> bool:
    """Tell whether a mapping is a RoPE scaling that is implemented, with exactly its numbers."""
    if not options:
        return True
    kind, numbers = options.get("rope_type"), {k: v for k, v in options.items() if k != "rope_type"}
    if not isinstance(kind, str) or _SCALED.get(kind) != set(numbers):
        return False
    if not all(type(v) in (int, float) and isfinite(v) and 0 < v <= _MAX_SIZE for v in numbers.values()):
        return False
    return kind != "llama3" or numbers["low_freq_factor"] < numbers["high_freq_factor"]


def _is_finite(value: object) -> bool:
    return isinstance(value, float) and isfinite(value)


Count = Annotated[int, Rule(f"an integer in 1..{_MAX_COUNT}", _within(1, _MAX_COUNT))]
Tokens = Annotated[int, Rule(f"an integer in 1..{_MAX_TOKENS}", _within(1, _MAX_TOKENS))]
TokenId = Annotated[int, Rule(f"an integer in 0..{_MAX_COUNT - 1}", _within(0, _MAX_COUNT - 1))]
Seed = Annotated[int, Rule("an integer in 0..2^63-1", lambda v: 0 <= v < 2**63)]
Width = Annotated[int, Rule(f"a power of two of at most {_MAX_BLOCK}", _block(1))]
Tile = Annotated[int, Rule(f"a power of two in 16..{_MAX_BLOCK}", _block(16))]
Even = Annotated[
    int, Rule(f"an even integer in 2..{_MAX_BLOCK}", lambda v: 2 <= v <= _MAX_BLOCK and v % 2 == 0)
]
Index = Annotated[int, Rule(f"an integer in 0..{_MAX_COUNT - 1}", _within(0, _MAX_COUNT - 1))]
Port = Annotated[int, Rule("an integer in 1..65535", _within(1, 65535))]
Host = Annotated[
    str, Rule("the name or address of a machine", _matches(r"[A-Za-z0-9:][A-Za-z0-9._:%-]{0,252}"))
]
Steps = Annotated[int, Rule(f"an integer in 0..{_MAX_COUNT}", _within(0, _MAX_COUNT))]
Vocab = Annotated[int, Rule(f"an integer in 2..{_MAX_COUNT}", _within(2, _MAX_COUNT))]
GradLsb = Annotated[int, Rule("an integer in 20..50", _within(20, 50))]
Threads = Annotated[
    int, Rule("1 (leaf products in float32 change their bits with threads)", lambda v: v == 1)
]
Reward = Annotated[
    float, Rule(f"a number in -{_MAX_SIZE:.0f}..{_MAX_SIZE:.0f}", _within(-_MAX_SIZE, _MAX_SIZE))
]
NotNegative = Annotated[float, Rule(f"a number in 0..{_MAX_SIZE:.0f}", _within(0, _MAX_SIZE))]
Positive = Annotated[float, Rule("a number in 1e-12..1e12", _within(1e-12, 1e12))]
Temperature = Annotated[float, Rule("a number in 1e-6..1e6", _within(1e-6, 1e6))]
Seconds = Annotated[float, Rule(f"seconds in 1..{_DAY_S:.0f}", _within(1.0, _DAY_S))]
Grace = Annotated[float, Rule("a number above 0 and at most 6", lambda v: 0 < v <= 6)]
Gibibytes = Annotated[float, Rule("GiB in 0.01..4096", _within(0.01, 4096))]
Normal = Annotated[float, Rule("a number in 1.2e-38..1 (normal in float32)", _within(1.2e-38, 1.0))]
Fraction = Annotated[float, Rule("a number of at least 0 and below 1", lambda v: 0 <= v < 1)]
Name = Annotated[
    str,
    Rule(
        "1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit",
        _matches(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"),
    ),
]
Project = Annotated[
    str,
    Rule("1 to 128 printable characters without / \\ # ? % :", _printable(r"(?!\.{1,2}$)[^/\\#?%:]{1,128}")),
]
Label = Annotated[str, Rule("1 to 128 printable characters", _printable(r".{1,128}"))]
Text = Annotated[str, Rule("1 to 65536 characters", lambda v: 1 <= len(v) <= 65536)]
FilePath = Annotated[str, Rule("1 to 4096 characters", lambda v: 1 <= len(v) <= 4096 and "\0" not in v)]
Factory = Annotated[
    str, Rule("module:function, as in my_tasks.shout:make", _matches(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*"))
]
Options = Annotated[
    dict[str, Any],
    Rule("a mapping of names to numbers, texts, true, false or lists of them", _is_flat),
]
RopeScaling = Annotated[
    dict[str, Any],
    Rule(
        "{}, {rope_type: default}, {rope_type: linear, factor: …}, or {rope_type: llama3, factor: …, "
        "low_freq_factor: …, high_freq_factor: … (above low), original_max_position_embeddings: …}",
        _is_scaling,
    ),
]
Tag = Annotated[str, Rule("1 to 64 printable characters", _printable(r".{1,64}"))]
Route = Annotated[
    str,
    Rule(
        "strict or native, for both sides; or training/rollout: strict/native, native/strict",
        _matches(r"(strict|native)(/(strict|native))?"),
    ),
]
AUTO = "auto"
"""As `resume`: go on with what is in the run folder, or begin there."""
Run = Annotated[
    str, Rule("a run folder, the id of a run or auto", lambda v: 1 <= len(v) <= 4096 and "\0" not in v)
]
Every = Annotated[int, Rule(f"an integer in 0..{_MAX_COUNT}", _within(0, _MAX_COUNT))]
Restarts = Annotated[int, Rule("an integer in 0..1000", _within(0, 1000))]


@dataclass(frozen=True)
class Violation:
    """Name a key, the value that it was given, and the values that are legal."""

    key: str
    value: object
    legal: str

    def __str__(self) -> str:
        return f"{self.key}={shown(self.value)}: legal: {self.legal}"


class Given(dict[str, Any]):
    """A mapping that goes to somebody else as it is; it is hashed, and so never changed."""

    def __hash__(self) -> int:  # type: ignore[override]
        """Hash its JSON."""
        return hash(json.dumps(self, sort_keys=True))


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
    if isinstance(value, tuple):
        return f"[{', '.join(map(shown, value))}]"
    return str(value) or "''"
