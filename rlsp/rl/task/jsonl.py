"""Prompts and labels from a file of JSON lines: an epoch shows every row once. No torch but for the order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np

from rlsp.rl.task.lines import LineFile, first_lines
from rlsp.rl.task.protocol import Message, Prompt, TaskError, Tokenizer, hash_content, until_eos
from rlsp.rl.task.rows import Fields, Ids, Row, RowError, find_fields, parse, read_row
from rlsp.rl.task.scorer import ExactScorer, Scorer

_STREAM: Final = 0x4A534F4E4C494E45  # "JSONLINE": apart from whatever else a seed is hashed for.
_VERSION: Final = 1
"""To be raised whenever a prompt or a reward changes for the same fields."""


@dataclass(frozen=True)
class JsonlTask:
    """Ask what the rows of a file ask, epoch after epoch.

    Attributes:
        lines: The file.
        fields: Where its rows have prompt and label.
        tokenizer: What turns prompts into ids and responses into text.
        seed: Keys the order of every epoch.
        shuffled: Whether epochs have an order of their own; if not, it is that of the file.
        scorer: What a response is worth.
        max_prompt_tokens: Longest legal prompt; None for any.
        room: What the model has left for a prompt beside the longest response, tokens; None for any.
    """

    lines: LineFile
    fields: Fields
    tokenizer: Tokenizer
    seed: int
    shuffled: bool
    scorer: Scorer
    max_prompt_tokens: int | None
    room: int | None = None

    @property
    def name(self) -> str:
        """What the manifest calls the task."""
        return "jsonl"

    @property
    def content_hash(self) -> str:
        """64 hex characters over the file's bytes and how they are read, ordered, asked and scored."""
        return hash_content(
            {
                "generator": self.name,
                "version": _VERSION,
                "file": self.lines.sha256,
                "prompt": self.fields.prompt,
                "label": self.fields.label,
                "order": f"shuffled by {self.seed}" if self.shuffled else "file",
                "scorer": self.scorer.name,
                "max_prompt_tokens": self.max_prompt_tokens or 0,
                "tokenizer": self.tokenizer.content_hash,
            }
        )

    def prompt(self, index: int) -> Prompt:
        """Make the prompt of an index.

        Raises:
            TaskError: The row is broken, or its prompt cannot be encoded or is too long; names the line.
        """
        line = self._line(index)
        row = self._row(line)
        try:
            return prompt_of(row, self.tokenizer, self.scorer, self.max_prompt_tokens, self.room)
        except RowError as error:
            raise TaskError(f"{self.lines.where(line)}: {error}") from error

    def reward(self, index: int, response: Sequence[int]) -> float:
        """Score what stands before the first EOS, or all of a response that was cut before one.

        A label of token ids is the right answer itself, with an EOS or without.
        """
        body = until_eos(response, *self.tokenizer.eos_ids)
        label = self._row(self._line(index)).label
        if isinstance(label, Ids):
            return float(body == until_eos(label.tokens, *self.tokenizer.eos_ids))
        return self.scorer.score(label, self.tokenizer.decode(body))

    def solution(self, index: int) -> str:
        """Return the label as the row has it, its derivation included.

        Raises:
            TaskError: It is token ids.
        """
        line = self._line(index)
        label = self._row(line).label
        if isinstance(label, Ids):
            raise TaskError(f"{self.lines.where(line)}: a label of token ids is no text: warmup.steps=0")
        return label

    def _line(self, index: int) -> int:
        if index < 0:
            raise ValueError(f"a prompt's index must be at least 0, not {index}")
        epoch, place = divmod(index, self.lines.count)
        return int(epoch_order(self.lines.count, self.seed, epoch)[place]) if self.shuffled else place

    def _row(self, line: int) -> Row:
        try:
            return read_row(parse(self.lines.read(line)), self.fields)
        except RowError as error:
            raise TaskError(f"{self.lines.where(line)}: {error}") from error


def open_jsonl(
    path: str,
    *,
    tokenizer: Tokenizer,
    seed: int,
    shuffled: bool,
    scorer: Scorer,
    prompt_key: str | None,
    label_key: str | None,
    max_prompt_tokens: int | None,
    room: int | None = None,
) -> JsonlTask:
    """Index a file and decide by its first row which fields hold prompts and labels.

    Raises:
        TaskError: The file cannot be used; names it, and the line where one is to blame.
    """
    lines = LineFile.scan(Path(path))
    try:
        fields = find_fields(parse(lines.read(0)), prompt_key, label_key)
    except RowError as error:
        raise TaskError(f"{lines.where(0)}: {error}") from error
    return JsonlTask(lines, fields, tokenizer, seed, shuffled, scorer, max_prompt_tokens, room)


