"""Rows of a file as prompts: every row once an epoch, and what is wrong with a file is said with its line."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command import Console
from hypothesis import given
from hypothesis import strategies as st

from rlsp import evidence
from rlsp.config import Config
from rlsp.rl.reward import Apart
from rlsp.rl.task import CharacterTokenizer, TaskError, scorer
from rlsp.rl.task.jsonl import JsonlTask, check_first_rows, open_jsonl
from rlsp.rl.task.lines import MAX_LINE_BYTES, LineFile, first_lines
from rlsp.rl.task.protocol import one_below_the_other
from rlsp.rl.task.rows import RowError, find_fields, parse, read_row
from rlsp.rl.task.scorer import ExactScorer
from rlsp.task import judge_of, open_task, task_of

TOKENIZER = CharacterTokenizer()
USER = {"role": "user", "content": "u"}
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file of rows (objects as JSON, bytes as they are)."""

    def written(*rows: Any, end: bytes = b"\n", name: str = "rows.jsonl") -> Path:
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        (tmp_path / name).write_bytes(b"\n".join(lines) + end)
        return tmp_path / name

    return written


def opened(path: Path, **changes: Any) -> JsonlTask:
    settings: dict[str, Any] = {
        "tokenizer": TOKENIZER,
        "seed": 3,
        "shuffled": True,
        "scorer": ExactScorer("exact"),
        "prompt_key": None,
        "label_key": None,
        "max_prompt_tokens": None,
    }
    return open_jsonl(str(path), **{**settings, **changes})


def sums(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"{n}+1=", "label": str(n + 1)} for n in range(count)]


