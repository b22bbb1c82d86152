"""The tokenizer that a config asks for, and what can be said against it before anything starts. No torch."""

from __future__ import annotations

from rlsp.config import ChatUse, Config, ConfigError, TaskKind, TokenizerKind, Violation
from rlsp.rl.task import Tokenizer
from rlsp.rl.task.chat import ChatTemplate
from rlsp.rl.task.hugging_face import is_installed
from rlsp.rl.task.tokenizer import CharacterTokenizer, NoTokenizer
from rlsp.rl.task.tokenizer_files import (
    Source,
    TokenizerFilesError,
    holds_tokenizer,
    read_source,
    stated_eos,
)

_INSTRUCTING = (TaskKind.jsonl, TaskKind.reasoning_gym, TaskKind.custom)
"""Tasks that say something to a model; the others begin what it is to continue."""

_IN_IDS = (TaskKind.jsonl, TaskKind.custom)


def tokenizer_kind(config: Config) -> TokenizerKind:
    """Say what `auto` stands for: the answer depends on the files that are there."""
    asked, path = config.tokenizer, config.tokenizer_path
    if asked.kind is not TokenizerKind.auto:
        return asked.kind
    if path is None:
        return TokenizerKind.character
    found = asked.path is not None or holds_tokenizer(path)
    return TokenizerKind.hugging_face if found else TokenizerKind.none


def open_tokenizer(config: Config) -> Tokenizer:
    """Open the tokenizer of a run.

    Raises:
        ConfigError: It cannot be had, or does not fit the model or the task; all reasons are listed.
    """
    try:
        match tokenizer_kind(config):
            case TokenizerKind.hugging_face:
                return _hugging_face(config)
            case TokenizerKind.none:
                return _no_tokenizer(config)
            case _:
                return CharacterTokenizer()
    except TokenizerFilesError as error:
        legal = f"a folder with tokenizer.json, or a GGUF file; {error}"
        raise ConfigError((_refused("path", config.tokenizer_path, legal),)) from error


def _no_tokenizer(config: Config) -> NoTokenizer:
    if config.task.kind not in _IN_IDS:
        why = f"{config.tokenizer_path} has none, and task.kind={config.task.kind.name} asks in text"
        raise ConfigError((_refused("kind", config.tokenizer.kind, f"character or hugging_face ({why})"),))
    found: list[Violation] = []
    eos_ids = _eos_of(config, (), found)
    if found:
        raise ConfigError(tuple(found))
    return NoTokenizer(config.model.vocab_size, eos_ids)


def _hugging_face(config: Config) -> Tokenizer:
    path = config.tokenizer_path
    if path is None:
        raise ConfigError((_refused("path", None, "a folder with tokenizer.json, or a GGUF file"),))
    if not is_installed():
        why = "tokenizers is not installed: it comes with `pip install 'rlsp[hf]'`"
        raise ConfigError((_refused("kind", config.tokenizer.kind, f"character or none; {why}"),))
    source = read_source(path)
    found: list[Violation] = []
    template = _template(config, source, found)
    eos_ids = _eos_of(config, source.eos_ids, found)
    opened = source.open(eos_ids, template)
    if opened.vocab_size > config.model.vocab_size:
        legal = f"at least {opened.vocab_size}, the ids of the tokenizer"
        found.append(Violation("model.vocab_size", config.model.vocab_size, legal))
    if found:
        raise ConfigError(tuple(found))
    return opened


def _template(config: Config, source: Source, found: list[Violation]) -> ChatTemplate | None:
    """Take the chat template where it is to be used, and look at it."""
    asked = config.tokenizer
    instructs = config.task.kind in _INSTRUCTING
    wanted = asked.chat is ChatUse.always or (asked.chat is ChatUse.auto and instructs)
    if not wanted or source.template is None:
        if asked.chat is ChatUse.always:
            found.append(_refused("chat", asked.chat, "auto or never (the tokenizer has no chat template)"))
        why = "no chat template is used" if not wanted else "the tokenizer has no chat template"
        for name, value, empty in (
            ("system_prompt", asked.system_prompt, "null"),
            ("template_options", asked.template_options, "{}"),
        ):
            if value:
                found.append(_refused(name, value, f"{empty} ({why})"))
        return None
    template = ChatTemplate(source.template, source.special, asked.template_options, asked.system_prompt)
    try:
        template.check()
    except ValueError as error:
        found.append(_refused("chat", asked.chat, f"never, or a template that can be used; {error}"))
    return template


def _eos_of(config: Config, own: tuple[int, ...], found: list[Violation]) -> tuple[int, ...]:
    """Take the stated EOS, or the tokenizer's own with those that the model names.

    Refuse what no model could draw, and none at all where responses are to end.
    """
    asked, path, size = config.tokenizer.eos_ids, config.model.path, config.model.vocab_size
    named = own + (() if path is None else stated_eos(path))
    eos_ids = asked or tuple(dict.fromkeys(named))
    if not eos_ids and not config.rollout.ignore_eos:
        why = "at least one id (neither tokenizer nor model names one), or rollout.ignore_eos=true"
        found.append(_refused("eos_ids", asked, why))
    if high := [token for token in eos_ids if token >= size]:
        why = f"ids below model.vocab_size={size}, not {', '.join(map(str, high))}"
        found.append(_refused("eos_ids", asked, why))
    return eos_ids


def _refused(name: str, value: object, legal: str) -> Violation:
    return Violation(f"tokenizer.{name}", value, legal)
