"""One update: forward and backward by micro-batches, exact gradients, clip, AdamW."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlsp import collectives
from rlsp.groups import Mesh
from rlsp.layout import Layout, assign_sequences, padded_length
from rlsp.model.attention import Channel
from rlsp.model.build import PolicyModel, copy_bits
from rlsp.model.gradients import NativeParameter
from rlsp.model.head import TokenScores
from rlsp.model.weights import Entry, shard_entries, weight_entries
from rlsp.numerics.fixed import leaf_bound
from rlsp.rl.batch import RolloutBatch
from rlsp.rl.forward import Forward, ForwardRecorder, Shard
from rlsp.rl.loss import token_loss
from rlsp.rl.optimizer import AdamW, clip_coefficient, gradient_norm
from rlsp.sequence import local_positions
from rlsp.summation import Guard, Span, exact_sums, gradient, reduce_sums


class NonFiniteWeightsError(ArithmeticError):
    """An optimizer step left infinite or undefined weights; the message names the tensors."""


@dataclass(frozen=True)
class Objective:
    """What is optimised: the coefficients of the loss and of the step, and the rollout's temperature."""

    clip_ratio: float
    kl_coef: float
    entropy_coef: float
    temperature: float
    grad_clip: float
    learning_rate: float
    micro_batch_size: int


@dataclass(frozen=True)
class Step:
    """One update's outcome, the same on every rank and in every layout.

    Attributes:
        forward: What the forward pass computed.
        gradient_norm: Before clipping.
        clip: The factor that the gradients were scaled by.
        metrics: Means over all active tokens, by `forward.METRICS`.
        vanished_fraction: Of the gradients' nonzero leaf elements, the part that the unit of the exact sums
            rounded to zero.
        gradients: Hashes of the gradients before clipping (`model.weights.shard_entries`).
        optimizer: Hashes of the optimizer's state after the step.
        weights: Hashes of the weights after the step.
    """

    forward: Forward
    gradient_norm: float
    clip: float
    metrics: dict[str, float]
    vanished_fraction: float
    gradients: list[Entry]
    optimizer: list[Entry]
    weights: list[Entry]


@dataclass(frozen=True)
class _Descent:
    """One optimizer step: gradients before clipping by name, with whether they are sharded; as in `Step`."""

    gradients: dict[str, tuple[Tensor, bool]]
    norm: float
    clip: float
    vanished_fraction: float


