"""The bytes that one rank receives in one rollout with its updates, from shapes alone.

What is counted is what `groups.Ledger.wire` counts: strict routes, padding and headers included. The order
follows `run.py`; a collective that is added there belongs here, or the test of the prediction fails.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from rlsp.messages import (
    BUCKET_BYTES,
    HEADER_BYTES,
    OWN_ALL_REDUCE_BYTES,
    SMALLEST_BYTES,
    added_in_place,
    aligned,
    exchanged,
    reduced,
)
from rlsp.report.plan_shapes import Rank

Moved = Counter[tuple[str, str, str]]
"""Bytes by (phase, axis, operation)."""

SYNC, ROLLOUT, REWARD, OLD_LOGPROB, TRAIN, EVIDENCE = PHASES = (
    "sync",
    "rollout",
    "reward",
    "old_logprob",
    "train",
    "evidence",
)
_FP32, _INT64 = 4, 8
_DIGEST_BYTES, _ENTRY_BYTES = 32, 16
_METRIC_SUMS = 2 * 2 * 5  # two units, each a sum and a flag, of five metrics
_ROUTES = 6 * 2
_FINGERPRINT = 6 * 2  # words of the hashes of six tensors
_STATISTICS = 3


def traffic(rank: Rank) -> Moved:
    """Predict what a rank receives in one rollout and its updates, in bytes."""
    meter = _Meter(rank)
    meter.synchronise()
    meter.generate()
    meter.reward()
    if not rank.config.reuse_rollout_logprob:
        meter.phase = OLD_LOGPROB
        meter.forward()
        meter.collect()
    meter.phase = TRAIN
    meter.update(rank.config.updates_per_rollout)
    meter.evidence()
    return +meter.moved


class _Meter:
    def __init__(self, rank: Rank) -> None:
        self.rank, self.config, self.phase, self.times = rank, rank.config, SYNC, 1
        self.moved: Moved = Counter()

    def synchronise(self) -> None:
        """Hand over the weights, and prove them."""
        rank, tp = self.rank, self.rank.size("tp")
        if tp != self.config.rollout.tp:
            for items in _buckets([w.items for w in rank.weights if w.sharded], rank.item_bytes, tp):
                self._exchange("tp", "gather", items * rank.item_bytes)
        self._hashes("tp", sum(w.entries for w in rank.weights))
        if rank.engine_weights:
            self._hashes("rollout_tp", sum(w.entries for w in rank.engine_weights))
        self._exchange("world", "gather", 2 * _DIGEST_BYTES)

    def generate(self) -> None:
        """Prefill, then one token a step; whoever ended leaves the batch."""
        self.phase = ROLLOUT
        prompts, responses = self.rank.engine_work.prompts, self.rank.engine_work.responses
        if prompts:
            self._engine_step(len(prompts) * max(prompts))
            ends = sorted({0, *responses})
            for start, end in pairwise(ends):  # between two ends the batch stays as it is
                alive = sum(length > start for length in responses)
                self.times = end - start
                self._draw(alive)
                self.times = end - start - (start == 0)  # prefill stands for the first token's pass
                self._engine_step(alive)
            self.times = 1
        rows = -(-len(self.rank.work.prompts) // self.config.rollout_layout.engines)
        width = max(self.rank.work.prompts) + self.config.max_response_tokens
        columns = (_INT64, 1, _FP32, _INT64)  # tokens, mask, log-probabilities, digests
        parts = [rows * width * size for size in columns] + [rows * _INT64]
        self._exchange("world", "gather_many", sum(map(aligned, parts)))

    def reward(self) -> None:
        """Broadcast the rewards; fingerprint the batch."""
        self.phase = REWARD
        rank = self.rank
        scores = len(rank.work.prompts) * _FP32
        if rank.headers and scores <= SMALLEST_BYTES - HEADER_BYTES:
            self._exchange("world", "broadcast", scores)
        elif rank.size("world") > 1:
            self._add("world", "broadcast", scores * (rank.rank != 0))
        self._exchange("world", "gather", _FINGERPRINT * _INT64)

    def update(self, updates: int) -> None:
        """Run forward and backward by micro-batches, sum the gradients, step, and prove the step."""
        self.times = updates
        self.forward()
        if self.config.kl_coef > 0:
            self.forward()
        self.backward()
        rank, model = self.rank, self.config.model
        parameters, entries = len(rank.weights), sum(w.entries for w in rank.weights)
        self._reduce("world", "max_integers", parameters + model.num_layers, _INT64)
        self._sum("token", sum(w.items for w in rank.weights if not w.everywhere))
        self._sum("world", 2 + sum(w.items for w in rank.weights if w.everywhere))
        self._exchange("tp", "gather", entries * _INT64)  # the norm's squares
        for copies in (1, 3, 1):  # gradients, optimizer state, weights
            self._hashes("tp", copies * entries)
        self._reduce("world", "max_integers", parameters, _INT64)
        self.collect()
        self._sum("token", _METRIC_SUMS)
        for axis, ranks in self._distinct().items():
            self._add(axis, "check_agreement", (len(ranks) - 1) * SMALLEST_BYTES)
        self.times = 1

    def evidence(self) -> None:
        """Compare digests, and add up the routes' calls."""
        self.phase = EVIDENCE
        self._exchange("world", "gather", 3 * _DIGEST_BYTES)
        self._sum("world", _ROUTES)

    def forward(self) -> None:
        """Run every micro-batch of this rank through the layers and the head."""
        rank, config, model = self.rank, self.config, self.config.model
        cp, tp = rank.size("cp"), rank.size("tp")
        key_values = 2 * self.config.padded_query_groups // tp * model.head_dim
        for sequences, length in rank.micro_batches:
            tokens = sequences * length // cp
            self._reduce_rows(tokens)  # the embedding
            for _ in range(model.num_layers):
                self._gather_rows(tokens)
                self._exchange("cp", "gather", tokens * key_values * rank.item_bytes)
                self._reduce_rows(tokens)
                self._gather_rows(tokens)
                self._reduce_rows(tokens)
            self._gather_rows(tokens)  # the head
            shards = config.numerics.virtual_tp // tp
            parts = (tokens * shards * _STATISTICS * _FP32, tokens * _INT64, tokens * _FP32)
            self._exchange("tp", "gather_many", sum(map(aligned, parts)))

    def backward(self) -> None:
        """Go back through every micro-batch: each gather ends in a reduction, each reduction in a gather."""
        rank, model = self.rank, self.config.model
        cp, tp = rank.size("cp"), rank.size("tp")
        key_values = 2 * self.config.padded_query_groups // tp * model.head_dim
        for sequences, length in rank.micro_batches:
            tokens = sequences * length // cp
            self._reduce_rows(tokens)
            for _ in range(model.num_layers):
                self._gather_rows(tokens)
                self._reduce_rows(tokens)
                self._gather_rows(tokens)
                self._sum("cp", sequences * length * key_values)
                self._reduce_rows(tokens)
            self._gather_rows(tokens)

    def collect(self) -> None:
        """Put log-probabilities and digests of all ranks together."""
        items = len(self.rank.work.lengths) * max(self.rank.work.lengths)
        self._exchange("world", "gather_many", aligned(items * _FP32) + aligned(items * _INT64))

    def _engine_step(self, tokens: int) -> None:
        """Run tokens through an engine: the embedding's sum, and two a layer."""
        items = tokens * self.config.model.hidden_size
        for _ in range(1 + 2 * self.config.model.num_layers):
            self._reduce("rollout_tp", "all_reduce", items, _FP32)

    def _draw(self, sequences: int) -> None:
        shards = sequences * self.config.numerics.virtual_tp // self.config.rollout.tp
        candidates = (_STATISTICS * _FP32, _FP32, _INT64, _FP32)
        parts = [shards * size for size in candidates] + [sequences * _INT64]
        self._exchange("rollout_tp", "gather_many", sum(map(aligned, parts)))

    def _gather_rows(self, tokens: int) -> None:
        """Gather the sequence shards of activations, or of their gradients."""
        if self.config.layout.sequence_parallel:
            items = tokens // self.rank.size("tp") * self.config.model.hidden_size
            self._exchange("tp", "gather", items * self.rank.item_bytes)

    def _reduce_rows(self, tokens: int) -> None:
        """Sum over TP in float32: own shard under SP, else every row."""
        items = tokens * self.config.model.hidden_size
        if self.config.layout.sequence_parallel:
            self._exchange("tp", "reduce_scatter", items // self.rank.size("tp") * _FP32)
        else:
            self._reduce("tp", "all_reduce", items, _FP32)

    def _hashes(self, axis: str, entries: int) -> None:
        self._exchange(axis, "gather", entries * _ENTRY_BYTES)

    def _exchange(self, axis: str, operation: str, payload: int) -> None:
        self._add(axis, operation, exchanged(payload, self.rank.size(axis), headers=self.rank.headers))

    def _reduce(self, axis: str, operation: str, items: int, size: int) -> None:
        ranks = self.rank.size(axis)
        self._add(axis, operation, reduced(items, size, ranks, headers=self.rank.headers))

    def _sum(self, axis: str, items: int) -> None:
        """Add int64 numbers: by the backend's own all-reduce where they are many."""
        if items * _INT64 > OWN_ALL_REDUCE_BYTES:
            self._add(axis, "sum_integers", added_in_place(items * _INT64, self.rank.size(axis)))
        else:
            self._reduce(axis, "sum_integers", items, _INT64)

    def _add(self, axis: str, operation: str, octets: int) -> None:
        self.moved[self.phase, axis, operation] += self.times * octets

    def _distinct(self) -> dict[str, tuple[int, ...]]:
        """Name the groups that compare their calls: one for each set of ranks."""
        found: dict[tuple[int, ...], str] = {}
        for axis, ranks in self.rank.groups.items():
            if len(ranks) > 1:
                found.setdefault(ranks, axis)
        return {axis: ranks for ranks, axis in found.items()}


def _buckets(items: list[int], item_bytes: int, ranks: int) -> list[int]:
    """Group tensors as the hand-over does; return the elements of each bucket on one rank."""
    found, bucket = [], 0
    for count in items:
        bucket += count
        if bucket * item_bytes * ranks >= BUCKET_BYTES:
            found.append(bucket)
            bucket = 0
    return found + [bucket] * bool(bucket)
