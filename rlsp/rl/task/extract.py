"""Find the answer in a response and compare it with the right one, by characters. No torch."""

from __future__ import annotations

import re
from typing import Final

_NUMBER: Final = re.compile(
    r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+"
)
_WHOLE: Final = re.compile(rf"([-+]?)\$?({_NUMBER.pattern})")
_MINUS: Final = "-\N{MINUS SIGN}"


def tagged(text: str) -> str | None:
    """Return what stands in the last `<answer>…</answer>`, or None."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return None if start < 0 else text[start + len("<answer>") : end].strip()


def boxed(text: str) -> str | None:
    r"""Return what stands in the last `\boxed{…}`, braces balanced, or None."""
    opening = r"\boxed{"
    start = text.rfind(opening)
    depth = 1
    for at in range(start + len(opening), len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start + len(opening) : at].strip()
    return None


def after_hashes(text: str) -> str | None:
    """Return the rest of the line behind the last `####`, as GSM8K writes answers, or None."""
    start = text.rfind("####")
    return None if start < 0 else (text[start + 4 :].splitlines() or [""])[0].strip()


def last_number(text: str) -> str | None:
    """Return the last number in its shortest form, or None; a minus behind a digit or letter subtracts."""
    matches = list(_NUMBER.finditer(text))
    if not matches:
        return None
    found = matches[-1]
    before = text[: found.start()].removesuffix("$")
    subtracts = before[-2:-1].isalnum() or before[-2:-1] in tuple(")]}")
    negative = before[-1:] in tuple(_MINUS) and not subtracts
    return _shortest("-" if negative else "", found.group())


def number(text: str) -> str | None:
    """Return a text that is a number and nothing else in its shortest form; None for any other."""
    cleaned = text.strip().replace("\N{MINUS SIGN}", "-").strip("$").removesuffix(".")
    whole = _WHOLE.fullmatch(cleaned)
    return None if whole is None else _shortest(whole.group(1), whole.group(2))


def right_answer(label: str) -> str:
    """Return the answer that a label gives: behind its `####` or in its box, if it has one, or all of it."""
    for found in (after_hashes(label), boxed(label)):
        if found:
            return found
    return label.strip()


def same_answer(given: str, right: str) -> bool:
    """Tell whether two answers are one: as numbers if both are, else as texts but for white space."""
    numbers = number(given), number(right)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return _plain(given) == _plain(right)


def _plain(text: str) -> str:
    return " ".join(text.strip().strip("$").removesuffix(".").split())


def _shortest(sign: str, digits: str) -> str:
    """Write a number without separators and without zeros that say nothing; no length is too long."""
    whole, _, fraction = digits.replace(",", "").partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    text = f"{whole}.{fraction}" if fraction else whole
    return f"-{text}" if sign == "-" and text != "0" else text
