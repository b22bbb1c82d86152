"""Tasks of a user's own, good and bad ones, as `task.factory` names them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsp.rl.task import Prompt, Tokenizer
from rlsp.rl.task.protocol import hash_content, random_integer, until_eos

BAD_FROM = 2
"""The first prompt whose rewards are what a bad task does."""


@dataclass(frozen=True)
class Shout:
    """Ask for a word in capitals."""

    tokenizer: Tokenizer
    seed: int

    @property
    def name(self) -> str:
        return "shout"

    @property
    def content_hash(self) -> str:
        # Everything that prompts and rewards depend on, and a version to raise when this code changes.
        fields = {"generator": self.name, "version": 1, "seed": self.seed}
        return hash_content({**fields, "tokenizer": self.tokenizer.content_hash})

    def prompt(self, index: int) -> Prompt:
        word = ("stop", "go")[random_integer(2, self.seed, index)]
        return Prompt(tokens=self.tokenizer.encode(word), text=word)

    def reward(self, index: int, response: Sequence[int]) -> float:
        body = self.tokenizer.decode(until_eos(response, *self.tokenizer.eos_ids))
        return float(body == self.prompt(index).text.upper())


@dataclass(frozen=True)
class Bad(Shout):
    """A task whose reward does something else from prompt `BAD_FROM` on; before, it tells samples apart."""

    act: Callable[[], Any] = int

    def prompt(self, index: int) -> Prompt:
        return Prompt(tokens=self.tokenizer.encode("go"), text="go")

    def reward(self, index: int, response: Sequence[int]) -> Any:
        return self.act() if index >= BAD_FROM else float(sum(response) % 7)


def shout(tokenizer: Tokenizer, seed: int) -> Shout:
    return Shout(tokenizer, seed)


def _raise() -> float:
    raise KeyError("no such label\nand a second line")


def _hang() -> float:
    time.sleep(600)
    return 0.0


def _hang_with_a_child() -> float:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(f"child-{child.pid}").touch()
    return _hang()


def _crash() -> float:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0.0


def _exit() -> float:
    sys.exit(7)


def _chat() -> float:
    print('{"reward": 99}')
    os.write(1, b'{"reward": 98}\n')
    return 0.5


def _slow() -> float:
    time.sleep(0.4)
    return 0.5


ACTS: dict[str, Callable[[], Any]] = {
    "raises": _raise,
    "hangs": _hang,
    "hangs_with_a_child": _hang_with_a_child,
    "crashes": _crash,
    "exits": _exit,
    "chats": _chat,
    "is_slow": _slow,
    "nan": lambda: float("nan"),
    "infinite": lambda: float("-inf"),
    "too_large": lambda: 1e39,
    "huge": lambda: 10**400,
    "text": lambda: "1.0",
    "nothing": lambda: None,
    "good": lambda: True,
}


def __getattr__(name: str) -> Callable[..., Bad]:
    """Make the factory of a bad task from the name of what it does."""
    if name not in ACTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return lambda tokenizer, seed: Bad(tokenizer, seed, ACTS[name])


def fails(tokenizer: Tokenizer, seed: int) -> Shout:
    raise OSError("no licence")


def makes_no_task(tokenizer: Tokenizer, seed: int) -> int:
    return 3


def has_a_bad_hash(tokenizer: Tokenizer, seed: int) -> object:
    class Unhashed(Shout):
        content_hash = "v1"  # type: ignore[assignment]

    return Unhashed(tokenizer, seed)


@dataclass(frozen=True)
class BadPrompt(Shout):
    """A task whose prompts are what `made` makes."""

    made: Callable[[], Any] = int

    def prompt(self, index: int) -> Any:
        return self.made()
