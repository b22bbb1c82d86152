"""What every rank is doing, in a memory-mapped file that outlives the ranks. No torch.

Each rank owns one slot and is its only writer. A slot has two halves that are written in turn, each under its
own checksum: whatever instant a rank is killed at, the write before that one is whole, and a cut write is
noticed. Nothing is flushed: the page cache belongs to the kernel, so a killed process loses nothing.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

_HEADER = struct.Struct("<8sII")
_MAGIC = b"rlspbrd\x01"
_PAGE_BYTES = 4096
_PHASE_BYTES = 64
_SIGNATURE_BYTES = 256
_CHAIN_BYTES = 32
_BODY = struct.Struct(f"<QdqB{_PHASE_BYTES}sH{_SIGNATURE_BYTES}sB{_CHAIN_BYTES}s")
_CHECK = struct.Struct("<I")
_WRITE_BYTES = _BODY.size + _CHECK.size
_HALF_BYTES = 512
_SLOT_BYTES = 2 * _HALF_BYTES
_READ_ATTEMPTS = 3
_EMPTY = bytes(_WRITE_BYTES)


class BoardError(RuntimeError):
    """Say that a file is not a status board, or not one of this size."""


@dataclass(frozen=True)
class Slot:
    """What one rank last said.

    Attributes:
        rank: The rank that owns the slot.
        phase: What the rank was at; empty before it said anything.
        sequence: Number of its last collective, or -1 before the first.
        signature: Operation, shape, dtype and group of that collective.
        chain_hex: Hash chain over all its collectives so far, in hex.
        updated_at_s: Unix time of the last write, in seconds; 0.0 before the first.
        done: Whether the rank finished its work.
        generation: Count of writes; it moves exactly when the slot does.
        torn: Whether a write was cut: the slot then shows the one before it.
    """

    rank: int
    phase: str = ""
    sequence: int = -1
    signature: str = ""
    chain_hex: str = ""
    updated_at_s: float = 0.0
    done: bool = False
    generation: int = 0
    torn: bool = False

    def describe(self) -> str:
        """Name the phase and the last collective, for people."""
        call = f"collective {self.sequence} {self.signature}" if self.sequence >= 0 else "no collective yet"
        return f"{self.phase or 'not started'}; {call}"


class BoardWriter:
    """Write one rank's slot. Cheap enough (a microsecond or two) for every collective."""

    def __init__(self, board: Board, rank: int) -> None:
        """Take over the slot of `rank`; nobody else may write it."""
        self.rank = rank
        self._board = board
        self._map = board._map
        self._offset = board._offset(rank)
        self._generation = board.slot(rank).generation
        self._phase = b""
        self._sequence = -1
        self._signature = b""
        self._chain = b""
        self._done = 0

    def phase(self, text: str) -> None:
        """Say what the rank is at now."""
        self._phase = _clip(text, _PHASE_BYTES)
        self._write()

    def call(self, sequence: int, signature: str, chain: bytes) -> None:
        """Say which collective the rank enters.

        Args:
            sequence: Number of the call on this rank.
            signature: Operation, shape, dtype and group.
            chain: Hash chain over the calls so far, at most 32 bytes.
        """
        self._sequence = sequence
        encoded = signature.encode()
        self._signature = encoded if len(encoded) <= _SIGNATURE_BYTES else _clip(signature, _SIGNATURE_BYTES)
        self._chain = chain[:_CHAIN_BYTES]
        self._write()

    def done(self) -> None:
        """Say that the rank finished its work."""
        self._done = 1
        self._write()

    def stop_asked(self) -> bool:
        """Tell whether the owner of the board wants the run to stop once its state is saved."""
        return self._board.stop_asked()

    def last(self) -> Slot:
        """Read back what this rank last said."""
        return self._board.slot(self.rank)

    def _write(self) -> None:
        self._generation = generation = self._generation + 1
        signature, chain = self._signature, self._chain
        body = _BODY.pack(
            generation,
            time.time(),
            self._sequence,
            self._done,
            self._phase,
            len(signature),
            signature,
            len(chain),
            chain,
        )
        start = self._offset + _HALF_BYTES * (generation & 1)
        self._map[start : start + _WRITE_BYTES] = body + _CHECK.pack(crc32(body))


