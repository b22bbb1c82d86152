"""What a plan says is what models hold, what autograd keeps and what collectives count."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_helpers import alone, ragged
from rank_data import world
from ranks import run_ranks
from test_meta import mesh_of, models

from rlsp import collectives, messages, run
from rlsp.board import Board, Place
from rlsp.cli.plan import main
from rlsp.config import Config, Job
from rlsp.evidence import Evidence
from rlsp.model.assemble import assemble
from rlsp.model.build import PolicyModel
from rlsp.report import manifest
from rlsp.report.plan_memory import memory, saved_activations
from rlsp.report.plan_shapes import Rank, Work
from rlsp.report.plan_traffic import traffic
from rlsp.rl.task import CharacterTokenizer

STARTED = "2026-01-01T00:00:00+00:00"
SMALL = (
    "num_rollouts=1",
    "prompts_per_rollout=4",
    "samples_per_prompt=2",
    "max_response_tokens=24",
    "task.response_limit=24",  # ragged and empty responses
    "micro_batch_size=2",
    "model.num_layers=1",
    "tracker=none",
)
Moved = Counter[tuple[str, str, str]]


def counted(folder: Path, config: Config) -> tuple[Work, list[Moved]]:
    """Run a rollout and its updates; return its sequences and what every rank counted."""
    (folder / "logs").mkdir(parents=True)
    job = Job(config, "20260101-000000-abcdef", str(folder), (), ("rlsp",), STARTED)
    manifest.begin(job, {})
    Board.create(folder / "logs" / "board", config.world_size)

    def live(rank: int, world_size: int) -> tuple[list[int], list[int], Moved]:
        board = Board.join(folder / "logs" / "board", world_size).writer(rank)
        found: list[Any] = []
        record = Evidence.record

        def noted(self: Evidence, index: int, batch: Any, *given: Any) -> None:
            record(self, index, batch, *given)
            found.extend((batch.lengths.tolist(), batch.active_mask.sum(1).tolist(), given[5].moved))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Evidence, "record", noted)
            run.live(job, Place(rank, world_size, rank, "", board))
        return found[0], found[1], found[2]

    left = run_ranks(config.world_size, live, timeout_s=240)
    lengths, responses, _ = left[0]
    prompts = tuple(int(n) for n in np.array(lengths) - np.array(responses))
    return Work(prompts, tuple(responses)), [moved for _, _, moved in left]


@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel=cp1_tp1_sp1",),
        ("parallel=cp1_tp2_sp1", "kl_coef=0.1", "rollout.tp=2"),
        ("parallel=cp1_tp2_sp2", "updates_per_rollout=2"),
        ("parallel=cp2_tp1_sp1", "reuse_rollout_logprob=false"),
        ("parallel=cp1_tp1_sp1_dp2", "rollout.tp=2", "model.tie_embeddings=true"),
        ("parallel=cp2_tp2_sp2", "rollout.tp=2", "rollout.engines=1"),
        ("parallel=cp1_tp4_sp4", "model.dtype=float32"),
    ],
    ids=lambda overrides: overrides[0].removeprefix("parallel="),
)
def test_the_prediction_is_what_every_rank_counts(
    tmp_path: Path, compose: Callable[..., Config], overrides: tuple[str, ...]
) -> None:
    config = compose(*SMALL, *overrides)
    work, found = counted(tmp_path / "run", config)
    for rank, moved in enumerate(found):
        assert dict(traffic(Rank(config, work, rank))) == dict(moved), rank
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    counted_bytes = {name: value for name, value in row.items() if name.startswith("comm/")}
    assert sum(counted_bytes.values()) == sum(found[0].values())
    assert len(counted_bytes) == 6


@pytest.mark.parametrize(
    "overrides",
    [
        ("experiment=qwen3_8b_g11",),
        ("model=dense_70b", "parallel=cp1_tp8_sp8", "rollout.tp=4", "rollout.engines=1"),
        ("model=qwen3_0_6b", "parallel=cp2_tp2_sp1", "model.num_layers=2"),
    ],
    ids=lambda overrides: overrides[0],
)
def test_planned_weights_are_those_of_the_models(
    compose: Callable[..., Config], overrides: tuple[str, ...]
) -> None:
    config = compose(*overrides, "model.num_layers=2")
    rank = Rank(config, Work.full(config, 8), 1)
    with mesh_of(config, 1) as mesh:
        trainer, engine = models(config, mesh)

    def held(model: PolicyModel) -> list[tuple[str, tuple[int, ...], bool]]:
        return [(name, tuple(weight.shape), cut) for name, weight, cut in model.named_shards()]

    assert [(w.name, w.shape, w.sharded) for w in rank.weights] == held(trainer)
    assert [(w.name, w.shape, w.sharded) for w in rank.engine_weights] == held(engine)


@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel=cp1_tp1_sp1",),
        ("parallel=cp1_tp1_sp1", "model.dtype=float32", "model.tie_embeddings=true", "kl_coef=0.1"),
        ("parallel=cp1_tp1_sp1", "model.hidden_size=256", "model.num_layers=3"),
    ],
    ids=str,
)
def test_planned_memory_is_what_a_rank_holds(
    compose: Callable[..., Config], overrides: tuple[str, ...]
) -> None:
    config = compose(*overrides)
    mesh = alone()
    built = assemble(config, mesh, torch.device("cpu"))
    trainer = run.trainer_of(config, built, mesh)
    job = Job(config, "20260101-000000-abcdef", "run", (), (), "2026-01-01T00:00:00+00:00")
    engine = run.rollouts_of(job, built, mesh, CharacterTokenizer()).engine
    assert engine is not None
    batch = ragged([60, 128], [20, 100])
    rank = Rank(config, Work((40, 28), (20, 100)), 0)
    planned = memory(rank)

    def size(tensors: Any) -> int:
        return sum(x.nbytes for x in tensors)

    assert planned.weights == size(built.trainer.parameters())
    assert planned.reference == (size(built.reference.parameters()) if built.reference else 0)
    assert planned.engine == size(engine.model.parameters())
    assert planned.optimizer == size(x for _, x, _ in trainer.optimizer.named_state())
    assert planned.sums == size(item.total for item in trainer._sums)
    drawn = [run.Sequence(0, i, (1,) * n) for i, n in enumerate(rank.work.prompts)]
    cache = engine._cache(drawn, max(rank.work.responses))
    assert planned.cache == size([*cache.keys, *cache.values])
    (sequences, length) = rank.micro_batches[0]
    kept = saved_by_autograd(trainer, batch, built.trainer)
    tokens = sequences * length
    expected = saved_activations(rank, tokens, tokens) + tokens * config.padded_vocab * 4
    assert abs(kept - expected) < 0.02 * kept


def saved_by_autograd(trainer: Any, batch: Any, model: PolicyModel) -> int:
    """Run one micro-batch forward; return the bytes of what is kept for its backward pass."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        trainer._score(model, trainer._micro_batches(batch)[0])
    return sum(storage.nbytes() for at, storage in kept.items() if at not in weights)


