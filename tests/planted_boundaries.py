"""Plant one ulp in one boundary of one side, below the point where it is captured, on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any
from unittest import mock

from torch import Tensor

from rlsp import bits
from rlsp.model import activation, embedding, head, linear, norm
from rlsp.model.build import PolicyModel
from rlsp.model.wiring import Boundary, Site
from rlsp.numerics import logprob

Chosen = Callable[[tuple[Any, ...]], bool]


@dataclass(frozen=True)
class Place:
    """Where a plant goes: the local row of a tensor [s, b, …] (or of [s·b]) and the sequence, feature 0.

    Attributes:
        positions: Rows of the call that is meant; other calls are left alone.
        row: The row.
        sequences: Sequences of the call.
        sequence: Which of them.
    """

    positions: int
    row: int
    sequences: int
    sequence: int

    def nudge(self, x: Tensor) -> Tensor:
        """Change the last bit of one element."""
        flat = self.row * self.sequences + self.sequence
        return flipped(x, (flat,) if x.dim() == 1 else (self.row, self.sequence))

    def fits(self, x: Tensor) -> bool:
        """Return whether this is the call that is meant."""
        return x.shape[0] == self.positions * self.sequences if x.dim() == 1 else x.shape[0] == self.positions


def flipped(x: Tensor, index: tuple[int, ...]) -> Tensor:
    """Copy a tensor and change the last bit of the first element at `index`."""
    out = x.detach().clone()
    bits.bit_pattern(out)[index].view(-1)[0] ^= 1
    return out


@contextmanager
def planted(site: Site, model: PolicyModel, place: Place, *, training: bool) -> Iterator[None]:
    """Plant at a site of `model` for the first call that fits."""
    owner, name, chosen = _target(site, model, training)
    exact = getattr(owner, name)
    done = count()

    def nudged(*arguments: Any, **named: Any) -> Any:
        out = exact(*arguments, **named)
        first = out[0] if isinstance(out, tuple) else out
        if not chosen(arguments) or not place.fits(first) or next(done):
            return out
        return (place.nudge(first), *out[1:]) if isinstance(out, tuple) else place.nudge(first)

    with mock.patch.object(owner, name, nudged):
        yield
    assert next(done), f"nothing was planted at {site}"


def _target(site: Site, model: PolicyModel, training: bool) -> tuple[Any, str, Chosen]:
    """Return whose attribute computes a site, and which of its calls do; identities pick model and layer."""
    if site.boundary is Boundary.LOGP:
        return (head._Scores, "on", _any) if training else (logprob, "merge", _any)
    layers = model.gpt.decoder.layers
    if site.layer is not None:
        core = layers[site.layer].self_attention.core_attention
        if site.boundary is Boundary.CORE_ATTENTION:
            return core, "_own_queries" if training else "_to_cache", _any
        if site.boundary is Boundary.ACTIVATION:
            return activation._SwiGLU, "on", _turn(site.layer, len(layers))
        if site.boundary in (Boundary.QUERY, Boundary.KEY):
            return core, "_rotated", _turn(int(site.boundary is Boundary.KEY), 2)
    kind, module = _weighted(site, model)
    return kind, "on", lambda arguments: any(x is module.weight for x in arguments)


def _weighted(site: Site, model: PolicyModel) -> tuple[Any, Any]:
    """Return the function that computes a site with a weight of its own, and the module that has it."""
    gpt = model.gpt
    if site.layer is None:
        return {
            Boundary.EMBEDDING: (embedding._Lookup, gpt.embedding.word_embeddings),
            Boundary.FINAL_NORM: (norm._Norm, gpt.decoder.final_layernorm),
            Boundary.LOGITS: (linear._Column, gpt.output_layer),
        }[site.boundary]
    layer = gpt.decoder.layers[site.layer]
    return {
        Boundary.ATTENTION_NORM: (norm._Norm, layer.input_layernorm),
        Boundary.QKV: (linear._Column, layer.self_attention.linear_qkv),
        Boundary.PROJECTION: (linear._Row, layer.self_attention.linear_proj),
        Boundary.MLP_NORM: (norm._Norm, layer.pre_mlp_layernorm),
        Boundary.FC1: (linear._Column, layer.mlp.linear_fc1),
        Boundary.FC2: (linear._Row, layer.mlp.linear_fc2),
    }[site.boundary]


def _any(_: tuple[Any, ...]) -> bool:
    return True


def _turn(turn: int, turns: int) -> Chosen:
    """Choose every call number `turn` of `turns`: layers come in order, and in each q before k."""
    calls = count()
    return lambda _: next(calls) % turns == turn
