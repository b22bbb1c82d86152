"""Synthetic run folders that pass every gate, and the means to plant one fault in them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rlsp.config import Job, from_plain
from rlsp.numerics.contract import contract_sha256
from rlsp.report import manifest as manifest_file
from rlsp.report.consistency import RolloutFacts, float64_bits
from rlsp.report.contradictions import row_metrics
from rlsp.report.digests import RolloutDigests, table_digest
from rlsp.report.files import canonical_json, sha256_bytes
from rlsp.report.planned import Planned
from rlsp.report.recorder import Recorder
from rlsp.standardise import standardised

RUN_ID = "20260102-030405-abcdef"
STARTED_AT = "2026-01-02T03:04:05+00:00"
ENDED_AT = "2026-01-02T03:05:05+00:00"
SEQUENCES, LENGTH, PROMPT, ROLLOUTS, VIRTUAL_TP = 8, 16, 5, 3, 8
SAMPLES = 4  # of one prompt
LAYER = (
    "input_layernorm",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
    "pre_mlp_layernorm",
    "self_attention.k_layernorm",
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
    "self_attention.q_layernorm",
)
NAMES = (
    *(f"decoder.layers.{layer}.{part}.weight" for layer in range(2) for part in LAYER),
    "decoder.final_layernorm.weight",
    "embedding.word_embeddings.weight",
    "output_layer.weight",
)
OPTIMIZER_NAMES = tuple(f"{kind}/{name}" for kind in ("exp_avg", "exp_avg_sq", "master") for name in NAMES)

Tensors = dict[str, np.ndarray]
ChangeTensors = Callable[[int, Tensors], None]
ChangeFacts = Callable[[int, dict[str, Any]], None]
ChangeDigests = Callable[[int, dict[str, Any]], None]
ChangeStartup = Callable[[dict[str, Any]], None]


def plain_config(**changes: Any) -> dict[str, Any]:
    """Return a whole config as plain values; `changes` go by dotted key with __ for the dot."""
    config: dict[str, Any] = {
        "name": "synthetic",
        "seed": 7,
        "num_rollouts": ROLLOUTS,
        "prompts_per_rollout": 2,
        "samples_per_prompt": SAMPLES,
        "max_response_tokens": LENGTH - PROMPT,
        "updates_per_rollout": 1,
        "micro_batch_size": 4,
        "learning_rate": 1e-3,
        "clip_ratio": 0.2,
        "kl_coef": 0.0,
        "entropy_coef": 0.01,
        "temperature": 1.0,
        "grad_clip": 1.0,
        "reuse_rollout_logprob": True,
        "resume": None,
        "diagnose": False,
        "export": False,
        "correction": {"kind": "none", "upper": 2.0, "lower": 0.5},
        "model": {
            "name": "qwen3_nano",
            "num_layers": 2,
            "hidden_size": 128,
            "num_attention_heads": 16,
            "num_query_groups": 8,
            "head_dim": 16,
            "ffn_hidden_size": 256,
            "vocab_size": 97,
            "qk_norm": True,
            "rope_base": 1e6,
            "rope_scaling": {},
            "norm_epsilon": 1e-6,
            "tie_embeddings": False,
            "init_std": 0.02,
            "pad_heads": False,
            "path": None,
            "dtype": "bfloat16",
        },
        "parallel": {"cp": 2, "tp": 2, "sp": 2, "dp": 1},
        "rollout": {"engine": "native", "tp": 1, "engines": 3, "ignore_eos": False}
        | {"timeout_s": None, "kv_cache_gib": None, "options": {}},
        "numerics": {
            "virtual_tp": 8,
            "token_block": 32,
            "q_block": 32,
            "k_block": 32,
            "row_tile": 32,
            "grad_lsb": 40,
            "threads": 1,
            "compiled": True,
            "routes": {"attention": "strict", "ffn": "strict", "logp": "strict"},
        },
        "task": {
            "kind": "arithmetic",
            "max_operand": 9,
            "reward": 1.0,
            "response_limit": None,
            "path": None,
            "prompt_key": None,
            "label_key": None,
            "order": "shuffled",
            "scorer": "exact",
            "max_prompt_tokens": None,
            "dataset": None,
            "dataset_config": {},
            "factory": None,
            "timeout_s": 10.0,
        },
        "tokenizer": {
            "kind": "auto",
            "path": None,
            "chat": "auto",
            "system_prompt": None,
            "template_options": {},
            "eos_ids": [],
        },
        "warmup": {"steps": 0, "sequences": 4, "learning_rate": 1e-3},
        "device": {"kind": "cpu", "backend": "gloo"},
        "optimizer": {"kind": "adamw", "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.0},
        "tracker": {
            "mode": "none",
            "project": "rlsp",
            "entity": None,
            "group": None,
            "tags": ["synthetic"],
            "init_timeout_s": 20.0,
            "finish_timeout_s": 60.0,
        },
        "checkpoint": {"every": 0, "keep": 2, "stop_s": 60.0},
        "launch": {"timeout_s": 60.0, "grace_s": 5.0, "progress": False, "max_restarts": 0},
        "cluster": {
            "nodes": 1,
            "node": 0,
            "host": None,
            "port": 29400,
            "agent_store": False,
            "attempt": 0,
            "wait_s": 300.0,
            "shared_folder": False,
        },
    }
    for key, value in changes.items():
        *path, last = key.split("__")
        place = config
        for part in path:
            place = place[part]
        place[last] = value
    return config


def make_job(run_dir: Path, **changes: Any) -> Job:
    """Return the job of a synthetic run."""
    return Job(
        config=from_plain(plain_config(**changes)),
        run_id=RUN_ID,
        run_dir=str(run_dir),
        overrides=("seed=7",),
        command_line=("rlsp", "seed=7"),
        started_at=STARTED_AT,
    )


def make_tensors(index: int) -> Tensors:
    """Return the tensors of a rollout whose two sides are the same bits."""
    random = np.random.default_rng(index)
    lengths = random.integers(8, LENGTH + 1, SEQUENCES)
    columns = np.arange(LENGTH)
    active = (columns >= PROMPT) & (columns < lengths[:, None])
    logprob = np.where(active, -random.exponential(1.5, (SEQUENCES, LENGTH)), 0).astype(np.float32)
    digest = np.where(active, random.integers(-(2**62), 2**62, (SEQUENCES, LENGTH)), 0)
    rewards = random.integers(0, 2, SEQUENCES).astype(np.float32)
    tokens = random.integers(0, 97, (SEQUENCES, LENGTH))
    tokens[:, :PROMPT] = np.repeat(tokens[::SAMPLES, :PROMPT], SAMPLES, axis=0)
    return {
        "tokens": tokens,
        "active_mask": active,
        "rollout_logprob": logprob,
        "train_logprob": logprob.copy(),
        "rewards": rewards,
        "advantages": np.asarray(standardised(rewards.tolist(), SAMPLES), dtype=np.float32),
        "lengths": lengths.astype(np.int64),
        "rollout_row_digest": digest,
        "train_row_digest": digest.copy(),
    }


@cache
def hashes(kind: str, version: int) -> Mapping[str, tuple[str, ...]]:
    """Return a table of one hash a virtual shard, norm weights replicated; `kind` is what it stands for."""
    names = OPTIMIZER_NAMES if kind == "optimizer" else NAMES
    return {
        name: tuple(
            hashlib.sha256(f"{kind}/{version}/{name}/{shard}".encode()).hexdigest()[:32]
            for shard in range(1 if "layernorm" in name else VIRTUAL_TP)
        )
        for name in names
    }


@cache
def digest_of(kind: str, version: int) -> str:
    """Return the digest of such a table."""
    return table_digest(hashes(kind, version))


def weights(version: int) -> str:
    """Return the digest of a version of the weights."""
    return digest_of("weights", version)


def ran(**changes: dict[str, int]) -> dict[str, dict[str, int]]:
    """Return the calls of every operator by route; `changes` go by operator with __ for the dot."""
    calls = {
        f"{side}.{operator}": {"strict": count}
        for side, count in (("train", 12), ("rollout", 40))
        for operator in ("attention", "ffn", "logp")
    }
    return calls | {name.replace("__", "."): by_route for name, by_route in changes.items()}


def make_facts(index: int, tensors: Mapping[str, np.ndarray], **changes: Any) -> dict[str, Any]:
    """Return the facts of a clean rollout as keyword arguments of RolloutFacts."""
    active = int(tensors["active_mask"].sum())
    norm = 0.5 + index / 7
    return {
        "weight_version_rollout": index,
        "weight_version_train": index,
        "rollout_weights_digest": weights(index),
        "trainer_weights_digest": weights(index),
        "weights_digest": weights(index + 1),
        "gradient_norm": norm,
        "gradient_norm_bits": float64_bits(norm),
        "gradient_digest": digest_of("gradients", index),
        "optimizer_digest": digest_of("optimizer", index),
        "gradient_norms": (norm,),
        "updates": 1,
        "learning_rate": 1e-3,
        "routes": ran(),
        "declared_routes": dict.fromkeys(ran(), "strict"),
        "cp_tokens": (active // 3, active - active // 3),
        "tp_replicas_agree": True,
        "ranks_agree": True,
        "sequences": SEQUENCES,
        "sources": {"rollout": "decode", "train": "forward"},
        **changes,
    }


def make_digests(index: int, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the digests that belong to `facts` as keyword arguments of RolloutDigests, lists inside."""
    held = next((v for v in range(index + 2) if weights(v) == facts["weights_digest"]), index + 1)
    updates = [
        {
            "loss": 0.1 * index + number,
            "loss_bits": float64_bits(0.1 * index + number),
            "gradients": plain_table("gradients", index),
            "gradient_norm": norm,
            "gradient_norm_bits": float64_bits(norm),
            "optimizer": plain_table("optimizer", index),
            "weights": plain_table("weights", held),
        }
        for number, norm in enumerate(facts["gradient_norms"])
    ]
    return {"initial": plain_table("weights", 0) if index == 0 else None, "updates": updates}


