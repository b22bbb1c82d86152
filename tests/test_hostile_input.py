"""Whatever a user or a damaged disk puts in gets one message: no traceback, no wait, no loaded pickle."""

from __future__ import annotations

import ast
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command import Console
from conftest import composer
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_owner import environment

from rlsp.cli import compare, dashboard, diagnose, publish, verify
from rlsp.cli.compose import Composer, checked, conf_dir
from rlsp.cli.machine import machine_lines
from rlsp.cli.overrides import spelt_out
from rlsp.cli.refusal import RefusalError
from rlsp.config import Config, leaf_kinds

PACKAGE = Path(__file__).parents[1] / "rlsp"
GROUPS = sorted(
    folder.name for folder in conf_dir().iterdir() if folder.is_dir() and folder.name != "__pycache__"
)
KEYS = [key for key, _ in leaf_kinds(Config)]
OTHERS = [
    "hydra.run.dir",
    "hydra/launcher",
    "hydra.output_subdir",
    "hydra.sweep.dir",
    "no.such.key",
    "",
    "a b",
]

# Override surface ------------------------------------------------------------------

HOSTILE = [
    *(
        "",
        "null",
        "nan",
        "-inf",
        "1e999",
        "-0.0",
        "0x10",
        "1_000",
        "9" * 5000,
        "1" * 400 + ".0",
        "true",
        "???",
    ),
    *(
        "[]",
        "{}",
        "[1,[2]]",
        "{a:{b:1}}",
        "a=b",
        "a,b",
        "'",
        '"',
        "\\",
        "\\$",
        "\n",
        "\t",
        "\x1b[2J",
        "~",
        "-",
        "+",
    ),
    *("${seed}", "${nope}", "${", "${${seed}}", "${.seed}", "${run_id:}", "${oc.env:NO_SUCH_VARIABLE}"),
    *(
        "${oc.create:{a:1}}",
        "${oc.decode:'['}",
        "${hydra:job.num}",
        "choice(1,2)",
        "range(1,3)",
        "glob(*)",
        "sort(1)",
    ),
    *(
        "😀",
        "\u202e",
        "é" * 300,
        "\u0661",
        "../../etc/passwd",
        "!!python/object/apply:os.system [ls]",
        "*a",
        "&a b",
        "@f",
    ),
]
VALUES = st.sampled_from(HOSTILE) | st.text(
    st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=40
)
OVERRIDES = st.builds(
    lambda sign, key, equals, value: f"{sign}{key}{equals}{value}",
    st.sampled_from(["", "", "", "+", "++", "~"]),
    st.sampled_from(KEYS) | st.sampled_from([*GROUPS, *OTHERS]),
    st.sampled_from(["=", "=", "=", "=", ""]),
    VALUES,
)


@pytest.fixture
def opened() -> Iterator[Composer]:
    with composer() as found:
        yield found


def answer(opened: Composer, overrides: list[str]) -> tuple[str, ...]:
    """Return why overrides are refused; the empty tuple where they are not."""
    try:
        machine_lines(checked(opened.require_run(spelt_out(overrides))))
    except RefusalError as refusal:
        return refusal.lines
    return ()


def test_any_override_is_taken_or_refused_in_lines_that_can_be_read(opened: Composer) -> None:
    @given(st.lists(OVERRIDES, min_size=1, max_size=2))
    @settings(
        max_examples=20, deadline=None
    )  # to compose takes a third of a second, several times an example
    def answers(overrides: list[str]) -> None:
        lines = answer(opened, overrides)
        assert all(0 < len(line) <= 2000 and line.isprintable() for line in lines), lines

    answers()


def test_what_a_terminal_would_act_on_is_escaped_and_what_is_too_long_is_cut(opened: Composer) -> None:
    (line,) = answer(opened, ["name='\x1b[2J'"])
    assert line.startswith("name=\\x1b[2J: legal: ")
    (line,) = answer(opened, ["num_rollouts=" + "9" * 4000])
    assert line.startswith("num_rollouts=999")
    assert line.endswith("999: legal: an integer in 1..1000000")
    assert len(line) < 1100


