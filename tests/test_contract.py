from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, asdict, fields, replace

import pytest

from rlsp.numerics.contract import Contract

CONTRACT = Contract(
    virtual_tp=8,
    token_block=32,
    q_block=32,
    k_block=32,
    row_tile=32,
    grad_lsb=40,
    threads=1,
    dtype="bfloat16",
    padded_vocab=128,
)


def test_equal_contracts_have_equal_hashes() -> None:
    again = Contract(**asdict(CONTRACT))
    assert again == CONTRACT
    assert again.sha256 == CONTRACT.sha256
    assert len(CONTRACT.sha256) == 64


@pytest.mark.parametrize("name", [field.name for field in fields(Contract)])
def test_every_field_changes_the_hash(name: str) -> None:
    value = getattr(CONTRACT, name)
    changed = (*value, "x") if isinstance(value, tuple) else value + type(value)(1)
    assert replace(CONTRACT, **{name: changed}).sha256 != CONTRACT.sha256


def test_nothing_of_the_parallel_layout_is_in_it() -> None:
    names = {field.name for field in fields(Contract)}
    assert not names & {"tp", "cp", "dp", "sp", "world_size", "micro_batch_size", "engines"}


def test_it_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        CONTRACT.threads = 2  # type: ignore[misc]


def test_it_is_plain_json() -> None:
    assert json.loads(json.dumps(asdict(CONTRACT)))["padded_vocab"] == 128


@pytest.mark.parametrize(("blocks", "grid"), [((32, 32, 32), 32), ((64, 32, 16), 64), ((48, 32, 32), 96)])
def test_sequences_are_cut_on_a_grid_that_every_block_divides(
    blocks: tuple[int, int, int], grid: int
) -> None:
    token, query, key = blocks
    assert replace(CONTRACT, token_block=token, q_block=query, k_block=key).block == grid
