"""The model's modules: what they compute, what they refuse, and what no layout changes about them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from model_helpers import (
    BF16,
    CPU,
    TIED,
    TINY,
    alone,
    contract_of,
    mesh_of,
    policy,
    products,
    ragged,
    trainer,
    whole_logits,
    wiring_of,
)
from ranks import run_checks
from torch import Tensor, nn

from rlsp import bits, collectives
from rlsp.layout import Layout
from rlsp.model.activation import SwiGLU, residual_add
from rlsp.model.attention import Channel, KeyValueCache
from rlsp.model.build import PolicyModel, RlspTransformerConfig, agree_on_sequence_parallelism, initialize
from rlsp.model.head import TokenScores, Vocabulary, score_tokens
from rlsp.model.linear import ColumnParallelLinear, RowParallelLinear
from rlsp.model.rope import Rotate, inverse_frequencies, rotary_table
from rlsp.model.weights import weights_digest
from rlsp.model.wiring import Operator, Wiring
from rlsp.summation import Guard

ONE = Layout(dp=1, cp=1, tp=1, sp=1)
TOKENS = ragged([40, 40], [30, 30]).tokens
SMOOTH = 0.7


def config_of(wiring: Wiring, **changes: object) -> RlspTransformerConfig:
    return RlspTransformerConfig(
        num_layers=1,
        hidden_size=64,
        num_attention_heads=16,
        num_query_groups=8,
        params_dtype=torch.float32,
        use_cpu_initialization=True,
        wiring=wiring,
        **changes,
    )


# Refusals.


@pytest.mark.parametrize("gathers", [True, False])
def test_qkv_and_projection_must_agree_on_sequence_parallelism(gathers: bool) -> None:
    one, other = (config_of(wiring_of(alone(), sp=sp)) for sp in (gathers, not gathers))
    qkv, projection = ColumnParallelLinear(64, 128, config=one), RowParallelLinear(64, 64, config=other)
    with pytest.raises(ValueError, match=f"linear_qkv says {gathers}, linear_proj says {not gathers}"):
        agree_on_sequence_parallelism(qkv, projection)
    agree_on_sequence_parallelism(qkv, RowParallelLinear(64, 64, config=one))


def foreign_collectives(rank: int, world: int) -> list[str]:
    """Give every linear of a sequence-parallel model another group than its own, in every way."""
    mesh = mesh_of(Layout(dp=1, cp=1, tp=world, sp=world), rank)
    config = config_of(wiring_of(mesh, sp=True))
    lookalike = dist.new_group(list(range(world)))
    refused = []
    for kind in (ColumnParallelLinear, RowParallelLinear):
        kind(64, 64, config=config, tp_group=mesh.tp.handle)
        for group in (lookalike, dist.new_group([rank], use_local_synchronization=True), dist.group.WORLD):
            with pytest.raises(ValueError, match="keeps its own collectives") as caught:
                kind(64, 64, config=config, tp_group=group)
            refused.append(str(caught.value))
    return refused


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("option", ["bias", "is_expert"])
def test_a_linear_refuses_what_the_contract_does_not_know(kind: type[nn.Module], option: str) -> None:
    with pytest.raises(ValueError, match="no bias and serve no experts"):
        kind(64, 64, config=config_of(wiring_of(alone())), **{option: True})


def test_a_row_parallel_linear_refuses_a_whole_input() -> None:
    with pytest.raises(ValueError, match="already sharded"):
        RowParallelLinear(64, 64, config=config_of(wiring_of(alone())), input_is_parallel=False)


def test_attention_refuses_masks_and_packing() -> None:
    attention = policy(alone()).gpt.decoder.layers[0].self_attention.core_attention
    q, k = torch.zeros(32, 1, 16, 8), torch.zeros(32, 1, 8, 8)
    channel = Channel(qkv_format="sbhd", positions=torch.arange(32)[:, None])
    with pytest.raises(ValueError, match="no mask and no packing"):
        attention(q, k, k, torch.ones(1, dtype=torch.bool), packed_seq_params=channel)
    with pytest.raises(ValueError, match="takes positions from a Channel"):
        attention(q, k, k, packed_seq_params=None)


def test_the_head_refuses_to_gather_logits() -> None:
    with pytest.raises(ValueError, match="keeps logits sharded"):
        policy(alone()).gpt.output_layer(torch.zeros(32, 1, 64), runtime_gather_output=True)


def test_a_parameter_whose_gradient_nobody_sums_is_refused() -> None:
    model = policy(alone())
    model.gpt.decoder.stranger = nn.Parameter(torch.zeros(3))
    with pytest.raises(TypeError, match=r"decoder\.stranger has no gradient of ours"):
        model.attach_sums(Guard())


# Initial weights.


def test_initial_weights_are_keyed_by_seed_name_and_shard() -> None:
    one, same, other = (policy(alone(), seed=seed) for seed in (0, 0, 1))
    assert weights_digest(one) == weights_digest(same) != weights_digest(other)
    shards = [shard for _, weight, sharded in one.named_shards() if sharded for shard in weight]
    assert len({shard.detach().numpy().tobytes() for shard in shards}) == len(shards) == 10 * 8


def test_initial_weights_have_megatrons_scales() -> None:
    model = policy(alone(), shape=replace(TINY, init_std=0.02))
    initialize(model, 0, 0.02, TINY.num_layers)
    for name, weight, sharded in model.named_shards():
        scaled = "linear_proj" in name or "linear_fc2" in name
        std = 0.02 / math.sqrt(2 * TINY.num_layers) if scaled else 0.02
        assert not sharded or float(weight.detach().std()) == pytest.approx(std, rel=0.05), name
        assert sharded or bool((weight == 1).all())


def initial_digests(rank: int, world: int) -> set[str]:
    """F11."""
    return {
        weights_digest(policy(mesh_of(Layout(dp=world // tp, cp=1, tp=tp, sp=sp), rank), sp=sp > 1))
        for tp, sp in ((1, 1), (2, 1), (2, 2))
    }


# Vocabulary: padding, shards, tied weights.


def scores_of(model: PolicyModel) -> TokenScores:
    positions = torch.arange(64)
    tokens = torch.nn.functional.pad(TOKENS, (0, 64 - TOKENS.shape[1]))
    with torch.no_grad():
        hidden = model.hidden(tokens, Channel(qkv_format="sbhd", positions=positions[:, None]))
        logits = model.logits(hidden)
        targets = tokens.roll(-1, dims=1).t().reshape(-1)
        return score_tokens(logits, targets, SMOOTH, model.vocabulary, model.wiring)


@pytest.mark.parametrize("shape", [TINY, BF16], ids=["float32", "bfloat16"])
def test_what_the_padded_vocabulary_holds_changes_no_bit(shape: object) -> None:
    """A1, A3: rows that would win every softmax, if they took part."""
    clean, dirty = policy(alone(), shape=shape), policy(alone(), shape=shape)
    with torch.no_grad():
        dirty.gpt.output_layer.weight.view(-1, 64)[97:] = 50.0
    before, after = scores_of(clean), scores_of(dirty)
    for name in ("logp", "entropy", "row_digest"):
        assert bits.same_bits(getattr(before, name), getattr(after, name)), name
    assert bool(before.entropy.isfinite().all())
    with torch.no_grad():
        dirty.gpt.output_layer.weight.view(-1, 64)[96] += 0.01  # witness: a true row
    assert not bits.same_bits(before.row_digest, scores_of(dirty).row_digest)


def test_entropy_is_the_exact_sum_over_the_true_vocabulary() -> None:
    """A11."""
    model = policy(alone())
    tokens = torch.nn.functional.pad(TOKENS, (0, 24))
    logits = whole_logits(model, tokens, alone()).double().transpose(0, 1).reshape(-1, 97) / SMOOTH
    p = logits.softmax(-1)
    assert torch.allclose(scores_of(model).entropy.double(), -(p * p.log()).sum(-1), atol=1e-5)


def head_gradients(rank: int, world: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of rows whose targets all lie on rank 0, and the gradient of the logits, put together."""
    mesh = mesh_of(Layout(dp=1, cp=1, tp=world, sp=1), rank)
    wiring = wiring_of(mesh)
    vocabulary = Vocabulary.of(wiring, TINY.vocab_size, CPU)
    every = torch.randn(5, 1, 128, generator=torch.Generator().manual_seed(1))
    local = every.chunk(world, dim=2)[rank].contiguous().requires_grad_()
    scores = score_tokens(local, torch.tensor([0, 3, 9, 15, 31]), SMOOTH, vocabulary, wiring)
    (2 * scores.logp - 0.1 * scores.entropy).sum().backward()
    assert local.grad is not None
    return scores.logp.detach(), scores.entropy.detach(), collectives.gather(local.grad, mesh.tp, dim=2)


