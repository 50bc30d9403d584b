"""Samples that instances move among themselves: claimed where they are, and never lost or doubled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from paceline.v1 import rollout_pb2, sample_pb2
from tests.integration.gateway.conftest import (
    CALL,
    Cluster,
    RunningGateway,
    check_complete,
    check_samples,
    make_batch,
    until,
)
from tests.support.fake_instance import FakeInstance


async def held(
    cluster: Cluster, *, length: int = 12, **settings: Any
) -> tuple[RunningGateway, list[FakeInstance], rollout_pb2.SubmitRolloutsRequest]:
    """Return a batch of 16 unfinished samples on two instances, each with so many tokens."""
    gateway = await cluster.gateway(**settings)
    fakes = [await cluster.instance(name) for name in ("i0", "i1")]
    for fake in fakes:
        fake.hold_at = length
    await cluster.serving(gateway, 2)
    request = make_batch(groups=4, samples=4, ignore_eos=True)
    await gateway.trainer.submit(request)
    await until(
        lambda: [s.length for fake in fakes for s in fake.running()] == [length] * 16,
        f"all samples have {length} tokens",
    )
    return gateway, fakes, request


def release(fakes: Sequence[FakeInstance]) -> None:
    for fake in fakes:
        fake.hold_at = None


def resubmissions(events: Sequence[rollout_pb2.StreamRolloutsResponse]) -> int:
    return sum(event.sample.provenance.resubmissions for event in events)


def places(event: rollout_pb2.StreamRolloutsResponse) -> list[str]:
    return [span.instance_id for span in event.sample.provenance.instance_spans]


async def test_a_moved_sample_goes_on_without_being_submitted_again(cluster: Cluster) -> None:
    gateway, (donor, receiver), request = await held(cluster)
    moving = donor.running()
    before = len(receiver.accepted)
    for number, sample in enumerate(moving):
        donor.move(sample, f"m{number}", receiver)
    # It decodes on before it is claimed, and after.
    receiver.hold_at = 24
    await until(lambda: len(receiver.claimed) == len(moving), "all are claimed")
    release([donor, receiver])
    events = await gateway.trainer.collect(request)
    check_samples(request, events)
    assert resubmissions(events) == 0
    assert [places(event) for event in events].count(["i0", "i1"]) == len(moving)
    assert len(receiver.accepted) == before
    assert gateway.metric("moves_total", outcome="claimed") == len(moving)
    links = gateway.links().values()
    assert all(link.slots.room == 80 and not link.held and not link.slots.prompts for link in links)


async def test_a_sample_may_be_moved_again_and_back(cluster: Cluster) -> None:
    gateway, fakes, request = await held(cluster)
    (sample, *_) = fakes[0].running()
    for number in range(4):
        here, there = fakes[number % 2], fakes[(number + 1) % 2]
        here.move(sample, f"m{number}", there)
        await until(lambda name=f"m{number}", there=there: name in there.claimed, "it is claimed")
        there.hold_at = 14 + 2 * number
        await until(lambda: sample.length >= 14 + 2 * number, "it goes on")  # noqa: B023
    release(fakes)
    events = await gateway.trainer.collect(request)
    check_samples(request, events)
    assert resubmissions(events) == 0
    assert ["i0", "i1", "i0", "i1", "i0"] in [places(event) for event in events]


async def test_a_sample_that_ends_before_it_is_claimed_is_delivered(cluster: Cluster) -> None:
    gateway, (donor, receiver), request = await held(cluster)
    donor.freeze()
    moving = donor.running()
    for number, sample in enumerate(moving):
        donor.move(sample, f"m{number}", receiver)
    receiver.hold_at = None
    await until(lambda: not receiver.running(), "all have ended there")
    assert not receiver.claimed
    donor.unfreeze()
    events = await gateway.trainer.collect(request)
    check_samples(request, events)
    assert resubmissions(events) == 0
    assert [places(event) for event in events].count(["i0", "i1"]) == len(moving)


async def test_moved_samples_wait_for_the_link_to_an_instance_that_joined_late(cluster: Cluster) -> None:
    gateway, fakes, request = await held(cluster, registry_poll_seconds=0.5, claim_wait_seconds=CALL)
    late = await cluster.instance("i2")
    late.hold_at = 12
    moving = fakes[0].running()[:3]
    for number, sample in enumerate(moving):
        fakes[0].move(sample, f"m{number}", late)
    await until(lambda: len(late.claimed) == 3, "the link is there, and all are claimed")
    release([*fakes, late])
    events = await gateway.trainer.collect(request)
    check_samples(request, events)
    # Those that were claimed; what the gateway places itself on the late one is none of them.
    assert resubmissions(events) == 0
    assert [places(event) for event in events].count(["i0", "i2"]) == 3


async def test_a_receiver_that_nobody_knows_costs_a_prefix(cluster: Cluster) -> None:
    gateway, fakes, request = await held(cluster, claim_wait_seconds=0.1)
    fakes[0].move(fakes[0].running()[0], "m0", None, name="nowhere")
    await until(lambda: gateway.metric("moves_total", outcome="no_link") == 1, "it is given up")
    release(fakes)
    events = await gateway.trainer.collect(request)
    check_samples(request, events)
    assert resubmissions(events) == 1


async def test_a_claim_that_is_refused_costs_a_prefix_and_is_not_held_against_the_instance(
    cluster: Cluster,
) -> None:
    gateway, fakes, request = await held(cluster)
    fakes[0].move(fakes[0].running()[0], "m0", None, name="i1")
    await until(lambda: gateway.metric("resubmissions_total", cause="claim_refused") == 1, "it is refused")
    assert all(link.closed_until == 0.0 for link in gateway.links().values())
    release(fakes)
    events = await gateway.trainer.collect(request)
    check_samples(request, events)
    assert resubmissions(events) == 1


async def test_the_receiver_dies_before_the_claim_is_answered(cluster: Cluster) -> None:
    gateway, (donor, receiver), request = await held(cluster)
    receiver.freeze()
    for number, sample in enumerate(donor.running()):
        donor.move(sample, f"m{number}", receiver)
    await receiver.kill()
    release([donor])
    events = await gateway.trainer.collect(request)
    check_samples(request, events)
    assert resubmissions(events) == 16


async def test_the_donor_dies_right_after_it_moved_everything(cluster: Cluster) -> None:
    gateway, (donor, receiver), request = await held(cluster)
    for number, sample in enumerate(donor.running()):
        donor.move(sample, f"m{number}", receiver)
    await until(lambda: len(receiver.running()) == 16, "they have gone")
    await donor.kill()
    release([receiver])
    check_samples(request, await gateway.trainer.collect(request))


async def test_a_sample_without_some_of_its_tokens_is_not_trusted(cluster: Cluster) -> None:
    gateway, (donor, receiver), request = await held(cluster)
    donor.move(donor.running()[0], "m0", receiver, more=1)
    await until(lambda: receiver.claimed == ["m0"] and len(receiver.aborted) == 1, "it is ended there")
    release([donor, receiver])
    events = await gateway.trainer.collect(request)
    check_samples(request, events)
    assert resubmissions(events) == 1
    assert gateway.metric("moves_total", outcome="tokens_missing") == 1


async def test_a_sample_that_is_cancelled_on_its_way_is_claimed_and_ended(cluster: Cluster) -> None:
    gateway, (donor, receiver), request = await held(cluster, abort_timeout_seconds=CALL)
    # The abort meets an instance that does not have the sample any more.
    donor.freeze()
    sample = donor.running()[0]
    key = rollout_pb2.SampleKey(prompt_id=sample.item.prompt_id, slot=sample.item.slot)
    cancel = rollout_pb2.CancelRolloutsRequest(
        run_id=request.run_id, batch_id=request.batch_id, samples=[key], keep_partial=True
    )
    donor.move(sample, "m0", receiver)
    assert (await gateway.trainer.rollouts.CancelRollouts(cancel, timeout=CALL)).cancelled == 1
    donor.unfreeze()
    await until(lambda: receiver.claimed == ["m0"] and not receiver.unclaimed, "it is claimed")
    await until(lambda: sample not in receiver.running(), "it is ended there")
    release([donor, receiver])
    events = await gateway.trainer.collect(request)
    statuses = {(e.sample.prompt_id, e.sample.slot): e.sample for e in events}
    cancelled = statuses.pop((key.prompt_id, key.slot))
    assert cancelled.status == sample_pb2.SAMPLE_STATUS_ABORTED
    assert len(cancelled.tokens.token_ids) >= 12
    for other in statuses.values():
        check_complete(request, other)


async def test_a_sample_that_is_cancelled_while_there_is_no_link_ends_at_once(cluster: Cluster) -> None:
    gateway, (donor, other), request = await held(
        cluster, claim_wait_seconds=CALL, abort_timeout_seconds=CALL
    )
    sample = donor.running()[0]
    donor.move(sample, "m0", None, name="nowhere")
    term = gateway.gateway.leadership.term
    await until(lambda: term is not None and len(term.events.transit) == 1, "it is on its way")
    cancel = rollout_pb2.CancelRolloutsRequest(
        run_id=request.run_id, batch_id=request.batch_id, keep_partial=True
    )
    await gateway.trainer.rollouts.CancelRollouts(cancel, timeout=CALL)
    events = await asyncio.wait_for(gateway.trainer.collect(request), CALL)
    assert {event.sample.status for event in events} == {sample_pb2.SAMPLE_STATUS_ABORTED}
    assert len(events) == 16
    release([donor, other])


async def test_a_gateway_that_restarts_in_between_resumes_by_prefix(cluster: Cluster) -> None:
    gateway, (donor, receiver), request = await held(cluster)
    donor.freeze()
    for number, sample in enumerate(donor.running()):
        donor.move(sample, f"m{number}", receiver)
    await gateway.kill()
    donor.unfreeze()
    release([donor, receiver])
    successor = await cluster.gateway()
    check_samples(request, await successor.trainer.collect(request))


async def test_one_that_is_handed_on_is_resumed_where_it_is_to_go(cluster: Cluster) -> None:
    gateway, (donor, receiver), request = await held(cluster)
    moving = donor.running()[:3]
    before, there = len(donor.accepted), len(receiver.running())
    for sample in moving:
        donor.hand_back(sample, "i1")
    await until(lambda: len(receiver.running()) == there + 3, "they are on the other instance")
    release([donor, receiver])
    events = await gateway.trainer.collect(request)
    check_samples(request, events)
    assert resubmissions(events) == 3
    assert len(donor.accepted) == before
    assert gateway.metric("moves_total", outcome="by_prefix") == 3
    assert gateway.metric("resubmissions_total", cause="moved") == 3


async def test_one_that_is_handed_on_waits_for_the_link_and_not_for_ever(cluster: Cluster) -> None:
    gateway, fakes, request = await held(cluster, registry_poll_seconds=0.3, claim_wait_seconds=5.0)
    late = await cluster.instance("i2")
    late.hold_at = 12
    first, second, third = fakes[0].running()[:3]
    fakes[0].hand_back(first, "i2")
    fakes[0].hand_back(second, "nowhere")
    fakes[0].hand_back(third, "nowhere")
    await until(lambda: gateway.metric("resubmissions_total", cause="moved") == 3, "all wait")
    key = rollout_pb2.SampleKey(prompt_id=third.item.prompt_id, slot=third.item.slot)
    cancel = rollout_pb2.CancelRolloutsRequest(run_id="run", batch_id=request.batch_id, samples=[key])
    await gateway.trainer.rollouts.CancelRollouts(cancel, timeout=CALL)
    await until(lambda: late.running(), "the first waited for the link")
    release([*fakes, late])
    events = await gateway.trainer.collect(request)
    ended = [event for event in events if event.sample.status == sample_pb2.SAMPLE_STATUS_ABORTED]
    assert [event.sample.slot for event in ended] == [third.item.slot]
    assert len(events) == 16
    assert gateway.metric("moves_total", outcome="no_link") == 2
