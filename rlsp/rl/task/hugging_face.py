"""A tokenizer of the Hugging Face ecosystem behind rlsp's protocol. No torch, and no `transformers`."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Final

from rlsp.rl.task.chat import ChatTemplate
from rlsp.rl.task.protocol import Message, Prompt, hash_content, one_below_the_other

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_VERSION: Final = 1
"""To be raised whenever an id, a text or a prompt changes for the same fields."""

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, eq=False)
class HuggingFaceTokenizer:
    """Encode and decode by the `tokenizers` library.

    Attributes:
        backend: Does it; neither pads nor truncates.
        eos_ids: End a response, the one to write first.
        pad_id: Fills a batch.
        prefix: What the tokenizer puts in front of a text, usually nothing or BOS.
        template: Writes prompts; None if they are taken as they are, behind the prefix.
    """

    backend: Backend
    eos_ids: tuple[int, ...]
    pad_id: int
    prefix: tuple[int, ...]
    template: ChatTemplate | None
    name: ClassVar[str] = "hugging_face"

    @cached_property
    def vocab_size(self) -> int:
        """The largest id that has a token, plus 1."""
        return 1 + max(self.backend.get_vocab(with_added_tokens=True).values())

    @cached_property
    def content_hash(self) -> str:
        """64 hex characters over all that the library knows, special ids, template and its options."""
        return hash_content(
            {
                "tokenizer": self.name,
                "version": _VERSION,
                "backend": hashlib.sha256(self.backend.to_str().encode()).hexdigest(),
                "eos_ids": str(self.eos_ids),
                "pad_id": self.pad_id,
                "prefix": str(self.prefix),
                "template": "" if self.template is None else self.template.fields,
            }
        )

    @property
    def template_hash(self) -> str | None:
        """64 hex characters: the SHA-256 of the chat template; None if none is used."""
        return None if self.template is None else self.template.content_hash

    def encode(self, text: str) -> tuple[int, ...]:
        """Turn text into ids, adding none; special tokens that stand in it are found.

        Raises:
            ValueError: The library cannot, for half a character or a word without id.
        """
        try:
            return tuple(self.backend.encode(text, add_special_tokens=False).ids)
        except Exception as error:  # the library's own are of no narrower type
            why = "it holds half a character (a lone surrogate)" if _is_broken(text) else error
            raise ValueError(f"the tokenizer cannot encode it: {why}") from error

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        """Write a conversation by the template, or its text behind the prefix if no template is used.

        Raises:
            ValueError: The template or the tokenizer refuses it, or a message holds a special token.
        """
        if self.template is None:
            text = one_below_the_other(messages)
            return Prompt(tokens=self.prefix + self.encode(text), text=text)
        for token in self._special:
            if any(token in content for _, content in messages):
                raise ValueError(
                    f"a message holds the special token {token}: what a template wrote already goes as it is "
                    "with tokenizer.chat=never"
                )
        text = self.template.render(messages)
        return Prompt(tokens=self.encode(text), text=text)

    def decode(self, ids: Sequence[int]) -> str:
        """Turn ids into text without special tokens; ids that have no token become U+FFFD."""
        pieces, known = [], list[int]()
        for token in (*ids, None):
            if token is not None and self._has(token):
                known.append(token)
                continue
            pieces.append(self.backend.decode(known, skip_special_tokens=True) if known else "")
            known = []
        return _REPLACEMENT.join(pieces)

    def _has(self, token: int) -> bool:
        return 0 <= token < self.vocab_size and self.backend.id_to_token(token) is not None

    @cached_property
    def _special(self) -> tuple[str, ...]:
        added = self.backend.get_added_tokens_decoder()
        return tuple(token.content for _, token in sorted(added.items()) if token.special)


def _is_broken(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def is_installed() -> bool:
    """Tell whether the library is there, without importing it."""
    return importlib.util.find_spec("tokenizers") is not None
