from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from ranks import run_checks
from torch import Tensor

from rlsp.bits import same_bits
from rlsp.cli.compose import conf_dir
from rlsp.groups import Group
from rlsp.integrations.refusal import UnavailableError
from rlsp.integrations.vime import Provider, Result, provider
from rlsp.model.head import OutputLayer, Vocabulary, score_tokens
from rlsp.model.wiring import Phase, Wiring
from rlsp.numerics.certificate import Sharded, certify
from rlsp.numerics.contract import Contract
from rlsp.numerics.products import Product, Products, Shape
from rlsp.summation import Guard, TokenSum

VIRTUAL, BLOCK, REAL, PADDED, H = 8, 32, 97, 128, 64
SEED_SCALE = 1024.0  # rlsp sums in units of 2^-40: at this scale of the loss it rounds next to nothing away
SIZES = (1, 2, 4)


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def hidden_of(tokens: int, dtype: torch.dtype) -> Tensor:
    return (2 * numbers(1, tokens, H)).to(dtype)


def weight_of(dtype: torch.dtype) -> Tensor:
    return (0.3 * numbers(2, PADDED, H)).to(dtype)


def targets_of(tokens: int) -> Tensor:
    return torch.arange(tokens) * 7 % REAL


def seeds_of(tokens: int) -> tuple[Tensor, Tensor]:
    return SEED_SCALE * numbers(3, tokens), SEED_SCALE * 0.1 * numbers(4, tokens)


def asked(
    hidden: Tensor, weight: Tensor, targets: Tensor, index: int = 0, size: int = 1, **changed: Any
) -> SimpleNamespace:
    """What vime asks with a context, for one rank's hidden rows and columns of the weight."""
    columns = PADDED // size
    fields: dict[str, Any] = {
        "logits": hidden.new_zeros((targets.shape[0], columns)),
        "target_ids": targets,
        "tensor_parallel_group": dist.group.WORLD if size > 1 else None,
        "token_layout": SimpleNamespace(world_size=1, rank=0, layout="single"),
        "with_entropy": True,
        "with_entropy_grad": True,
        "chunk_size": 64,
        "log_prob_keep_mask": None,
        "context": context(hidden, weight, index, size),
        "temperature": 0.8,
        "metadata": {"tp_rank": index, "tp_world_size": size},
    }
    return SimpleNamespace(**(fields | changed))


def context(hidden: Tensor, weight: Tensor, index: int = 0, size: int = 1, **changed: Any) -> SimpleNamespace:
    columns = PADDED // size
    partition = {
        "local_start": index * columns,
        "local_size": columns,
        "real_size": REAL,
        "padded_size": PADDED,
    }
    return SimpleNamespace(
        hidden=hidden,
        projection=SimpleNamespace(weight=weight, bias=changed.pop("bias", None)),
        vocab_partition=SimpleNamespace(**(partition | changed)),
        local_logits=None,
    )


def of_logits(logits: Tensor, targets: Tensor, index: int = 0, size: int = 1, **changed: Any) -> Any:
    """What vime asks without a context: logits that it has divided by the temperature already."""
    metadata = {"real_vocab_size": REAL, "padded_vocab_size": PADDED, "tp_rank": index, "tp_world_size": size}
    request = asked(
        logits[:, :1],
        logits[:, :1],
        targets,
        index,
        size,
        **({"context": None, "metadata": metadata} | changed),
    )
    request.logits = logits
    return request


