"""What refuses to start, and in which words."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError
from yaml.error import MarkedYAMLError

COMPOSITION_ERRORS = (
    HydraException,
    OmegaConfBaseException,
    YAMLError,
    OSError,  # a file of the tree that cannot be read
    RecursionError,  # references that go round in a circle
    ValueError,  # a null in place of a group's option; bytes that are no text
    TypeError,
    AttributeError,
    AssertionError,
    KeyError,  # the last four: YAML of another shape than Hydra expects
)
"""What Hydra raises for input that it cannot compose."""


_MAX_CHARACTERS = 2000
_CUT = 500  # kept at either end: the key stands at the beginning, what is legal at the end


class RefusalError(Exception):
    """Refuse to start; `lines` says everything that is wrong, one line each."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = tuple(map(_printable, lines))


def _printable(line: str) -> str:
    """Escape what a terminal would act on, and cut what a value made too long to read."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_CUT]} … {text[-_CUT:]}"


def first_line(error: Exception) -> str:
    """Say in one line what a library has against the input, with the place where it knows one."""
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}: no YAML: {error.problem}"
    if isinstance(error, RecursionError):
        return "references (${…}) go round in a circle"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: cannot be read: {error.strerror}"
    text = " ".join(line.strip() for line in str(error).splitlines()[:2] if line.strip())
    if not text and isinstance(error.__cause__, Exception):
        return first_line(error.__cause__)
    return text or type(error).__name__
