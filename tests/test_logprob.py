from __future__ import annotations

import math

import pytest
import torch
from numeric_data import draw, gradients, relative_error
from torch import Tensor

from rlsp.bits import row_digest, same_bits
from rlsp.numerics import logprob

T, V, N = 33, 8, 16
VOCAB = 97  # the last shard is padding, the one before has a single column
VALID = (torch.arange(V * N) < VOCAB).view(V, N)
LOGITS = 3 * draw(1, T, V, N)
TARGETS = torch.arange(T) * 7 % VOCAB
TEMPERATURE = 0.7


def scores(
    logits: Tensor, targets: Tensor = TARGETS, valid: Tensor = VALID, temperature: float = TEMPERATURE
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probability, entropy and normaliser for logits [T, V, n]."""
    x = logprob.tempered(logits, temperature, valid)
    picked = x.flatten(1).gather(1, targets.unsqueeze(1)).squeeze(1)
    return logprob.merge(logprob.shard_statistics(x, valid), picked)


def back(logits: Tensor, dlogp: Tensor, dentropy: Tensor, temperature: float = TEMPERATURE) -> Tensor:
    _, entropy, normaliser = scores(logits, temperature=temperature)
    x = logprob.tempered(logits, temperature, VALID)
    return logprob.back(x, VALID, normaliser, entropy, TARGETS, dlogp, dentropy)


def exact_logp(logits: Tensor, temperature: float = TEMPERATURE) -> Tensor:
    """Log-probabilities over the true vocabulary [T, VOCAB], in float64."""
    return (logits.double().flatten(1)[:, :VOCAB] / temperature).log_softmax(dim=-1)


def exact_entropy(logits: Tensor, temperature: float = TEMPERATURE) -> Tensor:
    log_p = exact_logp(logits, temperature)
    return -(log_p.exp() * log_p).sum(dim=-1)


def same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(same_bits(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_log_probability_and_entropy_agree_with_float64(temperature: float) -> None:
    logp, entropy, normaliser = scores(LOGITS, temperature=temperature)
    want = exact_logp(LOGITS, temperature)
    assert relative_error(logp, want.gather(1, TARGETS.unsqueeze(1)).squeeze(1)) < 1e-6
    assert relative_error(entropy, exact_entropy(LOGITS, temperature)) < 1e-6
    tempered = LOGITS.double().flatten(1)[:, :VOCAB] / temperature
    assert relative_error(normaliser.sum(dim=-1), tempered.logsumexp(dim=-1)) < 1e-6


def test_entropy_is_the_sum_over_the_true_vocabulary_and_no_estimate() -> None:
    logp, entropy, _ = scores(LOGITS)
    assert relative_error(entropy, exact_entropy(LOGITS)) < 1e-6
    assert relative_error(-logp, exact_entropy(LOGITS)) > 0.1


@pytest.mark.parametrize("offset", [0.0, 10.0, 40.0])
def test_gradients_agree_with_float64_as_well_as_torchs_own(offset: float) -> None:
    """Logits far from zero cost no digits: the maximum is taken off before the logarithm is."""
    logits, dlogp, dentropy = LOGITS + offset, draw(2, T), draw(3, T)

    def objective(x: Tensor) -> Tensor:
        log_p = (x.flatten(1)[:, :VOCAB] / TEMPERATURE).log_softmax(dim=-1)
        picked = log_p.gather(1, TARGETS.unsqueeze(1)).squeeze(1)
        return (dlogp.to(x) * picked - dentropy.to(x) * (log_p.exp() * log_p).sum(dim=-1)).sum()

    (want,) = gradients(objective, torch.ones(()), logits)
    (plain,) = torch.autograd.grad(objective(leaf := logits.clone().requires_grad_()), leaf)
    error = relative_error(back(logits, dlogp, dentropy) / TEMPERATURE, want)
    assert error < 1e-6
    assert error < 1.1 * relative_error(plain, want)


@pytest.mark.parametrize("padding", [0.0, 1e4, -math.inf, math.inf, math.nan])
def test_what_stands_in_padded_columns_changes_no_bit(padding: float) -> None:
    filled = torch.where(VALID, LOGITS, padding)
    assert same(scores(filled), scores(LOGITS))
    gradient = back(filled, draw(2, T), draw(3, T))
    assert same_bits(gradient, back(LOGITS, draw(2, T), draw(3, T)))
    assert same_bits(gradient[:, ~VALID], torch.zeros(T, V * N - VOCAB))
    assert gradient.isfinite().all()


def test_masking_with_infinity_would_make_entropy_nan() -> None:
    """The witness: what every column would leave if a masked logit were −inf."""
    x = torch.where(VALID, LOGITS, -math.inf)
    p = x.flatten(1).softmax(dim=-1)
    assert (p * p.log()).sum(dim=-1).isnan().all()


def test_a_padded_vocabulary_has_the_bits_of_an_unpadded_one() -> None:
    """Shards of padding alone add zeros at the end of the tree."""
    for shards in range(1, V):
        valid = (torch.arange(V * N) < shards * N).view(V, N)
        targets = TARGETS % (shards * N)
        bare = scores(LOGITS[:, :shards].contiguous(), targets, valid[:shards])
        assert same(scores(LOGITS, targets, valid), bare), shards
        assert all(x.isfinite().all() for x in bare)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_vocabulary_shards_have_the_same_bits_on_every_placement(tp: int) -> None:
    x = logprob.tempered(LOGITS, TEMPERATURE, VALID)
    whole = logprob.shard_statistics(x, VALID)
    parts = [
        logprob.shard_statistics(a.contiguous(), b)
        for a, b in zip(x.chunk(tp, dim=1), VALID.chunk(tp), strict=True)
    ]
    assert same_bits(torch.cat(parts, dim=1), whole)
    dlogp, dentropy = draw(2, T), draw(3, T)
    _, entropy, normaliser = scores(LOGITS)
    columns = V * N // tp
    for rank, (a, valid) in enumerate(zip(x.chunk(tp, dim=1), VALID.chunk(tp), strict=True)):
        local = TARGETS - rank * columns
        local = torch.where((local >= 0) & (local < columns), local, -1)
        own = logprob.back(a.contiguous(), valid, normaliser, entropy, local, dlogp, dentropy)
        assert same_bits(own, back(LOGITS, dlogp, dentropy).chunk(tp, dim=1)[rank])


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_every_virtual_width_agrees_with_float64(width: int) -> None:
    logits, valid = LOGITS.view(T, width, -1), VALID.view(width, -1)
    logp, entropy, _ = scores(logits, valid=valid)
    want = exact_logp(LOGITS)
    assert relative_error(logp, want.gather(1, TARGETS.unsqueeze(1)).squeeze(1)) < 1e-6
    assert relative_error(entropy, exact_entropy(LOGITS)) < 1e-6


def test_another_virtual_width_has_other_bits() -> None:
    """The witness: the width is part of the contract, not a matter of placement."""
    one = scores(LOGITS.view(T, 1, -1), valid=VALID.view(1, -1))
    assert not same_bits(one[1], scores(LOGITS)[1])
    naive = (LOGITS.flatten(1)[:, :VOCAB] / TEMPERATURE).log_softmax(dim=-1)
    assert not same_bits(naive.gather(1, TARGETS.unsqueeze(1)).squeeze(1), scores(LOGITS)[0])


def test_a_token_has_the_same_bits_alone_and_in_any_batch() -> None:
    whole = scores(LOGITS)
    for rows in (slice(0, 1), slice(5, 12), slice(32, 33)):
        assert same(scores(LOGITS[rows], TARGETS[rows]), tuple(x[rows] for x in whole))


@pytest.mark.parametrize("width", [1, 2])
def test_rows_beyond_the_longest_reduction_are_cut_in_pieces(width: int) -> None:
    """One row of 75,968 or 151,936 elements may be split among threads, and then depends on its batch."""
    n, vocab = 151_936 // width, 151_936
    logits = 3 * draw(4, 3, width, n)
    valid, targets = torch.ones(width, n, dtype=torch.bool), torch.tensor([0, n - 1, vocab - 1])
    logp, entropy, _ = scores(logits, targets, valid, 1.0)
    exact = logits.double().flatten(1).log_softmax(dim=-1)
    assert relative_error(logp, exact.gather(1, targets.unsqueeze(1)).squeeze(1)) < 1e-6
    assert relative_error(entropy, -(exact.exp() * exact).sum(dim=-1)) < 1e-5
    assert same(scores(logits[1:2], targets[1:2], valid, 1.0)[:2], (logp[1:2], entropy[1:2]))


def test_no_row_sum_is_longer_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    original = Tensor.sum

    def watched(x: Tensor, *args: object, **kwargs: object) -> Tensor:
        lengths.append(x.shape[-1])
        return original(x, *args, **kwargs)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(Tensor, "sum", watched)
    x = torch.zeros(1, 1, 3 * logprob.ROW_ELEMENTS + 5)
    logprob.shard_statistics(x, torch.ones(1, x.shape[2], dtype=torch.bool))
    assert lengths
    assert max(lengths) == logprob.ROW_ELEMENTS


def test_extreme_logits_leave_finite_scores() -> None:
    steep = torch.zeros(2, V, N)
    steep[0, 3, 5], steep[1, :, :] = 1e4, -1e4
    target = 3 * N + 5
    logp, entropy, _ = scores(steep, torch.tensor([target, target]), temperature=1.0)
    assert logp[0] == 0
    assert entropy[0] == 0
    assert abs(float(entropy[1]) - math.log(VOCAB)) < 1e-6
    assert abs(float(logp[1]) + math.log(VOCAB)) < 1e-6


def test_swapping_two_unsampled_logits_shows_in_the_row_and_not_in_the_sampled_token() -> None:
    """Why equal log-probabilities of the sampled tokens prove little, and rows are digested."""
    other = LOGITS.clone().flatten(1)
    other[:, [1, 50]] = other[:, [50, 1]]
    targets = torch.full((T,), 20)
    logp, changed = (scores(x.view(T, V, N), targets)[0] for x in (LOGITS, other))
    assert relative_error(changed, logp.double()) < 1e-6
    digests = [row_digest(x.flatten(1), 0, VOCAB) for x in (LOGITS, other)]
    assert (digests[0] != digests[1]).all()


def test_logits_of_bfloat16_are_widened_first() -> None:
    narrow = LOGITS.to(torch.bfloat16)
    assert same(scores(narrow), scores(narrow.float()))
