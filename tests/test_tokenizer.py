"""Which tokenizer a config asks for, what a run without one can do, and what is refused before it starts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command import Console
from tokenizer_files import END, START, STOP, backend, write_folder, write_gguf

import rlsp.tokenizer
from rlsp.config import Config, ConfigError, TokenizerKind, from_plain, to_plain
from rlsp.rl.reward import Apart, score
from rlsp.rl.task import TaskError, reasoning
from rlsp.rl.task.hugging_face import HuggingFaceTokenizer
from rlsp.rl.task.jsonl import open_jsonl
from rlsp.rl.task.scorer import ExactScorer
from rlsp.rl.task.tokenizer import NoTokenizer
from rlsp.run import sampling_of
from rlsp.task import judge_of, open_task, task_lines
from rlsp.tokenizer import open_tokenizer, tokenizer_kind

Compose = Callable[..., Config]
ROWS = [
    {"prompt": "What is 12 + 30?", "label": "42"},
    {"prompt": [{"role": "user", "content": "What is 1 + 1?"}], "label": "2"},
]
IDS = [{"prompt_ids": [5, 6, 7], "label_ids": [8, 9]}, {"prompt_ids": [5], "label_ids": [96]}]


@pytest.fixture
def rows(tmp_path: Path) -> Callable[..., Path]:
    def written(*lines: Any, name: str = "rows.jsonl") -> Path:
        (tmp_path / name).write_text("\n".join(map(json.dumps, lines)))
        return tmp_path / name

    return written


@pytest.fixture
def asked(compose: Compose, rows: Callable[..., Path]) -> Callable[..., Config]:
    """Compose a config with a task of rows; `model_path` is where the model is to lie."""

    def config(*overrides: str, lines: Any = ROWS, model_path: Path | None = None) -> Config:
        # Paths differ from test to test and are put in afterwards: composing costs a second.
        paths = [text for text in overrides if text.startswith("tokenizer.path=")]
        rest = [text for text in overrides if text not in paths]
        made = compose("task=jsonl", "task.path=a", "task.order=file", "model.vocab_size=320", *rest)
        if made.task.path is not None:
            made = replace(made, task=replace(made.task, path=str(rows(*lines))))
        if paths:
            made = replace(made, tokenizer=replace(made.tokenizer, path=paths[0].partition("=")[2]))
        if model_path is not None:
            made = replace(made, model=replace(made.model, path=str(model_path)))
        return made

    return config


class TestKind:
    def test_auto_is_the_models_own_where_it_has_one(
        self, asked: Callable[..., Config], tmp_path: Path
    ) -> None:
        bare = tmp_path / "bare"
        bare.mkdir()
        (bare / "config.json").write_text("{}")
        full = write_folder(tmp_path / "full")
        (full / "config.json").write_text("{}")
        gguf = tmp_path / "packed"
        gguf.mkdir()
        write_gguf(gguf / "model.gguf", backend())
        assert tokenizer_kind(asked()) is TokenizerKind.character
        assert tokenizer_kind(asked(model_path=bare)) is TokenizerKind.none
        for path in (full, gguf, gguf / "model.gguf"):
            assert tokenizer_kind(asked(model_path=path)) is TokenizerKind.hugging_face
        assert tokenizer_kind(asked(f"tokenizer.path={full}", model_path=bare)) is TokenizerKind.hugging_face
        assert tokenizer_kind(asked(f"tokenizer.path={full}")) is TokenizerKind.hugging_face
        assert tokenizer_kind(asked("tokenizer=none", model_path=full)) is TokenizerKind.none
        assert tokenizer_kind(asked("tokenizer=character", model_path=full)) is TokenizerKind.character

    def test_one_that_cannot_be_read_is_refused_and_not_passed_over(
        self, asked: Callable[..., Config], tmp_path: Path
    ) -> None:
        (tmp_path / "tokenizer.model").write_text("sentencepiece")
        (line,) = task_lines(asked(model_path=tmp_path))
        assert f"tokenizer.path={tmp_path}: legal: a folder with tokenizer.json, or a GGUF file; " in line
        assert "has no tokenizer.json; `transformers` writes one" in line

    def test_ends_of_tokenizer_and_model_come_together_and_stated_ones_win(
        self, asked: Callable[..., Config], tmp_path: Path
    ) -> None:
        folder = write_folder(tmp_path / "tokenizer")
        model = tmp_path / "model"
        model.mkdir()
        (model / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
        with pytest.raises(ConfigError, match=r"tokenizer.path=.*absent: nothing lies there"):
            open_tokenizer(asked(f"tokenizer.path={tmp_path / 'absent'}"))
        for overrides, ends in ((), (2, 0)), (("tokenizer.eos_ids=[7]",), (7,)):
            config = asked(f"tokenizer.path={folder}", *overrides, model_path=model)
            assert open_tokenizer(config).eos_ids == ends
            assert sampling_of(config, 0, open_tokenizer(config)).eos_ids == ends
        endless = asked(f"tokenizer.path={folder}", "rollout.ignore_eos=true")
        assert sampling_of(endless, 0, open_tokenizer(endless)).eos_ids == ()


class TestChat:
    @pytest.mark.parametrize(
        ("overrides", "templated"),
        [
            ((), True),
            (("task=arithmetic", "task.path=null", "task.order=shuffled"), False),
            (("task=arithmetic", "task.path=null", "task.order=shuffled", "tokenizer.chat=always"), True),
            (("tokenizer.chat=never",), False),
        ],
    )
    def test_auto_uses_the_template_where_the_task_instructs(
        self, asked: Callable[..., Config], tmp_path: Path, overrides: tuple[str, ...], templated: bool
    ) -> None:
        folder = write_folder(tmp_path / "tokenizer")
        tokenizer, task = open_task(asked(f"tokenizer.path={folder}", *overrides))
        assert task.prompt(0).text.startswith(START) is templated
        assert (tokenizer.template_hash is not None) is templated

    def test_rows_of_text_and_of_messages_are_what_a_user_says(
        self, asked: Callable[..., Config], tmp_path: Path
    ) -> None:
        folder = write_folder(tmp_path / "tokenizer")
        config = asked(f"tokenizer.path={folder}", "tokenizer.system_prompt=Answer.")
        tokenizer, task = open_task(config)
        assert [task.prompt(index).text for index in range(2)] == [
            f"{START}system\nAnswer.{STOP}\n{START}user\nWhat is {sum_}?{STOP}\n{START}assistant\n"
            for sum_ in ("12 + 30", "1 + 1")
        ]
        right = tokenizer.encode("It is <answer>42</answer>")
        assert task.reward(0, (*right, 2, *tokenizer.encode("no, 41"))) == 1.0
        assert task.reward(0, tokenizer.encode(f"4{END}2")) == 1.0, "special tokens are left out"
        assert task.reward(0, (*tokenizer.encode("4"), 2, *tokenizer.encode("2"))) == 0.0

    def test_an_end_that_is_the_padding_ends_a_response_once(
        self, asked: Callable[..., Config], tmp_path: Path
    ) -> None:
        folder = write_folder(tmp_path / "tokenizer", pad_token=None)
        tokenizer, task = open_task(asked(f"tokenizer.path={folder}"))
        assert tokenizer.pad_id == tokenizer.eos_ids[0] == 2
        assert task.reward(0, (*tokenizer.encode("42"), 2, 2, 2)) == 1.0

    def test_a_template_that_refuses_a_row_names_its_line(
        self, asked: Callable[..., Config], tmp_path: Path
    ) -> None:
        folder = write_folder(tmp_path / "tokenizer")
        tool = {"prompt": [{"role": "tool", "content": "12"}], "label": "1"}
        config = asked(f"tokenizer.path={folder}", lines=[*ROWS, tool])
        (line,) = task_lines(config)
        assert line.endswith("rows.jsonl, line 3: the chat template says TemplateError: no role tool")
        with pytest.raises(TaskError, match=r"rows.jsonl, line 3: the chat template says TemplateError"):
            open_task(config)[1].prompt(2)

    @pytest.mark.skipif(not reasoning.is_installed(), reason="needs reasoning-gym, the extra `tasks`")
    def test_a_generated_question_is_what_a_user_says_and_is_scored_in_a_process_apart(
        self, compose: Compose, tmp_path: Path
    ) -> None:
        folder = write_folder(tmp_path / "tokenizer", generation=[0, 2])
        config = compose("task=reasoning_gym", f"tokenizer.path={folder}", "model.vocab_size=320")
        tokenizer, task = open_task(config)
        prompt = task.prompt(3)
        assert prompt.text.startswith(f"{START}user\n")
        assert prompt.text.endswith(f"{STOP}\n{START}assistant\n")
        assert "State the final answer" in prompt.text
        judge = judge_of(config, task)
        assert isinstance(judge, Apart)
        right = next(n for n in range(-4000, 4000) if task.reward(3, tokenizer.encode(str(n))) == 1.0)
        drawn = [(*tokenizer.encode(f"It is {right}."), 0, *tokenizer.encode("7")), tokenizer.encode("7 8 9")]
        with closing(judge):
            found = score(judge, drawn, rollout=0, first=3, samples=2, decode=tokenizer.decode, within_s=60.0)
        assert (found[0], found[1] < 1.0) == (1.0, True)


class TestIds:
    def test_prompts_and_labels_of_ids_need_no_tokenizer(
        self, asked: Callable[..., Config], tmp_path: Path
    ) -> None:
        model = tmp_path / "model"
        model.mkdir()
        (model / "config.json").write_text('{"eos_token_id": 4}')
        tokenizer, task = open_task(asked(lines=IDS, model_path=model))
        assert tokenizer == NoTokenizer(320, (4,))
        assert [task.prompt(index).tokens for index in range(3)] == [(5, 6, 7), (5,), (5, 6, 7)]
        assert [task.reward(0, response) for response in ((8, 9), (8, 9, 4), (8, 9, 4, 1))] == [1.0] * 3
        assert [task.reward(0, response) for response in ((8,), (8, 9, 1), (4, 8, 9), ())] == [0.0] * 4

    def test_a_label_may_end_as_a_response_does(self, asked: Callable[..., Config]) -> None:
        row = {"input_ids": [5], "label": [8, 9, 4]}
        _, task = open_task(asked("tokenizer=none", "tokenizer.eos_ids=[4,6]", lines=[row]))
        assert [task.reward(0, response) for response in ((8, 9), (8, 9, 6), (8, 9, 5))] == [1.0, 1.0, 0.0]

    def test_prompts_of_ids_may_have_labels_of_text_where_there_is_a_tokenizer(
        self, asked: Callable[..., Config], tmp_path: Path
    ) -> None:
        folder = write_folder(tmp_path / "tokenizer")
        ids = list(backend().encode("What is 12 + 30?").ids)
        tokenizer, task = open_task(asked(f"tokenizer.path={folder}", lines=[{"prompt": ids, "label": "42"}]))
        assert isinstance(tokenizer, HuggingFaceTokenizer)
        assert (task.prompt(0).tokens, task.prompt(0).text) == (tuple(ids), "What is 12 + 30?")
        assert task.reward(0, tokenizer.encode("It is 42.")) == 1.0

    @pytest.mark.parametrize(
        ("row", "said"),
        [
            ({"prompt_ids": [5, 320], "label": [1]}, "the prompt holds the id 320: legal: 0..319"),
            ({"prompt_ids": [5], "label": [1, 999]}, "the label holds the id 999: legal: 0..319"),
            ({"prompt_ids": [5, -1], "label": [1]}, "prompt_ids[1] is no token id: legal: a whole number"),
            ({"prompt_ids": [5, 1.5], "label": [1]}, "prompt_ids[1] is no token id"),
            ({"prompt_ids": [5, "a"], "label": [1]}, "prompt_ids[1] is no token id"),
            ({"prompt_ids": [True], "label": [1]}, "prompt_ids[0] is no token id"),
            ({"prompt_ids": [], "label": [1]}, "prompt_ids is empty"),
            ({"prompt_ids": [5], "label": "12"}, "the label is text and there is no tokenizer"),
            ({"prompt_ids": "five", "label": [1]}, "there is no tokenizer: it takes token ids and no text"),
            (
                {"prompt_ids": [5] * 9, "label": [1]},
                "the prompt has 9 tokens: task.max_prompt_tokens allows 8",
            ),
        ],
    )
    def test_a_bad_row_is_named_with_its_line(
        self, asked: Callable[..., Config], row: dict[str, Any], said: str
    ) -> None:
        good = {"prompt_ids": [5], "label": [6]}
        config = asked(
            "tokenizer=none", "tokenizer.eos_ids=[4]", "task.max_prompt_tokens=8", lines=[good, row]
        )
        (line,) = task_lines(config)
        assert f"rows.jsonl, line 2: {said}" in line
        with pytest.raises(TaskError) as refusal:
            open_task(config)[1].prompt(1)
        assert f"rows.jsonl, line 2: {said}" in str(refusal.value)

    def test_a_prompt_must_leave_the_model_room_for_the_longest_response(
        self, asked: Callable[..., Config], tmp_path: Path
    ) -> None:
        lines = [{"prompt_ids": [5] * length, "label_ids": [8]} for length in (8, 9)]

        def made(positions: object) -> Config:
            (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": positions}))
            return asked(
                "tokenizer=none",
                "tokenizer.eos_ids=[4]",
                "max_response_tokens=12",
                lines=lines,
                model_path=tmp_path,
            )

        said = "rows.jsonl, line 2: the prompt has 9 tokens: max_response_tokens leaves 8 of the positions"
        (line,) = task_lines(made(20))
        assert said in line
        task = open_task(made(20))[1]
        assert len(task.prompt(0).tokens) == 8
        with pytest.raises(TaskError, match=re.escape(said)):
            task.prompt(1)
        for enough in (21, None):
            assert task_lines(made(enough)) == []
            assert len(open_task(made(enough))[1].prompt(1).tokens) == 9

    def test_a_scorer_that_looks_into_text_is_refused(self, rows: Callable[..., Path]) -> None:
        settings: dict[str, Any] = {"seed": 1, "shuffled": False, "prompt_key": None, "label_key": None}
        task = open_jsonl(
            str(rows(*IDS)),
            tokenizer=NoTokenizer(320, (4,)),
            scorer=ExactScorer("boxed"),
            max_prompt_tokens=None,
            **settings,
        )
        with pytest.raises(
            TaskError, match=r"the label is token ids, which task.scorer=exact alone compares"
        ):
            task.prompt(0)


class TestRefusals:
    def test_everything_that_is_wrong_is_said_at_once(
        self, rlsp_command: Console, rows: Callable[..., Path], tmp_path: Path
    ) -> None:
        folder = write_folder(tmp_path / "tokenizer", chat_template="{% for m in messages %}", eos_token=None)
        path = rows({"prompt": "a", "label": "b"}, {"prompt": "a"})
        status = rlsp_command("task=jsonl", f"task.path={path}", f"tokenizer.path={folder}")
        assert status == 2
        assert [line.split(": legal: ")[0].strip() for line in rlsp_command.errors.splitlines()[1:]] == [
            "tokenizer.chat=auto",
            "tokenizer.eos_ids=[]",
            "model.vocab_size=97",
            f"task.path={path}",
        ]
        assert "at least one id (neither tokenizer nor model names one)" in rlsp_command.errors
        assert rlsp_command.jobs == []

    def test_a_vocabulary_may_be_larger_than_the_tokenizers_and_never_smaller(
        self, asked: Callable[..., Config], tmp_path: Path
    ) -> None:
        folder = write_folder(tmp_path / "tokenizer")
        count = backend().get_vocab_size()
        for size, lines in ((count - 1, [f"at least {count}, the ids of the tokenizer"]), (count, [])):
            found = task_lines(asked(f"tokenizer.path={folder}", f"model.vocab_size={size}"))
            assert [line.split(": legal: ")[1] for line in found] == lines

    @pytest.mark.parametrize(
        ("overrides", "said"),
        [
            (
                ("tokenizer=none",),
                "tokenizer.eos_ids=[]: legal: at least one id (neither tokenizer nor model",
            ),
            (("tokenizer=none", "tokenizer.eos_ids=[5,320]"), "ids below model.vocab_size=320, not 320"),
            (
                ("tokenizer=hugging_face",),
                "tokenizer.path=null: legal: a folder with tokenizer.json, or a GGUF",
            ),
            (("tokenizer.path=absent",), "absent: nothing lies there"),
            (("tokenizer.path=Qwen/Qwen3-8B",), "Qwen/Qwen3-8B: nothing lies there"),
        ],
    )
    def test_what_cannot_be_opened_is_refused(
        self, asked: Callable[..., Config], overrides: tuple[str, ...], said: str
    ) -> None:
        assert said in task_lines(asked(*overrides, lines=IDS))[0]

    @pytest.mark.parametrize(
        ("overrides", "said"),
        [
            (("tokenizer.chat=always",), "tokenizer.chat=always: legal: auto or never (the tokenizer has no"),
            (("tokenizer.system_prompt=x",), "null (the tokenizer has no chat template)"),
            (("tokenizer.template_options={a: 1}",), "{} (the tokenizer has no chat template)"),
        ],
    )
    def test_what_only_a_template_reads_is_refused_without_one(
        self, asked: Callable[..., Config], tmp_path: Path, overrides: tuple[str, ...], said: str
    ) -> None:
        folder = write_folder(tmp_path / "tokenizer", chat_template=None)
        assert said in task_lines(asked(f"tokenizer.path={folder}", *overrides))[0]

    def test_a_task_that_asks_in_text_needs_a_tokenizer(self, compose: Compose, tmp_path: Path) -> None:
        config = compose("model.vocab_size=320")
        config = replace(config, model=replace(config.model, path=str(tmp_path)))
        (line,) = task_lines(config)
        assert line == (
            f"tokenizer.kind=auto: legal: character or hugging_face ({tmp_path} has none, and "
            "task.kind=arithmetic asks in text)"
        )

    def test_a_package_that_is_missing_is_named_with_its_extra(
        self, asked: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(rlsp.tokenizer, "is_installed", lambda: False)
        (line,) = task_lines(asked(f"tokenizer.path={write_folder(tmp_path / 'tokenizer')}"))
        assert "tokenizers is not installed: it comes with `pip install 'rlsp[hf]'`" in line


def test_a_tokenizer_is_opened_and_a_conversation_written_without_torch_or_transformers(
    tmp_path: Path,
) -> None:
    folder = write_folder(tmp_path / "tokenizer")
    code = (
        "import sys\n"
        "from rlsp.rl.task.tokenizer_files import read_source\n"
        "from rlsp.rl.task.chat import ChatTemplate\n"
        f"s = read_source({str(folder)!r})\n"
        "t = s.open(s.eos_ids, ChatTemplate(s.template, s.special))\n"
        "t.decode(t.prompt([('user', 'Hi')]).tokens)\n"
        "import rlsp.tokenizer\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_part_of_a_tokenizer_makes_another_run(asked: Callable[..., Config], tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tokenizer")
    variants = [
        asked(f"tokenizer.path={folder}", *overrides)
        for overrides in (
            (),
            ("tokenizer.chat=never",),
            ("tokenizer.system_prompt=x",),
            ("tokenizer.eos_ids=[1]",),
        )
    ]
    hashes = {open_task(config)[1].content_hash for config in variants}
    assert len(hashes) == len(variants)
    assert [from_plain(json.loads(json.dumps(to_plain(config)))) for config in variants] == variants
