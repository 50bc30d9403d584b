"""Submit, stream, resume, cancel, refuse: the ordinary life of a batch."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from paceline.v1 import rollout_pb2, sample_pb2
from tests.integration.gateway.conftest import (
    CALL,
    Cluster,
    SampleStream,
    check_complete,
    check_samples,
    details,
    make_batch,
    until,
)


async def test_a_batch_comes_back_complete_and_once(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    for name in ("i0", "i1"):
        await cluster.instance(name)
    await cluster.serving(gateway, 2)
    request = make_batch(groups=10, samples=8)
    response = await gateway.trainer.submit(request)
    assert (response.samples, response.already_submitted) == (80, False)
    events = await gateway.trainer.collect(request)
    check_samples(request, events)
    assert events[-1].finished == events[-1].total == 80
    sources = {span.instance_id for e in events for span in e.sample.provenance.instance_spans}
    assert sources == {"i0", "i1"}
    assert all(event.sample.provenance.lossless for event in events)
    assert all(event.sample.provenance.accepted == 3 for event in events)


async def test_a_stream_resumes_after_its_cursor_even_when_the_batch_is_done(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    request = make_batch()
    await gateway.trainer.submit(request)
    stream = gateway.trainer.stream(request)
    first = [await stream.read() for _ in range(5)]
    stream.cancel()
    rest = await gateway.trainer.collect(request, cursor=first[-1].cursor)
    check_samples(request, first + rest)
    assert await gateway.trainer.collect(request, cursor=rest[-1].cursor) == []


async def test_a_stream_begins_at_once_though_no_sample_has_ended(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    fake = await cluster.instance("i0")
    fake.hold_at = 0
    await cluster.serving(gateway, 1)
    request = make_batch()
    await gateway.trainer.submit(request)
    stream = gateway.trainer.events(request)
    first = await stream.read()
    assert not first.HasField("sample")
    assert (first.cursor, first.finished, first.total) == (0, 0, 12)
    fake.hold_at = None
    samples, events = SampleStream(stream), []
    while (event := await samples.read()) is not grpc.aio.EOF:
        events.append(event)
    check_samples(request, events)


async def test_a_repeated_submission_is_answered_as_the_first(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    request = make_batch()
    await gateway.trainer.submit(request)
    again = await gateway.trainer.submit(request)
    assert (again.samples, again.already_submitted) == (12, True)
    check_samples(request, await gateway.trainer.collect(request))
    late = await gateway.trainer.submit(request)
    assert late.already_submitted
    check_samples(request, await gateway.trainer.collect(request))


async def test_another_batch_under_the_same_id_is_refused(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    request = make_batch()
    await gateway.trainer.submit(request)
    other = rollout_pb2.SubmitRolloutsRequest()
    other.CopyFrom(request)
    other.groups[1].prompt_token_ids[0] = 9
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await gateway.trainer.submit(other)
    assert error.value.code() is grpc.StatusCode.ALREADY_EXISTS
    said = error.value.details() or ""
    assert "groups[1].prompt_token_ids[0] was " in said
    assert "run.end()" in said
    check_samples(request, await gateway.trainer.collect(request))


@pytest.mark.parametrize("keep_partial", [True, False])
async def test_cancelled_samples_are_delivered_as_aborted(cluster: Cluster, keep_partial: bool) -> None:
    gateway = await cluster.gateway(room_factor=1.0, abort_timeout_seconds=CALL)
    fake = await cluster.instance("i0", max_running=4)
    fake.hold_at = 6
    await cluster.serving(gateway, 1)
    request = make_batch(ignore_eos=True)
    await gateway.trainer.submit(request)
    await until(lambda: [s.length for s in fake.running()] == [6] * 4, "four samples have six tokens")
    response = await gateway.trainer.rollouts.CancelRollouts(
        rollout_pb2.CancelRolloutsRequest(run_id="run", batch_id=request.batch_id, keep_partial=keep_partial),
        timeout=CALL,
    )
    assert response.cancelled == 12
    events = await gateway.trainer.collect(request)
    assert len(events) == 12
    assert {e.sample.status for e in events} == {sample_pb2.SAMPLE_STATUS_ABORTED}
    assert {e.sample.finish_reason for e in events} == {sample_pb2.FINISH_REASON_ABORTED}
    lengths = sorted(len(e.sample.tokens.token_ids) for e in events)
    assert lengths == [0] * 8 + [6 if keep_partial else 0] * 4
    assert all(len(e.sample.tokens.logprobs) == len(e.sample.tokens.token_ids) for e in events)
    assert fake.running() == []


async def test_one_sample_can_be_cancelled_and_the_others_go_on(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    fake = await cluster.instance("i0")
    fake.hold_at = 3
    await cluster.serving(gateway, 1)
    request = make_batch(groups=1, samples=3, ignore_eos=True)
    await gateway.trainer.submit(request)
    await until(lambda: len(fake.running()) == 3, "three samples run")
    cancel = rollout_pb2.CancelRolloutsRequest(
        run_id="run",
        batch_id=request.batch_id,
        samples=[rollout_pb2.SampleKey(prompt_id="p0", slot=1)],
        keep_partial=True,
    )
    assert (await gateway.trainer.rollouts.CancelRollouts(cancel, timeout=CALL)).cancelled == 1
    assert (await gateway.trainer.rollouts.CancelRollouts(cancel, timeout=CALL)).cancelled == 0
    fake.hold_at = None
    events = await gateway.trainer.collect(request)
    statuses = {event.sample.slot: event.sample.status for event in events}
    aborted, truncated = sample_pb2.SAMPLE_STATUS_ABORTED, sample_pb2.SAMPLE_STATUS_TRUNCATED
    assert statuses == {0: truncated, 1: aborted, 2: truncated}


async def test_cancelling_a_sample_that_is_not_there_names_it(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    fake = await cluster.instance("i0")
    fake.hold_at = 3
    await cluster.serving(gateway, 1)
    request = make_batch(groups=1, samples=1, ignore_eos=True)
    await gateway.trainer.submit(request)
    cancel = rollout_pb2.CancelRolloutsRequest(
        run_id="run", batch_id=request.batch_id, samples=[rollout_pb2.SampleKey(prompt_id="p0", slot=9)]
    )
    call = gateway.trainer.rollouts.CancelRollouts(cancel, timeout=CALL)
    assert await expect_violations(call) == {"samples[0]"}


async def test_an_instance_that_does_not_answer_an_abort_holds_up_nobody(cluster: Cluster) -> None:
    gateway = await cluster.gateway(abort_timeout_seconds=0.1)
    fake = await cluster.instance("i0")
    fake.hold_at, fake.deaf = 4, True
    await cluster.serving(gateway, 1)
    request = make_batch(groups=1, samples=2, ignore_eos=True)
    await gateway.trainer.submit(request)
    await until(lambda: len(fake.running()) == 2, "two samples run")
    cancel = rollout_pb2.CancelRolloutsRequest(run_id="run", batch_id=request.batch_id, keep_partial=True)
    assert (await gateway.trainer.rollouts.CancelRollouts(cancel, timeout=CALL)).cancelled == 2
    events = await gateway.trainer.collect(request)
    assert [event.sample.status for event in events] == [sample_pb2.SAMPLE_STATUS_ABORTED] * 2


async def test_samples_past_the_deadline_are_delivered_as_aborted_with_their_tokens(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    fake = await cluster.instance("i0")
    fake.hold_at = 5
    await cluster.serving(gateway, 1)
    # The deadline may come before the tokens: then another batch has more time.
    for milliseconds in (500, 1500, 5000):
        deadline = Duration()
        deadline.FromMilliseconds(milliseconds)
        request = make_batch(groups=1, samples=2, ignore_eos=True, deadline=deadline)
        await gateway.trainer.submit(request)
        events = await gateway.trainer.collect(request)
        assert [event.sample.status for event in events] == [sample_pb2.SAMPLE_STATUS_ABORTED] * 2
        lengths = [len(event.sample.tokens.token_ids) for event in events]
        if lengths == [5, 5]:
            return
    pytest.fail(f"the samples are delivered with {lengths} tokens")


async def test_more_samples_than_the_bound_are_refused_with_the_resource(cluster: Cluster) -> None:
    gateway = await cluster.gateway(max_queued_samples=20)
    fake = await cluster.instance("i0")
    fake.hold_at = 3
    await cluster.serving(gateway, 1)
    request = make_batch(ignore_eos=True)
    await gateway.trainer.submit(request)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await gateway.trainer.submit(make_batch())
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    found = details(error.value)
    assert found["QuotaFailure"].violations[0].subject == "queued_samples"
    assert "RetryInfo" in found
    fake.hold_at = None
    check_samples(request, await gateway.trainer.collect(request))
    again = make_batch()
    await gateway.trainer.submit(again)
    check_samples(again, await gateway.trainer.collect(again))


async def test_no_samples_are_accepted_while_those_in_work_have_too_many_tokens(cluster: Cluster) -> None:
    gateway = await cluster.gateway(max_token_bytes=8)
    fake = await cluster.instance("i0")
    fake.hold_at = 3
    await cluster.serving(gateway, 1)
    request = make_batch(ignore_eos=True)
    await gateway.trainer.submit(request)
    await until(lambda: gateway.metric("unfinished_tokens_ratio") > 1, "the tokens are counted")
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await gateway.trainer.submit(make_batch())
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    found = details(error.value)
    assert found["QuotaFailure"].violations[0].subject == "unfinished_tokens"
    assert "RetryInfo" in found
    # What was accepted ends, and makes room.
    fake.hold_at = None
    check_samples(request, await gateway.trainer.collect(request))
    await until(lambda: gateway.metric("unfinished_tokens_ratio") == 0, "the tokens are freed")
    again = make_batch()
    await gateway.trainer.submit(again)
    check_samples(again, await gateway.trainer.collect(again))


async def expect_violations(call: Any, code: str = "INVALID_ARGUMENT") -> set[str]:
    """Return the fields that the call is refused for."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    assert error.value.code().name == code
    return {violation.field for violation in details(error.value)["BadRequest"].field_violations}


