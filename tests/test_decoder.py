"""Layers taken as one leave the modules' bits, and run where nothing is lost by it alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from model_helpers import BF16, TINY, alone, contract_of, engine, mesh_of
from ranks import run_ranks

from rlsp.config import ModelConfig
from rlsp.groups import Mesh
from rlsp.layout import Layout, RolloutLayout
from rlsp.model.assemble import wanted_products
from rlsp.model.build import initialize
from rlsp.model.wiring import NATIVE, Operator, Phase, Site, Wiring
from rlsp.numerics.certificate import certify
from rlsp.numerics.compiled import Kernel, Kernels, load, using
from rlsp.numerics.kernel_trials import exact_kernels
from rlsp.numerics.products import FEW_ROWS, Products
from rlsp.rl.rollout.native import NativeEngine, Response, Sampling, Sequence

LONGER = replace(BF16, head_dim=16)  # a head that the kernels take
SHAPES = {
    "bfloat16": LONGER,
    "float32": replace(LONGER, dtype=TINY.dtype),
    "tied": replace(LONGER, tie_embeddings=True),
    "heads without a norm": replace(LONGER, qk_norm=False),
    "one query for each key": replace(LONGER, num_attention_heads=8),
}
SEQUENCES = [
    Sequence(prompt, 0, tuple((7 * prompt + 11 * i) % 95 for i in range(length)), limit)
    for prompt, (length, limit) in enumerate([(3, None), (17, 4), (30, None), (1, 9), (33, 0)])
]
HOW = Sampling(seed=5, rollout=1, temperature=0.6, max_tokens=20, eos_ids=())


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    found = load(tmp_path_factory.mktemp("kernels"))
    if found.library is None:
        pytest.skip(found.origin)
    return found.only(exact_kernels(found))


@contextmanager
def counted(kernels: Kernels) -> Iterator[mock.Mock]:
    """Run compiled, and count how often a layer is taken to its end."""
    calls = mock.Mock(side_effect=kernels.library.rlsp_layer_end)
    with using(kernels), mock.patch.object(kernels.library, "rlsp_layer_end", calls):
        yield calls


def engine_of(
    shape: ModelConfig, seed: int = 0, routes: Mapping[str, str] | None = None, mesh: Mesh | None = None
) -> NativeEngine:
    """Build an engine whose products are certified under the kernels that run now."""
    contract, leaf = contract_of(shape), Products(32)
    found = certify(leaf, wanted_products(shape, contract, (4, 8)), contract.token_block, 1)
    products = leaf.certified(found.wide, found.few)
    with (
        mock.patch("model_helpers.products", return_value=products),
        mock.patch("model_helpers.Wiring", side_effect=partial(Wiring, routes=routes or {})),
    ):
        one = engine(mesh or alone(), shape=shape, seed=seed)
    assert one is not None
    return one


def without_layers(kernels: Kernels) -> Kernels:
    return kernels.only(kernels.allowed - {Kernel.LAYERS})


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_layers_as_one_leave_the_modules_bits_and_counts(kernels: Kernels, shape: ModelConfig) -> None:
    """Sequences end one after the other, and one crosses the end of a block."""
    with counted(without_layers(kernels)) as calls:
        by_module = engine_of(shape)
        want, counts = by_module.generate(SEQUENCES, HOW), by_module.model.wiring.take_counts()
    assert calls.call_count == 0
    with counted(kernels) as calls:
        as_one = engine_of(shape)
        got = as_one.generate(SEQUENCES, HOW)
    assert calls.call_count == (HOW.max_tokens - 1) * shape.num_layers
    assert got == want
    assert as_one.model.wiring.take_counts() == counts
    assert [len(response.tokens) for response in got] == [20, 4, 20, 9, 0]


def test_weights_that_are_overwritten_in_place_are_read_anew(kernels: Kernels) -> None:
    with using(kernels):
        one, other = engine_of(LONGER, 0), engine_of(LONGER, 1)
        first, want = one.generate(SEQUENCES, HOW), other.generate(SEQUENCES, HOW)
        initialize(one.model, 1, LONGER.init_std, LONGER.num_layers)
        assert one.generate(SEQUENCES, HOW) == want
    assert first != want


def test_one_bit_of_one_weight_shows(kernels: Kernels) -> None:
    """The witness: what is compared reaches every layer's end."""
    with using(kernels):
        one = engine_of(LONGER)
        want = one.generate(SEQUENCES[:1], HOW)
        weight = one.model.gpt.decoder.layers[-1].mlp.linear_fc2.weight
        largest = weight.abs().argmax()
        weight.view(-1).view(torch.int16)[largest] ^= 1
        got = one.generate(SEQUENCES[:1], HOW)
    assert got[0].row_digest != want[0].row_digest


def generated(
    kernels: Kernels, one: Callable[[], NativeEngine], sequences: list[Sequence]
) -> tuple[list[Response], int]:
    """Return what an engine draws, and how often a layer was taken to its end."""
    with counted(kernels) as calls:
        return one().generate(sequences, HOW), calls.call_count


def test_who_listens_at_the_boundaries_hears_every_layer(kernels: Kernels) -> None:
    heard: list[Site] = []
    recorder = mock.Mock(record=lambda site, _: heard.append(site))
    with counted(kernels) as calls:
        one = engine_of(LONGER)
        with one.model.wiring.recording(recorder):
            listened = one.generate(SEQUENCES, HOW)
        assert calls.call_count == 0
        assert one.generate(SEQUENCES, HOW) == listened
        assert calls.call_count > 0
    assert {site.layer for site in heard} == {None, 0, 1}


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda: engine_of(BF16), id="a head of 8"),
        pytest.param(lambda: engine_of(replace(LONGER, hidden_size=8256)), id="rows of 8,256"),
        *(
            pytest.param(
                lambda operator=operator: engine_of(
                    LONGER, routes={f"{Phase.ROLLOUT.value}.{operator.value}": NATIVE}
                ),
                id=f"native {operator.value}",
            )
            for operator in Operator
        ),
    ],
)
def test_modules_run_where_layers_cannot_be_taken_as_one(
    kernels: Kernels, build: Callable[[], NativeEngine]
) -> None:
    _, calls = generated(kernels, build, SEQUENCES[:1])
    assert calls == 0


def test_more_sequences_than_few_go_through_the_modules_until_enough_have_ended(kernels: Kernels) -> None:
    many = [Sequence(i, 0, (i % 90, 3), 2 if i else 4) for i in range(FEW_ROWS + 1)]
    found, calls = generated(kernels, lambda: engine_of(LONGER), many)
    assert calls == 2 * LONGER.num_layers
    with using(without_layers(kernels)):
        assert found == engine_of(LONGER).generate(many, HOW)


def on_two_ranks(rank: int, world: int, folder: str) -> tuple[list[Response], int]:
    """Generate with an engine of two ranks."""
    kernels = load(Path(folder))
    mesh = mesh_of(Layout(dp=1, cp=1, tp=2, sp=1), rank, RolloutLayout(2, 1, world))

    return generated(kernels, lambda: engine_of(LONGER, mesh=mesh), SEQUENCES)


def test_an_engine_of_two_ranks_runs_its_modules_and_draws_the_same(
    kernels: Kernels, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with using(kernels):
        want = engine_of(LONGER).generate(SEQUENCES, HOW)
    folder = str(tmp_path_factory.mktemp("shared"))
    assert run_ranks(2, on_two_ranks, folder) == [(want, 0), (want, 0)]
