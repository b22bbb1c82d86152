"""The supervised warm-up: by training's own path, the same bits in every layout, and evidence of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_helpers import BF16, OBJECTIVE, TINY, mesh_of, products, ragged, trainer
from ranks import run_ranks
from torch import Tensor

from rlsp import rederive, run
from rlsp.board import Board, Place
from rlsp.config import Config, Job, violations
from rlsp.layout import Layout
from rlsp.model import linear
from rlsp.model.weights import weights_digest
from rlsp.report import manifest, verdict
from rlsp.report.compare import compare
from rlsp.report.diagnose_records import Answer, Request, answer_path, request_path
from rlsp.report.findings import Verdict
from rlsp.report.records import ConsistencyReport
from rlsp.report.warmup import WARMUP_NAME, Warmup
from rlsp.rl.task import CharacterTokenizer, LimitedTask, Prompt, TaskError, Tokenizer, build_task
from rlsp.run import sequences_of
from rlsp.task import open_task, solved, task_of
from rlsp.warmup import solutions

RATE = 1e-2
LENGTHS, RESPONSES = (34, 70, 31, 5, 6), (30, 60, 20, 1, 2)
CASES = {
    2: [(Layout(1, 1, 2, 2), 5), (Layout(1, 2, 1, 1), 2), (Layout(2, 1, 1, 1), 1)],
    4: [(Layout(1, 2, 2, 2), 3), (Layout(1, 1, 4, 1), 5), (Layout(2, 1, 2, 2), 2)],
}
STARTED = "2026-01-01T00:00:00+00:00"
SMALL = (
    "num_rollouts=1",
    "prompts_per_rollout=2",
    "samples_per_prompt=2",
    "max_response_tokens=6",
    "kl_coef=0.1",
    "warmup.steps=3",
    "warmup.sequences=5",
    "tracker=none",
)


@dataclass(frozen=True)
class Left:
    """What two supervised steps leave, in plain values."""

    losses: tuple[str, ...]
    norms: tuple[str, ...]
    weights: str


def taught(layout: Layout, rank: int, size: int) -> Left:
    of = trainer(
        mesh_of(layout, rank), layout, objective=replace(OBJECTIVE, micro_batch_size=size), shape=BF16
    )
    steps = [of.imitate(ragged(LENGTHS, RESPONSES), RATE) for _ in range(2)]
    return Left(
        tuple(loss.hex() for loss, _ in steps),
        tuple(norm.hex() for _, norm in steps),
        weights_digest(of.model),
    )


def every_case(rank: int, world: int) -> list[Left]:
    return [taught(layout, rank, size) for layout, size in CASES[world]]


def left_to_right(x: Tensor) -> Tensor:
    total = x[0]
    for part in x[1:]:
        total = total + part
    return total


def taught_naively(rank: int, world: int) -> Left:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "tree_sum", left_to_right)
        return taught(Layout(1, 1, 2, 1), rank, 5)


@pytest.mark.parametrize("world", CASES)
def test_supervised_steps_leave_the_same_bits_in_every_layout(world: int) -> None:
    products()
    alone = taught(Layout(1, 1, 1, 1), 0, 5)
    for found in run_ranks(world, every_case, timeout_s=300.0):
        assert found == [alone] * len(CASES[world])


def test_a_sum_in_another_order_leaves_others() -> None:
    products()
    alone = taught(Layout(1, 1, 1, 1), 0, 5)
    for found in run_ranks(2, taught_naively, timeout_s=300.0):
        assert found.norms != alone.norms


def test_a_supervised_step_is_the_policy_gradient_of_advantage_one_at_ratio_one() -> None:
    layout, batch = Layout(1, 1, 1, 1), ragged(LENGTHS, RESPONSES)
    plain = replace(OBJECTIVE, kl_coef=0.0, entropy_coef=0.0, learning_rate=RATE)
    a, b = (trainer(mesh_of(layout), layout, objective=plain, shape=TINY) for _ in range(2))
    loss, norm = a.imitate(batch, RATE)
    own = b.score(batch)
    step = b.update(batch, torch.ones(len(LENGTHS)), own)
    assert norm.hex() == step.gradient_norm.hex()
    assert weights_digest(a.model) == weights_digest(b.model)
    assert loss == pytest.approx(-float(own[batch.active_mask].double().mean()), rel=1e-6)


def test_after_a_restart_only_the_weights_are_left_and_the_reference_has_them() -> None:
    layout = Layout(1, 1, 1, 1)
    of = trainer(mesh_of(layout), layout, objective=replace(OBJECTIVE, kl_coef=0.1), shape=BF16)
    assert of.reference is not None
    initial = weights_digest(of.model)
    of.imitate(ragged(LENGTHS, RESPONSES), RATE)
    assert (of.optimizer.steps, weights_digest(of.reference)) == (1, initial)
    of.restart()
    assert weights_digest(of.model) == weights_digest(of.reference) != initial
    assert of.optimizer.steps == 0
    assert not any(
        bool(moment.any()) for moment in (*of.optimizer.first.values(), *of.optimizer.second.values())
    )
    for name, weight, _ in of.model.named_shards():
        assert torch.equal(of.optimizer.masters[name], weight.float())


# Prompts and solutions --------------------------------------------------------


def test_rollouts_ask_the_prompts_behind_those_of_the_warm_up(compose: Callable[..., Config]) -> None:
    tokenizer = CharacterTokenizer()
    warm, cold = compose(*SMALL), compose(*SMALL, "warmup.steps=0")
    task = task_of(warm, tokenizer)
    assert [s.tokens for s in sequences_of(cold, task, 0)][::2] == [task.prompt(i).tokens for i in (0, 1)]
    assert [s.tokens for s in sequences_of(warm, task, 1)][::2] == [task.prompt(i).tokens for i in (17, 18)]


def test_a_batch_counts_the_solution_and_its_end(compose: Callable[..., Config]) -> None:
    tokenizer, config = CharacterTokenizer(), compose(*SMALL, "task.response_limit=3")
    task = task_of(config, tokenizer)
    batch = solutions(config, task, tokenizer, 2)
    for row, index in enumerate(range(10, 15)):
        length = int(batch.lengths[row])
        prompt, answer = task.prompt(index), solved(task).solution(index)
        assert tuple(batch.tokens[row, :length].tolist()) == (
            *prompt.tokens,
            *tokenizer.encode(answer),
            tokenizer.eos_id,
        )
        assert task.reward(index, batch.responses()[row]) == 1.0
    assert batch.truncated(tokenizer.eos_ids) == 0


@dataclass(frozen=True)
class Unsolved:
    """A task that knows no solutions."""

    tokenizer: Tokenizer
    seed: int
    name: str = "unsolved"
    content_hash: str = "0" * 64

    def prompt(self, index: int) -> Prompt:
        return Prompt(tokens=(1,), text='"')

    def reward(self, index: int, response: Any) -> float:
        return 0.0


def test_a_warm_up_without_solutions_is_refused(compose: Callable[..., Config]) -> None:
    config = compose(*SMALL)
    constant = replace(config, task=compose("task=constant").task)
    assert [str(found) for found in violations(constant)] == [
        "warmup.steps=3: legal: 0 (task.kind=constant has no solutions)"
    ]
    chosen = ("task=custom", "task.factory=test_warmup:Unsolved")
    with pytest.raises(TaskError, match=r"unsolved has no solution\(index\).*warmup.steps=0 does without"):
        open_task(compose(*SMALL, *chosen))
    open_task(compose(*SMALL, *chosen, "warmup.steps=0"))
    wide = compose(*SMALL, "prompts_per_rollout=8")
    wide = replace(wide, parallel=replace(wide.parallel, dp=8))
    assert [str(found) for found in violations(wide)] == ["warmup.sequences=5: legal: at least parallel.dp=8"]


def test_a_solution_longer_than_a_response_names_its_prompt(compose: Callable[..., Config]) -> None:
    config = compose(*SMALL, "max_response_tokens=2", "task.max_operand=900")
    task = LimitedTask(
        build_task("arithmetic", tokenizer=CharacterTokenizer(), seed=0, max_operand=900, reward=0.0), 0, 5
    )
    with pytest.raises(
        TaskError, match=r"the solution of prompt 0 has .* max_response_tokens=2 allows no more"
    ):
        solutions(config, task, CharacterTokenizer(), 0)


# A run and its evidence -------------------------------------------------------


def place_of(rank: int, world_size: int, folder: str) -> Place:
    board = Board.join(Path(folder) / "logs" / "board", world_size).writer(rank)
    return Place(rank=rank, world_size=world_size, local_rank=rank, init_method="", board=board)


def live_then_ask(rank: int, world_size: int, job: Job, scratch: str) -> None:
    """Live a run; then replay sample 0 from the seed on."""
    run.live(job, place_of(rank, world_size, job.run_dir))
    asked = replace(job, run_dir=scratch)
    rederive.live(asked, place_of(rank, world_size, job.run_dir))


def ran(folder: Path, config: Config) -> Path:
    """Run, replay, seal."""
    scratch = folder / "scratch"
    (folder / "run" / "logs").mkdir(parents=True)
    scratch.mkdir()
    job = Job(config, "20260101-000000-abcdef", str(folder / "run"), (), ("rlsp",), STARTED)
    Board.create(folder / "run" / "logs" / "board", config.world_size)
    manifest.begin(job, {})
    Request(run_dir=job.run_dir, rollout=0, sample=0, notes=()).write(request_path(scratch))
    run_ranks(config.world_size, live_then_ask, job, str(scratch), timeout_s=300)
    manifest.finish(job.run_dir, STARTED, manifest.Status.FINISHED)
    assert verdict.seal(job.run_dir).verdict is Verdict.PASS
    return folder / "run"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, compose: Callable[..., Config]) -> list[Path]:
    """Return one experiment with a warm-up at 1 and at 2 ranks."""
    return [
        ran(tmp_path_factory.mktemp(layout), compose(*SMALL, f"parallel={layout}", "micro_batch_size=3"))
        for layout in ("cp1_tp1_sp1", "cp1_tp2_sp2")
    ]


def test_the_first_rollout_draws_with_the_weights_that_the_warm_up_left(runs: list[Path]) -> None:
    for folder in runs:
        warmup = Warmup.read(folder / WARMUP_NAME)
        record = ConsistencyReport.read(folder / "consistency.json").rollouts[0]
        startup = manifest.Manifest.read(folder / "manifest.json").startup
        assert startup is not None
        assert len(warmup.steps) == 3
        assert warmup.steps[-1].loss < warmup.steps[0].loss
        assert warmup.initial_weights_digest == startup.initial_weights_digest != warmup.weights_digest
        assert record.trainer_weights_digest == warmup.weights_digest
        assert record.weight_version_train == 0


def test_a_replay_takes_the_warm_up_again(runs: list[Path]) -> None:
    for folder in runs:
        answer = Answer.read(answer_path(folder.parent / "scratch"))
        assert answer.refusal is None
        assert answer.diagnosis is not None
        assert answer.diagnosis.outcome.value == "equal"


def test_runs_are_compared_through_the_warm_up(runs: list[Path], tmp_path: Path) -> None:
    found = compare(*runs)
    assert found.outcome.value == "equal", found
    stage = next(stage for stage in found.stages if stage.stage.value == "warm-up")
    assert (stage.compared, stage.differing) == (7, 0)
    other = Path(shutil.copytree(runs[1], tmp_path / "other"))
    edit(other, lambda data: data["steps"][1].update(loss=0.5, loss_bits="3fe0000000000000"))
    verdict.seal(other)
    first = compare(runs[0], other).first
    assert first is not None
    assert (first.stage.value, first.explanation) == ("warm-up", "the loss of step 1 of the warm-up")


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / WARMUP_NAME
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("change", "gates", "said"),
    [
        (
            lambda data: data.update(weights_digest="a" * 64),
            {"version"},
            f"but the warm-up ended with {'a' * 64}",
        ),
        (
            lambda data: data.update(initial_weights_digest="b" * 64),
            {"evidence"},
            f"initial_weights_digest is {'b' * 64}, but the manifest says",
        ),
        (lambda data: data["steps"].pop(), {"evidence"}, "has 2 steps, but the config says 3"),
        (lambda data: data["steps"][0].update(loss=1.0), {"evidence"}, "loss_bits is not the bit pattern"),
    ],
    ids=["weights", "initial", "steps", "bits"],
)
def test_an_edited_warm_up_is_found(
    runs: list[Path], tmp_path: Path, change: Callable[[dict[str, Any]], object], gates: set[str], said: str
) -> None:
    folder = Path(shutil.copytree(runs[0], tmp_path / "run"))
    edit(folder, change)
    judgement = verdict.seal(folder)
    assert {gate.name for gate in judgement.gates if gate.verdict is Verdict.FAIL} == gates
    assert any(said in reason for reason in judgement.reasons), judgement.reasons


def test_a_warm_up_that_was_promised_and_is_not_there_is_missed(runs: list[Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(runs[0], tmp_path / "run"))
    (folder / WARMUP_NAME).unlink()
    judgement = verdict.seal(folder)
    assert judgement.verdict is Verdict.FAIL
    assert any("the config asks for 3 steps before the first rollout" in why for why in judgement.reasons)
