"""Training steps side by side: rlsp's arithmetic against Megatron-Core's own layers, on the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from benchmarks.ranks import (
    Options,
    alternate,
    compose,
    on_ranks,
    rank_function,
    ratio_text,
    slowest,
)
from rlsp.board import Place
from rlsp.config import Config
from rlsp.groups import Mesh
from rlsp.model import build
from rlsp.model.assemble import assemble
from rlsp.model.attention import CoreAttention
from rlsp.model.compat import native_layers
from rlsp.model.wiring import NATIVE
from rlsp.numerics.operands import noise
from rlsp.rl.batch import RolloutBatch
from rlsp.rl.update import Trainer
from rlsp.run import mesh_of, trainer_of

CPU = torch.device("cpu")
PROMPT_TOKENS = 16
SEQUENCES = 8
LENGTH = 256  # a multiple of every layout's padding: all layouts and both sides compute the same tokens
WORKLOAD = (
    f"{SEQUENCES} sequences of {LENGTH} tokens, one micro-batch, entropy_coef=0.01, qwen3_nano in bfloat16"
)


class BlockAttention(CoreAttention):
    """rlsp's block attention between Megatron-Core's own linear layers, norms and reductions."""

    route = NATIVE


def batch_of(config: Config, sequences: int = SEQUENCES, length: int = LENGTH) -> RolloutBatch:
    """Make a batch of whole sequences: random tokens, log-probabilities near those of a fresh model."""
    shape = (sequences, length)
    vocabulary = config.model.vocab_size
    column = torch.arange(length)
    mask = (column >= PROMPT_TOKENS).expand(shape).clone()
    tokens = ((noise(1, shape, CPU) + 1) / 2 * vocabulary).long().clamp(max=vocabulary - 1)
    logp = torch.where(mask, noise(2, shape, CPU) * 0.3 - 4.6, 0.0)
    lengths = torch.full((sequences,), length)
    return RolloutBatch(tokens, mask, lengths, logp, torch.zeros(shape, dtype=torch.int64))


def advantages_of(sequences: int) -> torch.Tensor:
    """Make advantages of both signs."""
    return noise(3, (sequences,), CPU)


def trainer(config: Config, mesh: Mesh) -> Trainer:
    """Build a trainer as a run does."""
    return trainer_of(config, assemble(config, mesh, CPU), mesh)


def block_attention_trainer(config: Config, mesh: Mesh) -> Trainer:
    """Build the native trainer around rlsp's block attention."""
    with mock.patch.object(build, "NativeCoreAttention", BlockAttention):
        made = trainer(config, mesh)
    for layer in made.model.gpt.decoder.layers:
        made._guard.expect(layer.self_attention.core_attention.leaves_name, CPU)
    return made


@rank_function
def compare(config: Config, place: Place, options: Options) -> Any:
    """Time strict and native updates in turn on this rank."""
    mesh = mesh_of(config, place)
    batch, advantages = batch_of(config), advantages_of(SEQUENCES)
    native = replace(config, numerics=compose(*options["native"]).numerics)

    def update(of: Trainer) -> Callable[[], object]:
        return lambda: of.update(batch, advantages)

    with native_layers(CPU):
        control = block_attention_trainer if options["same_attention"] else trainer
        sides = {"strict": update(trainer(config, mesh)), "native": update(control(native, mesh))}
        return alternate(sides, options["repeats"])


def ratio(layout: str, repeats: int, *, same_attention: bool = False) -> tuple[float, str]:
    """Return strict over native and how it was measured."""
    config = compose(f"parallel={layout}", "entropy_coef=0.01")
    options = {"native": ["numerics=native"], "same_attention": same_attention, "repeats": repeats}
    every = on_ranks(config, "benchmarks.step:compare", options)
    how = f"Trainer.update at {layout}, {WORKLOAD}; {ratio_text(every, 'strict', 'native')}"
    return slowest(every, "strict") / slowest(every, "native"), how
