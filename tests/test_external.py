"""An external engine's weights are proved, its answers looked at; what it does wrong is one clear error."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from model_helpers import BF16, PAD, TIED, TINY, alone, mesh_of, policy, products
from ranks import run_ranks
from test_hf_weights import PADDED

from rlsp import bits
from rlsp.config import Config
from rlsp.groups import Mesh
from rlsp.layout import Layout, RolloutLayout
from rlsp.model.assemble import assemble
from rlsp.model.build import PolicyModel
from rlsp.model.hf import hugging_face_weights, logical_weights, write_folder, zero_padding
from rlsp.model.weights import digest_of, weights_digest
from rlsp.rl.batch import RolloutBatch
from rlsp.rl.rollout.dispatch import StaleWeightsError
from rlsp.rl.rollout.engine import EngineError, ExternalEngine
from rlsp.rl.rollout.external import ExternalRollouts, Wiring
from rlsp.rl.rollout.native import Sampling, Sequence
from rlsp.vllm_engine import _found_again, _tensors

Compose = Callable[..., Config]
FAKE = Path(__file__).with_name("fake_engine.py")
EOS = 96
SAMPLING = Sampling(seed=5, rollout=2, temperature=0.7, max_tokens=6, eos_ids=())
SEQUENCES = [Sequence(p, s, (1, 2, 3)[: p + 1], limit) for p, limit in ((0, None), (1, 4)) for s in (0, 1)]


@contextmanager
def external(
    folder: Path,
    act: str,
    trainer: PolicyModel | None = None,
    mesh: Mesh | None = None,
    timeout_s: float = 30.0,
) -> Iterator[ExternalRollouts]:
    mesh = mesh or alone()
    model = trainer or policy(mesh)
    digest = weights_digest(model)

    def start(home: Path) -> ExternalEngine:
        assert (home / "config.json").exists()
        command = [sys.executable, str(FAKE), act]
        environment = dict(os.environ)
        return ExternalEngine(
            "fake", command, environment, {"digest": digest}, folder / "engine.log", timeout_s
        )

    made = ExternalRollouts(model, mesh, Wiring(TINY, {}, start, folder / "engine", PAD, 60.0))
    try:
        yield made
    finally:
        if made._engine is not None:
            made._engine.close()


def rolled_out(
    folder: Path, act: str, sampling: Sampling = SAMPLING, timeout_s: float = 30.0
) -> RolloutBatch:
    with external(folder, act, timeout_s=timeout_s) as made:
        made.synchronise(3)
        return made.generate(SEQUENCES, sampling, 3)


def test_responses_come_back_in_order_within_each_prompts_limit(tmp_path: Path) -> None:
    batch = rolled_out(tmp_path, "well")
    assert [len(row) for row in batch.responses()] == [6, 6, 4, 4]
    assert batch.lengths.tolist() == [7, 7, 6, 6]
    assert batch.tokens[:, 0].tolist() == [1, 1, 1, 1]
    expected = [-4.5 - 0.001 * token for row in batch.responses() for token in row]
    assert bits.same_bits(batch.logp[batch.active_mask], torch.tensor(expected))
    assert not bool(batch.row_digest.any()), "an engine shows no logits, and none are made up"


def test_each_sequence_has_a_seed_of_its_own_and_keeps_it(tmp_path: Path) -> None:
    first = rolled_out(tmp_path / "a", "well").responses()
    assert len({tuple(row[:4]) for row in first}) == len(first)
    assert rolled_out(tmp_path / "b", "well").responses() == first
    for changed in ({"seed": 6}, {"rollout": 3}):
        other = rolled_out(tmp_path / str(changed), "well", dataclasses.replace(SAMPLING, **changed))
        assert all(a != b for a, b in zip(other.responses(), first, strict=True))


def test_a_response_ends_with_the_token_that_ends_it(tmp_path: Path) -> None:
    sampling = dataclasses.replace(SAMPLING, max_tokens=96, eos_ids=(EOS,))
    rows = rolled_out(tmp_path, "well", sampling).responses()
    assert all(EOS not in row[:-1] for row in rows)
    assert any(row[-1] == EOS and len(row) < 96 for row in rows)


def test_prompts_without_room_are_not_asked_for(tmp_path: Path) -> None:
    with external(tmp_path, "lost") as made:
        made.synchronise(0)
        batch = made.generate([Sequence(0, 0, (1, 2), 0)], SAMPLING, 0)
    assert batch.active_tokens == 0
    assert batch.lengths.tolist() == [2]


def test_the_weights_are_gone_from_the_disk_once_they_are_loaded(tmp_path: Path) -> None:
    with external(tmp_path, "well") as made:
        made.synchronise(0)
        assert [path.name for path in (tmp_path / "engine").iterdir()] == ["model"]
        assert made.metrics() == {"rollout/weights_found_fraction": 0.75}


@pytest.mark.parametrize("act", ["stale", "older"])
def test_an_engine_with_other_weights_or_another_version_draws_nothing(tmp_path: Path, act: str) -> None:
    with external(tmp_path, act) as made:
        own = weights_digest(made._trainer)
        with pytest.raises(
            StaleWeightsError, match=f"the engine holds weights .* under version .*{own} under"
        ):
            made.synchronise(3)
        with pytest.raises(
            StaleWeightsError, match="version 3 was to be rolled out, but the engine holds version -1"
        ):
            made.generate(SEQUENCES, SAMPLING, 3)


def test_a_version_that_was_not_handed_over_draws_nothing(tmp_path: Path) -> None:
    with external(tmp_path, "well") as made:
        made.synchronise(3)
        with pytest.raises(StaleWeightsError, match="version 4 was to be rolled out"):
            made.generate(SEQUENCES, SAMPLING, 4)


def test_an_engine_that_names_another_version_is_not_believed(tmp_path: Path) -> None:
    with pytest.raises(StaleWeightsError, match="the engine drew with version 4, asked for version 3"):
        rolled_out(tmp_path, "another_version")


WRONG = {
    "nan": "the engine's response to prompt 0, sample 1: the log-probability of token 2 is nan",
    "infinite": "prompt 0, sample 1: the log-probability of token 2 is -inf",
    "positive": "prompt 0, sample 1: the log-probability of token 2 is 0.5",
    "no_number": "prompt 0, sample 1: the log-probability of token 2 is 'high'",
    "out_of_range": "prompt 0, sample 1: token 2 is 97, the vocabulary has 97",
    "no_token": "prompt 0, sample 1: token 2 is 3.0, the vocabulary has 97",
    "too_few": "prompt 0, sample 1: 2 tokens of 6, and none that ends a response",
    "too_many": "prompt 0, sample 1: 7 tokens, asked for at most 6",
    "unpaired": "prompt 0, sample 1: 6 tokens with 5 log-probabilities",
    "goes_on": "prompt 0, sample 1: it goes on after token 0, 96, which ends a response",
    "lost": "the engine's answer has no 4 lists of tokens and of log-probabilities",
    "no_rows": "the engine's answer has no 4 lists of tokens and of log-probabilities",
    "no_version": "the engine's answer has version=None: an integer was expected",
    "no_digest": "the engine's answer has digest='everything is fine': 64 hex digits were expected",
    "garbage": "(fake) said what is no answer when asked to draw rollout 2: 'INFO: drawing, please wait'",
    "list": "the engine (fake) said what is no answer when asked to draw rollout 2: '[1, 2]'",
    "fault": "the engine (fake) could not draw rollout 2: ValueError: no such thing; its log is",
    "exit": "the engine (fake) exited with status 7 when asked to draw rollout 2; its log is",
    "killed": "the engine (fake) was killed by SIGABRT when asked to draw rollout 2; its log is",
    "cannot_start": "the engine (fake) exited with status 1 when asked to start; its log is",
    "refuses_to_start": "the engine (fake) could not start: ImportError: no module named vllm; its log is",
    "small": "prompt 0, sample 0 may become 25 tokens long, the engine's cache holds 20: rollout.kv",
}
LEFT_BEHIND = {
    "fault": ["where it", "happened"],
    "exit": ["out of memory"],
    "cannot_start": ["Traceback: no module named vllm"],
}


@pytest.mark.parametrize("act", WRONG)
def test_whatever_the_engine_does_wrong_is_one_clear_error(tmp_path: Path, act: str) -> None:
    sampling = dataclasses.replace(SAMPLING, eos_ids=(EOS,), max_tokens=24 if act == "small" else 6)
    with pytest.raises(EngineError) as error:
        rolled_out(tmp_path, act, sampling)
    first, *others = str(error.value).splitlines()
    assert WRONG[act] in first
    assert others == LEFT_BEHIND.get(act, [])


def test_an_engine_that_takes_too_long_is_killed_and_named(tmp_path: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(
        EngineError, match=r"the engine \(fake\) did not draw rollout 2 within 2 s .rollout.timeout_s"
    ):
        rolled_out(tmp_path, "hang", timeout_s=2.0)
    assert time.monotonic() - begun < 30


def on_two_ranks(rank: int, world: int, folder: str, act: str) -> tuple[list[list[int]], int]:
    mesh = mesh_of(Layout(dp=1, cp=1, tp=world, sp=1), rank, RolloutLayout(1, 1, world))
    model = policy(mesh)
    zero_padding(model, TINY)
    with external(Path(folder), act, model, mesh) as made:
        made._wiring = dataclasses.replace(made._wiring, timeout_s=2.0)  # beats of 0.4 s
        before = mesh.ledger.calls["broadcast"]
        made.synchronise(0)
        batch = made.generate(SEQUENCES, SAMPLING, 0)
        return batch.responses(), mesh.ledger.calls["broadcast"] - before


def test_every_rank_gets_the_responses_and_signs_of_life_while_it_waits(tmp_path: Path) -> None:
    products()
    quick = run_ranks(2, on_two_ranks, str(tmp_path / "quick"), "well")
    slow = run_ranks(2, on_two_ranks, str(tmp_path / "slow"), "slow")
    assert quick[0][0] == quick[1][0] == slow[0][0]
    assert [one[0] for one in slow] == [one[0] for one in quick]
    assert slow[0][1] == slow[1][1] >= quick[0][1] + 5, "no wait of the other rank is longer than a beat"


@pytest.mark.parametrize("shape", [TINY, TIED, BF16, PADDED], ids=["untied", "tied", "bfloat16", "padded"])
def test_what_the_engine_reads_digests_to_the_trainers_weights_and_one_bit_more_does_not(
    tmp_path: Path, shape: object
) -> None:
    model = policy(alone(), shape=shape)
    zero_padding(model, shape)
    write_folder(model, shape, tmp_path, alone().world, 20_000)
    state = _tensors(tmp_path)
    contract = model.wiring.contract
    assert digest_of(logical_weights(state, shape, contract)) == weights_digest(model)
    name = "model.layers.0.self_attn.v_proj.weight"
    bits.bit_pattern(state[name])[-1, -1] ^= 1
    assert digest_of(logical_weights(state, shape, contract)) != weights_digest(model)


def test_what_an_engine_holds_under_its_own_name_is_compared_bit_by_bit() -> None:
    state = dict(hugging_face_weights(policy(alone()), TINY))
    norm, embedding = "model.norm.weight", "model.embed_tokens.weight"
    padded = torch.cat((state[embedding], torch.ones(31, TINY.hidden_size)))
    packed = ("model.layers.0.mlp.down_proj.weight", torch.empty(0))
    held = [(norm, state[norm].clone()), (embedding, padded), packed, ("fused.weight", torch.zeros(3, 3))]
    assert _found_again(state, held) == state[norm].numel() + state[embedding].numel()
    bits.bit_pattern(padded)[5, 3] ^= 1
    with pytest.raises(RuntimeError, match=f"{embedding} in the engine's model is not what was handed to it"):
        _found_again(state, held)
    bits.bit_pattern(padded)[5, 3] ^= 1
    bits.bit_pattern(padded)[-1, -1] ^= 1  # padding is nobody's
    assert _found_again(state, held) > np.prod(state[embedding].shape)


def test_fresh_weights_of_a_run_come_back_to_the_same_digest(compose: Compose, tmp_path: Path) -> None:
    """Where a vocabulary is padded it starts with zeros: anything else would be lost on the way."""
    config = compose("parallel=cp1_tp1_sp1")
    model = assemble(config, alone(), torch.device("cpu")).trainer
    assert config.padded_vocab > config.model.vocab_size
    write_folder(model, config.model, tmp_path, alone().world)
    logical = logical_weights(_tensors(tmp_path), config.model, model.wiring.contract)
    assert digest_of(logical) == weights_digest(model)
