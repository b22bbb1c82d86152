"""What a response is worth to whoever knows the right answer. No torch."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol, runtime_checkable

from rlsp.rl.task.extract import after_hashes, boxed, last_number, number, right_answer, same_answer, tagged
from rlsp.rl.task.protocol import TaskError

Extract = Callable[[str], str | None]


@runtime_checkable
class Scorer(Protocol):
    """Score a response's text by the label of its prompt."""

    @property
    def name(self) -> str:
        """What the content hash calls it; it changes whenever a score may."""
        ...

    def score(self, label: str, text: str) -> float:
        """Return the reward."""
        ...


def _whole(text: str) -> str | None:
    return text.strip()


EXTRACTIONS: Final[dict[str, Extract]] = {
    "tag": tagged,
    "boxed": boxed,
    "hashes": after_hashes,
    "number": last_number,
    "text": _whole,
}
"""Where a response may have its answer, by the name of the scorer that looks there alone."""

_MARKED: Final = ("tag", "boxed", "hashes")


def answer_of(text: str, where: str, *, numeric: bool) -> str | None:
    """Find the answer in a response.

    Args:
        text: The response.
        where: A name in `EXTRACTIONS`, or "exact": in the marks that the response has, `<answer>` before
            a box before `####`; without one its last number, or all of it.
        numeric: Whether the right answer is a number.

    Returns:
        The answer, or None if there is none.
    """
    if where != "exact":
        return EXTRACTIONS[where](text)
    marked = (EXTRACTIONS[name](text) for name in _MARKED)
    rest = EXTRACTIONS["number" if numeric else "text"]
    return next((found for found in marked if found is not None), None) or rest(text)


@dataclass(frozen=True)
class ExactScorer:
    """Pay 1 for the right answer and 0 for any other.

    Attributes:
        where: Where responses have their answers, as `answer_of` takes it.
    """

    where: str
    _VERSION: ClassVar[int] = 1
    """To be raised whenever a score changes."""

    def __post_init__(self) -> None:
        """Refuse a place that is not known."""
        if self.where != "exact" and self.where not in EXTRACTIONS:
            raise ValueError(f"unknown scorer {self.where!r}; legal: exact, {', '.join(EXTRACTIONS)}")

    @property
    def name(self) -> str:
        """Name place and version."""
        return f"{self.where}/{self._VERSION}"

    def score(self, label: str, text: str) -> float:
        """Compare the response's answer with the label's."""
        right = right_answer(label)
        given = answer_of(text, self.where, numeric=number(right) is not None)
        return float(given is not None and same_answer(given, right))


@dataclass(frozen=True)
class MathVerifyScorer:
    """Pay 1 where math-verify finds the response's answer equal to the label's as mathematics, else 0.

    It looks for the answer itself, but for the content of `<answer>` tags. What takes it longer than its own
    limit is not equal. It comes with the extra `math`, and is to be called in the main thread of a process.
    """

    _VERSION: ClassVar[int] = 1
    _LIMIT_S: ClassVar[int] = 2
    """Of each of its three steps: parsing label, parsing response, comparing."""

    def __post_init__(self) -> None:
        """Refuse to be made where math-verify is not installed."""
        if not math_verify_is_installed():
            raise TaskError("math-verify is not installed: it comes with `pip install 'rlsp[math]'`")

    @property
    def name(self) -> str:
        """Name package and versions."""
        return f"math_verify {importlib.metadata.version('math-verify')}/{self._VERSION}"

    def score(self, label: str, text: str) -> float:
        """Compare as mathematics.

        Raises:
            ValueError: The label is no mathematics.
        """
        package = importlib.import_module("math_verify")
        right = right_answer(label)
        gold = package.parse(_in_a_box(right), parsing_timeout=self._LIMIT_S)
        if not gold:
            raise ValueError(f"math-verify can make nothing of the label {right!r}")
        given = tagged(text)
        found = package.parse(text if given is None else _in_a_box(given), parsing_timeout=self._LIMIT_S)
        return float(package.verify(gold, found, timeout_seconds=self._LIMIT_S))


def math_verify_is_installed() -> bool:
    """Tell whether math-verify is there, without importing it."""
    return importlib.util.find_spec("math_verify") is not None


def _in_a_box(answer: str) -> str:
    return f"\\boxed{{{answer}}}"
