from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from numeric_data import LEAF, draw, gradients, relative_error, wide
from torch import Tensor

from rlsp.bits import same_bits
from rlsp.layout import zigzag_positions
from rlsp.numerics import attention
from rlsp.numerics.attention import (
    KeyValueGradient,
    block_attention,
    block_attention_back,
    cached_attention,
)
from rlsp.numerics.fixed import from_fixed
from rlsp.numerics.products import Product, Products

HEADS, GROUP, BLOCK, D, LENGTH = 3, 2, 32, 16, 256
BLOCKS = LENGTH // BLOCK
SCALE, LSB, BOUND = D**-0.5, 40, 2.0**10
WIDE = wide((Product.ATTENTION, BLOCK, D), (Product.ATTENTION, D, BLOCK), (Product.ATTENTION_TOKEN, BLOCK, D))
PATHS = {"leaf": LEAF, "wide": WIDE}


@dataclass(frozen=True)
class Case:
    """q and dout [heads, G, S, D]; k and v [heads, S, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def case(length: int = LENGTH, seed: int = 0) -> Case:
    """Scores spread over some thirty powers of e, so that most weights are small and none is alone."""
    q, dout = (draw(seed + i, HEADS, GROUP, length, D) for i in (0, 1))
    k, v = (draw(seed + i, HEADS, length, D) for i in (2, 3))
    return Case(2 * q, 2 * k, v, dout)


CASE = case()


@dataclass(frozen=True)
class Result:
    """Everything by position: out and dq [heads, G, S, D], exact dk and dv [heads, S, D]."""

    out: Tensor
    softmax: Tensor
    dq: Tensor
    exact: KeyValueGradient

    @property
    def dk(self) -> Tensor:
        return self.exact.dk.flatten(1, 2)

    @property
    def dv(self) -> Tensor:
        return self.exact.dv.flatten(1, 2)


def cut(x: Tensor, positions: list[int]) -> Tensor:
    """Cut [heads, G, S, D] into the query blocks [heads, n, G, block, D] of some positions."""
    return x[:, :, positions].unflatten(2, (-1, BLOCK)).transpose(1, 2).contiguous()


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2, 3)


def attend(products: Products, c: Case, positions: list[int] | None = None) -> Result:
    """Attend with the queries at `positions` to all keys, forward and backward."""
    positions = list(range(c.q.shape[2])) if positions is None else positions
    blocks = tuple(p // BLOCK for p in positions if p % BLOCK == 0)
    q, dout = cut(c.q, positions), cut(c.dout, positions)
    k, v = (x.unflatten(1, (-1, BLOCK)) for x in (c.k, c.v))
    out, softmax = block_attention(products, q, k, v, blocks, SCALE)
    dq, exact = block_attention_back(products, dout, (q, k, v, out, softmax), blocks, SCALE, LSB, BOUND)
    return Result(joined(out), joined(softmax), joined(dq), exact)


def part(c: Case, heads: slice) -> Case:
    return Case(c.q[heads], c.k[heads], c.v[heads], c.dout[heads])


def oracle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("hgsd,htd->hgst", q, k) * SCALE
    hidden = torch.ones(scores.shape[-2:]).tril() == 0
    return torch.einsum("hgst,htd->hgsd", scores.masked_fill(hidden, -math.inf).softmax(dim=-1), v)


def same(a: Result, b: Result) -> bool:
    pairs = [(a.out, b.out), (a.softmax, b.softmax), (a.dq, b.dq), (a.dk, b.dk), (a.dv, b.dv)]
    return all(same_bits(x, y) for x, y in pairs)


@pytest.fixture(scope="module")
def whole() -> Result:
    return attend(WIDE, CASE)


@pytest.mark.parametrize("steepness", [1, 16])
def test_forward_and_backward_agree_with_float64_as_well_as_a_plain_softmax(steepness: int) -> None:
    """Large scores cost no digits: weights are recomputed from maximum and sum, not from their logarithm."""
    c = Case(steepness * CASE.q, CASE.k, CASE.v, CASE.dout)
    result = attend(WIDE, c)
    assert result.exact.reach < 1
    inputs = (c.q, c.k, c.v)
    leaves = [x.clone().requires_grad_() for x in inputs]
    plain = oracle(*leaves)
    exact = (oracle(*(x.double() for x in inputs)), *gradients(oracle, c.dout, *inputs))
    floats = (plain.detach(), *torch.autograd.grad(plain, leaves, c.dout))
    own = (result.out, result.dq, from_fixed(result.dk, LSB), from_fixed(result.dv, LSB))
    for got, naive, want in zip(own, floats, exact, strict=True):
        assert relative_error(got, want) < 1e-6 * steepness
        assert relative_error(got, want) < 1.25 * relative_error(naive, want)


def test_the_leaf_path_and_the_wide_path_leave_the_same_bits(whole: Result) -> None:
    assert same(attend(LEAF, CASE), whole)


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_a_zigzag_split_over_context_ranks_changes_no_bit(whole: Result, cp: int) -> None:
    dk, dv = torch.zeros_like(whole.dk), torch.zeros_like(whole.dv)
    for rank in range(cp):
        positions = zigzag_positions(LENGTH, cp, rank)
        own = attend(WIDE, CASE, positions)
        assert same_bits(own.out, whole.out[:, :, positions])
        assert same_bits(own.softmax, whole.softmax[:, :, positions])
        assert same_bits(own.dq, whole.dq[:, :, positions])
        dk, dv = dk + own.dk, dv + own.dv
    assert same_bits(dk, whole.dk)
    assert same_bits(dv, whole.dv)


def test_float_sums_of_key_gradients_over_context_ranks_would_change_bits(whole: Result) -> None:
    """The witness: rounded before they are added, the ranks' shares are not the whole."""
    shares = [attend(WIDE, CASE, zigzag_positions(LENGTH, 4, rank)).dk for rank in range(4)]
    rounded = sum((from_fixed(share, LSB) for share in shares), torch.zeros(()))
    assert not same_bits(rounded, from_fixed(whole.dk, LSB))


