"""One rollout's sequences as every rank holds them: right-padded, from column 0."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlsp.rl.rollout.native import Response, Sequence


@dataclass(frozen=True)
class RolloutBatch:
    """Sequences and what the rollout recorded as their tokens were drawn.

    Attributes:
        tokens: int64 [N, S], prompt and response.
        active_mask: bool [N, S], the response's tokens.
        lengths: int64 [N], prompt and response.
        logp: float32 [N, S]; entry t belongs to token t, 0 where inactive.
        row_digest: int64 [N, S], likewise.
    """

    tokens: Tensor
    active_mask: Tensor
    lengths: Tensor
    logp: Tensor
    row_digest: Tensor

    @property
    def active_tokens(self) -> int:
        """Count the response's tokens: the loss's normaliser, known before any backward pass."""
        return int(self.active_mask.sum())

    def truncated(self, eos_ids: tuple[int, ...]) -> int:
        """Count the sequences whose response does not end with the end-of-sequence token."""
        return sum(not set(response[-1:]) & set(eos_ids) for response in self.responses())

    def to(self, device: torch.device) -> RolloutBatch:
        """Return the same batch on a device."""
        fields = (self.tokens, self.active_mask, self.lengths, self.logp, self.row_digest)
        return RolloutBatch(*(x.to(device) for x in fields))

    def responses(self) -> list[list[int]]:
        """Return every sequence's drawn tokens."""
        return [row[mask].tolist() for row, mask in zip(self.tokens, self.active_mask, strict=True)]


def collate(sequences: list[Sequence], responses: list[Response], width: int, pad_id: int) -> RolloutBatch:
    """Lay sequences and their responses out in rows of `width` columns."""
    n = len(sequences)
    tokens = torch.full((n, width), pad_id, dtype=torch.int64)
    mask = torch.zeros((n, width), dtype=torch.bool)
    logp, digest = torch.zeros((n, width), dtype=torch.float32), torch.zeros((n, width), dtype=torch.int64)
    lengths = torch.zeros(n, dtype=torch.int64)
    for row, (sequence, response) in enumerate(zip(sequences, responses, strict=True)):
        start, end = len(sequence.tokens), len(sequence.tokens) + len(response.tokens)
        tokens[row, :start] = torch.tensor(sequence.tokens, dtype=torch.int64)
        tokens[row, start:end] = torch.tensor(response.tokens, dtype=torch.int64)
        mask[row, start:end] = True
        logp[row, start:end] = torch.tensor(response.logp, dtype=torch.float32)
        digest[row, start:end] = torch.tensor(response.row_digest, dtype=torch.int64)
        lengths[row] = end
    return RolloutBatch(tokens, mask, lengths, logp, digest)
