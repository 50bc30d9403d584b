"""Single requests of verl become batches, and wait or end in a pause."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from paceline import Sample, SamplingParams
from paceline.calls import GatewayCalls
from paceline.errors import InvalidArgumentError
from paceline.integrations.verl.requests import SampleQueue
from paceline.transport.interface import Ended, Stream, Unary
from paceline.v1 import rollout_pb2, sample_pb2, weight_pb2
from tests.support.token_columns import columns

A, B, C = [1, 2], [3], [4, 5, 6]
SHORT, LONGER = SamplingParams(max_tokens=8), SamplingParams(max_tokens=9)
BAD = 99


class Refusal(grpc.RpcError):
    """A refusal of the gateway."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.INVALID_ARGUMENT

    def details(self) -> str:
        return "a token is not in the vocabulary"

    def trailing_metadata(self) -> tuple[()]:
        return ()


class GatewayInMemory:
    """Transport to a gateway that refuses the token BAD, and BAD as `max_tokens`.

    Batches end when `end` is called, or are cancelled.
    """

    def __init__(self) -> None:
        self.batches: list[rollout_pb2.SubmitRolloutsRequest] = []
        self.refused = 0
        self.taken = asyncio.Event()
        """Cleared: submissions wait."""
        self.taken.set()
        self._ended: dict[str, asyncio.Future[Any]] = {}

    async def send(self, unary: Unary) -> Any:
        request: Any = unary.request
        if unary.method == "GetVersions":
            return weight_pb2.GetVersionsResponse(policy_version=3)
        if unary.method == "CancelRollouts":
            assert request.keep_partial
            self._end(request.batch_id, sample_pb2.SAMPLE_STATUS_ABORTED)
            return rollout_pb2.CancelRolloutsResponse(cancelled=1)
        assert unary.method == "SubmitRollouts"
        await self.taken.wait()
        if any(BAD in (*group.prompt_token_ids, group.sampling.max_tokens) for group in request.groups):
            self.refused += 1
            raise Refusal
        self.batches.append(request)
        self._ended[request.batch_id] = asyncio.get_running_loop().create_future()
        total = sum(group.samples for group in request.groups)
        return rollout_pb2.SubmitRolloutsResponse(batch_id=request.batch_id, samples=total)

    def end(self) -> None:
        """Let all samples come to their ends."""
        for batch_id in self._ended:
            self._end(batch_id, sample_pb2.SAMPLE_STATUS_COMPLETED)

    def _end(self, batch_id: str, status: Any) -> None:
        if not self._ended[batch_id].done():
            self._ended[batch_id].set_result(status)

    def open(self, stream: Stream[Any], seconds: float | None) -> Any:
        request: Any = stream.request()
        return Attempt(self._answers(request.batch_id))

    async def _answers(self, batch_id: str) -> AsyncIterator[Any]:
        batch = next(each for each in self.batches if each.batch_id == batch_id)
        status = await self._ended[batch_id]
        keys = [(group.prompt_id, slot) for group in batch.groups for slot in range(group.samples)]
        for cursor, (prompt_id, slot) in enumerate(keys, 1):
            sample = sample_pb2.Sample(
                prompt_id=prompt_id, slot=slot, tokens=columns([7, slot], []), status=status
            )
            yield rollout_pb2.StreamRolloutsResponse(
                cursor=cursor, sample=sample, finished=cursor, total=len(keys)
            )

    def post(self, unary: Unary, ended: Ended) -> None:
        ended(grpc.StatusCode.OK)


class Attempt:
    """An attempt at a stream."""

    def __init__(self, answers: AsyncIterator[Any]) -> None:
        self._answers = answers

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._answers

    async def end(self) -> None:
        """Nothing is held."""


@pytest.fixture
async def gateway() -> GatewayInMemory:
    return GatewayInMemory()


@pytest.fixture
def queue(gateway: GatewayInMemory) -> SampleQueue:
    return SampleQueue(GatewayCalls(gateway), "run", "42.0")  # type: ignore[arg-type]


def ask(queue: SampleQueue, *prompts: list[int], sampling: SamplingParams = SHORT) -> list[Any]:
    return [asyncio.create_task(queue.sample(prompt, sampling)) for prompt in prompts]


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - it is a matter of turns of the loop
            await asyncio.sleep(0)


