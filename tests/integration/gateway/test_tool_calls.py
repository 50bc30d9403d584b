"""Sessions: samples call tools and go on with the answers, whatever is lost between two calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import grpc
import pytest

import paceline
from paceline import (
    AsyncClient,
    AsyncSession,
    Client,
    Group,
    InvalidArgumentError,
    SampleStatus,
    SamplingParams,
    ToolUse,
)
from paceline.convert.rollouts import version_spans
from paceline.times import duration
from paceline.v1 import rollout_pb2, sample_pb2
from services.contracts.gateway_keys import BatchKeys
from services.contracts.seeds import sample_seed
from services.gateway.config import GatewayConfig
from services.platform.redis.connection import connect
from tests.integration.gateway.conftest import CALL, Cluster, RunningGateway, make_batch, until
from tests.integration.gateway.test_in_flight import CONTINUE, staged
from tests.integration.gateway.test_open_batches import refused
from tests.integration.gateway.test_shards import LEASE, RETRY, SEED, STEP, Deployment, named, shards
from tests.integration.gateway.test_weights import finish
from tests.support.fake_instance import token_at
from tests.support.ports import free_port

__all__ = ["shards"]

CALLS = range(1, 61)
"""Tokens that are calls: one in 16."""
LIMIT = 300
TOOLS = ToolUse(call_token_ids=tuple(CALLS), max_calls=5)
SAMPLING = SamplingParams(max_tokens=LIMIT, ignore_eos=True)
GROUPS = [Group(f"p{number}", [1, 2, 3 + number], 2) for number in range(4)]


def answer_to(call: int) -> list[int]:
    """Return what the environment says; the last token would be a call, if the policy said it."""
    return [900 + call % 50, 901, 1 + call % 7]


class Script:
    """Text that a session must be, whatever is lost."""

    def __init__(self, prompt_id: str, slot: int, calls: int = 5) -> None:
        seed, tokens = sample_seed(SEED, STEP, prompt_id, slot), list[int]()
        self.calls, self.spans = list[int](), list[tuple[int, int]]()
        while len(tokens) < LIMIT:
            tokens.append(token_at(seed, len(tokens), 0)[0])
            if tokens[-1] in CALLS:
                if len(self.calls) == calls:
                    break
                self.calls.append(len(tokens))
                answer = answer_to(tokens[-1])
                self.spans.append((len(tokens), len(tokens) + len(answer)))
                tokens += answer
        self.tokens = tokens

    def check(self, sample: paceline.Sample) -> None:
        assert sample.token_ids.tolist() == self.tokens
        assert list(sample.calls) == self.calls
        assert [(span.begin, span.end) for span in sample.environment_spans] == self.spans
        given = [place for begin, end in self.spans for place in range(begin, end)]
        assert [place for place, own in enumerate(sample.policy_mask) if not own] == given
        assert all(sample.logprobs[given] == 0)
        assert [(span.begin, span.end) for span in sample.version_spans] == [(0, len(self.tokens))]


async def serving(cluster: Cluster, *names: str, **settings: Any) -> Deployment:
    gateway = await cluster.gateway(port=free_port(), lease_seconds=LEASE, **settings)
    fakes = [await cluster.instance(name, max_running=64) for name in names or ("i0",)]
    await cluster.serving(gateway, len(fakes))
    return Deployment(cluster, gateway, fakes[0])


async def converse(session: AsyncSession, turns: int = 100) -> None:
    """Answer the calls of a session, so many of them."""
    for _ in range(turns):
        turn = await session.generate()
        if turn.done:
            return
        await session.answer(answer_to(turn.token_ids[-1]))


Loss = Callable[[], Any]


async def five_calls(
    deployment: Deployment, between: Loss | None = None, where: Any = None
) -> list[paceline.Sample]:
    """Return sessions that called five times each; what is to be lost is lost after the second call of all."""
    async with (
        AsyncClient(where or deployment.gateway.gateway.address, retry=RETRY) as client,
        client.run("run", seed=SEED) as run,
        run.sessions(STEP, TOOLS, SAMPLING) as sessions,
        asyncio.timeout(CALL),
    ):
        begun = [session for group in GROUPS for session in await sessions.begin(group)]
        await asyncio.gather(*(converse(session, turns=2) for session in begun))
        held = [await session.generate() for session in begun]
        if between is not None:
            await between()
        for session, turn in zip(begun, held, strict=True):
            await session.answer(answer_to(turn.token_ids[-1]))
        await asyncio.gather(*map(converse, begun))
        assert not sessions.batch.complete
    assert sessions.batch.complete, "it can be acknowledged"
    samples = [session.sample for session in begun if session.sample is not None]
    assert len(samples) == len(begun) == 8
    for sample in samples:
        Script(sample.prompt_id, sample.slot).check(sample)
        assert sample.status is SampleStatus.TRUNCATED
    return samples


async def test_five_calls_are_the_text_that_one_run_would_be(cluster: Cluster) -> None:
    deployment = await serving(cluster, "i0", "i1")
    samples = await five_calls(deployment)
    stayed = 0
    for sample in samples:
        places = [span.instance_id for span in sample.provenance.instance_spans]
        assert len(places) == 6
        stayed += sum(before == after for before, after in pairwise(places))
    assert stayed > 20, "most of 40 turns go on where their KV is"
    assert deployment.gateway.metric("calls_total") == 40
    assert deployment.gateway.metric("calling_samples") == 0
    assert deployment.gateway.metric("call_seconds_count") == 40


async def test_a_gateway_that_is_lost_between_two_calls_changes_nothing(cluster: Cluster) -> None:
    deployment = await serving(cluster)
    await five_calls(deployment, deployment.restart)


async def test_an_instance_that_is_lost_between_two_calls_changes_nothing(cluster: Cluster) -> None:
    deployment = await serving(cluster, "i0", "i1")
    samples = await five_calls(deployment, deployment.fake.kill)
    places = [[span.instance_id for span in sample.provenance.instance_spans] for sample in samples]
    assert any("i0" in each for each in places)
    assert all(each[-1] == "i1" for each in places)


async def test_sessions_that_redis_and_the_gateway_have_lost_are_played_again(cluster: Cluster) -> None:
    deployment = await serving(cluster)

    async def lose() -> None:
        port = deployment.gateway.gateway.server.port
        await deployment.gateway.kill()
        redis = connect(GatewayConfig(redis_url=cluster.redis_url))
        async for name in redis.scan_iter(match=f"*{cluster.namespace}*step-*"):
            await redis.delete(name)
        await redis.aclose()
        deployment.gateway = await cluster.gateway(port=port, lease_seconds=LEASE)
        await cluster.serving(deployment.gateway, 1)

    await five_calls(deployment, lose)


async def test_sessions_over_two_shards(shards: list[Deployment]) -> None:
    await five_calls(shards[0], shards[1].restart, named(shards))
    assert all(each.fake.accepted for each in shards)


async def test_a_trainer_that_was_restarted_goes_on_with_its_sessions(cluster: Cluster) -> None:
    deployment = await serving(cluster)

    async def train(turns: int) -> AsyncSession:
        async with (
            AsyncClient(deployment.gateway.gateway.address, retry=RETRY) as client,
            client.run("run", seed=SEED) as run,
            run.sessions(STEP, TOOLS, SAMPLING) as sessions,
            asyncio.timeout(CALL),
        ):
            (session, _) = await sessions.begin(GROUPS[0])
            await converse(session, turns)
            if session.sample is None:
                raise ZeroDivisionError
        return session

    for turns in (1, 2):
        with pytest.raises(ZeroDivisionError):
            await train(turns)
    sample = (await train(100)).sample
    assert sample is not None
    Script(sample.prompt_id, sample.slot).check(sample)


async def test_the_blocking_client_reads_turns_in_one_loop(cluster: Cluster) -> None:
    deployment = await serving(cluster)

    def train() -> None:
        with (
            Client(deployment.gateway.gateway.address, retry=RETRY) as client,
            client.run("run", seed=SEED) as run,
        ):
            with run.sessions(STEP, TOOLS, SAMPLING) as sessions:
                begun = [session for group in GROUPS for session in sessions.begin(group)]
                for session, turn in sessions.turns():
                    if not turn.done:
                        session.answer(answer_to(turn.token_ids[-1]))
                for session in begun:
                    assert session.sample is not None
                    Script(*_names(session.key)).check(session.sample)
                assert sessions.report_rewards([paceline.Reward("p0", 0, 1.0)]) == 1
            with run.sessions(STEP, TOOLS, SAMPLING) as sessions:
                first, second = sessions.begin(GROUPS[0])
                turn = first.generate()
                with pytest.raises(ValueError, match="waits for an answer"):
                    first.generate()
                with pytest.raises(InvalidArgumentError, match="room for"):
                    first.answer([901] * LIMIT)
                first.end()
                assert first.generate().done
                assert first.sample is not None
                assert first.sample.token_ids.tolist() == turn.token_ids.tolist()
                assert first.sample.status is SampleStatus.COMPLETED
                second.generate()
            assert second.sample is not None
            assert second.sample.status is SampleStatus.ABORTED
            assert run.stats(STEP)["rollout/samples"] == 10

    await asyncio.to_thread(train)
    term = deployment.gateway.gateway.leadership.leading()
    await until(lambda: term.batches.unfinished == 0, "what was left has ended")


def _names(key: paceline.SampleKey) -> tuple[str, int]:
    return key.prompt_id, key.slot


# The protocol -------------------------------------------------------------------------------------------


async def called(
    gateway: RunningGateway, request: rollout_pb2.SubmitRolloutsRequest, count: int, *, whole: bool = False
) -> tuple[dict[tuple[str, int], rollout_pb2.SampleCall], Any]:
    """Return the calls of so many samples, and the stream."""
    message = rollout_pb2.StreamRolloutsRequest(
        run_id="run", batch_id=request.batch_id, most_samples=64, whole_calls=whole
    )
    stream = gateway.trainer.rollouts.StreamRollouts(message, timeout=CALL)
    found = dict[tuple[str, int], rollout_pb2.SampleCall]()
    while len(found) < count:
        event = await stream.read()
        found |= {(call.prompt_id, call.slot): call for call in event.calls}
    return found, stream


def a_batch(**tools: Any) -> rollout_pb2.SubmitRolloutsRequest:
    request = make_batch(groups=1, samples=4, max_tokens=LIMIT, ignore_eos=True)
    request.tools.CopyFrom(sample_pb2.ToolUse(**{"call_token_ids": CALLS, **tools}))
    return request


async def go_on(
    gateway: RunningGateway, request: rollout_pb2.SubmitRolloutsRequest, *given: rollout_pb2.Continuation
) -> int:
    message = rollout_pb2.ContinueSamplesRequest(run_id="run", batch_id=request.batch_id, continuations=given)
    return (await gateway.trainer.rollouts.ContinueSamples(message, timeout=CALL)).continued


def following(
    call: rollout_pb2.SampleCall, tokens: list[int], *, more: int = 0, **fields: Any
) -> rollout_pb2.Continuation:
    position = call.begin + len(call.tokens.token_ids) + more
    return rollout_pb2.Continuation(
        prompt_id=call.prompt_id, slot=call.slot, position=position, token_ids=tokens, **fields
    )


async def test_answers_are_all_taken_or_none_and_may_be_repeated(cluster: Cluster) -> None:
    gateway = (await serving(cluster)).gateway
    request = a_batch()
    await gateway.trainer.submit(request)
    calls, stream = await called(gateway, request, 4)
    first, second, third, fourth = (calls["p0", slot] for slot in range(4))
    for wrong, field in (
        (following(second, []), "token_ids"),
        (following(second, [10**6]), "token_ids[0]"),
        (following(second, [7] * LIMIT), "token_ids"),
        (following(first, [8]), ""),
        (rollout_pb2.Continuation(prompt_id="no"), ""),
    ):
        code, _, found = await refused(go_on(gateway, request, following(first, [7]), wrong))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        name = "continuations[1]" + (f".{field}" if field else "")
        assert found["BadRequest"].field_violations[0].field == name
    code, reason, _ = await refused(
        go_on(gateway, request, following(first, [7]), following(second, [7], more=1))
    )
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "SAMPLE_NOT_CALLING")
    code, _, found = await refused(go_on(gateway, request))
    assert found["BadRequest"].field_violations[0].field == "continuations"
    # None of these has changed anything.
    answers = [following(first, [7, 8]), following(second, [], end=True)]
    assert await go_on(gateway, request, *answers) == 2
    assert await go_on(gateway, request, *answers) == 0, "the answer of that call was lost"
    code, _, _ = await refused(go_on(gateway, request, following(first, [7, 9])))
    assert code is grpc.StatusCode.ALREADY_EXISTS
    again, other = await called(gateway, request, 3, whole=True)
    assert again.keys() == {("p0", 0), ("p0", 2), ("p0", 3)}
    assert again["p0", 2] == third
    begin = len(first.tokens.token_ids)
    assert (again["p0", 0].begin, again["p0", 0].number) == (0, 2)
    assert list(again["p0", 0].tokens.token_ids)[begin : begin + 2] == [7, 8]
    assert [(span.begin, span.end) for span in again["p0", 0].environment_spans] == [(begin, begin + 2)]
    other.cancel()
    # Its continuation came to the stream that was open, too, from behind the answer on.
    event = await stream.read()
    while not event.calls:
        event = await stream.read()
    assert (event.calls[0].begin, event.calls[0].number) == (begin + 2, 2)
    ended = rollout_pb2.EndRunRequest(run_id="run")
    assert (await gateway.trainer.rollouts.EndRun(ended, timeout=CALL)).cancelled == 3
    assert await go_on(gateway, request, following(fourth, [7])) == 0, "it has ended"


async def test_samples_whose_environment_is_silent_end_with_their_tokens(cluster: Cluster) -> None:
    gateway = (await serving(cluster, call_wait_seconds=0.3)).gateway
    request, patient = a_batch(), a_batch(max_wait=duration(CALL))
    for each in (request, patient):
        await gateway.trainer.submit(each)
    calls, _ = await called(gateway, patient, 4)
    samples = [event.sample for event in await gateway.trainer.collect(request)]
    assert len(samples) == 4
    for sample in samples:
        assert sample.finish_reason == sample_pb2.FINISH_REASON_ABANDONED
        assert sample.status == sample_pb2.SAMPLE_STATUS_ABORTED
        assert list(sample.calls) == [len(sample.tokens.token_ids)]
        assert sample.tokens.token_ids[-1] in CALLS
    assert gateway.metric("abandoned_calls_total") == 4
    assert await go_on(gateway, patient, *(following(call, [7]) for call in calls.values())) == 4


async def test_a_batch_without_tools_has_no_calls_and_one_with_wrong_ones_is_refused(
    cluster: Cluster,
) -> None:
    deployment = await serving(cluster)
    gateway = deployment.gateway
    plain = make_batch(groups=1, ignore_eos=True)
    await gateway.trainer.submit(plain)
    wrong = a_batch(call_token_ids=[10**6], max_calls=10**6)
    code, _, found = await refused(gateway.trainer.submit(wrong))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    fields = [each.field for each in found["BadRequest"].field_violations]
    assert fields == ["tools.call_token_ids[0]", "tools.max_calls"]
    assert len(await gateway.trainer.collect(plain)) == 4
    deployment.fake.hold_at = 1
    held = make_batch(groups=1, ignore_eos=True)
    await gateway.trainer.submit(held)
    given = rollout_pb2.Continuation(prompt_id="p0", position=1, token_ids=[1])
    code, reason, _ = await refused(go_on(gateway, held, given))
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NO_TOOLS")


async def test_what_the_journal_has_of_a_call_is_what_was_told(cluster: Cluster) -> None:
    deployment = await serving(cluster, journal_tokens=10**6)
    gateway, request = deployment.gateway, a_batch()
    await gateway.trainer.submit(request)
    calls, _ = await called(gateway, request, 4)
    redis = connect(GatewayConfig(redis_url=cluster.redis_url))
    chunks = await redis.hgetall(BatchKeys(cluster.namespace, ("run", request.batch_id)).chunks)
    await redis.aclose()
    for (_, slot), call in calls.items():
        kept = sample_pb2.Sample.FromString(chunks[f"{slot}:0".encode()])
        assert list(kept.tokens.token_ids) == list(call.tokens.token_ids)
        assert list(kept.calls) == [len(call.tokens.token_ids)]


async def test_sessions_go_on_under_weights_that_come_between_two_calls(cluster: Cluster) -> None:
    deployment = await serving(cluster)
    gateway, request = deployment.gateway, a_batch()
    await gateway.trainer.submit(request)
    calls, _ = await called(gateway, request, 4)
    update_id = await staged(gateway)
    code, reason, _ = await refused(finish(gateway.trainer, update_id))
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "SAMPLES_UNFINISHED")
    await finish(gateway.trainer, update_id, in_flight=CONTINUE)
    assert await go_on(gateway, request, *(following(call, [7, 8]) for call in calls.values())) == 4
    again, _ = await called(gateway, request, 4, whole=True)
    for key, call in again.items():
        cut, seed = len(calls[key].tokens.token_ids), sample_seed(SEED, STEP, *key)
        assert [
            (span.begin, span.end, span.policy_version) for span in version_spans(call.tokens.versions)
        ] == [(0, cut + 2, 0), (cut + 2, len(call.tokens.token_ids), 1)]
        for position, token in enumerate(call.tokens.token_ids):
            if position < cut or position >= cut + 2:
                assert token == token_at(seed, position, int(position > cut))[0]
