"""Ask a task for rewards so that whatever goes wrong is an error that names the sample. No torch.

Built-in rewards are computed in place. Foreign code (a library's, or a user's own) runs in a process of its
own, which inherits nothing of a rank's connections and is killed when it takes too long.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, Final, Protocol, runtime_checkable

from rlsp.rl.apart import LineProcess, ProcessEndedError
from rlsp.rl.task import Task

_FLOAT32_MAX: Final = 3.4028234663852886e38
_SHOWN_CHARS: Final = 400


class RewardError(RuntimeError):
    """A response has no reward; the message names rollout, prompt and sample, the lines below say more."""


class NoRewardError(Exception):
    """What is wrong with one reward, in words that follow a place; `details` are further lines."""

    def __init__(self, what: str, details: Sequence[str] = ()) -> None:
        super().__init__(what)
        self.details = tuple(details)


@runtime_checkable
class Judge(Protocol):
    """Whoever computes rewards."""

    def reward(self, index: int, response: Sequence[int], within_s: float) -> float:
        """Score a response to the prompt of an index; raise NoRewardError for what is no finite number."""
        ...


class InPlace:
    """Compute rewards in this process: they are rlsp's own and end."""

    def __init__(self, task: Task) -> None:
        """Take the task."""
        self._task = task

    def reward(self, index: int, response: Sequence[int], within_s: float) -> float:
        """Score a response."""
        return finite_reward(self._task, index, response)


def finite_reward(task: Task, index: int, response: Sequence[int]) -> float:
    """Score a response and look at what came back.

    Raises:
        NoRewardError: The task raised, or returned what is no number that is finite in float32.
    """
    try:
        value: Any = task.reward(index, response)
    except Exception as error:
        raise NoRewardError(f"the reward function raised {type(error).__name__}: {error}") from error
    if not isinstance(value, Real):
        raise NoRewardError(
            f"the reward is no number but {type(value).__name__} {repr(value)[:_SHOWN_CHARS]}"
        )
    try:
        reward = float(value)
    except OverflowError:
        reward = math.inf
    if not abs(reward) <= _FLOAT32_MAX:  # as the evidence keeps it; false for NaN
        raise NoRewardError(f"the reward is {reward}: legal: a number that is finite in float32")
    return reward


def score(
    judge: Judge,
    responses: Sequence[Sequence[int]],
    *,
    rollout: int,
    first: int,
    samples: int,
    decode: Callable[[Sequence[int]], str],
    within_s: float,
) -> list[float]:
    """Score a rollout's responses.

    Args:
        judge: Computes each.
        responses: Drawn tokens, the samples of a prompt side by side.
        rollout: The rollout, for messages.
        first: Index of its first prompt.
        samples: Responses to each prompt.
        decode: Shows a response in a message.
        within_s: How long all of them may take: other ranks wait for them.

    Returns:
        One reward a response.

    Raises:
        RewardError: One cannot be had.
    """
    until_s = time.monotonic() + within_s
    rewards = []
    for place, response in enumerate(responses):
        prompt, sample = first + place // samples, place % samples
        try:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise NoRewardError(
                    f"{place} of {len(responses)} rewards took {within_s:g} s, and all ranks wait"
                )
            rewards.append(judge.reward(prompt, response, left_s))
        except NoRewardError as fault:
            shown = f"response: {decode(response)[:_SHOWN_CHARS]!r}"
            lines = [f"rollout {rollout}, prompt {prompt}, sample {sample}: {fault}", shown, *fault.details]
            raise RewardError("\n".join(lines)) from fault
    return rewards


class Apart:
    """Compute rewards in a process of its own, started at the first one."""

    def __init__(self, command: Sequence[str], opening: str, timeout_s: float) -> None:
        """Say how to start it.

        Args:
            command: Speaks `serve`'s protocol on its stdin and stdout; its stderr is this process's.
            opening: The line that it is told first.
            timeout_s: How long one reward may take, seconds.
        """
        self._command, self._opening, self._timeout_s = list(command), opening, timeout_s
        self._process: LineProcess | None = None

    def reward(self, index: int, response: Sequence[int], within_s: float) -> float:
        """Score a response; without an answer in time the process is killed."""
        until_s = time.monotonic() + within_s
        if self._process is None:
            self._process = LineProcess(self._command)
            self._answer(self._opening, within_s, "start")
        left_s = until_s - time.monotonic()
        request = json.dumps({"index": index, "response": list(response)})
        return float(self._answer(request, min(self._timeout_s, left_s), "answer")["reward"])

    def close(self) -> None:
        """End the process, whatever it does."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def _answer(self, request: str, within_s: float, what: str) -> dict[str, Any]:
        """Send a line and wait for one."""
        process = self._process
        assert process is not None
        process.send(request)
        try:
            line = process.receive(within_s)
        except ProcessEndedError as end:
            self._process = None
            raise NoRewardError(f"the process of the reward function {end}") from end
        if line is None:
            self._process = None
            process.kill(stack=True)
            raise NoRewardError(
                f"the reward function did not {what} within {max(within_s, 0):.3g} s and was killed"
            )
        answer: dict[str, Any] = json.loads(line)
        if "fault" in answer:
            raise NoRewardError(answer["fault"], answer["details"])
        return answer


def serve(task: Task, requests: Sequence[str] | Any, reply: Callable[[str], object]) -> None:
    """Answer requests for rewards, one JSON line each, until there is no more: the other end of `Apart`.

    Args:
        task: Whose rewards these are.
        requests: Lines.
        reply: Takes one line without its newline.
    """
    reply(json.dumps({"ready": task.name}))
    for line in requests:
        request = json.loads(line)
        try:
            answer: dict[str, Any] = {"reward": finite_reward(task, request["index"], request["response"])}
        except NoRewardError as fault:
            answer = faulty(fault)
        reply(json.dumps(answer))


def faulty(fault: NoRewardError) -> dict[str, Any]:
    """Write a fault as an answer, with the place in the code where it arose."""
    import traceback

    cause = fault.__cause__
    details = [] if cause is None else "".join(traceback.format_exception(cause)).splitlines()[-12:]
    return {"fault": str(fault), "details": details}
