"""Walks two runs in the order in which things happen and finds, stage by stage, where they differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from rlsp.report.compare_order import backward_order, forward_order, optimizer_order
from rlsp.report.compare_owners import Owners, Ranks
from rlsp.report.compare_records import Difference, Side, Stage
from rlsp.report.digests import RolloutDigests, UpdateDigests
from rlsp.report.warmup import Warmup

Array = npt.NDArray[np.generic]
Mask = npt.NDArray[np.bool_]
Table = Mapping[str, tuple[str, ...]]
Order = Callable[[Iterable[str]], list[str]]
Value = tuple[str, float | int | None]

ABSENT = "absent"
_TOKEN_STAGES = (
    (Stage.ROLLOUT_LOGPROB, "rollout_logprob"),
    (Stage.ROLLOUT_ROWS, "rollout_row_digest"),
    (Stage.TRAIN_LOGPROB, "train_logprob"),
    (Stage.TRAIN_ROWS, "train_row_digest"),
)
_SAMPLE_STAGES = ((Stage.REWARDS, "rewards"), (Stage.ADVANTAGES, "advantages"))


@dataclass(frozen=True)
class Found:
    """One stage of one rollout or update: of `compared` items `differing` differ, `first` comes first."""

    stage: Stage
    compared: int
    differing: int
    first: Difference | None


@dataclass(frozen=True)
class Recorded:
    """One run's evidence of one rollout, and who owns what in that run."""

    tensors: Mapping[str, Array]
    digests: RolloutDigests
    owners: Owners

    def drawn_by(self, sample: int) -> Ranks:
        """List the ranks that drew a sample."""
        return self.owners.of_drawing(sample, self.tensors["lengths"].shape[0])

    def trained_by(self, sample: int, token: int) -> Ranks:
        """List the ranks that scored a token in training."""
        return self.owners.of_training(sample, token, self.tensors["lengths"].astype(np.int64).tolist())


