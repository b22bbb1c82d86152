"""What a rank holds and works on, as integers: weights, mesh, sequences. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from rlsp.config import Config, DeviceKind
from rlsp.layout import assign_prompts, assign_sequences, padded_length

ITEM_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Weight:
    """One parameter as a rank holds it.

    Attributes:
        name: Megatron-Core's.
        shape: [V_local, N, K], or [n] where every rank of TP has a copy.
        everywhere: Whether its gradient's leaves lie on all ranks, those of TP included.
    """

    name: str
    shape: tuple[int, ...]
    everywhere: bool

    @property
    def sharded(self) -> bool:
        """Tell whether the ranks of TP hold different shards."""
        return len(self.shape) > 1

    @property
    def items(self) -> int:
        """Count the elements on one rank."""
        return prod(self.shape)

    @property
    def entries(self) -> int:
        """Count the shards on one rank that are hashed, and summed for the norm, one by one."""
        return self.shape[0] if self.sharded else 1


def weights_of(config: Config, tp: int, *, sequence_parallel: bool) -> tuple[Weight, ...]:
    """List the parameters of a model on one rank of `tp`, in name order."""
    model, virtual = config.model, config.numerics.virtual_tp
    hidden, head, local = model.hidden_size, model.head_dim, virtual // tp
    heads, groups = config.padded_attention_heads, config.padded_query_groups
    vocabulary = (local, config.padded_vocab // virtual, hidden)
    matrices = {
        "mlp.linear_fc1": (local, 2 * model.ffn_hidden_size // virtual, hidden),
        "mlp.linear_fc2": (local, hidden, model.ffn_hidden_size // virtual),
        "self_attention.linear_proj": (local, hidden, heads * head // virtual),
        "self_attention.linear_qkv": (local, (heads + 2 * groups) * head // virtual, hidden),
    }
    found = [Weight("embedding.word_embeddings.weight", vocabulary, False)]
    if not model.tie_embeddings:
        found.append(Weight("output_layer.weight", vocabulary, False))
    for layer in range(model.num_layers):
        at = f"decoder.layers.{layer}"
        found += [Weight(f"{at}.{name}.weight", shape, False) for name, shape in matrices.items()]
        found += [
            Weight(f"{at}.{name}.weight", (hidden,), sequence_parallel)
            for name in ("input_layernorm", "pre_mlp_layernorm")
        ]
        found += [
            Weight(f"{at}.self_attention.{name}_layernorm.weight", (head,), True)
            for name in ("q", "k")
            if model.qk_norm
        ]
    found.append(Weight("decoder.final_layernorm.weight", (hidden,), sequence_parallel))
    return tuple(sorted(found, key=lambda weight: weight.name))


@dataclass(frozen=True)
class Work:
    """The sequences of one rollout, in order: tokens of each prompt and of each response."""

    prompts: tuple[int, ...]
    responses: tuple[int, ...]

    @classmethod
    def full(cls, config: Config, prompt_tokens: int) -> Work:
        """Take every prompt at one length and every response at the longest."""
        count = config.sequences_per_rollout
        return cls((prompt_tokens,) * count, (config.max_response_tokens,) * count)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Add prompts and responses."""
        return tuple(a + b for a, b in zip(self.prompts, self.responses, strict=True))


@dataclass(frozen=True)
class Rank:
    """One rank of a configuration, and the share of the work that falls to it.

    Attributes:
        config: The configuration.
        work: One rollout.
        rank: Which rank.
    """

    config: Config
    work: Work
    rank: int

    @cached_property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """Name the ranks of every mesh axis that this rank is on."""
        layout, rollout = self.config.layout, self.config.rollout_layout
        partitions = {
            "world": [tuple(range(layout.world_size))],
            "tp": layout.tp_groups(),
            "cp": layout.cp_groups(),
            "dp": layout.dp_groups(),
            "token": layout.token_groups(),
            "rollout_tp": rollout.tp_groups(),
        }
        return {axis: ranks for axis, of in partitions.items() for ranks in of if self.rank in ranks}

    def size(self, axis: str) -> int:
        """Count the ranks of an axis; an idle rank's engine has none to talk to."""
        return len(self.groups.get(axis, (self.rank,)))

    @property
    def headers(self) -> bool:
        """Tell whether small messages go behind a header."""
        return self.config.device.kind is DeviceKind.cpu

    @property
    def item_bytes(self) -> int:
        """Return the size of a weight's or an activation's element."""
        return ITEM_BYTES[self.config.model.dtype.value]

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """List the trainer's parameters on this rank."""
        layout = self.config.layout
        return weights_of(self.config, layout.tp, sequence_parallel=layout.sequence_parallel)

    @cached_property
    def engine_weights(self) -> tuple[Weight, ...]:
        """List the engine's parameters on this rank; none where it idles during rollout."""
        if "rollout_tp" not in self.groups:
            return ()
        return weights_of(self.config, self.config.rollout.tp, sequence_parallel=False)

    @cached_property
    def engine_work(self) -> Work:
        """Take the sequences that this rank's engine generates: those that draw something."""
        place = self.config.rollout_layout.coords(self.rank)
        if place is None:
            return Work((), ())
        mine = assign_prompts(len(self.work.prompts), self.config.rollout_layout.engines)[place.engine]
        drawn = [i for i in mine if self.work.responses[i]]
        return Work(tuple(self.work.prompts[i] for i in drawn), tuple(self.work.responses[i] for i in drawn))

    @cached_property
    def micro_batches(self) -> tuple[tuple[int, int], ...]:
        """List sequences and padded length of each of this rank's micro-batches."""
        layout, numerics, size = self.config.layout, self.config.numerics, self.config.micro_batch_size
        lengths = self.work.lengths
        mine = assign_sequences(lengths, layout.dp)[layout.coords(self.rank).dp]
        blocks = (numerics.token_block, numerics.q_block, numerics.k_block)
        parts = [mine[start : start + size] for start in range(0, len(mine), size)]
        return tuple(
            (len(part), padded_length(max(lengths[i] for i in part), layout.cp, layout.tp, blocks))
            for part in parts
        )
