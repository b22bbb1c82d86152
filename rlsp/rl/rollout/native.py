"""Generate with a block KV cache, by training's modules: the same bits in any batch, by any prefill."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlsp import bits
from rlsp.model.attention import Channel, KeyValueCache
from rlsp.model.build import PolicyModel
from rlsp.model.decoder import Decoder
from rlsp.model.head import share
from rlsp.model.native_head import native_logp
from rlsp.model.wiring import Boundary, Operator, Site
from rlsp.numerics import logprob
from rlsp.rl.sampling import candidates, choose, draw_keys, gumbel


@dataclass(frozen=True)
class Sequence:
    """One sequence to generate, keyed by what it is.

    Attributes:
        prompt: Index of its prompt in the rollout.
        sample: Index among the prompt's samples.
        tokens: The prompt's token ids, at least one.
        limit: Its longest response, where that is below `Sampling.max_tokens`; 0 draws nothing.
    """

    prompt: int
    sample: int
    tokens: tuple[int, ...]
    limit: int | None = None


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        seed: The run's seed.
        rollout: Index of the rollout.
        temperature: Divides the logits.
        max_tokens: The longest response.
        eos_ids: Any of them ends a response and belongs to it; empty to generate to the full length.
    """

    seed: int
    rollout: int
    temperature: float
    max_tokens: int
    eos_ids: tuple[int, ...]


@dataclass
class Response:
    """What was drawn for one sequence, one entry a token."""

    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    row_digest: list[int] = field(default_factory=list)


def limits_of(sequences: list[Sequence], sampling: Sampling) -> list[int]:
    """Return how many tokens each sequence's response may have."""
    most = sampling.max_tokens
    return [most if s.limit is None else min(s.limit, most) for s in sequences]


