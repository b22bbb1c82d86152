"""A small Qwen3 in any layout, batches to feed it, what one training leaves behind, and a float64 oracle."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

with warnings.catch_warnings():
    # Megatron-Core compiles functions at its first import; torch then warns of its own torch.jit.
    warnings.simplefilter("ignore", DeprecationWarning)
    import rlsp.model.build  # noqa: F401

from rlsp import bits, collectives
from rlsp.config import Dtype, Given, ModelConfig
from rlsp.groups import Group, Mesh, build_mesh
from rlsp.layout import Layout, RolloutLayout, padded_vocab
from rlsp.model.assemble import wanted_products
from rlsp.model.attention import Channel
from rlsp.model.build import PolicyModel, build_model, copy_bits, initialize
from rlsp.model.hf import load_hugging_face
from rlsp.model.wiring import Phase, Wiring
from rlsp.numerics.certificate import certify
from rlsp.numerics.contract import Contract
from rlsp.numerics.products import Products
from rlsp.pretrained.names import tensor_shapes
from rlsp.rl.batch import RolloutBatch
from rlsp.rl.optimizer import AdamW, Hyperparameters
from rlsp.rl.rollout.dispatch import Rollouts
from rlsp.rl.rollout.native import NativeEngine
from rlsp.rl.update import Objective, Trainer
from rlsp.sequence import gather_positions, local_positions

CPU = torch.device("cpu")
PAD, EOS = 95, 96
VIRTUAL = 8

TINY = ModelConfig(
    name="tiny",
    num_layers=2,
    hidden_size=64,
    num_attention_heads=16,
    num_query_groups=8,
    head_dim=8,
    ffn_hidden_size=128,
    vocab_size=97,
    qk_norm=True,
    rope_base=1.0e6,
    rope_scaling=Given(),
    norm_epsilon=1.0e-6,
    tie_embeddings=False,
    init_std=0.1,
    pad_heads=False,
    path=None,
    dtype=Dtype.float32,
)
TIED = replace(TINY, tie_embeddings=True)
BF16 = replace(TINY, dtype=Dtype.bfloat16)

HYPER = Hyperparameters(beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1)
OBJECTIVE = Objective(
    clip_ratio=0.2,
    kl_coef=0.05,
    entropy_coef=0.01,
    temperature=0.8,
    grad_clip=0.05,
    learning_rate=1e-2,
    micro_batch_size=8,
)


def contract_of(shape: ModelConfig) -> Contract:
    return Contract(
        virtual_tp=VIRTUAL,
        token_block=32,
        q_block=32,
        k_block=32,
        row_tile=32,
        grad_lsb=40,
        threads=1,
        dtype=shape.dtype.value,
        padded_vocab=padded_vocab(shape.vocab_size, VIRTUAL),
    )


@cache
def products() -> Products:
    """Certified once, in the test process where that comes first: forked ranks have it too."""
    leaf = Products(contract_of(TINY).row_tile)
    wanted = wanted_products(TINY, contract_of(TINY), (1, 2, 4, 8))
    return leaf.certified(certify(leaf, wanted, contract_of(TINY).token_block, 1).wide)


def mesh_of(layout: Layout, rank: int = 0, engines: RolloutLayout | None = None) -> Mesh:
    return build_mesh(layout, engines or RolloutLayout(1, layout.world_size, layout.world_size), rank, 60.0)


def alone() -> Mesh:
    return mesh_of(Layout(dp=1, cp=1, tp=1, sp=1))


def lone_cp(mesh: Mesh) -> Group:
    return Group("rollout_cp", (mesh.world.rank,), 0)


def wiring_of(mesh: Mesh, *, sp: bool = False, shape: ModelConfig = TINY) -> Wiring:
    return Wiring(Phase.TRAIN, contract_of(shape), products(), mesh.tp, mesh.cp, sp)


def policy(mesh: Mesh, *, sp: bool = False, shape: ModelConfig = TINY, seed: int = 0) -> PolicyModel:
    """A training model with the initial weights of `seed`."""
    model = build_model(shape, wiring_of(mesh, sp=sp, shape=shape), CPU)
    initialize(model, seed, shape.init_std, shape.num_layers)
    return model


def engine(mesh: Mesh, *, shape: ModelConfig = TINY, seed: int | None = None) -> NativeEngine | None:
    """This rank's engine, with the initial weights of `seed` (zeros if None); None where it idles."""
    if mesh.rollout_tp is None:
        return None
    wiring = Wiring(Phase.ROLLOUT, contract_of(shape), products(), mesh.rollout_tp, lone_cp(mesh), False)
    model = build_model(shape, wiring, CPU).requires_grad_(False)
    for _, parameter, _ in model.named_shards():
        parameter.zero_()
    if seed is not None:
        initialize(model, seed, shape.init_std, shape.num_layers)
    return NativeEngine(
        model, shape.num_query_groups // mesh.rollout_tp.size, shape.head_dim, shape.num_layers
    )