def groups(batch: rollout_pb2.SubmitRolloutsRequest) -> list[tuple[list[int], int]]:
    return [(list(group.prompt_token_ids), group.samples) for group in batch.groups]


async def test_requests_at_once_are_few_batches_and_equal_prompts_groups(
    queue: SampleQueue, gateway: GatewayInMemory
) -> None:
    gateway.taken.clear()
    first = ask(queue, A, A, B)
    await until(lambda: queue._submitting)
    await asyncio.sleep(0)
    second = ask(queue, A, C)
    gateway.taken.set()
    await until(lambda: len(gateway.batches) == 2)
    gateway.end()
    samples: list[Sample] = await asyncio.gather(*first, *second)
    assert [groups(batch) for batch in gateway.batches] == [[(A, 2), (B, 1)], [(A, 1), (C, 1)]]
    assert [sample.slot for sample in samples] == [0, 1, 0, 0, 0]
    assert (
        len({batch.run_seed for batch in gateway.batches}) == len({b.batch_id for b in gateway.batches}) == 2
    )
    assert {batch.policy_version for batch in gateway.batches} == {3}


async def test_a_prompt_with_other_parameters_goes_with_the_next_batch(
    queue: SampleQueue, gateway: GatewayInMemory
) -> None:
    tasks = [*ask(queue, A, B), *ask(queue, A, sampling=LONGER)]
    await until(lambda: len(gateway.batches) == 2)
    gateway.end()
    await asyncio.gather(*tasks)
    assert [groups(batch) for batch in gateway.batches] == [[(A, 1), (B, 1)], [(A, 1)]]
    assert gateway.batches[1].groups[0].sampling.max_tokens == 9


async def test_only_the_request_that_is_wrong_is_refused(
    queue: SampleQueue, gateway: GatewayInMemory
) -> None:
    tasks = ask(queue, A, B, [BAD], C)
    await until(lambda: sum(len(batch.groups) for batch in gateway.batches) == 3)
    gateway.end()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(each, InvalidArgumentError) for each in found] == [False, False, True, False]
    assert gateway.refused == 3


@pytest.mark.parametrize("bad_first", [True, False])
async def test_other_parameters_for_the_prompt_of_a_wrong_request_are_served(
    bad_first: bool, queue: SampleQueue, gateway: GatewayInMemory
) -> None:
    wrong, right = SamplingParams(max_tokens=BAD), SHORT
    tasks = {
        sampling: ask(queue, A, A, sampling=sampling)
        for sampling in ((wrong, right) if bad_first else (right, wrong))
    }
    await until(lambda: gateway.refused and gateway.batches)
    gateway.end()
    refused = await asyncio.gather(*tasks[wrong], return_exceptions=True)
    assert [type(each) for each in refused] == [InvalidArgumentError] * 2
    assert [sample.slot for sample in await asyncio.gather(*tasks[right])] == [0, 1]
    assert [groups(batch) for batch in gateway.batches] == [[(A, 2)]]


async def test_a_pause_ends_what_runs_and_lets_the_rest_wait(
    queue: SampleQueue, gateway: GatewayInMemory
) -> None:
    gateway.taken.clear()
    running = ask(queue, A)
    await until(lambda: queue._submitting)
    pausing = asyncio.create_task(queue.pause())
    await asyncio.sleep(0)
    gateway.taken.set()
    # It comes while a batch is on its way, which is ended as well.
    assert await pausing == 1
    sample = await running[0]
    assert (str(sample.status), list(sample.token_ids)) == ("aborted", [7, 0])
    later = ask(queue, B)
    await asyncio.sleep(0)
    assert len(gateway.batches) == 1
    queue.resume()
    await until(lambda: len(gateway.batches) == 2)
    gateway.end()
    assert (await later[0]).slot == 0


async def test_a_pause_without_an_end_in_sight_sends_requests_away(
    queue: SampleQueue, gateway: GatewayInMemory
) -> None:
    await queue.pause()
    waiting = ask(queue, A)
    await asyncio.sleep(0)
    await queue.pause(rejects=True)
    assert [await waiting[0], await queue.sample(B, SHORT)] == [None, None]
    queue.resume()
    later = ask(queue, C)
    await until(lambda: gateway.batches)
    gateway.end()
    assert await later[0] is not None