async def test_all_that_is_wrong_with_a_batch_is_named_and_nothing_else_is_harmed(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    fake = await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    request = make_batch()
    request.groups[0].prompt_token_ids[2] = 1000
    request.groups[1].samples = 0
    request.groups[1].sampling.temperature = -1
    request.groups[2].prompt_id = "p0"
    request.groups.add(prompt_id="long", prompt_token_ids=[1] * 512, samples=1)
    request.groups.add(prompt_id="empty", samples=1)
    request.sampling.top_p = 0
    request.deadline.FromSeconds(0)
    assert await expect_violations(gateway.trainer.submit(request)) >= {
        "groups[0].prompt_token_ids[2]",
        "groups[1].samples",
        "groups[1].sampling.temperature",
        "groups[2].prompt_id",
        "groups[3].prompt_token_ids",
        "groups[4].prompt_token_ids",
        "sampling.top_p",
        "deadline",
    }
    assert await expect_violations(gateway.trainer.submit(make_batch(groups=0))) == {"groups"}
    assert fake.accepted == []


@pytest.mark.parametrize("batch_id", ["", "a" * 129, "a b", "a/b", "a{b}"])
async def test_a_batch_id_must_be_a_name(cluster: Cluster, batch_id: str) -> None:
    gateway = await cluster.gateway()
    request = make_batch()
    request.batch_id = batch_id
    assert await expect_violations(gateway.trainer.submit(request)) == {"batch_id"}


async def test_a_wrong_policy_version_is_refused_with_both_versions_and_the_way_out(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await gateway.trainer.submit(make_batch(version=4))
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    found = dict(details(error.value)["ErrorInfo"].metadata)
    assert found == {"current": "0", "requested": "4", "model": "fake"}
    assert "another pool with version 4" in (error.value.details() or "")


async def test_without_an_instance_a_batch_is_refused_for_now(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await gateway.trainer.submit(make_batch())
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "RetryInfo" in details(error.value)


async def test_a_stream_of_what_is_not_there_is_refused(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    fake = await cluster.instance("i0")
    fake.hold_at = 2
    await cluster.serving(gateway, 1)
    request = make_batch(ignore_eos=True)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await gateway.trainer.collect(request)
    assert error.value.code() is grpc.StatusCode.NOT_FOUND
    await gateway.trainer.submit(request)
    assert await expect_violations(gateway.trainer.collect(request, cursor=1 << 63)) == {"cursor"}


async def test_generate_sends_deltas_and_then_the_whole_sample(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    fake = await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    request = rollout_pb2.GenerateRequest(
        run_id="run",
        prompt_id="p0",
        slot=2,
        step=3,
        prompt_token_ids=[1, 2],
        run_seed=11,
        sampling=sample_pb2.SamplingParams(max_tokens=60, ignore_eos=True),
    )
    events = [event async for event in gateway.trainer.rollouts.Generate(request, timeout=CALL)]
    *deltas, last = events
    assert len(deltas) > 1
    assert [t for event in deltas for t in event.delta.token_ids] == list(last.sample.tokens.token_ids)
    assert [p for event in deltas for p in event.delta.logprobs] == list(last.sample.tokens.logprobs)
    batch = make_batch(max_tokens=60, ignore_eos=True)
    check_complete(batch, last.sample)
    request.prefix_token_ids.extend(last.sample.tokens.token_ids[:20])
    *_, resumed = [event async for event in gateway.trainer.rollouts.Generate(request, timeout=CALL)]
    assert list(resumed.sample.tokens.token_ids) == list(last.sample.tokens.token_ids[20:])
    assert list(fake.accepted[-1].prefix_token_ids) == list(last.sample.tokens.token_ids[:20])
    assert all(item.streamed for item in fake.accepted)
    await gateway.trainer.submit(batch)
    await gateway.trainer.collect(batch)
    assert not fake.accepted[-1].streamed


async def test_a_generate_whose_caller_is_gone_ends_on_the_instance(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    fake = await cluster.instance("i0")
    fake.hold_at = 8
    await cluster.serving(gateway, 1)
    request = rollout_pb2.GenerateRequest(
        prompt_id="p0",
        prompt_token_ids=[1, 2],
        sampling=sample_pb2.SamplingParams(max_tokens=60, ignore_eos=True),
    )
    call = gateway.trainer.rollouts.Generate(request, timeout=CALL)
    await call.read()
    call.cancel()
    await until(lambda: fake.aborted and not fake.running(), "the sample is aborted on the instance")
    await until(lambda: gateway.gateway.leadership.leading().batches.unfinished == 0, "nothing is unfinished")
