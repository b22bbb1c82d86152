from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from report_fixtures import ENDED_AT, RUN_ID, make_job, write_run

from rlsp.cli.verify import main
from rlsp.report import manifest as manifest_file
from rlsp.report.files import EvidenceError, artifact_paths, sha256_file
from rlsp.report.gates import Verdict
from rlsp.report.verdict import VerdictDocument, judge, seal, verify


@pytest.fixture(scope="module")
def sealed_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = write_run(tmp_path_factory.mktemp("sealed") / "run")
    hydra = run_dir / ".hydra"
    hydra.mkdir()
    (hydra / "config.yaml").write_text("seed: 7\n")
    (run_dir / "wandb").mkdir()
    (run_dir / "wandb" / "debug.log").write_text("started\n")
    assert seal(run_dir).verdict is Verdict.PASS
    return run_dir


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def run_main(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


# Sealing ----------------------------------------------------------------------


def test_the_verdict_seals_every_file_but_logs_and_wandb(sealed):
    document = json.loads((sealed / "VERDICT.json").read_text())
    assert document["verdict"] == "PASS"
    assert document["reasons"] == []
    assert document["run_id"] == RUN_ID
    expected = {".hydra/config.yaml", "consistency.json", "manifest.json", "metrics.jsonl", "report.html"}
    expected |= {f"rollouts/0000{index}.safetensors" for index in range(3)}
    expected |= {f"digests/0000{index}.json" for index in range(3)}
    assert set(document["artifacts"]) == expected
    assert all(sha256_file(sealed / path) == digest for path, digest in document["artifacts"].items())


def test_a_sealed_run_verifies(sealed):
    verification = verify(sealed)
    assert verification.damage == ()
    assert (verification.judgement.verdict, verification.exit_status) == (Verdict.PASS, 0)


def test_logs_and_wandb_may_still_be_written_after_the_seal(sealed):
    (sealed / "logs" / "rank-00.log").write_text("ended\n")
    (sealed / "wandb" / "debug.log").write_text("ended\n")
    assert verify(sealed).damage == ()


def test_the_seal_does_not_depend_on_where_the_folder_lies(sealed, tmp_path):
    moved = shutil.move(sealed, tmp_path / "elsewhere")
    assert verify(moved).damage == ()


def test_what_a_killed_writer_left_is_no_evidence(tmp_path):
    run_dir = write_run(tmp_path / "run")
    (run_dir / "rollouts" / "00003.safetensors.partial").write_bytes(b"half")
    (run_dir / "VERDICT.json.partial").write_bytes(b"half")
    assert seal(run_dir).verdict is Verdict.PASS
    assert not [path for path in run_dir.rglob("*.partial")]


# Damage -----------------------------------------------------------------------


def test_a_flipped_bit_is_noticed_in_every_file(sealed):
    numbers = random.Random(0)
    for path in artifact_paths(sealed):
        file = sealed / path
        kept, size = file.read_bytes(), file.stat().st_size
        for bit in {0, 8 * size - 1, numbers.randrange(8 * size), numbers.randrange(8 * size)}:
            flip(file, bit)
            verification = verify(sealed)
            assert f"{path} was changed after the run was sealed" in verification.damage
            assert verification.exit_status == 3
            file.write_bytes(kept)
    assert verify(sealed).damage == ()


def test_a_flipped_bit_is_noticed_in_the_verdict_itself(sealed):
    # Every bit of every eighth byte, so that blanks, names, digests and numbers are all hit.
    path = sealed / "VERDICT.json"
    kept = path.read_bytes()
    for byte in range(0, len(kept), 8):
        for bit in range(8):
            flip(path, 8 * byte + bit)
            assert not _is_sound(path), kept[max(0, byte - 20) : byte + 20]
            path.write_bytes(kept)
    assert _is_sound(path)


def _is_sound(path: Path) -> bool:
    try:
        document = VerdictDocument.read(path)
    except EvidenceError:
        return False
    return document.self_digest == document.digest() and path.read_bytes() == document.to_bytes()


def test_a_changed_verdict_is_named_and_the_run_judged_again(sealed):
    path = sealed / "VERDICT.json"
    path.write_text(path.read_text().replace('"PASS"', '"INCONCLUSIVE"', 1))
    verification = verify(sealed)
    assert "VERDICT.json was changed after it was sealed" in verification.damage
    assert "VERDICT.json says INCONCLUSIVE, the files give PASS" in verification.damage
    assert verification.exit_status == 3


def test_a_verdict_that_was_sealed_again_over_a_lie_is_judged_from_the_files(sealed):
    path = sealed / "VERDICT.json"
    told = VerdictDocument.read(path)
    gates = tuple(gate.model_copy(update={"verdict": Verdict.FAIL}) for gate in told.gates)
    lie = told.model_copy(update={"verdict": Verdict.FAIL, "gates": gates})
    lie.model_copy(update={"self_digest": lie.digest()}).write(path)
    damage = verify(sealed).damage
    assert "VERDICT.json says FAIL, the files give PASS" in damage
    assert "VERDICT.json: gate bits is now PASS" in damage


def test_a_changed_blank_in_the_verdict_is_noticed(sealed):
    path = sealed / "VERDICT.json"
    path.write_bytes(path.read_bytes() + b"\n")
    assert verify(sealed).damage == ("VERDICT.json was changed after it was sealed",)


def test_missing_and_added_files_are_named(sealed):
    (sealed / "rollouts" / "00001.safetensors").unlink()
    (sealed / "notes.txt").write_text("looks good\n")
    verification = verify(sealed)
    assert "rollouts/00001.safetensors is missing" in verification.damage
    assert "notes.txt was added after the run was sealed" in verification.damage
    assert "VERDICT.json says PASS, the files give FAIL" in verification.damage


def test_a_run_that_was_never_sealed_is_damaged(sealed):
    (sealed / "VERDICT.json").unlink()
    verification = verify(sealed)
    assert verification.damage == ("VERDICT.json cannot be read: No such file or directory",)
    assert verification.exit_status == 3


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"verdict": "PASS"}', b"null"])
@pytest.mark.parametrize("name", ["VERDICT.json", "manifest.json", "consistency.json"])
def test_no_document_however_broken_stops_the_verification(sealed, name, content):
    (sealed / name).write_bytes(content)
    verification = verify(sealed)
    assert verification.exit_status == 3
    assert any(name in line for line in verification.damage)