def rollouts(
    trainer: PolicyModel, mesh: Mesh, engines: RolloutLayout, shape: ModelConfig = TINY, pad_id: int = PAD
) -> Rollouts:
    return Rollouts(trainer, engine(mesh, shape=shape), engines, mesh, pad_id)


def ragged(lengths: Sequence[int], responses: Sequence[int], seed: int = 0) -> RolloutBatch:
    """Sequences of these lengths whose last `responses` tokens count; old log-probs near −log(vocab)."""
    source = torch.Generator().manual_seed(seed)
    total = torch.tensor(lengths)
    shape = (len(lengths), max(lengths))
    column = torch.arange(shape[1])
    mask = (column < total[:, None]) & (column >= (total - torch.tensor(responses))[:, None])
    tokens = torch.randint(0, TINY.vocab_size, shape, generator=source).where(column < total[:, None], PAD)
    logp = (-4.6 + 0.3 * torch.randn(shape, generator=source)).where(mask, 0.0)
    return RolloutBatch(tokens, mask, total, logp, torch.zeros(shape, dtype=torch.int64))


def reordered(batch: RolloutBatch, order: Sequence[int]) -> RolloutBatch:
    index = torch.tensor(order)
    fields = (batch.tokens, batch.active_mask, batch.lengths, batch.logp, batch.row_digest)
    return RolloutBatch(*(x[index] for x in fields))


class Recording(AdamW):
    """Keep the last step's gradients."""

    gradients: dict[str, Tensor]

    def step(self, gradients: Mapping[str, Tensor], learning_rate: float, clip: float) -> None:
        self.gradients = dict(gradients)
        super().step(gradients, learning_rate, clip)


def trainer(
    mesh: Mesh,
    layout: Layout,
    *,
    objective: Objective = OBJECTIVE,
    shape: ModelConfig = TINY,
    seed: int = 0,
    state: Mapping[str, Tensor] | None = None,
    reference_state: Mapping[str, Tensor] | None = None,
) -> Trainer:
    """A trainer from the initial weights of `seed` or from `state`; so is its reference, or from its own."""
    sp = layout.sequence_parallel
    model = policy(mesh, sp=sp, shape=shape, seed=seed)
    if state is not None:
        load_hugging_face(model, shape, state)
    reference = None
    if objective.kl_coef > 0:
        reference = policy(mesh, sp=sp, shape=shape)
        copy_bits(model, reference)
        if reference_state is not None:
            load_hugging_face(reference, shape, reference_state)
    return Trainer(model, reference, Recording(model, HYPER), mesh, layout, objective)


def gradients_of(of: Trainer) -> dict[str, Tensor]:
    assert isinstance(of.optimizer, Recording)
    return of.optimizer.gradients


@dataclass(frozen=True)
class Left:
    """What a training left behind, in plain values: equal exactly where every bit is equal."""

    norms: tuple[str, ...]
    clips: tuple[str, ...]
    gradients: tuple[str, ...]
    metrics: tuple[str, ...]
    logps: tuple[str, ...]
    rows: tuple[str, ...]
    weights: tuple[str, ...]
    optimizers: tuple[str, ...]


def train(of: Trainer, batch: RolloutBatch, advantages: Tensor, updates: int = 2) -> Left:
    steps = [of.update(batch, advantages) for _ in range(updates)]
    return Left(
        norms=tuple(step.gradient_norm.hex() for step in steps),
        clips=tuple(step.clip.hex() for step in steps),
        gradients=tuple(bits.digest(step.gradients) for step in steps),
        metrics=tuple(str([step.vanished_fraction, *step.metrics.items()]) for step in steps),
        logps=tuple(by_sequence(step.forward.logp, batch) for step in steps),
        rows=tuple(by_sequence(step.forward.row_digest, batch) for step in steps),
        weights=tuple(bits.digest(step.weights) for step in steps),
        optimizers=tuple(bits.digest(step.optimizer) for step in steps),
    )


