"""Where two files of a run state different things: what hashes cannot tell once they are sealed again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import datetime
from enum import Enum
from typing import Any

import numpy as np
from pydantic import BaseModel

from rlsp.numerics.contract import contract_sha256
from rlsp.report.documents import Document
from rlsp.report.files import canonical_json, json_safe, sha256_bytes
from rlsp.report.manifest import Manifest, Segment, StartupFacts, Status, engine_layout, training_layout
from rlsp.report.mismatch_records import Mismatch
from rlsp.report.planned import Planned
from rlsp.report.recorder import consistency_metrics
from rlsp.report.records import RolloutRecord, TokenLocation
from rlsp.report.tensors import Array
from rlsp.standardise import standardised

# Exponentials differ between mathematics libraries in their last bits, and NumPy's sums between processors;
# everything else is exact.
_THROUGH_EXP = frozenset({"kl_k3", "ppl_ratio", "ess", "sums"})
_OLD_POLICY = "train/old_logprob_mismatched"
_SUMMED = frozenset({"reward/mean", "reward/std"})
_RELATIVE = 1e-9
# k3 is a difference of nearly equal numbers, so near zero only its size counts.
_ABSOLUTE = 1e-12


def of_manifest(manifest: Manifest, planned: Planned | None) -> Iterator[str]:
    """Yield what the manifest states twice and differently: against its config, its contract, its end."""
    if sha256_bytes(canonical_json(manifest.config)) != manifest.config_hash:
        yield "config_hash is not the hash of config"
    yield from _end(manifest)
    if manifest.startup is not None:
        yield from of_contract(manifest.startup, planned)
    if planned is not None:
        yield from of_layouts(manifest, planned)
        for key, said, wanted in (
            ("seeds", manifest.seeds, {"seed": planned.seed}),
            ("entropy_coef", manifest.entropy_coef, planned.entropy_coef),
        ):
            if said != wanted:
                yield f"{key} is {words(said)}, but config gives {words(wanted)}"


def of_job(job: Mapping[str, Any], manifest: Manifest) -> Iterator[str]:
    """Yield where the job that the ranks received is not what the manifest says.

    Args:
        job: The content of job.json; where the run folder lay is its own business.
        manifest: The manifest.
    """
    for key in ("run_id", "started_at", "overrides", "command_line", "config"):
        said, wanted = job.get(key), getattr(manifest, key)
        if canonical_json(said) != canonical_json(wanted):
            detail = "" if key == "config" else f": {words(said)} against {words(wanted)}"
            yield f"{key} is not that of manifest.json{detail}"


def of_record(record: RolloutRecord, planned: Planned) -> Iterator[str]:
    """Yield where a rollout's entry in consistency.json is not what the config prescribes."""
    if record.learning_rate != planned.learning_rate:
        yield f"learning_rate is {record.learning_rate}, but the config says {planned.learning_rate}"
    if not record.declared_routes:
        # The gate `routes` says so.
        return
    wanted = planned.declared_routes
    for operator in sorted(wanted.keys() | record.declared_routes.keys()):
        said, prescribed = record.declared_routes.get(operator), wanted.get(operator)
        if said != prescribed:
            what = f"the declared route of {operator} is {words(said)}"
            yield f"{what}, but the config says {words(prescribed)}"


