from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from numeric_data import LEAF, TILE, mixed
from torch import Tensor

from rlsp.bits import same_bits
from rlsp.numerics import certificate, operators
from rlsp.numerics.certificate import Certificate, NoExactPathError, Sharded, certify
from rlsp.numerics.operands import agree, cancelling, noise, with_extremes
from rlsp.numerics.probes import probes
from rlsp.numerics.products import WIDE_ROWS, Product, Products, Shape

Kernel = Callable[[Tensor, Tensor], Tensor]
MM, BMM = torch.mm, torch.bmm
CPU = torch.device("cpu")
HIDDEN, OUT, HEAD, BLOCK = 64, 24, 16, 32
SHAPES = {
    "column": Shape(Product.COLUMN, OUT, HIDDEN),
    "column_back": Shape(Product.COLUMN_BACK, OUT, HIDDEN),
    "row": Shape(Product.ROW, HIDDEN, OUT),
    "row_back": Shape(Product.ROW_BACK, HIDDEN, OUT),
    "token": Shape(Product.TOKEN, OUT, HIDDEN),
    "keys": Shape(Product.ATTENTION, BLOCK, HEAD),
    "values": Shape(Product.ATTENTION, HEAD, BLOCK),
    "attention_token": Shape(Product.ATTENTION_TOKEN, BLOCK, HEAD),
}


def certified(*names: str, shards: tuple[int, ...] = (2, 4)) -> Certificate:
    return certify(LEAF, tuple(Sharded(SHAPES[name], shards) for name in names or SHAPES), BLOCK, 1)


def wide_names(found: Certificate) -> set[str]:
    return {name for name, shape in SHAPES.items() if shape in found.wide}