def by_sequence(x: Tensor, batch: RolloutBatch) -> str:
    """Hash the rows of [N, S] as a set: their order is the batch's, which may be shuffled."""
    rows = sorted(
        hashlib.sha256(a.numpy().tobytes() + b.numpy().tobytes()).hexdigest()
        for a, b in zip(x, batch.tokens, strict=True)
    )
    return hashlib.sha256("".join(rows).encode()).hexdigest()


@torch.no_grad()
def whole_logits(model: PolicyModel, tokens: Tensor, mesh: Mesh) -> Tensor:
    """Logits [b, s, vocabulary] of every position, put together from all ranks of one (dp) replica."""
    positions = local_positions(tokens.shape[1], mesh.cp, CPU)
    channel = Channel(qkv_format="sbhd", positions=positions.unsqueeze(1))
    logits = model.logits(model.hidden(tokens[:, positions], channel))
    everyone = gather_positions(collectives.gather(logits, mesh.tp, dim=2), mesh.cp)
    return everyone.transpose(0, 1)[..., : model.vocabulary.size]


def random_state(shape: ModelConfig, seed: int = 0, std: float = 0.1) -> dict[str, Tensor]:
    """Weights by transformers' names, float32; a tied head is the embedding."""
    source = torch.Generator().manual_seed(seed)
    state = {}
    for name, size in tensor_shapes(shape).items():
        noise = std * torch.randn(size, generator=source)
        state[name] = 1 + noise if len(size) == 1 else noise
    if shape.tie_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return state


def oracle_logits(state: Mapping[str, Tensor], tokens: Tensor, shape: ModelConfig) -> Tensor:
    """Qwen3 or Llama in plain torch, in the dtype of `state`: logits [b, s, vocabulary], differentiable.

    (transformers' own model computes norms, rotations and softmax in float32 whatever its dtype.)
    """
    b, s = tokens.shape
    d, dtype = shape.head_dim, state["model.norm.weight"].dtype

    def norm(x: Tensor, name: str) -> Tensor:
        mean = (x * x).mean(-1, keepdim=True)
        return x / torch.sqrt(mean + shape.norm_epsilon) * state[f"{name}.weight"]

    frequency = shape.rope_base ** -(torch.arange(0, d, 2, dtype=torch.float64) / d)
    angle = (torch.arange(s, dtype=torch.float64)[:, None] * frequency).to(dtype)

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        cosine, sine = angle.cos(), angle.sin()
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)

    def heads(x: Tensor, name: str) -> Tensor:
        return (x @ state[f"{name}.weight"].t()).view(b, s, -1, d).transpose(1, 2)

    causal = torch.ones(s, s, dtype=torch.bool).tril()
    repeats = shape.num_attention_heads // shape.num_query_groups
    x = state["model.embed_tokens.weight"][tokens]
    for layer in range(shape.num_layers):
        at = f"model.layers.{layer}"
        y = norm(x, f"{at}.input_layernorm")
        q, k = (heads(y, f"{at}.self_attn.{part}_proj") for part in "qk")
        if shape.qk_norm:
            q, k = norm(q, f"{at}.self_attn.q_norm"), norm(k, f"{at}.self_attn.k_norm")
        q, k = rotated(q), rotated(k)
        k, v = (z.repeat_interleave(repeats, dim=1) for z in (k, heads(y, f"{at}.self_attn.v_proj")))
        scores = (q @ k.transpose(2, 3) * d**-0.5).masked_fill(~causal, -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, -1)
        x = x + mixed @ state[f"{at}.self_attn.o_proj.weight"].t()
        y = norm(x, f"{at}.post_attention_layernorm")
        gate, up = (y @ state[f"{at}.mlp.{part}_proj.weight"].t() for part in ("gate", "up"))
        x = x + (gate / (1 + torch.exp(-gate)) * up) @ state[f"{at}.mlp.down_proj.weight"].t()
    head = "model.embed_tokens.weight" if shape.tie_embeddings else "lm_head.weight"
    return norm(x, "model.norm") @ state[head].t()
