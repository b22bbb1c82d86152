"""`rlsp-compare`: what it refuses to compare and why, and what the command prints and returns."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from compare_fixtures import (
    HIT,
    LAYOUT_A,
    LAYOUT_B,
    flip,
    in_rollout,
    in_update,
    make_run,
)
from report_fixtures import (
    ENDED_AT,
    NAMES,
    ROLLOUTS,
    Tensors,
    hashes,
    make_job,
    plain_config,
    set_contract,
    weights,
    write_run,
)

from rlsp.cli.compare import main
from rlsp.config import Config, leaf_kinds
from rlsp.report import manifest as manifest_file
from rlsp.report.compare import compare
from rlsp.report.compare_records import Comparison, Outcome, Stage
from rlsp.report.compare_rules import FREE_KEYS, result_hash, result_keys
from rlsp.report.verdict import seal


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


# Not comparable -------------------------------------------------------------------


def refusals(run_a: Path, folder: Path, **changes: Any) -> tuple[str, ...]:
    comparison = compare(run_a, make_run(folder / "b", LAYOUT_B, **changes))
    assert comparison.outcome is Outcome.NOT_COMPARABLE
    assert (comparison.first, comparison.stages) == (None, ())
    return comparison.refusals


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data_hash": "0" * 64}, f"data is {'d' * 64} against {'0' * 64}"),
        ({"tokenizer_hash": "0" * 64}, f"tokenizer is {'e' * 64} against {'0' * 64}"),
    ],
)
def test_other_data_are_refused_by_name(run_a, tmp_path, change, said):
    assert refusals(run_a, tmp_path, startup=lambda startup: startup.update(change)) == (said,)


def test_another_contract_is_refused_by_the_field_that_differs(run_a, tmp_path):
    def plant(startup: dict[str, Any]) -> None:
        set_contract(startup, attention="in another order")

    other = refusals(run_a, tmp_path / "widths", numerics__grad_lsb=36)
    assert other == ("contract grad_lsb is 40 against 36",)
    unknown = refusals(run_a, tmp_path / "rule", startup=plant)
    assert unknown == ("contract attention is absent against in another order",)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 8}, "seed is 7 against 8"),
        ({"entropy_coef": 0.02}, "configuration entropy_coef is 0.01 against 0.02"),
        ({"task__max_operand": 99}, "configuration task.max_operand is 9 against 99"),
        ({"model__name": "mine"}, "configuration model.name is qwen3_nano against mine"),
        ({"rollout__ignore_eos": True}, "configuration rollout.ignore_eos is false against true"),
    ],
)
def test_another_seed_or_configuration_is_refused_by_name(run_a, tmp_path, change, said):
    assert refusals(run_a, tmp_path, **change) == (said,)


def test_everything_that_differs_is_named_at_once(run_a, tmp_path):
    said = refusals(
        run_a, tmp_path, startup=lambda s: s.update(data_hash="0" * 64), seed=8, learning_rate=0.5
    )
    assert len(said) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"tracker__mode": "offline", "tracker__tags": ["x"]},
        {"device__backend": "nccl"},
        {"launch__timeout_s": 1.0},
        {"cluster__nodes": 2, "cluster__host": "10.0.0.1"},
        {"micro_batch_size": 7},
    ],
)
def test_what_must_not_change_a_bit_may_differ(run_a, tmp_path, change):
    assert compare(run_a, make_run(tmp_path / "b", LAYOUT_B, **change)).outcome is Outcome.EQUAL


def test_the_results_hash_changes_with_every_key_but_the_free_ones():
    free = {
        "name", "micro_batch_size", "parallel.cp", "parallel.tp", "parallel.sp", "parallel.dp", "rollout.tp",
        "rollout.engines", "device.kind", "device.backend", "tracker.mode", "tracker.project",
        "tracker.entity", "tracker.group", "tracker.tags", "tracker.init_timeout_s",
        "tracker.finish_timeout_s", "launch.timeout_s", "launch.grace_s", "launch.progress", "diagnose",
        "task.timeout_s", "cluster.nodes", "cluster.node", "cluster.host", "cluster.port",
        "cluster.agent_store", "cluster.attempt", "cluster.wait_s", "cluster.shared_folder",
        "export", "rollout.timeout_s", "launch.max_restarts", "checkpoint.every",
        "checkpoint.keep", "checkpoint.stop_s", "resume", "numerics.compiled",
    }  # fmt: skip
    whole = result_hash(plain_config())
    changed = {
        key
        for key, _ in leaf_kinds(Config)
        if result_hash(plain_config(**{key.replace(".", "__"): "x"})) != whole
    }
    assert changed == {key for key, _ in leaf_kinds(Config)} - free
    assert changed == result_keys(plain_config()).keys()
    sections = {key.partition(".")[0] for key, _ in leaf_kinds(Config)}
    assert all(key in sections or key in free for key in FREE_KEYS)


def test_a_longer_run_is_compared_over_the_common_rollouts(run_a, tmp_path):
    longer = make_run(tmp_path / "b", LAYOUT_B, rollouts=5, num_rollouts=5)
    comparison = compare(run_a, longer)
    assert (comparison.outcome, comparison.rollouts) == (Outcome.EQUAL, ROLLOUTS)
    assert "num_rollouts is 3 against 5: the common rollouts are compared" in comparison.notes


def test_an_aborted_run_is_compared_as_far_as_it_goes(run_a, tmp_path):
    def plant(tensors: Tensors) -> None:
        tensors["rewards"][0] += 1

    short = make_run(tmp_path / "short", LAYOUT_B, rollouts=2, aborted="rank 3 was killed")
    comparison = compare(run_a, short)
    assert (comparison.outcome, comparison.rollouts) == (Outcome.EQUAL, 2)
    assert "run B was aborted (rank 3 was killed): it is compared as far as it goes" in comparison.notes
    wrong = make_run(tmp_path / "wrong", LAYOUT_B, rollouts=2, aborted="stopped", tensors=in_rollout(plant))
    assert compare(run_a, wrong).outcome is Outcome.DIFFERENT


def test_a_run_without_a_rollout_has_nothing_to_compare_but_its_initial_weights(run_a, tmp_path):
    empty = make_run(tmp_path / "empty", LAYOUT_B, rollouts=0, aborted="stopped")
    comparison = compare(run_a, empty)
    assert comparison.outcome is Outcome.NOT_COMPARABLE
    assert comparison.refusals == ("nothing to compare: run B recorded no rollout",)
    other = make_run(
        tmp_path / "other",
        LAYOUT_B,
        rollouts=0,
        aborted="stopped",
        startup=lambda startup: startup.update(initial_weights_digest=weights(5)),
    )
    comparison = compare(run_a, other)
    assert comparison.outcome is Outcome.DIFFERENT
    assert comparison.first is not None
    assert (comparison.first.stage, comparison.first.tensor) == (Stage.INITIAL_WEIGHTS, None)
    assert comparison.first.a.bits == f"0x{weights(0)}"


def test_a_run_that_never_came_up_is_not_comparable(run_a, tmp_path):
    run_dir = tmp_path / "run"
    manifest_file.begin(make_job(run_dir), {})
    manifest_file.finish(run_dir, ENDED_AT, manifest_file.Status.ABORTED, "no certificate")
    seal(run_dir, "no certificate")
    (said,) = compare(run_a, run_dir).refusals
    assert said.startswith("run B has no start-up facts")


def test_other_code_packages_and_kernels_are_noted_and_not_refused(run_a, tmp_path):
    other = make_run(tmp_path / "b", LAYOUT_B, startup=lambda s: s["kernels"].update(isa="AVX2"))
    assert "kernels: isa is AVX512 against AVX2" in compare(run_a, other).notes


# Damage ---------------------------------------------------------------------------


def test_other_paths_are_noted_but_not_those_that_one_layout_alone_has(run_a, tmp_path):
    def startup(said: dict[str, Any]) -> None:
        said["paths"].update({"messages cp": "lines", "head": "fused"})

    found = compare(run_a, make_run(tmp_path / "b", LAYOUT_B, startup=startup))
    assert [note for note in found.notes if "paths" in note] == ["paths: head is leaf against fused"]


def test_damaged_evidence_is_refused_by_name(run_a, tmp_path):
    copy = Path(shutil.copytree(run_a, tmp_path / "copy"))
    path = copy / "digests" / "00001.json"
    path.write_bytes(path.read_bytes().replace(b"a", b"b", 1))
    (copy / "metrics.jsonl").unlink()
    said = compare(run_a, copy).refusals
    assert "run B is damaged: digests/00001.json was changed after the run was sealed" in said
    assert "run B is damaged: metrics.jsonl is missing" in said
    assert all(line.startswith("run A") for line in compare(copy, run_a).refusals)


def test_a_run_that_was_never_sealed_is_refused(run_a, tmp_path):
    copy = Path(shutil.copytree(run_a, tmp_path / "copy"))
    (copy / "VERDICT.json").unlink()
    assert (
        "run B is damaged: VERDICT.json cannot be read: No such file or directory"
        in compare(run_a, copy).refusals
    )


def test_a_run_that_contradicts_itself_is_refused(run_a, tmp_path):
    def lie(index: int, digests: dict[str, Any]) -> None:
        if index == HIT:
            flip(digests["updates"][0]["weights"], NAMES[0])

    run_dir = write_run(tmp_path / "b", digests=lie, config=LAYOUT_A)
    seal(run_dir)
    (said,) = compare(run_a, run_dir).refusals
    assert said.startswith("run B contradicts itself: digests/00001.json: weights_digest of its tables is")


# The command ----------------------------------------------------------------------


def run_main(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_command_exits_0_for_equal_runs(run_a, tmp_path, capsys):
    status, out, err = run_main(capsys, run_a, make_run(tmp_path / "b", LAYOUT_B))
    assert (status, err) == (0, "")
    for stage in Stage:  # neither run had a warm-up
        assert (stage.value in out) == (stage is not Stage.WARM_UP)
    assert out.rstrip().endswith("equal, bit by bit, over 3 rollouts")
    assert "FIRST" not in out


def test_the_command_exits_3_and_shows_both_values_and_ranks(run_a, tmp_path, capsys):
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    other = make_run(
        tmp_path / "b", LAYOUT_B, digests=in_update(lambda update: flip(update["gradients"], name, 7))
    )
    status, out, _ = run_main(capsys, run_a, other)
    assert status == 3
    assert f"first difference: gradients, rollout 1, update 0, {name}, virtual shard 7" in out
    held = hashes("gradients", HIT)[name][7]
    assert f"  A  0x{held}  on ranks 1, 3  of cp2_tp2_sp2, rollout 3 × tp1, micro-batch 4" in out
    assert f"  B  0x{int(held, 16) ^ 1:032x}  on ranks 3, 7  of cp1_tp4_sp1_dp2" in out
    assert "FIRST DIFFERENCE" in out


def test_the_command_exits_4_and_says_why(run_a, tmp_path, capsys):
    status, out, _ = run_main(capsys, run_a, make_run(tmp_path / "b", LAYOUT_B, seed=8))
    assert status == 4
    assert "not comparable:\n  seed is 7 against 8\n" in out


@pytest.mark.parametrize("outcome", list(Outcome))
def test_the_command_prints_one_json_object(run_a, tmp_path, capsys, outcome):
    def plant(tensors: Tensors) -> None:
        if outcome is Outcome.DIFFERENT:
            tensors["train_logprob"][0, 7] = math.nan

    seed = 8 if outcome is Outcome.NOT_COMPARABLE else 7
    other = make_run(tmp_path / "b", LAYOUT_B, tensors=in_rollout(plant), seed=seed)
    status, out, _ = run_main(capsys, run_a, other, "--json")
    said = Comparison.model_validate_json(out)
    assert said.outcome is outcome
    assert status == {Outcome.EQUAL: 0, Outcome.DIFFERENT: 3, Outcome.NOT_COMPARABLE: 4}[outcome]
    assert (said.first is not None) == (outcome is Outcome.DIFFERENT)


def test_the_command_exits_2_where_there_is_no_run(run_a, tmp_path, capsys):
    status, out, err = run_main(capsys, tmp_path / "nowhere", tmp_path)
    assert (status, out) == (2, "")
    assert err.splitlines() == [
        f"rlsp-compare: {tmp_path}/nowhere is no folder",
        f"rlsp-compare: {tmp_path} is no run folder",
    ]
    with pytest.raises(SystemExit) as usage:
        main([str(run_a)])
    assert usage.value.code == 2


def test_the_command_needs_neither_torch_nor_wandb(run_a):
    code = (
        "import sys; from rlsp.cli.compare import main; status = main(sys.argv[1:]);"
        "print([name for name in ('torch', 'wandb', 'hydra') if name in sys.modules]); sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run_a), str(run_a)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "[]"), done.stderr
