"""What the composed config promised, as far as evidence is measured against it."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from rlsp.config import RoutesConfig
from rlsp.layout import Layout, RolloutLayout, padded_vocab

Count = Annotated[int, Field(ge=1)]
Route = Annotated[str, Field(pattern=r"^[a-z]+(/[a-z]+)?$")]


class _Open(BaseModel):
    """A part of the composed config; keys that no gate asks about are left alone."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class _Model(_Open):
    vocab_size: Count
    dtype: str


class _Parallel(_Open):
    dp: Count
    cp: Count
    tp: Count
    sp: Count


class _Warmup(_Open):
    steps: Annotated[int, Field(ge=0)]


class _Rollout(_Open):
    engine: str
    tp: Count
    engines: Count | None

    @property
    def external(self) -> bool:
        """Tell whether the engine is not rlsp's own: its bits may differ from training's."""
        return self.engine != "native"


class _Routes(_Open):
    attention: Route
    ffn: Route
    logp: Route


class _Numerics(_Open):
    routes: _Routes
    virtual_tp: Count
    token_block: Count
    q_block: Count
    k_block: Count
    row_tile: Count
    grad_lsb: int
    threads: Count


class Planned(_Open):
    """What the composed config promised."""

    seed: int
    num_rollouts: Count
    updates_per_rollout: Count
    prompts_per_rollout: Count
    samples_per_prompt: Count
    max_response_tokens: Count
    learning_rate: float
    entropy_coef: float
    reuse_rollout_logprob: bool
    # Runs of earlier versions had none.
    warmup: _Warmup = _Warmup(steps=0)
    model: _Model
    parallel: _Parallel
    rollout: _Rollout
    numerics: _Numerics

    @property
    def sequences(self) -> int:
        """Count the sequences of one rollout."""
        return self.prompts_per_rollout * self.samples_per_prompt

    @property
    def world_size(self) -> int:
        """Count the ranks."""
        return self.parallel.dp * self.parallel.cp * self.parallel.tp

    @property
    def layout(self) -> Layout:
        """Derive the training layout.

        Raises:
            ValueError: There is no such layout.
        """
        return Layout(dp=self.parallel.dp, cp=self.parallel.cp, tp=self.parallel.tp, sp=self.parallel.sp)

    @property
    def rollout_layout(self) -> RolloutLayout:
        """Derive the rollout layout: without a stated count, as many engines as fit.

        Raises:
            ValueError: There is no such layout.
        """
        if self.rollout.external:
            return RolloutLayout(tp=1, engines=1, world_size=self.world_size)
        engines = self.rollout.engines or self.world_size // self.rollout.tp
        return RolloutLayout(tp=self.rollout.tp, engines=engines, world_size=self.world_size)

    @property
    def contract(self) -> dict[str, object]:
        """List the fields of the numeric contract that the config decides."""
        numerics = self.numerics.model_dump(exclude={"routes"})
        width = padded_vocab(self.model.vocab_size, self.numerics.virtual_tp)
        return {**numerics, "dtype": self.model.dtype, "padded_vocab": width}

    @property
    def declared_routes(self) -> dict[str, str]:
        """Name every operator's route on either side, `train.attention` to `rollout.logp`.

        An external engine's operators have none.
        """
        routes = RoutesConfig(**self.numerics.routes.model_dump()).declared()
        sides = ("train.",) if self.rollout.external else ("train.", "rollout.")
        return {name: route for name, route in routes.items() if name.startswith(sides)}
