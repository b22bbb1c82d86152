"""Peak memory of log-probability and entropy, forward and backward, at a real vocabulary."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.ranks import Options, compose, forget_peak, on_ranks, peak_mib, rank_function
from rlsp.board import Place
from rlsp.config import Config
from rlsp.model.gradients import ExactParameter
from rlsp.model.large_vocabulary import score_hidden
from rlsp.numerics.operands import noise
from rlsp.run import mesh_of

TOKENS, WORDS, HIDDEN = 4096, 151936, 64


@rank_function
def peak(config: Config, place: Place, options: Options) -> Any:
    """Return what the operator added to this process's largest resident size, MiB."""
    from benchmarks.step import CPU, trainer

    trained = trainer(config, mesh_of(config, place))
    model = trained.model
    head = model.gpt.output_layer.weight
    assert isinstance(head, ExactParameter)
    tokens = options["tokens"]
    head.token_sum.begin(tokens)
    hidden = noise(1, (tokens, 1, HIDDEN), CPU).to(torch.bfloat16).requires_grad_()
    targets = torch.arange(tokens) * 37 % WORDS
    _touch(head.token_sum.total)
    before = forget_peak()
    scores = score_hidden(hidden, head, targets, 1.0, model.vocabulary, model.wiring)
    torch.autograd.backward((scores.logp, scores.entropy), (torch.ones(tokens), torch.ones(tokens)))
    assert hidden.grad is not None
    return peak_mib() - before


def ratio(tokens: int = TOKENS) -> tuple[float, str]:
    """Return the peak over the size of the float32 logits, and how it was measured."""
    shape = [f"model.vocab_size={WORDS}", f"model.hidden_size={HIDDEN}", "model.num_layers=1"]
    (added,) = on_ranks(compose("parallel=cp1_tp1_sp1", *shape), "benchmarks.memory:peak", {"tokens": tokens})
    logits = tokens * WORDS * 4 / (1 << 20)
    how = (
        f"growth of the resident size over head, log-prob, entropy, forward and backward: {added:.0f} MiB, "
        f"over the {logits:.0f} MiB of {tokens} × {WORDS} float32 logits alone; hidden size {HIDDEN}, "
        "bfloat16, one rank"
    )
    return added / logits, how


def _touch(x: torch.Tensor) -> None:
    """Let the accumulator, which every step has anyway, be resident before the measurement."""
    x.add_(1).zero_()
