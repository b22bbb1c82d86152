"""The file digests/NNNNN.json: every tensor of a rollout's updates as 128-bit hashes, one a virtual shard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlsp.digest import digest
from rlsp.report.documents import Document
from rlsp.report.records import RolloutRecord, bits_fit, float64_bits

FOLDER = "digests"
_WORD = (1 << 64) - 1

ShardHash = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Shards = Annotated[tuple[ShardHash, ...], Field(min_length=1)]
Table = dict[str, Shards]
"""Tensor name → the hash of each virtual shard, 32 hex digits; a replicated tensor has one entry."""


class UpdateDigests(Document):
    """What one update computed, in the order in which it did.

    `loss` is the mean over the update's active tokens, `gradients` are those before clipping, `optimizer` is
    its state after the step, named "exp_avg/<tensor>", "exp_avg_sq/<tensor>" and "master/<tensor>", and
    `weights` the model's after it. `loss_bits` and `gradient_norm_bits` are the float64s' bit patterns.
    """

    loss: float
    loss_bits: str = Field(pattern=r"^[0-9a-f]{16}$")
    gradients: Table
    gradient_norm: float
    gradient_norm_bits: str = Field(pattern=r"^[0-9a-f]{16}$")
    optimizer: Table
    weights: Table

    @classmethod
    def of(
        cls,
        *,
        loss: float,
        gradients: Mapping[str, Iterable[str]],
        gradient_norm: float,
        optimizer: Mapping[str, Iterable[str]],
        weights: Mapping[str, Iterable[str]],
    ) -> Self:
        """Build one update's entry; the bit patterns are those of the numbers given."""
        return cls(
            loss=loss,
            loss_bits=float64_bits(loss),
            gradients=_plain(gradients),
            gradient_norm=gradient_norm,
            gradient_norm_bits=float64_bits(gradient_norm),
            optimizer=_plain(optimizer),
            weights=_plain(weights),
        )

    @model_validator(mode="after")
    def _bits_belong_to_the_numbers(self) -> Self:
        for name in ("loss", "gradient_norm"):
            value, bits = getattr(self, name), getattr(self, f"{name}_bits")
            if not bits_fit(bits, value):
                raise ValueError(
                    f"{name}_bits {bits} is not the bit pattern of {value!r} ({float64_bits(value)})"
                )
        return self


class RolloutDigests(Document):
    """The file digests/NNNNN.json; `initial` are the run's initial weights, in rollout 0's file alone."""

    schema_version: Literal[1] = 1
    initial: Table | None
    updates: Annotated[tuple[UpdateDigests, ...], Field(min_length=1)]


def digests_path(run_dir: Path, index: int) -> Path:
    """Return where the digests of rollout `index` lie."""
    return run_dir / FOLDER / f"{index:05d}.json"


def shard_table(entries: Iterable[tuple[str, int, int, int]]) -> dict[str, tuple[str, ...]]:
    """Write the entries that `rlsp.digest.digest` takes as a table.

    Args:
        entries: (name, index of the virtual shard, high hash, low hash), in any order, signed or unsigned.

    Raises:
        ValueError: A tensor's shards are not 0, 1, 2 … once each.
    """
    table: dict[str, list[str]] = {}
    for name, shard, high, low in sorted(entries):
        shards = table.setdefault(name, [])
        if shard != len(shards):
            raise ValueError(f"{name}: shard {shard} where shard {len(shards)} was expected")
        shards.append(f"{high & _WORD:016x}{low & _WORD:016x}")
    return {name: tuple(shards) for name, shards in table.items()}


def table_digest(table: Mapping[str, Iterable[str]]) -> str:
    """Digest a table to the 64 hex characters that manifest.json and consistency.json show.

    Raises:
        ValueError: The table is empty.
    """
    return digest(
        (name, shard, int(words[:16], 16), int(words[16:], 16))
        for name, shards in table.items()
        for shard, words in enumerate(shards)
    )


def misplaced(digests: RolloutDigests, index: int) -> str | None:
    """Say what is wrong if rollout 0 lacks the initial weights, or another rollout has them."""
    if (digests.initial is None) == (index == 0):
        return "the initial weights are missing" if index == 0 else "initial weights belong to rollout 0"
    return None


def contradictions(digests: RolloutDigests, record: RolloutRecord, initial: str | None) -> list[str]:
    """List what one rollout's digests and the other reports state differently.

    Args:
        digests: The file.
        record: The rollout's entry in consistency.json.
        initial: The manifest's digest of the initial weights, if it has one.
    """
    fault = misplaced(digests, record.index)
    faults = [fault] if fault else []
    if len(digests.updates) != len(record.gradient_norms):
        faults.append(
            f"{len(digests.updates)} updates, but consistency.json has {len(record.gradient_norms)}"
        )
    for number, (update, norm) in enumerate(zip(digests.updates, record.gradient_norms, strict=False)):
        if not bits_fit(update.gradient_norm_bits, norm):
            faults.append(
                f"update {number}: gradient_norm_bits is {update.gradient_norm_bits}, but consistency.json "
                f"says {float64_bits(norm)}"
            )
    last = digests.updates[-1]
    said = [
        ("gradient_digest", last.gradients, "consistency.json", record.gradient_digest),
        ("optimizer_digest", last.optimizer, "consistency.json", record.optimizer_digest),
        ("weights_digest", last.weights, "consistency.json", record.weights_digest),
    ]
    if digests.initial is not None and initial is not None:
        said.append(("initial_weights_digest", digests.initial, "manifest.json", initial))
    for name, table, home, stated in said:
        found = table_digest(table) if table else "that of no tensor"
        if found != stated:
            faults.append(f"{name} of its tables is {found}, but {home} says {stated}")
    return faults


def _plain(table: Mapping[str, Iterable[str]]) -> dict[str, tuple[str, ...]]:
    return {name: tuple(shards) for name, shards in table.items()}
