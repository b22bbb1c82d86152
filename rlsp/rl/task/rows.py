"""One line of prompts and labels: which fields hold them, and what may be wrong with it. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from rlsp.rl.task.protocol import Message

PROMPT_KEYS: Final = ("prompt", "question", "problem", "messages", "input", "prompt_ids", "input_ids")
LABEL_KEYS: Final = ("label", "answer", "ground_truth", "reward_model.ground_truth", "label_ids")
"""Where prompts and labels are looked for, in this order; a dot leads into an object."""

_SHOWN = 8


class RowError(ValueError):
    """Say what is wrong with one line; whoever knows file and line puts them in front."""


@dataclass(frozen=True)
class Fields:
    """Name the fields that hold prompt and label."""

    prompt: str
    label: str


@dataclass(frozen=True)
class Ids:
    """Token ids, at least one, none negative."""

    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """A question, as text, as what was said so far in a conversation, or as token ids, and the right answer.

    Attributes:
        question: Role and content, at least one (a plain prompt is one of "user"); or token ids.
        label: The right answer as text, or as token ids.
    """

    question: tuple[Message, ...] | Ids
    label: str | Ids


def parse(line: bytes) -> Mapping[str, Any]:
    """Read a line as a JSON object.

    Raises:
        RowError: It is none.
    """
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RowError(f"is not UTF-8: byte 0x{line[error.start]:02x} at position {error.start}") from error
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise RowError("is not JSON that can be read: nested too deeply") from error
    except ValueError as error:
        raise RowError(f"is not JSON: {error}; a line is one JSON object") from error
    if not isinstance(value, dict):
        raise RowError(f"is {_kind(value)}: a row is one JSON object with a prompt and a label")
    return value


def find_fields(row: Mapping[str, Any], prompt_key: str | None, label_key: str | None) -> Fields:
    """Decide by the first row which fields hold prompts and labels.

    Args:
        row: The first row.
        prompt_key: Where the prompt is; None for the first of `PROMPT_KEYS` that the row has.
        label_key: Where the label is; None for the first of `LABEL_KEYS`.

    Raises:
        RowError: The row has none, naming what it has.
    """
    found = []
    for what, key, known in (("prompt", prompt_key, PROMPT_KEYS), ("label", label_key, LABEL_KEYS)):
        names = known if key is None else (key,)
        present = [name for name in names if look_up(row, name) is not None]
        if not present:
            raise _missing(row, names, f"task.{what}_key")
        found.append(present[0])
    return Fields(*found)


def read_row(row: Mapping[str, Any], fields: Fields) -> Row:
    """Take prompt and label out of a row.

    Raises:
        RowError: One is missing, empty or of another type.
    """
    prompt, label = look_up(row, fields.prompt), look_up(row, fields.label)
    if prompt is None:
        raise _missing(row, (fields.prompt,), "task.prompt_key")
    if label is None:
        raise _missing(row, (fields.label,), "task.label_key")
    return Row(_question(prompt, fields.prompt), _label(label, fields.label))


def _question(prompt: object, key: str) -> tuple[Message, ...] | Ids:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise RowError(f"{key} is empty")
        return (("user", prompt),)
    if not isinstance(prompt, list):
        raise RowError(f"{key} is {_kind(prompt)}: legal: text, or a list of messages or of token ids")
    if not prompt:
        raise RowError(f"{key} is empty")
    if isinstance(prompt[0], int):
        return _ids(prompt, key)
    messages = []
    for place, message in enumerate(prompt):
        role, content = (
            (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        )
        if not isinstance(role, str) or not isinstance(content, str):
            raise RowError(
                f"{key}[{place}] is no message: legal: an object whose role and content are text, "
                "or token ids throughout"
            )
        messages.append((role, content))
    if not any(content.strip() for _, content in messages):
        raise RowError(f"{key} is empty")
    return tuple(messages)


def _ids(values: list[Any], key: str) -> Ids:
    for place, value in enumerate(values):
        if type(value) is not int or value < 0:
            raise RowError(f"{key}[{place}] is no token id: legal: a whole number of at least 0")
    return Ids(tuple(values))


def _label(label: object, key: str) -> str | Ids:
    if isinstance(label, list) and label and isinstance(label[0], int):
        return _ids(label, key)
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        raise RowError(f"{key} is {_kind(label)}: legal: text, a number or a list of token ids")
    text = label if isinstance(label, str) else _digits(label)
    if not text.strip():
        raise RowError(f"{key} is empty")
    return text


def _digits(label: int | float) -> str:
    return str(int(label)) if isinstance(label, float) and label.is_integer() else str(label)


def look_up(row: Mapping[str, Any], key: str) -> object:
    """Find a field; a name with a dot in it may stand as it is or lead into an object."""
    if key in row:
        value: object = row[key]
        return value
    head, dot, rest = key.partition(".")
    inner = row.get(head)
    return look_up(inner, rest) if dot and isinstance(inner, dict) else None


def _missing(row: Mapping[str, Any], wanted: Sequence[str], option: str) -> RowError:
    if empty := [name for name in wanted if name in row]:
        return RowError(f"{empty[0]} is null ({option} names another field)")
    names = [repr(name) for name in list(row)[:_SHOWN]] + ["…"] * (len(row) > _SHOWN)
    return RowError(
        f"has no {' or '.join(wanted)} (it has {', '.join(names) or 'no field'}): {option} names the field"
    )


def _kind(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    kinds = {str: "text", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return kinds[type(value)]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")
