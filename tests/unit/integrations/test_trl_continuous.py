"""Groups that are generated without an end: what runs at once, in which batches, and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import grpc
import pytest

from paceline import Sample, SamplingParams
from paceline.errors import FailedPreconditionError, PacelineError, ResourceExhaustedError
from paceline.integrations.trl.async_grpo import ContinuousGroups, GroupRequest, Prompt
from tests.support.open_batches import WAIT, RunInMemory

NAN = float("nan")


class Taken:
    """Takes as many groups as it may, and remembers them."""

    def __init__(self, allowed: int) -> None:
        self._allowed = threading.Semaphore(allowed)
        self._news = threading.Condition()
        self.groups: list[tuple[int, list[int]]] = []

    def __call__(self, prompt: Prompt, samples: list[Sample]) -> list[float]:
        while not self._allowed.acquire(timeout=0.05):
            if self.over():
                return [NAN] * len(samples)
        with self._news:
            self.groups.append((prompt.number, [each.slot for each in samples]))
            self._news.notify_all()
        return [1.0, NAN]

    def over(self) -> bool:
        return False

    def until(self, holds: Callable[[], bool]) -> None:
        with self._news:
            assert self._news.wait_for(holds, WAIT)

    def wait(self, groups: int) -> None:
        self.until(lambda: len(self.groups) >= groups)

    def numbers(self) -> set[int]:
        return {number for number, _ in self.groups}

    def allow(self, groups: int) -> None:
        self._allowed.release(groups)


def prompts(*tokens: list[int]) -> Iterator[Prompt]:
    for number in count():
        yield Prompt(number, tokens[number % len(tokens)], {})


def generated(
    run: RunInMemory, taken: Callable[..., Any], *tokens: list[int], most: int = 3
) -> ContinuousGroups:
    request = GroupRequest(SamplingParams(max_tokens=8), 2, most, max_staleness=4)
    groups = ContinuousGroups(run, prompts(*tokens), request, taken)  # type: ignore[arg-type]
    if isinstance(taken, Taken):
        taken.over = groups.stopped.is_set  # type: ignore[method-assign]
    return groups


def test_a_group_is_added_for_each_that_is_taken_and_no_more() -> None:
    run, taken = RunInMemory(), Taken(2)
    groups = generated(run, taken, *([n] for n in range(100)))
    groups.start()
    taken.wait(2)
    assert taken.groups == [(0, [0, 1]), (1, [0, 1])]
    taken.allow(3)
    taken.wait(5)
    assert groups.stop(WAIT)
    added = [number for _, tokens in run.steps() for (number,) in tokens]
    assert added == list(range(len(added)))
    assert 5 <= len(added) <= 5 + 3, "what was taken, and at most three that run"
    assert run.cancelled == [0]
    assert run.options["max_staleness"] == 4
    assert run.batches[0].acked > 0


def test_a_prompt_that_comes_again_has_another_step() -> None:
    run, taken = RunInMemory(), Taken(1_000_000)
    groups = generated(run, taken, [1], [2], [1])
    groups.start()
    taken.until(lambda: set(range(6)) <= taken.numbers())
    assert groups.stop(WAIT)
    assert run.steps()[:3] == [(0, [[1], [2]]), (1, [[1]]), (2, [[1], [2]])]
    assert {0, 1, 2} <= set(run.closed)
    rewarded = [(each.slot, each.reward) for each in run.batches[0].rewards]
    assert rewarded == [(0, 1.0), (0, 1.0)], "one of each group; the other has no reward"


@pytest.mark.parametrize(
    "refusal",
    [
        FailedPreconditionError(grpc.StatusCode.FAILED_PRECONDITION, "the batch is closed"),
        ResourceExhaustedError(grpc.StatusCode.RESOURCE_EXHAUSTED, "close it and open another"),
    ],
)
def test_where_a_batch_is_closed_or_full_groups_go_to_another(refusal: PacelineError) -> None:
    run, taken = RunInMemory(), Taken(1)
    groups = generated(run, taken, *([n] for n in range(9)), most=1)
    groups.start()
    taken.wait(1)
    run.refuses.append(refusal)
    taken.allow(3)
    taken.wait(4)
    assert 0 in run.closed, "else the batch and its reader would stay until the end"
    assert groups.stop(WAIT)
    assert [step for step, _ in run.steps()] == [0, 1]
    assert [number for number, _ in taken.groups] == [0, 1, 2, 3]


def test_a_refusal_of_everything_ends_it() -> None:
    run = RunInMemory()
    refusal = FailedPreconditionError(grpc.StatusCode.FAILED_PRECONDITION, "no")
    run.refuses += [refusal, refusal]
    groups = generated(run, Taken(1), [1])
    groups.start()
    assert groups.stopped.wait(WAIT)
    assert groups.stop(WAIT)
    assert groups.error is refusal


def test_an_error_of_the_one_that_takes_ends_what_runs() -> None:
    def failing(prompt: Prompt, samples: object) -> list[float]:
        raise ValueError("a reward function")

    run = RunInMemory()
    groups = generated(run, failing, [1], [2])
    groups.start()
    assert groups.stopped.wait(WAIT)
    assert groups.stop(WAIT)
    assert isinstance(groups.error, ValueError)