@pytest.mark.parametrize("content", [b"", b"\0" * 64, b"\xff" * 64, b"\x08\0\0\0\0\0\0\0{}      "])
def test_no_tensor_file_however_broken_stops_the_verification(sealed, content):
    (sealed / "rollouts" / "00000.safetensors").write_bytes(content)
    verification = verify(sealed)
    assert verification.exit_status == 3
    assert any("00000.safetensors" in reason for reason in verification.judgement.reasons)


def test_a_pickle_is_never_loaded(sealed):
    import pickle

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (exec, ("raise AssertionError('loaded a pickle')",))

    for path in ("rollouts/00000.safetensors", "manifest.json", "consistency.json", "VERDICT.json"):
        (sealed / path).write_bytes(pickle.dumps(Evil()))
    assert verify(sealed).exit_status == 3


# Aborted runs -----------------------------------------------------------------


def test_an_aborted_run_says_so_first_and_keeps_its_evidence(tmp_path):
    run_dir = write_run(tmp_path / "run", rollouts=2, aborted="rank 3 died of SIGKILL")
    judgement = seal(run_dir, "rank 3 died of SIGKILL")
    assert (judgement.verdict, judgement.exit_status) == (Verdict.ABORTED, 1)
    assert judgement.reasons[0] == "aborted: rank 3 died of SIGKILL"
    verification = verify(run_dir)
    assert verification.damage == ()
    assert verification.exit_status == 1
    assert judge(run_dir).verdict is Verdict.ABORTED