def plain_table(kind: str, version: int) -> dict[str, list[str]]:
    """Return a table that may be changed."""
    return {name: list(shards) for name, shards in hashes(kind, version).items()}


def fit_facts(facts: dict[str, Any], digests: Mapping[str, Any]) -> None:
    """Let the facts of a rollout say what its digests say, as the facts of a real run do."""
    last = digests["updates"][-1]
    set_gradient_norm(facts, *(update["gradient_norm"] for update in digests["updates"]))
    facts.update(
        updates=len(digests["updates"]),
        gradient_digest=table_digest(last["gradients"]),
        optimizer_digest=table_digest(last["optimizer"]),
        weights_digest=table_digest(last["weights"]),
    )


def set_gradient_norm(facts: dict[str, Any], *norms: float) -> None:
    """Give a rollout other gradient norms, one per update."""
    facts.update(gradient_norm=norms[-1], gradient_norm_bits=float64_bits(norms[-1]), gradient_norms=norms)


def set_contract(startup: dict[str, Any], **fields: Any) -> None:
    """Change the contract of start-up facts, with its hash wherever it stands."""
    startup["contract"] = {**startup["contract"], **fields}
    startup["contract_hash"] = contract_sha256(startup["contract"])
    for row in startup["agreement"]:
        row["contract_hash"] = startup["contract_hash"]


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a document as somebody would who hashes again what hashes are kept of."""
    said = json.loads(path.read_text())
    change(said)
    if path.name == "manifest.json":
        said["config_hash"] = sha256_bytes(canonical_json(said["config"]))
    path.write_text(json.dumps(said, indent=2) + "\n")


def make_startup(manifest: manifest_file.Manifest) -> dict[str, Any]:
    """Return start-up facts on which all ranks agree."""
    contract = Planned.model_validate(manifest.config).contract
    return {
        "contract": contract,
        "contract_hash": contract_sha256(contract),
        "data_hash": "d" * 64,
        "tokenizer": "character",
        "tokenizer_hash": "e" * 64,
        "chat_template_hash": None,
        "initial_weights_digest": weights(0),
        "weight_source": None,
        "kernels": {"torch": "2.13.0", "isa": "AVX512"},
        "certificate": {"products": "passed", "seconds": 0.8},
        "paths": {"qkv": "fused", "head": "leaf"},
        "agreement": [
            {
                "rank": row.rank,
                "contract_hash": contract_sha256(contract),
                "layout": {"dp": row.dp, "cp": row.cp, "tp": row.tp, "sp": row.sp},
                "code_hash": manifest.code.source_hash,
                "kernel_digest": "f" * 64,
            }
            for row in manifest.layout.table
        ],
    }


def make_metrics(
    tensors: Mapping[str, np.ndarray], facts: Mapping[str, Any], digests: Mapping[str, Any]
) -> dict[str, float]:
    """Return what a row says that the rollout's other files say as well."""
    return {
        **row_metrics(tensors, SAMPLES),
        "train/loss": digests["updates"][-1]["loss"],
        "train/old_logprob_mismatched": _mismatched(tensors),
        "train/gradient_norm": facts["gradient_norm"],
        "train/learning_rate": facts["learning_rate"],
        "train/weight_version": facts["weight_version_train"] + facts["updates"],
        "rollout/weight_version": facts["weight_version_rollout"],
        "rollout/active_tokens": int(tensors["active_mask"].sum()),
    }