def check_first_rows(
    path: str,
    *,
    tokenizer: Tokenizer | None,
    scorer: Scorer | None,
    prompt_key: str | None,
    label_key: str | None,
    max_prompt_tokens: int | None,
    count: int,
    room: int | None = None,
) -> list[str]:
    """List what is wrong with the first rows of a file, without reading the rest.

    Without tokenizer or scorer it is left open whether prompts can be encoded and labels scored.

    Returns:
        One line for all rows among the first `count` that are bad in the same way, or one about the file;
        empty if all is well.
    """
    try:
        lines = first_lines(Path(path), count)
        fields = None
        found: dict[str, list[int]] = {}
        for number, line in lines:
            try:
                row = parse(line)
                fields = fields or find_fields(row, prompt_key, label_key)
                read = read_row(row, fields)
                if tokenizer is not None and scorer is not None:
                    prompt_of(read, tokenizer, scorer, max_prompt_tokens, room)
            except RowError as error:
                found.setdefault(str(error), []).append(number)
                if fields is None:
                    break
    except TaskError as error:
        return [str(error)]
    return [f"{path}, {_lines(numbers)}: {fault}" for fault, numbers in found.items()]


def _lines(numbers: Sequence[int]) -> str:
    return f"line{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def prompt_of(
    row: Row, tokenizer: Tokenizer, scorer: Scorer, max_tokens: int | None, room: int | None = None
) -> Prompt:
    """Turn a row into a prompt, and see that its label can be scored.

    Raises:
        RowError: One cannot be used.
    """
    _check_label(row.label, tokenizer, scorer)
    if isinstance(row.question, Ids):
        tokens = row.question.tokens
        _check_ids(tokens, tokenizer, "prompt")
        prompt = _checked(Prompt(tokens=tokens, text=tokenizer.decode(tokens)), max_tokens)
    else:
        prompt = write_prompt(row.question, tokenizer, max_tokens)
    if room is not None and len(prompt.tokens) > room:
        raise RowError(
            f"the prompt has {len(prompt.tokens)} tokens: max_response_tokens leaves {max(room, 0)} of the "
            "positions that the model was made for (max_position_embeddings)"
        )
    return prompt


def write_prompt(messages: Sequence[Message], tokenizer: Tokenizer, max_tokens: int | None) -> Prompt:
    """Turn a conversation into a prompt.

    Raises:
        RowError: The tokenizer cannot write it, or makes more than `max_tokens` ids, or none, of it.
    """
    try:
        return _checked(tokenizer.prompt(messages), max_tokens)
    except ValueError as error:
        raise RowError(str(error)) from error


def _checked(prompt: Prompt, max_tokens: int | None) -> Prompt:
    if not prompt.tokens:
        raise RowError("the prompt has no token")
    if max_tokens is not None and len(prompt.tokens) > max_tokens:
        raise RowError(
            f"the prompt has {len(prompt.tokens)} tokens: task.max_prompt_tokens allows {max_tokens}"
        )
    return prompt


def _check_label(label: str | Ids, tokenizer: Tokenizer, scorer: Scorer) -> None:
    if isinstance(label, Ids):
        _check_ids(label.tokens, tokenizer, "label")
        if scorer != ExactScorer("exact"):
            raise RowError("the label is token ids, which task.scorer=exact alone compares")
    elif tokenizer.name == "none":
        raise RowError("the label is text and there is no tokenizer: legal: a list of token ids")


def _check_ids(tokens: tuple[int, ...], tokenizer: Tokenizer, what: str) -> None:
    if (high := max(tokens)) >= tokenizer.vocab_size:
        raise RowError(f"the {what} holds the id {high}: legal: 0..{tokenizer.vocab_size - 1}")


@lru_cache(maxsize=2)  # a rollout may begin in one epoch and end in the next
def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of `count` rows in an epoch: int64, by the hash of (seed, epoch, row)."""
    import torch

    from rlsp.numerics.hashing import hash_words

    keys = hash_words(_STREAM, seed, epoch, torch.arange(count)).numpy()
    order: np.ndarray = np.argsort(keys, kind="stable")
    return order