def of_tensors(tensors: Mapping[str, Array], planned: Planned) -> Iterator[str]:
    """Yield where well-formed tensors are not what the config prescribes, or advantages not the rewards'."""
    tokens, lengths = tensors["tokens"].astype(np.int64), tensors["lengths"].astype(np.int64)
    vocabulary, group = planned.model.vocab_size, planned.samples_per_prompt
    strange = (tokens < 0) | (tokens >= vocabulary)
    if strange.any():
        sample, position = (int(i) for i in np.argwhere(strange)[0])
        token = int(tokens[sample, position])
        yield f"sample {sample}, token {position} is {token}, the vocabulary has {vocabulary}"
    drawn = np.count_nonzero(tensors["active_mask"], axis=1)
    if (drawn > planned.max_response_tokens).any():
        sample = int(np.argmax(drawn))
        yield (
            f"sample {sample} has a response of {drawn[sample]} tokens, "
            f"max_response_tokens is {planned.max_response_tokens}"
        )
    if len(lengths) % group:
        # The gate `counts` says so.
        return
    prompts = lengths - drawn
    for sample in range(len(lengths)):
        first = sample - sample % group
        mine, other = (tokens[row, : max(int(prompts[row]), 0)].tolist() for row in (sample, first))
        if mine != other:
            yield f"samples {first} and {sample} are of one prompt and begin with other tokens"
            break
    rewards = tensors["rewards"].astype(np.float64).tolist()
    if all(map(math.isfinite, rewards)):
        found = np.asarray(standardised(rewards, group), dtype=np.float32)
        said = tensors["advantages"].astype(np.float32)
        if (differ := found != said).any():
            sample = int(np.argmax(differ))
            yield (
                f"sample {sample} has the advantage {float(said[sample])!r}, "
                f"but the rewards of its prompt give {float(found[sample])!r}"
            )


def row_metrics(tensors: Mapping[str, Array], group: int) -> dict[str, float]:
    """Compute the metrics of a row that follow from a rollout's tensors; `group` samples are a prompt's."""
    rewards = tensors["rewards"].astype(np.float64).tolist()
    drawn = np.count_nonzero(tensors["active_mask"], axis=1)
    if not rewards:
        return {}
    groups = [rewards[start : start + group] for start in range(0, len(rewards), group)]
    return {
        "rollout/sequences": len(rewards),
        "rollout/response_length_mean": int(drawn.sum()) / len(rewards),
        "rollout/response_length_max": int(drawn.max()),
        "rollout/response_length_min": int(drawn.min()),
        "reward/mean": float(np.mean(rewards)),
        "reward/std": float(np.std(rewards)),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "reward/solved_fraction": sum(max(g) >= 1.0 for g in groups) / len(groups),
        "reward/constant_groups_fraction": sum(min(g) == max(g) for g in groups) / len(groups),
        "reward/advantage_max_abs": float(np.max(np.abs(tensors["advantages"]))),
    }


def of_row(
    row: Mapping[str, Any],
    record: RolloutRecord,
    loss: float | None,
    from_tensors: Mapping[str, float],
    planned: Planned | None,
) -> Iterator[str]:
    """Yield what a row of metrics.jsonl states otherwise than the files of its rollout.

    Args:
        row: The row.
        record: The rollout's entry in consistency.json.
        loss: The last update's, from the rollout's digest file; None if it could not be read.
        from_tensors: What `row_metrics` gives for the rollout's tensors.
        planned: What the config promised; None if the manifest does not say.
    """
    measured = consistency_metrics(record)
    recomputed = planned is not None and not planned.reuse_rollout_logprob
    for name in (measured.keys() | ({_OLD_POLICY} if recomputed else set())) - row.keys():
        yield f"{name} is missing"
    known: dict[str, float] = {
        **from_tensors,
        **measured,
        "rollout/active_tokens": record.active_tokens,
        "rollout/weight_version": record.weight_version_rollout,
        "train/weight_version": record.weight_version_train + record.updates,
        "train/gradient_norm": record.gradient_norm,
        "train/learning_rate": record.learning_rate,
    }
    if planned is not None:
        # Training's own, computed again, has training's bits; the rollout's has the rollout's.
        known[_OLD_POLICY] = 0 if recomputed else record.mismatched_tokens
    if loss is not None:
        known["train/loss"] = loss
    for name, value in known.items():
        if name in row and not _is_said(row[name], json_safe(value), exact=name not in _SUMMED):
            yield f"{name} is {words(row[name])}, but the evidence gives {words(json_safe(value))}"


