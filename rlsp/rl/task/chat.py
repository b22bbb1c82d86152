"""Chat templates: a conversation as the text that a model was trained on. No torch.

They are rendered as `transformers` renders them, by the same engine in the same sandbox, without importing
it: it would bring torch into processes that need none, and seconds to each. A template gets no clock: prompts
are the same tomorrow.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rlsp.rl.task.protocol import Message


@dataclass(frozen=True)
class ChatTemplate:
    """Write conversations by a template.

    Attributes:
        source: Jinja, as a tokenizer's folder holds it.
        special: The special tokens that it may name: `bos_token`, `eos_token`, …
        options: What else it is told, such as `enable_thinking`.
        system_prompt: Begins a conversation that has no system message of its own; None for nothing.
    """

    source: str
    special: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    system_prompt: str | None = None

    @property
    def content_hash(self) -> str:
        """64 hex characters: the SHA-256 of the source."""
        return hashlib.sha256(self.source.encode()).hexdigest()

    @property
    def fields(self) -> str:
        """Write everything that a prompt depends on as JSON."""
        told = [self.source, dict(self.special), dict(self.options), self.system_prompt]
        return json.dumps(told, sort_keys=True)

    def render(self, messages: Sequence[Message]) -> str:
        """Write a conversation and begin the answer.

        Raises:
            ValueError: The template refuses it or breaks.
        """
        said = [{"role": role, "content": content} for role, content in messages]
        if self.system_prompt is not None and said[0]["role"] != "system":
            said.insert(0, {"role": "system", "content": self.system_prompt})
        try:
            return self._compiled.render(
                messages=said,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **{**self.special, **self.options},
            )
        except Exception as error:  # a template is code
            raise ValueError(f"the chat template says {type(error).__name__}: {error}") from error

    def check(self) -> None:
        """See whether the template can be read at all.

        Raises:
            ValueError: It is no Jinja, or options take names that are not theirs.
        """
        given = {"messages", "tools", "documents", "add_generation_prompt"} & self.options.keys()
        if given:
            raise ValueError(f"{', '.join(sorted(given))}: no options, the template is told them by rlsp")
        try:
            _ = self._compiled
        except TemplateError as error:
            raise ValueError(
                f"the chat template is broken: {error}, line {getattr(error, 'lineno', '?')}"
            ) from error

    @cached_property
    def _compiled(self) -> Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        return environment.from_string(self.source)


class _Generation(Extension):
    """Read `{% generation %}`, which marks an answer for supervised training, as its content."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Take the body as it is."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
    """Write JSON without HTML's escapes, as templates expect it."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