def _mismatched(tensors: Mapping[str, np.ndarray]) -> int:
    sides = (tensors[name].view(np.int32) for name in ("rollout_logprob", "train_logprob"))
    differ = np.not_equal(*sides)
    return int((differ & tensors["active_mask"].astype(bool)).sum())


def write_run(
    run_dir: Path,
    *,
    tensors: ChangeTensors = lambda index, tensors: None,
    facts: ChangeFacts = lambda index, facts: None,
    digests: ChangeDigests = lambda index, digests: None,
    startup: ChangeStartup = lambda startup: None,
    rollouts: int = ROLLOUTS,
    aborted: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a run as its processes would have, with the faults that the callables plant; not yet sealed."""
    manifest = manifest_file.begin(make_job(run_dir, **(config or {})), {"OMP_NUM_THREADS": "1"})
    facts_of_ranks = make_startup(manifest)
    startup(facts_of_ranks)
    manifest_file.add_startup(run_dir, facts_of_ranks)
    with Recorder(run_dir) as recorder:
        for index in range(rollouts):
            arrays = make_tensors(index)
            said = make_facts(index, arrays)
            tensors(index, arrays)
            facts(index, said)
            hashed = make_digests(index, said)
            digests(index, hashed)
            every = make_metrics(arrays, said, hashed)
            metrics = {name: every[name] for name in ("reward/mean", "train/loss")}
            recorder.rollout(index, arrays, RolloutFacts(**said), metrics, digests=RolloutDigests(**hashed))
    logs = run_dir / "logs"
    logs.mkdir()
    (logs / "rank-00.log").write_text("started\n")
    status = manifest_file.Status.FINISHED if aborted is None else manifest_file.Status.ABORTED
    manifest_file.finish(run_dir, ENDED_AT, status, aborted)
    return run_dir
