"""Signals, closed pipes and full disks: one line, the right status, nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command import Console, raising
from hydra._internal.hydra import Hydra

NOT_NEGATIVE = "a number in 0..1000000"


def test_an_interrupt_before_the_first_job_leaves_nothing(
    rlsp_command: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for place in (Hydra, "compose_config"), (Hydra, "multirun"):
        monkeypatch.setattr(*place, interrupt)
        for arguments in ((), ("-m", "seed=1,2")):
            if place[1] == "compose_config" or arguments:
                assert rlsp_command(*arguments) == 1
                assert rlsp_command.errors == "rlsp: interrupted\n"
        monkeypatch.undo()
        monkeypatch.chdir(rlsp_command.folder)
    assert rlsp_command.left() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_any_moment_of_the_start_is_an_interrupt(tmp_path: Path, number: signal.Signals) -> None:
    # The command interrupts itself as it comes to a module: early, while Hydra comes in, and late.
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == sys.argv[-1]: os.kill(os.getpid(), int(sys.argv[-2]))\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from rlsp.cli.main import main\n"
        "wanted, sys.argv = sys.argv, ['rlsp', 'num_rollouts=0', sys.argv[-2], sys.argv[-1]]\n"
        "sys.exit(main())\n"
    )
    for module in ("rlsp.cli.app", "hydra", "omegaconf.errors", "rlsp.config.checks"):
        done = subprocess.run(
            [sys.executable, "-c", code, str(int(number)), module],
            check=False,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (1, "rlsp: interrupted\n"), module


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_refusal_into_a_closed_pipe_is_still_a_refusal(tmp_path: Path, stream: str) -> None:
    for arguments, status in ((["entropy_coef=nan"], 2), (["--cfg", "job"], 0), (["--no-such-option"], 2)):
        read_end, write_end = os.pipe()
        os.close(read_end)
        command = [sys.executable, "-m", "rlsp", *arguments]
        other = {"stdout": "stderr", "stderr": "stdout"}[stream]
        streams = {stream: write_end, other: subprocess.PIPE}
        done = subprocess.run(command, check=False, cwd=tmp_path, **streams)
        os.close(write_end)
        assert done.returncode == status, arguments
        said = done.stderr if stream == "stdout" else done.stdout
        assert b"BrokenPipe" not in (said or b"")
    assert list(tmp_path.iterdir()) == []


def test_closed_descriptors_and_full_disks_do_not_change_a_status(tmp_path: Path) -> None:
    line = f"{sys.executable} -m rlsp"
    for redirection in (">&- 2>&- <&-", ">/dev/full 2>&1"):
        for arguments, status in (("entropy_coef=nan", 2), ("--cfg job", 0)):
            done = subprocess.run(f"{line} {arguments} {redirection}", check=False, shell=True, cwd=tmp_path)
            assert done.returncode == status, (redirection, arguments)


def test_an_interrupt_is_an_abort(rlsp_command: Console) -> None:
    rlsp_command.outcome = raising(KeyboardInterrupt())
    assert rlsp_command() == 1
    assert rlsp_command.errors == "rlsp: interrupted\n"


def test_a_refusal_is_the_exit_status_of_the_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rlsp", "entropy_coef=nan"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "rlsp: refused, nothing was started:",
        f"  entropy_coef=nan: legal: {NOT_NEGATIVE}",
    ]
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []
