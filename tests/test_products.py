from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numeric_data import LEAF, TILE, draw, mixed, relative_error, wide
from torch import Tensor

from rlsp.bits import same_bits
from rlsp.numerics.operands import cancelling
from rlsp.numerics.products import (
    ALIGNMENT_BYTES,
    WIDE_ELEMENTS,
    WIDE_ROWS,
    Product,
    Products,
    fresh,
    wide_rows,
    widened,
)
from rlsp.numerics.tree import tree_sum

V, N, K, BLOCK = 8, 24, 40, 32  # no power of two among the widths
WIDE = wide(
    (Product.COLUMN, N, K),
    (Product.COLUMN_BACK, N, K),
    (Product.ROW, N, K),
    (Product.ROW_BACK, N, K),
    (Product.TOKEN, N, K),
    (Product.ATTENTION, N, K),
    (Product.ATTENTION_TOKEN, N, K),
)
PATHS = {"leaf": LEAF, "wide": WIDE}
ROWS = (1, 2, 31, 32, 33, 100)


def operands(rows: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return rows and a weight [V, N, K] for each product of rows; the sums cancel."""
    inner, w = cancelling(rows, V * N, K, 1)
    outer, w_t = cancelling(rows, V * K, N, 2)
    back = w_t.view(V, K, N).transpose(1, 2).contiguous()
    return {
        "column": (inner, w.view(V, N, K)),
        "row": (inner.repeat(1, V), w.view(V, N, K)),
        "column_back": (outer.repeat(1, V), back),
        "row_back": (outer, back),
    }


def rows_last(name: str, y: Tensor, v: int) -> Tensor:
    """Bring every product's output to [v, rows, width]."""
    return y if y.dim() == 3 else y.view(y.shape[0], v, -1).transpose(0, 1)


def product(products: Products, name: str, x: Tensor, w: Tensor) -> Tensor:
    call: Callable[[Tensor, Tensor], Tensor] = getattr(products, name)
    return rows_last(name, call(x, w), w.shape[0])


NAMES = tuple(operands(1))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", NAMES)
def test_a_row_has_the_same_bits_alone_and_in_any_company(name: str, path: str) -> None:
    x, w = operands(100)[name]
    whole = product(LEAF, name, x, w)
    for rows in ROWS:
        assert same_bits(product(PATHS[path], name, x[:rows], w), whole[:, :rows]), rows
        assert same_bits(product(PATHS[path], name, x[100 - rows :], w), whole[:, 100 - rows :]), rows


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", NAMES)
def test_shards_have_the_same_bits_on_every_placement(name: str, path: str) -> None:
    x, w = operands(37)[name]
    whole = product(LEAF, name, x, w)
    sharded_input = x.shape[1] != w.shape[2 if name == "column" else 1]
    for tp in (1, 2, 4, 8):
        inputs = x.chunk(tp, dim=1) if sharded_input else [x] * tp
        parts = [
            product(PATHS[path], name, x.contiguous(), part)
            for x, part in zip(inputs, w.chunk(tp), strict=True)
        ]
        assert same_bits(torch.cat(parts), whole), tp


@pytest.mark.parametrize("name", NAMES)
def test_operands_cancel_so_that_another_order_of_the_sum_leaves_other_bits(name: str) -> None:
    """The witness of this file: the same addends in another order."""
    x, w = operands(37)[name]
    order = torch.randperm(K if name in ("column", "row") else N, generator=torch.Generator().manual_seed(3))
    if name in ("column", "row_back"):
        other = x[:, order]
    else:
        other = x.view(x.shape[0], V, -1)[..., order].flatten(1)
    moved = w[..., order] if name in ("column", "row") else w[:, order]
    assert not same_bits(product(LEAF, name, other, moved), product(LEAF, name, x, w))


def test_one_product_over_all_shards_is_not_their_tree() -> None:
    """A layer that sums its whole input in one product has other bits than the leaves' tree."""
    x, w = mixed(1, 37, V * K), mixed(2, V, N, K)
    naive = torch.mm(x, w.transpose(1, 2).reshape(V * K, N))
    assert not same_bits(tree_sum(LEAF.row(x, w)), naive)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10)
