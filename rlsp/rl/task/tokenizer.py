"""The character tokenizer of the built-in tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from rlsp.rl.task.protocol import hash_content

_CHARACTERS: Final = "".join(chr(code) for code in range(ord(" "), ord("~") + 1))
_IDS: Final = {character: token for token, character in enumerate(_CHARACTERS)}
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_AROUND: Final = 20


@dataclass(frozen=True)
class CharacterTokenizer:
    """Map each of the 95 printable ASCII characters to an id, in their order; then <pad> and <eos>."""

    pad_id: ClassVar[int] = len(_CHARACTERS)
    eos_id: ClassVar[int] = len(_CHARACTERS) + 1
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

    def decode(self, ids: Sequence[int]) -> str:
        """Turn ids into one character each; <pad>, <eos> and ids outside the vocabulary become U+FFFD."""
        return "".join(_CHARACTERS[token] if 0 <= token < len(_CHARACTERS) else _REPLACEMENT for token in ids)


def _around(text: str, position: int) -> str:
    """Show a place of a text, and no more of a long one."""
    start, end = max(0, position - _AROUND), position + _AROUND
    return f"{'…' * (start > 0)}{text[start:end]!r}{'…' * (end < len(text))}"