def of_statistics(stored: Document, measured: Document, *, exact: bool = True) -> Iterator[str]:
    """Yield the statistics of `measured` that `stored` states otherwise.

    What a document of an earlier version does not have is not asked of it. Without `exact`, floats may differ
    as mathematics libraries do.
    """
    for name in type(measured).model_fields:
        if name not in stored.model_fields_set:
            continue
        said, found = getattr(stored, name), getattr(measured, name)
        if isinstance(said, Mismatch) and isinstance(found, Mismatch):
            yield from (f"{name}.{fault}" for fault in of_statistics(said, found, exact=False))
        elif not _same(said, found, exact=exact and name not in _THROUGH_EXP):
            yield f"{name} is {words(said)}, but the evidence gives {words(found)}"


def words(value: object) -> str:
    """Write a value of a document for people."""
    if value is None:
        return "absent"
    if isinstance(value, TokenLocation):
        at = f"sample {value.sample}, token {value.position}"
        return f"at {at} (rollout {value.rollout}, training {value.train})"
    if isinstance(value, Document):
        value = value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {words(item)}" for key, item in value.items()) or "empty"
    if isinstance(value, list | tuple):
        return ", ".join(map(words, value)) or "empty"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value.value if isinstance(value, Enum) else value)


def _end(manifest: Manifest) -> Iterator[str]:
    """Yield where status, end and reason contradict each other."""
    if (manifest.status is Status.ABORTED) != (manifest.aborted is not None):
        yield f"status is {manifest.status.value}, but aborted is {words(manifest.aborted)}"
    if (manifest.status is Status.RUNNING) != (manifest.ended_at is None):
        yield f"status is {manifest.status.value}, but ended_at is {words(manifest.ended_at)}"
    for key, text in (("started_at", manifest.started_at), ("ended_at", manifest.ended_at)):
        if text is not None and not _is_time(text):
            yield f"{key} is no time: {text}"


def _is_time(text: str) -> bool:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True


def of_contract(startup: StartupFacts, planned: Planned | None) -> Iterator[str]:
    """Yield where the contract is not the one of its hash, or not the config's."""
    if contract_sha256(startup.contract) != startup.contract_hash:
        yield "contract_hash is not the hash of contract"
    for field, wanted in (planned.contract if planned else {}).items():
        if field not in startup.contract or startup.contract[field] != wanted:
            said = words(startup.contract.get(field))
            yield f"contract {field} is {said}, but config gives {words(wanted)}"


def of_layouts(manifest: Manifest | Segment, planned: Planned) -> Iterator[str]:
    """Yield where a layout table is not the config's."""
    # The length first: a config may promise more ranks than a table could hold.
    for key, table in (("layout", manifest.layout.table), ("rollout_layout", manifest.rollout_layout.table)):
        if len(table) != planned.world_size:
            yield f"{key} places {len(table)} ranks, but config gives {planned.world_size}"
            return
    try:
        layouts = training_layout(planned.layout), engine_layout(planned.rollout_layout)
    except ValueError as error:
        yield f"config gives no layout: {error}"
        return
    for key, said, wanted in (
        ("layout", manifest.layout, layouts[0]),
        ("rollout_layout", manifest.rollout_layout, layouts[1]),
    ):
        if said != wanted:
            yield f"{key} is not the one that config gives"


def _is_said(said: object, found: object, *, exact: bool) -> bool:
    if isinstance(said, bool) or type(said) not in (int, float, str):
        return False
    if exact or isinstance(said, str) or isinstance(found, str):
        return said == found
    try:
        return _same(float(said), float(found), exact=False)  # type: ignore[arg-type]
    except OverflowError:
        return False


def _same(a: object, b: object, *, exact: bool) -> bool:
    if isinstance(a, BaseModel) and isinstance(b, BaseModel):
        return all(_same(getattr(a, name), getattr(b, name), exact=exact) for name in type(a).model_fields)
    if isinstance(a, float) and isinstance(b, float):
        if math.isnan(a) or math.isnan(b):
            return math.isnan(a) and math.isnan(b)
        return a == b if exact else math.isclose(a, b, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
    return a == b
