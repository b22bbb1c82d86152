"""The rollout's bits: alone, in any batch, engine layout or prefill, and again in training's forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from model_helpers import (
    BF16,
    EOS,
    OBJECTIVE,
    PAD,
    TINY,
    alone,
    engine,
    mesh_of,
    policy,
    products,
    rollouts,
    trainer,
)
from ranks import run_ranks
from torch import Tensor

from rlsp import bits
from rlsp.config import ModelConfig
from rlsp.layout import Layout, RolloutLayout
from rlsp.model import attention as model_attention
from rlsp.model import head
from rlsp.numerics.products import Products
from rlsp.rl.batch import RolloutBatch
from rlsp.rl.rollout import dispatch
from rlsp.rl.rollout.dispatch import StaleWeightsError
from rlsp.rl.rollout.native import NativeEngine, Response, Sampling, Sequence

PROMPTS = (3, 17, 32, 33, 1)  # lengths; decoding crosses the blocks' boundary at 32
SEQUENCES = [
    Sequence(prompt, sample, tuple((7 * prompt + 11 * i) % 95 for i in range(length)))
    for prompt, length in enumerate(PROMPTS)
    for sample in range(2)
]
RAGGED = Sampling(seed=5, rollout=1, temperature=0.6, max_tokens=20, eos_ids=(EOS,))
ONE = Layout(dp=1, cp=1, tp=1, sp=1)


@cache
def sampling() -> Sampling:
    """Sampling whose end is the token that sequence 0 draws fourth: some responses end early, some do not."""
    free = lone_engine().generate(SEQUENCES, replace(RAGGED, eos_ids=()))
    return replace(RAGGED, eos_ids=(free[0].tokens[3],))


def lone_engine(shape: ModelConfig = BF16, seed: int = 0) -> NativeEngine:
    one = engine(alone(), shape=shape, seed=seed)
    assert one is not None
    return one


@cache
def expected() -> tuple[Response, ...]:
    return tuple(lone_engine().generate(SEQUENCES, sampling()))


@cache
def rolled_out(pad_id: int = PAD) -> RolloutBatch:
    """The batch that one process rolls out from the initial weights."""
    mesh = alone()
    one = rollouts(policy(mesh, shape=BF16), mesh, RolloutLayout(1, 1, 1), BF16, pad_id)
    one.synchronise(0)
    return one.generate(SEQUENCES, sampling(), 0)


def same(a: RolloutBatch, b: RolloutBatch) -> bool:
    fields = ("tokens", "active_mask", "lengths", "logp", "row_digest")
    return all(bits.same_bits(getattr(a, name), getattr(b, name)) for name in fields)


# One process: batches, order, prefill.


def test_the_case_has_early_ends_and_full_lengths() -> None:
    lengths = [len(response.tokens) for response in expected()]
    assert min(lengths) < RAGGED.max_tokens == max(lengths)
    assert len(set(lengths)) > 2
    assert len({tuple(response.tokens) for response in expected()}) > len(SEQUENCES) // 2


@pytest.mark.parametrize("index", [0, 5, 9])
def test_a_sequence_alone_gets_the_bits_that_it_gets_in_a_batch(index: int) -> None:
    assert lone_engine().generate([SEQUENCES[index]], sampling()) == [expected()[index]]


@pytest.mark.parametrize("order", [[9, 8, 7, 6, 5, 4, 3, 2, 1, 0], [4, 4, 0], [2, 9, 1]], ids=str)
def test_order_and_company_change_no_bit(order: list[int]) -> None:
    drawn = lone_engine().generate([SEQUENCES[i] for i in order], sampling())
    assert drawn == [expected()[i] for i in order]


@pytest.mark.parametrize("chunk", [1, 5, 7, 32])
def test_prefill_in_chunks_changes_no_bit(chunk: int) -> None:
    assert tuple(lone_engine().generate(SEQUENCES, sampling(), prefill_chunk=chunk)) == expected()


def test_no_sequences_no_responses() -> None:
    assert lone_engine().generate([], sampling()) == []


def test_a_limit_of_its_own_cuts_a_response_and_changes_no_bit_before() -> None:
    limits = [None, 0, 3, 1, 100, 0, 2, 20, 5, 1]
    limited = [replace(s, limit=limit) for s, limit in zip(SEQUENCES, limits, strict=True)]
    drawn = lone_engine().generate(limited, sampling())
    for response, full, limit in zip(drawn, expected(), limits, strict=True):
        assert response.tokens == full.tokens[:limit]
        assert response.logp == full.logp[:limit]
        assert response.row_digest == full.row_digest[:limit]
    assert lone_engine().generate(limited[1:2], sampling()) == [Response()]


def test_what_a_draw_is_keyed_by_changes_it() -> None:
    drawn = lone_engine().generate(SEQUENCES, replace(sampling(), rollout=2))
    assert sum(a.tokens == b.tokens for a, b in zip(drawn, expected(), strict=True)) < 3
    drawn = lone_engine().generate(SEQUENCES, replace(sampling(), seed=6))
    assert sum(a.tokens == b.tokens for a, b in zip(drawn, expected(), strict=True)) < 3


def test_a_response_ends_with_its_first_end_and_the_end_counts_once() -> None:
    (eos,), batch = sampling().eos_ids, rolled_out()
    ended = [response for response in batch.responses() if eos in response]
    assert ended
    assert all(response.index(eos) == len(response) - 1 for response in ended)
    assert [len(response) for response in batch.responses()] == [len(r.tokens) for r in expected()]
    assert batch.active_tokens == sum(len(r.tokens) for r in expected())
    last = batch.lengths - 1
    rows = torch.arange(len(last))
    assert bool(batch.active_mask[rows, last].all())
    assert bool((batch.logp[rows, last] < 0).all())


def test_a_response_ends_with_the_first_of_several_ends() -> None:
    """Witness: with either of them alone some response goes on where the other ends it."""
    (first,) = sampling().eos_ids
    second = lone_engine().generate(SEQUENCES, replace(RAGGED, eos_ids=()))[1].tokens[2]
    drawn = lone_engine().generate(SEQUENCES, replace(RAGGED, eos_ids=(first, second)))
    for response, whole in zip(
        drawn, lone_engine().generate(SEQUENCES, replace(RAGGED, eos_ids=())), strict=True
    ):
        ends = [place for place, token in enumerate(whole.tokens) if token in (first, second)]
        assert response.tokens == whole.tokens[: ends[0] + 1 if ends else None]
    for eos in (first, second):
        alone_ = lone_engine().generate(SEQUENCES, replace(RAGGED, eos_ids=(eos,)))
        assert [r.tokens for r in alone_] != [r.tokens for r in drawn]


def test_an_end_that_is_also_the_padding_stays_in_the_loss() -> None:
    (eos,) = sampling().eos_ids
    batch = rolled_out(pad_id=eos)
    assert bits.same_bits(batch.active_mask, rolled_out().active_mask)
    assert bits.same_bits(batch.logp, rolled_out().logp)
    mesh = alone()
    forward = trainer(mesh, ONE, objective=SCORING, shape=BF16).update(batch, torch.ones(10)).forward
    assert bits.same_bits(forward.logp, batch.logp)


def test_a_temperature_divides_the_logits_on_both_sides() -> None:
    """B1; witness: training at another temperature."""
    for temperature, equal in ((RAGGED.temperature, True), (1.0, False)):
        objective = replace(SCORING, temperature=temperature)
        forward = (
            trainer(alone(), ONE, objective=objective, shape=BF16)
            .update(rolled_out(), torch.ones(10))
            .forward
        )
        assert bits.same_bits(forward.logp, rolled_out().logp) is equal
        assert bits.same_bits(
            forward.row_digest, rolled_out().row_digest
        )  # of the logits before the division


# Witnesses: what users of other systems do, and what it costs.


def unpadded_tiles(_self: Products, x: Tensor) -> Tensor:
    return x.float().contiguous()


def fused_attention(
    _products: Products, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float
) -> Tensor:
    keys, values = k.transpose(2, 3).flatten(1, 2), v.flatten(1, 2)
    visible = torch.arange(keys.shape[1]) <= positions.unsqueeze(-1)
    return torch.nn.functional.scaled_dot_product_attention(
        q.float(), keys, values, attn_mask=visible, scale=scale
    )


@pytest.mark.parametrize(
    ("owner", "name", "planted"),
    [(Products, "_tiles", unpadded_tiles), (model_attention, "cached_attention", fused_attention)],
    ids=["decoding by one-row products", "fused attention"],
)
def test_another_kernel_in_the_engine_shows_in_the_bits(
    owner: object, name: str, planted: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = expected()
    right = lone_engine(TINY).generate(SEQUENCES, sampling())
    monkeypatch.setattr(owner, name, planted)
    wrong = lone_engine(TINY).generate(SEQUENCES[:1], sampling())
    assert fixed  # computed before the fault was planted
    assert wrong[0].tokens[:1] == right[0].tokens[:1]  # a small difference, not nonsense
    assert wrong[0].logp[0] == pytest.approx(right[0].logp[0], abs=1e-3)
    assert wrong[0].row_digest != right[0].row_digest


# Several ranks: engine layouts.

WIDE, MIXED = Layout(dp=1, cp=1, tp=8, sp=1), Layout(dp=2, cp=2, tp=2, sp=2)
LAYOUTS = {  # world size → training layouts, each with rollout layouts (tp, engines): all ranks, or some idle
    2: [
        (Layout(dp=1, cp=1, tp=2, sp=2), [(1, 2), (2, 1), (1, 1)]),
        (Layout(dp=2, cp=1, tp=1, sp=1), [(1, 2), (2, 1)]),
    ],
    8: [(WIDE, [(1, 8), (4, 2), (8, 1), (1, 3)]), (MIXED, [(2, 4), (4, 1)])],
}


def roll_out_in_every_layout(
    rank: int, world: int, how: Sampling
) -> list[tuple[Layout, RolloutLayout, RolloutBatch]]:
    found = []
    for layout, engines in LAYOUTS[world]:
        for tp, count in engines:
            place = RolloutLayout(tp, count, world)
            mesh = mesh_of(layout, rank, place)
            one = rollouts(policy(mesh, sp=layout.sequence_parallel, shape=BF16), mesh, place, BF16)
            own, held = one.synchronise(3)
            assert own == held
            assert one.weight_version == 3
            found.append((layout, place, one.generate(SEQUENCES, how, 3)))
    return found


@pytest.mark.parametrize("world", [2, 8])
def test_engine_layouts_change_no_bit(world: int) -> None:
    products()
    reference = rolled_out()
    for found in run_ranks(world, roll_out_in_every_layout, sampling()):
        for layout, place, batch in found:
            assert same(batch, reference), (layout, place)


# Training's forward pass.

SCORING = replace(OBJECTIVE, kl_coef=0.0, entropy_coef=0.0, temperature=RAGGED.temperature)
FORWARDS = {  # world size → training layouts, each with a micro-batch size
    1: [(ONE, 1), (ONE, 2), (ONE, 3)],
    2: [
        (Layout(dp=1, cp=1, tp=2, sp=1), 3),
        (Layout(dp=1, cp=1, tp=2, sp=2), 2),
        (Layout(dp=1, cp=2, tp=1, sp=1), 1),
    ],
    4: [
        (Layout(dp=1, cp=4, tp=1, sp=1), 10),
        (Layout(dp=1, cp=1, tp=4, sp=4), 3),
        (Layout(dp=1, cp=2, tp=2, sp=2), 10),
        (Layout(dp=2, cp=1, tp=2, sp=1), 2),
    ],
}


def forwards(rank: int, world: int, batch: RolloutBatch) -> list[tuple[object, Tensor, Tensor]]:
    found = []
    for layout, size in FORWARDS[world]:
        mesh = mesh_of(layout, rank)
        of = trainer(mesh, layout, objective=replace(SCORING, micro_batch_size=size), shape=BF16)
        forward = of.update(batch, torch.ones(len(batch.lengths))).forward
        assert forward.replicas_agree
        assert sum(forward.tokens_by_cp) == batch.active_tokens
        found.append(((layout, size), forward.logp, forward.row_digest))
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
def test_training_computes_the_bits_that_were_drawn(world: int) -> None:
    products()
    batch = rolled_out()
    by_rank = [forwards(0, 1, batch)] if world == 1 else run_ranks(world, forwards, batch)
    for found in by_rank:
        for case, logp, rows in found:
            assert bits.same_bits(logp, batch.logp), case
            assert bits.same_bits(rows, batch.row_digest), case


def test_padding_that_only_training_counts_shows_in_the_log_probabilities_and_not_in_the_logits() -> None:
    """A3: the same rows and other log-probabilities: what differs is the softmax."""
    of_rank = head.Vocabulary.of

    def counting_padding(*arguments: object) -> head.Vocabulary:
        vocabulary = of_rank(*arguments)
        assert not vocabulary.valid.all()
        return replace(vocabulary, valid=torch.ones_like(vocabulary.valid))

    batch = rolled_out()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head.Vocabulary, "of", counting_padding)
        forward = trainer(alone(), ONE, objective=SCORING, shape=BF16).update(
            batch, torch.ones(len(batch.lengths))
        )
    differ = bits.bit_pattern(forward.forward.logp) != bits.bit_pattern(batch.logp)
    assert int((differ & batch.active_mask).sum()) > batch.active_tokens // 2
    assert bits.same_bits(forward.forward.row_digest, batch.row_digest)


# Weights: none that are stale.


def test_an_engine_after_an_update_is_as_good_as_new() -> None:
    """E1: nothing of a cache outlives the weights that it came from."""
    mesh, place = alone(), RolloutLayout(1, 1, 1)
    of = trainer(mesh, ONE, objective=SCORING, shape=BF16)
    used = rollouts(of.model, mesh, place, BF16)
    used.synchronise(0)
    first = used.generate(SEQUENCES, sampling(), 0)
    of.update(first, torch.linspace(-1, 1, len(SEQUENCES)))
    used.synchronise(1)
    again = used.generate(SEQUENCES, sampling(), 1)
    fresh = rollouts(of.model, mesh, place, BF16)
    fresh.synchronise(1)
    assert same(again, fresh.generate(SEQUENCES, sampling(), 1))
    assert not same(again, first)


def refusals(rank: int, world: int) -> list[str]:
    """Plant stale weights on the last rank, in three ways; return what this rank is told."""
    layout, place = Layout(dp=world, cp=1, tp=1, sp=1), RolloutLayout(world, 1, world)
    mesh = mesh_of(layout, rank, place)
    trained = policy(mesh)
    one = rollouts(trained, mesh, place)
    drawn: list[object] = []
    one.engine.generate = lambda *_: drawn.append(1)  # nothing may be drawn
    said = []

    def forgotten(source: object, target: object, tp: int) -> None:
        """Hand over nothing."""

    def one_bit_off(source, target, tp) -> None:
        original(source, target, tp)
        if rank == world - 1:
            weight = next(iter(target.parameters()))
            weight.view(-1)[0] = torch.nextafter(weight.view(-1)[0], torch.tensor(9.0))

    original = dispatch.hand_over
    for planted in (forgotten, one_bit_off):
        dispatch.hand_over = planted
        with pytest.raises(StaleWeightsError) as caught:
            one.synchronise(0)
        said.append(str(caught.value))
    dispatch.hand_over = original
    one.synchronise(0)
    with pytest.raises(StaleWeightsError) as caught:
        one.generate(SEQUENCES, RAGGED, 1)  # the hand-over of version 1 was forgotten
    said.append(str(caught.value))
    assert not drawn
    return said


def test_stale_weights_are_refused_on_every_rank_before_a_token_is_drawn() -> None:
    """E2."""
    products()
    for said in run_ranks(2, refusals):
        assert "engine" in said[0]
        assert "engine" in said[1]
        assert "version 1" in said[2]
        assert "version 0" in said[2]
