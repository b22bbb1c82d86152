"""What is edited and sealed again is found: no hash tells, but two files state different things."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_fixtures import (
    PROMPT,
    Tensors,
    edit_json,
    make_job,
    make_tensors,
    set_contract,
    weights,
    write_run,
)

from rlsp.report.evidence import collect
from rlsp.report.findings import Verdict
from rlsp.report.tensors import encode, rollout_path
from rlsp.report.verdict import VerdictDocument, judge, seal, verify

HIT = 1
JsonChange = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = write_run(tmp_path_factory.mktemp("clean") / "run")
    assert seal(run_dir).verdict is Verdict.PASS
    return run_dir


@pytest.fixture
def run_dir(clean: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(clean, tmp_path / "run"))


def found_by(run_dir: Path, gate: str, *said: str) -> None:
    """Seal a run again: one gate and no other fails, and its reasons say what they must."""
    judgement = seal(run_dir)
    failed = {answer.name for answer in judgement.gates if answer.verdict is not Verdict.PASS}
    assert failed == {gate}, judgement.reasons
    for text in said:
        assert any(text in reason for reason in judgement.reasons), (text, judgement.reasons)
    verification = verify(run_dir)
    assert (verification.damage, verification.exit_status) == ((), 3)


def rewrite(run_dir: Path, change: Callable[[Tensors], None]) -> None:
    tensors = make_tensors(HIT)
    change(tensors)
    rollout_path(run_dir, HIT).write_bytes(encode(tensors))


def edit_row(run_dir: Path, change: JsonChange) -> None:
    path = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows[HIT])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def in_record(change: JsonChange) -> JsonChange:
    return lambda report: change(report["rollouts"][HIT])


# metrics.jsonl ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("consistency/active_tokens", 1),
        ("consistency/mismatched_tokens", 1),
        ("consistency/mismatched_rows", True),
        ("consistency/max_abs", 1e-300),
        ("consistency/ess", "NaN"),
        ("consistency/kl_k3", None),
        ("consistency/ppl_ratio", [1.0]),
        ("consistency/max_ulp", 10**400),
        ("train/loss", 0.25),
        ("reward/mean", 0.75),
        ("reward/mean", 10**400),
    ],
)
def test_a_row_of_metrics_that_the_evidence_does_not_give_is_found(run_dir, name, value):
    edit_row(run_dir, lambda row: row.update({name: value}))
    found_by(run_dir, "evidence", f"metrics.jsonl, rollout {HIT}: {name} is ")


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("train/gradient_norm", 9.0),
        ("train/learning_rate", 9.0),
        ("train/weight_version", 9),
        ("rollout/weight_version", 9),
        ("rollout/active_tokens", 9),
        ("rollout/sequences", 9),
        ("rollout/response_length_mean", 0.5),
        ("rollout/response_length_max", 99),
        ("rollout/response_length_min", 99),
        ("reward/std", 9.0),
        ("reward/min", -9.0),
        ("reward/max", 9.0),
        ("reward/solved_fraction", 9.0),
        ("reward/constant_groups_fraction", 0.5),
        ("reward/advantage_max_abs", 9.0),
    ],
)
def test_a_metric_that_need_not_stand_there_must_be_right_where_it_does(run_dir, name, wrong):
    edit_row(run_dir, lambda row: row.update({name: wrong}))
    found_by(run_dir, "evidence", f"{name} is {wrong}, but the evidence gives")


def test_a_row_without_its_comparison_is_found(run_dir):
    edit_row(run_dir, lambda row: row.pop("consistency/max_ulp"))
    found_by(run_dir, "evidence", f"metrics.jsonl, rollout {HIT}: consistency/max_ulp is missing")


def test_a_row_agrees_where_numbers_are_not_finite(tmp_path):
    def plant(index: int, tensors: Tensors) -> None:
        if index == HIT:
            tensors["train_logprob"][tuple(np.argwhere(tensors["active_mask"])[0])] = np.nan

    assert collect(write_run(tmp_path / "run", tensors=plant)).contradictions == ()


# The tensors -----------------------------------------------------------------------


def test_an_advantage_that_the_rewards_do_not_give_is_found(run_dir):
    def plant(tensors: Tensors) -> None:
        tensors["advantages"].view(np.int32)[2] ^= 1

    rewrite(run_dir, plant)
    found_by(run_dir, "evidence", "sample 2 has the advantage ", "but the rewards of its prompt give ")


def test_a_reward_that_was_edited_is_found(run_dir):
    rewards = make_tensors(HIT)["rewards"]
    rewrite(run_dir, lambda tensors: tensors["rewards"].__setitem__(0, 1 - rewards[0]))
    found_by(run_dir, "evidence", "sample 0 has the advantage ")


@pytest.mark.parametrize(("place", "token"), [((0, 0), 97), ((3, 6), -1), ((7, 15), 1 << 40)])
def test_a_token_beyond_the_vocabulary_is_found(run_dir, place, token):
    rewrite(run_dir, lambda tensors: tensors["tokens"].__setitem__(place, token))
    what = f"sample {place[0]}, token {place[1]} is {token}, the vocabulary has 97"
    found_by(run_dir, "evidence", what)


def test_samples_of_one_prompt_that_begin_differently_are_found(run_dir):
    rewrite(run_dir, lambda tensors: tensors["tokens"][5].__setitem__(2, (tensors["tokens"][5][2] + 1) % 97))
    found_by(run_dir, "evidence", "samples 4 and 5 are of one prompt and begin with other tokens")


def test_a_response_beyond_its_limit_is_found(run_dir):
    edit_json(run_dir / "manifest.json", lambda said: said["config"].update(max_response_tokens=3))
    found_by(run_dir, "evidence", "tokens, max_response_tokens is 3")


@pytest.mark.parametrize("name", ["rollout_row_digest", "train_row_digest", "rollout_logprob"])
def test_a_value_where_no_token_counts_is_found(run_dir, name):
    rewrite(run_dir, lambda tensors: tensors[name].__setitem__((0, 0), 1))
    found_by(run_dir, "evidence", f"{name} is not 0 where inactive")


def test_a_mask_with_a_hole_is_found(tmp_path):
    def plant(index: int, tensors: Tensors) -> None:
        if index == HIT:
            for name in ("active_mask", "rollout_logprob", "train_logprob"):
                tensors[name][0, PROMPT] = 0
            for name in ("rollout_row_digest", "train_row_digest"):
                tensors[name][0, PROMPT] = 0
            tensors["active_mask"][0, PROMPT - 1] = True
            for name in ("rollout_logprob", "train_logprob"):
                tensors[name][0, PROMPT - 1] = -1
            for name in ("rollout_row_digest", "train_row_digest"):
                tensors[name][0, PROMPT - 1] = 1

    found_by(write_run(tmp_path / "run", tensors=plant), "evidence", "the last tokens of a sequence")


# The manifest ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.update(entropy_coef=0.5), "entropy_coef is 0.5, but config gives 0.01"),
        (lambda m: m.update(seeds={"seed": 8}), "seeds is seed: 8, but config gives seed: 7"),
        (lambda m: m["config"].update(seed=8), "seeds is seed: 7, but config gives seed: 8"),
        (lambda m: m["layout"]["table"].pop(), "layout places 3 ranks, but config gives 4"),
        (lambda m: m["layout"].update(sp=1), "layout is not the one that config gives"),
        (lambda m: m["rollout_layout"].update(engines=2), "rollout_layout is not the one that config gives"),
        (lambda m: m["config"]["parallel"].update(sp=3), "config gives no layout: sp=3"),
        (lambda m: m["config"]["parallel"].update(dp=1 << 60), "layout places 4 ranks, but config gives"),
        (lambda m: m.update(status="running"), "status is running, but ended_at is 2026"),
        (lambda m: m.update(ended_at=None), "status is finished, but ended_at is absent"),
        (lambda m: m.update(ended_at="yesterday"), "ended_at is no time: yesterday"),
        (lambda m: m.update(aborted="it was not"), "status is finished, but aborted is it was not"),
        (lambda m: m["startup"]["contract"].update(grad_lsb=36), "contract_hash is not the hash of contract"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_found(run_dir, change, said):
    edit_json(run_dir / "manifest.json", change)
    judgement = judge(run_dir)
    assert judgement.gates[0].verdict is Verdict.FAIL
    assert any(f"evidence: manifest.json: {said}" in reason for reason in judgement.reasons), (
        judgement.reasons
    )


def test_a_contract_that_the_config_does_not_give_is_found_although_its_hash_fits(run_dir):
    edit_json(run_dir / "manifest.json", lambda said: set_contract(said["startup"], grad_lsb=36))
    found_by(run_dir, "evidence", "contract grad_lsb is 36, but config gives 40")


def test_a_rule_of_the_contract_that_no_config_decides_is_left_alone(run_dir):
    edit_json(run_dir / "manifest.json", lambda said: set_contract(said["startup"], attention="as ever"))
    assert seal(run_dir).verdict is Verdict.PASS


def test_kernels_that_are_not_the_certificates_are_found(run_dir):
    edit_json(run_dir / "manifest.json", lambda said: said["startup"]["certificate"].update(digest="0" * 64))
    found_by(run_dir, "agreement", f"rank 0 has kernels {'f' * 64}, not {'0' * 64}")


def test_a_job_that_is_not_the_manifests_is_found(tmp_path):
    run_dir = write_run(tmp_path / "run")
    (run_dir / ".hydra").mkdir()
    path = run_dir / ".hydra" / "job.json"
    path.write_text(make_job(Path("/where/it/was/made")).to_json())
    assert seal(run_dir).verdict is Verdict.PASS
    edit_json(path, lambda job: job["config"].update(seed=8))
    found_by(run_dir, "evidence", ".hydra/job.json: config is not that of manifest.json")
    path.write_text(make_job(run_dir).to_json())
    edit_json(path, lambda job: job.update(overrides=["seed=9"]))
    found_by(run_dir, "evidence", "overrides is not that of manifest.json: seed=9 against seed=7")
    path.write_bytes(b"[" * 100_000)
    found_by(run_dir, "evidence", ".hydra/job.json is damaged: it is nested too deeply")


# consistency.json ------------------------------------------------------------------


def test_a_route_that_the_config_does_not_prescribe_is_found(run_dir):
    def plant(record: dict[str, Any]) -> None:
        record["routes"]["train.attention"] = {"native": 12}
        record["declared_routes"]["train.attention"] = "native"

    edit_json(run_dir / "consistency.json", in_record(plant))
    what = "the declared route of train.attention is native, but the config says strict"
    # With a native route the gates of bits and rows report and do not judge: the lie must not pay.
    found_by(run_dir, "evidence", what)


def test_a_route_that_is_no_longer_declared_is_found(run_dir):
    def plant(record: dict[str, Any]) -> None:
        del record["routes"]["rollout.logp"], record["declared_routes"]["rollout.logp"]

    edit_json(run_dir / "consistency.json", in_record(plant))
    what = "the declared route of rollout.logp is absent, but the config says strict"
    found_by(run_dir, "evidence", what)


def test_a_learning_rate_that_the_config_does_not_give_is_found(run_dir):
    edit_json(run_dir / "consistency.json", in_record(lambda record: record.update(learning_rate=0.5)))
    edit_row(run_dir, lambda row: row.update({"train/learning_rate": 0.5}))
    found_by(run_dir, "evidence", "learning_rate is 0.5, but the config says 0.001")


def test_versions_that_do_not_count_the_updates_are_found(run_dir):
    def plant(record: dict[str, Any]) -> None:
        record.update(weight_version_rollout=5, weight_version_train=5)

    edit_json(run_dir / "consistency.json", in_record(plant))
    found_by(
        run_dir, "version", f"rollout {HIT} was trained from weight version 5, but 1 updates came before"
    )


def test_a_total_that_the_rollouts_do_not_give_is_found_in_plain_words(run_dir):
    def plant(report: dict[str, Any]) -> None:
        report["total"]["ulp_histogram"] = {"0": 1, "2": 5}
        report["total"]["first_mismatched_rollout"] = 2

    edit_json(run_dir / "consistency.json", plant)
    histogram = "total: ulp_histogram is 0: 1, 2: 5, but the evidence gives 0: "
    found_by(run_dir, "evidence", histogram, "first_mismatched_rollout is 2, but the evidence gives absent")


def test_a_first_mismatch_that_is_not_there_is_told_by_its_place(run_dir):
    place = {"sample": 1, "position": 6, "rollout": "0x01", "train": "0x02"}
    edit_json(run_dir / "consistency.json", in_record(lambda record: record.update(first_mismatch=place)))
    found_by(run_dir, "evidence", "first_mismatch is at sample 1, token 6 (rollout 0x01, training 0x02), but")


# The verdict -----------------------------------------------------------------------


def reseal(run_dir: Path, **changes: Any) -> tuple[str, ...]:
    path = run_dir / "VERDICT.json"
    lie = VerdictDocument.read(path).model_copy(update=changes)
    lie.model_copy(update={"self_digest": lie.digest()}).write(path)
    verification = verify(run_dir)
    assert verification.exit_status == 3
    return verification.damage


def test_a_seal_of_another_run_is_found(run_dir):
    (said,) = reseal(run_dir, run_id="20260102-030405-000000")
    assert said.startswith("VERDICT.json is of run 20260102-030405-000000, manifest.json of run ")


def test_reasons_that_the_files_do_not_give_are_found(run_dir):
    assert reseal(run_dir, reasons=("all is well",)) == (
        "VERDICT.json: its reasons are not those that the files give now",
    )


def test_a_gates_reasons_that_the_files_do_not_give_are_found(run_dir):
    gates = VerdictDocument.read(run_dir / "VERDICT.json").gates
    gates = (gates[0].model_copy(update={"reasons": ("splendid",)}), *gates[1:])
    assert reseal(run_dir, gates=gates) == (
        "VERDICT.json: gate evidence gives other reasons than the files give now",
    )


def test_a_gate_that_does_not_exist_is_found(run_dir):
    gates = VerdictDocument.read(run_dir / "VERDICT.json").gates
    extra = gates[0].model_copy(update={"name": "luck"})
    assert reseal(run_dir, gates=(*gates, extra)) == ("VERDICT.json: there is no gate luck",)


def test_the_words_of_other_code_are_not_compared_and_that_is_said(run_dir):
    def plant(said: dict[str, Any]) -> None:
        said["code"]["source_hash"] = "0" * 64
        for row in said["startup"]["agreement"]:
            row["code_hash"] = "0" * 64

    edit_json(run_dir / "manifest.json", plant)
    edit_row(run_dir, lambda row: row.update({"train/loss": 0.25}))
    seal(run_dir)
    stored = VerdictDocument.read(run_dir / "VERDICT.json")
    worded = stored.model_copy(update={"reasons": ("said in other words",)})
    worded.model_copy(update={"self_digest": worded.digest()}).write(run_dir / "VERDICT.json")
    verification = verify(run_dir)
    assert verification.damage == ()
    assert verification.notes == ("other code sealed this run: the words of its reasons were not compared",)


def test_a_verdict_that_calls_a_finished_run_aborted_is_found(run_dir):
    assert any(
        "VERDICT.json says ABORTED, manifest.json finished" in line
        for line in reseal(run_dir, verdict=Verdict.ABORTED, aborted="power", reasons=("aborted: power",))
    )


def test_a_run_that_was_sealed_before_it_ended_is_found(run_dir):
    edit_json(run_dir / "manifest.json", lambda said: said.update(status="running", ended_at=None))
    seal(run_dir)
    assert verify(run_dir).damage == ("manifest.json says that the run has not ended, but it was sealed",)


def test_two_reasons_for_one_abort_are_found(tmp_path):
    run_dir = write_run(tmp_path / "run", rollouts=1, aborted="rank 3 died")
    seal(run_dir, "rank 2 died")
    assert verify(run_dir).damage == (
        "VERDICT.json and manifest.json give other reasons why the run was aborted",
    )


# Cost ------------------------------------------------------------------------------


def test_judging_costs_what_was_recorded_and_not_what_was_planned(run_dir):
    edit_json(run_dir / "manifest.json", lambda said: said["config"].update(num_rollouts=10**30))
    judgement = seal(run_dir)
    (counts,) = (gate for gate in judgement.gates if gate.name == "counts")
    assert counts.reasons[0] == "no tensor file for rollout 3, 4, 5, 6, 7, 8, 9, 10 …"
    assert verify(run_dir).damage == ()


def test_weights_that_a_rollout_did_not_begin_with_are_found(run_dir):
    edit_json(
        run_dir / "consistency.json",
        in_record(lambda r: r.update(trainer_weights_digest=weights(7), rollout_weights_digest=weights(7))),
    )
    found_by(run_dir, "version", f"the trainer had weights {weights(7)} at dispatch")
