"""The peers' model: transformers' Qwen3 in the shape that rlsp trains, and a tokenizer of characters."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from benchmarks.ranks import compose


def qwen3(*overrides: str) -> Any:
    """Build the model with random weights, in bfloat16."""
    shape = compose(*overrides).model
    config = Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_query_groups,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tie_embeddings,
        max_position_embeddings=4096,
        pad_token_id=shape.vocab_size - 2,
        eos_token_id=shape.vocab_size - 1,
    )
    return Qwen3ForCausalLM(config).to(torch.bfloat16)


def characters(vocab_size: int) -> Any:
    """Make a tokenizer of one printable character a token, with padding and end."""
    letters = {chr(32 + i): i for i in range(vocab_size - 2)}
    vocabulary = {**letters, "<pad>": vocab_size - 2, "<eos>": vocab_size - 1}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
