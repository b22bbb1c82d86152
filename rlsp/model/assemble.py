"""From a checked configuration to certified models on one rank: trainer, reference and engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from rlsp import collectives, determinism
from rlsp.config import Config, DeviceKind, ModelConfig
from rlsp.groups import Group, Mesh
from rlsp.layout import padded_groups
from rlsp.model.build import PolicyModel, build_model, copy_bits, initialize
from rlsp.model.hf import load_path, zero_padding
from rlsp.model.wiring import Phase, Wiring
from rlsp.numerics import compiled
from rlsp.numerics.certificate import Certificate, Sharded, certify
from rlsp.numerics.compiled import TORCH, Kernel, Kernels
from rlsp.numerics.contract import Contract
from rlsp.numerics.kernel_trials import exact_kernels
from rlsp.numerics.products import Product, Products, Shape


@dataclass(frozen=True)
class Models:
    """What one rank computes with.

    Attributes:
        trainer: The policy in the training layout.
        reference: The policy that RL begins with, in the same layout, where kl_coef is above 0.
        engine: The policy in the rollout layout; None where this rank idles during rollout, or the
            engine is not rlsp's.
        contract: The numeric contract that all of them keep.
        certificate: Which wide kernel calls they may use.
    """

    trainer: PolicyModel
    reference: PolicyModel | None
    engine: PolicyModel | None
    contract: Contract
    certificate: Certificate


def contract_of(config: Config) -> Contract:
    """Return the numeric contract that a configuration asks for."""
    numerics = config.numerics
    return Contract(
        virtual_tp=numerics.virtual_tp,
        token_block=numerics.token_block,
        q_block=numerics.q_block,
        k_block=numerics.k_block,
        row_tile=numerics.row_tile,
        grad_lsb=numerics.grad_lsb,
        threads=numerics.threads,
        dtype=config.model.dtype.value,
        padded_vocab=config.padded_vocab,
    )


def certified_kernels(config: Config, mesh: Mesh) -> Kernels:
    """Return the compiled kernels that leave torch's bits on every rank, to be used; every rank calls it."""
    kernels = exact_compiled(config.numerics.compiled, config.device.kind)
    refused = torch.tensor([kernel not in kernels.allowed for kernel in Kernel], dtype=torch.int64)
    anywhere = collectives.max_integers(refused.to(mesh.world.device_type or "cpu"), mesh.world).tolist()
    return kernels.only(frozenset(kernel for kernel, flag in zip(Kernel, anywhere, strict=True) if not flag))


@cache
def exact_compiled(asked: bool, device: DeviceKind) -> Kernels:
    """Compile or find the kernels and allow those that leave torch's bits here: once, for forks as well.

    Args:
        asked: `numerics.compiled`; where it is off there are none.
        device: What ranks compute on; there are none but for the CPU.
    """
    if not asked:
        return replace(TORCH, origin="numerics.compiled=false")
    if device is not DeviceKind.cpu:
        return replace(TORCH, origin=f"device={device.value}")
    kernels = compiled.load(determinism.kernel_folder())
    return kernels.only(exact_kernels(kernels))


def assemble(config: Config, mesh: Mesh, device: torch.device) -> Models:
    """Certify the kernels at the model's shapes, build the models and read or draw the initial weights.

    Raises:
        NoExactPathError: A kernel leaves no exact path on this machine.
        WeightMismatchError: The weights at the model's path do not fit it.
    """
    contract = contract_of(config)
    leaf = Products(contract.row_tile)
    widths = {config.parallel.tp} if config.rollout.external else {config.parallel.tp, config.rollout.tp}
    shards = tuple(sorted(contract.virtual_tp // tp for tp in widths))
    wanted = wanted_products(config.model, contract, shards)
    certificate = certify(leaf, wanted, contract.token_block, torch.get_num_threads(), device=device)
    products = leaf.certified(certificate.wide, certificate.few)
    routes = config.numerics.routes.declared()
    training = Wiring(
        Phase.TRAIN, contract, products, mesh.tp, mesh.cp, config.layout.sequence_parallel, routes
    )
    trainer = build_model(config.model, training, device)
    _fill(trainer, config)
    reference = None
    if config.kl_coef > 0:
        reference = build_model(config.model, training, device)
        copy_bits(trainer, reference)
    engine = None
    if mesh.rollout_tp is not None and not config.rollout.external:
        alone = Group("rollout_cp", (mesh.world.rank,), 0)
        generating = Wiring(
            Phase.ROLLOUT, contract, products, mesh.rollout_tp, alone, sequence_parallel=False, routes=routes
        )
        engine = build_model(config.model, generating, device).requires_grad_(False)
    return Models(trainer, reference, engine, contract, certificate)


def _fill(model: PolicyModel, config: Config) -> None:
    """Give a model its initial weights: those at its path, or fresh ones with zeros for what pads."""
    shape = config.model
    if shape.path is not None:
        load_path(model, shape)
        return
    initialize(model, config.seed, shape.init_std, shape.num_layers)
    zero_padding(model, shape)


def wanted_products(model: ModelConfig, contract: Contract, shards: tuple[int, ...]) -> tuple[Sharded, ...]:
    """Return every leaf product of a model, to be certified for ranks that hold `shards` virtual shards."""
    virtual = contract.virtual_tp
    hidden, block, head = model.hidden_size, contract.k_block, model.head_dim
    groups = padded_groups(model.num_query_groups, virtual)
    queries = groups * (model.num_attention_heads // model.num_query_groups)
    heads = (queries + 2 * groups) * head
    column = (heads, 2 * model.ffn_hidden_size, contract.padded_vocab)
    row = (queries * head, model.ffn_hidden_size)
    shapes = [
        (kind, out // virtual, hidden)
        for out in column
        for kind in (Product.COLUMN, Product.COLUMN_BACK, Product.TOKEN)
    ]
    shapes += [
        (kind, hidden, wide // virtual)
        for wide in row
        for kind in (Product.ROW, Product.ROW_BACK, Product.TOKEN)
    ]
    shapes += [
        (Product.ATTENTION, block, head),
        (Product.ATTENTION, head, block),
        (Product.ATTENTION_TOKEN, block, head),
    ]
    return tuple(Sharded(Shape(*shape), shards) for shape in dict.fromkeys(shapes))
