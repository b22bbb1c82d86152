"""A training log-prob provider for vime: rlsp's strict head behind vime's public provider protocol.

    --linear-logp-provider rlsp.integrations.vime.provider --linear-logp-provider-mode strict

Requests and results are structural; vime is not imported. docs/vime.md says what is proven.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlsp import collectives
from rlsp.groups import Group, Ledger
from rlsp.integrations.refusal import UnavailableError, agree
from rlsp.integrations.vime_request import Asked, read
from rlsp.model.gradients import Differentiable
from rlsp.model.head import Vocabulary, score_tokens
from rlsp.model.linear import reduce_rows
from rlsp.model.wiring import Phase, Wiring
from rlsp.numerics.certificate import Certificate, NoExactPathError, Sharded, certify
from rlsp.numerics.contract import Contract
from rlsp.numerics.products import Product, Products, Shape
from rlsp.numerics.tree import tree_sum

BACKEND_ID = "rlsp.strict-head.v1"
TOKEN_SUM = (
    "float64 over leaves of token_block rows in the request's order, one rounding to the weight's dtype"
)
_HEAD_PRODUCTS = (Product.COLUMN, Product.COLUMN_BACK, Product.TOKEN)
_LEAF_ELEMENTS = 1 << 23  # of one call's weight-gradient leaves, at most, unless one leaf has more


@dataclass(frozen=True)
class Result:
    """What vime takes back.

    Attributes:
        logp: float32 [T, 1].
        entropy: float32 [T]; None where it was not asked for.
        backend_id: Names the arithmetic.
        contract_id: Hash of the numeric contract: bits are comparable only where it is equal.
        provenance: Versions, kernel certificate and layout.
    """

    logp: Tensor
    entropy: Tensor | None
    backend_id: str
    contract_id: str
    provenance: Mapping[str, Any]


@dataclass(frozen=True)
class Provider:
    """Compute log-probabilities and entropies whose bits do not depend on the tensor-parallel size.

    The defaults are those of conf/numerics/strict.yaml.

    Attributes:
        virtual_tp: Virtual shards of the padded vocabulary.
        token_block: Rows in a leaf of the weight's gradient.
        row_tile: Rows of a leaf product.
        ledger: Where collectives are recorded.
    """

    virtual_tp: int = 8
    token_block: int = 32
    row_tile: int = 32
    ledger: Ledger = field(default_factory=Ledger, repr=False, compare=False)
    _certificates: dict[object, Certificate] = field(default_factory=dict, repr=False, compare=False)

    def __call__(self, request: Any) -> Result:
        """Serve one request; every rank of its tensor-parallel group calls it at the same point.

        Raises:
            UnavailableError: On every rank alike: the request asks for what cannot be honoured, ranks were
                asked different things, or a kernel leaves no exact path.
        """
        tp = self._group(getattr(request, "tensor_parallel_group", None))
        asked, refused = read(request, tp, self.virtual_tp)
        facts: dict[str, object] = {}
        contract = certificate = None
        if asked is not None:
            contract = self._contract(asked)
            try:
                certificate = self._certificate(asked, tp)
                facts = {**asked.facts(), "contract": contract.sha256, "kernels": certificate.digest}
            except NoExactPathError as error:
                refused = [str(error)]
        agree(facts, refused, tp, _device(request, tp))
        assert asked is not None
        assert contract is not None
        assert certificate is not None
        logp, entropy = self._scores(asked, contract, certificate, tp)
        if not asked.entropy_gradient:
            entropy = entropy.detach()
        return Result(
            logp.unsqueeze(1),
            entropy if asked.entropy else None,
            BACKEND_ID,
            contract.sha256,
            self._provenance(asked, certificate, tp),
        )

    def _group(self, handle: Any) -> Group:
        """Wrap vime's process group; None is a group of one.

        Raises:
            UnavailableError: Its ranks do not ascend.
        """
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        if handle is None:
            return Group("tp", (rank,), 0, None, self.ledger)
        ranks = tuple(dist.get_process_group_ranks(handle))
        if list(ranks) != sorted(ranks):
            raise UnavailableError(f"tensor_parallel_group: ranks {ranks} must ascend")
        return Group("tp", ranks, ranks.index(rank), handle if len(ranks) > 1 else None, self.ledger)

    def _contract(self, asked: Asked) -> Contract:
        return Contract(
            virtual_tp=self.virtual_tp,
            token_block=self.token_block,
            q_block=self.token_block,
            k_block=self.token_block,
            row_tile=self.row_tile,
            grad_lsb=0,
            threads=torch.get_num_threads(),
            dtype=str(asked.source.dtype).removeprefix("torch."),
            padded_vocab=asked.partition.padded,
            token_sum=TOKEN_SUM,
        )

    def _certificate(self, asked: Asked, tp: Group) -> Certificate:
        """Certify the head's products at their shapes, once for each in this process.

        Raises:
            NoExactPathError: A kernel's bits depend on more than the contract allows.
        """
        n, shards = asked.partition.padded // self.virtual_tp, self.virtual_tp // tp.size
        k = 0 if asked.hidden is None else asked.hidden.shape[1]
        device = asked.source.device
        key = (n, k, shards, device, torch.get_num_threads())
        if key not in self._certificates:
            wanted = tuple(Sharded(Shape(product, n, k), (shards,)) for product in _HEAD_PRODUCTS if k)
            self._certificates[key] = certify(
                Products(self.row_tile),
                wanted,
                self.token_block,
                torch.get_num_threads(),
                device=device,
                rows=frozenset({n}),
            )
        return self._certificates[key]

    def _scores(
        self, asked: Asked, contract: Contract, certificate: Certificate, tp: Group
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies, float32 [T] each."""
        if not asked.targets.numel():
            nothing = _nothing(asked)
            return nothing, nothing
        products = Products(self.row_tile).certified(certificate.wide)
        alone = Group("cp", (tp.rank,), 0, None, self.ledger)
        wiring = Wiring(Phase.TRAIN, contract, products, tp, alone, asked.sharded_sequence)
        logits = asked.logits
        if logits is None:
            logits = _Projection.on(asked.hidden, asked.weight, wiring)
        vocabulary = Vocabulary.of(wiring, asked.partition.real, logits.device)
        scores = score_tokens(logits, asked.targets, asked.temperature, vocabulary, wiring)
        return scores.logp, scores.entropy

    def _provenance(self, asked: Asked, certificate: Certificate, tp: Group) -> dict[str, Any]:
        size, rank, layout = asked.token_layout
        return {
            "rlsp": version("rlsp"),
            "torch": torch.__version__,
            "device": str(asked.source.device),
            "kernel_certificate": certificate.digest,
            "leaf_path": list(certificate.narrowed),
            "source": "logits" if asked.hidden is None else "hidden",
            "sequence_parallel": asked.sharded_sequence,
            "tensor_parallel": {"rank": tp.index, "world_size": tp.size},
            "token_layout": {"world_size": size, "rank": rank, "layout": layout},
            "vocab_partition": vars(asked.partition),
        }


