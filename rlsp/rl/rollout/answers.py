"""Take an external engine's answers apart and refuse what cannot be: nobody else looks at them. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rlsp.rl.rollout.engine import EngineError

_ROUNDING = 1e-3
"""How far above 0 a log-probability may be rounded."""


def integer_of(answer: Mapping[str, Any], key: str) -> int:
    """Return an integer of an answer.

    Raises:
        EngineError: There is none.
    """
    value = answer.get(key)
    if type(value) is not int:
        raise EngineError(f"the engine's answer has {key}={value!r}: an integer was expected")
    return value


def digest_of(answer: Mapping[str, Any]) -> bytes:
    """Return the digest of an answer, 32 bytes.

    Raises:
        EngineError: There is none.
    """
    value = answer.get("digest")
    if not isinstance(value, str) or re.fullmatch(r"[0-9a-f]{64}", value) is None:
        raise EngineError(f"the engine's answer has digest={value!r}: 64 hex digits were expected")
    return bytes.fromhex(value)


def responses_of(
    answer: Mapping[str, Any],
    names: Sequence[str],
    limits: Sequence[int],
    stop: Collection[int],
    vocab_size: int,
) -> list[tuple[list[int], list[float]]]:
    """Return the tokens and log-probabilities of every request.

    Args:
        answer: What the engine said.
        names: What messages call each request.
        limits: The most tokens of each.
        stop: Tokens that end a response and belong to it.
        vocab_size: A token is below it.

    Raises:
        EngineError: Responses are missing, or the first of them that cannot be is named.
    """
    tokens, logp = answer.get("tokens"), answer.get("logp")
    if not (_are_lists(tokens, len(names)) and _are_lists(logp, len(names))):
        raise EngineError(f"the engine's answer has no {len(names)} lists of tokens and of log-probabilities")
    assert isinstance(tokens, list)
    assert isinstance(logp, list)
    for name, limit, row, values in zip(names, limits, tokens, logp, strict=True):
        if fault := _fault(row, values, limit, stop, vocab_size):
            raise EngineError(f"the engine's response to {name}: {fault}")
    return list(zip(tokens, logp, strict=True))


def _are_lists(value: object, count: int) -> bool:
    return isinstance(value, list) and len(value) == count and all(isinstance(one, list) for one in value)


def _fault(
    tokens: list[Any], logp: list[Any], limit: int, stop: Collection[int], vocab_size: int
) -> str | None:
    """Say what is wrong with one response."""
    if len(tokens) != len(logp):
        return f"{len(tokens)} tokens with {len(logp)} log-probabilities"
    for place, (token, value) in enumerate(zip(tokens, logp, strict=True)):
        if type(token) is not int or not 0 <= token < vocab_size:
            return f"token {place} is {token!r}, the vocabulary has {vocab_size}"
        if type(value) not in (int, float) or not math.isfinite(value) or value > _ROUNDING:
            return f"the log-probability of token {place} is {value!r}"
        if token in stop and place + 1 < len(tokens):
            return f"it goes on after token {place}, {token}, which ends a response"
    if len(tokens) > limit:
        return f"{len(tokens)} tokens, asked for at most {limit}"
    if len(tokens) < limit and (not tokens or tokens[-1] not in stop):
        return f"{len(tokens)} tokens of {limit}, and none that ends a response"
    return None
