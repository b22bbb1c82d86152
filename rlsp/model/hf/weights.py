"""Fill a model from transformers' tensors, a rank only with what it owns, and give them out whole again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from rlsp import bits, collectives
from rlsp.config import ModelConfig
from rlsp.model.build import PolicyModel
from rlsp.model.hf.mapping import Copied, Fused, Tensors, weight_plan
from rlsp.numerics.contract import Contract
from rlsp.pretrained.names import EMBEDDING, HEAD, misfits


class WeightMismatchError(ValueError):
    """Weights do not fit the model; the message lists every tensor that is missing, unknown or misshapen."""


def load_weights(model: PolicyModel, shape: ModelConfig, tensors: Tensors) -> None:
    """Copy this rank's virtual shards out of transformers' tensors, in the model's dtype.

    Every rank reads the same tensors in the same order, each its own slices: at most one weight's at a time.

    Args:
        model: The model to fill.
        shape: What it was built from.
        tensors: Every tensor by transformers' name.
    """
    targets = {name: parameter for name, parameter, _ in model.named_shards()}
    tp = model.wiring.tp
    with torch.no_grad():
        for weight in weight_plan(shape, model.wiring.contract):
            target, found = targets[weight.name], weight.collect(tensors, tp.index, tp.size)
            target.copy_(weight.shards(found, target.shape[0]) if isinstance(weight, Fused) else found)


def load_hugging_face(model: PolicyModel, shape: ModelConfig, state: Mapping[str, Tensor]) -> None:
    """Copy this rank's virtual shards out of a state dict, in the model's dtype.

    Args:
        model: The model to fill.
        shape: What it was built from.
        state: Every tensor by transformers' name, whole. With tied embeddings the head may be absent.

    Raises:
        WeightMismatchError: A tensor is missing, unknown or misshapen, or a tied head is not the embedding.
            Nothing has been copied then.
    """
    faults = misfits({name: tuple(x.shape) for name, x in state.items()}, shape)
    if not faults and shape.tie_embeddings and HEAD in state:
        same = bits.same_bits(state[HEAD], state[EMBEDDING])
        faults += [] if same else [f"{HEAD} differs from {EMBEDDING}, to which it is tied"]
    if faults:
        raise WeightMismatchError("; ".join(faults))
    load_weights(model, shape, StateDict(state))


class StateDict:
    """Tensors that are in memory already."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        """Take them by transformers' name."""
        self._state = state

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Return a view of the indices start … stop of dimension `dim`."""
        return self._state[name].narrow(dim, start, stop - start)


def logical_weights(
    state: Mapping[str, Tensor], shape: ModelConfig, contract: Contract
) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight by Megatron-Core's name: a matrix as all virtual shards [V, N, K], a norm as [n]."""
    for weight in weight_plan(shape, contract):
        found = weight.collect(StateDict(state), 0, 1)
        yield weight.name, weight.shards(found, contract.virtual_tp) if isinstance(weight, Fused) else found


def hugging_face_weights(model: PolicyModel, shape: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight by transformers' name, whole, on every rank.

    The ranks of the model's TP group iterate in step, to the end: each weight is gathered over the group as
    it is asked for, moving bits only. A rank holds one weight at a time (the largest is the embedding) and
    what the caller keeps; nothing that is yielded aliases the model.

    Args:
        model: The model, in any layout.
        shape: What it was built from.

    Yields:
        (name, tensor) in the model's dtype and on its device, contiguous, without padding of heads or
        vocabulary; layer by layer, then the final norm, the embedding and the head. A tied head is not
        yielded.
    """
    tp = model.wiring.tp
    held = {name: parameter.detach() for name, parameter, _ in model.named_shards()}
    for weight in weight_plan(shape, model.wiring.contract):
        own = held[weight.name]
        if isinstance(weight, Copied):
            yield weight.source, own.clone()
        else:
            yield from weight.take_apart(collectives.gather(own, tp, dim=0))


def zero_padding(model: PolicyModel, shape: ModelConfig) -> None:
    """Set what pads a model's own virtual shards, heads and vocabulary, to zero; it stays zero as it trains.

    Zero queries, keys and values leave zeros; zero columns of the output projection add and learn nothing. No
    token has the vocabulary's padding, and its logits count nowhere. What is handed out in transformers'
    names has no padding, so that only zeros come back to the same bits.
    """
    held = {name: parameter for name, parameter, _ in model.named_shards()}
    tp = model.wiring.tp
    with torch.no_grad():
        for weight in weight_plan(shape, model.wiring.contract):
            may_pad = shape.pad_heads or "self_attention" not in weight.name
            if isinstance(weight, Fused) and may_pad:
                for rows in weight.padding(held[weight.name], tp.index, tp.size):
                    rows.zero_()
