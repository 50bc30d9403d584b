"""Hints from the trainer's side, and what the bubble coordinator is told and asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.errors import Violation
from paceline.internal.v1 import bubble_pb2
from paceline.v1 import rollout_pb2, sample_pb2, weight_pb2
from services.contracts.errors import InvalidArgument, Unavailable
from services.contracts.seeds import sample_seed
from tests.integration.gateway.conftest import (
    CALL,
    Cluster,
    RunningGateway,
    check_samples,
    details,
    make_batch,
    until,
)
from tests.integration.gateway.coordinator_double import CoordinatorDouble
from tests.integration.gateway.test_open_batches import hand_in


async def coordinator(cluster: Cluster, name: str = "bubbles-0") -> CoordinatorDouble:
    double = CoordinatorDouble(cluster.redis_url, cluster.namespace, name)
    return await cluster.stack.enter_async_context(double)


def make_hint(batch: rollout_pb2.SubmitRolloutsRequest, **fields: Any) -> rollout_pb2.HintNextBatchRequest:
    """Return the hint that announces a batch."""
    given = {
        "run_id": batch.run_id,
        "step": batch.step,
        "policy_version": batch.policy_version,
        "groups": batch.groups,
        "sampling": batch.sampling,
        "exactness": batch.exactness,
        "run_seed": batch.run_seed,
    }
    return rollout_pb2.HintNextBatchRequest(**{**given, **fields})


async def hint(gateway: RunningGateway, request: rollout_pb2.HintNextBatchRequest) -> int:
    return (await gateway.trainer.rollouts.HintNextBatch(request, timeout=CALL)).samples


async def update(gateway: RunningGateway, path: Path, version: int) -> str:
    """Stages an update that is to be finished."""
    weights = gateway.trainer.weights
    start = weight_pb2.StartUpdateRequest(
        run_id="run",
        policy_version=version,
        target=weight_pb2.WEIGHT_TARGET_POLICY,
        transport=weight_pb2.WEIGHT_TRANSPORT_DISK,
    )
    update_id = (await weights.StartUpdate(start, timeout=CALL)).update_id
    disk = weight_pb2.DiskWeights(path=str(path))
    request = weight_pb2.UpdateWeightsRequest(update_id=update_id, disk=disk)
    await weights.UpdateWeights(iter([request]), timeout=CALL)
    return str(update_id)


async def test_a_hint_reaches_the_coordinator_with_the_seeds_of_its_step(cluster: Cluster) -> None:
    double = await coordinator(cluster)
    gateway = await cluster.gateway()
    await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    batch = make_batch(groups=3, samples=4)
    batch.groups[1].expected_tokens = 7
    assert await hint(gateway, make_hint(batch)) == 12
    await until(lambda: double.hints, "the coordinator has the hint")
    (told,) = double.hints.values()
    assert (told.run_id, told.step) == ("run", 3)
    assert [list(group.seeds) for group in told.groups] == [
        [sample_seed(11, 3, group.prompt_id, slot) for slot in range(4)] for group in batch.groups
    ]
    assert [group.prompt_token_ids for group in told.groups] == [
        group.prompt_token_ids for group in batch.groups
    ]
    assert told.groups[1].expected_tokens == 7
    assert told.groups[0].sampling == batch.sampling
    report = double.run_report()
    assert (report.step, report.phase) == (2, bubble_pb2.RUN_PHASE_ROLLOUT)
    assert list(report.hint_ids) == list(double.hints)
    assert gateway.metric("hinted_samples") == 12


async def test_a_hint_survives_the_gateway_and_is_dropped_when_its_step_begins(cluster: Cluster) -> None:
    double = await coordinator(cluster)
    gateway = await cluster.gateway()
    fake = await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    batch, following = make_batch(), make_batch()
    following.step = 4
    for request in (batch, following):
        await hint(gateway, make_hint(request))
    await until(lambda: len(double.hints) == 2, "both hints are known")
    before = set(double.hints)
    await gateway.kill()
    double.told.clear()
    double.hints.clear()
    gateway = await cluster.gateway()
    await until(lambda: len(double.hints) == 2, "the next gateway tells both")
    assert set(double.hints) == before
    await cluster.serving(gateway, 1)
    await gateway.trainer.submit(batch)
    check_samples(batch, await gateway.trainer.collect(batch))
    await until(lambda: len(double.run_report().hint_ids) == 1, "the hint of the step is dropped")
    assert double.run_report().hint_ids[0].startswith("4-")
    assert len(fake.accepted) == 12
    await until(lambda: _stored_steps(gateway), "the store has dropped it too")
    await gateway.kill()
    double.told.clear()
    gateway = await cluster.gateway()
    await until(lambda: double.told, "the third gateway tells what it knows")
    assert [each[:2] for each in double.run_report().hint_ids] == ["4-"]
    assert (double.run_report().step, double.run_report().phase) == (3, bubble_pb2.RUN_PHASE_UPDATE)


async def _stored_steps(gateway: RunningGateway) -> bool:
    (stored,) = await gateway.gateway.leadership.leading().hinting.store.load()
    return [each.step for each in stored.hints] == [4] and stored.begun == (3, 0)


async def test_hints_that_are_of_no_use_are_not_kept_and_are_no_error(cluster: Cluster) -> None:
    gateway = await cluster.gateway(max_hint_steps=1, max_hint_bytes=2000, max_queued_samples=100)
    await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    batch = make_batch()
    await gateway.trainer.submit(batch)
    assert await hint(gateway, make_hint(batch)) == 0
    assert await hint(gateway, make_hint(batch, step=2)) == 0
    assert await hint(gateway, make_hint(batch, step=5)) == 12
    assert await hint(gateway, make_hint(batch, step=6)) == 0
    assert await hint(gateway, make_hint(make_batch(groups=80, samples=1), step=4)) == 0
    assert await hint(gateway, make_hint(make_batch(groups=1, samples=4_000_000_000), step=4)) == 0
    outcomes = {name: gateway.metric("hints_total", outcome=name) for name in ("kept", "late", "far", "full")}
    assert outcomes == {"kept": 1, "late": 2, "far": 1, "full": 2}
    check_samples(batch, await gateway.trainer.collect(batch))


async def test_a_wrong_hint_is_refused_as_a_wrong_batch_is(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    wrong = make_hint(make_batch(), policy_version=77)
    wrong.groups[0].prompt_token_ids[0] = 5000
    wrong.groups[1].samples = 0
    wrong.sampling.temperature = -1
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await hint(gateway, wrong)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    fields = {each.field for each in details(error.value)["BadRequest"].field_violations}
    assert fields == {"groups[0].prompt_token_ids[0]", "groups[1].samples", "sampling.temperature"}
    assert gateway.metric("hinted_samples") == 0


async def test_the_coordinator_sees_the_phases_of_a_step_in_order(cluster: Cluster, tmp_path: Path) -> None:
    double = await coordinator(cluster)
    gateway = await cluster.gateway()
    fake = await cluster.instance("i0")
    fake.hold_at = 3
    await cluster.serving(gateway, 1)
    batch = make_batch(ignore_eos=True)
    await gateway.trainer.submit(batch)
    await until(
        lambda: (double.run_report().unfinished, double.run_report().waiting) == (12, 0),
        "all samples are placed",
    )
    assert (double.run_report().step, double.run_report().policy_version) == (3, 0)
    fake.hold_at = None
    await gateway.trainer.collect(batch)
    await until(lambda: double.phases() == ["ROLLOUT", "UPDATE"], "the step is over")
    assert double.run_report().unfinished == 0
    update_id = await update(gateway, tmp_path, 1)
    fake.apply_gate.clear()
    finishing = gateway.trainer.weights.FinishUpdate(
        weight_pb2.FinishUpdateRequest(update_id=update_id), timeout=CALL
    )
    await until(lambda: double.phases()[-1] == "APPLYING", "the weights are being applied")
    assert double.run_report().policy_version == 0
    fake.apply_gate.set()
    await finishing
    await until(lambda: double.phases()[-1] == "ROLLOUT", "the next step may begin")
    assert (double.run_report().policy_version, double.run_report().step) == (1, 3)
    following = make_batch(version=1)
    following.step = 4
    await gateway.trainer.submit(following)
    await gateway.trainer.collect(following)
    await until(
        lambda: double.run_report().step == 4 and double.phases()[-1] == "UPDATE", "the next step is over"
    )
    assert double.phases() == ["ROLLOUT", "UPDATE", "APPLYING", "ROLLOUT", "UPDATE"]


async def test_samples_without_an_instance_are_told_at_once(cluster: Cluster) -> None:
    double = await coordinator(cluster)
    gateway = await cluster.gateway(room_factor=1.0)
    fake = await cluster.instance("i0", max_running=5)
    fake.hold_at = 3
    await cluster.serving(gateway, 1)
    batch = make_batch(ignore_eos=True)
    await gateway.trainer.submit(batch)
    await until(lambda: double.run_report().waiting == 7, "seven wait")
    call = rollout_pb2.CancelRolloutsRequest(run_id="run", batch_id=batch.batch_id)
    await gateway.trainer.rollouts.CancelRollouts(call, timeout=CALL)
    await until(lambda: double.phases() == ["ROLLOUT", "UPDATE"], "a cancelled step is over")
    # A single sample belongs to no run, and comes before pre-generation all the same.
    fake.refuse_with = grpc.StatusCode.RESOURCE_EXHAUSTED
    single = gateway.trainer.rollouts.Generate(
        rollout_pb2.GenerateRequest(
            prompt_id="p0", prompt_token_ids=[1], sampling=sample_pb2.SamplingParams(max_tokens=2)
        ),
        timeout=CALL,
    )
    await until(lambda: double.run_report().waiting == 1, "it waits")
    assert double.run_report().unfinished == 0
    fake.refuse_with, fake.hold_at = None, None
    assert [event async for event in single]
    await until(lambda: double.run_report().waiting == 0, "it waits no more")


async def test_a_run_report_is_repeated_every_second(cluster: Cluster) -> None:
    double = await coordinator(cluster)
    gateway = await cluster.gateway()
    await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    await hint(gateway, make_hint(make_batch()))
    await until(lambda: len(double.told) >= 3, "it was told thrice")
    assert len({each.SerializeToString() for each in double.told}) == 1


@pytest.mark.parametrize("opened", [False, True], ids=["submitted", "opened"])
async def test_samples_are_placed_by_the_work_that_their_drafts_leave(cluster: Cluster, opened: bool) -> None:
    double = await coordinator(cluster)
    gateway = await cluster.gateway(affinity_slack=0.0, draft_cost=0.1, coverage_timeout_seconds=CALL)
    fakes = [await cluster.instance(name) for name in ("i0", "i1")]
    for fake in fakes:
        fake.hold_at = 1
    await cluster.serving(gateway, 2)
    batch = make_batch(groups=2, samples=4, max_tokens=400, ignore_eos=True)
    for group in batch.groups:
        group.expected_tokens = 100
    await hint(gateway, make_hint(batch))
    await until(lambda: double.run_report().hint_ids, "the coordinator has the hint")
    # All of p0 is there already, and one sample of p1 is a straggler.
    double.coverage = [
        bubble_pb2.SlotCoverage(prompt_id="p0", slot=slot, tokens=100, finished=True) for slot in range(4)
    ]
    double.coverage.append(bubble_pb2.SlotCoverage(prompt_id="p1", slot=2, tokens=3900, finished=False))
    await hand_in(gateway, batch, opened=opened)
    await until(lambda: sum(len(fake.accepted) for fake in fakes) == 8, "all are placed")
    (asked,) = double.asked
    assert (asked.run_id, asked.step) == ("run", 3)
    given = [[(item.prompt_id, item.slot) for item in fake.accepted] for fake in fakes]
    with_straggler = next(keys for keys in given if ("p1", 2) in keys)
    assert with_straggler[0] == ("p1", 2), "the longest comes first"
    alone = {("p1", slot) for slot in (0, 1, 3)}
    assert alone <= set(next(keys for keys in given if keys is not with_straggler))
    for fake in fakes:
        fake.hold_at = None
    await gateway.trainer.collect(batch)
    await until(lambda: gateway.metric("announced_step_tokens_total") == 8 * 400, "the step is counted")
    # The straggler's draft is longer than the sample: its 400 tokens count.
    assert gateway.metric("pregenerated_tokens_total") == 800
    assert gateway.metric("step_coverage_ratio") == pytest.approx(800 / 3200)
    assert gateway.metric("unannounced_steps_total") == 0
    assert gateway.metric("bubble_seconds_count") == 2


async def test_a_batch_that_was_not_hinted_asks_nobody(cluster: Cluster) -> None:
    double = await coordinator(cluster)
    gateway = await cluster.gateway()
    await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    await until(
        lambda: gateway.gateway.leadership.leading().coordinator.connections, "the coordinator is found"
    )
    batch = make_batch()
    await gateway.trainer.submit(batch)
    await gateway.trainer.collect(batch)
    assert double.asked == []
    await until(lambda: gateway.metric("unannounced_steps_total") == 1, "the step is counted")
    assert gateway.metric("announced_step_tokens_total") == 0


@pytest.mark.parametrize("fault", ["absent", "dead", "hangs", "fails", "refuses"])
async def test_a_coordinator_that_is_of_no_use_is_harmless(cluster: Cluster, fault: str) -> None:
    double = None if fault == "absent" else await coordinator(cluster)
    gateway = await cluster.gateway()
    await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    if double is not None:
        await until(lambda: gateway.gateway.leadership.leading().coordinator.connections, "it is found")
    if double is not None and fault == "dead":
        await double.kill()
    elif double is not None and fault == "hangs":
        double.gate.clear()
    elif double is not None and fault == "fails":
        double.error = Unavailable("not well")
    elif double is not None:
        double.error = InvalidArgument([Violation("run_id", "is not liked")])
    for step in (3, 4, 5):
        batch = make_batch()
        batch.step = step
        assert await hint(gateway, make_hint(batch)) == 12
        await gateway.trainer.submit(batch)
        check_samples(batch, await gateway.trainer.collect(batch))
    assert gateway.gateway.leadership.term is not None, "it still leads"


async def test_a_coordinator_that_comes_later_or_comes_back_is_told_all(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    await hint(gateway, make_hint(make_batch()))
    first = await coordinator(cluster)
    await until(lambda: first.hints, "the first one has the hint")
    await first.kill()
    second = await coordinator(cluster)
    await until(lambda: second.hints, "one under the same name has it")
    third = await coordinator(cluster, "bubbles-1")
    await until(lambda: third.hints, "the youngest of two has it")
    assert third.hints == second.hints
    third.hints.clear()
    await until(lambda: third.hints, "what it lost it is given again")


async def test_a_run_that_nothing_is_heard_of_is_closed(cluster: Cluster) -> None:
    double = await coordinator(cluster)
    gateway = await cluster.gateway(run_idle_seconds=4.0)
    await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    # Found before: a run that is forgotten before it was reported is never closed.
    await until(lambda: gateway.gateway.leadership.leading().coordinator.connections, "it is found")
    await hint(gateway, make_hint(make_batch()))
    await until(lambda: double.run_report().closed, "it is closed")
    assert gateway.gateway.leadership.leading().hinting.book.runs == {}
    store = gateway.gateway.leadership.leading().hinting.store
    await until(lambda: _is_empty(store), "the store has forgotten it")


async def _is_empty(store: Any) -> bool:
    return await store.load() == []