class Pair:
    """One rollout of run A and of run B, laid side by side."""

    def __init__(self, index: int, a: Recorded, b: Recorded) -> None:
        self.index, self.runs = index, (a, b)
        self._width = max(run.tensors["tokens"].shape[1] for run in self.runs)
        lengths = [run.tensors["lengths"].astype(np.int64)[:, None] for run in self.runs]
        columns = np.arange(self._width)
        self.present: tuple[Mask, Mask] = (columns < lengths[0], columns < lengths[1])

    def compare(self) -> Iterator[Found]:
        """Yield what was found in each stage, in the order of `Stage`."""
        yield self.tokens()
        for stage, name in _TOKEN_STAGES:
            yield self.at_tokens(stage, name)
        for stage, name in _SAMPLE_STAGES:
            yield self.at_samples(stage, name)
        owners = self.runs[0].owners, self.runs[1].owners
        updates = zip(*(run.digests.updates for run in self.runs), strict=True)
        for number, (a, b) in enumerate(updates):
            yield from compare_update(self.index, number, a, b, owners)

    def tokens(self) -> Found:
        """Compare the tokens up to the end of each sequence, and which of them count."""
        (a, b), (in_a, in_b), (active_a, active_b) = self._wide("tokens"), self.present, self._active()
        other = (in_a != in_b) | ((a != b) & in_a)
        differing = other | (active_a != active_b)
        first = None
        if differing.any():
            at = _first(differing)
            name, sides = ("tokens", (a, b)) if other[at] else ("active_mask", (active_a, active_b))
            ends = zip(sides, self.present, strict=True)
            first = _difference(
                Stage.TOKENS,
                [_value(side[at]) if here[at] else (ABSENT, None) for side, here in ends],
                [run.drawn_by(at[0]) for run in self.runs],
                rollout=self.index,
                sample=at[0],
                position=at[1],
                tensor=name,
                explanation=self._why_drawn(*at),
            )
        return Found(Stage.TOKENS, int((in_a | in_b).sum()), int(differing.sum()), first)

    def at_tokens(self, stage: Stage, name: str) -> Found:
        """Compare bit patterns at the tokens that count in both runs."""
        (a, b), (active_a, active_b) = self._wide(name), self._active()
        # Rows that neither engine showed are all zero, and equal to nothing.
        shown = stage not in (Stage.ROLLOUT_ROWS, Stage.TRAIN_ROWS) or bool(a.any() or b.any())
        both = active_a & active_b & shown
        differing = (_bits(a) != _bits(b)) & both
        first = None
        if differing.any():
            sample, position = at = _first(differing)
            trained = stage in (Stage.TRAIN_LOGPROB, Stage.TRAIN_ROWS)
            ranks = [
                run.trained_by(sample, position) if trained else run.drawn_by(sample) for run in self.runs
            ]
            values = [_value(a[at]), _value(b[at])]
            where = {"rollout": self.index, "sample": sample, "position": position}
            first = _difference(stage, values, ranks, tensor=name, **where)
        return Found(stage, int(both.sum()), int(differing.sum()), first)

    def at_samples(self, stage: Stage, name: str) -> Found:
        """Compare one number a sample."""
        a, b = (run.tensors[name] for run in self.runs)
        differing = _bits(a) != _bits(b)
        first = None
        if differing.any():
            sample = int(np.argmax(differing))
            # Rank 0 scores, and hands the rewards to everyone.
            ranks = [(0,) if stage is Stage.REWARDS else run.owners.everyone() for run in self.runs]
            values = [_value(a[sample]), _value(b[sample])]
            first = _difference(stage, values, ranks, tensor=name, rollout=self.index, sample=sample)
        return Found(stage, int(differing.size), int(differing.sum()), first)

    def _why_drawn(self, sample: int, position: int) -> str | None:
        """Say whether the logits from which a token was drawn differed already."""
        (a, b), (active_a, active_b) = self._wide("rollout_row_digest"), self._active()
        both = (active_a & active_b)[sample, : position + 1]
        if not both.any():
            return None
        rows_a, rows_b = a[sample, : position + 1], b[sample, : position + 1]
        differing = (rows_a != rows_b) & both
        if not differing.any():
            return "up to this token the logits of the sample are the same bits: the drawing itself differs"
        start = int(np.argmax(differing))
        rows = f"{_value(rows_a[start])[0]} against {_value(rows_b[start])[0]}"
        return (
            f"it follows from the logits of the sample, which differ from position {start} on (rows {rows})"
        )

    def _wide(self, name: str) -> tuple[Array, Array]:
        """Return a tensor [N, S] of both runs, padded to a common width."""
        a, b = (
            np.pad(x, ((0, 0), (0, self._width - x.shape[1]))) for x in (r.tensors[name] for r in self.runs)
        )
        return a, b

    def _active(self) -> tuple[Mask, Mask]:
        a, b = (x.astype(np.bool_) for x in self._wide("active_mask"))
        return a, b


def compare_initial(a: Table, b: Table, owners: tuple[Owners, Owners]) -> Found:
    """Compare the initial weights, tensors in forward order."""
    return _tables(Stage.INITIAL_WEIGHTS, (None, None), (a, b), owners, forward_order)


def compare_warmups(a: Warmup, b: Warmup, owners: tuple[Owners, Owners]) -> Found:
    """Compare loss and gradient norm of every step of two warm-ups, then the weights that they ended with."""
    columns = [
        [
            *(
                (what, f"0x{bits}", value)
                for number, step in enumerate(run.steps)
                for what, bits, value in (
                    (f"loss of step {number}", step.loss_bits, step.loss),
                    (f"gradient norm of step {number}", step.gradient_norm_bits, step.gradient_norm),
                )
            ),
            ("weights after the last step", f"0x{run.weights_digest}", None),
        ]
        for run in (a, b)
    ]
    differing = [pair for pair in zip(*columns, strict=False) if pair[0] != pair[1]]
    first = None
    if differing:
        first = _difference(
            Stage.WARM_UP,
            [(bits, value) for _, bits, value in differing[0]],
            [side.everyone() for side in owners],
            explanation=f"the {differing[0][0][0]} of the warm-up",
        )
    return Found(Stage.WARM_UP, len(columns[0]), len(differing), first)


