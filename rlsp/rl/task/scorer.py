"""What a response is worth to whoever knows the right answer. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol, runtime_checkable

from rlsp.rl.task.extract import after_hashes, boxed, last_number, number, right_answer, same_answer, tagged

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