class _Projection(Differentiable):
    """The strict head's product, for a weight that autograd owns: logits = hidden·weightᵀ."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, wiring: Wiring) -> Tensor:
        """Gather the sequence shards (SP), then one leaf product a virtual shard: [T, V_local·n]."""
        full = collectives.gather(hidden, wiring.tp, dim=0) if wiring.sequence_parallel else hidden
        ctx.save_for_backward(full, weight)
        ctx.wiring = wiring
        return wiring.products.column(full, _shards(weight, wiring)).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Sum hidden's gradient over the tree of virtual shards, reduce-scattered under SP."""
        full, weight = ctx.saved_tensors
        wiring: Wiring = ctx.wiring
        dx = dw = None
        if ctx.needs_input_grad[0]:
            partial = tree_sum(wiring.products.column_back(dy, _shards(weight, wiring)))
            dx = reduce_rows(partial, wiring).to(full.dtype)
        if ctx.needs_input_grad[1]:
            dw = _weight_gradient(dy, full, wiring).to(weight.dtype).view(weight.shape)
        return dx, dw, None


def _weight_gradient(dy: Tensor, x: Tensor, wiring: Wiring) -> Tensor:
    """Sum leaves of token_block rows in float64, in order: [V_local, n, H] of dy [T, V_local·n], x [T, H].

    The scale of vime's loss is not known here, so the sum has no fixed unit.
    """
    block, shards = wiring.contract.token_block, wiring.contract.virtual_tp // wiring.tp.size
    left, right = (torch.nn.functional.pad(y, (0, 0, 0, -y.shape[0] % block)) for y in (dy, x))
    left, right = left.view(-1, block, shards, dy.shape[1] // shards), right.view(-1, block, 1, x.shape[1])
    total = torch.zeros((shards, left.shape[3], x.shape[1]), dtype=torch.float64, device=x.device)
    at_once = max(1, _LEAF_ELEMENTS // total.numel())
    for a, b in zip(left.split(at_once), right.split(at_once), strict=True):
        for leaf in wiring.products.token(a, b):
            total += leaf
    return total


def _shards(weight: Tensor, wiring: Wiring) -> Tensor:
    """View a vocabulary shard [V_local·n, H] as virtual shards [V_local, n, H]."""
    return weight.reshape(wiring.contract.virtual_tp // wiring.tp.size, -1, weight.shape[1])


def _nothing(asked: Asked) -> Tensor:
    """Return float32 [0] that hangs in the graph: a rank without tokens still reaches its parameters."""
    empty = asked.source[:, :1].float()
    return (empty if asked.weight is None else empty + asked.weight[:0, :1].float()).flatten()


def _device(request: Any, tp: Group) -> torch.device:
    targets = getattr(request, "target_ids", None)
    wanted = tp.device_type or "cpu"
    if isinstance(targets, Tensor) and targets.device.type == wanted:
        return targets.device
    return torch.device(wanted)


provider = Provider()
