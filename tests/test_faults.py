"""Every fault that users of other systems reported stands in docs/faults.md with tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

from test_doc_references import SPAN

HERE = Path(__file__).resolve().parent
HEADER = "| id | fault | what happens here | tests |"
IDS = {
    *("A1", "A3", "A4", "A5", "A6", "A9", "A11", "A12", "A15"),
    *("B1", "B2", "B3", "B4", "B5", "B7", "B8", "B9", "B11", "B13", "B14", "B16"),
    *("C1", "C2", "C3", "C5", "C6", "C9", "C12"),
    *("D1", "D4", "D8", "D11", "D12"),
    *("E1", "E2", "E5"),
    *("F1", "F2", "F3", "F7", "F8", "F9", "F10", "F11", "F12", "F14"),
}


def rows(text: str) -> dict[str, list[tuple[str, str]]]:
    """Read the table: for each fault the file and the name of every test."""
    found: dict[str, list[tuple[str, str]]] = {}
    for line in text.partition(HEADER)[2].splitlines()[2:]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == 4, line
        assert cells[0] not in found, f"{cells[0]} stands twice"
        named, file = [], ""
        for span in SPAN.findall(cells[3]):
            if span.startswith("test_"):
                file = span
            else:
                named.append((file, span))
        found[cells[0]] = named
    return found


def lost(file: str, name: str) -> bool:
    """Tell whether a file has no such test, nor a check that a test of it runs on every rank."""
    path = HERE / f"{file}.py"
    return not path.is_file() or not re.search(rf"^def (test_)?{name}\(", path.read_text(), re.MULTILINE)


def test_every_fault_has_tests_that_exist() -> None:
    table = rows((HERE.parent / "docs" / "faults.md").read_text())
    assert table.keys() == IDS
    assert [fault for fault, named in table.items() if not named] == []
    assert [(fault, *test) for fault, named in table.items() for test in named if lost(*test)] == []


def test_a_test_that_does_not_exist_would_be_noticed() -> None:
    table = rows(f"{HEADER}\n|---|---|---|---|\n| A1 | f | h | `test_tree`: `no_such_thing` |\n")
    assert table == {"A1": [("test_tree", "no_such_thing")]}
    assert lost("test_tree", "no_such_thing")
    assert lost("test_nowhere", "no_such_thing")
    assert not lost("test_tree", "the_naive_order_leaves_other_bits")