class NativeEngine:
    """Generate on one engine: the ranks of one rollout TP group, each with the same sequences."""

    def __init__(self, model: PolicyModel, head_groups: int, head_dim: int, num_layers: int) -> None:
        """Take a model wired for the rollout, and its cache's shape: own KV heads, head size, layers."""
        self.model = model
        self._groups, self._head_dim, self._layers = head_groups, head_dim, num_layers

    @torch.no_grad()
    def generate(
        self, sequences: list[Sequence], sampling: Sampling, prefill_chunk: int = 1 << 30
    ) -> list[Response]:
        """Draw a response for every sequence.

        Args:
            sequences: In any order; a response is a function of its sequence, `sampling` and the weights.
            sampling: How to draw.
            prefill_chunk: Prompt tokens a forward pass, at most; changes no bits.

        Returns:
            One response a sequence, in the given order.
        """
        responses = [Response() for _ in sequences]
        limits = limits_of(sequences, sampling)
        wanted = [i for i, limit in enumerate(limits) if limit > 0]
        if not wanted:
            return responses
        prompts = [sequences[i] for i in wanted]
        cache, decoder = self._cache(prompts, max(limits)), Decoder(self.model)
        batch = _Batch(prompts, wanted, [limits[i] for i in wanted], cache, decoder)
        hidden = self._prefill(batch, prefill_chunk)
        while True:
            drawn = self._draw(hidden, batch, sampling)
            for index, token, logp, digest in zip(batch.index, *drawn, strict=True):
                responses[index].tokens.append(token)
                responses[index].logp.append(logp)
                responses[index].row_digest.append(digest)
            batch.advance(drawn[0], sampling.eos_ids)
            if not batch.index:
                return responses
            hidden = self._forward(batch, batch.last.unsqueeze(1), (batch.lengths - 1).unsqueeze(0))

    def _cache(self, sequences: list[Sequence], max_tokens: int) -> KeyValueCache:
        """Allocate a cache for the longest sequence that may come out."""
        length = max(len(s.tokens) for s in sequences) + max_tokens
        device = next(self.model.parameters()).device
        block = self.model.wiring.contract.k_block
        return KeyValueCache(
            self._layers, len(sequences), self._groups, length, block, self._head_dim, device
        )

    def _prefill(self, batch: _Batch, chunk: int) -> Tensor:
        """Run the prompts and return each one's last hidden state, [1, B, H]."""
        width = int(batch.lengths.max())
        tokens = torch.zeros((len(batch.index), width), dtype=torch.int64, device=batch.lengths.device)
        for row, sequence in enumerate(batch.sequences):
            tokens[row, : len(sequence.tokens)] = torch.tensor(sequence.tokens)
        pieces = []
        for start in range(0, width, chunk):
            part = tokens[:, start : start + chunk]
            positions = torch.arange(start, start + part.shape[1], device=tokens.device)
            pieces.append(self._forward(batch, part, positions.unsqueeze(1).expand(-1, tokens.shape[0])))
        return torch.cat(pieces).gather(
            0, (batch.lengths - 1).view(1, -1, 1).expand(1, -1, pieces[0].shape[2])
        )

    def _forward(self, batch: _Batch, tokens: Tensor, positions: Tensor) -> Tensor:
        """Run tokens [B, n] at positions [n, B] and store their keys and values."""
        blocks = int(positions.max()) // batch.cache.block + 1
        channel = Channel(qkv_format="sbhd", positions=positions, cache=batch.cache, blocks=blocks)
        return batch.decoder.hidden(tokens, channel)

    def _draw(
        self, hidden: Tensor, batch: _Batch, sampling: Sampling
    ) -> tuple[list[int], list[float], list[int]]:
        """Draw one token a sequence; its log-probability comes from the statistics and merge of training."""
        wiring, vocabulary = self.model.wiring, self.model.vocabulary
        shards = vocabulary.by_shard(self.model.logits(hidden))
        x = logprob.tempered(shards, sampling.temperature, vocabulary.valid)
        keys = draw_keys(sampling.seed, sampling.rollout, batch.prompts, batch.samples, batch.lengths)
        noise = gumbel(keys, vocabulary.first, vocabulary.valid.numel()).view(x.shape)
        best = candidates(x, noise, vocabulary.first)
        digest = bits.row_digest(shards.flatten(1), vocabulary.first, vocabulary.size)
        statistics, scores, indices, logits, digests = share(
            wiring,
            (logprob.shard_statistics(x, vocabulary.valid), best.scores, best.indices, best.logits),
            (digest,),
        )
        token = choose(scores, indices)
        shard = torch.div(token, vocabulary.valid.shape[1], rounding_mode="floor")
        if wiring.native(Operator.LOGP):
            logp = native_logp(x, token, wiring)
        else:
            wiring.count(Operator.LOGP)
            logp, _, _ = logprob.merge(statistics, logits.gather(1, shard.unsqueeze(1)).squeeze(1))
        wiring.capture(Site(Boundary.LOGP), logp)
        return token.tolist(), logp.tolist(), digests.sum(dim=0).tolist()


class _Batch:
    """The sequences that still grow: place in the request, length, last token and tokens left of each."""

    def __init__(
        self,
        sequences: list[Sequence],
        index: list[int],
        limits: list[int],
        cache: KeyValueCache,
        decoder: Decoder,
    ) -> None:
        device = cache.keys[0].device
        self.sequences, self.cache, self.decoder = sequences, cache, decoder
        self.index, self.left = index, limits
        self.prompts = torch.tensor([s.prompt for s in sequences], device=device)
        self.samples = torch.tensor([s.sample for s in sequences], device=device)
        self.lengths = torch.tensor([len(s.tokens) for s in sequences], device=device)
        self.last = torch.zeros_like(self.lengths)

    def advance(self, tokens: list[int], eos_ids: tuple[int, ...]) -> None:
        """Append the drawn tokens and drop the sequences that ended, by EOS or by their limit."""
        self.lengths = self.lengths + 1
        self.last = torch.tensor(tokens, device=self.lengths.device)
        self.left = [left - 1 for left in self.left]
        goes_on = [left > 0 and token not in eos_ids for left, token in zip(self.left, tokens, strict=True)]
        if all(goes_on):
            return
        kept = [i for i, more in enumerate(goes_on) if more]
        alive = torch.tensor(kept, dtype=torch.int64, device=self.last.device)
        self.index, self.left = [self.index[i] for i in kept], [self.left[i] for i in kept]
        self.cache.keep(alive)
        self.prompts, self.samples = self.prompts[alive], self.samples[alive]
        self.lengths, self.last = self.lengths[alive], self.last[alive]
