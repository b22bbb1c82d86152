"""What the documents name exists: tests, files, folders, links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
# Where a path in a document may start.
HOMES = tuple(ROOT / home for home in (".", "rlsp", "docs", "tests", "conf"))
# What Hydra leaves in a run's or a sweep's folder.
LEFT_BY_A_RUN = {
    *(".hydra/config.yaml", "overrides.yaml", "hydra.yaml", "multirun.yaml"),
    *(
        "outputs/",
        "logs/",
        "wandb/",
        "rollouts/",
        "digests/",
        "checkpoints/",
        "export/",
        ".hydra/",
        ".venv/",
        "0/",
        "1/",
    ),
}
METRICS = {"train/", "rollout/", "reward/", "consistency/", "time/", "total/", "memory/"}
PROOF_TABLE = "| rule | code | proof | witness |"

SPAN = re.compile(r"`([^`\n]+)`")
TEST = re.compile(r"test_[a-z0-9_]+")
FILE = re.compile(r"[\w./-]+\.(?:py|yaml|toml|md|sh)|(?:\w+/)+")
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")

by_document = pytest.mark.parametrize("document", DOCUMENTS, ids=[path.name for path in DOCUMENTS])


@cache
def functions_by_file() -> dict[str, frozenset[str]]:
    """Return the names of the test functions of each file of tests."""
    functions = re.compile(r"^\s*def (test_\w+)", re.MULTILINE)
    files = sorted((ROOT / "tests").glob("test_*.py"))
    return {path.stem: frozenset(functions.findall(path.read_text())) for path in files}


def proofs(text: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield every test that the table of proofs names without its prefix, and the files it may be in.

    A name belongs to the file that was named last in its cell, in a cell without one to those of its row.
    """
    lines = iter(text.splitlines())
    for line in lines:
        if line == PROOF_TABLE:
            break
    next(lines, None)
    for line in lines:
        if not line.startswith("|"):
            return
        of_row: tuple[str, ...] = ()
        for cell in line.split("|")[3:5]:
            files = of_row
            for span in SPAN.findall(cell):
                if TEST.fullmatch(span):
                    files, of_row = (span,), (*of_row, span)
                else:
                    yield files, span


@by_document
def test_every_test_that_is_named_exists(document):
    known = functions_by_file()
    names = known.keys() | frozenset[str]().union(*known.values())
    spans = [span for span in SPAN.findall(document.read_text()) if TEST.fullmatch(span)]
    assert [span for span in spans if span not in names] == []


def test_every_proof_and_every_witness_is_a_test_of_the_file_that_is_named():
    known, text = functions_by_file(), (ROOT / "docs" / "numerics.md").read_text()
    named = list(proofs(text))
    assert len(named) > 30
    lost = [
        (files, name)
        for files, name in named
        if not any(f"test_{name}" in known.get(file, ()) for file in files)
    ]
    assert lost == []


@by_document
def test_every_file_and_folder_that_is_named_exists(document):
    spans = {span for span in SPAN.findall(document.read_text()) if FILE.fullmatch(span)}
    spans -= LEFT_BY_A_RUN | METRICS
    assert [span for span in sorted(spans) if not any((home / span).exists() for home in HOMES)] == []


@by_document
def test_every_link_leads_somewhere(document):
    targets = [link for link in LINK.findall(document.read_text()) if "://" not in link]
    assert [link for link in targets if not (document.parent / link).exists()] == []


def test_a_name_that_does_not_exist_would_be_noticed():
    text = f"{PROOF_TABLE}\n|---|---|---|---|\n| 1 | | `test_tree`: `there_is_no_such_test` | `nor_this` |\n"
    assert list(proofs(text)) == [(("test_tree",), "there_is_no_such_test"), (("test_tree",), "nor_this")]
    assert TEST.fullmatch("test_there_is_no_such_test")
    assert "test_there_is_no_such_test" not in functions_by_file()["test_tree"]
    assert FILE.fullmatch("report/no_such_file.py")