@pytest.mark.parametrize("key", ["seed", "parallel", "tracker.tags"])
@pytest.mark.parametrize(
    "value", ["${", "9" * 5000, "{a:{b:1}}", "\x1b[2J"], ids=["open", "long", "deep", "escape"]
)
def test_the_command_refuses_with_status_2_and_leaves_nothing(
    rlsp_command: Console, key: str, value: str
) -> None:
    assert rlsp_command(f"{key}={value}") == 2
    assert rlsp_command.errors.startswith("rlsp: refused, nothing was started:")
    assert (rlsp_command.left(), rlsp_command.jobs) == ([], [])


# Config files ----------------------------------------------------------------------

FILES = {
    "no mapping": "- 1\n- 2\n",
    "a scalar": "seven",
    "an unknown key": "# @package _global_\nno_such_key: 1\n",
    "a wrong type": "# @package _global_\nseed: {a: 1}\n",
    "a section that is a number": "# @package _global_\nmodel: 3\n",
    "a reference that leads nowhere": "# @package _global_\nseed: ${nowhere}\n",
    "a reference to itself": "# @package _global_\nseed: ${seed}\n",
    "a doubled key": "# @package _global_\nseed: 1\nseed: 2\n",
    "no text": b"\xff\xfe\x00",
    "a Python object": "# @package _global_\nname: !!python/object/apply:os.system ['touch planted']\n",
    "an alias of itself": "# @package _global_\ntask: &a {dataset_config: *a}\n",
    "a missing default": "defaults:\n  - /parallel: nowhere\n",
    "a default of itself": "defaults:\n  - hostile\n",
    "deep lists": "a: " + "[" * 2000 + "]" * 2000,
    "an integer of 5000 digits": "# @package _global_\nnum_rollouts: " + "9" * 5000,
    "a tab": "\tseed: 1\n",
}