def in_another_order(kernel: Kernel, a: Tensor, b: Tensor) -> Tensor:
    order = torch.randperm(a.shape[-1], generator=torch.Generator().manual_seed(1))
    return kernel(a[..., order].contiguous(), b[..., order, :].contiguous())


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Make torch.mm or torch.bmm sum in another order wherever a condition on its operands holds."""

    def planted(name: str, condition: Callable[[Tensor, Tensor], bool | Tensor]) -> None:
        kernel = getattr(torch, name)

        def faulty(a: Tensor, b: Tensor) -> Tensor:
            where = torch.as_tensor(condition(a, b))
            if not where.any():
                return kernel(a, b)
            return torch.where(where, in_another_order(kernel, a, b), kernel(a, b))

        monkeypatch.setattr(torch, name, faulty)

    yield planted
    monkeypatch.undo()


@pytest.fixture(scope="module")
def sound() -> Certificate:
    return certified()


def test_on_this_machine_every_product_has_an_exact_path(sound: Certificate) -> None:
    assert len(sound.wide) + len(sound.narrowed) == len(SHAPES)
    assert sound.checks > 100


def test_a_second_certificate_says_the_same(sound: Certificate) -> None:
    assert certified() == sound


def test_other_threads_or_kernels_have_another_digest(
    sound: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = (Sharded(SHAPES["row"], (2,)),)
    assert certify(LEAF, wanted, BLOCK, 1).digest == sound.digest
    assert certify(LEAF, wanted, BLOCK, 2).digest != sound.digest
    one_ulp = torch.tensor(torch.finfo(torch.float32).eps)
    monkeypatch.setitem(operators.OPERATORS, "exp", lambda x: torch.exp(x) * (1 + one_ulp))
    assert certify(LEAF, wanted, BLOCK, 1).digest != sound.digest


def test_batched_calls_in_another_order_are_narrowed_to_the_leaf_path(plant: Callable[..., None]) -> None:
    plant("bmm", lambda _a, _b: True)
    found = certified()
    assert wide_names(found) <= {"column", "row_back"}
    assert "row n=64 k=24" in found.narrowed
    x, w = mixed(1, 40, 2 * OUT), mixed(2, 2, HIDDEN, OUT)
    assert same_bits(LEAF.certified(found.wide).row(x, w), LEAF.row(x, w))


def test_a_kernel_that_depends_on_the_number_of_rows_is_narrowed(
    sound: Certificate, plant: Callable[..., None]
) -> None:
    plant("mm", lambda a, _b: a.shape[0] > 64)
    assert wide_names(certified()) == wide_names(sound) - {"column", "row_back"}


def test_a_kernel_that_changes_at_the_largest_call_is_narrowed(
    sound: Certificate, plant: Callable[..., None]
) -> None:
    """No wide call has more rows than this."""
    plant("mm", lambda a, _b: a.shape[0] >= WIDE_ROWS)
    plant("bmm", lambda a, _b: a.shape[1] >= WIDE_ROWS)
    assert wide_names(certified()) <= {"token", "attention_token"}
    assert wide_names(sound)


def test_a_kernel_that_depends_on_the_batch_is_narrowed(
    sound: Certificate, plant: Callable[..., None]
) -> None:
    plant("bmm", lambda a, _b: a.shape[0] > 4)
    lost = wide_names(sound) - wide_names(certified())
    assert {"token", "keys", "values", "attention_token"} <= lost
    assert "row" not in lost


def test_a_kernel_that_depends_on_how_keys_are_stored_is_narrowed(
    sound: Certificate, plant: Callable[..., None]
) -> None:
    """Scores multiply by keys as they lie in the cache, a transposed view."""
    plant("bmm", lambda _a, b: b.stride(-1) != 1)
    lost = wide_names(sound) - wide_names(certified())
    assert {"keys", "values"} <= lost
    assert "column_back" not in lost


@pytest.mark.parametrize("name", ["column", "column_back", "row", "row_back", "keys", "values"])
def test_a_leaf_that_depends_on_its_place_in_the_tile_leaves_no_exact_path(
    plant: Callable[..., None], name: str
) -> None:
    plant("mm", lambda a, _b: (torch.arange(a.shape[0]) % 8 == 7).unsqueeze(1))
    with pytest.raises(NoExactPathError, match="place in the tile"):
        certified(name)


def test_a_leaf_that_depends_on_the_other_rows_leaves_no_exact_path(plant: Callable[..., None]) -> None:
    plant("mm", lambda a, _b: bool((a == 0).all(dim=1).any()))
    with pytest.raises(NoExactPathError, match="column n=24 k=64 depend on the other rows"):
        certified("column")


def test_a_leaf_that_depends_on_a_single_row_beside_it_leaves_no_exact_path(
    plant: Callable[..., None],
) -> None:
    plant("mm", lambda a, _b: int(a.any(dim=1).sum()) == 1)
    with pytest.raises(NoExactPathError, match="being alone"):
        certified("column")


@pytest.mark.parametrize("name", ["keys", "values"])
def test_a_leaf_that_depends_on_keys_out_of_sight_leaves_no_exact_path(
    plant: Callable[..., None], name: str
) -> None:
    """Zeros in a cache's tail take another path than numbers would."""
    plant("mm", lambda _a, b: bool((b == 0).all(dim=0).any() or (b == 0).all(dim=1).any()))
    with pytest.raises(NoExactPathError, match="keys that its query does not see"):
        certified(name)


def test_a_leaf_that_depends_on_its_shards_place_leaves_no_exact_path(
    plant: Callable[..., None],
) -> None:
    calls = iter(range(1 << 30))
    plant("mm", lambda _a, _b: next(calls) % 7 == 6)
    with pytest.raises(NoExactPathError, match="depend"):
        certified("row")


def test_an_operator_that_depends_on_its_length_leaves_no_exact_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def with_a_tail(x: Tensor) -> Tensor:
        y = torch.exp(x)
        tail = x.shape[-1] % 32
        return torch.cat(
            (y[..., : x.shape[-1] - tail], torch.exp(x.double()).float()[..., x.shape[-1] - tail :]), -1
        )

    monkeypatch.setitem(operators.OPERATORS, "exp", with_a_tail)
    with pytest.raises(NoExactPathError, match="exp depends on the length"):
        certified("row")


