"""Where each rank, token and shard sits: integers only, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm


@dataclass(frozen=True)
class Coords:
    """A rank's place on the axes of the training layout."""

    dp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class EngineCoords:
    """A rank's place in the rollout layout: which engine, and which of its tensor-parallel shards."""

    engine: int
    tp: int


Ranks = tuple[int, ...]


def layout_word(*, cp: int, tp: int, sp: int, dp: int) -> str:
    """Write the widths of a training layout as its file in conf/parallel/ is named: dp only above 1."""
    return f"cp{cp}_tp{tp}_sp{sp}" + (f"_dp{dp}" if dp > 1 else "")


@dataclass(frozen=True)
class Layout:
    """Place the ranks of training: tp varies fastest, then cp, then dp.

    Attributes:
        dp: Data-parallel replicas.
        cp: Context-parallel shards of each sequence.
        tp: Tensor-parallel shards of each weight.
        sp: Shards of the residual stream: 1 (off) or equal to tp, as in Megatron.

    Raises:
        ValueError: An axis is below 1, or sp is neither 1 nor tp.
    """

    dp: int
    cp: int
    tp: int
    sp: int

    def __post_init__(self) -> None:
        for axis in ("dp", "cp", "tp"):
            _at_least_one(axis, getattr(self, axis))
        if self.sp not in (1, self.tp):
            raise ValueError(f"sp={self.sp}: must be 1 or equal to tp ({self.tp})")

    @property
    def world_size(self) -> int:
        """Count the ranks."""
        return self.dp * self.cp * self.tp

    @property
    def sequence_parallel(self) -> bool:
        """Tell whether the residual stream is sharded over the tp axis."""
        return self.sp > 1

    def coords(self, rank: int) -> Coords:
        """Place a rank on the axes."""
        _inside("rank", rank, self.world_size)
        return Coords(dp=rank // (self.cp * self.tp), cp=rank // self.tp % self.cp, tp=rank % self.tp)

    def rank(self, dp: int, cp: int, tp: int) -> int:
        """Name the rank at a place: the inverse of `coords`."""
        _inside("dp", dp, self.dp)
        _inside("cp", cp, self.cp)
        _inside("tp", tp, self.tp)
        return (dp * self.cp + cp) * self.tp + tp

    def tp_groups(self) -> list[Ranks]:
        """List the ranks that share a token range, one tuple for each (dp, cp)."""
        return [
            tuple(self.rank(dp, cp, tp) for tp in range(self.tp))
            for dp in range(self.dp)
            for cp in range(self.cp)
        ]

    def cp_groups(self) -> list[Ranks]:
        """List the ranks that share sequences and a weight shard, one tuple for each (dp, tp)."""
        return [
            tuple(self.rank(dp, cp, tp) for cp in range(self.cp))
            for dp in range(self.dp)
            for tp in range(self.tp)
        ]

    def dp_groups(self) -> list[Ranks]:
        """List the ranks that share a chunk index and a weight shard, one tuple for each (cp, tp)."""
        return [
            tuple(self.rank(dp, cp, tp) for dp in range(self.dp))
            for cp in range(self.cp)
            for tp in range(self.tp)
        ]

    def token_groups(self) -> list[Ranks]:
        """List the ranks that share a weight shard and split all tokens, dp-major, one tuple for each tp."""
        return [
            tuple(self.rank(dp, cp, tp) for dp in range(self.dp) for cp in range(self.cp))
            for tp in range(self.tp)
        ]

    def table(self) -> list[dict[str, int]]:
        """Write each rank's place as a row {rank, dp, cp, tp, sp}; sp is the index of its residual shard."""
        rows = []
        for rank in range(self.world_size):
            at = self.coords(rank)
            sp = at.tp if self.sequence_parallel else 0
            rows.append({"rank": rank, "dp": at.dp, "cp": at.cp, "tp": at.tp, "sp": sp})
        return rows


@dataclass(frozen=True)
class RolloutLayout:
    """Place the ranks of rollout: engine e holds ranks e·tp … (e+1)·tp − 1, the ranks after the last idle.

    Attributes:
        tp: Tensor-parallel shards of each engine.
        engines: Independent engines.
        world_size: Ranks of the launch, which training shares.

    Raises:
        ValueError: A count is below 1, or the engines need more ranks than there are.
    """

    tp: int
    engines: int
    world_size: int

    def __post_init__(self) -> None:
        for name in ("tp", "engines", "world_size"):
            _at_least_one(name, getattr(self, name))
        if self.engines * self.tp > self.world_size:
            raise ValueError(f"{self.engines} engines of tp={self.tp} need more than {self.world_size} ranks")

    def coords(self, rank: int) -> EngineCoords | None:
        """Place a rank, or return None where it idles during rollout."""
        _inside("rank", rank, self.world_size)
        if rank >= self.engines * self.tp:
            return None
        return EngineCoords(engine=rank // self.tp, tp=rank % self.tp)

    def tp_groups(self) -> list[Ranks]:
        """List the ranks of each engine."""
        return [tuple(range(engine * self.tp, (engine + 1) * self.tp)) for engine in range(self.engines)]


def virtual_shards(tp: int, index: int, virtual_tp: int) -> range:
    """List the adjacent virtual shards that tensor-parallel rank `index` of `tp` owns.

    Raises:
        ValueError: tp does not divide virtual_tp, or the index is outside.
    """
    _at_least_one("tp", tp)
    _inside("index", index, tp)
    if virtual_tp < 1 or virtual_tp % tp:
        raise ValueError(f"tp={tp} does not divide the virtual width {virtual_tp}")
    owned = virtual_tp // tp
    return range(index * owned, (index + 1) * owned)


def zigzag_chunks(cp: int, index: int) -> tuple[int, int]:
    """Name the two of 2·cp chunks that context-parallel rank `index` holds, as in Megatron.

    One early and one late chunk each: causal attention costs every rank the same.
    """
    _at_least_one("cp", cp)
    _inside("index", index, cp)
    return index, 2 * cp - 1 - index


def zigzag_positions(length: int, cp: int, index: int) -> list[int]:
    """List the positions of a sequence that context-parallel rank `index` holds, in the order it holds them.

    Args:
        length: Padded length, a multiple of 2·cp.
        cp: Context-parallel shards.
        index: Which of them.

    Raises:
        ValueError: The length is not a multiple of 2·cp.
    """
    chunks = zigzag_chunks(cp, index)
    if length < 0 or length % (2 * cp):
        raise ValueError(f"length {length} is not a multiple of 2·cp = {2 * cp}")
    chunk = length // (2 * cp)
    return [position for number in chunks for position in range(number * chunk, (number + 1) * chunk)]


def padded_length(length: int, cp: int, tp: int, blocks: tuple[int, ...]) -> int:
    """Round a sequence length up so that every block divides a context-parallel chunk and tp divides a shard.

    Args:
        length: Tokens of the longest sequence; 0 stays 0.
        cp: Context-parallel shards.
        tp: Tensor-parallel shards, over which sequence parallelism cuts a rank's tokens.
        blocks: Token, query and key block sizes.

    Returns:
        The least multiple of lcm(2·cp·lcm(blocks), cp·tp) that holds the length (NUMERICS rule 7).
    """
    _at_least_one("cp", cp)
    _at_least_one("tp", tp)
    return _round_up(length, lcm(2 * cp * lcm(*blocks), cp * tp))


def padded_vocab(vocab_size: int, virtual_tp: int, shard_multiple: int = 16) -> int:
    """Round a vocabulary up so that it cuts into equal virtual shards: a function of virtual_tp, never of tp.

    Args:
        vocab_size: True vocabulary.
        virtual_tp: Virtual shards.
        shard_multiple: Rows of a virtual shard come in multiples of this.
    """
    _at_least_one("vocab_size", vocab_size)
    return _round_up(vocab_size, virtual_tp * shard_multiple)


def padded_groups(groups: int, virtual_tp: int) -> int:
    """Round key-value groups up so that every virtual shard has as many: a function of virtual_tp alone."""
    _at_least_one("groups", groups)
    return _round_up(groups, virtual_tp)


def assign_sequences(lengths: list[int] | tuple[int, ...], dp: int) -> tuple[tuple[int, ...], ...]:
    """Share sequences out to data-parallel replicas: longest first, each to the one with the fewest tokens.

    Ties go to the replica with fewer sequences, then to the lower index, so that every replica gets a
    sequence where there are enough. The result is a function of the lengths alone.

    Returns:
        For each replica the indices of its sequences, ascending.
    """
    _at_least_one("dp", dp)
    shares: list[list[int]] = [[] for _ in range(dp)]
    tokens = [0] * dp
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        replica = min(range(dp), key=lambda r: (tokens[r], len(shares[r]), r))
        shares[replica].append(index)
        tokens[replica] += lengths[index]
    return tuple(tuple(sorted(share)) for share in shares)


def assign_prompts(count: int, engines: int) -> tuple[tuple[int, ...], ...]:
    """Share `count` prompts (or sequences) out to engines: adjacent ranges, sizes differ by at most one."""
    _at_least_one("engines", engines)
    if count < 0:
        raise ValueError(f"count={count}: must be at least 0")
    bounds = [engine * count // engines for engine in range(engines + 1)]
    return tuple(tuple(range(bounds[engine], bounds[engine + 1])) for engine in range(engines))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name}={value}: must be at least 1")


def _inside(name: str, value: int, size: int) -> None:
    if not 0 <= value < size:
        raise ValueError(f"{name}={value}: must be in 0..{size - 1}")
