"""No content of a run folder, and no place to print to, ends a command in a traceback."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from compare_fixtures import LAYOUT_A, LAYOUT_B, make_run
from report_fixtures import RUN_ID, edit_json, ran, write_run

import rlsp
from rlsp.cli import compare as compare_command
from rlsp.cli import verify as verify_command
from rlsp.report import manifest as manifest_file
from rlsp.report.verdict import VerdictDocument, seal, verify

DOCUMENTS = ("VERDICT.json", "manifest.json", "consistency.json", "digests/00000.json")
DEEP = 100_000
ROUNDS, SEED = 40, 0


@pytest.fixture(scope="module", autouse=True)
def one_revision() -> Iterator[None]:
    """Ask git once: its answer takes longer than everything else here."""
    with pytest.MonkeyPatch.context() as patch:
        revision = manifest_file.code_revision()
        patch.setattr(manifest_file, "code_revision", lambda: revision)
        yield


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return make_run(folder / "a", LAYOUT_A), make_run(folder / "b", LAYOUT_B)


# Contents --------------------------------------------------------------------------

BROKEN = {
    "deep lists": b"[" * DEEP + b"]" * DEEP,
    "deep objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "a huge integer": b"9" * 10_000,
    "a long line": b'"' + b"x" * 5_000_000 + b'"',
    "a surrogate": b'"\\ud800"',
    "nothing": b"\0" * 100,
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.parametrize("name", [*DOCUMENTS, "metrics.jsonl", "rollouts/00000.safetensors"])
def test_no_file_however_broken_stops_verification_or_sealing(sealed, name, content):
    (sealed / name).write_bytes(content + b"\n")
    verification = verify(sealed)
    assert verification.exit_status == 3
    assert f"{name} was changed after the run was sealed" in verification.damage or name in DOCUMENTS
    seal(sealed)
    assert all(len(line) < 1000 for line in (*verification.damage, *verification.judgement.reasons))


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("manifest.json", ("config", "num_rollouts"), 10**400),
        ("manifest.json", ("config", "parallel", "cp"), 10**400),
        ("manifest.json", ("config", "parallel", "tp"), 0),
        ("manifest.json", ("config", "samples_per_prompt"), 0),
        ("manifest.json", ("config", "samples_per_prompt"), 3),
        ("manifest.json", ("config", "numerics", "virtual_tp"), 10**400),
        ("manifest.json", ("config", "model", "vocab_size"), 10**400),
        ("manifest.json", ("config", "learning_rate"), 1e400),
        ("manifest.json", ("layout", "tp"), 0),
        ("manifest.json", ("rollout_layout", "engines"), 0),
        ("manifest.json", ("startup", "agreement"), []),
        ("manifest.json", ("startup", "certificate"), {"digest": 10**400}),
        ("consistency.json", ("rollouts", 0, "active_tokens"), 10**400),
        ("consistency.json", ("rollouts", 0, "index"), -1),
        ("consistency.json", ("rollouts", 0, "index"), 10**18),
        ("consistency.json", ("rollouts", 0, "ulp_histogram"), {"many": 1}),
        ("consistency.json", ("rollouts", 0, "ulp_histogram"), {"9" * 5000: 1}),
        ("consistency.json", ("rollouts", 0, "sums", "weight_squared"), 0.0),
        ("consistency.json", ("rollouts", 0, "sums", "log_weight_max"), 1e308),
        ("consistency.json", ("rollouts", 0, "sums", "absolute"), "NaN"),
        ("consistency.json", ("rollouts", 0, "cp_tokens"), [10**400]),
        ("consistency.json", ("rollouts", 0, "routes"), {"x" * 100_000: {"y": 1}}),
        ("consistency.json", ("rollouts", 0, "sources"), {}),
        ("consistency.json", ("rollouts",), []),
        ("digests/00000.json", ("updates",), []),
        ("digests/00000.json", ("updates", 0, "weights"), {}),
        ("digests/00000.json", ("updates", 0, "loss"), 10**400),
    ],
)
def test_no_value_however_wild_stops_verification_or_comparison(sealed, pair, name, path, value):
    def plant(said: Any) -> None:
        for key in path[:-1]:
            said = said[key]
        said[path[-1]] = value

    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        edit_json(sealed / name, plant)
    finally:
        sys.set_int_max_str_digits(limit)
    assert verify(sealed).exit_status == 3
    seal(sealed)
    assert verify(sealed).exit_status in (3, 4)
    assert compare_command.main([str(sealed), str(pair[1])]) == 4


def test_random_edits_of_documents_stop_nothing(sealed, pair, capsys):
    # Every edit is sealed again, so that only the judging itself is tried.
    numbers = random.Random(SEED)
    wild = (None, True, -1, 0, 1, 2**63, 1e308, "", "NaN", "x", [], {}, [[]], {"a": {}}, "2026")
    for _ in range(ROUNDS):
        name = numbers.choice(("manifest.json", "consistency.json", "digests/00001.json", "metrics.jsonl"))
        kept = (sealed / name).read_bytes()
        if name == "metrics.jsonl":
            rows = [json.loads(line) for line in kept.splitlines()]
            _mutate(numbers, rows, wild)
            (sealed / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            edit_json(sealed / name, lambda said: _mutate(numbers, said, wild))
        seal(sealed)
        assert verify_command.main([str(sealed)]) in (0, 1, 3, 4)
        assert compare_command.main([str(sealed), str(sealed)]) in (0, 3, 4)
        capsys.readouterr()
        (sealed / name).write_bytes(kept)


def _mutate(numbers: random.Random, place: Any, wild: tuple[Any, ...]) -> None:
    """Replace, remove or double one value somewhere below `place`."""
    while True:
        keys = list(place) if isinstance(place, dict) else range(len(place))
        key = numbers.choice(list(keys))
        below = place[key]
        if isinstance(below, dict | list) and below and numbers.random() < 0.85:
            place = below
            continue
        action = numbers.random()
        if action < 0.2:
            del place[key]
        elif action < 0.3 and isinstance(place, list):
            place.append(below)
        else:
            place[key] = numbers.choice(wild)
        return


# Where the answer goes -------------------------------------------------------------

COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "verify": lambda run: ["-m", "rlsp.cli.verify", str(run)],
    "verify --json": lambda run: ["-m", "rlsp.cli.verify", "--json", str(run)],
    "verify --help": lambda run: ["-m", "rlsp.cli.verify", "--help"],
    "compare": lambda run: ["-m", "rlsp.cli.compare", str(run), str(run)],
    "compare --json": lambda run: ["-m", "rlsp.cli.compare", "--json", str(run), str(run)],
}


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line}"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def command(name: str, run: Path) -> str:
    return " ".join([sys.executable, *COMMANDS[name](run)])


@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_is_one_message_and_status_2(sealed, name):
    done = shell(f"{command(name, sealed)} > /dev/full")
    program = "rlsp-" + name.split()[0]
    assert done.stderr == f"{program}: the answer cannot be written: No space left on device\n"
    assert done.returncode == 2


@pytest.mark.parametrize("name", COMMANDS)
def test_a_reader_that_goes_away_changes_no_status(sealed, name):
    # The reader is gone before the first word.
    done = shell(f"{{ {command(name, sealed)}; echo status $? >&2; }} | true")
    assert done.stderr == "status 0\n"


def test_the_first_line_alone_can_be_read(sealed):
    done = shell(f"{command('verify', sealed)} | head -1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["gate", "verdict", "why"]


@pytest.mark.parametrize("name", COMMANDS)
def test_closed_outputs_leave_the_status(sealed, name):
    assert shell(f"{command(name, sealed)} >&- 2>&-").returncode == 0


def test_an_encoding_that_lacks_a_character_shows_it_escaped(sealed):
    (sealed / "ä").write_text("")
    done = shell(command("verify", sealed), PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (done.returncode, done.stderr) == (3, "")
    assert "damaged: \\xe4 was added after the run was sealed" in done.stdout


def test_nothing_is_wrapped_where_there_is_no_terminal(tmp_path, capsys):
    def plant(index: int, facts: dict[str, Any]) -> None:
        facts["routes"] = ran(train__attention={"strict": 12, "native " + "and " * 60: 1})

    run_dir = write_run(tmp_path / "run", facts=plant)
    seal(run_dir)
    assert verify_command.main([str(run_dir)]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if "fell back from strict" in line]) == 3
    assert lines[-1] == f"{RUN_ID}: FAIL"
    assert all(line == line.rstrip() for line in lines)


# Elsewhere -------------------------------------------------------------------------

WITHOUT_TORCH = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "megatron", "wandb", "hydra", "omegaconf", "transformers"):
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Refuse())
from rlsp.cli import compare, verify

run, sweep = sys.argv[1:]
print(verify.main([run]), compare.main([run, run]), verify.main([sweep]))
"""


def test_a_copy_elsewhere_that_cannot_be_written_is_verified_without_torch(sealed, tmp_path):
    from rlsp.report.sweep import JobOutcome, summarise

    sweep = tmp_path / "sweep"
    shutil.copytree(sealed, sweep / "0")
    summarise(sweep, [JobOutcome(0, ("seed=7",), 0, sweep / "0")])
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for path in sorted(tmp_path.rglob("*"), reverse=True):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_TORCH, str(sealed), str(sweep)],
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
            env={**os.environ, "PYTHONPATH": str(Path(rlsp.__file__).parents[1])},
        )
    finally:
        for path in tmp_path.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "0 0 0"
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}


def test_a_verdict_says_the_same_wherever_its_folder_lies(sealed, tmp_path):
    before = VerdictDocument.read(sealed / "VERDICT.json")
    moved = Path(shutil.copytree(sealed, tmp_path / "another machine" / "ü"))
    verification = verify(moved)
    assert (verification.damage, verification.stored) == ((), before)
    (tmp_path / "latest").symlink_to(moved)
    assert verify(tmp_path / "latest").damage == ()
