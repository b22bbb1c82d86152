from __future__ import annotations

import math
import multiprocessing
import struct
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_helpers import alone, mesh_of
from ranks import run_ranks
from torch import Tensor

from rlsp import determinism, run
from rlsp.bits import row_digest, same_bits, shard_hashes
from rlsp.board import Board, Place
from rlsp.config import Config, Job
from rlsp.layout import Layout
from rlsp.model.assemble import certified_kernels
from rlsp.numerics import compiler
from rlsp.numerics.certificate import Sharded, certify
from rlsp.numerics.compiled import SOURCE, TORCH, Kernel, Kernels, load, running, using
from rlsp.numerics.fixed import Scratch, UnitAdder, add_leaves, leaf_bound
from rlsp.numerics.kernel_trials import PARTS, exact_kernels
from rlsp.numerics.operands import cancelling
from rlsp.numerics.products import Product, Products, Shape
from rlsp.numerics.tree import tree_sum
from rlsp.report import manifest
from rlsp.report.compare_rules import result_hash
from rlsp.report.manifest import Manifest, StartupFacts
from rlsp.report.records import ConsistencyReport, RolloutRecord

Compose = Callable[..., Config]
LSB = 40
BOUND = leaf_bound(LSB, 16)
LEAF = Products(32)
FORK = multiprocessing.get_context("fork")
TIES = tuple((whole + 0.5) * 2.0**-LSB for whole in range(-4, 4))
PATTERNS = st.one_of(
    st.integers(0, 2**32 - 1).map(lambda bits: struct.unpack("f", struct.pack("I", bits))[0]),
    st.sampled_from((0.0, -0.0, float("nan"), float("inf"), 2.0**-149, -(2.0**-126), 3e38, *TIES)),
)
LEAVES = st.one_of(
    st.floats(-(2.0**17), 2.0**17, width=32),
    st.sampled_from((0.0, -0.0, 2.0**-149, *TIES, 2.0**17, -(2.0**17))),
)
shapes = st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 6), st.sampled_from((1, 5, 16, 37)))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    found = load(tmp_path_factory.mktemp("kernels"))
    if found.library is None:
        pytest.skip(found.origin)
    return found


@pytest.fixture(scope="module")
def source() -> str:
    return SOURCE.read_text()


def assert_torchs_bits(kernels: Kernels, call: Callable[[], tuple[Tensor, ...]]) -> None:
    """Hold what kernels return to what torch's code does."""
    with using(TORCH):
        want = call()
    with using(kernels):
        got = call()
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