class Board:
    """One memory-mapped file with a slot for every rank."""

    def __init__(self, path: Path, mapping: mmap.mmap, world_size: int) -> None:
        """Wrap a mapping; use `create` or `open`."""
        self.path = path
        self.world_size = world_size
        self._map = mapping

    @classmethod
    def create(cls, path: Path | str, world_size: int) -> Board:
        """Make an empty board, replacing an older one, and map it."""
        path = Path(path)
        fresh = path.with_name(f"{path.name}.{os.getpid()}")
        content = _HEADER.pack(_MAGIC, world_size, _SLOT_BYTES).ljust(_PAGE_BYTES, b"\0")
        fresh.write_bytes(content + bytes(_SLOT_BYTES * world_size))
        fresh.replace(path)
        return cls.open(path)

    @classmethod
    def join(cls, path: Path | str, world_size: int) -> Board:
        """Map a board that any number of ranks may be about to make at the same time, each for itself.

        Raises:
            BoardError: There is a board of another size.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if (
                os.fstat(descriptor).st_size == 0
            ):  # to grow an empty file and to write one header twice are harmless
                os.ftruncate(descriptor, _PAGE_BYTES + _SLOT_BYTES * world_size)
            os.pwrite(descriptor, _HEADER.pack(_MAGIC, world_size, _SLOT_BYTES), 0)
        finally:
            os.close(descriptor)
        return cls.open(path)

    @classmethod
    def open(cls, path: Path | str) -> Board:
        """Map an existing board.

        Raises:
            BoardError: The file is missing, is no board, or is shorter than its header says.
        """
        path = Path(path)
        try:
            with path.open("r+b") as file:
                size = os.fstat(file.fileno()).st_size
                mapping = mmap.mmap(file.fileno(), 0) if size >= _PAGE_BYTES else None
        except OSError as error:
            raise BoardError(f"{path}: cannot open the status board: {error}") from error
        if mapping is None:
            raise BoardError(f"{path}: not a status board: {size} bytes")
        magic, world_size, slot_bytes = _HEADER.unpack_from(mapping)
        if magic != _MAGIC or slot_bytes != _SLOT_BYTES or size != _PAGE_BYTES + _SLOT_BYTES * world_size:
            raise BoardError(f"{path}: not a status board of this version")
        return cls(path, mapping, world_size)

    def ask_to_stop(self) -> None:
        """Let every rank that maps the board know that the run is to stop once its state is saved."""
        self._map[_HEADER.size] = 1

    def stop_asked(self) -> bool:
        """Tell whether the ranks were asked to stop."""
        return bool(self._map[_HEADER.size])

    def writer(self, rank: int) -> BoardWriter:
        """Hand out the writer of one rank's slot."""
        return BoardWriter(self, rank)

    def read(self) -> list[Slot]:
        """Read every rank's slot, in rank order."""
        return [self.slot(rank) for rank in range(self.world_size)]

    def slot(self, rank: int) -> Slot:
        """Read one rank's slot: the newest whole write, and whether a newer one was cut."""
        start = self._offset(rank)
        slot = Slot(rank)
        for _ in range(_READ_ATTEMPTS):
            halves = [self._map[at : at + _WRITE_BYTES] for at in (start, start + _HALF_BYTES)]
            whole = [parsed for half in halves if (parsed := _parse(rank, half)) is not None]
            cut = len(whole) + halves.count(_EMPTY) < len(halves)
            newest = max(whole, key=lambda each: each.generation, default=Slot(rank))
            slot = newest if not cut else _torn(newest)
            if not cut:  # a live writer is in the middle of a write for a microsecond: look again
                break
        return slot

    def _offset(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise BoardError(f"{self.path}: no slot for rank {rank}: the board has {self.world_size}")
        return _PAGE_BYTES + _SLOT_BYTES * rank


@dataclass(frozen=True)
class Place:
    """Where one rank stands when its life starts.

    Attributes:
        rank: Its number, 0 <= rank < world_size.
        world_size: How many ranks there are.
        local_rank: Its number among the ranks of its machine, which is the number of its GPU.
        init_method: Where the ranks meet, as torch.distributed takes it (file://… or env://).
        board: The writer of its slot.
    """

    rank: int
    world_size: int
    local_rank: int
    init_method: str
    board: BoardWriter


def _parse(rank: int, half: bytes) -> Slot | None:
    body = half[: _BODY.size]
    if _CHECK.unpack_from(half, _BODY.size)[0] != crc32(body):
        return None
    generation, updated, sequence, done, phase, signature_bytes, signature, chain_bytes, chain = _BODY.unpack(
        body
    )
    return Slot(
        rank=rank,
        phase=phase.rstrip(b"\0").decode(errors="replace"),
        sequence=sequence,
        signature=signature[:signature_bytes].decode(errors="replace"),
        chain_hex=chain[:chain_bytes].hex(),
        updated_at_s=updated,
        done=bool(done),
        generation=generation,
    )


def _torn(slot: Slot) -> Slot:
    return Slot(**{**vars(slot), "torn": True})


def _clip(text: str, limit: int) -> bytes:
    encoded = text.encode()
    if len(encoded) <= limit:
        return encoded
    return encoded[: limit - 3].decode(errors="ignore").encode() + "…".encode()