class Trainer:
    """Own the policy, its exact accumulators and its optimizer on one rank of the training layout."""

    def __init__(
        self,
        model: PolicyModel,
        reference: PolicyModel | None,
        optimizer: AdamW,
        mesh: Mesh,
        layout: Layout,
        objective: Objective,
    ) -> None:
        """Attach accumulators to `model`; `reference` is what RL begins with, where kl_coef is above 0."""
        self.model, self.reference, self.optimizer = model, reference, optimizer
        self._mesh, self._layout, self._objective = mesh, layout, objective
        self._guard = Guard()
        self._device = model.vocabulary.valid.device
        self._sums = model.attach_sums(self._guard)
        self._natives = [
            (name, weight) for name, weight, _ in model.named_shards() if isinstance(weight, NativeParameter)
        ]

    @torch.no_grad()
    def score(self, batch: RolloutBatch) -> Tensor:
        """Return the log-probabilities of the policy as it is, float32 [N, S], 0 where inactive.

        A forward pass of its own: what frameworks call recomputing the old policy's log-probabilities.
        """
        batch = batch.to(self._device)
        recorder = ForwardRecorder(batch)
        for shard in self._micro_batches(batch):
            recorder.note(shard, self._score(self.model, shard), ())
        return recorder.forward(self._layout, self._mesh).logp

    def update(self, batch: RolloutBatch, advantages: Tensor, old_logp: Tensor | None = None) -> Step:
        """Take one optimizer step on `batch`.

        Args:
            batch: The rollout.
            advantages: float32, one a sequence [N] or one a token [N, S].
            old_logp: Log-probabilities of the policy that the ratio divides by, float32 [N, S]; None for what
                the rollout recorded.

        Raises:
            BoundBreachError: A gradient leaf was not finite or too large; on every rank.
            NonFiniteWeightsError: The step left weights that are not finite; on every rank.
            ReplicaDriftError: Ranks of TP hold different bits of a gradient that they share; on all of them.
        """
        batch, advantages = batch.to(self._device), _by_token(advantages.to(self._device), batch)
        old_logp = batch.logp if old_logp is None else old_logp.to(self._device)
        recorder = ForwardRecorder(batch)
        descent = self._descend(
            batch,
            lambda shard: self._accumulate(shard, batch, advantages, old_logp, recorder),
            self._objective.learning_rate,
        )
        gradients = ((name, *found) for name, found in descent.gradients.items())
        return Step(
            forward=recorder.forward(self._layout, self._mesh),
            gradient_norm=descent.norm,
            clip=descent.clip,
            metrics=recorder.means(self._mesh, batch),
            vanished_fraction=descent.vanished_fraction,
            gradients=shard_entries(gradients, self._mesh.tp),
            optimizer=shard_entries(self.optimizer.named_state(), self._mesh.tp),
            weights=weight_entries(self.model),
        )

    def imitate(self, batch: RolloutBatch, learning_rate: float) -> tuple[float, float]:
        """Take one supervised step: make the batch's active tokens more probable.

        By the path of `update`: the same forward pass at the same temperature, the same exact sums, clipping
        and optimizer.

        Returns:
            Mean negative log-probability over the active tokens and the gradient norm before clipping, the
            same float64s on every rank and in every layout.

        Raises: As `update` does.
        """
        batch = batch.to(self._device)
        losses = [torch.zeros(0, device=self._device)]

        def accumulate(shard: Shard) -> None:
            logp = self._score(self.model, shard).logp.view(shard.positions.numel(), shard.rows.numel())
            loss = torch.where(shard.active.t(), -logp, 0.0)
            torch.autograd.backward(loss, torch.ones_like(loss))
            losses.append(loss.detach().reshape(-1))

        descent = self._descend(batch, accumulate, learning_rate)
        total = exact_sums([torch.cat(losses)], self._mesh.token)[0]
        return total / max(batch.active_tokens, 1), descent.norm

    def restart(self) -> None:
        """Begin anew from the weights as they are: a fresh optimizer, and this policy as the reference."""
        self.optimizer = self.optimizer.fresh(self.model)
        if self.reference is not None:
            copy_bits(self.model, self.reference)

    def _descend(
        self, batch: RolloutBatch, accumulate: Callable[[Shard], None], learning_rate: float
    ) -> _Descent:
        """Run `accumulate` on every micro-batch, sum the gradients exactly and take the optimizer's step."""
        block = self.model.wiring.contract.block
        leaf_tokens = int((-(-batch.lengths // block) * block).sum())
        for item in self._sums:
            item.begin(leaf_tokens)
        for _, weight in self._natives:
            weight.main_grad.zero_()
        for shard in self._micro_batches(batch):
            accumulate(shard)
        self._guard.settle(self._mesh.world)
        vanished = reduce_sums(self._sums, self._mesh.token, self._mesh.world)
        gradients = {item.name: gradient(item, batch.active_tokens) for item in self._sums}
        gradients |= self._native_gradients(batch.active_tokens)
        named = {name: (gradients[name], sharded) for name, _, sharded in self.model.named_shards()}
        norm = gradient_norm(named, self._mesh.tp)
        clip = clip_coefficient(norm, self._objective.grad_clip)
        self.optimizer.step(gradients, learning_rate, clip)
        self._require_finite_weights()
        return _Descent(named, norm, clip, vanished)

    def rescore(
        self, batch: RolloutBatch, sample: int, look: Callable[[int, int, Tensor], None]
    ) -> TokenScores | None:
        """Run the forward pass of the micro-batch that holds row `sample` of the batch once more.

        Args:
            batch: The rollout.
            sample: A row of it.
            look: Told, before the pass, the row's place in the micro-batch, the micro-batch's sequences, and
                this rank's positions, int64 [s].

        Returns:
            Scores [s·b], sequence-major; None on a replica that holds other sequences.
        """
        for shard in self._micro_batches(batch):
            rows = shard.rows.tolist()
            if sample in rows:
                look(rows.index(sample), len(rows), shard.positions)
                return self._score(self.model, shard)
        return None

    def _native_gradients(self, active_tokens: int) -> dict[str, Tensor]:
        """Return the gradients of native routes' weights, summed over ranks by the backend, by name."""
        found: dict[str, Tensor] = {}
        for span, group in ((Span.TOKENS, self._mesh.token), (Span.WORLD, self._mesh.world)):
            own = [(name, weight.main_grad) for name, weight in self._natives if weight.span is span]
            if own:
                # One bucket a span, as Megatron-Core's data parallelism has: every call costs milliseconds.
                flat = collectives.backend_all_reduce(torch.cat([x.view(-1) for _, x in own]), group)
                parts = (flat / max(active_tokens, 1)).split([x.numel() for _, x in own])
                found |= {name: part.view(x.shape) for (name, x), part in zip(own, parts, strict=True)}
        return found

    def _require_finite_weights(self) -> None:
        """Stop every rank where the step left a master or a weight that is not finite.

        Raises:
            NonFiniteWeightsError: On every rank, naming the tensors.
        """
        held = [(name, weight, self.optimizer.masters[name]) for name, weight, _ in self.model.named_shards()]
        finite = [weight.isfinite().all() & master.isfinite().all() for _, weight, master in held]
        flags = collectives.max_integers((~torch.stack(finite)).to(torch.int64), self._mesh.world).tolist()
        if bad := [name for (name, _, _), flag in zip(held, flags, strict=True) if flag]:
            raise NonFiniteWeightsError(f"the step left weights that are not finite in: {', '.join(bad)}")

    def _micro_batches(self, batch: RolloutBatch) -> list[Shard]:
        """Cut this DP rank's sequences into micro-batches of this CP rank's positions, padded inside."""
        contract, layout = self.model.wiring.contract, self._layout
        mine = assign_sequences(batch.lengths.tolist(), layout.dp)[self._mesh.dp.index]
        size = self._objective.micro_batch_size
        bound = leaf_bound(contract.grad_lsb, -(-int(batch.lengths.max()) // contract.q_block))
        shards = []
        for start in range(0, len(mine), size):
            rows = torch.tensor(mine[start : start + size], dtype=torch.int64, device=self._device)
            blocks = (contract.token_block, contract.q_block, contract.k_block)
            length = padded_length(int(batch.lengths[rows].max()), layout.cp, layout.tp, blocks)
            positions = local_positions(length, self._mesh.cp, rows.device)
            tokens = _padded(batch.tokens[rows], length + 1)
            active = _padded(batch.active_mask[rows], length + 1)
            after = positions + 1
            shards.append(
                Shard(rows, positions, tokens[:, positions], tokens[:, after], active[:, after], bound)
            )
        return shards

    def _accumulate(
        self,
        shard: Shard,
        batch: RolloutBatch,
        advantages: Tensor,
        old_logp: Tensor,
        recorder: ForwardRecorder,
    ) -> None:
        """Run one micro-batch forward and backward; the backward seed is d(sum over tokens)."""
        objective = self._objective
        scores = self._score(self.model, shard)
        with torch.no_grad():
            reference = self._score(self.reference, shard).logp if self.reference is not None else None
        shape = (shard.positions.numel(), shard.rows.numel())
        columns = (shard.positions + 1).clamp(max=batch.tokens.shape[1] - 1)
        loss = token_loss(
            scores.logp.view(shape),
            old_logp[shard.rows][:, columns].t(),
            None if reference is None else reference.view(shape),
            scores.entropy.view(shape),
            advantages[shard.rows][:, columns].t(),
            shard.active.t(),
            clip_ratio=objective.clip_ratio,
            kl_coef=objective.kl_coef,
            entropy_coef=objective.entropy_coef,
        )
        torch.autograd.backward(loss.loss, torch.ones_like(loss.loss))
        entropy = torch.where(shard.active.t(), scores.entropy.detach().view(shape), 0.0)
        recorder.note(
            shard,
            scores,
            (
                loss.loss.detach(),
                loss.policy.detach(),
                loss.kl.detach(),
                entropy,
                loss.clipped.float(),
                loss.approx_kl,
            ),
        )

    def _score(self, model: PolicyModel, shard: Shard) -> TokenScores:
        """Return scores of the next tokens at this rank's positions, [s·b], sequence-major."""
        channel = Channel(
            qkv_format="sbhd", positions=shard.positions.unsqueeze(1), guard=self._guard, bound=shard.bound
        )
        hidden = model.hidden(shard.tokens, channel)
        return model.hidden_scores(hidden, shard.targets.t().reshape(-1), self._objective.temperature)


def _by_token(advantages: Tensor, batch: RolloutBatch) -> Tensor:
    """Give every token of a sequence its advantage, [N, S]."""
    return advantages if advantages.dim() > 1 else advantages.unsqueeze(1).expand(batch.tokens.shape)


def _padded(x: Tensor, width: int) -> Tensor:
    """Cut or zero-fill the columns of [b, S] to `width`; no true token is cut off."""
    return torch.nn.functional.pad(x[:, :width], (0, max(0, width - x.shape[1])))