def test_a_run_that_aborted_before_its_first_rollout_can_be_sealed_and_verified(tmp_path):
    run_dir = tmp_path / "run"
    manifest_file.begin(make_job(run_dir), {})
    manifest_file.finish(run_dir, ENDED_AT, manifest_file.Status.ABORTED, "no certificate")
    judgement = seal(run_dir, "no certificate")
    assert judgement.verdict is Verdict.ABORTED
    assert next(gate for gate in judgement.gates if gate.name == "evidence").verdict is Verdict.PASS
    assert verify(run_dir).exit_status == 1


def test_even_an_empty_folder_can_be_sealed(tmp_path):
    assert seal(tmp_path, "the disk is full").verdict is Verdict.ABORTED
    assert seal(tmp_path).verdict is Verdict.FAIL


def test_damage_to_an_aborted_run_is_damage(tmp_path):
    run_dir = write_run(tmp_path / "run", rollouts=2, aborted="stopped")
    seal(run_dir, "stopped")
    flip(run_dir / "metrics.jsonl", 100)
    assert verify(run_dir).exit_status == 3


# The command ------------------------------------------------------------------


def test_the_command_exits_0_and_shows_every_gate(sealed, capsys):
    status, out, err = run_main(capsys, str(sealed))
    assert (status, err) == (0, "")
    for name in (
        "evidence",
        "coverage",
        "bits",
        "rows",
        "non_vacuous",
        "version",
        "routes",
        "agreement",
        "counts",
    ):
        assert name in out
    assert out.rstrip().endswith(f"{RUN_ID}: PASS")


def test_the_command_prints_one_json_object(sealed, capsys):
    status, out, _ = run_main(capsys, "--json", str(sealed))
    answer = json.loads(out)
    assert status == answer["exit_status"] == 0
    assert (answer["verdict"], answer["stored_verdict"], answer["damage"]) == ("PASS", "PASS", [])
    assert {gate["verdict"] for gate in answer["gates"]} == {"PASS"}


def test_the_command_exits_3_and_names_the_damage(sealed, capsys):
    flip(sealed / "rollouts" / "00002.safetensors", 12345)
    status, out, _ = run_main(capsys, str(sealed))
    assert status == 3
    assert "damaged: rollouts/00002.safetensors was changed after the run was sealed" in out


def test_the_command_exits_3_for_a_failed_gate(tmp_path, capsys):
    run_dir = write_run(tmp_path / "run", rollouts=2)
    seal(run_dir)
    status, out, _ = run_main(capsys, str(run_dir))
    assert status == 3
    assert "DAMAGED" not in out


def test_the_command_exits_4_for_an_inconclusive_run(tmp_path, capsys):
    run_dir = write_run(tmp_path / "run", facts=lambda _, facts: facts.update(sources={}))
    seal(run_dir)
    assert run_main(capsys, str(run_dir))[0] == 4


def test_the_command_exits_1_for_an_aborted_run(tmp_path, capsys):
    run_dir = write_run(tmp_path / "run", rollouts=1, aborted="stopped")
    seal(run_dir, "stopped")
    assert run_main(capsys, str(run_dir))[0] == 1


def test_the_command_exits_2_where_there_is_no_run(tmp_path, capsys):
    assert run_main(capsys, str(tmp_path / "nowhere")) == (
        2,
        "",
        f"rlsp-verify: {tmp_path}/nowhere is no folder\n",
    )
    assert run_main(capsys, str(tmp_path))[2].endswith("is no run folder\n")
    with pytest.raises(SystemExit) as usage:
        main([])
    assert usage.value.code == 2


def test_the_command_needs_neither_torch_nor_wandb(sealed):
    code = (
        "import sys; from rlsp.cli.verify import main; status = main(sys.argv[1:]);"
        "print([name for name in ('torch', 'wandb', 'hydra') if name in sys.modules]); sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(sealed)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "[]"), done.stderr
