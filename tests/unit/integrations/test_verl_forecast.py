"""Steps of verl in the order of the epoch before are announced, and asked for with the announced seeds."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import pytest

from paceline.calls import GatewayCalls
from paceline.errors import PacelineError
from paceline.integrations.verl.requests import SampleQueue
from paceline.prompts import prompt_id_of
from paceline.transport.interface import Unary
from paceline.v1 import rollout_pb2
from tests.unit.integrations.test_verl_requests import BAD, SHORT, GatewayInMemory, Refusal, ask, until

EPOCH = [[[first], [first + 1], [first + 2]] for first in (10, 20, 30)]
SAMPLES = 2
FIRST = len(EPOCH) + 2
"""First step that is announced: the first of the second epoch is known again, the next one shows that it is."""
NEVER = 3600.0


class HintedGateway(GatewayInMemory):
    """Takes hints, unless it refuses them."""

    def __init__(self) -> None:
        super().__init__()
        self.hints: dict[int, rollout_pb2.HintNextBatchRequest] = {}
        self.refuses = False

    async def send(self, unary: Unary) -> Any:
        if unary.method != "HintNextBatch":
            return await super().send(unary)
        if self.refuses:
            raise Refusal
        request: Any = unary.request
        assert request.step not in self.hints
        self.hints[request.step] = request
        return rollout_pb2.HintNextBatchResponse(samples=1)

    def of_step(self, step: int) -> list[rollout_pb2.SubmitRolloutsRequest]:
        return [batch for batch in self.batches if batch.step == step]


def queue_of(gateway: HintedGateway, hold_seconds: float = NEVER) -> SampleQueue:
    queue = SampleQueue(GatewayCalls(gateway), "run", "42.0", hold_seconds)  # type: ignore[arg-type]
    queue.forecasts = True
    return queue


async def answered(gateway: HintedGateway, tasks: list[Any]) -> list[Any]:
    """End all samples until every call is answered."""

    def done() -> bool:
        gateway.end()
        return all(task.done() for task in tasks)

    await until(done)
    return list(await asyncio.gather(*tasks, return_exceptions=True))


async def train(gateway: HintedGateway, queue: SampleQueue, steps: range) -> None:
    """Ask for steps as verl's agent loops do: a call for each sample, all at once."""
    for queue.step in steps:
        found = await answered(gateway, ask(queue, *EPOCH[queue.step % len(EPOCH)] * SAMPLES))
        assert not any(isinstance(each, BaseException) for each in found)


async def test_announced_samples_are_those_that_are_asked_for() -> None:
    gateway = HintedGateway()
    last = 3 * len(EPOCH)
    await train(gateway, queue_of(gateway), range(last))
    assert list(gateway.hints) == list(range(FIRST, last + 1))
    for step in range(FIRST, last):
        hint, batches = gateway.hints[step], gateway.of_step(step)
        named = {(group.prompt_id, group.samples) for group in hint.groups}
        assert named == {(prompt_id_of(prompt), SAMPLES) for prompt in EPOCH[step % len(EPOCH)]}
        # Each once, with the seed that was announced.
        assert sorted((group.prompt_id, group.samples) for b in batches for group in b.groups) == sorted(
            named
        )
        assert {batch.run_seed for batch in batches} == {hint.run_seed}
        assert hint.sampling == batches[0].groups[0].sampling


async def test_no_sample_has_the_seed_of_another() -> None:
    gateway = HintedGateway()
    await train(gateway, queue_of(gateway), range(3 * len(EPOCH)))
    names = [
        (batch.run_seed, batch.step, group.prompt_id, slot)
        for batch in gateway.batches
        for group in batch.groups
        for slot in range(group.samples)
    ]
    assert len(names) == len(set(names)) == 3 * len(EPOCH) * 3 * SAMPLES


async def test_where_a_call_does_not_come_the_others_go_without_it() -> None:
    gateway = HintedGateway()
    queue = queue_of(gateway, hold_seconds=0.0)
    await train(gateway, queue, range(FIRST))
    queue.step, prompt = FIRST, EPOCH[FIRST % len(EPOCH)][0]
    for _ in range(2):
        await answered(gateway, ask(queue, prompt))
    first, second = gateway.of_step(FIRST)
    seed = gateway.hints[FIRST].run_seed
    # The announced seed once, and another for what comes late.
    assert first.run_seed == seed != second.run_seed


async def test_calls_that_wait_are_sent_away_with_all_others() -> None:
    gateway = HintedGateway()
    queue = queue_of(gateway)
    await train(gateway, queue, range(FIRST))
    queue.step = FIRST
    waiting = ask(queue, EPOCH[FIRST % len(EPOCH)][0])
    await until(lambda: queue._held)
    await queue.pause(rejects=True)
    assert await asyncio.gather(*waiting) == [None]
    assert not queue._held


async def test_what_was_announced_for_a_step_that_has_passed_gets_other_seeds() -> None:
    gateway = HintedGateway()
    queue = queue_of(gateway)
    await train(gateway, queue, range(FIRST))
    queue.step, prompt = FIRST, EPOCH[FIRST % len(EPOCH)][0]
    gateway.taken.clear()
    tasks = ask(queue, [7])
    await until(lambda: queue._submitting)
    tasks += ask(queue, *[prompt] * SAMPLES)
    await until(lambda: queue._whole)
    queue.step += 1
    gateway.taken.set()
    await answered(gateway, tasks)
    assert gateway.hints[FIRST].run_seed not in {batch.run_seed for batch in gateway.of_step(FIRST + 1)}
    assert sum(group.samples for batch in gateway.of_step(FIRST + 1) for group in batch.groups) == SAMPLES


async def test_of_announced_prompts_only_the_one_that_is_refused_fails() -> None:
    gateway = HintedGateway()
    queue = queue_of(gateway)
    await train(gateway, queue, range(FIRST))
    queue.step = FIRST
    prompts = EPOCH[FIRST % len(EPOCH)]
    queue._forecast.ask(FIRST, "", [1], SHORT)
    queue._forecast._left[prompt_id_of([BAD])] = 1
    found = await answered(gateway, ask(queue, [BAD], *prompts * SAMPLES))
    assert [isinstance(each, PacelineError) for each in found] == [True] + [False] * len(prompts) * SAMPLES


async def test_a_hint_that_is_refused_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    gateway = HintedGateway()
    gateway.refuses = True
    with caplog.at_level(logging.WARNING, "paceline"):
        await train(gateway, queue_of(gateway, hold_seconds=0.0), range(2 * len(EPOCH)))
    assert f"step {FIRST} of run run was not announced" in caplog.text
    assert grpc.StatusCode.INVALID_ARGUMENT.name in caplog.text or Refusal().details() in caplog.text


async def test_nothing_is_announced_unless_it_is_wanted() -> None:
    gateway = HintedGateway()
    queue = queue_of(gateway)
    queue.forecasts = False
    await train(gateway, queue, range(3 * len(EPOCH)))
    assert not gateway.hints