def sizes_counted(rank: int, size: int) -> list[tuple[int, int]]:
    """What collectives count and what `messages` says, from nothing to beyond every threshold."""
    group, found = world(rank, size), []
    wire = group.ledger.wire

    def counted(call: Callable[[], object]) -> int:
        before = wire.total()
        call()
        return wire.total() - before

    for count in (0, 1, 1000, 4096, (1 << 18) // size, (1 << 18) + 1, (1 << 20) + 5):
        x, whole = torch.ones(count, dtype=torch.int64), torch.ones(count)
        headed = {"headers": True}
        found += [
            (
                counted(lambda x=x: collectives.gather(x, group)),
                messages.exchanged(8 * count, size, **headed),
            ),
            (
                counted(lambda x=whole: collectives.all_reduce(x, group)),
                messages.reduced(count, 4, size, **headed),
            ),
            (
                counted(lambda x=x: collectives.sum_integers(x, group)),
                messages.added_in_place(8 * count, size)
                if 8 * count > messages.OWN_ALL_REDUCE_BYTES
                else messages.reduced(count, 8, size, **headed),
            ),
        ]
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_messages_of_every_size_are_counted_as_planned(size: int) -> None:
    for found in run_ranks(size, sizes_counted, timeout_s=120):
        assert [counted for counted, _ in found] == [planned for _, planned in found]
        assert max(counted for counted, _ in found) > messages.OWN_ALL_REDUCE_BYTES


def test_a_plan_shows_memory_and_bytes_and_writes_every_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    assert main(["experiment=qwen3_8b_g11", "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "qwen3_8b, cp2_tp4_sp4, 2 engines of tp 4, cuda; 8 sequences of 7176 tokens" in shown
    assert "memory of rank 0, the largest of 8" in shown
    (plan,) = json.loads(out.read_text())["plans"]
    assert [entry["rank"] for entry in plan["ranks"]] == list(range(8))
    one = plan["ranks"][0]
    held = ("weights", "reference", "engine", "optimizer", "sums")
    assert one["memory_bytes"]["held"] == sum(one["memory_bytes"][name] for name in held)
    # 8.19 billion parameters over TP=4, 2 bytes each: norms are on every rank.
    assert abs(4 * one["memory_bytes"]["weights"] - 2 * 8_190_735_360) < 4 * 2 * (73 * 4096 + 72 * 128)


def test_a_table_of_layouts_has_every_legal_one_and_says_why_another_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["model=qwen3_nano", "--ranks", "16"]) == 0
    shown = capsys.readouterr().out
    for word in ("cp1_tp8_sp8_dp2", "cp16_tp1_sp1", "cp2_tp2_sp1_dp4"):
        assert f"│ {word} " in shown
    assert "cp1_tp16_sp16: refused: parallel.tp=16: legal:" in shown


def test_a_plan_of_what_is_illegal_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parallel.sp=3", "no_such_key=1"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("rlsp-plan: refused:\n")
    assert "no_such_key" in told
    assert "parallel.sp" in told
    assert main(["--ranks", "0"]) == 2
    assert capsys.readouterr().err == "rlsp-plan: --ranks=0: legal: an integer of at least 1\n"
    assert main(["--json", "/no/such/folder/plan.json"]) == 2


def test_a_plan_of_native_routes_says_what_it_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["numerics=native"]) == 0
    assert "Megatron-Core's own layers is not planned" in capsys.readouterr().out


def test_a_plan_needs_no_torch() -> None:
    code = (
        "import sys; from rlsp.cli.plan import main; status = main(['model=dense_70b', '--ranks', '8']);"
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)
