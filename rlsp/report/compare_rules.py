"""Which runs must give the same bits: the one rule behind rlsp-compare and the summary of a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlsp.layout import layout_word
from rlsp.report.files import canonical_json, sha256_bytes
from rlsp.report.manifest import Manifest, StartupFacts

FREE_KEYS = frozenset(
    {
        "name",
        "micro_batch_size",
        "parallel",
        "rollout.tp",
        "rollout.engines",
        "rollout.timeout_s",
        "device",
        "tracker",
        "launch",
        "checkpoint",
        "resume",
        "cluster",
        "diagnose",
        "export",
        "numerics.compiled",
        "task.timeout_s",
    }
)
"""Keys of a config (a section stands for all of its keys) that must not change a bit of the results."""

_LAYOUT_KEYS = frozenset({"micro_batch_size", "parallel", "rollout.tp", "rollout.engines", "device"})
"""Those of them that change no bit because the contract keeps them from it: not where a route is native."""
_NATIVE_KEYS = frozenset({"rollout.tp", "rollout.engines"})
"""Those of them that an external engine's bits may depend on."""

LENGTH_KEY = "num_rollouts"
"""How many rollouts there are: it changes where a run ends, not what is common to two runs."""

# Versions on which kernels, sums on the host and the evidence itself rest.
_PACKAGES = ("torch", "megatron-core", "numpy", "safetensors", "rlsp")
_ROUTES = "numerics.routes."
_SHOWN = 12


def result_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """List what of a composed config decides the results, as dotted key and plain value."""
    rollout = config.get("rollout", {})
    external = isinstance(rollout, Mapping) and rollout.get("engine", "native") != "native"
    free = FREE_KEYS - _NATIVE_KEYS if external else FREE_KEYS
    return {key: value for key, value in _leaves(config) if not _within(key, free)}


def result_hash(config: Mapping[str, Any]) -> str:
    """Hash what of a composed config decides the results: runs with one hash must agree to the last bit."""
    return sha256_bytes(canonical_json(result_keys(config)))


def continuation_keys(config: Mapping[str, Any], of: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """List what of a composed config a run must keep when it is resumed, as dotted key and plain value.

    Its length may grow. Where a route is native, or an engine external, the bits may depend on the layout, so
    that it is kept, too.

    Args:
        config: The config.
        of: That of the run which is resumed, by whose routes it is decided; None: the config itself.
    """
    kept = {key: value for key, value in result_keys(config).items() if key != LENGTH_KEY}
    run = result_keys(config if of is None else of)
    strict = all(value == "strict" for key, value in run.items() if key.startswith(_ROUTES))
    if not strict or run.get("rollout.engine") != "native":
        kept |= {key: value for key, value in _leaves(config) if _within(key, _LAYOUT_KEYS)}
    return kept


def continuation_hash(config: Mapping[str, Any]) -> str:
    """Hash what of a composed config a run must keep when it is resumed."""
    return sha256_bytes(canonical_json(continuation_keys(config)))


def refusals(a: Manifest, b: Manifest) -> tuple[str, ...]:
    """List everything that makes two runs incomparable: contract, data, seeds, configuration."""
    if a.startup is None or b.startup is None:
        return tuple(
            f"run {side} has no start-up facts: nothing says under which contract it would have run"
            for side, run in (("A", a), ("B", b))
            if run.startup is None
        )
    found = list(_contract(a.startup, b.startup))
    for what, of in (("data", "data_hash"), ("tokenizer", "tokenizer_hash")):
        found += unequal(what, getattr(a.startup, of), getattr(b.startup, of))
    for key in sorted(a.seeds.keys() | b.seeds.keys()):
        found += unequal("seed" if key == "seed" else f"seed {key}", a.seeds.get(key), b.seeds.get(key))
    named = set(a.startup.contract) | set(a.seeds)
    mine, other = result_keys(a.config), result_keys(b.config)
    for key in sorted(mine.keys() | other.keys()):
        # What the contract or the seeds hold as well was named there.
        if key != LENGTH_KEY and not (found and key.rpartition(".")[2] in named):
            found += unequal(f"configuration {key}", mine.get(key), other.get(key))
    return tuple(found)


def notes(a: Manifest, b: Manifest) -> tuple[str, ...]:
    """List what else differs and may explain a difference: code, packages, kernels, hardware, paths."""
    found: list[str] = []
    if a.run_id == b.run_id:
        found.append(f"A and B are one run, {a.run_id}")
    for side, run in (("A", a), ("B", b)):
        if run.earlier:
            found.append(f"run {side} has {len(run.segments)} segments: {_segments(run)}")
        if run.aborted is not None:
            found.append(f"run {side} was aborted ({run.aborted}): it is compared as far as it goes")
    planned = [run.config.get(LENGTH_KEY) for run in (a, b)]
    if planned[0] != planned[1]:
        found.append(f"{LENGTH_KEY} is {planned[0]} against {planned[1]}: the common rollouts are compared")
    found += unequal("code", a.code.source_hash, b.code.source_hash)
    for package in _PACKAGES:
        found += unequal(f"package {package}", a.packages.get(package), b.packages.get(package))
    found += unequal("processor", a.hardware.cpu, b.hardware.cpu)
    if a.startup is not None and b.startup is not None:
        mine, other = a.startup.kernels, b.startup.kernels
        for key in sorted(mine.keys() | other.keys()):
            found += unequal(f"kernels: {key}", mine.get(key), other.get(key))
        for key in sorted(a.startup.paths.keys() & b.startup.paths.keys()):  # a layout may have its own
            found += unequal(f"paths: {key}", a.startup.paths[key], b.startup.paths[key])
    return tuple(found[:_SHOWN] + ([f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []))


def unequal(what: str, a: object, b: object) -> Iterator[str]:
    """Yield one line where two values differ: what differs, and both of them."""
    if a != b:
        yield f"{what} is {_text(a)} against {_text(b)}"


def _contract(a: StartupFacts, b: StartupFacts) -> Iterator[str]:
    if a.contract_hash == b.contract_hash:
        return
    fields = sorted(
        k for k in a.contract.keys() | b.contract.keys() if a.contract.get(k) != b.contract.get(k)
    )
    for field in fields:
        yield from unequal(f"contract {field}", a.contract.get(field), b.contract.get(field))
    if not fields:
        yield from unequal("contract", a.contract_hash, b.contract_hash)


def _within(key: str, keys: frozenset[str]) -> bool:
    """Tell whether a key is one of some, or of a section that is."""
    return key in keys or key.partition(".")[0] in keys


def _segments(run: Manifest) -> str:
    """Say from which rollout on a run had which layout."""
    words = []
    for segment in run.segments:
        at = segment.layout
        layout = layout_word(cp=at.cp, tp=at.tp, sp=at.sp, dp=at.dp)
        words.append(f"from rollout {segment.first_rollout} in {layout}, {segment.begun_by.value}")
    return "; ".join(words)


def _text(value: object) -> str:
    return "absent" if value is None else canonical_json(value).decode().strip('"')


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