class TestOrder:
    def test_an_epoch_shows_every_row_once_and_the_next_one_in_another_order(self, write: Write) -> None:
        task = opened(write(*sums(50)))
        epochs = [[task.prompt(50 * epoch + place).text for place in range(50)] for epoch in range(3)]
        assert all(sorted(epoch) == sorted(row["prompt"] for row in sums(50)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == 3

    def test_the_order_is_the_seeds_and_not_that_of_the_calls(self, write: Write) -> None:
        path = write(*sums(50))
        forwards = [opened(path).prompt(index).text for index in range(120)]
        assert [opened(path).prompt(index).text for index in reversed(range(120))] == forwards[::-1]
        assert [opened(path, seed=4).prompt(index).text for index in range(120)] != forwards

    def test_unshuffled_rows_come_as_they_stand_and_begin_again(self, write: Write) -> None:
        task = opened(write(*sums(3)), shuffled=False)
        assert [task.prompt(index).text for index in range(5)] == ["0+1=", "1+1=", "2+1=", "0+1=", "1+1="]

    def test_one_row_is_enough_and_indices_start_at_zero(self, write: Write) -> None:
        task = opened(write(*sums(1), end=b""))
        assert {task.prompt(index).text for index in range(4)} == {"0+1="}
        with pytest.raises(ValueError, match="index must be at least 0, not -1"):
            task.prompt(-1)


class TestReward:
    def test_only_what_stands_before_the_first_eos_counts(self, write: Write) -> None:
        task = opened(write(*sums(1)))
        right, wrong, eos, pad = *map(TOKENIZER.encode, ("1", "2")), TOKENIZER.eos_id, TOKENIZER.pad_id
        assert task.reward(0, right) == task.reward(0, (*right, eos)) == 1.0
        assert task.reward(0, (*right, eos, *wrong, pad)) == 1.0
        assert (
            task.reward(0, (*wrong, eos, *right))
            == task.reward(0, ())
            == task.reward(0, (eos, *right))
            == 0.0
        )

    def test_eos_ends_a_response_once_where_padding_has_the_same_id(self, write: Write) -> None:
        @dataclass(frozen=True)
        class SharedEnd(CharacterTokenizer):
            @property
            def pad_id(self) -> int:  # type: ignore[override]
                return TOKENIZER.eos_id

        task = opened(write(*sums(1)), tokenizer=SharedEnd(), scorer=ExactScorer("text"))
        assert task.reward(0, (*TOKENIZER.encode("1"), *[TOKENIZER.eos_id] * 3)) == 1.0

    def test_padding_that_a_model_draws_is_a_character_of_the_answer(self, write: Write) -> None:
        task = opened(write(*sums(1)), scorer=ExactScorer("text"))
        assert task.reward(0, (*TOKENIZER.encode("1"), TOKENIZER.pad_id)) == 0.0


class TestContentHash:
    def test_it_holds_the_files_bytes_and_how_they_are_used(self, write: Write, tmp_path: Path) -> None:
        path = write(*sums(4))
        other = tmp_path / "copy.jsonl"
        other.write_bytes(path.read_bytes())
        assert opened(path).content_hash == opened(other).content_hash, "where a file lies changes nothing"
        assert opened(path).lines.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
        other.write_bytes(path.read_bytes() + b"\n")
        variants = [
            opened(path),
            opened(other),
            opened(path, seed=4),
            opened(path, shuffled=False),
            opened(path, scorer=ExactScorer("tag")),
            opened(path, max_prompt_tokens=9),
            opened(path, prompt_key="label", label_key="prompt"),
        ]
        assert len({each.content_hash for each in variants}) == len(variants)

    def test_the_seed_of_an_order_that_is_the_files_changes_nothing(self, write: Write) -> None:
        path = write(*sums(4))
        one, two = (opened(path, seed=seed, shuffled=False) for seed in (1, 2))
        assert one.content_hash == two.content_hash


class TestFields:
    @pytest.mark.parametrize(
        ("row", "prompt", "label"),
        [
            ({"prompt": "1+1=", "label": "2"}, "1+1=", "2"),
            ({"question": "How many?", "answer": "1 + 1 = 2\n#### 2"}, "How many?", "1 + 1 = 2\n#### 2"),
            ({"problem": "p", "answer": 34}, "p", "34"),
            (
                {"prompt": [{"role": "user", "content": "p"}], "reward_model": {"ground_truth": "34"}},
                "p",
                "34",
            ),
            ({"messages": [{"role": "system", "content": "s"}, USER], "label": "x"}, "s\nu", "x"),
            ({"prompt": "p", "ground_truth": 2.0}, "p", "2"),
            ({"prompt": "p", "label": 0.5, "answer": "not this one"}, "p", "0.5"),
        ],
        ids=["slime", "gsm8k", "math", "dapo", "messages", "whole float", "label first"],
    )
    def test_the_usual_rows_are_understood(self, row: dict[str, Any], prompt: str, label: str) -> None:
        found = read_row(row, find_fields(row, None, None))
        assert (one_below_the_other(found.question), found.label) == (prompt, label)

    def test_fields_of_ones_own_are_named_by_keys(self, write: Write) -> None:
        path = write({"q": {"text": "1+1="}, "a.b": "2", "prompt": "not this one", "label": "nor this"})
        task = opened(path, prompt_key="q.text", label_key="a.b")
        assert task.prompt(0).text == "1+1="
        assert task.reward(0, TOKENIZER.encode("2")) == 1.0

    def test_the_first_row_decides_for_all(self, write: Write) -> None:
        path = write({"prompt": "a", "label": "1"}, {"question": "b", "label": "1"})
        with pytest.raises(
            TaskError, match=r"rows.jsonl, line 2: has no prompt \(it has 'question', 'label'\)"
        ):
            opened(path, shuffled=False).prompt(1)


# A line that cannot be used, and what is said of it.
BAD_LINES: list[tuple[Any, str]] = [
    (b"{", "is not JSON: Expecting property name"),
    (b"7+5=12", "is not JSON: Extra data"),
    (b"prompt,label", "(char 0); a line is one JSON object"),
    (b"\xff\xfe{}", "is not UTF-8: byte 0xff at position 0"),
    (b'{"prompt": "caf\xe9", "label": "1"}', "is not UTF-8: byte 0xe9 at position 15"),
    (b"[1, 2]", "is a list: a row is one JSON object with a prompt and a label"),
    (b"null", "is null: a row is one JSON object"),
    (b"3", "is a number: a row is one JSON object"),
    (b"   ", "is not JSON: Expecting value"),
    (b"[" * 100_000, "is not JSON that can be read: nested too deeply"),
    (b'{"prompt": "p", "label": NaN}', "is not JSON: NaN is no JSON value"),
    (b'{"prompt": "p", "label": ' + b"9" * 5000 + b"}", "is not JSON: Exceeds the limit"),
    ({}, "has no prompt (it has no field)"),
    ({"label": "1"}, "has no prompt (it has 'label'): task.prompt_key names the field"),
    ({"prompt": "p"}, "has no label (it has 'prompt'): task.label_key names the field"),
    ({"prompt": None, "label": "1"}, "prompt is null (task.prompt_key names another field)"),
    ({"prompt": "p", "label": None}, "label is null (task.label_key names another field)"),
    (
        {"prompt": [[5, 6]], "label": "1"},
        "prompt[0] is no message: legal: an object whose role and content are",
    ),
    ({"prompt": 5, "label": "1"}, "prompt is a number: legal: text, or a list of messages or of token ids"),
    ({"prompt": " ", "label": "1"}, "prompt is empty"),
    ({"prompt": [], "label": "1"}, "prompt is empty"),
    ({"prompt": ["hi"], "label": "1"}, "prompt[0] is no message: legal: an object whose role and content"),
    ({"prompt": [{"role": "user", "content": [{}]}], "label": "1"}, "prompt[0] is no message"),
    ({"prompt": "p", "label": ["1"]}, "label is a list: legal: text, a number or a list of token ids"),
    ({"prompt": "p", "label": True}, "label is true: legal: text, a number or a list of token ids"),
    ({"prompt": "p", "label": ""}, "label is empty"),
    ({"prompt": "caf\u00e9", "label": "1"}, "character 'é' (U+00E9) at position 3 of 'café' has no token"),
    ({"prompt": "\ud800", "label": "1"}, "(U+D800) at position 0"),
    ({"prompt": "p" * 33, "label": "1"}, "the prompt has 33 tokens: task.max_prompt_tokens allows 32"),
]


class TestMalformed:
    @pytest.mark.parametrize(("line", "said"), BAD_LINES, ids=[said[:40] for _, said in BAD_LINES])
    def test_a_bad_row_is_named_with_its_line(self, write: Write, line: Any, said: str) -> None:
        path = write(*sums(1), b"", line, *sums(1))
        task = opened(path, shuffled=False, max_prompt_tokens=32)
        with pytest.raises(TaskError) as refusal:
            task.prompt(1)
        assert str(refusal.value).startswith(f"{path}, line 3: ")
        assert said in str(refusal.value)
        assert len(str(refusal.value)) < 400 + len(str(path))
        assert [task.prompt(index).text for index in (0, 2)] == ["0+1=", "0+1="], (
            "the others are as they were"
        )

    @pytest.mark.parametrize(("line", "said"), BAD_LINES, ids=[said[:40] for _, said in BAD_LINES])
    def test_the_first_rows_are_refused_in_the_same_words(self, write: Write, line: Any, said: str) -> None:
        path = write(b"\r", *sums(1), line)
        asked: dict[str, Any] = {"prompt_key": None, "label_key": None, "max_prompt_tokens": 32, "count": 16}
        asked["scorer"] = ExactScorer("exact")
        (found,) = check_first_rows(str(path), tokenizer=TOKENIZER, **asked)
        assert found.startswith(f"{path}, line 3: ")
        assert said in found

    def test_a_first_row_without_a_known_field_is_refused_with_the_names_that_are_known(
        self, write: Write
    ) -> None:
        path = write({"q": "1+1=", "label": "2"}, *sums(1))
        said = (
            f"{path}, line 1: has no prompt or question or problem or messages or input or prompt_ids or "
            "input_ids (it has 'q', 'label'): task.prompt_key names the field"
        )
        with pytest.raises(TaskError) as refusal:
            opened(path)
        assert str(refusal.value) == said
        asked: dict[str, Any] = {"prompt_key": None, "label_key": None, "max_prompt_tokens": None}
        asked["scorer"] = ExactScorer("exact")
        assert check_first_rows(str(path), tokenizer=TOKENIZER, count=16, **asked) == [said]

    def test_rows_that_are_bad_in_the_same_way_are_named_together(self, write: Write) -> None:
        path = write(*sums(1), {"prompt": "p", "label": [5]}, {"prompt": "p"}, {"prompt": "q", "label": [6]})
        asked: dict[str, Any] = {"prompt_key": None, "label_key": None, "max_prompt_tokens": None}
        found = check_first_rows(
            str(path), tokenizer=TOKENIZER, scorer=ExactScorer("number"), count=16, **asked
        )
        assert found == [
            f"{path}, lines 2, 4: the label is token ids, which task.scorer=exact alone compares",
            f"{path}, line 3: has no label (it has 'prompt'): task.label_key names the field",
        ]

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (b"", "is empty: it needs at least one row"),
            (b"\n\n\r\n", "is empty: it needs at least one row"),
            (gzip.compress(b"{}\n"), "is gzip-compressed: unpack it first (gzip -d)"),
            (b"PAR1....", "is a Parquet file: write its rows as JSON, one object a line"),
            (
                b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
                "is a pointer of git-lfs, not the",
            ),
            ("{}".encode("utf-16"), "is UTF-16: write it as UTF-8"),
            (b"x" * (MAX_LINE_BYTES + 1), ", line 1: is longer than 4 MiB: one row a line"),
            (b"{}\n" + b"x" * (MAX_LINE_BYTES + 1) + b"\n{}", ", line 2: is longer than 4 MiB"),
            (b"{}\n" + b"x" * (4 * MAX_LINE_BYTES), ", line 2: is longer than 4 MiB"),
        ],
        ids=[
            "empty",
            "blank",
            "gzip",
            "parquet",
            "git-lfs",
            "utf-16",
            "one huge line",
            "a huge line",
            "a huge end",
        ],
    )
    def test_a_file_of_another_kind_is_refused(self, tmp_path: Path, content: bytes, said: str) -> None:
        path = tmp_path / "rows.jsonl"
        path.write_bytes(content)
        for look in (LineFile.scan, lambda path: first_lines(path, 16)):
            with pytest.raises(TaskError) as refusal:
                look(path)
            assert str(refusal.value).startswith(str(path))
            assert said in str(refusal.value)

    def test_what_is_no_file_is_refused(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")  # that nobody writes to: it is not waited for
        for look in (LineFile.scan, lambda path: first_lines(path, 16)):
            with pytest.raises(TaskError, match="cannot be read: No such file or directory"):
                look(tmp_path / "absent")
            with pytest.raises(TaskError, match="cannot be read: Is a directory"):
                look(tmp_path)
            with pytest.raises(TaskError, match="is no regular file"):
                look(Path("/dev/null"))
            with pytest.raises(TaskError, match="is no regular file"):
                look(tmp_path / "pipe")

    def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(self, write: Write) -> None:
        first, second = (json.dumps(row).encode() for row in sums(2))
        task = opened(write(b"\xef\xbb\xbf" + first + b"\r", b"\r", second + b"\r"), shuffled=False)
        assert [task.prompt(index).text for index in range(2)] == ["0+1=", "1+1="]
        assert [task.lines.number(index) for index in range(2)] == [1, 3]

    @pytest.mark.parametrize("change", ["append", "replace"])
    def test_a_file_that_changes_under_a_run_ends_it(self, write: Write, change: str) -> None:
        path = write(*sums(4))
        task = opened(path)
        if change == "append":
            with path.open("ab") as file:
                file.write(b"{}\n")
        else:
            os.replace(write(*sums(4), name="new.jsonl"), path)
        with pytest.raises(TaskError, match="was changed after this run had indexed it"):
            task.prompt(0)

    @given(st.lists(st.binary(max_size=40), max_size=12))
    def test_any_bytes_are_rows_or_a_refusal_that_names_the_file(
        self, tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
    ) -> None:
        path = tmp_path_factory.mktemp("any") / "rows.jsonl"
        content = b"\n".join(lines)
        path.write_bytes(content)
        expected = [(n, line) for n, line in enumerate(content.split(b"\n"), 1) if line not in (b"", b"\r")]
        try:
            found = LineFile.scan(path)
        except TaskError:
            with pytest.raises(TaskError, match=re.escape(str(path))):
                first_lines(path, 100)
        else:
            assert [(found.number(index), found.read(index)) for index in range(found.count)] == expected
            assert first_lines(path, 100) == expected

    @given(
        st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=5), st.lists, max_leaves=5)
    )
    def test_any_value_of_a_field_is_a_row_or_a_refusal(self, value: object) -> None:
        for row in ({"prompt": value, "label": "1"}, {"prompt": "p", "label": value}, value):
            with suppress(RowError):
                read = parse(json.dumps(row).encode())
                found = read_row(read, find_fields(read, None, None))
                texts = [found.label, one_below_the_other(found.question)]
                assert all(isinstance(text, str) and text.strip() for text in texts)