@pytest.mark.parametrize("path", PATHS)
def test_heads_and_sequences_have_the_same_bits_alone_and_in_any_batch(whole: Result, path: str) -> None:
    for heads in (slice(0, 1), slice(2, 3), slice(1, 3)):
        alone = attend(PATHS[path], part(CASE, heads))
        assert same_bits(alone.out, whole.out[heads])
        assert same_bits(alone.dq, whole.dq[heads])
        assert same_bits(alone.dk, whole.dk[heads])
        assert same_bits(alone.dv, whole.dv[heads])


def test_what_follows_a_sequence_changes_none_of_its_bits(whole: Result) -> None:
    """Padding to a longer batch, whatever stands in it, as long as no gradient comes from there."""
    length = 96
    short = attend(WIDE, Case(*(x[..., :length, :].contiguous() for x in vars(CASE).values())))
    dout = CASE.dout.clone()
    dout[:, :, length:] = 0
    padded = attend(WIDE, Case(CASE.q, CASE.k, CASE.v, dout))
    assert same_bits(padded.out[:, :, :length], short.out)
    assert same_bits(padded.dq[:, :, :length], short.dq)
    assert same_bits(padded.dk[:, :length], short.dk)
    assert same_bits(padded.dv[:, :length], short.dv)
    assert not padded.dk[:, length:].any()


def test_all_keys_at_once_have_other_bits(whole: Result) -> None:
    """The witness: a softmax over the whole row is the same attention in another order."""
    naive = oracle(CASE.q, CASE.k, CASE.v)
    assert not same_bits(naive, whole.out)
    assert relative_error(naive, whole.out.double()) < 1e-6


def rows_of(x: Tensor, positions: range) -> Tensor:
    """Lay out queries as the rollout does: [heads, new tokens × G, D]."""
    return x[:, :, positions.start : positions.stop].transpose(1, 2).flatten(1, 2)