def test_a_reduction_that_depends_on_the_number_of_rows_leaves_no_exact_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def by_columns(x: Tensor) -> Tensor:
        return x.sum(dim=-1) if x.shape[0] > 1 else x.flip(-1).cumsum(dim=-1)[..., -1]

    monkeypatch.setitem(operators.REDUCTIONS, "sum", by_columns)
    with pytest.raises(NoExactPathError, match="number of rows"):
        certified("row")


def test_operands_without_power_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole numbers add up exactly in any order: such a certificate would prove nothing."""

    def whole(*arguments: int, device: torch.device = CPU) -> tuple[Tensor, Tensor]:
        return torch.ones(arguments[0], arguments[2]), torch.ones(arguments[1], arguments[2])

    monkeypatch.setattr(certificate, "cancelling", lambda r, c, k, _seed, _device: whole(r, c, k))
    with pytest.raises(NoExactPathError, match="do not tell two orders"):
        certified("row")


def test_observations_are_recorded_and_not_judged(sound: Certificate, plant: Callable[..., None]) -> None:
    """One row at a time is a call that the contract never makes: its bits are of interest only."""
    plant("mm", lambda a, _b: a.shape[0] < TILE)
    seen, before = dict(certified().observations), dict(sound.observations)
    assert seen.keys() == before.keys()
    assert not seen["product of 1 row"]
    assert not seen["product of 4 rows"]
    assert seen["product of 256 rows"] == before["product of 256 rows"]


@pytest.mark.parametrize("name", ["column", "column_back", "row", "row_back", "keys", "values"])
def test_every_number_of_tiles_that_a_wide_call_may_have_is_tried(name: str) -> None:
    counts = (2, 4)
    wide = Products(TILE, frozenset({SHAPES[name]}))
    tried = {
        (got.shape[0], got.shape[1])
        for probe in probes(SHAPES[name], counts, TILE, BLOCK, CPU)
        for _, got, _ in probe.wide_pairs(LEAF, wide)
    }
    rows = range(TILE, WIDE_ROWS + 1, TILE)
    assert {(v, count) for v in counts for count in rows} <= tried
    assert max(count for _, count in tried) == WIDE_ROWS


def test_torchs_own_silu_is_caught_where_it_differs(
    sound: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The witness: an operator that NUMERICS found to depend on the length."""
    monkeypatch.setitem(operators.OPERATORS, "silu", torch.nn.functional.silu)
    if dict(sound.observations)["torch's silu in lengths of 31"]:
        pytest.skip("torch's silu does not depend on the length on this machine")
    with pytest.raises(NoExactPathError, match="silu depends on the length"):
        certified("row")


@pytest.mark.parametrize("k", [1, 2, 16, 63, 256])
def test_cancelling_operands_leave_rounding_alone(k: int) -> None:
    x, w = cancelling(8, 300, k, 1)
    assert x.shape == (8, k)
    assert w.shape == (300, k)
    exact = x.double() @ w.double().t()
    if k % 2 == 0:
        assert float(exact.abs().max()) < 1e-12
    assert agree(x, x.clone())
    assert same_bits(cancelling(8, 300, k, 1)[1], w)


def test_noise_is_keyed_by_seed_and_index() -> None:
    x = noise(1, (5, 100), CPU)
    assert same_bits(noise(1, (250,), CPU), x.flatten()[:250])
    assert not same_bits(noise(2, (5, 100), CPU), x)
    assert float(x.min()) >= -1
    assert float(x.max()) < 1
    assert abs(float(x.mean())) < 0.1


def test_extremes_have_a_denormal_and_a_large_row() -> None:
    x = with_extremes(noise(1, (8, 16), CPU))
    largest = x.abs().amax(dim=1)
    assert float(largest[2]) < torch.finfo(torch.float32).tiny
    assert float(largest[3]) > 1e17
    assert same_bits(with_extremes(x[:1]), x[:1])


def test_zeros_agree_with_nothing() -> None:
    assert not agree(torch.zeros(4), torch.zeros(4))
    assert agree(torch.ones(4), torch.ones(4))
    assert not agree(torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0]))