def compare_update(
    rollout: int, update: int, a: UpdateDigests, b: UpdateDigests, owners: tuple[Owners, Owners]
) -> Iterator[Found]:
    """Compare one update: loss, gradients in backward order, norm; state and weights in forward order."""
    at = rollout, update
    yield _number(Stage.LOSS, at, [(f"0x{x.loss_bits}", x.loss) for x in (a, b)], owners)
    yield _tables(Stage.GRADIENTS, at, (a.gradients, b.gradients), owners, backward_order)
    norms = [(f"0x{x.gradient_norm_bits}", x.gradient_norm) for x in (a, b)]
    yield _number(Stage.GRADIENT_NORM, at, norms, owners)
    yield _tables(Stage.OPTIMIZER, at, (a.optimizer, b.optimizer), owners, optimizer_order)
    yield _tables(Stage.WEIGHTS, at, (a.weights, b.weights), owners, forward_order)


def _number(
    stage: Stage, at: tuple[int, int], values: Sequence[Value], owners: tuple[Owners, Owners]
) -> Found:
    """Compare a number that every rank holds."""
    if values[0][0] == values[1][0]:
        return Found(stage, 1, 0, None)
    ranks = [owner.everyone() for owner in owners]
    return Found(stage, 1, 1, _difference(stage, values, ranks, rollout=at[0], update=at[1]))


def _tables(
    stage: Stage,
    at: tuple[int | None, int | None],
    tables: tuple[Table, Table],
    owners: tuple[Owners, Owners],
    order: Order,
) -> Found:
    """Compare hashes shard by shard, tensors in the given order."""
    a, b = tables
    names = order(a.keys() | b.keys())
    compared, differing = 0, {}
    for name in names:
        shards = list(zip_longest(a.get(name, ()), b.get(name, ())))
        compared += len(shards)
        if odd := [number for number, (x, y) in enumerate(shards) if x != y]:
            differing[name] = odd
    if not differing:
        return Found(stage, compared, 0, None)
    tensor, odd = next(iter(differing.items()))
    shard, held = odd[0], [table.get(tensor, ()) for table in tables]
    values = [(f"0x{shards[shard]}" if shard < len(shards) else ABSENT, None) for shards in held]
    ranks = [owner.of_shard(shard, len(shards)) for owner, shards in zip(owners, held, strict=True)]
    first = _difference(
        stage,
        values,
        ranks,
        rollout=at[0],
        update=at[1],
        tensor=tensor,
        virtual_shard=shard,
        explanation=f"{len(odd)} of its {max(map(len, held))} virtual shards and "
        f"{len(differing)} of {len(names)} tensors differ",
    )
    return Found(stage, compared, sum(map(len, differing.values())), first)


def _difference(stage: Stage, values: Sequence[Value], ranks: Sequence[Ranks], **place: Any) -> Difference:
    a, b = (
        Side(bits=bits, number=number, ranks=owners)
        for (bits, number), owners in zip(values, ranks, strict=True)
    )
    return Difference(stage=stage, a=a, b=b, **place)


def _first(differing: Mask) -> tuple[int, int]:
    """Return the first marked place, by sample and then by position."""
    sample, position = np.unravel_index(int(np.argmax(differing)), differing.shape)
    return int(sample), int(position)


def _bits(x: Array) -> Array:
    """View an array as the integers of its bits."""
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def _value(x: np.generic) -> Value:
    """Return the bit pattern of a number in hex, and the number itself."""
    bits = int(np.asarray(x).view(f"u{x.dtype.itemsize}"))
    return f"0x{bits:0{2 * x.dtype.itemsize}x}", x.item()
