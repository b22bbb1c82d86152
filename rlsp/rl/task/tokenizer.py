"""The tokenizers that need no files: the built-in one, of characters, and none, for tasks that give ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from rlsp.rl.task.protocol import Message, Prompt, hash_content, one_below_the_other

_CHARACTERS: Final = "".join(chr(code) for code in range(ord(" "), ord("~") + 1))
_IDS: Final = {character: token for token, character in enumerate(_CHARACTERS)}
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_AROUND: Final = 20


@dataclass(frozen=True)
class CharacterTokenizer:
    """Map each of the 95 printable ASCII characters to an id, in their order; then <pad> and <eos>."""

    name: ClassVar[str] = "character"
    pad_id: ClassVar[int] = len(_CHARACTERS)
    eos_id: ClassVar[int] = len(_CHARACTERS) + 1
    eos_ids: ClassVar[tuple[int, ...]] = (eos_id,)
    template_hash: ClassVar[None] = None
    vocab_size: ClassVar[int] = len(_CHARACTERS) + 2

    @property
    def content_hash(self) -> str:
        """64 hex characters over the alphabet and the special ids."""
        return hash_content(
            {"tokenizer": "character", "alphabet": _CHARACTERS, "pad_id": self.pad_id, "eos_id": self.eos_id}
        )

    def encode(self, text: str) -> tuple[int, ...]:
        """Turn text into one id a character.

        Raises:
            ValueError: If a character is not printable ASCII, naming it and where it stands.
        """
        for position, character in enumerate(text):
            if character not in _IDS:
                raise ValueError(
                    f"character {character!r} (U+{ord(character):04X}) at position {position} of "
                    f"{_around(text, position)} has no token: the character tokenizer "
                    "knows printable ASCII only"
                )
        return tuple(_IDS[character] for character in text)

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        """Write what was said, one below the other; raise ValueError as `encode` does."""
        text = one_below_the_other(messages)
        return Prompt(tokens=self.encode(text), text=text)

    def decode(self, ids: Sequence[int]) -> str:
        """Turn ids into one character each; <pad>, <eos> and ids outside the vocabulary become U+FFFD."""
        return "".join(_CHARACTERS[token] if 0 <= token < len(_CHARACTERS) else _REPLACEMENT for token in ids)


@dataclass(frozen=True)
class NoTokenizer:
    """Know ids and no text.

    Attributes:
        vocab_size: Ids are 0 … vocab_size - 1.
        eos_ids: End a response; empty if none does.
    """

    vocab_size: int
    eos_ids: tuple[int, ...]
    name: ClassVar[str] = "none"
    template_hash: ClassVar[None] = None

    @property
    def pad_id(self) -> int:
        """The first EOS, if there is one."""
        return next(iter(self.eos_ids), 0)

    @property
    def content_hash(self) -> str:
        """64 hex characters over the vocabulary's size and the EOS."""
        return hash_content(
            {"tokenizer": "none", "vocab_size": self.vocab_size, "eos_ids": str(self.eos_ids)}
        )

    def encode(self, text: str) -> tuple[int, ...]:
        """Raise ValueError: there is no text."""
        raise ValueError("there is no tokenizer: it takes token ids and no text")

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        """Raise ValueError: there is no text."""
        text = one_below_the_other(messages)
        return Prompt(tokens=self.encode(text), text=text)

    def decode(self, ids: Sequence[int]) -> str:
        """Write the ids as numbers."""
        return " ".join(map(str, ids))


def _around(text: str, position: int) -> str:
    """Show a place of a text, and no more of a long one."""
    start, end = max(0, position - _AROUND), position + _AROUND
    return f"{'…' * (start > 0)}{text[start:end]!r}{'…' * (end < len(text))}"