def results(rank: int, size: int, tokens: int, dtype: torch.dtype, sharded: bool) -> dict[str, Tensor]:
    """Forward and backward of this rank, from hidden states and from logits."""
    columns = slice(rank * PADDED // size, (rank + 1) * PADDED // size)
    rows = slice(rank * tokens // size, (rank + 1) * tokens // size) if sharded else slice(None)
    hidden = hidden_of(tokens, dtype)[rows].clone().requires_grad_()
    weight = weight_of(dtype)[columns].clone().requires_grad_()
    result = provider(asked(hidden, weight, targets_of(tokens), rank, size))
    backward(result, tokens)
    logits = logits_of(tokens, dtype)[:, columns].clone().requires_grad_()
    from_logits = provider(of_logits(logits, targets_of(tokens), rank, size))
    backward(from_logits, tokens)
    found = {"hidden": hidden.grad, "weight": weight.grad, "logits": logits.grad, "entropy": result.entropy}
    assert all(x is not None for x in found.values())
    return {name: x.detach() for name, x in found.items() if x is not None} | {
        "logp": result.logp.detach(),
        "logp of logits": from_logits.logp.detach(),
    }


def logits_of(tokens: int, dtype: torch.dtype) -> Tensor:
    return (4 * numbers(5, tokens, PADDED)).to(dtype)


def backward(result: Result, tokens: int) -> None:
    dlogp, dentropy = seeds_of(tokens)
    assert result.entropy is not None
    torch.autograd.backward([result.logp, result.entropy], [dlogp.unsqueeze(1), dentropy])


def even(rank: int, size: int) -> Any:
    return [
        results(rank, size, 36, dtype, sharded)
        for dtype in (torch.float32, torch.bfloat16)
        for sharded in (False, True)
    ]


def odd(rank: int, size: int) -> Any:
    return results(rank, size, 33, torch.float32, False)


@cache
def outcomes(size: int) -> Any:
    return run_checks(size, [even, odd, empty, ranks_refuse, refuse_together], timeout_s=300)


def joined(parts: list[dict[str, Tensor]], sharded: bool) -> dict[str, Tensor]:
    """Put the ranks' results together; what they all have must be the same bits."""
    dims = {"weight": 0, "logits": 1} | ({"hidden": 0} if sharded else {})
    for name in set(parts[0]) - set(dims):
        assert all(same_bits(part[name], parts[0][name]) for part in parts), name
    return {
        name: torch.cat([p[name] for p in parts], dims[name]) if name in dims else parts[0][name]
        for name in parts[0]
    }


@cache
def own(tokens: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Rlsp's own path on one rank: the model's head, its scores, its exact sum."""
    contract = Contract(VIRTUAL, BLOCK, BLOCK, BLOCK, 32, 40, 1, str(dtype).removeprefix("torch."), PADDED)
    kinds = (Product.COLUMN, Product.COLUMN_BACK, Product.TOKEN)
    wanted = tuple(Sharded(Shape(kind, PADDED // VIRTUAL, H), (VIRTUAL,)) for kind in kinds)
    products = Products(32).certified(certify(Products(32), wanted, BLOCK, 1).wide)
    wiring = Wiring(Phase.TRAIN, contract, products, Group("tp", (0,), 0), Group("cp", (0,), 0), False)
    head = OutputLayer(SimpleNamespace(wiring=wiring, params_dtype=dtype), PADDED, H, False)
    with torch.no_grad():
        head.weight.copy_(weight_of(dtype).view(head.weight.shape))
    guard = Guard()
    head.weight.token_sum = TokenSum("head", head.weight, head.weight.rule, 40, guard)
    head.weight.token_sum.begin(1)
    padded = -(-tokens // BLOCK) * BLOCK
    hidden = torch.nn.functional.pad(hidden_of(tokens, dtype), (0, 0, 0, padded - tokens)).requires_grad_()
    logits = head(hidden.unsqueeze(1))[0]
    vocabulary = Vocabulary.of(wiring, REAL, torch.device("cpu"))
    targets = torch.nn.functional.pad(targets_of(tokens), (0, padded - tokens))
    scores = score_tokens(logits, targets, 0.8, vocabulary, wiring)
    seeds = [torch.nn.functional.pad(seed, (0, padded - tokens)) for seed in seeds_of(tokens)]
    torch.autograd.backward([scores.logp, scores.entropy], seeds)
    assert hidden.grad is not None
    weight = (head.weight.token_sum.total.double() * 2.0**-40).float().to(dtype).view(PADDED, H)
    return {
        "logp": scores.logp.detach()[:tokens].unsqueeze(1),
        "entropy": scores.entropy.detach()[:tokens],
        "hidden": hidden.grad[:tokens],
        "weight": weight,
    }


def oracle(tokens: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The same in float64 by torch's own log-softmax."""
    hidden = hidden_of(tokens, dtype).double().requires_grad_()
    weight = weight_of(dtype).double().requires_grad_()
    log_p = (hidden @ weight[:REAL].t() / 0.8).log_softmax(-1)
    logp = log_p.gather(1, targets_of(tokens).unsqueeze(1))
    entropy = -(log_p.exp() * log_p).sum(-1)
    dlogp, dentropy = seeds_of(tokens)
    torch.autograd.backward([logp, entropy], [dlogp.double().unsqueeze(1), dentropy.double()])
    assert hidden.grad is not None
    assert weight.grad is not None
    return {"logp": logp.detach(), "entropy": entropy.detach(), "hidden": hidden.grad, "weight": weight.grad}


CASES = [(dtype, sharded) for dtype in (torch.float32, torch.bfloat16) for sharded in (False, True)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_log_probs_entropy_and_gradients_are_those_of_the_own_path_on_any_ranks(size: int, case: int) -> None:
    dtype, sharded = CASES[case]
    parts = (
        [of_rank[case] for of_rank in outcomes(size)["even"]]
        if size > 1
        else [results(0, 1, 36, dtype, sharded)]
    )
    got, want = joined(parts, sharded and size > 1), own(36, dtype)
    for name, tensor in want.items():
        assert same_bits(got[name], tensor), name


@pytest.mark.parametrize("size", SIZES)
def test_an_odd_number_of_tokens_leaves_the_same_bits(size: int) -> None:
    parts = outcomes(size)["odd"] if size > 1 else [odd(0, 1)]
    got, want = joined(parts, False), own(33, torch.float32)
    for name, tensor in want.items():
        assert same_bits(got[name], tensor), name


@pytest.mark.parametrize("size", [2, 4])
def test_logits_given_leave_the_same_bits_on_any_ranks(size: int) -> None:
    got, want = joined(outcomes(size)["odd"], False), odd(0, 1)
    for name in ("logits", "logp of logits"):
        assert same_bits(got[name], want[name]), name
    assert not got["logits"][:, REAL:].any()


def test_scores_and_gradients_are_close_to_float64() -> None:
    got, want = odd(0, 1), oracle(33, torch.float32)
    for name, tensor in want.items():
        assert (got[name].double() - tensor).norm() < 2e-6 * tensor.norm(), name


def test_the_naive_vocabulary_parallel_sum_differs_between_layouts() -> None:
    logits = logits_of(33, torch.float32)[:, :96]

    def naive(size: int) -> Tensor:
        top = logits.amax(-1, keepdim=True)
        return sum((part - top).exp().sum(-1) for part in logits.chunk(size, -1)).log()  # type: ignore[union-attr]

    assert not same_bits(naive(1), naive(4))
    assert not same_bits(naive(1), naive(2))


def test_the_naive_gradient_of_hidden_differs_between_layouts() -> None:
    dy, weight = numbers(6, 33, PADDED), weight_of(torch.float32)

    def naive(size: int) -> Tensor:
        parts = zip(dy.chunk(size, 1), weight.chunk(size), strict=True)
        return sum((a @ b for a, b in parts), torch.zeros(33, H))

    assert not same_bits(naive(1), naive(2))
    assert not same_bits(naive(2), naive(4))


def test_tokens_with_temperatures_of_their_own_and_one_temperature_for_all() -> None:
    hidden, weight, targets = hidden_of(6, torch.float32), weight_of(torch.float32), targets_of(6)
    each = torch.tensor([0.5, 0.5, 0.5, 2.0, 2.0, 2.0])
    mixed = provider(asked(hidden, weight, targets, temperature=each)).logp
    for value, rows in ((0.5, slice(0, 3)), (2.0, slice(3, 6))):
        for same in (value, torch.tensor(value), torch.full((6,), value)):
            assert same_bits(
                provider(asked(hidden, weight, targets, temperature=same)).logp[rows], mixed[rows]
            )


def test_logits_without_a_context_are_not_divided_again() -> None:
    logits, targets = logits_of(6, torch.float32), targets_of(6)
    once = provider(of_logits(logits, targets, temperature=1.0)).logp
    assert same_bits(provider(of_logits(logits, targets, temperature=0.5)).logp, once)


def test_an_entropy_is_given_and_differentiable_as_asked() -> None:
    hidden, weight = hidden_of(4, torch.float32).requires_grad_(), weight_of(torch.float32)
    make = lambda **changed: provider(asked(hidden, weight, targets_of(4), **changed))  # noqa: E731
    assert make(with_entropy=False, with_entropy_grad=False).entropy is None
    metric = make(with_entropy_grad=False)
    assert metric.entropy is not None
    assert not metric.entropy.requires_grad
    assert metric.logp.requires_grad
    loss = make().entropy
    assert loss is not None
    assert loss.requires_grad
    assert same_bits(loss, metric.entropy)


def test_the_result_has_vimes_shapes_and_names_its_contract() -> None:
    fp32, bf16 = (
        provider(asked(hidden_of(5, dtype), weight_of(dtype), targets_of(5)))
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert fp32.logp.shape == (5, 1)
    assert fp32.logp.dtype == bf16.logp.dtype == torch.float32
    assert len(fp32.contract_id) == 64
    assert fp32.contract_id != bf16.contract_id
    assert fp32.provenance["token_layout"] == {"world_size": 1, "rank": 0, "layout": "single"}
    assert len(fp32.provenance["kernel_certificate"]) == 64
    assert fp32.backend_id


def test_the_head_is_certified_once_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(
        "rlsp.integrations.vime.certify", lambda *a, **k: made.append(a[1]) or certify(*a, **k)
    )
    fresh = Provider()
    for tokens in (3, 5):
        fresh(asked(hidden_of(tokens, torch.float32), weight_of(torch.float32), targets_of(tokens)))
    assert [len(wanted) for wanted in made] == [3]  # type: ignore[arg-type]


def test_kernels_without_an_exact_path_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlsp.numerics.certificate.unsafe_operators", lambda _: ["exp depends on the length"])
    with pytest.raises(UnavailableError, match="exp depends on the length"):
        Provider()(asked(hidden_of(3, torch.float32), weight_of(torch.float32), targets_of(3)))


def test_the_defaults_are_those_of_the_strict_numerics() -> None:
    strict = yaml.safe_load((conf_dir() / "numerics" / "strict.yaml").read_text())
    for name in ("virtual_tp", "token_block", "row_tile"):
        assert getattr(provider, name) == strict[name]


def test_vime_finds_the_provider_by_its_dotted_path() -> None:
    module, _, attribute = "rlsp.integrations.vime.provider".rpartition(".")
    assert callable(getattr(importlib.import_module(module), attribute))
    assert UnavailableError("").linear_logp_provider_unavailable is True


def layout(world_size: int, rank: int, kind: str) -> SimpleNamespace:
    return SimpleNamespace(world_size=world_size, rank=rank, layout=kind)


@pytest.mark.parametrize("where", [(2, 0, "zigzag"), (2, 1, "zigzag"), (4, 3, "allgather")])
def test_the_token_layout_is_kept_and_changes_no_bit(where: tuple[int, int, str]) -> None:
    arguments = hidden_of(5, torch.float32), weight_of(torch.float32), targets_of(5)
    result = provider(asked(*arguments, token_layout=layout(*where)))
    assert tuple(result.provenance["token_layout"].values()) == where
    assert same_bits(result.logp, provider(asked(*arguments)).logp)


FP32 = torch.float32
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "top-p replay": (
        lambda: asked(*good(), log_prob_keep_mask=torch.ones(5, PADDED, dtype=torch.bool)),
        "log_prob_keep_mask",
    ),
    "bias": (lambda: with_context(bias=torch.zeros(PADDED)), "projection.bias"),
    "no targets": (lambda: asked(*good()[:2], targets_of(5).float()), "target_ids must be"),
    "a target in the padding": (
        lambda: asked(*good()[:2], targets_of(5) + 95),
        "target_ids must lie in 0 … 96",
    ),
    "a target below zero": (lambda: asked(*good()[:2], targets_of(5) - 100), "target_ids must lie"),
    "half precision": (lambda: of_logits(logits_of(5, torch.float16), targets_of(5)), "torch.float16"),
    "rows of logits": (lambda: of_logits(logits_of(4, FP32), targets_of(5)), "4 rows, target_ids 5"),
    "rows of hidden": (lambda: asked(hidden_of(3, FP32), *good()[1:]), "3 rows: 5 tokens"),
    "dtypes": (lambda: asked(good()[0], weight_of(torch.bfloat16), good()[2]), "does not fit"),
    "no weight": (lambda: with_context(weight=None), "projection.weight must be a tensor"),
    "a gap": (lambda: with_context(local_start=1), "gap or overlap"),
    "part of the vocabulary": (lambda: with_context(padded_size=256), "gap or overlap"),
    "columns": (lambda: with_context(local_size=64, padded_size=64), "this rank has 128 columns"),
    "virtual shards": (lambda: narrow(60), "must divide virtual_tp 8"),
    "more words than columns": (
        lambda: with_context(real_size=129),
        "real_size must be in 1 … padded_size 128",
    ),
    "sizes that are not said": (
        lambda: of_logits(logits_of(5, FP32), targets_of(5), metadata={}),
        "real_size must be an integer",
    ),
    "metadata": (lambda: asked(*good(), metadata=["tp_rank"]), "metadata must be a mapping"),
    "a rank that is not": (lambda: asked(*good(), metadata={"tp_rank": 1}), r"metadata\['tp_rank'\] is 1"),
    "ranks that are not": (lambda: asked(*good(), metadata={"tp_world_size": 2}), "tp_world_size"),
    "no temperature": (lambda: asked(*good(), temperature=0.0), "temperature must be positive"),
    "no number": (lambda: asked(*good(), temperature=float("nan")), "temperature must be positive"),
    "one temperature is negative": (
        lambda: asked(*good(), temperature=torch.tensor([1.0, 1, 1, 1, -1])),
        "temperature must be positive",
    ),
    "temperatures": (lambda: asked(*good(), temperature=torch.ones(4)), "4 values for 5 tokens"),
    "one rank in zigzag": (lambda: asked(*good(), token_layout=layout(1, 0, "zigzag")), "token_layout"),
    "two ranks in one": (lambda: asked(*good(), token_layout=layout(2, 0, "single")), "token_layout"),
    "a rank outside": (lambda: asked(*good(), token_layout=layout(2, 2, "zigzag")), "token_layout"),
}


def good() -> tuple[Tensor, Tensor, Tensor]:
    return hidden_of(5, FP32), weight_of(FP32), targets_of(5)


def with_context(**changed: Any) -> SimpleNamespace:
    hidden, weight, targets = good()
    weight = changed.pop("weight", weight)
    return asked(hidden, good()[1], targets, context=context(hidden, weight, **changed))


def narrow(columns: int) -> SimpleNamespace:
    hidden, weight, targets = good()
    changed = {"local_size": columns, "padded_size": columns, "real_size": columns}
    return asked(hidden, weight, targets, context=context(hidden, weight[:columns], **changed))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused(name: str) -> None:
    make, why = REFUSED[name]
    with pytest.raises(UnavailableError, match=why) as caught:
        provider(make())
    assert caught.value.linear_logp_provider_unavailable


def test_all_violations_come_at_once() -> None:
    with pytest.raises(UnavailableError, match=r"log_prob_keep_mask.*temperature.*token_layout"):
        provider(
            asked(
                *good(), log_prob_keep_mask=torch.ones(1), temperature=-1, token_layout=layout(0, 0, "single")
            )
        )


def test_coarse_products_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    with pytest.raises(UnavailableError, match="leaf products need 'highest'"):
        provider(asked(*good()))


def empty(rank: int, size: int) -> Any:
    """A rank group without tokens: shapes, and gradients that are there."""
    hidden = hidden_of(0, FP32).requires_grad_()
    weight = weight_of(FP32)[: PADDED // size].clone().requires_grad_()
    result = provider(asked(hidden, weight, targets_of(0), rank, size))
    assert result.entropy is not None
    (result.logp.sum() + result.entropy.sum()).backward()
    assert weight.grad is not None
    logits = logits_of(0, FP32)[:, : PADDED // size].requires_grad_()
    given = provider(of_logits(logits, targets_of(0), rank, size))
    given.logp.sum().backward()
    return (
        tuple(result.logp.shape),
        tuple(result.entropy.shape),
        float(weight.grad.abs().max()),
        given.logp.dtype,
    )


@pytest.mark.parametrize("size", SIZES)
def test_no_tokens_leave_no_scores_and_zero_gradients(size: int) -> None:
    found = outcomes(size)["empty"] if size > 1 else [empty(0, 1)]
    assert found == [((0, 1), (0,), 0.0, torch.float32)] * size


def ranks_refuse(rank: int, size: int) -> Any:
    """One rank refuses: all do, with its reason, and the next call is in step."""
    columns = slice(rank * PADDED // size, (rank + 1) * PADDED // size)
    said = []
    last = rank == size - 1
    for changed in (
        {"log_prob_keep_mask": torch.ones(5) if last else None},
        {"context": context(good()[0], good()[1][columns], rank, size, local_start=0)},
        {"temperature": 0.0 if last else 1.0},
    ):
        with pytest.raises(UnavailableError) as caught:
            provider(asked(good()[0], good()[1][columns], good()[2], rank, size, **changed))
        said.append(str(caught.value))
    provider(asked(good()[0], good()[1][columns], good()[2], rank, size))
    return said


@pytest.mark.parametrize("size", [2, 4])
def test_where_one_rank_refuses_all_ranks_do(size: int) -> None:
    said = outcomes(size)["ranks_refuse"]
    assert all(each == said[0] for each in said)
    assert said[0][0].startswith(f"rank {size - 1}: log_prob_keep_mask")
    assert "rank 1: columns 0" in said[0][1]
    assert "rank 0" not in said[0][1].split("rank 1")[0]


def refuse_together(rank: int, size: int) -> Any:
    """Ranks that are each well served, but were asked different things."""
    columns = slice(rank * PADDED // size, (rank + 1) * PADDED // size)
    said = []
    first = rank == 0
    for changed in (
        {"temperature": 0.5 if first else 1.0},
        {"target_ids": targets_of(5) if first else targets_of(5) + 1},
        {"with_entropy_grad": first},
        {"context": context(good()[0], good()[1][columns], rank, size, real_size=90 if first else 91)},
        {"token_layout": layout(2, 0 if first else 1, "zigzag")},
    ):
        with pytest.raises(UnavailableError) as caught:
            provider(asked(good()[0], good()[1][columns], good()[2], rank, size, **changed))
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_were_asked_different_things_are_told_so(size: int) -> None:
    said = outcomes(size)["refuse_together"]
    assert all(each == said[0] for each in said)
    names = ("temperature", "target_ids", "with_entropy_grad", "real_vocab_size", "token_layout")
    for name, text in zip(names, said[0], strict=True):
        assert f"{name} (ranks {list(range(1, size))})" in text
