"""Small tokenizers as checkpoints come with them: a folder with tokenizer.json, a GGUF file."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

END, START, STOP, BEGIN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"
CHATML = (
    "{% for message in messages %}{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('no role ' + message.role) }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
CORPUS = [
    "What is 12 + 30? The answer is 42.",
    "Say <answer>7</answer> and stop.",
    "don't stop, naïve 日本語",
] * 4
SPECIAL = [END, START, STOP, BEGIN]


def backend(*, bos: bool = False, eos: bool = False) -> Tokenizer:
    """Train a byte-level BPE; on request it puts BOS in front of a text and EOS behind it."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    made.add_tokens(["<think>", "</think>"])
    if bos or eos:
        made.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} " * bos + "$A" + f" {STOP}" * eos,
            special_tokens=[(BEGIN, made.token_to_id(BEGIN)), (STOP, made.token_to_id(STOP))],
        )
    return made


def write_folder(
    folder: Path, made: Tokenizer | None = None, generation: object = None, **config: Any
) -> Path:
    """Write what `save_pretrained` writes; a value of None leaves a key of tokenizer_config.json out."""
    folder.mkdir(parents=True, exist_ok=True)
    (made or backend()).save(str(folder / "tokenizer.json"))
    stated = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": STOP,
        "pad_token": END,
        "chat_template": CHATML,
        "clean_up_tokenization_spaces": False,
        **config,
    }
    kept = {key: value for key, value in stated.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    return folder


def write_gguf(path: Path, made: Tokenizer, **changes: Any) -> Path:
    """Write a tokenizer into the header of a GGUF file, as llama.cpp's converter does."""
    stated = json.loads(made.to_str())
    count = made.get_vocab_size()
    header = {
        "general.architecture": "llama",
        "general.file_type": 3,
        "general.scale": 0.5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [made.id_to_token(token) for token in range(count)],
        "tokenizer.ggml.token_type": [3 if token < len(SPECIAL) else 1 for token in range(count)],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in stated["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": made.token_to_id(STOP),
        "tokenizer.ggml.padding_token_id": made.token_to_id(END),
        "tokenizer.ggml.bos_token_id": made.token_to_id(BEGIN),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
        **changes,
    }
    for token in ("<think>", "</think>"):
        header["tokenizer.ggml.token_type"][made.token_to_id(token)] = 4
    written = {key: value for key, value in header.items() if value is not None}
    data = b"GGUF" + struct.pack("<IQQ", 3, 1, len(written))
    tensor = _text("token_embd.weight") + struct.pack("<IQQIQ", 2, 1, count, 0, 0)
    path.write_bytes(
        data
        + b"".join(_text(key) + _typed(value) for key, value in written.items())
        + tensor
        + bytes(4 * count)
    )
    return path


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _typed(value: Any) -> bytes:
    if isinstance(value, list):
        kind = 8 if isinstance(value[0], str) else 5
        items = b"".join(_text(item) if kind == 8 else struct.pack("<i", item) for item in value)
        return struct.pack("<IIQ", 9, kind, len(value)) + items
    for of, kind, layout in ((bool, 7, "<?"), (int, 4, "<I"), (float, 6, "<f")):
        if isinstance(value, of):
            return struct.pack("<I", kind) + struct.pack(layout, value)
    return struct.pack("<I", 8) + _text(value)