@given(rows=st.integers(1, 130), v=st.sampled_from([1, 2, 4, 8]), seed=st.integers(0, 1 << 20))
def test_wide_calls_leave_the_leaf_paths_bits(name: str, rows: int, v: int, seed: int) -> None:
    width = {"column": K, "row": v * K, "column_back": v * N, "row_back": N}[name]
    x, w = mixed(seed, rows, width), mixed(seed + 2, v, N, K)
    assert same_bits(product(WIDE, name, x, w), product(LEAF, name, x, w))


@pytest.mark.parametrize("name", NAMES)
def test_a_call_of_more_rows_than_were_certified_is_cut(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = operands(2 * WIDE_ROWS + 7)[name]
    want = product(LEAF, name, x, w)
    seen: list[int] = []
    for kernel in ("mm", "bmm"):
        original = getattr(torch, kernel)

        def counting(a: Tensor, b: Tensor, original: Callable[..., Tensor] = original) -> Tensor:
            seen.append(a.shape[-2])
            return original(a, b)

        monkeypatch.setattr(torch, kernel, counting)
    assert same_bits(product(WIDE, name, x, w), want)
    assert seen == [WIDE_ROWS, WIDE_ROWS, TILE]


@given(st.integers(1, 1 << 26), st.sampled_from([8, 16, 32, 64]))
def test_wide_calls_have_whole_tiles_and_a_bounded_output(columns: int, tile: int) -> None:
    rows = wide_rows(tile, columns)
    assert rows % tile == 0
    assert tile <= rows <= WIDE_ROWS
    assert rows == tile or rows * columns <= WIDE_ELEMENTS


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", NAMES)
def test_operands_may_lie_anywhere(name: str, path: str) -> None:
    """Views at odd addresses and with strides leave the bits of fresh copies."""
    x, w = operands(37)[name]
    want = product(LEAF, name, x, w)
    shifted = torch.empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
    strided = x.t().contiguous().t()
    weight = torch.empty(w.numel() + 3)[3:].view(w.shape).copy_(w)
    for other in (shifted, strided):
        assert same_bits(product(PATHS[path], name, other, weight), want)


@pytest.mark.parametrize("name", NAMES)
def test_every_kernel_sees_aligned_operands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On some machines an operand at an odd address has other bits: shards of an odd size need copies."""
    addresses: list[int] = []
    for kernel in ("mm", "bmm"):
        original = getattr(torch, kernel)

        def watched(a: Tensor, b: Tensor, original: Callable[..., Tensor] = original) -> Tensor:
            addresses.extend((a.data_ptr() % ALIGNMENT_BYTES, b.data_ptr() % ALIGNMENT_BYTES))
            return original(a, b)

        monkeypatch.setattr(torch, kernel, watched)
    n, k, v = 23, 41, 4
    width = {"column": k, "row": v * k, "column_back": v * n, "row_back": n}[name]
    product(LEAF, name, draw(1, 2 * TILE, width)[1:], draw(2, v, n, k))
    assert len(addresses) == 4 * v
    assert set(addresses) == {0}


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_operands_are_widened_before_the_product(name: str) -> None:
    x, w = (t.to(torch.bfloat16) for t in operands(37)[name])
    got = product(LEAF, name, x, w)
    assert got.dtype == torch.float32
    assert same_bits(got, product(LEAF, name, x.float(), w.float()))


@pytest.mark.parametrize("name", NAMES)
def test_products_agree_with_float64(name: str) -> None:
    rows = 37
    width = {"column": K, "row": V * K, "column_back": V * N, "row_back": N}[name]
    x, w = draw(1, rows, width), draw(2, V, N, K)
    wide_x = x.double() if name in ("column", "row_back") else x.double().view(rows, V, -1)
    equation = {
        "column": "tk,vnk->vtn",
        "row": "tvk,vnk->vtn",
        "column_back": "tvn,vnk->vtk",
        "row_back": "tn,vnk->vtk",
    }[name]
    want = torch.einsum(equation, wide_x, w.double())
    assert relative_error(product(LEAF, name, x, w), want) < 3e-7


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("dy_shards", "x_shards"), [(V, 1), (1, V)])
def test_token_leaves_do_not_depend_on_the_call(path: str, dy_shards: int, x_shards: int) -> None:
    leaves = 9
    dy, x = mixed(1, leaves, BLOCK, dy_shards, N), mixed(2, leaves, BLOCK, x_shards, K)
    want = LEAF.token(dy, x)
    assert want.shape == (leaves, V, N, K)
    products = PATHS[path]
    assert same_bits(products.token(dy, x), want)
    assert same_bits(torch.cat([products.token(dy[i : i + 1], x[i : i + 1]) for i in range(leaves)]), want)
    for tp in (2, 4, 8):
        dys, xs = (t.chunk(tp, dim=2) if t.shape[2] > 1 else [t] * tp for t in (dy, x))
        parts = [products.token(a, b) for a, b in zip(dys, xs, strict=True)]
        assert same_bits(torch.cat(parts, dim=1), want), tp
    exact = torch.einsum("ltvn,ltwk->lvwnk", dy.double(), x.double())
    assert relative_error(want, exact.view(want.shape)) < 3e-7


def test_a_token_leaf_of_another_length_has_other_bits() -> None:
    """The witness: two leaves of half the length, added, are not the leaf."""
    dy, x = mixed(1, 1, BLOCK, 1, N), mixed(2, 1, BLOCK, 1, K)
    halves = LEAF.token(dy.view(2, BLOCK // 2, 1, N), x.view(2, BLOCK // 2, 1, K))
    assert not same_bits(halves.sum(dim=0), LEAF.token(dy, x)[0])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("transposed", [False, True])
def test_attention_products_do_not_depend_on_heads_or_row_count(path: str, transposed: bool) -> None:
    heads, tiles = 6, 4
    rows = mixed(1, heads, tiles * TILE, K)
    w = mixed(2, heads, N, K).transpose(1, 2) if transposed else mixed(2, heads, K, N)
    want = LEAF.attention(rows, w)
    products = PATHS[path]
    assert same_bits(products.attention(rows, w), want)
    for head in range(heads):
        one = products.attention(rows[head : head + 1], w[head : head + 1])
        assert same_bits(one, want[head : head + 1])
    last = products.attention(fresh(rows[:, -TILE:]), w)
    assert same_bits(last, want[:, -TILE:])
    assert relative_error(want, torch.bmm(rows.double(), w.double())) < 3e-7


@pytest.mark.parametrize("path", PATHS)
def test_attention_token_leaves_do_not_depend_on_the_batch(path: str) -> None:
    left, right = mixed(1, 6, 2 * TILE, N), mixed(2, 6, 2 * TILE, K)
    want = LEAF.attention_token(left, right)
    products = PATHS[path]
    assert same_bits(products.attention_token(left, right), want)
    assert same_bits(products.attention_token(left[4:5], right[4:5]), want[4:5])
    assert relative_error(want, torch.bmm(left.double().transpose(1, 2), right.double())) < 3e-7


def test_fresh_operands_are_contiguous_aligned_and_equal() -> None:
    x = draw(1, 7, 5)
    for view in (x, x.t(), x.view(-1)[1:], x[:, 1:]):
        got = fresh(view)
        assert got.is_contiguous()
        assert got.data_ptr() % ALIGNMENT_BYTES == 0
        assert same_bits(got, view.contiguous())


def test_widening_is_exact_and_copies_only_where_it_must() -> None:
    x = draw(1, 16, 16)
    assert widened(x).data_ptr() == x.data_ptr()
    narrow = x.to(torch.bfloat16)
    assert same_bits(widened(narrow).to(torch.bfloat16), narrow)
