"""Keep what passes the boundaries of a model for one sequence, in a form that knows no layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from rlsp import collectives
from rlsp.groups import Group
from rlsp.model.wiring import Boundary, Site, Wiring
from rlsp.report.diagnose import Piece

_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64)
_OUTSIDE: Final = (Boundary.EMBEDDING, Boundary.FINAL_NORM, Boundary.LOGITS, Boundary.LOGP)

Key = Site | str
"""A boundary, or the name of something else that each position has one of."""

Part = tuple[Tensor, Tensor, int]
"""Positions int64 [p], values [p, n], and the index of the first of these n features among all."""


def sites(num_layers: int) -> Iterator[Site]:
    """List every boundary of a model in the order of a forward pass."""
    inside = [boundary for boundary in Boundary if boundary not in _OUTSIDE]
    yield Site(Boundary.EMBEDDING)
    yield from (Site(boundary, layer) for layer in range(num_layers) for boundary in inside)
    yield from (Site(boundary) for boundary in _OUTSIDE[1:])


class RowRecorder:
    """Keep what passes every boundary of one model on this rank, for one sequence of its batch."""

    def __init__(self, wiring: Wiring) -> None:
        """Prepare for a model of this wiring."""
        self._wiring = wiring
        self._row: int | None = None
        self._sequences = 0
        self._positions = torch.zeros(0, dtype=torch.int64)
        self._parts: dict[Key, list[tuple[Tensor, Tensor]]] = {}

    def look(self, row: int | None, sequences: int, positions: Tensor) -> None:
        """Say what the next pass computes.

        Args:
            row: The sequence's place in the batch; None where it is not in it (any more).
            sequences: Sequences of the batch.
            positions: int64 [s], the positions of that sequence; −1 where nothing of it stands.
        """
        self._row, self._sequences, self._positions = row, sequences, positions.cpu()

    def record(self, site: Site, tensor: Tensor) -> None:
        """Take the sequence's part of a tensor."""
        if site.boundary is Boundary.LOGP:
            self.note(site, tensor)
        elif self._row is not None:
            positions = self._positions
            if self._wiring.sequence_parallel and not site.boundary.sharded:
                positions = positions.chunk(self._wiring.tp.size)[self._wiring.tp.index]
            self._keep(site, positions, tensor[:, self._row].flatten(1))

    def note(self, key: Key, values: Tensor) -> None:
        """Take the sequence's part of values [s·b], sequence-major: one a position."""
        if self._row is not None:
            mine = values.detach().reshape(-1, self._sequences)[:, self._row]
            self._keep(key, self._positions, mine.unsqueeze(1))

    def part(self, key: Key) -> Part | None:
        """Return what this rank holds of a boundary, or None where nothing came by."""
        parts = self._parts.get(key)
        if not parts:
            return None
        positions, values = (torch.cat(column) for column in zip(*parts, strict=True))
        sharded = isinstance(key, Site) and key.boundary.sharded
        return positions, values, self._wiring.tp.index * values.shape[1] if sharded else 0

    def _keep(self, key: Key, positions: Tensor, values: Tensor) -> None:
        true = positions >= 0
        # Indexing copies: what is kept survives a cache or a buffer that is written again.
        self._parts.setdefault(key, []).append((positions[true], values.cpu()[true]))


class Exchange:
    """Bring what every rank of a group holds to its first rank, one boundary at a time."""

    def __init__(
        self, keys: Sequence[Key], side: RowRecorder | None, world: Group, device: torch.device
    ) -> None:
        """Let all ranks know the sizes; every rank calls, with the same keys.

        Args:
            keys: What will be exchanged.
            side: This rank's recorder, if it has a part of this side.
            world: The group.
            device: Where the group's backend moves tensors.
        """
        self._world, self._device = world, device
        self._content: dict[Key, Tensor] = {}
        headers = []
        for key in keys:
            header, self._content[key] = _packed(None if side is None else side.part(key))
            headers.append(header)
        every = collectives.gather(torch.stack(headers).unsqueeze(0).to(device), world)
        self._headers = dict(zip(keys, every.transpose(0, 1).tolist(), strict=True))

    def pieces(self, key: Key) -> list[Piece]:
        """Return a boundary's pieces on the group's first rank, else none; every rank calls, once a key."""
        headers, content = self._headers[key], self._content.pop(key)
        longest = max(size for *_, size in headers)
        if longest == 0:
            return []
        padded = torch.nn.functional.pad(content, (0, longest - content.numel()))
        every = collectives.gather(padded.unsqueeze(0).to(self._device), self._world).cpu()
        found = []
        for index, (count, features, first, dtype, size) in enumerate(headers):
            if size and self._world.index == 0:
                octets = every[index, :size]
                positions = octets[: 8 * count].clone().view(torch.int64).numpy()
                words = octets[8 * count :].numpy().tobytes()
                name = str(_DTYPES[dtype]).removeprefix("torch.")
                rank = self._world.ranks[index]
                found.append(Piece.of_bytes(rank, positions, first, name, words, features))
        return found


def _packed(part: Part | None) -> tuple[Tensor, Tensor]:
    """Return positions, features, first feature, dtype and size as integers, and all content as bytes."""
    if part is None or part[0].numel() == 0:
        return torch.zeros(5, dtype=torch.int64), torch.zeros(0, dtype=torch.uint8)
    positions, values, first = part
    content = torch.cat([x.contiguous().flatten().view(torch.uint8) for x in (positions, values)])
    header = [*values.shape, first, _DTYPES.index(values.dtype), content.numel()]
    return torch.tensor(header), content