def decode(products: Products, c: Case, chunk: int, length: int = LENGTH, noise: bool = False) -> Tensor:
    """Fill a cache chunk by chunk and attend with every chunk's queries: [heads, G, S, D]."""
    k, v = (draw(9, *x.shape) if noise else torch.zeros_like(x) for x in (c.k, c.v))
    outputs = []
    for start in range(0, length, chunk):
        new = range(start, min(start + chunk, length))
        for cache, values in ((k, c.k), (v, c.v)):
            cache[:, new.start : new.stop] = values[:, new.start : new.stop]
        blocks = -(-new.stop // BLOCK)
        keys, values = (x.unflatten(1, (-1, BLOCK))[:, :blocks].contiguous() for x in (k, v))
        positions = torch.tensor(new).repeat_interleave(GROUP).expand(c.k.shape[0], -1)
        out = cached_attention(products, rows_of(c.q, new), keys.transpose(2, 3), values, positions, SCALE)
        outputs.append(out.unflatten(1, (-1, GROUP)).transpose(1, 2))
    return torch.cat(outputs, dim=2)


@pytest.mark.parametrize("chunk", [1, 5, 7, 32])
def test_a_cache_read_in_chunks_leaves_the_bits_of_whole_blocks(whole: Result, chunk: int) -> None:
    length = 135 if chunk == 1 else LENGTH
    assert same_bits(decode(WIDE, CASE, chunk, length=length), whole.out[:, :, :length])


@pytest.mark.parametrize("scores", [1, 3 * LENGTH * HEADS * 32])
def test_a_long_prompt_is_attended_a_part_at_a_time_to_the_same_bits(
    whole: Result, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, int]] = []
    attend_cached = attention._attend_cached

    def counted(products: Products, q: Tensor, k: Tensor, *rest: Any) -> Tensor:
        calls.append((q.shape[1], k.shape[1]))
        return attend_cached(products, q, k, *rest)

    monkeypatch.setattr(attention, "SCORES", scores)
    monkeypatch.setattr(attention, "_attend_cached", counted)
    assert same_bits(decode(WIDE, CASE, LENGTH), whole.out)
    rows = 32 if scores == 1 else 96
    assert max(size for size, _ in calls) == rows
    assert [blocks for _, blocks in calls] == sorted(blocks for _, blocks in calls)
    assert (calls[0][1], calls[-1][1]) == (-(-rows // GROUP // BLOCK), BLOCKS)


def test_the_cached_path_leaves_the_same_bits_leaf_by_leaf(whole: Result) -> None:
    assert same_bits(decode(LEAF, CASE, 7, length=70), whole.out[:, :, :70])


def test_what_a_cache_holds_beyond_the_query_does_not_matter(whole: Result) -> None:
    assert same_bits(decode(WIDE, CASE, 7, length=70, noise=True), whole.out[:, :, :70])


def test_sequences_of_unlike_lengths_share_a_cached_call(whole: Result) -> None:
    """Each query visits the blocks up to its own, whatever blocks the longest sequence needs."""
    ends = [0, 37, 200]
    k, v = torch.zeros_like(CASE.k), torch.zeros_like(CASE.v)
    for head, end in enumerate(ends):
        k[head, : end + 1], v[head, : end + 1] = CASE.k[head, : end + 1], CASE.v[head, : end + 1]
    q = torch.stack([CASE.q[head, :, end] for head, end in enumerate(ends)])
    positions = torch.tensor(ends).unsqueeze(1).expand(-1, GROUP)
    keys, values = (x.unflatten(1, (-1, BLOCK)) for x in (k, v))
    got = cached_attention(WIDE, q, keys.transpose(2, 3), values, positions, SCALE)
    assert same_bits(got, torch.stack([whole.out[head, :, end] for head, end in enumerate(ends)]))


def test_a_single_product_over_the_cache_would_change_bits(whole: Result) -> None:
    """The witness for the cache: one softmax over all keys depends on how many there are."""
    position = 135
    prefix = oracle(*(x[..., : position + 1, :] for x in (CASE.q, CASE.k, CASE.v)))[:, :, position]
    assert not same_bits(prefix, whole.out[:, :, position])


def test_the_first_token_sees_itself_alone(whole: Result) -> None:
    assert same_bits(whole.out[:, :, 0], CASE.v[:, None, 0].expand(-1, GROUP, -1))


def test_scores_far_apart_leave_no_nan() -> None:
    """The first block's keys may weigh nothing against a later one's, and the other way round."""
    c = case()
    for steep in (Case(100 * c.q, c.k, c.v, c.dout), Case(-100 * c.q, 100 * c.k, c.v, c.dout)):
        result = attend(WIDE, steep)
        assert result.out.isfinite().all()
        assert relative_error(result.out, oracle(*(x.double() for x in (steep.q, steep.k, steep.v)))) < 1e-3
        assert same_bits(decode(WIDE, steep, 32), result.out)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e5])
def test_a_leaf_out_of_bound_is_noticed_before_the_sum_is_used(value: float) -> None:
    dout = CASE.dout.clone()
    dout[1, 0, 77, 3] = value
    assert not attend(WIDE, Case(CASE.q, CASE.k, CASE.v, dout)).exact.reach < 1


def test_bfloat16_operands_are_widened_first() -> None:
    c = case(64)
    narrow = Case(*(x.to(torch.bfloat16) for x in vars(c).values()))
    widened = Case(*(x.float() for x in vars(narrow).values()))
    assert same(attend(WIDE, narrow), attend(WIDE, widened))
