"""The file warmup.json: the supervised steps before the first rollout, and the weights after them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlsp.report.documents import Document
from rlsp.report.records import bits_fit, float64_bits

WARMUP_NAME = "warmup.json"

_LAST_STEPS = 10
"""A step's loss depends on its batch: what the warm-up came to is the mean of these."""

Bits = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class WarmupStep(Document):
    """One step: mean negative log-probability of the solutions' tokens, and gradient norm before clipping."""

    loss: float
    loss_bits: Bits
    gradient_norm: float
    gradient_norm_bits: Bits

    @classmethod
    def of(cls, loss: float, gradient_norm: float) -> Self:
        """Build a step; the bit patterns are those of the numbers given."""
        return cls(
            loss=loss,
            loss_bits=float64_bits(loss),
            gradient_norm=gradient_norm,
            gradient_norm_bits=float64_bits(gradient_norm),
        )

    @model_validator(mode="after")
    def _bits_belong_to_the_numbers(self) -> Self:
        for name in ("loss", "gradient_norm"):
            if not bits_fit(getattr(self, f"{name}_bits"), getattr(self, name)):
                raise ValueError(f"{name}_bits is not the bit pattern of {name}")
        return self


class Warmup(Document):
    """The file warmup.json.

    `initial_weights_digest` is that of the manifest, `weights_digest` that of the weights which the first
    rollout draws with; the optimizer begins anew there.
    """

    schema_version: Literal[1] = 1
    steps: Annotated[tuple[WarmupStep, ...], Field(min_length=1)]
    initial_weights_digest: Digest
    weights_digest: Digest

    @property
    def text(self) -> str:
        """Say in a line how it went."""
        end = self.steps[-_LAST_STEPS:]
        last = sum(step.loss for step in end) / len(end)
        return f"warm-up: {len(self.steps)} steps, loss {self.steps[0].loss:.4g}, at last {last:.4g}"


def read_warmup(run_dir: Path) -> Warmup | None:
    """Read a run's warm-up; None where there is none.

    Raises:
        EvidenceError: The file is damaged.
    """
    path = run_dir / WARMUP_NAME
    return Warmup.read(path) if path.exists() else None


def warmup_faults(
    warmup: Warmup | None, planned: int, initial: str | None, *, recorded: bool
) -> Iterator[str]:
    """Yield where a warm-up is not the one that the config promised.

    Args:
        warmup: The file's content; None if it is missing.
        planned: Steps that the config asks for.
        initial: The manifest's digest of the initial weights, if it has one.
        recorded: Whether a rollout was recorded: before that the warm-up may not have ended.
    """
    if warmup is None:
        if planned and recorded:
            yield f"{WARMUP_NAME} is missing: the config asks for {planned} steps before the first rollout"
        return
    if len(warmup.steps) != planned:
        yield f"{WARMUP_NAME} has {len(warmup.steps)} steps, but the config says {planned}"
    if initial is not None and warmup.initial_weights_digest != initial:
        yield (
            f"{WARMUP_NAME}: initial_weights_digest is {warmup.initial_weights_digest}, "
            f"but the manifest says {initial}"
        )
