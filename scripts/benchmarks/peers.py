"""rlsp against TRL and vLLM: the same shape of model, prompts and tokens, two cores each, in turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import Options, compose, on_ranks, rank_function
from benchmarks.turns import Turn
from rlsp.board import Place
from rlsp.config import Config
from rlsp.model.assemble import assemble
from rlsp.numerics.operands import noise
from rlsp.rl.rollout.dispatch import Rollouts
from rlsp.rl.rollout.native import NativeEngine, Sampling, Sequence
from rlsp.run import cache_shape, mesh_of, trainer_of
from rlsp.task import open_task

WARM_UP = 2  # turns of each side that do not count
LAST_TURN_S = 600.0  # the longest wait for it, and for the end of the peer
HEAD_DIM = 32  # qwen3_nano's 16 is too small for vLLM's attention on a CPU
SHAPE = (f"model.head_dim={HEAD_DIM}",)
WAIT = "launch.timeout_s=900"  # ranks wait for the peer inside a collective
LAYOUT = ("parallel=cp1_tp1_sp1_dp2", "rollout.tp=1", "rollout.ignore_eos=true", WAIT, *SHAPE)
PROMPT = (2, 1, 3, 4, 5, 6)  # token ids
GRPO = {"prompts": 4, "samples": 4, "tokens": 112}
ROLLOUT_TOKENS = 128


@rank_function
def ours(config: Config, place: Place, options: Options) -> list[float]:
    """Take turns with a peer: a rollout, and an update where `options` ask for one."""
    mesh = mesh_of(config, place)
    models = assemble(config, mesh, torch.device("cpu"))
    trainer = trainer_of(config, models, mesh)
    assert models.engine is not None  # dp=2 and rollout.tp=1: every rank has one
    engine = NativeEngine(models.engine, *cache_shape(config))
    pad_id = open_task(config)[0].pad_id
    rollouts = Rollouts(models.trainer, engine, config.rollout_layout, mesh, pad_id)
    count, tokens = options["sequences"], options["tokens"]
    sequences = [Sequence(i // options["samples"], i % options["samples"], PROMPT) for i in range(count)]
    advantages = noise(3, (count,), torch.device("cpu"))

    def step() -> None:
        version = trainer.optimizer.steps
        rollouts.synchronise(version)
        batch = rollouts.generate(sequences, Sampling(0, version, 1.0, tokens, ()), version)
        if options["update"]:
            trainer.update(batch, advantages)

    turn = Turn(options["folder"], "rlsp", "peer")
    for number in range(options["turns"]):
        if place.rank == 0:
            turn.wait() if number else turn.begin()
        dist.barrier()
        if place.rank == 0:
            turn.timed(step)
        else:
            step()
    if place.rank == 0:
        turn.end()
    return turn.seconds


def grpo_over_trl(repeats: int) -> tuple[float, str]:
    """Return the time of a GRPO step, rollout and update, over TRL's."""
    sequences = GRPO["prompts"] * GRPO["samples"]
    options = {"sequences": sequences, "samples": GRPO["samples"], "tokens": GRPO["tokens"], "update": True}
    own, peer = _in_turn("benchmarks.peer_trl", options, repeats)
    how = (
        f"rlsp {own:.3f} s on 2 ranks (dp=2) of 1 thread, TRL's GRPOTrainer {peer:.3f} s in 1 process of 2 "
        f"threads, medians of {repeats} turns; {sequences} × {GRPO['tokens']} tokens, bfloat16, {_shape()}"
    )
    return own / peer, how


def vllm_over_tokens(sequences: int, repeats: int) -> tuple[float, str]:
    """Return vLLM's tokens per second over those of rlsp's rollout."""
    options = {"sequences": sequences, "samples": 1, "tokens": ROLLOUT_TOKENS, "update": False}
    own, peer = _in_turn("benchmarks.peer_vllm", options, repeats)
    total = sequences * ROLLOUT_TOKENS
    how = (
        f"vLLM {total / peer:.0f} tokens/s in 1 process of 2 threads, rlsp {total / own:.0f} on 2 engines of "
        f"1 thread, hand-over of the weights included; medians of {repeats} turns; {sequences} × "
        f"{ROLLOUT_TOKENS} tokens with log-probabilities, bfloat16, {_shape()}"
    )
    return own / peer, how


def _shape() -> str:
    return f"qwen3_nano with head_dim={HEAD_DIM}"


def _in_turn(peer: str, options: dict[str, Any], repeats: int) -> tuple[float, float]:
    """Return the medians of both sides' seconds."""
    turns = repeats + WARM_UP
    with tempfile.TemporaryDirectory(prefix="rlsp-bench-") as folder:
        every = {**options, "turns": turns, "folder": folder}
        log = Path(folder) / "peer.log"
        with log.open("wb") as out:
            arguments = [sys.executable, "-m", peer, json.dumps(every)]
            process = subprocess.Popen(arguments, env=_environment(), stdout=out, stderr=out)
        try:
            seconds = on_ranks(compose(*LAYOUT), "benchmarks.peers:ours", every)[0]
            process.wait(LAST_TURN_S)
            theirs = json.loads((Path(folder) / "peer.json").read_text())
        except Exception as error:
            error.add_note(f"the peer said:\n{log.read_text(errors='replace')[-3000:]}")
            raise
        finally:
            process.kill()
            process.wait()
    return median(seconds[WARM_UP:]), median(theirs[WARM_UP:])


def take_turns(turn: Turn, turns: int, call: Callable[[], object]) -> None:
    """Be the peer: make so many turns, and end whatever happens."""
    try:
        for _ in range(turns):
            turn.timed(call)
    finally:
        turn.end()


def _environment() -> dict[str, str]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "2")
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_NO_USAGE_STATS": "1"}
    vllm = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    return {**os.environ, **threads, **offline, **vllm}
