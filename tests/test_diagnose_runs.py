"""Diagnoses of runs: inside one that mismatches, afterwards by rlsp-diagnose, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from command import raising
from planted_boundaries import flipped
from ranks import run_ranks

import rlsp.launch
from rlsp import rederive, run
from rlsp.board import Board, Place
from rlsp.cli import diagnose as command
from rlsp.cli import machine
from rlsp.config import JOB_PATH, Job
from rlsp.ending import Abort
from rlsp.launch import job_path
from rlsp.model.attention import CoreAttention
from rlsp.report import manifest, verdict
from rlsp.report import tensors as tensor_file
from rlsp.report.consistency import ConsistencyReport
from rlsp.report.diagnose_records import Answer, Diagnosis, Outcome, Request, answer_path, request_path
from rlsp.report.files import artifact_paths, sha256_file

RUN_ID, STARTED = "20260101-000000-abcdef", "2026-01-01T00:00:00+00:00"
SMALL = ("prompts_per_rollout=2", "samples_per_prompt=2", "max_response_tokens=6", "entropy_coef=0.01")
TWO_RANKS = (*SMALL, "num_rollouts=1", "parallel=cp1_tp2_sp2", "tracker=none")
# The first prompt of seed 5 has a limit of 0 tokens.
ONE_RANK = (
    *SMALL,
    "num_rollouts=2",
    "parallel=cp1_tp1_sp1",
    "seed=5",
    "task.response_limit=6",
    "tracker=none",
)


def place_of(rank: int, world_size: int, folder: str) -> Place:
    board = Board.join(Path(folder) / "logs" / "board", world_size).writer(rank)
    return Place(rank=rank, world_size=world_size, local_rank=rank, init_method="", board=board)


def prepared(folder: Path, config: Any) -> Job:
    job = Job(config, RUN_ID, str(folder), (), ("rlsp",), STARTED)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    Board.create(folder / "logs" / "board", config.world_size)
    return job


@contextmanager
def faulty_decode() -> Iterator[None]:
    """Flip the last bit of one element of every cached attention of layer 1: the rollout's side is wrong."""
    exact = CoreAttention._to_cache

    def faulty(self: CoreAttention, *arguments: Any) -> Any:
        out = exact(self, *arguments)
        return flipped(out, (-1, 0)) if self.layer_number == 2 else out

    with mock.patch.object(CoreAttention, "_to_cache", faulty):
        yield


def live_then_ask(rank: int, world_size: int, job: Job, scratch: str, fault: bool) -> None:
    """Live a run, faulty or not; afterwards, without the fault, replay what mismatched or sample 0."""
    with faulty_decode() if fault else nullcontext():
        run.live(job, place_of(rank, world_size, job.run_dir))
    asked = Job(job.config, RUN_ID, scratch, (), (), STARTED)
    rederive.live(asked, place_of(rank, world_size, job.run_dir))


def judged(folder: Path, compose: Any, *overrides: str, fault: bool) -> tuple[verdict.Judgement, Diagnosis]:
    """Run, replay sample 0 without the fault, seal; return the judgement and the later diagnosis."""
    config = compose(*TWO_RANKS, *overrides)
    job, scratch = prepared(folder / "run", config), folder / "scratch"
    scratch.mkdir()
    manifest.begin(job, {})
    Request(run_dir=job.run_dir, rollout=0, sample=0, notes=("a note",)).write(request_path(scratch))
    run_ranks(config.world_size, live_then_ask, job, str(scratch), fault, timeout_s=120)
    manifest.finish(job.run_dir, STARTED, manifest.Status.FINISHED)
    answer = Answer.read(answer_path(scratch)).diagnosis
    assert answer is not None
    return verdict.seal(job.run_dir), answer


# Inside a run -----------------------------------------------------------------


def test_a_run_that_mismatches_diagnoses_itself_and_seals_what_it_found(tmp_path: Path, compose: Any) -> None:
    """The fault is one of the modules, which an engine that is compiled decodes without."""
    torch_alone = "numerics.compiled=false"
    judgement, later = judged(tmp_path, compose, "diagnose=true", torch_alone, fault=True)
    assert judgement.verdict.value == "FAIL"
    folder = tmp_path / "run"
    found = Diagnosis.read(folder / "diagnose" / "00000.json")
    record = ConsistencyReport.read(folder / "consistency.json").rollouts[0]
    assert record.first_row_mismatch is not None
    assert found.sample == record.first_row_mismatch.sample
    assert found.outcome is Outcome.DIFFERENT
    assert found.first is not None
    assert (found.first.boundary, found.first.layer) == ("core attention", 1)
    assert set(found.recorded.model_dump(exclude={"tokens"}).values()) == {0}, "the fault came back"
    assert verdict.verify(folder).damage == ()
    assert "diagnose/00000.json" in artifact_paths(folder)

    # The fault is gone: both sides are equal now, but the rollout's is not what was recorded.
    assert later.outcome is Outcome.EQUAL
    assert later.recorded.rollout_row > 0
    assert later.recorded.train_row == later.recorded.train_logprob == 0
    assert later.notes == ("a note",)


