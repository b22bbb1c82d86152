"""Between frozen dataclasses and plain JSON values: nothing is guessed, filled in or dropped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from rlsp.config.rules import ConfigError, Given, Rule, Violation

T = TypeVar("T")


def to_plain(value: object) -> Any:
    """Write a dataclass as dicts, lists, names of Enum members and scalars."""
    if is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return dict(value)
    return value


def read_plain(schema: type[T], plain: object) -> T:
    """Read a dataclass back from plain values.

    Raises:
        ConfigError: A key is unknown or missing, or a value has the wrong type; all of them are listed.
    """
    found: list[Violation] = []
    value = _read(schema, plain, "", found)
    if found:
        raise ConfigError(tuple(found))
    return cast(T, value)


def leaf_kinds(schema: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """List every dotted key of a schema with its annotation, rules included."""
    for name, kind in get_type_hints(schema, include_extras=True).items():
        if is_dataclass(kind):
            yield from leaf_kinds(cast(type, kind), f"{prefix}{name}.")
        else:
            yield prefix + name, kind


def legal_text(kind: Any) -> str:
    """Say in words which values an annotation allows."""
    kind, optional = _without_none(kind)
    if get_origin(kind) is tuple:
        text = f"a list, each item {legal_text(get_args(kind)[0])}"
    elif (rule := rule_of(kind)) is not None:
        text = rule.legal
    elif isinstance(kind, type) and issubclass(kind, Enum):
        text = " or ".join(member.name for member in kind)
    else:
        text = {bool: "true or false", int: "an integer", float: "a number", str: "text"}[kind]
    return f"null or {text}" if optional and not text.startswith("null") else text


def rule_of(kind: Any) -> Rule | None:
    """Find the rule inside an annotation; an optional value obeys it unless it is null."""
    kind, _ = _without_none(kind)
    if get_origin(kind) is Annotated:
        return next((extra for extra in get_args(kind)[1:] if isinstance(extra, Rule)), None)
    return None


def is_legal(kind: Any, value: object) -> bool:
    """Tell whether a value obeys the rule inside an annotation."""
    rule = rule_of(kind)
    return rule is None or rule.holds(value)


def unknown_key(key: str, value: object, known: list[str]) -> Violation:
    """Refuse a key that the schema lacks, with the nearest one that it has."""
    section = [k for k in known if k.startswith(f"{key}.")]
    if section:
        return Violation(key, value, f"nothing for the section itself; its keys: {', '.join(section)}")
    near = get_close_matches(key, known, n=1) or [k for k in known if k.rpartition(".")[2] == key][:1]
    hint = f"did you mean {near[0]}?" if near else "`--cfg job` lists them"
    return Violation(key, value, f"a known key; {hint}")


def _read(allowed: Any, plain: object, key: str, found: list[Violation]) -> object:
    kind, optional = _without_none(allowed)
    if optional and plain is None:
        return None
    if is_dataclass(kind):
        return _read_fields(cast(type, kind), plain, key, found)
    if get_origin(kind) is tuple and isinstance(plain, list | tuple):
        return tuple(_read(get_args(kind)[0], item, key, found) for item in plain)
    bare = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if get_origin(bare) is dict and isinstance(plain, Mapping) and all(isinstance(n, str) for n in plain):
        return Given(plain)  # what may be in it is for its rule to say
    if isinstance(bare, type):
        if issubclass(bare, Enum):
            if isinstance(plain, str) and plain in bare.__members__:
                return bare[plain]
        elif bare is float and type(plain) in (int, float):
            return float(cast(float, plain))
        elif type(plain) is bare:
            return plain
    found.append(Violation(key, plain, legal_text(allowed)))
    return None


def _read_fields(schema: type, plain: object, key: str, found: list[Violation]) -> object:
    if not isinstance(plain, Mapping):
        found.append(Violation(key or "config", plain, "a mapping of keys to values"))
        return None
    kinds = get_type_hints(schema, include_extras=True)
    prefix = f"{key}." if key else ""
    for name in plain:
        if name not in kinds:
            found.append(unknown_key(prefix + str(name), plain[name], [prefix + known for known in kinds]))
    for name, kind in kinds.items():
        if name not in plain:
            found.append(Violation(prefix + name, "(missing)", _legal_or_group(kind)))
    values = {
        name: _read(kind, plain[name], prefix + name, found) for name, kind in kinds.items() if name in plain
    }
    return schema(**values) if len(values) == len(kinds) else None


def _legal_or_group(kind: Any) -> str:
    plain, optional = _without_none(kind)
    if not is_dataclass(plain):
        return legal_text(kind)
    return f"{'null or ' * optional}a mapping of keys to values"


def _without_none(kind: Any) -> tuple[Any, bool]:
    if get_origin(kind) in (Union, UnionType):
        rest = [arm for arm in get_args(kind) if arm is not type(None)]
        return rest[0], True
    return kind, False
