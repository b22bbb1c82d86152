"""The folder of a run or a sweep: taken once, never mixed, and given back by whoever made it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from command import Console

from rlsp.cli import app, folders
from rlsp.cli.compose import new_id
from rlsp.cli.folders import await_owner, is_taken, pinned, taken_run
from rlsp.cli.refusal import RefusalError


def test_two_runs_never_share_a_folder(rlsp_command: Console) -> None:
    assert [rlsp_command(), rlsp_command()] == [0, 0]
    assert len({job.run_dir for job in rlsp_command.jobs}) == 2
    assert len({new_id() for _ in range(50)}) == 50


def test_a_run_never_enters_a_folder_that_holds_something(rlsp_command: Console) -> None:
    (rlsp_command.folder / "taken").mkdir()
    (rlsp_command.folder / "taken" / "evidence").touch()
    assert rlsp_command("hydra.run.dir=taken") == 2
    assert rlsp_command("-m", "hydra.sweep.dir=taken", "seed=1,2") == 2
    assert "taken: legal: a folder that is absent or empty" in rlsp_command.errors
    assert rlsp_command.left() == ["taken", "taken/evidence"]
    assert rlsp_command("hydra.run.dir=taken/evidence") == 2


def test_a_run_may_enter_an_empty_folder(rlsp_command: Console) -> None:
    (rlsp_command.folder / "mine").mkdir()
    assert rlsp_command("hydra.run.dir=mine") == 0
    assert rlsp_command.jobs[0].run_dir == str(rlsp_command.folder / "mine")


def test_a_folder_that_cannot_be_made_is_refused(rlsp_command: Console) -> None:
    (rlsp_command.folder / "file").touch()
    assert rlsp_command("hydra.run.dir=file/run") == 2
    assert rlsp_command.errors.splitlines()[1:] == [
        f"  folder {rlsp_command.folder}/file/run: cannot be written: Not a directory"
    ]


@pytest.mark.parametrize("arguments", [(), ("-m", "seed=1,2")], ids=["run", "sweep"])
def test_only_folders_that_the_command_made_are_removed(
    rlsp_command: Console, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    (rlsp_command.folder / "mine" / "run").mkdir(parents=True)
    kind = "sweep" if arguments else "run"
    # refused after Hydra has begun: neither value is known to be wrong before
    monkeypatch.setattr(app, "machine_lines", lambda config: ["nothing runs here"])
    for folder in (".", "mine/run", "mine/run/deeper/still"):
        if folder == ".":
            monkeypatch.chdir(rlsp_command.folder / "mine" / "run")
        assert rlsp_command(*arguments, f"hydra.{kind}.dir={folder}") == 2
        monkeypatch.chdir(rlsp_command.folder)
        assert "nothing runs here" in rlsp_command.errors
        assert rlsp_command.left() == ["mine", "mine/run"]


def test_of_two_commands_that_take_one_folder_at_once_one_is_refused(
    rlsp_command: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both have looked and found the folder empty; the other one is a moment faster.
    require_free = folders.require_free

    def overtaken(folder: Path) -> None:
        require_free(folder)
        (folder / "logs").mkdir(parents=True)
        (folder / "logs" / "theirs").touch()

    monkeypatch.setattr(folders, "require_free", overtaken)
    assert rlsp_command("hydra.run.dir=one") == 2
    assert "one: legal: a folder that is absent or empty" in rlsp_command.errors
    assert rlsp_command.left() == ["one", "one/logs", "one/logs/theirs"]
    assert rlsp_command.jobs == []

    def overtaken_sweep(folder: Path) -> None:
        require_free(folder)
        folder.mkdir()
        (folder / "multirun.yaml").write_text("theirs")

    monkeypatch.setattr(folders, "require_free", overtaken_sweep)
    assert rlsp_command("-m", "seed=1,2", "hydra.sweep.dir=two") == 2
    assert (rlsp_command.folder / "two" / "multirun.yaml").read_text() == "theirs"


def test_a_folder_that_looks_taken_has_an_owner_from_the_first_moment_on(
    rlsp_command: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, write_record = Path.rename, app.write_record
    owned: list[bool] = []

    def renamed(path: Path, target: Path) -> Path:
        assert not is_taken(target.parent)
        found = rename(path, target)
        owned.append(not await_owner(target.parent, 0.0))
        return found

    def written(run_dir: Path, *arguments: Any) -> None:
        owned.append(not await_owner(run_dir, 0.0))
        write_record(run_dir, *arguments)

    monkeypatch.setattr(Path, "rename", renamed)
    monkeypatch.setattr(app, "write_record", written)
    assert rlsp_command("hydra.run.dir=one") == 0
    assert owned == [True, True]
    assert await_owner(rlsp_command.folder / "one", 0.0)
    assert {path.name for path in (rlsp_command.folder / "one").iterdir()} == {".hydra", "logs"}


def test_of_many_that_take_one_folder_exactly_one_succeeds(tmp_path: Path) -> None:
    start = threading.Barrier(8)

    def take(_: int) -> bool:
        start.wait()
        try:
            held.enter_context(taken_run(tmp_path))
        except RefusalError:
            return False
        return True

    with ExitStack() as held, ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(take, range(8))) == 1
        assert [path.name for path in tmp_path.iterdir()] == ["logs"]


@pytest.mark.parametrize("arguments", [(), ("-m", "seed=1,2")], ids=["run", "sweep"])
def test_a_full_disk_is_refused_and_nothing_stays(
    rlsp_command: Console, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    write_text = Path.write_text

    def full(path: Path, *arguments: Any, **named: Any) -> int:
        if path.name == "hydra.yaml":
            write_text(path, "so f")
            raise OSError(28, "No space left on device")
        return write_text(path, *arguments, **named)

    monkeypatch.setattr(Path, "write_text", full)
    assert rlsp_command(*arguments) == 2
    assert "cannot be written: No space left on device" in rlsp_command.errors
    assert rlsp_command.left() == []


def test_a_folder_with_every_awkward_character_is_used_as_it_is(rlsp_command: Console) -> None:
    for name in (
        "it's",
        "a b",
        "run#7?",
        "\\'x\\",
        "back\\",
        "ü, (x)={y}:[z]",
        "$HOME %s",
    ):
        assert rlsp_command(pinned("hydra.run.dir", rlsp_command.folder / name)) == 0, rlsp_command.errors
        assert Path(rlsp_command.jobs[-1].run_dir) == rlsp_command.folder / name
        assert (
            rlsp_command("-m", pinned("hydra.sweep.dir", rlsp_command.folder / f"{name}s"), "seed=1,2") == 0
        )
        assert Path(rlsp_command.jobs[-1].run_dir) == rlsp_command.folder / f"{name}s" / "1"


def test_a_folder_that_is_gone_is_no_place_to_start(
    rlsp_command: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = rlsp_command.folder / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert rlsp_command() == 2
    assert rlsp_command.errors.splitlines()[1:] == [
        "  the current folder is gone: legal: to start in one that exists"
    ]
    monkeypatch.chdir(rlsp_command.folder)


@pytest.mark.parametrize(
    ("subdir", "line"),
    [
        ("all", "hydra.sweep.subdir=all (job 1): legal: a folder for each job alone; job 0 has it"),
        ("${parallel.tp}", "hydra.sweep.subdir=2 (job 1): legal: a folder for each job alone; job 0 has it"),
        ("j/${seed}/..", "hydra.sweep.subdir=j/1/.. (job 0): legal: a folder inside that of the sweep"),
        (".", "(job 0): legal: a folder inside that of the sweep"),
        ("/tmp", "hydra.sweep.subdir=/tmp (job 0): legal: a folder inside that of the sweep"),
        ("sweep.json", "hydra.sweep.subdir=sweep.json (job 0): legal: a folder inside that of the sweep"),
        ("x" * 300 + "${seed}", "(job 0): legal: names of at most 255 bytes"),
    ],
    ids=lambda text: text[:40],
)
def test_jobs_that_would_not_have_a_folder_each_are_refused_before_the_first(
    rlsp_command: Console, subdir: str, line: str
) -> None:
    assert rlsp_command("-m", "seed=1,2", f"hydra.sweep.subdir='{subdir}'") == 2
    assert line in rlsp_command.errors.splitlines()[1]
    assert rlsp_command.jobs == []
    assert rlsp_command.left() == []


def test_a_job_inside_the_folder_of_another_is_refused(rlsp_command: Console) -> None:
    (rlsp_command.folder / "mine" / "experiment").mkdir(parents=True)
    for name, subdir in (("a", "x"), ("b", "x/y")):
        path = rlsp_command.folder / "mine" / "experiment" / f"{name}.yaml"
        path.write_text(f"# @package _global_\nname: {name}\nhydra: {{sweep: {{subdir: {subdir}}}}}\n")
    for order in ("a,b", "b,a"):
        assert rlsp_command("--config-dir", "mine", "-m", f"experiment={order}") == 2
        assert "legal: a folder for each job alone; job 0 has it" in rlsp_command.errors
    assert rlsp_command.jobs == []


def test_a_swept_name_leaves_the_sweep_in_one_folder(rlsp_command: Console) -> None:
    assert rlsp_command("-m", "name=a,b") == 0
    assert len({Path(job.run_dir).parent for job in rlsp_command.jobs}) == 1
