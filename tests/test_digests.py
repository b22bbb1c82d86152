"""The digest files: one home for the digest's definition, and reports that cannot contradict their tables."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from report_fixtures import (
    NAMES,
    make_digests,
    make_facts,
    make_tensors,
    plain_table,
    set_gradient_norm,
    weights,
    write_run,
)

from rlsp import bits
from rlsp.report.consistency import RolloutFacts, float64_bits
from rlsp.report.digests import RolloutDigests, UpdateDigests, digests_path, shard_table, table_digest
from rlsp.report.files import EvidenceError, artifact_paths
from rlsp.report.gates import Verdict
from rlsp.report.recorder import Recorder
from rlsp.report.records import bits_fit
from rlsp.report.verdict import judge, seal, verify

HIT = 1


def failed(run_dir: Path) -> set[str]:
    return {gate.name for gate in judge(run_dir).gates if gate.verdict is not Verdict.PASS}


# The definition ---------------------------------------------------------------


def test_a_table_has_the_digest_of_the_tensors_that_it_hashes():
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(8, 3, 5, generator=generator) for name in ("b.weight", "a.weight")}
    entries = [
        (name, shard, high, low)
        for name, x in tensors.items()
        for shard, (high, low) in enumerate(bits.shard_hashes(x).tolist())
    ]
    assert any(high < 0 for _, _, high, _ in entries)
    table = shard_table(reversed(entries))
    assert list(table) == ["a.weight", "b.weight"]
    assert all(len(shards) == 8 and {len(words) for words in shards} == {32} for shards in table.values())
    assert table_digest(table) == bits.digest(entries)
    # The witness: one bit of one shard.
    tensors["b.weight"].view(torch.int32)[7, 2, 4] ^= 1
    changed = bits.shard_hashes(tensors["b.weight"])[7].tolist()
    other = [entry for entry in entries if entry[:2] != ("b.weight", 7)] + [("b.weight", 7, *changed)]
    assert table_digest(shard_table(other)) == bits.digest(other) != bits.digest(entries)


@pytest.mark.parametrize("shards", [[0, 2], [1], [0, 0]])
def test_a_table_with_a_lost_or_doubled_shard_is_refused(shards):
    with pytest.raises(ValueError, match="was expected"):
        shard_table([("w", shard, 1, 2) for shard in shards])


def test_an_update_is_built_from_plain_values_and_fills_in_the_bits():
    table = {"w": ["0" * 32]}
    update = UpdateDigests.of(loss=-0.0, gradients=table, gradient_norm=0.1, optimizer=table, weights=table)
    assert (update.loss_bits, update.gradient_norm_bits) == ("8000000000000000", float64_bits(0.1))
    assert update.gradients == {"w": ("0" * 32,)}
    digests = RolloutDigests(initial=None, updates=(update,))
    assert RolloutDigests.model_validate_json(digests.to_bytes()) == digests


def test_numbers_that_are_not_finite_survive_the_round_trip():
    table = {"w": ["0" * 32]}
    update = UpdateDigests.of(
        loss=math.nan, gradients=table, gradient_norm=math.inf, optimizer=table, weights=table
    )
    digests = RolloutDigests(initial=None, updates=(update,))
    read = RolloutDigests.model_validate_json(digests.to_bytes()).updates[0]
    assert math.isnan(read.loss)
    assert (read.loss_bits, read.gradient_norm) == (float64_bits(math.nan), math.inf)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"loss_bits": "0" * 16}, "loss_bits 0000000000000000 is not the bit pattern of 0.1"),
        ({"gradient_norm_bits": float64_bits(math.nan)}, "is not the bit pattern"),
        ({"gradient_norm": math.nan}, "is not the bit pattern of nan"),
        ({"weights": {"w": ["0" * 31]}}, "should match pattern"),
        ({"weights": {"w": []}}, "at least 1 item"),
        ({"gradient": {}}, "Extra inputs"),
    ],
)
def test_a_malformed_update_is_refused(change, fault):
    said = make_digests(0, make_facts(0, make_tensors(0)))["updates"][0]
    said.update(loss=0.1, loss_bits=float64_bits(0.1))
    UpdateDigests(**said)
    with pytest.raises(ValueError, match=fault):
        UpdateDigests(**{**said, **change})


def test_only_a_nan_has_the_bits_of_a_nan():
    assert bits_fit("fff8000000000001", math.nan)
    assert not bits_fit(float64_bits(1.0), math.nan)
    assert not bits_fit(float64_bits(0.0), -0.0)


# The recorder -----------------------------------------------------------------


@pytest.mark.parametrize(("index", "fault"), [(0, "weights are missing"), (1, "belong to rollout 0")])
def test_initial_weights_stand_in_the_file_of_rollout_0_alone(tmp_path, index, fault):
    with Recorder(tmp_path) as recorder:
        for number in range(index + 1):
            tensors = make_tensors(number)
            said = make_facts(number, tensors)
            hashed = make_digests(number, said)
            if number == index:
                hashed["initial"] = None if index == 0 else plain_table("weights", 0)
                with pytest.raises(EvidenceError, match=fault):
                    recorder.rollout(
                        number, tensors, RolloutFacts(**said), {}, digests=RolloutDigests(**hashed)
                    )
            else:
                recorder.rollout(number, tensors, RolloutFacts(**said), {}, digests=RolloutDigests(**hashed))
    assert (
        len(list((tmp_path / "rollouts").iterdir())) == len(list((tmp_path / "digests").iterdir())) == index
    )


def test_digest_files_are_written_before_the_row_and_sealed(tmp_path):
    run_dir = write_run(tmp_path / "run")
    assert seal(run_dir).verdict is Verdict.PASS
    paths = [f"digests/0000{index}.json" for index in range(3)]
    assert set(paths) <= set(artifact_paths(run_dir))
    said = json.loads((run_dir / paths[0]).read_text())
    assert list(said) == ["schema_version", "initial", "updates"]
    assert sorted(said["initial"]) == sorted(said["updates"][0]["gradients"]) == sorted(NAMES)
    assert json.loads((run_dir / paths[1]).read_text())["initial"] is None
    path = run_dir / paths[HIT]
    path.write_bytes(path.read_bytes().replace(b"a", b"b", 1))
    assert f"{paths[HIT]} was changed after the run was sealed" in verify(run_dir).damage


def test_a_resumed_run_forgets_later_digests_and_needs_earlier_ones(tmp_path):
    run_dir = write_run(tmp_path / "run")
    with Recorder(run_dir, first=1):
        assert [path.name for path in (run_dir / "digests").iterdir()] == ["00000.json"]
    digests_path(run_dir, 0).unlink()
    with pytest.raises(EvidenceError, match="evidence of an earlier rollout is missing"):
        Recorder(run_dir, first=1)


# The gates --------------------------------------------------------------------


def in_update(change: Callable[[dict[str, Any]], None]) -> Callable[[int, dict[str, Any]], None]:
    return lambda index, digests: change(digests["updates"][-1]) if index == HIT else None


def flip(table: dict[str, list[str]], name: str = NAMES[0], shard: int = 0) -> None:
    words = table[name][shard]
    table[name][shard] = f"{int(words, 16) ^ 1:032x}"


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ("gradients", "gradient_digest"),
        ("optimizer", "optimizer_digest"),
        ("weights", "weights_digest"),
    ],
)
def test_a_table_that_consistency_json_contradicts_fails_the_evidence_gate(tmp_path, table, named):
    def plant(update: dict[str, Any]) -> None:
        flip(update[table], next(iter(update[table])))

    run_dir = write_run(tmp_path / "run", digests=in_update(plant))
    assert failed(run_dir) == {"evidence"}
    assert judge(run_dir).reasons[0].startswith(f"evidence: digests/00001.json: {named} of its tables is ")


def test_initial_weights_that_the_manifest_contradicts_fail_the_evidence_gate(tmp_path):
    def plant(index: int, digests: dict[str, Any]) -> None:
        if index == 0:
            flip(digests["initial"])

    run_dir = write_run(tmp_path / "run", digests=plant)
    assert failed(run_dir) == {"evidence"}
    assert f"but manifest.json says {weights(0)}" in judge(run_dir).reasons[0]


def test_a_norm_that_consistency_json_contradicts_fails_the_evidence_gate(tmp_path):
    def plant(update: dict[str, Any]) -> None:
        near = math.nextafter(update["gradient_norm"], 1.0)
        update.update(gradient_norm=near, gradient_norm_bits=float64_bits(near))

    run_dir = write_run(tmp_path / "run", digests=in_update(plant))
    assert failed(run_dir) == {"evidence"}
    assert "digests/00001.json: update 0: gradient_norm_bits is" in judge(run_dir).reasons[0]


def test_a_nan_norm_contradicts_nothing(tmp_path):
    def plant(index: int, facts: dict[str, Any]) -> None:
        if index == HIT:
            set_gradient_norm(facts, math.nan)

    assert failed(write_run(tmp_path / "run", facts=plant)) == {"non_vacuous"}


def test_a_lost_update_fails_the_evidence_gate(tmp_path):
    def plant(index: int, digests: dict[str, Any]) -> None:
        if index == HIT:
            digests["updates"].append(digests["updates"][0])

    run_dir = write_run(tmp_path / "run", digests=plant)
    assert failed(run_dir) == {"evidence"}
    assert "2 updates, but consistency.json has 1" in judge(run_dir).reasons[0]


def test_a_lost_a_damaged_and_a_stray_digest_file_are_named(tmp_path):
    run_dir = write_run(tmp_path / "run")
    digests_path(run_dir, HIT).unlink()
    (run_dir / "digests" / "1.json").write_text("{}")
    digests_path(run_dir, 0).write_text("{}")
    reasons = judge(run_dir).reasons
    assert failed(run_dir) == {"counts", "evidence"}
    assert any(reason.startswith("evidence: digests/00000.json is damaged") for reason in reasons)
    assert "counts: digests/1.json belongs to no rollout" in reasons
    assert "counts: no digest file for rollout 1" in reasons