def test_a_clean_run_has_nothing_to_diagnose_and_the_same_bits(tmp_path: Path, compose: Any) -> None:
    records = {}
    for overrides in ((), ("diagnose=true",)):
        folder = tmp_path / str(len(overrides))
        judgement, later = judged(folder, compose, *overrides, fault=False)
        assert judgement.verdict.value == "PASS"
        assert later.outcome is Outcome.EQUAL
        assert not (folder / "run" / "diagnose").exists()
        records[overrides] = ConsistencyReport.read(folder / "run" / "consistency.json").to_bytes()
    assert len(set(records.values())) == 1


def test_native_arithmetic_is_replayed_as_it_ran(tmp_path: Path, compose: Any) -> None:
    """Its bits depend on what stands in a batch: a replay of the sequence alone would give others."""
    _, later = judged(tmp_path, compose, "numerics=native", fault=False)
    assert set(later.recorded.model_dump(exclude={"tokens"}).values()) == {0}


# Afterwards -------------------------------------------------------------------


def live_alone(rank: int, world_size: int, job: Job) -> None:
    run.live(job, place_of(rank, world_size, job.run_dir))


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory, compose: Any) -> Path:
    """Return the folder of a run on one rank with two rollouts, whose samples 0 and 1 are empty."""
    folder = tmp_path_factory.mktemp("sealed") / "run"
    job = prepared(folder, compose(*ONE_RANK))
    path = job_path(job)
    path.parent.mkdir()
    path.write_text(job.to_json())
    manifest.begin(job, {})
    run_ranks(1, live_alone, job, timeout_s=120)
    manifest.finish(folder, STARTED, manifest.Status.FINISHED)
    verdict.seal(folder)
    return folder


