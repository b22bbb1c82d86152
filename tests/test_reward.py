"""A reward that cannot be had is an error that names the sample, and leaves nothing behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
from command import Console
from launch_owner import RUN_ID, job_of_two_ranks, run
from task_entries import ACTS, BAD_FROM, Bad, BadPrompt

from rlsp.config import Config
from rlsp.report.verdict import verify
from rlsp.rl.reward import Apart, InPlace, RewardError, score
from rlsp.rl.task import CharacterTokenizer, Prompt, TaskError
from rlsp.rl.task.custom import CustomTask, make_custom
from rlsp.task import judge_of, open_task
from rlsp.worker import RUN_RANK, log_path

TOKENIZER = CharacterTokenizer()
HI = TOKENIZER.encode("hi")
Compose = Callable[..., Config]
DOCUMENT = Path(__file__).parents[1] / "docs" / "tasks.md"

# What a bad task does, and what is said of it, in place and apart.
RETURNED = [
    ("raises", "the reward function raised KeyError: 'no such label\\nand a second line'"),
    ("nan", "the reward is nan: legal: a number that is finite in float32"),
    ("infinite", "the reward is -inf: legal: a number that is finite in float32"),
    ("too_large", "the reward is 1e+39: legal: a number that is finite in float32"),
    ("huge", "the reward is inf: legal: a number that is finite in float32"),
    ("text", "the reward is no number but str '1.0'"),
    ("nothing", "the reward is no number but NoneType None"),
]


def scored(judge: Any, first: int = 0, count: int = 4, within_s: float = 30.0) -> list[float]:
    responses = [[*HI, 5 + place] for place in range(count)]
    return score(
        judge,
        responses,
        rollout=3,
        first=first,
        samples=2,
        decode=TOKENIZER.decode,
        within_s=within_s,
    )


def apart(compose: Compose, act: str, **changes: float) -> Apart:
    overrides = [f"{key.replace('__', '.')}={value}" for key, value in changes.items()]
    config = compose("task=custom", f"task.factory=task_entries:{act}", *overrides)
    judge = judge_of(config, open_task(config)[1])
    assert isinstance(judge, Apart)
    return judge


class TestInPlace:
    @pytest.mark.parametrize(("act", "said"), RETURNED)
    def test_a_bad_reward_names_rollout_prompt_and_sample(self, act: str, said: str) -> None:
        judge = InPlace(Bad(TOKENIZER, 0, ACTS[act]))
        assert scored(judge) == [float(sum([*HI, 5 + place]) % 7) for place in range(4)]
        with pytest.raises(RewardError) as error:
            scored(judge, first=BAD_FROM)
        first, second = str(error.value).splitlines()[:2]
        assert first == f"rollout 3, prompt 2, sample 0: {said}".splitlines()[0]
        assert second == "response: 'hi%'"

    def test_the_sample_is_counted_within_its_prompt(self) -> None:
        with pytest.raises(RewardError, match="rollout 3, prompt 2, sample 0"):
            scored(InPlace(Bad(TOKENIZER, 0, ACTS["nan"])), first=BAD_FROM - 1)

    @pytest.mark.parametrize("value", [1, True, np.float32(0.5), np.int64(3), -0.0])
    def test_whatever_is_a_number_is_a_reward(self, value: Any) -> None:
        rewards = scored(InPlace(Bad(TOKENIZER, 0, lambda: value)), first=BAD_FROM)
        assert rewards == [float(value)] * 4
        assert {type(reward) for reward in rewards} == {float}


class TestApart:
    @pytest.fixture
    def judge(self, compose: Compose, request: pytest.FixtureRequest) -> Iterator[Apart]:
        with closing(apart(compose, *getattr(request, "param", ("good",)))) as opened:
            yield opened

    def test_nothing_is_started_before_the_first_reward_and_no_tensor_task_needs_it(
        self, compose: Compose, judge: Apart
    ) -> None:
        assert judge._process is None
        config = compose()
        assert isinstance(judge_of(config, open_task(config)[1]), InPlace)

    def test_it_gives_the_rewards_that_the_task_gives_in_place(self, judge: Apart) -> None:
        assert scored(judge) == scored(InPlace(Bad(TOKENIZER, 0, ACTS["good"])))
        assert scored(judge, first=BAD_FROM) == [1.0] * 4

    @pytest.mark.parametrize(("act", "said"), RETURNED[:3])
    def test_a_bad_reward_is_told_as_in_place(self, compose: Compose, act: str, said: str) -> None:
        with closing(apart(compose, act)) as judge, pytest.raises(RewardError) as error:
            scored(judge, first=BAD_FROM)
        assert str(error.value).startswith(f"rollout 3, prompt 2, sample 0: {said}\nresponse: 'hi%'")
        assert ("task_entries.py" in str(error.value)) is (act == "raises"), "its place in the user's code"

    def test_one_that_hangs_is_killed_with_all_that_it_started(
        self, compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        started_s = time.monotonic()
        with closing(apart(compose, "hangs_with_a_child", task__timeout_s=1.0)) as judge:
            with pytest.raises(RewardError, match="prompt 2, sample 0: the reward function did not answer"):
                scored(judge, first=BAD_FROM)
            assert judge._process is None
        assert time.monotonic() - started_s < 15.0
        (child,) = (int(path.name.removeprefix("child-")) for path in tmp_path.glob("child-*"))
        until_s = time.monotonic() + 5.0
        while _lives(child) and time.monotonic() < until_s:
            time.sleep(0.02)
        assert not _lives(child)

    @pytest.mark.parametrize(
        ("act", "said"),
        [("crashes", "was killed by SIGSEGV"), ("exits", "exited with status 7")],
    )
    def test_one_that_ends_its_process_is_told_how(self, compose: Compose, act: str, said: str) -> None:
        with (
            closing(apart(compose, act)) as judge,
            pytest.raises(RewardError, match=f"the process of the reward function {said}"),
        ):
            scored(judge, first=BAD_FROM)

    @pytest.mark.parametrize("judge", [("chats",)], indirect=True)
    def test_what_it_prints_is_never_taken_for_a_reward(self, judge: Apart) -> None:
        assert scored(judge, first=BAD_FROM) == [0.5] * 4

    @pytest.mark.parametrize("judge", [("is_slow",)], indirect=True)
    def test_all_together_take_no_longer_than_ranks_wait(self, judge: Apart) -> None:
        scored(judge)
        with pytest.raises(RewardError, match=r"rollout 3, prompt 2, sample 1"):
            scored(judge, first=BAD_FROM, within_s=0.6)

    def test_a_task_that_cannot_be_built_there_is_told(self, compose: Compose) -> None:
        good = apart(compose, "good")
        opening = good._opening.replace("task_entries:good", "task_entries:absent")
        with closing(Apart(good._command, opening, 5.0)) as judge, pytest.raises(RewardError) as error:
            scored(judge)
        assert "cannot build the task: TaskError: task_entries:absent: AttributeError" in str(error.value)

    def test_a_response_of_any_length_gets_through(self, judge: Apart) -> None:
        long = [7] * 200_000
        assert judge.reward(0, long, 30.0) == float(sum(long) % 7)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class TestCustom:
    def test_a_factory_makes_the_task_of_a_config(self, compose: Compose) -> None:
        config = compose("task=custom", "task.factory=task_entries:shout", "task.response_limit=3")
        tokenizer, task = open_task(config)
        assert task.name == "shout"
        assert {task.prompt(index).text for index in range(20)} == {"stop", "go"}
        assert task.reward(0, tokenizer.encode(task.prompt(0).text.upper())) == 1.0

    def test_the_example_of_the_documentation_is_a_task(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _, _, rest = DOCUMENT.read_text().partition("A module `shout`")
        code = rest[rest.index("    from dataclasses") : rest.index("    PYTHONPATH=.")]
        (tmp_path / "shout.py").write_text(dedent(code))
        monkeypatch.syspath_prepend(str(tmp_path))
        task = make_custom("shout:make", tokenizer=TOKENIZER, seed=1)
        assert {task.prompt(index).text for index in range(30)} == {"stop", "go", "wait"}
        right = TOKENIZER.encode(task.prompt(0).text.upper())
        assert task.reward(0, (*right, TOKENIZER.eos_id, *HI)) == 1.0
        assert 0.0 < task.reward(0, right[:1]) < 1.0
        assert task.reward(0, ()) == 0.0

    def test_its_hash_holds_the_tasks_own_and_the_file_it_is_in(self, tmp_path: Path) -> None:
        made = make_custom("task_entries:shout", tokenizer=TOKENIZER, seed=1)
        assert made.source_hash
        assert (
            made.content_hash != make_custom("task_entries:shout", tokenizer=TOKENIZER, seed=2).content_hash
        )
        edited = CustomTask(made.task, made.factory, "0" * 64, TOKENIZER)
        assert edited.content_hash != made.content_hash

    @pytest.mark.parametrize(
        ("factory", "said"),
        [
            ("no_such_module:make", "no_such_module:make: ModuleNotFoundError: No module named"),
            ("task_entries:absent", "task_entries:absent: AttributeError: module 'task_entries' has no"),
            ("task_entries:BAD_FROM", "task_entries:BAD_FROM: TypeError: 'int' object is not callable"),
            ("task_entries:fails", "task_entries:fails: OSError: no licence"),
            ("task_entries:makes_no_task", "made int, which has no name, content_hash, prompt, reward"),
            ("task_entries:has_a_bad_hash", "its content_hash must be 64 hex characters"),
        ],
    )
    def test_a_factory_that_makes_no_task_is_named(self, factory: str, said: str) -> None:
        with pytest.raises(TaskError) as refusal:
            make_custom(factory, tokenizer=TOKENIZER, seed=1)
        assert str(refusal.value).startswith(f"{factory}: ")
        assert said in str(refusal.value)

    @pytest.mark.parametrize(
        ("made", "said"),
        [
            (lambda: "hi", "prompt 5: is str, no rlsp.rl.task.Prompt"),
            (lambda: Prompt((), ""), "prompt 5: its tokens must be a tuple of at least one integer in 0..96"),
            (lambda: Prompt((3, 97), "x"), "prompt 5: its tokens must be"),
            (lambda: 1 / 0, "prompt 5: raised ZeroDivisionError: division by zero"),
        ],
    )
    def test_a_prompt_that_is_none_is_named(self, made: Callable[[], Any], said: str) -> None:
        task = CustomTask(BadPrompt(TOKENIZER, 0, made), "mine:make", "", TOKENIZER)
        with pytest.raises(TaskError) as refusal:
            task.prompt(5)
        assert str(refusal.value).startswith(f"mine:make: {said}")

    def test_a_module_that_is_not_there_refuses_the_run(self, rlsp_command: Console) -> None:
        assert rlsp_command("task=custom", "task.factory=no_such_module.x:make") == 2
        assert rlsp_command.errors.splitlines()[1:] == [
            "  task.factory=no_such_module.x:make: legal: a function that can be imported: "
            "there is no module no_such_module (PYTHONPATH may name its folder)"
        ]
        assert rlsp_command.left() == []
        assert rlsp_command("task=custom", "task.factory=task_entries:shout") == 0


@pytest.mark.parametrize(
    ("act", "said"),
    [
        ("hangs", "the reward function did not answer within 1 s and was killed"),
        ("raises", "the reward function raised KeyError: 'no such label\\nand a second line'"),
    ],
)
def test_a_run_ends_with_the_samples_name_and_keeps_what_it_had(
    compose: Compose, tmp_path: Path, act: str, said: str
) -> None:
    sizes = ("num_rollouts=3", "prompts_per_rollout=2", "samples_per_prompt=2", "max_response_tokens=8")
    chosen = ("task=custom", f"task.factory=task_entries:{act}", "task.timeout_s=1.0")
    job = job_of_two_ranks(compose, tmp_path / RUN_ID, *sizes, *chosen)
    ended = run(job, RUN_RANK)
    assert ended.status == 1
    assert ended.verdict["verdict"] == "ABORTED"
    place = "rank 0 failed: RewardError: rollout 1, prompt 2, sample 0: "
    assert ended.reason.startswith(place + said)
    assert "(at: rollout 1: scoring; " in ended.reason
    assert "response: '" in ended.output
    assert verify(job.run_dir).damage == ()
    assert len(list(Path(job.run_dir).glob("rollouts/*.safetensors"))) == 1
    log = log_path(job.run_dir, 0).read_text()
    assert f"in _{act.removesuffix('s')}" in log, "where it was, in the user's own code"
