"""`rlsp-compare`: a difference planted at any stage is named with its place, its bits and its ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare_fixtures import (
    BLOCKS,
    HIT,
    LAYOUT_A,
    LAYOUT_B,
    LENGTH,
    flip,
    full_tensors,
    in_rollout,
    in_update,
    make_run,
)
from report_fixtures import (
    NAMES,
    OPTIMIZER_NAMES,
    ROLLOUTS,
    RUN_ID,
    SEQUENCES,
    Tensors,
    hashes,
    make_digests,
    make_facts,
    make_tensors,
    write_run,
)

from rlsp.layout import Layout, assign_sequences, padded_length, zigzag_positions
from rlsp.report import manifest as manifest_file
from rlsp.report.compare import compare
from rlsp.report.compare_order import backward_order, forward_order, optimizer_order
from rlsp.report.compare_owners import Owners
from rlsp.report.compare_records import Difference, Outcome, Stage, State
from rlsp.report.consistency import float64_bits
from rlsp.report.digests import table_digest
from rlsp.report.tensors import COMPARED


@pytest.fixture(scope="module", autouse=True)
def one_revision() -> Iterator[None]:
    """Ask git once: its answer takes longer than everything else here."""
    with pytest.MonkeyPatch.context() as patch:
        revision = manifest_file.code_revision()
        patch.setattr(manifest_file, "code_revision", lambda: revision)
        yield


@pytest.fixture(scope="module")
def run_a(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("a") / "run", LAYOUT_A)


def first_against(run_a: Path, folder: Path, **changes: Any) -> Difference:
    """Plant changes in a run of the other layout and return the first difference."""
    comparison = compare(run_a, make_run(folder / "b", LAYOUT_B, **changes))
    assert comparison.outcome is Outcome.DIFFERENT, comparison.refusals
    assert comparison.first is not None
    states = [stage.state for stage in comparison.stages]
    assert states.count(State.FIRST) == 1
    return comparison.first


def place(difference: Difference) -> dict[str, Any]:
    """Return the coordinates that are there."""
    keys = ("rollout", "update", "sample", "position", "tensor", "virtual_shard")
    return {key: getattr(difference, key) for key in keys if getattr(difference, key) is not None}


# Equal ------------------------------------------------------------------------


def test_runs_of_different_layouts_with_the_same_bits_are_equal(run_a, tmp_path):
    comparison = compare(run_a, make_run(tmp_path / "b", LAYOUT_B))
    assert (comparison.outcome, comparison.first, comparison.rollouts) == (Outcome.EQUAL, None, ROLLOUTS)
    assert [stage.stage for stage in comparison.stages] == [s for s in Stage if s is not Stage.WARM_UP]
    assert {stage.state for stage in comparison.stages} == {State.EQUAL}
    compared = {stage.stage: stage.compared for stage in comparison.stages}
    assert compared[Stage.TOKENS] == ROLLOUTS * SEQUENCES * LENGTH
    assert compared[Stage.TRAIN_ROWS] == ROLLOUTS * SEQUENCES * (LENGTH - 5)
    shards = sum(map(len, hashes("weights", 0).values()))
    assert compared[Stage.INITIAL_WEIGHTS] == shards
    assert compared[Stage.OPTIMIZER] == 3 * ROLLOUTS * shards
    assert (compared[Stage.LOSS], compared[Stage.REWARDS]) == (ROLLOUTS, ROLLOUTS * SEQUENCES)
    assert comparison.runs[1].layout == {"dp": 2, "cp": 1, "tp": 4, "sp": 1}


def test_a_run_equals_itself_and_says_that_it_is_one(run_a):
    comparison = compare(run_a, run_a)
    assert comparison.outcome is Outcome.EQUAL
    assert comparison.notes == (f"A and B are one run, {RUN_ID}",)


# One difference, stage by stage -------------------------------------------------


def test_an_initial_weight_is_named(run_a, tmp_path):
    name = "decoder.layers.1.mlp.linear_fc2.weight"

    def plant(index: int, digests: dict[str, Any]) -> None:
        if index == 0:
            flip(digests["initial"], name, 5)

    def startup(said: dict[str, Any]) -> None:
        said["initial_weights_digest"] = initial_digest(name, 5)

    found = first_against(run_a, tmp_path, digests=plant, startup=startup)
    assert found.stage is Stage.INITIAL_WEIGHTS
    assert place(found) == {"tensor": name, "virtual_shard": 5}
    held = hashes("weights", 0)[name][5]
    assert (found.a.bits, found.b.bits) == (f"0x{held}", f"0x{int(held, 16) ^ 1:032x}")
    # Shard 5 of 8: the second half, TP rank 1 of 2; the third quarter, TP rank 2 of 4.
    assert (found.a.ranks, found.b.ranks) == ((1, 3), (2, 6))


def initial_digest(name: str, shard: int) -> str:
    table = {key: list(shards) for key, shards in hashes("weights", 0).items()}
    flip(table, name, shard)
    return table_digest(table)


def test_a_drawn_token_is_named_with_the_engines_ranks(run_a, tmp_path):
    def plant(tensors: Tensors) -> None:
        tensors["tokens"][6, 9] = (full_tensors(HIT)["tokens"][6, 9] + 1) % 97

    found = first_against(run_a, tmp_path, tensors=in_rollout(plant))
    token = int(full_tensors(HIT)["tokens"][6, 9])
    assert found.stage is Stage.TOKENS
    assert place(found) == {"rollout": HIT, "sample": 6, "position": 9, "tensor": "tokens"}
    assert (found.a.bits, found.a.number) == (f"0x{token:016x}", token)
    assert found.b.number == (token + 1) % 97
    # Three engines share 8 samples as 2, 3, 3; four engines of two ranks as 2, 2, 2, 2.
    assert (found.a.ranks, found.b.ranks) == ((2,), (6, 7))
    assert found.explanation is not None
    assert "the drawing itself differs" in found.explanation


def test_a_token_that_follows_from_other_logits_says_where_they_began_to_differ(run_a, tmp_path):
    def plant(tensors: Tensors) -> None:
        tensors["tokens"][6, 9:] = 3
        tensors["rollout_row_digest"][6, 7:] ^= 1

    found = first_against(run_a, tmp_path, tensors=in_rollout(plant))
    assert (found.stage, found.sample) == (Stage.TOKENS, 6)
    assert found.explanation is not None
    assert "which differ from position 7 on" in found.explanation


def test_a_sequence_that_ended_earlier_is_a_difference_of_tokens(run_a, tmp_path):
    def plant(tensors: Tensors) -> None:
        tensors["lengths"][2] = 14
        for name in ("active_mask", *COMPARED):
            tensors[name][2, 14:] = 0

    found = first_against(run_a, tmp_path, tensors=in_rollout(plant))
    assert place(found) == {"rollout": HIT, "sample": 2, "position": 14, "tensor": "tokens"}
    assert (found.b.bits, found.b.number) == ("absent", None)


def test_an_advantage_that_its_rewards_do_not_give_is_compared_and_noted(run_a, tmp_path):
    def plant(tensors: Tensors) -> None:
        tensors["advantages"][3] = 0.125

    comparison = compare(run_a, make_run(tmp_path / "b", LAYOUT_B, tensors=in_rollout(plant)))
    assert comparison.outcome is Outcome.DIFFERENT
    assert any("run B contradicts itself: 00001.safetensors: sample 3" in note for note in comparison.notes)


def test_rollouts_of_different_widths_are_compared(run_a, tmp_path):
    def plant(tensors: Tensors) -> None:
        for name, array in tensors.items():
            if array.ndim == 2:
                tensors[name] = np.pad(array, ((0, 0), (0, 1)))
        tensors["lengths"][7] = LENGTH + 1
        tensors["active_mask"][7, LENGTH] = True
        tensors["rollout_logprob"][7, LENGTH] = tensors["train_logprob"][7, LENGTH] = -1.0

    found = first_against(run_a, tmp_path, tensors=in_rollout(plant))
    assert (found.stage, found.sample, found.position, found.a.bits) == (Stage.TOKENS, 7, LENGTH, "absent")


def test_a_token_that_counts_in_one_run_alone_is_a_difference(run_a, tmp_path):
    def plant(tensors: Tensors) -> None:
        for name in ("active_mask", *COMPARED):
            tensors[name][4, 5] = 0

    found = first_against(run_a, tmp_path, tensors=in_rollout(plant))
    assert place(found) == {"rollout": HIT, "sample": 4, "position": 5, "tensor": "active_mask"}
    assert (found.a.bits, found.b.bits) == ("0x01", "0x00")


@pytest.mark.parametrize(
    ("stage", "name", "ranks"),
    [
        (Stage.ROLLOUT_LOGPROB, "rollout_logprob", ((1,), (4, 5))),
        (Stage.ROLLOUT_ROWS, "rollout_row_digest", ((1,), (4, 5))),
        # Position 9 was scored at position 8, in the third of four chunks of 4: CP rank 1 of 2. Of equal
        # sequences every other one goes to each of two replicas: sample 4 to the first.
        (Stage.TRAIN_LOGPROB, "train_logprob", ((2, 3), (0, 1, 2, 3))),
        (Stage.TRAIN_ROWS, "train_row_digest", ((2, 3), (0, 1, 2, 3))),
    ],
)
def test_a_token_value_is_named_with_both_bit_patterns(run_a, tmp_path, stage, name, ranks):
    def plant(tensors: Tensors) -> None:
        tensors[name].view(f"u{tensors[name].itemsize}")[4, 9] ^= 1

    found = first_against(run_a, tmp_path, tensors=in_rollout(plant))
    assert found.stage is stage
    assert place(found) == {"rollout": HIT, "sample": 4, "position": 9, "tensor": name}
    array = full_tensors(HIT)[name]
    bits = int(array.view(f"u{array.itemsize}")[4, 9])
    digits = 2 * array.itemsize
    assert (found.a.bits, found.b.bits) == (f"0x{bits:0{digits}x}", f"0x{bits ^ 1:0{digits}x}")
    assert found.a.number == array[4, 9].item()
    assert (found.a.ranks, found.b.ranks) == ranks


@pytest.mark.parametrize("value", [-0.0, math.nan])
def test_a_negative_zero_and_a_nan_are_differences(tmp_path, value):
    def zero(tensors: Tensors) -> None:
        tensors["train_logprob"][0, 5] = 0.0

    def plant(tensors: Tensors) -> None:
        tensors["train_logprob"][0, 5] = value

    other = make_run(tmp_path / "a", LAYOUT_A, tensors=in_rollout(zero))
    found = first_against(other, tmp_path, tensors=in_rollout(plant))
    assert (found.stage, found.position) == (Stage.TRAIN_LOGPROB, 5)
    assert found.a.bits == "0x00000000"


@pytest.mark.parametrize(
    ("stage", "name", "ranks"),
    [
        (Stage.REWARDS, "rewards", ((0,), (0,))),
        (Stage.ADVANTAGES, "advantages", (tuple(range(4)), tuple(range(8)))),
    ],
)
def test_a_reward_and_an_advantage_are_named(run_a, tmp_path, stage, name, ranks):
    def plant(tensors: Tensors) -> None:
        tensors[name][3] = 0.125

    found = first_against(run_a, tmp_path, tensors=in_rollout(plant))
    assert found.stage is stage
    assert place(found) == {"rollout": HIT, "sample": 3, "tensor": name}
    assert (found.b.bits, found.b.number) == ("0x3e000000", 0.125)
    assert (found.a.ranks, found.b.ranks) == ranks


@pytest.mark.parametrize(("stage", "name"), [(Stage.LOSS, "loss"), (Stage.GRADIENT_NORM, "gradient_norm")])
def test_one_ulp_of_a_number_is_named(run_a, tmp_path, stage, name):
    before = make_digests(HIT, make_facts(HIT, make_tensors(HIT)))["updates"][0][name]
    after = math.nextafter(before, math.inf)

    def plant(update: dict[str, Any]) -> None:
        update.update({name: after, f"{name}_bits": float64_bits(after)})

    found = first_against(run_a, tmp_path, digests=in_update(plant))
    assert found.stage is stage
    assert place(found) == {"rollout": HIT, "update": 0}
    assert (found.a.bits, found.b.bits) == (f"0x{float64_bits(before)}", f"0x{float64_bits(after)}")
    assert (found.a.number, found.b.number) == (before, after)
    assert (found.a.ranks, found.b.ranks) == (tuple(range(4)), tuple(range(8)))


@pytest.mark.parametrize(
    ("stage", "table", "names"),
    [
        (Stage.GRADIENTS, "gradients", NAMES),
        (Stage.OPTIMIZER, "optimizer", OPTIMIZER_NAMES),
        (Stage.WEIGHTS, "weights", NAMES),
    ],
)
@pytest.mark.parametrize("part", ["layers.1.self_attention.linear_qkv", "final_layernorm"])
def test_a_shard_of_a_tensor_is_named(run_a, tmp_path, stage, table, names, part):
    name = next(name for name in names if part in name)
    shard = 0 if "layernorm" in name else 2
    found = first_against(run_a, tmp_path, digests=in_update(lambda update: flip(update[table], name, shard)))
    assert found.stage is stage
    assert place(found) == {"rollout": HIT, "update": 0, "tensor": name, "virtual_shard": shard}
    held = make_digests(HIT, make_facts(HIT, make_tensors(HIT)))["updates"][0][table][name][shard]
    assert (found.a.bits, found.b.bits) == (f"0x{held}", f"0x{int(held, 16) ^ 1:032x}")
    # Shard 2 of 8: TP rank 0 of 2, TP rank 1 of 4; a norm weight is everyone's.
    everyone = (tuple(range(4)), tuple(range(8)))
    assert (found.a.ranks, found.b.ranks) == (everyone if "layernorm" in name else ((0, 2), (1, 5)))
    assert found.explanation is not None
    assert f"1 of {len(names)} tensors" in found.explanation


def test_the_second_of_two_updates_is_named(tmp_path):
    def two(index: int, digests: dict[str, Any]) -> None:
        digests["updates"].append(json.loads(json.dumps(digests["updates"][0])))

    def plant(index: int, digests: dict[str, Any]) -> None:
        two(index, digests)
        if index == HIT:
            flip(digests["updates"][1]["gradients"], NAMES[3])

    run_a = make_run(tmp_path / "a", LAYOUT_A, digests=two, updates_per_rollout=2)
    found = first_against(run_a, tmp_path, digests=plant, updates_per_rollout=2)
    assert (found.stage, found.rollout, found.update) == (Stage.GRADIENTS, HIT, 1)


# Order --------------------------------------------------------------------------


def test_the_first_difference_is_the_first_in_time_and_later_ones_follow(run_a, tmp_path):
    def tensors(index: int, planted: Tensors) -> None:
        if index == 2:
            planted["tokens"][0, 8] = (planted["tokens"][0, 8] + 1) % 97

    def digests(index: int, planted: dict[str, Any]) -> None:
        if index == 1:
            for table in ("gradients", "optimizer", "weights"):
                flip(planted["updates"][0][table], next(iter(planted["updates"][0][table])))

    comparison = compare(run_a, make_run(tmp_path / "b", LAYOUT_B, tensors=tensors, digests=digests))
    assert comparison.first is not None
    assert (comparison.first.stage, comparison.first.rollout) == (Stage.GRADIENTS, 1)
    states = {stage.stage: stage.state for stage in comparison.stages}
    after = {stage for stage, state in states.items() if state is State.AFTER}
    assert after == {Stage.TOKENS, Stage.OPTIMIZER, Stage.WEIGHTS}
    assert states[Stage.GRADIENT_NORM] is State.EQUAL


def test_of_several_gradients_the_one_that_backward_reaches_first_is_named(run_a, tmp_path):
    spoilt = [name for name in NAMES if "layers.0" in name or "embedding" in name]
    spoilt += [f"decoder.layers.1.{part}.weight" for part in ("input_layernorm", "self_attention.linear_qkv")]

    def plant(update: dict[str, Any]) -> None:
        for name in spoilt:
            flip(update["gradients"], name)

    found = first_against(run_a, tmp_path, digests=in_update(plant))
    assert found.tensor == "decoder.layers.1.self_attention.linear_qkv.weight"
    assert found.explanation is not None
    assert f"{len(spoilt)} of {len(NAMES)} tensors" in found.explanation


def test_orders_follow_the_network():
    layers = [f"decoder.layers.{n}.input_layernorm.weight" for n in (0, 2, 10)]
    names = [
        "embedding.word_embeddings.weight",
        *layers,
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    ]
    unknown = ["a.b", "z"]
    assert forward_order(sorted([*names, *unknown])) == [*names, *unknown]
    assert backward_order(sorted([*names, *unknown])) == [*reversed(names), *unknown]
    within = [name.removeprefix("decoder.layers.1.") for name in forward_order(NAMES) if "layers.1" in name]
    assert within == [
        "input_layernorm.weight",
        "self_attention.linear_qkv.weight",
        "self_attention.q_layernorm.weight",
        "self_attention.k_layernorm.weight",
        "self_attention.linear_proj.weight",
        "pre_mlp_layernorm.weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    ]
    assert optimizer_order(OPTIMIZER_NAMES)[:4] == [
        "exp_avg/embedding.word_embeddings.weight",
        "exp_avg_sq/embedding.word_embeddings.weight",
        "master/embedding.word_embeddings.weight",
        "exp_avg/decoder.layers.0.input_layernorm.weight",
    ]
    assert set(optimizer_order([*OPTIMIZER_NAMES, "step"])) == {*OPTIMIZER_NAMES, "step"}


# Owners -------------------------------------------------------------------------


@pytest.mark.parametrize(("dp", "cp", "tp"), [(1, 1, 1), (1, 2, 2), (2, 2, 1), (3, 1, 2), (2, 4, 1)])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_owners_of_a_tokens_training_are_those_that_hold_the_position_before_it(tmp_path, dp, cp, tp, size):
    lengths = [16, 3, 9, 1, 12, 7, 16, 5]
    parallel = {
        "rollout__engines": 1,
        "parallel__dp": dp,
        "parallel__cp": cp,
        "parallel__tp": tp,
        "parallel__sp": 1,
    }
    run_dir = write_run(tmp_path / "run", rollouts=0, config={**parallel, **BLOCKS, "micro_batch_size": size})
    owners = Owners(manifest_file.Manifest.read(run_dir / "manifest.json"))
    layout = Layout(dp, cp, tp, 1)
    expected: dict[tuple[int, int], set[int]] = {}
    for rank in range(layout.world_size):
        at = layout.coords(rank)
        mine = assign_sequences(lengths, dp)[at.dp]
        for start in range(0, len(mine), size):
            rows = mine[start : start + size]
            length = padded_length(max(lengths[row] for row in rows), cp, tp, (1, 1, 1))
            for row in rows:
                for position in zigzag_positions(length, cp, at.cp):
                    expected.setdefault((row, position + 1), set()).add(rank)
    for sample, length in enumerate(lengths):
        for token in range(1, length):
            assert set(owners.of_training(sample, token, lengths)) == expected[sample, token]


def test_an_idle_rank_draws_nothing_and_every_sample_has_one_engine(run_a):
    owners = Owners(manifest_file.Manifest.read(run_a / "manifest.json"))
    assert [owners.of_drawing(sample, SEQUENCES) for sample in range(SEQUENCES)] == [
        *[(0,)] * 2,
        *[(1,)] * 3,
        *[(2,)] * 3,
    ]