def tied_step(rank: int, world: int) -> tuple[bool, Tensor]:
    """A15: one step of a tied model; logits before and after use the embedding's own tensor."""
    layout = Layout(dp=1, cp=1, tp=world, sp=1)
    mesh = mesh_of(layout, rank)
    of = trainer(mesh, layout, shape=TIED)
    names = [name for name, _, _ in of.model.named_shards()]
    assert "embedding.word_embeddings.weight" in names
    assert not any("output_layer" in name for name in names)
    table = of.model.gpt.embedding.word_embeddings.weight
    before = table.detach().clone()
    of.update(ragged([40, 33], [30, 20]), torch.tensor([1.0, -1.0]))
    assert of.model.gpt.shared_embedding_or_output_weight() is table
    changed = bool((table != before).any())
    return changed, whole_logits(of.model, torch.nn.functional.pad(TOKENS, (0, 24)), mesh)


def test_the_head_and_the_initial_weights_do_not_depend_on_tp() -> None:
    products()
    found = run_checks(2, [foreign_collectives, initial_digests, head_gradients, tied_step])
    expected = weights_digest(policy(alone()))
    assert found["initial_digests"] == [{expected}] * 2
    assert all(len(refused) == 6 for refused in found["foreign_collectives"])

    alone_scores = head_gradients(0, 1)
    for scores in found["head_gradients"]:
        # A6: neither log-probs nor entropy grow by log(tp). A4: gradients are one process's.
        assert all(bits.same_bits(a, b) for a, b in zip(scores, alone_scores, strict=True))
    # A5: targets on rank 0 pull at every true column of rank 1.
    assert bool((alone_scores[2][:, :, 64:97] != 0).all())
    assert bool((alone_scores[2][:, :, 97:] == 0).all())

    expected_logits = tied_step(0, 1)[1]
    for changed, logits in found["tied_step"]:
        assert changed
        assert bits.same_bits(logits, expected_logits)


