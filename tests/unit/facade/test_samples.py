"""Samples in work, on a client that does as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import grpc
import numpy as np
import pytest

from paceline import types as t
from paceline.errors import PacelineError, UnavailableError
from services.contracts.errors import ResourceExhausted
from services.facade.dialects.body import weight_versions
from services.facade.http_errors import http_error
from services.facade.samples import SamplesInWork

LENGTH = 6


def request(slot: int = 0) -> t.SampleRequest:
    return t.SampleRequest("run", "p", [1], slot=slot)


def delta(slot: int, begin: int, end: int) -> t.TokenDelta:
    """Tokens [begin, end) of a sample: those of a slot are its own, whoever generates them."""
    places = np.arange(begin, end) + 100 * slot
    return t.TokenDelta(places, -places.astype(np.float32))


class Scripted:
    """Generates LENGTH tokens one by one; is lost at some places, and waits while it is held."""

    def __init__(self, lost_at: tuple[int, ...] = ()) -> None:
        self.lost_at = list(lost_at)
        self.prefixes: list[list[int]] = []
        self.known: list[list[float]] = []
        self.held = asyncio.Event()
        self.held.set()
        self.running = 0
        self.failure: t.SampleFailure | None = None

    async def generate(self, request: t.SampleRequest) -> AsyncIterator[t.TokenDelta | t.Sample]:
        begin = len(request.prefix_token_ids)
        self.prefixes.append([int(token) for token in request.prefix_token_ids])
        self.known.append(list(request.prefix_logprobs))
        self.running += 1
        try:
            for place in range(begin, LENGTH):
                await asyncio.sleep(0)
                if place in self.lost_at:
                    self.lost_at.remove(place)
                    raise UnavailableError(grpc.StatusCode.UNAVAILABLE, "lost")
                if place == 3:
                    await self.held.wait()
                yield delta(request.slot, place, place + 1)
            whole = delta(request.slot, begin, LENGTH)
            failure = self.failure
            yield t.Sample(
                prompt_id=request.prompt_id,
                slot=request.slot,
                token_ids=whole.token_ids,
                logprobs=whole.logprobs,
                finish_reason=t.FinishReason.LENGTH,
                status=t.SampleStatus.TRUNCATED if failure is None else t.SampleStatus.FAILED,
                version_spans=(t.VersionSpan(0, LENGTH - begin, 4, mixed_kv=True),),
                provenance=t.Provenance(),
                seed=1,
                error="" if failure is None else failure.reason,
                failure=failure,
            )
        finally:
            self.running -= 1


def in_work(
    client: Scripted, *, most: int = 8, show: Callable[[int], None] = lambda _: None
) -> SamplesInWork:
    return SamplesInWork(lambda: client, most, 60.0, show)


async def test_a_lost_gateway_costs_nothing_and_the_last_token_is_sampled_again() -> None:
    client = Scripted(lost_at=(2, 5))
    async with in_work(client).generate([request(1)]) as group:
        (output,) = await group.wait()
    assert output.token_ids.tolist() == [100, 101, 102, 103, 104, 105]
    assert output.logprobs.tolist() == [-100.0, -101.0, -102.0, -103.0, -104.0, -105.0]
    assert client.prefixes == [[], [100], [100, 101, 102, 103]]
    # The last gateway counted from its own first token, and did not know of the losses.
    assert output.version_spans == (t.VersionSpan(4, LENGTH, 4, mixed_kv=True),)
    (told,) = weight_versions(output.version_spans)
    assert told == {"version": "4", "start": 4, "end": LENGTH, "mixed_kv": True}
    # Where there is nothing to mark, answers have vLLM's fields only.
    assert weight_versions([t.VersionSpan(0, 1, 4)]) == [{"version": "4", "start": 0, "end": 1}]
    assert output.provenance.resubmissions == 2


async def test_log_probabilities_of_a_prefix_are_sent_where_all_of_them_are_known() -> None:
    for logprobs, sent in ([-7.0], [[-7.0], [-7.0, -101.0]]), ([], [[], []]):
        client = Scripted(lost_at=(3,))
        resumed = replace(request(1), prefix_token_ids=[100], prefix_logprobs=logprobs)
        async with in_work(client).generate([resumed]) as group:
            (output,) = await group.wait()
        assert output.token_ids.tolist() == [101, 102, 103, 104, 105]
        assert client.prefixes == [[100], [100, 101]]
        assert client.known == sent


async def test_a_gateway_that_gives_nothing_is_an_error() -> None:
    client = Scripted(lost_at=(2, 2, 1))
    with pytest.raises(UnavailableError):
        async with in_work(client).generate([request()]) as group:
            await group.wait()
    assert client.running == 0


@pytest.mark.parametrize(
    ("failure", "status", "param"),
    [
        (t.SampleFailure("INVALID_ARGUMENT", "sampling.json_schema", "a dead end"), 400, "json_schema"),
        (t.SampleFailure("INVALID_ARGUMENT", "prompt_token_ids", "no finite logits"), 400, "prompt"),
        (t.SampleFailure("INVALID_ARGUMENT", "", "no"), 400, None),
        (t.SampleFailure("UNAVAILABLE", "", "16 attempts in a row brought no token"), 500, None),
        (t.SampleFailure("DATA_LOSS", "", "the model gives no finite logits"), 500, None),
    ],
)
async def test_a_failed_sample_is_the_callers_error_where_it_names_a_field(
    failure: t.SampleFailure, status: int, param: str | None
) -> None:
    client = Scripted()
    client.failure = failure
    with pytest.raises(PacelineError) as raised:
        async with in_work(client).generate([request()]) as group:
            await group.wait()
    answer = http_error(raised.value)
    assert (answer.status, answer.body["error"]["param"]) == (status, param)
    assert failure.reason in answer.body["error"]["message"]


async def test_an_aborted_request_keeps_its_tokens() -> None:
    client, samples = Scripted(), None
    client.held.clear()
    samples = in_work(client)
    async with samples.generate([request(0), request(1)], "rid-7") as group:
        while sum(len(output.token_ids) for output in group.outputs) < 6:
            await group.news()
        assert await samples.abort("other".__eq__) == 0
        assert samples.running == 2
        assert await samples.abort("rid-7".__eq__) == 2
        assert samples.running == 0
        outputs = await group.wait()
    assert [output.token_ids.tolist() for output in outputs] == [[0, 1, 2], [100, 101, 102]]
    assert {output.finish_reason for output in outputs} == {t.FinishReason.ABORTED}
    assert client.running == 0


async def test_news_are_of_the_samples_that_have_changed_and_come_once() -> None:
    client = Scripted()
    client.held.clear()
    async with in_work(client).generate([request(0), request(1)]) as group:
        seen: list[int] = []
        while len(seen) < 6:
            seen += [index for index, _ in await group.news()]
        assert sorted(seen) == [0, 0, 0, 1, 1, 1]
        client.held.set()
        await group.wait()
        assert [index for index, _ in await group.news()] == [0, 1]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(group.news(), 0.05)


async def test_leaving_ends_everything_and_gives_its_place_back() -> None:
    client = Scripted()
    client.held.clear()
    shown: list[int] = []
    samples = in_work(client, most=3, show=shown.append)
    async with samples.generate([request(0), request(1)]) as group:
        await group.news()
        with pytest.raises(ResourceExhausted):
            async with samples.generate([request(2), request(3)]):
                pytest.fail("there is no place")
    assert client.running == 0
    assert shown == [2, 0]
    # Alone, a request may be larger than the bound: it could never come otherwise.
    client.held.set()
    async with samples.generate([request(slot) for slot in range(5)]) as group:
        assert len(await group.wait()) == 5


async def test_a_request_that_fails_raises_its_first_error() -> None:
    class Failing(Scripted):
        async def generate(self, request: t.SampleRequest) -> AsyncIterator[t.TokenDelta | t.Sample]:
            if request.slot == 1:
                raise PacelineError(grpc.StatusCode.INVALID_ARGUMENT, "bad")
            async for event in super().generate(request):
                yield event

    client = Failing()
    client.held.clear()
    with pytest.raises(PacelineError, match="bad"):
        async with in_work(client).generate([request(0), request(1)]) as group:
            await group.wait()
    assert client.running == 0


async def test_requests_wait_during_a_pause() -> None:
    client = Scripted()
    client.held.clear()
    samples = in_work(client)
    async with samples.generate([request(0)]) as before:
        await before.news()
        samples.pause()
        draining = asyncio.create_task(samples.drained())
        async with samples.generate([request(1), request(2)]) as after:
            assert (samples.running, samples.samples) == (1, 3)
            client.held.set()
            await before.wait()
            assert samples.running == 0
            assert [output.token_ids.tolist() for output in after.outputs] == [[], []]
            assert client.running == 0
            samples.resume()
            outputs = await after.wait()
        assert [len(output.token_ids) for output in outputs] == [LENGTH, LENGTH]
        assert not draining.done(), "the first request is not left yet"
    await draining


async def test_a_request_that_waits_can_be_aborted() -> None:
    samples = in_work(Scripted())
    samples.pause()
    async with samples.generate([request()]) as group:
        assert await samples.abort() == 1
        (output,) = await group.wait()
    assert (output.finish_reason, output.token_ids.tolist()) == (t.FinishReason.ABORTED, [])