def filled(data: st.DataObject, shape: tuple[int, ...], values: st.SearchStrategy[float]) -> Tensor:
    """Draw a few values and spread them over a tensor, so that large ones cost no more to draw."""
    drawn = torch.tensor(data.draw(st.lists(values, min_size=1, max_size=24)))
    count = torch.Size(shape).numel()
    return drawn.repeat(count // len(drawn) + 1)[:count].view(shape)


@given(st.data(), shapes)
def test_leaves_add_up_to_torchs_bits(kernels: Kernels, data: st.DataObject, shape: tuple[int, ...]) -> None:
    leaves = filled(data, shape, LEAVES)

    def add() -> tuple[Tensor, ...]:
        total, turned = (
            torch.arange(x.numel()).view(x.shape) for x in (leaves[0], leaves[0].transpose(0, 1))
        )
        sums = (add_leaves(total, leaves, LSB, BOUND), add_leaves(turned, leaves.transpose(1, 2), LSB, BOUND))
        return total, turned, *sums[0], *sums[1]

    assert_torchs_bits(kernels, add)


@given(st.data(), shapes)
def test_an_adder_adds_at_any_dimension_to_torchs_bits(
    kernels: Kernels, data: st.DataObject, shape: tuple[int, ...]
) -> None:
    leaves = filled(data, shape, LEAVES)

    def add() -> tuple[Tensor, ...]:
        adder = UnitAdder((shape[0], *shape[2:]), LSB, Scratch(leaves.device))
        largest = [adder.add(part, 1).abs() for part in (leaves, -leaves, leaves * 0.25)]
        return adder.total(), *largest

    assert_torchs_bits(kernels, add)


@given(st.data(), st.integers(1, 5), st.integers(1, 40))
def test_a_leaf_out_of_bound_is_seen_and_counted_as_torch_does(
    kernels: Kernels, data: st.DataObject, count: int, width: int
) -> None:
    leaves = filled(data, (count, width), PATTERNS)

    def seen() -> tuple[Tensor, ...]:
        """Take any NaN for one: which of several is handed on, says nothing."""
        total = torch.zeros(width, dtype=torch.int64)
        reached, counts = add_leaves(total, leaves, LSB, BOUND)
        return total, reached.nan_to_num(nan=-1.0, posinf=math.inf), counts

    assert_torchs_bits(kernels, seen)


@given(st.data(), st.integers(1, 5), st.integers(1, 70), st.sampled_from((torch.float32, torch.bfloat16)))
def test_hashes_of_shards_and_rows_are_torchs(
    kernels: Kernels, data: st.DataObject, rows: int, width: int, dtype: torch.dtype
) -> None:
    x = filled(data, (rows, width), PATTERNS).to(dtype)
    assert_torchs_bits(kernels, lambda: (shard_hashes(x), shard_hashes(x.t()), shard_hashes(x[:, 1::2] != 0)))
    assert_torchs_bits(
        kernels,
        lambda: (row_digest(x, 3, 3 + width), row_digest(x, 3, 2 + width // 2), row_digest(x.t(), 0, 2)),
    )


@given(st.data(), st.integers(2, 70), st.integers(1, 300))
def test_trees_are_summed_in_torchs_order(
    kernels: Kernels, data: st.DataObject, count: int, width: int
) -> None:
    x = filled(data, (count, width), PATTERNS)
    assert_torchs_bits(kernels, lambda: (tree_sum(x), tree_sum(x[::2]), tree_sum(x.to(torch.float64))))


def test_a_tree_that_a_gradient_is_due_of_stays_in_torch(kernels: Kernels) -> None:
    x = torch.ones(4, 3, requires_grad=True)
    with using(kernels):
        tree_sum(x).sum().backward()
    assert same_bits(x.grad, torch.ones(4, 3))


def test_the_certificate_allows_every_kernel_of_the_source(kernels: Kernels) -> None:
    assert exact_kernels(kernels) == frozenset(Kernel)


MUTANTS = {
    "halves away from zero": (Kernel.ADD_LEAVES, "rintf(x * unit)", "roundf(x * unit)"),
    "towards zero": (Kernel.ADD_LEAVES, "rintf(x * unit)", "truncf(x * unit)"),
    "sums in float": (
        Kernel.ADD_LEAVES,
        "total[i] += (uint64_t)fixed",
        "total[i] = (int64_t)((float)(int64_t)total[i] + whole)",
    ),
    "magnitudes with their sign": (Kernel.ADD_LEAVES, "magnitude &= 0x7FFFFFFFu", "(void)0"),
    "subnormals as zero": (Kernel.ADD_LEAVES, "full += magnitude != 0", "full += magnitude > 0x007FFFFFu"),
    "a position off": (Kernel.SHARD_HASHES, "(i + 1) * SECOND", "i * SECOND"),
    "the last bytes left out": (Kernel.SHARD_HASHES, "if (rest)", "if (rest && 0)"),
    "columns without their index": (
        Kernel.ROW_DIGEST,
        "first + (uint64_t)(column + i + 1)",
        "first + (uint64_t)(i + 1)",
    ),
    "words without their sign": (
        Kernel.ROW_DIGEST,
        "(uint64_t)(int64_t)words[i]",
        "(uint64_t)words[i] % 65536u",
    ),
    "halves instead of neighbours": (
        Kernel.TREE_SUM,
        "*a = sums[2 * pair], *b = sums[2 * pair + 1]",
        "*a = sums[pair], *b = sums[pair + left / 2]",
    ),
    "the first of two NaN": (Kernel.TREE_SUM, "(b != b ? b : a) + b", "a + (a != a ? a : b)"),
    "the odd leaf lost": (Kernel.TREE_SUM, "if (left % 2) memmove", "if (0) memmove"),
    "even numerators": (Kernel.UNIFORMS, "word >> 40 | 1", "word >> 40"),
    "the column before": (Kernel.UNIFORMS, "(uint64_t)(first + 1 + i)", "(uint64_t)(first + i)"),
    "levels that are folded early": (Kernel.RMS_NORM, "LEVEL_STEPS = 16", "LEVEL_STEPS = 8"),
    "chains added from the last": (
        Kernel.RMS_NORM,
        "lanes[i] += lanes[chain * LANES + i]",
        "lanes[i] += lanes[(CHAINS - chain) * LANES + i]",
    ),
    "products rounded before they are added": (
        Kernel.FEW_ROWS,
        "fmaf(row[2 * row_stride], from[i], c[i])",
        "row[2 * row_stride] * from[i] + c[i]",
    ),
    "keys that are not turned": (Kernel.STORE, "keys[at + k * KEYS + place]", "keys[at + place * d + k]"),
    "one key too many": (Kernel.CACHED_ATTENTION, "key < seen ? scores[key]", "key <= seen ? scores[key]"),
    "weights added from the last": (
        Kernel.CACHED_ATTENTION,
        "own[i] + own[LANES + i] + own[2 * LANES + i] + own[3 * LANES + i]",
        "own[3 * LANES + i] + own[2 * LANES + i] + own[LANES + i] + own[i]",
    ),
    "a fused decay": (
        Kernel.CACHED_ATTENTION,
        "state[i] * decay + part[i - first]",
        "fmaf(state[i], decay, part[i - first])",
    ),
    "a maximum of its own for each block": (
        Kernel.CACHED_ATTENTION,
        "if (j > 0) most = larger(old, most);",
        "",
    ),
    "halves of bfloat16 away from zero": (Kernel.LAYERS, "bits + 0x7FFF + (bits >> 16 & 1)", "bits + 0x8000"),
    "a fused rotation": (
        Kernel.LAYERS,
        "head[half + i] * cosine[i] + head[i] * sine[i]",
        "fmaf(head[half + i], cosine[i], head[i] * sine[i])",
    ),
    "heads rounded before they are rotated": (
        Kernel.LAYERS,
        "head = normed;",
        "round_to(step->bfloat16, normed, step->d), head = normed;",
    ),
    "a sum added before it is rounded": (
        Kernel.LAYERS,
        "    round_to(step->bfloat16, step->rows, n);\n    for",
        "    for",
    ),
    "a gate that comes last": (
        Kernel.LAYERS,
        "gate[j] / (1 + step->gates[i * shard + j]) * up[j]",
        "gate[j] * up[j] / (1 + step->gates[i * shard + j])",
    ),
    "queries in the place of keys": (
        Kernel.LAYERS,
        "step->key, step->value, step->positions",
        "step->query, step->value, step->positions",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_kernel_that_differs_is_refused_and_no_other(
    kernels: Kernels, source: str, tmp_path: Path, mutant: str
) -> None:
    """The witness: what the certificate's operands can tell apart."""
    kernel, right, wrong = MUTANTS[mutant]
    assert right in source
    planted = tmp_path / "planted.c"
    planted.write_text(source.replace(right, wrong, 1))
    found = load(tmp_path / "cache", planted)
    assert found.library is not None, found.origin
    built_on_it = {whole for whole, parts in PARTS.items() if kernel in parts}
    assert exact_kernels(found) == frozenset(Kernel) - {kernel} - built_on_it


def few_and_leaf(weight: Tensor, product: Product) -> tuple[Tensor, Tensor]:
    """Multiply three rows of cancelling operands in the kernel and leaf by leaf."""
    _, n, k = weight.shape
    x, _ = cancelling(3, n, k, 1)
    few = LEAF.certified(frozenset(), frozenset({Shape(product, n, k)}))
    if product is Product.COLUMN:
        return few.column(x, weight), LEAF.column(x, weight)
    rows = x.repeat(1, weight.shape[0])
    return few.row(rows, weight), LEAF.row(rows, weight)


@pytest.mark.parametrize("product", [Product.COLUMN, Product.ROW])
def test_turned_weights_are_kept_until_their_bits_change(kernels: Kernels, product: Product) -> None:
    """An engine's weights are overwritten in place at every hand-over."""
    weights = [cancelling(3, 40, 64, seed)[1].unsqueeze(0).repeat(4, 1, 1) for seed in (1, 9)]
    held = weights[0].bfloat16()
    calls = mock.Mock(side_effect=kernels.library.rlsp_few_rows)
    with using(kernels), mock.patch.object(kernels.library, "rlsp_few_rows", calls):
        for weight in weights:
            held.copy_(weight)
            for _ in range(2):
                got, want = few_and_leaf(held, product)
                assert same_bits(got, want)
                assert bool(got.any())
        assert not same_bits(*(few_and_leaf(weight, product)[0] for weight in weights))
    assert calls.call_count == 6


def test_weights_that_were_given_other_memory_are_turned_anew(kernels: Kernels) -> None:
    """Assigning `.data` leaves a tensor's version as it was."""
    first, second = (cancelling(3, 40, 64, seed)[1].unsqueeze(0) for seed in (1, 9))
    held = first.clone()
    with using(kernels):
        before, _ = few_and_leaf(held, Product.ROW)
        held.data = second
        got, want = few_and_leaf(held, Product.ROW)
    assert same_bits(got, want)
    assert not same_bits(got, before)


def test_weights_that_are_trained_are_not_kept_turned(kernels: Kernels) -> None:
    weight = torch.nn.Parameter(cancelling(3, 40, 64, 1)[1].unsqueeze(0))
    with using(kernels), mock.patch.object(kernels.library, "rlsp_few_rows", side_effect=AssertionError):
        few_and_leaf(weight, Product.ROW)


def test_the_certificate_tries_few_rows_at_the_shapes_of_a_run(kernels: Kernels) -> None:
    """The BLAS cuts long sums in blocks of its own, which the kernel does not follow: the leaf path stays."""
    wanted = tuple(Sharded(Shape(Product.ROW, 16, k), (2,)) for k in (48, 1 << 14))
    with using(kernels):
        found = certify(LEAF, wanted, 32, 1)
    assert found.few == {wanted[0].shape}
    assert certify(LEAF, wanted[:1], 32, 1).few == frozenset()


def test_nothing_runs_compiled_unless_asked_and_the_switch_undoes_itself(kernels: Kernels) -> None:
    assert running() is TORCH
    with using(kernels):
        with using(TORCH):
            assert running() is TORCH
        assert running() is kernels
    with pytest.raises(ZeroDivisionError), using(kernels):
        raise ZeroDivisionError
    assert running() is TORCH


def test_what_is_not_allowed_runs_in_torch(kernels: Kernels) -> None:
    some = kernels.only(frozenset({Kernel.TREE_SUM}))
    assert some.paths() == {**dict.fromkeys((k.value for k in Kernel), "torch"), "tree_sum": "compiled"}
    with using(some), mock.patch.object(some.library, "rlsp_shard_hashes", side_effect=AssertionError):
        shard_hashes(torch.zeros(2, 3))


def test_without_a_compiler_torch_runs_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "")
    found = load(tmp_path)
    assert found.allowed == frozenset()
    assert found.origin == "no C compiler: none of cc, gcc, clang was found"
    assert set(found.paths().values()) == {"torch"}
    with using(found):
        assert same_bits(tree_sum(torch.ones(2, 3)), torch.full((3,), 2.0))


def script(folder: Path, text: str) -> None:
    """Put a compiler of one's own first on the search path."""
    path = folder / "cc"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[ "$1" = --version ] || { echo "cc: no such flag" >&2; exit 1; }', "failed: cc: no such flag"),
        ('[ "$1" = --version ] || exit 0', "file too short"),
        ("exit 1", "no C compiler"),
    ],
)
def test_a_compiler_that_fails_leaves_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, says: str
) -> None:
    script(tmp_path, text)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = load(tmp_path / "cache")
    assert (found.library, found.allowed) == (None, frozenset())
    assert says in found.origin


def test_without_a_home_torch_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/ignored")
    assert determinism.kernel_folder() is None
    assert load(None).origin == "no folder to keep compiled kernels in"
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert determinism.kernel_folder() == Path("/somewhere/rlsp/kernels")


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert "is not this user's alone" in load(tmp_path).origin


def test_a_folder_that_cannot_be_made_leaves_torch(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = load(tmp_path / "file" / "cache")
    assert found.library is None
    assert "Not a directory" in found.origin


def test_a_folder_that_is_read_only_leaves_torch(kernels: Kernels, tmp_path: Path) -> None:
    refusal = OSError(30, "Read-only file system")
    with mock.patch.object(compiler.tempfile, "TemporaryDirectory", side_effect=refusal):
        assert "Read-only file system" in load(tmp_path / "new").origin
        assert load(tmp_path / "other").library is None


@pytest.mark.parametrize("damage", ["empty", "torn", "flipped", "other"])
def test_a_library_that_is_not_whole_is_compiled_again(kernels: Kernels, tmp_path: Path, damage: str) -> None:
    compiler.compiled(SOURCE.read_text(), tmp_path, determinism.processor())
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    middle = len(whole) // 2
    damaged = {
        "empty": b"",
        "torn": whole[:middle],
        "flipped": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
        "other": b"not a library" * 100,
    }[damage]
    path.unlink()  # this process has the first one mapped
    path.write_bytes(damaged)
    found = load(tmp_path, SOURCE)
    assert exact_kernels(found) == frozenset(Kernel)
    assert path.read_bytes() == whole


def test_another_source_compiler_or_processor_has_a_library_of_its_own(
    kernels: Kernels, source: str, tmp_path: Path
) -> None:
    here = determinism.processor()
    compiler.compiled(source, tmp_path, here)
    compiler.compiled(source, tmp_path, here)
    assert len(list(tmp_path.iterdir())) == 1
    compiler.compiled(f"{source}\n", tmp_path, here)
    compiler.compiled(source, tmp_path, {**here, "cpu": "another"})
    with mock.patch.object(compiler, "FLAGS", (*compiler.FLAGS, "-O1")):
        compiler.compiled(source, tmp_path, here)
    assert len(list(tmp_path.iterdir())) == 4


def compile_at_once(folder: Path, barrier: object, said: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    found = load(folder)
    said.put((found.origin, sorted(kernel.value for kernel in exact_kernels(found))))  # type: ignore[attr-defined]


def test_processes_that_compile_at_once_all_have_whole_libraries(kernels: Kernels, tmp_path: Path) -> None:
    barrier, said = FORK.Barrier(2), FORK.Queue()
    processes = [FORK.Process(target=compile_at_once, args=(tmp_path, barrier, said)) for _ in range(2)]
    for process in processes:
        process.start()
    heard = [said.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    assert heard == [(kernels.origin, sorted(kernel.value for kernel in Kernel))] * 2
    assert [path.suffix for path in tmp_path.iterdir()] == [".so"]


def agreed(rank: int, world: int, config: Config, cache: str) -> dict[str, str]:
    """Let the last rank find one kernel alone exact."""
    exact = frozenset(Kernel) if rank < world - 1 else frozenset({Kernel.TREE_SUM})
    with (
        mock.patch("rlsp.determinism.kernel_folder", return_value=Path(cache)),
        mock.patch("rlsp.model.assemble.exact_kernels", return_value=exact),
    ):
        return certified_kernels(config, mesh_of(Layout(dp=world, cp=1, tp=1, sp=1), rank)).paths()


def test_ranks_run_what_every_one_of_them_found_exact(
    kernels: Kernels, compose: Compose, tmp_path: Path
) -> None:
    wanted = {kernel.value: "torch" for kernel in Kernel} | {"tree_sum": "compiled"}
    assert run_ranks(2, agreed, compose(), str(tmp_path)) == [wanted, wanted]


def test_the_switch_keeps_a_run_in_torch(
    kernels: Kernels, compose: Compose, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert certified_kernels(compose(), alone()).allowed == frozenset(Kernel)
    off = certified_kernels(compose("numerics.compiled=false"), alone())
    assert (off.library, off.allowed, off.origin) == (None, frozenset(), "numerics.compiled=false")


STARTED = "2026-01-01T00:00:00+00:00"


def live(rank: int, world: int, job: Job) -> None:
    board = Board.join(Path(job.run_dir) / "logs" / "board", world).writer(rank)
    run.live(job, Place(rank=rank, world_size=world, local_rank=rank, init_method="", board=board))


def ran(folder: Path, config: Config) -> tuple[Manifest, StartupFacts, RolloutRecord]:
    """Live a run of one rollout and return what it wrote."""
    job = Job(config, "20260101-000000-abcdef", str(folder), (), ("rlsp",), STARTED)
    (folder / "logs").mkdir(parents=True)
    Board.create(folder / "logs" / "board", config.world_size)
    manifest.begin(job, {})
    run_ranks(config.world_size, live, job, timeout_s=300)
    wrote = Manifest.read(folder / "manifest.json")
    assert wrote.startup is not None
    return wrote, wrote.startup, ConsistencyReport.read(folder / "consistency.json").rollouts[0]


def test_a_run_leaves_the_same_digests_on_either_path_and_says_which(
    kernels: Kernels, compose: Compose, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    small = ("task=arithmetic", "num_rollouts=1", "prompts_per_rollout=2", "samples_per_prompt=2")
    sides = [
        ran(tmp_path / switch, compose(*small, "max_response_tokens=20", f"numerics.compiled={switch}"))
        for switch in ("true", "false")
    ]
    (wrote, on, compiled_run), (other, off, torch_run) = sides
    paths = [
        {name: path for name, path in side.paths.items() if name.startswith("kernel ")} for side in (on, off)
    ]
    assert paths == [{f"kernel {kernel.value}": path for kernel in Kernel} for path in ("compiled", "torch")]
    assert [side.paths["decoding"] for side in (on, off)] == ["layers as one", "modules"]
    assert (on.certificate["compiled"], off.certificate["compiled"]) == (
        kernels.origin,
        "numerics.compiled=false",
    )
    assert on.contract_hash == off.contract_hash
    assert result_hash(wrote.config) == result_hash(other.config)
    assert compiled_run == torch_run