def test_logits_gradients_are_those_of_autograd() -> None:
    logits = torch.randn(5, 1, 128, generator=torch.Generator().manual_seed(1))
    x = logits[..., :97].double().requires_grad_()
    logp = (x / SMOOTH).log_softmax(-1)
    chosen = logp[range(5), 0, [0, 3, 9, 15, 31]]
    (2 * chosen.sum() + 0.1 * (logp.exp() * logp).sum()).backward()
    assert x.grad is not None
    assert torch.allclose(head_gradients(0, 1)[2][..., :97].double(), x.grad, atol=1e-6)


# Elementwise modules.


def test_swiglu_gates_each_virtual_shard_by_its_own_half() -> None:
    module = SwiGLU(config=config_of(wiring_of(alone())))
    x = torch.randn(4, 2, 8 * 2 * 3, generator=torch.Generator().manual_seed(2)).requires_grad_()
    y = module(x)
    wide = x.detach().double().requires_grad_()
    gate, up = wide.view(4, 2, 8, 2, 3).unbind(-2)
    exact = (torch.nn.functional.silu(gate) * up).flatten(2)
    assert torch.allclose(y.double(), exact, atol=1e-6)
    weight = torch.linspace(-1, 1, y.numel()).view(y.shape)
    (y * weight).sum().backward()
    (exact * weight).sum().backward()
    assert torch.allclose(x.grad.double(), wide.grad, atol=1e-6)
    assert module.sharded_state_dict() == {}