@pytest.mark.parametrize("content", FILES.values(), ids=FILES.keys())
def test_a_config_file_however_broken_is_refused(rlsp_command: Console, content: str | bytes) -> None:
    path = rlsp_command.folder / "own" / "experiment" / "hostile.yaml"
    path.parent.mkdir(parents=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = rlsp_command.left()
    assert rlsp_command("--config-dir", "own", "experiment=hostile") == 2, rlsp_command.jobs
    assert rlsp_command.errors.startswith("rlsp: refused, nothing was started:")
    assert rlsp_command.left() == before


# Run folders -----------------------------------------------------------------------


EVIDENCE = (
    "manifest.json",
    "consistency.json",
    "VERDICT.json",
    "metrics.jsonl",
    "rollouts/00000.safetensors",
    "digests/00000.json",
)


def commands(run: Path, out: Path) -> dict[str, tuple[Callable[[list[str]], int], list[str]]]:
    return {
        "verify": (verify.main, [str(run)]),
        "compare": (compare.main, [str(run), str(run)]),
        "diagnose": (diagnose.main, [str(run), "--rollout", "0", "--sample", "0"]),
        "publish": (publish.main, [str(run), "--out", str(out)]),
    }


def damaged(content: bytes) -> dict[str, bytes]:
    """Return a file's content in ways in which disks, editors and attackers damage it."""
    middle = len(content) // 2
    return {
        "cut": content[:middle],
        "empty": b"",
        "a flipped bit": content[:middle] + bytes([content[middle] ^ 0x10]) + content[middle + 1 :],
        "doubled": content + content,
        "NaN": content.replace(b": 0", b": NaN", 3),
        "a doubled key": content.replace(b"{", b'{"schema_version": 1, "schema_version": 2, ', 1),
        "a huge integer": content.replace(b": 1", b": " + b"9" * 5000, 1),
        "deep": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        "another type": b"[]",
        "no text": b"\xff\xfe" + content,
        "a pickle": pickle.dumps(Planted()),
    }


class Planted:
    """Leave a file where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("unpickled",))


@pytest.mark.parametrize("name", EVIDENCE)
def test_no_command_ends_in_a_traceback_over_a_damaged_file(
    sealed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(diagnose, "_replayed", lambda *_: pytest.fail("a damaged run was replayed"))
    whole = (sealed / name).read_bytes()
    for how, content in damaged(whole).items():
        (sealed / name).write_bytes(content)
        for what, (main, arguments) in commands(sealed, tmp_path / "out").items():
            status = main(arguments)
            said = capsys.readouterr()
            assert "Traceback" not in said.err, (how, what)
            assert status != 0 or content == whole, (how, what, said)
            assert not (tmp_path / "out").exists(), (how, what)
        (sealed / name).write_bytes(whole)
    assert not (tmp_path / "unpickled").exists()


@pytest.mark.parametrize("name", EVIDENCE)
@pytest.mark.parametrize("kind", ["pipe", "link", "folder", "missing"])
def test_what_stands_in_a_files_place_is_neither_followed_nor_waited_for(
    sealed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    kind: str,
) -> None:
    monkeypatch.setattr(diagnose, "_replayed", lambda *_: pytest.fail("a damaged run was replayed"))
    (sealed / name).rename(tmp_path / "whole")
    if kind == "pipe":
        os.mkfifo(sealed / name)
    elif kind == "link":
        (sealed / name).symlink_to(tmp_path / "whole")
    elif kind == "folder":
        (sealed / name).mkdir()
    for what, (main, arguments) in commands(sealed, tmp_path / "out").items():
        assert main(arguments) != 0, what
        assert "Traceback" not in capsys.readouterr().err, what


@pytest.mark.parametrize(
    "project", ["", "a", "a/b/c", "a/\x1b[2J", "../..", "a/" + "b" * 5000, "a/b?c", "é/ü\n"]
)
def test_what_is_no_project_has_no_dashboard(project: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert dashboard.main([project]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert ": legal: ENTITY/PROJECT" in line
    assert line.isprintable()


# Pickles ---------------------------------------------------------------------------

LOADERS = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}


def loaders(source: str) -> list[str]:
    """Name what could load a pickle: such modules, `torch.load`, and NumPy's `load` that allows it."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in LOADERS]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in LOADERS:
            found.append(str(node.module))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) == ("torch", "load"):
                found.append("torch.load")
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found.append("allow_pickle")
    return found


def test_nothing_in_the_package_can_load_a_pickle() -> None:
    assert [(path.name, name) for path in PACKAGE.rglob("*.py") for name in loaders(path.read_text())] == []


def test_the_search_for_pickles_finds_them() -> None:
    source = "import pickle\nfrom dill import loads\ntorch.load('x')\nnp.load('x', allow_pickle=True)\n"
    assert loaders(source) == ["pickle", "dill", "torch.load", "allow_pickle"]


# Prompt files ----------------------------------------------------------------------

SCAN = """
import re, sys
from pathlib import Path
from rlsp.rl.task.lines import LineFile

def peak_kib():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

path, before = Path(sys.argv[1]), peak_kib()
lines = LineFile.scan(path)
scanned = peak_kib()
whole = path.read_bytes()
print(lines.count, lines.read(lines.count - 1).decode()[:20], scanned - before, peak_kib() - before, sep="|")
"""


def test_a_million_rows_are_read_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        for start in range(0, 10**6, 10**5):
            file.writelines(
                json.dumps({"prompt": f"{row:07}+1=", "label": str(row + 1), "notes": "x" * 150}) + "\n"
                for row in range(start, start + 10**5)
            )
    size_mib = path.stat().st_size / 2**20
    done = subprocess.run(
        [sys.executable, "-c", SCAN, str(path)], env=environment(), capture_output=True, text=True, check=True
    )
    count, last, grown_kib, whole_kib = done.stdout.split("|")
    assert int(count) == 10**6
    assert last == '{"prompt": "0999999+'
    assert size_mib > 190
    assert int(whole_kib) / 1024 > size_mib, "to read it whole would show"
    assert int(grown_kib) / 1024 < 80, (
        "two places of eight bytes a row, twice for a moment, and a chunk of the file"
    )
