"""What lies in a run folder and is no regular file is damage: named, and never opened."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from compare_fixtures import LAYOUT_A, LAYOUT_B, make_run
from report_fixtures import ENDED_AT, make_job, write_run

from rlsp.report import manifest as manifest_file
from rlsp.report.compare import compare
from rlsp.report.compare_records import Outcome
from rlsp.report.files import list_contents, open_regular, shown
from rlsp.report.findings import Verdict
from rlsp.report.verdict import seal, verify

EVIDENCE = (
    "VERDICT.json",
    "manifest.json",
    "consistency.json",
    "metrics.jsonl",
    "rollouts/00001.safetensors",
    "digests/00001.json",
)


@pytest.fixture(autouse=True)
def no_hanging() -> Iterator[None]:
    """Opening a pipe that nobody writes to would wait for ever."""
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("something was waited for"))
    signal.alarm(60)
    yield
    signal.alarm(0)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        here = Path.cwd()
        os.chdir(path.parent)  # an address is short
        try:
            listener.bind(path.name)
        finally:
            os.chdir(here)


def link_elsewhere(path: Path) -> None:
    path.symlink_to("/dev/null")


def link_to_nothing(path: Path) -> None:
    path.symlink_to("nowhere")


ODD: dict[str, Callable[[Path], None]] = {
    "a named pipe": os.mkfifo,
    "a socket": make_socket,
    "a symbolic link": link_elsewhere,
    "a symbolic link ": link_to_nothing,
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("folder", ["", "rollouts", "digests", ".hydra"])
def test_an_added_thing_that_is_no_file_is_named(sealed, kind, folder):
    (sealed / folder).mkdir(exist_ok=True)
    ODD[kind](sealed / folder / "odd")
    verification = verify(sealed)
    path = f"{folder}/odd" if folder else "odd"
    assert f"{path} is {kind.strip()} and no regular file" in verification.damage
    assert verification.exit_status == 3


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", EVIDENCE)
def test_evidence_that_is_replaced_by_what_is_no_file_is_named_and_not_opened(sealed, kind, name):
    (sealed / name).unlink()
    ODD[kind](sealed / name)
    verification = verify(sealed)
    assert f"{name} is {kind.strip()} and no regular file" in verification.damage
    assert verification.exit_status == 3


@pytest.mark.parametrize("name", EVIDENCE)
def test_a_link_to_the_very_same_content_is_damage_too(sealed, tmp_path, name):
    shutil.move(sealed / name, tmp_path / "kept")
    (sealed / name).symlink_to(tmp_path / "kept")
    assert f"{name} is a symbolic link and no regular file" in verify(sealed).damage


def test_a_folder_of_evidence_that_is_a_link_is_damage(sealed, tmp_path):
    shutil.move(sealed / "rollouts", tmp_path / "kept")
    (sealed / "rollouts").symlink_to(tmp_path / "kept")
    verification = verify(sealed)
    assert "rollouts is a symbolic link and no regular file" in verification.damage
    assert "rollouts/00000.safetensors is missing" in verification.damage


def test_a_folder_in_place_of_a_document_is_damage(sealed):
    (sealed / "manifest.json").unlink()
    (sealed / "manifest.json").mkdir()
    damage = verify(sealed).damage
    assert "manifest.json is missing" in damage
    assert "manifest.json/ was added after the run was sealed" in damage
    (sealed / "VERDICT.json").unlink()
    (sealed / "VERDICT.json").mkdir()
    assert "VERDICT.json is a folder and no regular file" in verify(sealed).damage


def test_an_added_empty_folder_is_damage(sealed):
    (sealed / "deep" / "er").mkdir(parents=True)
    assert verify(sealed).damage == ("deep/er/ was added after the run was sealed",)
    (sealed / "rollouts" / "empty").mkdir()
    assert "rollouts/empty/ was added after the run was sealed" in verify(sealed).damage


def test_an_empty_folder_that_was_sealed_must_stay(tmp_path):
    run_dir = write_run(tmp_path / "run")
    (run_dir / "checkpoints").mkdir()
    assert seal(run_dir).verdict is Verdict.PASS
    assert verify(run_dir).damage == ()
    (run_dir / "checkpoints").rmdir()
    assert verify(run_dir).damage == ("checkpoints/ is missing",)


def test_logs_and_wandb_may_hold_anything(sealed):
    (sealed / "wandb").mkdir()
    for folder in ("logs", "wandb"):
        for number, make in enumerate(ODD.values()):
            make(sealed / folder / str(number))
    assert verify(sealed).damage == ()


def test_a_folder_called_logs_elsewhere_is_not_excepted(sealed):
    (sealed / "rollouts" / "logs").mkdir()
    os.mkfifo(sealed / "rollouts" / "logs" / "odd")
    assert "rollouts/logs/odd is a named pipe and no regular file" in verify(sealed).damage


def test_a_name_that_is_not_utf8_is_damage(sealed):
    Path(os.fsdecode(os.fsencode(sealed) + b"/\xff\xfe.json")).write_text("{}")
    assert "\\udcff\\udcfe.json has a name that is not UTF-8" in verify(sealed).damage


def test_a_name_with_control_characters_is_shown_escaped(sealed):
    (sealed / "a\x1b[31m\nb").write_text("")
    assert verify(sealed).damage == ("a\\x1b[31m\\nb was added after the run was sealed",)


@pytest.mark.parametrize("kind", ODD)
def test_a_run_that_holds_such_a_thing_can_be_sealed_and_fails(tmp_path, kind):
    run_dir = write_run(tmp_path / "run")
    ODD[kind](run_dir / "odd")
    judgement = seal(run_dir)
    assert judgement.verdict is Verdict.FAIL
    assert judgement.reasons == (f"evidence: odd is {kind.strip()} and no regular file",)
    Path(os.fsdecode(os.fsencode(run_dir) + b"/\xff")).write_text("")
    assert seal(run_dir).verdict is Verdict.FAIL


def test_a_device_is_never_opened(tmp_path):
    # Opening this one succeeds for everybody, so that only the refusal shows.
    with pytest.raises(OSError, match="character device"):
        open_regular(Path("/dev/zero"))
    try:
        os.mknod(tmp_path / "zero", 0o666 | 0o020000, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("making a device needs privileges")
    assert list_contents(tmp_path).faults == ("zero is a character device and no regular file",)


def test_a_folder_that_cannot_be_listed_is_damage(sealed, monkeypatch):
    listed = os.scandir

    def refuse(path: Path) -> object:
        if Path(path).name == "rollouts":
            raise PermissionError(13, "Permission denied")
        return listed(path)

    monkeypatch.setattr("rlsp.report.files.os.scandir", refuse)
    assert "rollouts cannot be listed: Permission denied" in verify(sealed).damage


def test_runs_that_hold_a_pipe_are_not_compared(tmp_path):
    a, b = make_run(tmp_path / "a", LAYOUT_A), make_run(tmp_path / "b", LAYOUT_B)
    os.mkfifo(b / "odd")
    comparison = compare(a, b)
    assert comparison.outcome is Outcome.NOT_COMPARABLE
    assert "run B is damaged: odd is a named pipe and no regular file" in comparison.refusals


def test_a_run_that_aborted_early_seals_its_empty_folders(tmp_path):
    run_dir = tmp_path / "run"
    manifest_file.begin(make_job(run_dir), {})
    (run_dir / "rollouts").mkdir()
    manifest_file.finish(run_dir, ENDED_AT, manifest_file.Status.ABORTED, "no certificate")
    seal(run_dir, "no certificate")
    assert verify(run_dir).damage == ()


def test_what_is_shown_is_bounded():
    assert shown("x" * 1000) == "x" * 400 + " …"
    assert shown("ä×…") == "ä×…"