def test_a_million_rows_cost_sixteen_bytes_each(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "1+1=", "label": "2"}\n' * 100_000)
    lines = LineFile.scan(path)
    assert lines.count == 100_000
    assert lines.starts.nbytes + lines.ends.nbytes == 16 * lines.count
    assert lines.numbers is None


class TestCommand:
    def test_a_file_that_cannot_be_used_refuses_the_run_and_leaves_nothing(
        self, rlsp_command: Console, write: Write
    ) -> None:
        assert rlsp_command("task=jsonl") == 2
        assert "  task.path=null: legal: a file of JSON lines (for task.kind=jsonl)" in rlsp_command.errors
        assert rlsp_command("task=jsonl", "task.path=absent") == 2
        assert rlsp_command.errors.splitlines()[1] == (
            "  task.path=absent: legal: JSON lines with prompts and labels; "
            "absent: cannot be read: No such file or directory"
        )
        path = write({"prompt": "caf\u00e9", "label": "1"}, *sums(2), b"{")
        assert rlsp_command("task=jsonl", f"task.path={path}") == 2
        said = rlsp_command.errors.splitlines()[1:]
        assert [f"{path}, line {number}: " in line for number, line in zip((1, 4), said, strict=True)] == [
            True
        ] * 2
        assert rlsp_command.left() == ["rows.jsonl"]
        assert rlsp_command.jobs == []

    def test_a_scorer_that_is_not_installed_refuses_the_run(
        self, rlsp_command: Console, write: Write, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(scorer, "math_verify_is_installed", lambda: False)
        asked = ("task=jsonl", f"task.path={write(*sums(2))}", "task.scorer=math_verify")
        assert rlsp_command(*asked) == 2
        assert rlsp_command.errors.splitlines()[1] == (
            "  task.scorer=math_verify: legal: a scorer that is installed; "
            "math-verify is not installed: it comes with `pip install 'rlsp[math]'`"
        )

    @pytest.mark.skipif(not scorer.math_verify_is_installed(), reason="needs math-verify, the extra `math`")
    def test_math_verify_scores_in_a_process_apart(
        self, compose: Callable[..., Config], write: Write
    ) -> None:
        path = write({"prompt": "1/2 =", "label": r"\frac{1}{2}"})
        config = compose("task=jsonl", f"task.path={path}", "task.scorer=math_verify")
        judge = judge_of(config, open_task(config)[1])
        assert isinstance(judge, Apart)
        with closing(judge):
            assert judge.reward(0, TOKENIZER.encode(r"\boxed{0.5}"), 30.0) == 1.0
            assert judge.reward(3, TOKENIZER.encode("0.25"), 30.0) == 0.0

    def test_a_good_file_starts_one(self, rlsp_command: Console, write: Write) -> None:
        write(*sums(4))
        assert rlsp_command("task=jsonl", "task.path=rows.jsonl", "task.order=file") == 0
        task = task_of(rlsp_command.jobs[0].config, TOKENIZER)
        assert [task.prompt(index).text for index in range(4)] == [row["prompt"] for row in sums(4)]


def test_ranks_that_have_another_file_under_the_same_path_are_named(
    compose: Callable[..., Config], write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [opened(write(*sums(count), name=f"{count}.jsonl")) for count in (2, 3)]

    def gathered(mine: torch.Tensor, group: object) -> torch.Tensor:
        other = mine.clone()
        other[0, 128:160] = torch.tensor(list(bytes.fromhex(tasks[1].content_hash)), dtype=torch.uint8)
        return torch.cat([mine, other])

    monkeypatch.setattr(evidence.collectives, "gather", gathered)
    models = SimpleNamespace(
        contract=SimpleNamespace(sha256="0" * 64),
        certificate=SimpleNamespace(digest="0" * 64),
        trainer=torch.nn.Linear(1, 1),
    )
    with pytest.raises(evidence.DisagreementError) as error:
        evidence.startup_facts(compose(), models, SimpleNamespace(world=None), tasks[0], TOKENIZER, "0" * 64)
    first, second = (task.content_hash[:16] for task in tasks)
    assert str(error.value) == f"ranks disagree on task hash: rank 0 {first}, rank 1 {second}"


def test_limits_of_ones_own_work_with_rows_too(compose: Callable[..., Config], write: Write) -> None:
    path = write(*sums(4))
    task = task_of(compose("task=jsonl", f"task.path={path}", "task.response_limit=3"), TOKENIZER)
    assert {task.prompt(index).limit for index in range(60)} == {0, 1, 2, 3}
