"""The detector's own tests: a fault planted in a run that passes is caught by its gate and by no other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_fixtures import (
    ENDED_AT,
    PROMPT,
    Tensors,
    make_digests,
    make_facts,
    make_job,
    make_startup,
    make_tensors,
    ran,
    set_gradient_norm,
    weights,
    write_run,
)

from rlsp.report import manifest as manifest_file
from rlsp.report.consistency import RolloutFacts
from rlsp.report.digests import RolloutDigests
from rlsp.report.gates import GATES, Verdict
from rlsp.report.recorder import Recorder
from rlsp.report.tensors import encode, rollout_path
from rlsp.report.verdict import Judgement, judge, seal, verify

FAIL, INCONCLUSIVE, PASS = Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS
HIT = 1  # the rollout that every fault is planted in


def verdicts(judgement: Judgement) -> dict[str, Verdict]:
    return {gate.name: gate.verdict for gate in judgement.gates}


def expect(run_dir: Path, expected: dict[str, Verdict], *reasons: str) -> Judgement:
    """Judge a run: exactly the expected gates do not pass, and the reasons say what they must."""
    judgement = judge(run_dir)
    assert {name: v for name, v in verdicts(judgement).items() if v is not PASS} == expected, (
        judgement.reasons
    )
    assert judgement.verdict is (FAIL if FAIL in expected.values() else INCONCLUSIVE)
    for reason in reasons:
        assert any(reason in said for said in judgement.reasons), (reason, judgement.reasons)
    return judgement


def in_rollout(change: Callable[[Tensors], None]) -> Callable[[int, Tensors], None]:
    return lambda index, tensors: change(tensors) if index == HIT else None


def facts_in_rollout(**changes: Any) -> Callable[[int, dict[str, Any]], None]:
    return lambda index, facts: facts.update(changes) if index == HIT else None


def first_active(tensors: Tensors) -> tuple[int, int]:
    sample, position = np.argwhere(tensors["active_mask"])[3]
    return int(sample), int(position)


def test_the_clean_run_passes_every_gate(tmp_path):
    judgement = judge(write_run(tmp_path / "run"))
    assert set(verdicts(judgement).values()) == {PASS}
    assert judgement.verdict is PASS
    assert judgement.reasons == ()
    assert judgement.exit_status == 0


# Bits -------------------------------------------------------------------------


def test_a_flipped_ulp_fails_the_bits_gate_and_is_located(tmp_path):
    def flip(tensors: Tensors) -> None:
        tensors["train_logprob"].view(np.int32)[first_active(tensors)] ^= 1

    run_dir = write_run(tmp_path / "run", tensors=in_rollout(flip))
    tensors = make_tensors(HIT)
    sample, position = first_active(tensors)
    bits = int(tensors["rollout_logprob"].view(np.uint32)[sample, position])
    where = f"bits: rollout {HIT}, sample {sample}, token {position}: "
    values = f"rollout 0x{bits:08x}, training 0x{bits ^ 1:08x}: 1 of "
    expect(run_dir, {"bits": FAIL}, where + values, "at most 1 ulp")


def test_a_negative_zero_fails_the_bits_gate(tmp_path):
    def plant(tensors: Tensors) -> None:
        where = first_active(tensors)
        tensors["rollout_logprob"][where] = 0.0
        tensors["train_logprob"][where] = -0.0

    run_dir = write_run(tmp_path / "run", tensors=in_rollout(plant))
    expect(run_dir, {"bits": FAIL}, "rollout 0x00000000, training 0x80000000")


@pytest.mark.parametrize("side", ["rollout", "train"])
def test_a_nan_on_one_side_fails_bits_and_coverage(tmp_path, side):
    def plant(tensors: Tensors) -> None:
        tensors[f"{side}_logprob"][first_active(tensors)] = np.nan

    run_dir = write_run(tmp_path / "run", tensors=in_rollout(plant))
    name = {"rollout": "rollout", "train": "training"}[side]
    sample, position = first_active(make_tensors(HIT))
    where = f"on the {name} side, sample {sample}, token {position}"
    expect(run_dir, {"bits": FAIL, "coverage": FAIL}, where, "0x7fc00000")


def test_the_same_nan_on_both_sides_fails_coverage(tmp_path):
    def plant(tensors: Tensors) -> None:
        for side in ("rollout", "train"):
            tensors[f"{side}_logprob"][first_active(tensors)] = np.nan

    expect(write_run(tmp_path / "run", tensors=in_rollout(plant)), {"coverage": FAIL}, "no finite")


@pytest.mark.parametrize("shift", [1, -1])
def test_a_roll_by_one_fails_the_bits_gate_as_an_alignment_fault(tmp_path, shift):
    def roll(tensors: Tensors) -> None:
        rolled = np.roll(tensors["rollout_logprob"], shift, axis=1)
        tensors["rollout_logprob"] = np.where(tensors["active_mask"], rolled, 0).astype(np.float32)

    run_dir = write_run(tmp_path / "run", tensors=in_rollout(roll))
    fault, shifted = "an alignment fault, not a kernel's", f"fit training's when read {shift:+d} position"
    expect(run_dir, {"bits": FAIL}, fault, shifted)


def test_a_slow_drift_names_the_first_failing_rollout(tmp_path):
    def drift(index: int, tensors: Tensors) -> None:
        if index >= 17:
            tensors["train_logprob"].view(np.int32)[tensors["active_mask"]] ^= 1

    run_dir = write_run(tmp_path / "run", tensors=drift, rollouts=50, config={"num_rollouts": 50})
    judgement = expect(run_dir, {"bits": FAIL}, "bits: rollout 17, sample 0", "and 30 more")
    assert judgement.reasons[0].startswith("bits: rollout 17")


def test_an_arg_max_log_probability_in_place_of_the_sampled_one_is_caught(tmp_path):
    def plant(tensors: Tensors) -> None:
        tensors["rollout_logprob"][first_active(tensors)] = np.float32(-0.01)

    expect(write_run(tmp_path / "run", tensors=in_rollout(plant)), {"bits": FAIL}, "0xbc23d70a")


# Rows -------------------------------------------------------------------------


def test_a_swapped_pair_of_unsampled_logits_fails_the_rows_gate_only(tmp_path):
    def swap(tensors: Tensors) -> None:
        # A position-keyed hash of the row: the sampled token's own log-probability stays the same bits.
        logits = np.arange(97, dtype=np.int64)
        swapped = logits.copy()
        swapped[[3, 5]] = swapped[[5, 3]]
        keys = np.arange(1, 98, dtype=np.int64) * 0x9E3779B1
        where = first_active(tensors)
        tensors["rollout_row_digest"][where] = int((logits * keys).sum())
        tensors["train_row_digest"][where] = int((swapped * keys).sum())

    run_dir = write_run(tmp_path / "run", tensors=in_rollout(swap))
    sample, position = first_active(make_tensors(HIT))
    expect(
        run_dir,
        {"rows": FAIL},
        f"rows: rollout {HIT}, sample {sample}, token {position}",
        "row digests of 1 of",
    )


def test_rows_that_nobody_hashed_are_inconclusive(tmp_path):
    def plant(tensors: Tensors) -> None:
        tensors["rollout_row_digest"][:] = tensors["train_row_digest"][:] = 0

    expect(write_run(tmp_path / "run", tensors=in_rollout(plant)), {"rows": INCONCLUSIVE}, "no row digest")


# Coverage ---------------------------------------------------------------------


@pytest.mark.parametrize("lost", [(0,), (1,)])
def test_a_missing_cp_shard_fails_coverage(tmp_path, lost):
    def plant(index: int, facts: dict[str, Any]) -> None:
        if index == HIT:
            facts["cp_tokens"] = tuple(0 if i in lost else n for i, n in enumerate(facts["cp_tokens"]))

    expect(write_run(tmp_path / "run", facts=plant), {"coverage": FAIL}, "CP shards covered")


@pytest.mark.parametrize("rollouts", ["all", "one"])
def test_a_cp_shard_that_no_token_fell_on_is_told_where_the_whole_run_left_it_out(tmp_path, rollouts):
    def plant(index: int, facts: dict[str, Any]) -> None:
        if rollouts == "all" or index == HIT:
            facts["cp_tokens"] = (sum(facts["cp_tokens"]), 0)

    judgement = judge(write_run(tmp_path / "run", facts=plant))
    assert judgement.verdict is Verdict.PASS
    told = [reason for reason in judgement.reasons if "no active token fell on CP shards [1]" in reason]
    assert len(told) == (rollouts == "all")


def test_a_cp_shard_that_never_reported_fails_coverage(tmp_path):
    def plant(index: int, facts: dict[str, Any]) -> None:
        if index == HIT:
            facts["cp_tokens"] = (sum(facts["cp_tokens"]),)

    expect(write_run(tmp_path / "run", facts=plant), {"coverage": FAIL}, "1 of 2 CP shards")


def test_tp_replicas_that_disagree_fail_coverage(tmp_path):
    run_dir = write_run(tmp_path / "run", facts=facts_in_rollout(tp_replicas_agree=False))
    expect(run_dir, {"coverage": FAIL}, f"rollout {HIT}: TP replicas")


def test_a_side_that_nothing_feeds_is_inconclusive_and_not_clean(tmp_path):
    def drop(tensors: Tensors) -> None:
        tensors["rollout_logprob"][:] = 0
        tensors["rollout_row_digest"][:] = 0

    run_dir = write_run(tmp_path / "run", tensors=in_rollout(drop))
    expected = dict.fromkeys(("coverage", "bits", "rows"), INCONCLUSIVE)
    expect(run_dir, expected, f"rollout {HIT}: nothing was recorded on the rollout side")


def test_a_tensor_file_without_the_rollouts_side_is_inconclusive(tmp_path):
    import safetensors.numpy

    run_dir = write_run(tmp_path / "run")
    tensors = make_tensors(HIT)
    del tensors["rollout_logprob"]
    rollout_path(run_dir, HIT).write_bytes(safetensors.numpy.save(tensors))
    expected = dict.fromkeys(("coverage", "bits", "rows"), INCONCLUSIVE)
    expect(run_dir, expected, "rollout_logprob was never recorded")


# Non-vacuous ------------------------------------------------------------------


def test_a_constant_reward_without_gradient_is_inconclusive(tmp_path):
    versions = [0, 1, 1, 2]  # rollout 1 changes nothing

    def plant(index: int, facts: dict[str, Any]) -> None:
        facts.update(
            rollout_weights_digest=weights(versions[index]),
            trainer_weights_digest=weights(versions[index]),
            weights_digest=weights(versions[index + 1]),
        )
        if index == HIT:
            set_gradient_norm(facts, 0.0)

    expect(write_run(tmp_path / "run", facts=plant), {"non_vacuous": INCONCLUSIVE}, "the gradient is zero")


@pytest.mark.parametrize("norm", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_fails(tmp_path, norm):
    def plant(index: int, facts: dict[str, Any]) -> None:
        if index == HIT:
            set_gradient_norm(facts, norm)

    expect(write_run(tmp_path / "run", facts=plant), {"non_vacuous": FAIL}, f"the gradient norm is {norm}")


def unchanged_weights(learning_rate: float) -> Callable[[int, dict[str, Any]], None]:
    def plant(index: int, facts: dict[str, Any]) -> None:
        same = dict.fromkeys(
            ("rollout_weights_digest", "trainer_weights_digest", "weights_digest"), weights(0)
        )
        facts.update(same, learning_rate=learning_rate)

    return plant


def test_weights_that_do_not_change_fail_although_there_is_a_gradient(tmp_path):
    run_dir = write_run(tmp_path / "run", facts=unchanged_weights(1e-3))
    expect(run_dir, {"non_vacuous": FAIL}, "rollout 0: the weights did not change")


def test_weights_need_not_change_with_a_learning_rate_of_zero(tmp_path):
    run_dir = write_run(tmp_path / "run", facts=unchanged_weights(0.0), config={"learning_rate": 0.0})
    assert judge(run_dir).verdict is PASS


def test_one_computation_on_both_sides_is_refused_as_vacuous(tmp_path):
    run_dir = write_run(
        tmp_path / "run", facts=facts_in_rollout(sources={"rollout": "forward", "train": "forward"})
    )
    expect(run_dir, {"non_vacuous": INCONCLUSIVE}, "vacuous, both sides come from one computation (forward)")


def test_sides_of_unknown_origin_are_inconclusive(tmp_path):
    run_dir = write_run(tmp_path / "run", facts=facts_in_rollout(sources={}))
    expect(run_dir, {"non_vacuous": INCONCLUSIVE}, "nothing says which computation")


def test_a_rollout_without_active_tokens_is_inconclusive(tmp_path):
    def mask_all(tensors: Tensors) -> None:
        for name in (
            "active_mask",
            "rollout_logprob",
            "train_logprob",
            "rollout_row_digest",
            "train_row_digest",
        ):
            tensors[name][:] = 0
        tensors["lengths"][:] = PROMPT

    run_dir = write_run(
        tmp_path / "run", tensors=in_rollout(mask_all), facts=facts_in_rollout(cp_tokens=(0, 0))
    )
    expect(run_dir, {"non_vacuous": INCONCLUSIVE}, f"rollout {HIT}: no active token")


def test_a_run_without_any_active_token_compares_nothing(tmp_path):
    def mask_all(index: int, tensors: Tensors) -> None:
        for name in (
            "active_mask",
            "rollout_logprob",
            "train_logprob",
            "rollout_row_digest",
            "train_row_digest",
        ):
            tensors[name][:] = 0
        tensors["lengths"][:] = PROMPT

    def no_tokens(index: int, facts: dict[str, Any]) -> None:
        facts["cp_tokens"] = (0, 0)

    run_dir = write_run(tmp_path / "run", tensors=mask_all, facts=no_tokens)
    expected = dict.fromkeys(("bits", "rows", "non_vacuous"), INCONCLUSIVE)
    expect(run_dir, expected, "no token was compared")
    assert "NaN" not in (run_dir / "consistency.json").read_text()


# Version ----------------------------------------------------------------------


def test_a_stale_weight_version_fails(tmp_path):
    run_dir = write_run(tmp_path / "run", facts=facts_in_rollout(weight_version_rollout=0))
    expect(run_dir, {"version": FAIL}, "drawn with weight version 0, the trainer had version 1")


def test_engines_that_hold_other_weights_fail(tmp_path):
    run_dir = write_run(tmp_path / "run", facts=facts_in_rollout(rollout_weights_digest=weights(0)))
    expect(run_dir, {"version": FAIL}, f"the engines held weights {weights(0)}, the trainer {weights(1)}")


def test_a_dispatch_that_lags_one_update_behind_fails_although_both_sides_agree(tmp_path):
    stale = facts_in_rollout(rollout_weights_digest=weights(0), trainer_weights_digest=weights(0))
    expect(write_run(tmp_path / "run", facts=stale), {"version": FAIL}, f"rollout 0 ended with {weights(1)}")


def test_a_first_rollout_with_other_than_the_initial_weights_fails(tmp_path):
    def plant(index: int, facts: dict[str, Any]) -> None:
        if index == 0:
            facts.update(rollout_weights_digest=weights(9), trainer_weights_digest=weights(9))

    run_dir = write_run(tmp_path / "run", facts=plant)
    expect(run_dir, {"version": FAIL}, f"{weights(9)} at dispatch, but the run began with {weights(0)}")


# Routes -----------------------------------------------------------------------


def test_a_declared_operator_that_never_ran_fails(tmp_path):
    run_dir = write_run(tmp_path / "run", facts=facts_in_rollout(routes=ran(train__attention={})))
    expect(run_dir, {"routes": FAIL}, "train.attention never ran by its declared route strict")


def test_a_fallback_fails(tmp_path):
    mixed = ran(train__attention={"strict": 11, "native": 1})
    run_dir = write_run(tmp_path / "run", facts=facts_in_rollout(routes=mixed))
    expect(run_dir, {"routes": FAIL}, "train.attention fell back from strict to native in 1 calls")


def test_an_operator_that_nobody_declared_fails(tmp_path):
    run_dir = write_run(tmp_path / "run", facts=facts_in_rollout(routes=ran(train__norm={"native": 3})))
    expect(run_dir, {"routes": FAIL}, "train.norm ran without a declared route")


def test_without_declared_routes_the_routes_gate_is_inconclusive(tmp_path):
    run_dir = write_run(tmp_path / "run", facts=facts_in_rollout(routes={}, declared_routes={}))
    expect(run_dir, {"routes": INCONCLUSIVE}, "no route was declared")


# Agreement --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "what"), [("contract_hash", "contract"), ("code_hash", "code"), ("kernel_digest", "kernels")]
)
def test_a_rank_with_another_contract_code_or_kernel_fails(tmp_path, key, what):
    def plant(startup: dict[str, Any]) -> None:
        startup["agreement"][2][key] = "0" * 64

    expect(write_run(tmp_path / "run", startup=plant), {"agreement": FAIL}, f"rank 2 has {what} 000")


def test_a_rank_that_stands_elsewhere_fails(tmp_path):
    def plant(startup: dict[str, Any]) -> None:
        startup["agreement"][3]["layout"]["cp"] = 0

    expect(write_run(tmp_path / "run", startup=plant), {"agreement": FAIL}, "rank 3 stands at")


def test_a_rank_that_never_reported_fails(tmp_path):
    def plant(startup: dict[str, Any]) -> None:
        del startup["agreement"][1]

    expect(write_run(tmp_path / "run", startup=plant), {"agreement": FAIL}, "ranks [0, 2, 3] reported")


def test_ranks_that_drift_apart_at_a_step_fail(tmp_path):
    run_dir = write_run(tmp_path / "run", facts=facts_in_rollout(ranks_agree=False))
    expect(run_dir, {"agreement": FAIL}, f"rollout {HIT}: the ranks disagreed")


# Counts and evidence ----------------------------------------------------------


def test_a_missing_rollout_file_fails_counts(tmp_path):
    run_dir = write_run(tmp_path / "run")
    rollout_path(run_dir, HIT).unlink()
    expect(run_dir, {"counts": FAIL}, f"no tensor file for rollout {HIT}")


def test_a_run_that_stopped_early_fails_counts(tmp_path):
    run_dir = write_run(tmp_path / "run", rollouts=2)
    wanted = ("tensor file", "digest file", "entry in consistency.json")
    lost = [f"no {what} for rollout 2" for what in wanted]
    expect(run_dir, {"counts": FAIL}, *lost, "and 1 more")


def test_a_missing_update_fails_counts(tmp_path):
    def plant(index: int, facts: dict[str, Any]) -> None:
        facts.update(weight_version_rollout=2 * index, weight_version_train=2 * index)

    run_dir = write_run(tmp_path / "run", facts=plant, config={"updates_per_rollout": 2})
    expect(run_dir, {"counts": FAIL}, "1 updates with 1 gradient norms, planned 2")


def test_a_lost_sequence_fails_counts(tmp_path):
    run_dir = write_run(tmp_path / "run", facts=facts_in_rollout(sequences=7))
    expect(run_dir, {"counts": FAIL}, "7 sequences, 8 in its file, planned 8")


def test_a_file_that_belongs_to_no_rollout_fails_counts(tmp_path):
    run_dir = write_run(tmp_path / "run")
    rollout_path(run_dir, 7).write_bytes(encode(make_tensors(7)))
    (run_dir / "rollouts" / "0001.safetensors").write_bytes(b"")
    expect(run_dir, {"counts": FAIL}, "0001.safetensors belongs to no rollout")


def test_a_report_that_hides_a_mismatch_fails_evidence_and_bits(tmp_path):
    run_dir = write_run(tmp_path / "run")
    tensors = make_tensors(HIT)
    tensors["train_logprob"].view(np.int32)[first_active(tensors)] ^= 1
    rollout_path(run_dir, HIT).write_bytes(encode(tensors))
    said = f"consistency.json, rollout {HIT}: mismatched_tokens is 0, but the evidence gives 1"
    expect(run_dir, {"bits": FAIL, "evidence": FAIL}, said)


def test_a_damaged_tensor_file_fails_evidence(tmp_path):
    run_dir = write_run(tmp_path / "run")
    path = rollout_path(run_dir, HIT)
    path.write_bytes(path.read_bytes()[:-5])
    judgement = judge(run_dir)
    assert verdicts(judgement)["evidence"] is FAIL
    assert f"{path.name} is damaged" in judgement.reasons[0]


def test_an_active_token_behind_the_end_fails_evidence(tmp_path):
    def plant(tensors: Tensors) -> None:
        tensors["lengths"][0] -= 1

    run_dir = write_run(tmp_path / "run", tensors=in_rollout(plant))
    expect(run_dir, {"evidence": FAIL}, "behind the end of its sequence")


def test_a_config_that_was_edited_afterwards_fails_evidence(tmp_path):
    run_dir = write_run(tmp_path / "run")
    path = run_dir / "manifest.json"
    path.write_text(path.read_text().replace('"seed": 7', '"seed": 8', 1))
    expect(run_dir, {"evidence": FAIL}, "config_hash is not the hash of config")


def test_without_startup_facts_agreement_is_inconclusive(tmp_path):
    run_dir = tmp_path / "run"
    manifest_file.begin(make_job(run_dir), {})
    with Recorder(run_dir) as recorder:
        for index in range(3):
            tensors = make_tensors(index)
            said = make_facts(index, tensors)
            digests = RolloutDigests(**make_digests(index, said))
            recorder.rollout(index, tensors, RolloutFacts(**said), {}, digests=digests)
    manifest_file.finish(run_dir, ENDED_AT, manifest_file.Status.FINISHED)
    expect(run_dir, {"agreement": INCONCLUSIVE}, "no start-up facts")
    # The witness: with them the same run passes.
    manifest_file.add_startup(run_dir, make_startup(manifest_file.Manifest.read(run_dir / "manifest.json")))
    assert judge(run_dir).verdict is PASS


# Together ---------------------------------------------------------------------


def test_fail_outweighs_inconclusive(tmp_path):
    changes = facts_in_rollout(sources={}, weight_version_rollout=0)
    judgement = expect(
        write_run(tmp_path / "run", facts=changes), {"non_vacuous": INCONCLUSIVE, "version": FAIL}
    )
    assert (judgement.verdict, judgement.exit_status) == (FAIL, 3)


def test_native_routes_report_their_mismatches_and_do_not_judge_them(tmp_path):
    def plant(index: int, facts: dict[str, Any]) -> None:
        facts["routes"] = ran(train__attention={"native": 12})
        facts["declared_routes"]["train.attention"] = "native"

    def flip(tensors: Tensors) -> None:
        tensors["train_logprob"].view(np.int32)[first_active(tensors)] ^= 1

    config = {"numerics__routes__attention": "native/strict"}
    judgement = judge(write_run(tmp_path / "run", tensors=in_rollout(flip), facts=plant, config=config))
    bits = next(gate for gate in judgement.gates if gate.name == "bits")
    assert (bits.verdict, bits.judged) == (FAIL, False)
    assert judgement.verdict is PASS
    assert judgement.reasons[0].startswith("bits (reported, not judged): rollout 1")


def test_every_gate_of_the_design_stands_in_the_list():
    names = [gate.__name__ for gate in GATES]
    assert names[1:] == [
        "coverage",
        "bits",
        "rows",
        "non_vacuous",
        "version",
        "routes",
        "agreement",
        "counts",
    ]


def test_a_planted_fault_is_sealed_and_verified_as_such(tmp_path):
    run_dir = write_run(tmp_path / "run", facts=facts_in_rollout(weight_version_rollout=0))
    assert seal(run_dir).verdict is FAIL
    verification = verify(run_dir)
    assert verification.damage == ()
    assert verification.exit_status == 3