def diagnosed(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = command.main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def contents(folder: Path) -> dict[str, str]:
    return {str(path): sha256_file(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_command_replays_in_ranks_of_its_own_and_leaves_the_run_alone(
    sealed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(sealed)
    status, out, err = diagnosed(capsys, sealed, "--rollout", 1, "--sample", 3, "--json")
    assert (status, err) == (0, "")
    document = json.loads(out)
    assert document["outcome"] == "equal"
    assert (document["rollout"], document["sample"], document["updates"]) == (1, 3, 1)
    assert (
        document["weights_digest"]
        == ConsistencyReport.read(sealed / "consistency.json").rollouts[1].trainer_weights_digest
    )
    assert contents(sealed) == before


def test_a_rank_that_fails_is_a_crash_that_says_why(
    sealed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_ENTRY", "launch_entries:raise_at_once")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    status, out, err = diagnosed(capsys, sealed, "--rollout", 0, "--sample", 3)
    assert (status, out) == (1, "")
    assert "rank 0 failed: ValueError: at once" in err
    shutil.rmtree(Path(err.rpartition("logs: ")[2].strip()).parent)


def ask(rank: int, world_size: int, job: Job, fault: bool) -> None:
    with faulty_decode() if fault else nullcontext():
        rederive.live(job, place_of(rank, world_size, job.run_dir))


@pytest.fixture
def at_hand(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Let the command's ranks be the harness's: no imports anew, and faults can be planted."""

    def use(fault: bool) -> None:
        def compute(job: Job, entry: str) -> Abort | None:
            assert entry == "rlsp.rederive:diagnose_rank"
            run_ranks(1, ask, prepared(Path(job.run_dir), job.config) and job, fault, timeout_s=120)
            return None

        monkeypatch.setattr(rlsp.launch, "compute", compute)

    return use


def test_a_difference_is_printed_with_both_values_and_their_ranks(
    sealed: Path, capsys: pytest.CaptureFixture[str], at_hand: Callable[[bool], None]
) -> None:
    at_hand(True)
    status, out, err = diagnosed(capsys, sealed, "--rollout", 0, "--sample", 2)
    assert (status, err) == (3, "")
    lines = out.splitlines()
    at = next(
        i for i, line in enumerate(lines) if line.startswith("first difference: layer 1 core attention, ")
    )
    assert lines[at].endswith(", element 0 (bfloat16)")
    assert [line.split()[0] for line in lines[at + 1 : at + 3]] == ["training", "rollout"]
    assert all(" 0x" in line and line.endswith("on rank 0") for line in lines[at + 1 : at + 3])
    assert any("layer 1 core attention" in line and "FIRST DIFFERENCE" in line for line in lines[:at])
    assert any(line.startswith("replayed otherwise than recorded: the rollout's rows, ") for line in lines)


def test_other_weights_than_the_recorded_ones_prove_nothing(
    sealed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], at_hand: Callable[[bool], None]
) -> None:
    at_hand(False)
    for rollout, name in ((0, "trainer_weights_digest"), (1, "trainer_weights_digest")):
        changed = Path(shutil.copytree(sealed, tmp_path / str(rollout)))
        path = changed / "consistency.json"
        document = json.loads(path.read_text())
        document["rollouts"][rollout][name] = "0" * 64
        path.write_text(json.dumps(document))
        status, out, err = diagnosed(capsys, changed, "--rollout", rollout, "--sample", 3)
        assert (status, out) == (2, "")
        assert f"the weights of training at rollout {rollout}, made again, have the digest" in err
        assert f"but the run recorded {'0' * 64}" in err


def test_updates_that_lead_elsewhere_are_noticed_where_they_part(
    sealed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], at_hand: Callable[[bool], None]
) -> None:
    at_hand(False)
    changed = Path(shutil.copytree(sealed, tmp_path / "run"))
    path = tensor_file.rollout_path(changed, 0)
    stored = tensor_file.read(path)
    stored["advantages"] = 1 - stored["advantages"]
    path.write_bytes(tensor_file.encode(stored))
    status, _, err = diagnosed(capsys, changed, "--rollout", 1, "--sample", 3)
    assert status == 2
    assert "the weights after rollout 0, made again, have the digest" in err


def test_a_prompt_that_the_config_does_not_make_is_refused(
    sealed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], at_hand: Callable[[bool], None]
) -> None:
    at_hand(False)
    changed = Path(shutil.copytree(sealed, tmp_path / "run"))
    path = tensor_file.rollout_path(changed, 0)
    stored = tensor_file.read(path)
    tokens = stored["tokens"].copy()
    tokens[3, 0] += 1
    path.write_bytes(tensor_file.encode({**stored, "tokens": tokens}))
    status, _, err = diagnosed(capsys, changed, "--rollout", 0, "--sample", 2)
    assert status == 2
    assert "sample 3 was recorded with another prompt" in err


REFUSED = [
    ((), "no token of this run mismatches: name a sequence by --rollout and --sample"),
    (("--rollout", 1), "no token of rollout 1 mismatches: name a sequence by --sample"),
    (("--sample", 1), "--sample needs --rollout"),
    (("--rollout", 2, "--sample", 0), "--rollout 2: legal: 0..1"),
    (("--rollout", -1, "--sample", 0), "--rollout -1: legal: 0..1"),
    (("--rollout", 0, "--sample", 4), "--sample 4: legal: 0..3"),
    (("--rollout", 0, "--sample", 0), "sample 0 of rollout 0 has no active token to replay"),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSED)
def test_what_cannot_be_replayed_is_refused_in_words(
    sealed: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[object, ...], words: str
) -> None:
    status, out, err = diagnosed(capsys, sealed, *arguments)
    assert (status, out) == (2, "")
    assert err.strip() == f"rlsp-diagnose: refused: {words}"


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diagnosed(capsys, tmp_path)[::2] == (2, f"rlsp-diagnose: refused: {tmp_path} is no run folder\n")
    assert diagnosed(capsys, tmp_path / "nix")[0] == 2


def test_damaged_files_are_refused_or_noted(
    sealed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], at_hand: Callable[[bool], None]
) -> None:
    at_hand(False)
    changed = Path(shutil.copytree(sealed, tmp_path / "run"))
    with (changed / "metrics.jsonl").open("a") as file:
        file.write("{}\n")
    status, out, _ = diagnosed(capsys, changed, "--rollout", 0, "--sample", 2)
    assert status == 0
    assert "note: damaged evidence: metrics.jsonl was changed after the run was sealed" in out
    (changed / JOB_PATH).write_text("{}")
    status, _, err = diagnosed(capsys, changed, "--rollout", 0, "--sample", 2)
    assert status == 2
    assert ".hydra/job.json is no job of this version" in err
    for content in (b"[" * 100_000, b"\xff", b"[]", b""):
        (changed / JOB_PATH).write_bytes(content)
        assert diagnosed(capsys, changed, "--rollout", 0, "--sample", 2)[0] == 2
    (changed / JOB_PATH).unlink()
    os.mkfifo(changed / JOB_PATH)
    status, _, err = diagnosed(capsys, changed, "--rollout", 0, "--sample", 2)
    assert status == 2
    assert ".hydra/job.json cannot be read: it is a named pipe" in err
    (changed / "rollouts" / "00000.safetensors").unlink()
    assert diagnosed(capsys, changed, "--rollout", 0, "--sample", 2)[0] == 2


def test_a_run_of_a_gpu_is_refused_where_there_is_none(
    sealed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = Path(shutil.copytree(sealed, tmp_path / "run"))
    path = changed / JOB_PATH
    job = json.loads(path.read_text())
    job["config"]["device"].update(kind="cuda", backend="nccl")
    path.write_text(json.dumps(job))
    monkeypatch.setattr(machine, "_DEVICES", tmp_path)
    monkeypatch.setattr(command, "_replayed", raising(AssertionError("ranks were started")))
    status, out, err = diagnosed(capsys, changed, "--rollout", 0, "--sample", 2)
    assert (status, out) == (2, "")
    assert err.startswith("rlsp-diagnose: refused: device.kind=cuda: legal: cpu (neither ")


def test_the_command_starts_without_torch() -> None:
    code = "import sys, rlsp.cli.diagnose, rlsp.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