def test_residuals_are_added() -> None:
    add = residual_add(True, False)
    assert add((torch.tensor([1.0, 2.0]), None), torch.tensor([0.5, -2.0]), 0.0).tolist() == [1.5, 0.0]


def test_a_rotation_is_undone_by_its_gradient() -> None:
    positions = torch.tensor([[0], [5], [4000]])
    cosine, sine = rotary_table(positions, inverse_frequencies(8, 1e6, {}))
    exact = positions[..., None].double() * 1e6 ** (-torch.arange(0, 8, 2).double() / 8)
    assert torch.allclose(cosine.double(), exact.cos(), atol=1e-3)  # float32 angles of 4000 are coarse
    assert torch.allclose(cosine[:2].double(), exact[:2].cos(), atol=1e-6)
    x = torch.randn(3, 1, 8, generator=torch.Generator().manual_seed(3)).requires_grad_()
    y = Rotate.on(x, cosine, sine, torch.float32)
    assert bits.same_bits(y[0], x[0])  # position 0
    assert torch.allclose(y.norm(dim=-1), x.norm(dim=-1))
    y.backward(y.detach())
    assert torch.allclose(x.grad, x, atol=1e-6)


def test_a_cache_holds_zeros_where_nothing_was_stored_and_drops_sequences() -> None:
    cache = KeyValueCache(layers=2, batch=3, groups=2, length=33, block=32, head_dim=4, device=CPU)
    assert cache.keys[0].shape == (3, 2, 2, 4, 32)
    assert cache.values[0].shape == (3, 2, 2, 32, 4)
    key = torch.arange(24.0).view(1, 3, 2, 4).bfloat16()
    cache.store(1, key, -key, torch.tensor([[0, 31, 32]]))
    assert bool((cache.keys[0] == 0).all())
    assert cache.keys[1][1, :, 0, :, 31].tolist() == key[0, 1].tolist()
    assert cache.values[1][2, :, 1, 0].tolist() == (-key[0, 2]).tolist()
    assert int((cache.keys[1] != 0).sum()) == 23  # element 0 of key is 0
    cache.keep(torch.tensor([2]))
    assert cache.keys[1][0, :, 1, :, 0].tolist() == key[0, 2].tolist()


# Counting.


def test_executed_calls_are_counted_by_phase_operator_and_route() -> None:
    model = policy(alone())
    scores_of(model)
    counts = {f"train.{operator.value}": {"strict": calls} for operator, calls in CALLS.items()}
    assert model.wiring.take_counts() == counts
    assert model.wiring.take_counts() == {}


CALLS = {Operator.ATTENTION: TINY.num_layers, Operator.FFN: TINY.num_layers, Operator.LOGP: 1}


def test_the_contract_names_what_the_models_are_built_from() -> None:
    assert contract_of(TINY).sha256 != contract_of(BF16).sha256
    assert contract_of(TINY).sha256 == contract_of(TIED).sha256


@pytest.mark.parametrize("shape", [TINY, BF16], ids=["float32", "bfloat16"])
def test_a_forward_pass_that_nobody_differentiates_has_the_same_bits(shape: object) -> None:
    model, positions = policy(alone(), shape=shape), torch.arange(32)
    tokens = torch.nn.functional.pad(TOKENS, (0, 32))[:, :32]
    channel = Channel(qkv_format="sbhd", positions=positions[:, None])
    with torch.no_grad():
        alone_bits = model.logits(model.hidden(tokens, channel))
    watched = model.logits(model.hidden(tokens, channel))
    assert watched.requires_grad
    assert not alone_bits.requires_grad
    assert bits.same_bits(watched.detach(), alone_bits)
