"""Weight updates: four phases, one version in the fleet, and whoever fails is left behind."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from paceline.errors import Violation
from paceline.times import STEP_PARTS
from paceline.v1 import fleet_pb2, rollout_pb2, weight_pb2
from services.contracts.errors import DataLoss, InvalidArgument, ServiceError
from services.gateway.config import GatewayConfig
from services.gateway.state.update_book import UpdatePhase, WeightUpdate
from services.platform.redis.connection import connect
from tests.integration.gateway.conftest import (
    CALL,
    Cluster,
    RunningGateway,
    Trainer,
    check_samples,
    details,
    make_batch,
    until,
)


async def start(trainer: Trainer, version: int = 1, **fields: Any) -> weight_pb2.StartUpdateResponse:
    request = weight_pb2.StartUpdateRequest(
        run_id="run",
        policy_version=version,
        target=fields.get("target", weight_pb2.WEIGHT_TARGET_POLICY),
        transport=fields.get("transport", weight_pb2.WEIGHT_TRANSPORT_DISK),
    )
    return await trainer.weights.StartUpdate(request, timeout=CALL)


async def stage(trainer: Trainer, update_id: str, path: str = "/weights/1", delta: str = "") -> Any:
    disk = weight_pb2.DiskWeights(path=path, delta=delta)
    request = weight_pb2.UpdateWeightsRequest(update_id=update_id, disk=disk)
    return await trainer.weights.UpdateWeights(iter([request]), timeout=CALL)


async def finish(
    trainer: Trainer, update_id: str, in_flight: weight_pb2.InFlight = weight_pb2.IN_FLIGHT_UNSPECIFIED
) -> weight_pb2.FinishUpdateResponse:
    request = weight_pb2.FinishUpdateRequest(update_id=update_id, in_flight=in_flight)
    return await trainer.weights.FinishUpdate(request, timeout=CALL)


async def versions(trainer: Trainer) -> weight_pb2.GetVersionsResponse:
    return await trainer.weights.GetVersions(weight_pb2.GetVersionsRequest(), timeout=CALL)


async def update(trainer: Trainer, version: int = 1) -> weight_pb2.FinishUpdateResponse:
    update_id = (await start(trainer, version)).update_id
    await stage(trainer, update_id, f"/weights/{version}")
    return await finish(trainer, update_id)


async def refused(call: Any, code: str) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    assert error.value.code().name == code, error.value
    return error.value


async def states(gateway: RunningGateway) -> dict[str, str]:
    reply = await gateway.trainer.fleet.ListInstances(fleet_pb2.ListInstancesRequest(), timeout=CALL)
    return {
        each.instance_id: fleet_pb2.InstanceState.Name(each.state).removeprefix("INSTANCE_STATE_")
        for each in reply.instances
    }


async def test_an_update_is_applied_everywhere_and_published(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    fakes = [await cluster.instance(name) for name in ("i0", "i1")]
    await cluster.serving(gateway, 2)
    trainer = gateway.trainer
    started = await start(trainer)
    assert started.policy_version == 0
    staged = await stage(trainer, started.update_id)
    assert [each.applied for each in staged.instances] == [False, False]
    before = await versions(trainer)
    assert (before.policy_version, before.update_id) == (0, started.update_id)
    finished = await finish(trainer, started.update_id)
    assert finished.policy_version == 1
    assert [(i.instance_id, i.applied, i.policy_version, i.dropped_blocks) for i in finished.instances] == [
        ("i0", True, 1, 7),
        ("i1", True, 1, 7),
    ]
    assert await finish(trainer, started.update_id) == finished
    after = await versions(trainer)
    assert (after.policy_version, after.policy_path, after.update_id) == (1, "/weights/1", "")
    assert after.policy_checksum == "sha256:/weights/1"
    request = make_batch(version=1)
    await trainer.submit(request)
    check_samples(request, await trainer.collect(request))
    await refused(trainer.submit(make_batch(version=0)), "FAILED_PRECONDITION")
    assert [fake.applied for fake in fakes] == [[1], [1]]


async def test_metrics_say_what_the_time_of_a_step_went_to(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    trainer = gateway.trainer

    async def a_step(number: int) -> None:
        request = make_batch(version=number)
        request.step = number
        await trainer.submit(request)
        await trainer.collect(request)

    waits = ("trainer", "weights")

    def parts() -> dict[str, float]:
        return {part: gateway.metric("step_part_seconds_total", part=part) for part in (*STEP_PARTS, *waits)}

    await a_step(0)
    first = parts()
    assert min(first["queue"], first["prefill"], first["plain"]) > 0
    assert sum(first.values()) == pytest.approx(gateway.metric("step_seconds_sum"))
    assert (first["trainer"], first["weights"]) == (0, 0)
    await update(trainer)
    await a_step(1)
    second = parts()
    assert min(second[wait] for wait in waits) > 0
    assert gateway.metric("step_seconds_count") == 2
    parts_of_steps = sum(seconds for part, seconds in second.items() if part not in waits)
    assert parts_of_steps == pytest.approx(gateway.metric("step_seconds_sum"))


async def test_an_update_waits_for_the_samples_of_the_old_version(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    fake = await cluster.instance("i0")
    fake.hold_at = 5
    await cluster.serving(gateway, 1)
    trainer = gateway.trainer
    request = make_batch(ignore_eos=True)
    await trainer.submit(request)
    update_id = (await start(trainer)).update_id
    await stage(trainer, update_id)
    error = await refused(finish(trainer, update_id), "FAILED_PRECONDITION")
    assert details(error)["ErrorInfo"].metadata["unfinished"] == "12"
    assert fake.applied == []
    cancel = rollout_pb2.CancelRolloutsRequest(run_id="run", batch_id=request.batch_id, keep_partial=True)
    await trainer.rollouts.CancelRollouts(cancel, timeout=CALL)
    assert len(await trainer.collect(request)) == 12
    assert (await finish(trainer, update_id)).policy_version == 1


async def test_versions_only_go_up_and_one_update_at_a_time(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    trainer = gateway.trainer
    error = await refused(start(trainer, version=0), "FAILED_PRECONDITION")
    assert dict(details(error)["ErrorInfo"].metadata) == {"current": "0", "requested": "0"}
    first = await start(trainer)
    error = await refused(start(trainer, version=2), "FAILED_PRECONDITION")
    assert details(error)["ErrorInfo"].metadata["update_id"] == first.update_id
    await refused(finish(trainer, first.update_id), "FAILED_PRECONDITION")
    await refused(finish(trainer, "unknown"), "NOT_FOUND")
    abort = weight_pb2.AbortUpdateRequest(update_id=first.update_id)
    assert (await trainer.weights.AbortUpdate(abort, timeout=CALL)).policy_version == 0
    assert (await update(trainer, version=5)).policy_version == 5


async def test_an_abandoned_update_expires(cluster: Cluster) -> None:
    gateway = await cluster.gateway(update_timeout_seconds=4.0)
    fake = await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    first = await start(gateway.trainer)
    await stage(gateway.trainer, first.update_id)
    await until(lambda: fake.discarded == [1], "the staged weights are discarded")
    await until(lambda: gateway.metric("updates_total", outcome="abandoned") == 1, "it is counted")
    assert (await update(gateway.trainer)).policy_version == 1


@pytest.mark.parametrize(
    "error",
    [InvalidArgument([Violation("disk.path", "has NaN in lm_head.weight")]), DataLoss("wrong checksum")],
    ids=["nan", "checksum"],
)
async def test_weights_that_one_instance_finds_wrong_are_discarded_everywhere(
    cluster: Cluster, error: ServiceError
) -> None:
    gateway = await cluster.gateway()
    fakes = [await cluster.instance(name) for name in ("i0", "i1")]
    await cluster.serving(gateway, 2)
    fakes[1].fail_stage = error
    update_id = (await start(gateway.trainer)).update_id
    raised = await refused(stage(gateway.trainer, update_id), error.code.name)
    assert error.message in (raised.details() or "")
    if isinstance(error, InvalidArgument):
        assert details(raised)["BadRequest"].field_violations[0].field == "disk.path"
    assert [fake.discarded for fake in fakes] == [[1], [1]]
    request = make_batch()
    await gateway.trainer.submit(request)
    check_samples(request, await gateway.trainer.collect(request))
    fakes[1].fail_stage = None
    await stage(gateway.trainer, update_id)
    assert (await finish(gateway.trainer, update_id)).policy_version == 1


async def test_an_instance_that_fails_to_apply_is_left_behind_and_brought_up_later(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    fakes = [await cluster.instance(name) for name in ("i0", "i1")]
    await cluster.serving(gateway, 2)
    fakes[0].fail_apply = ServiceError("the engine broke", code=grpc.StatusCode.INTERNAL)
    finished = await update(gateway.trainer)
    results = {each.instance_id: each for each in finished.instances}
    assert finished.policy_version == 1
    assert (results["i0"].applied, results["i0"].error) == (False, "INTERNAL: the engine broke")
    assert results["i1"].applied
    request = make_batch(version=1)
    await gateway.trainer.submit(request)
    check_samples(request, await gateway.trainer.collect(request))
    assert fakes[0].accepted == []
    assert (await states(gateway))["i0"] == "STALE"
    fakes[0].fail_apply = None
    await cluster.serving(gateway, 2)
    assert fakes[0].version == 1
    assert await states(gateway) == {"i0": "SERVING", "i1": "SERVING"}


async def test_an_instance_that_dies_while_applying_blocks_nobody(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    fakes = [await cluster.instance(name) for name in ("i0", "i1")]
    await cluster.serving(gateway, 2)
    fakes[0].apply_gate.clear()
    update_id = (await start(gateway.trainer)).update_id
    await stage(gateway.trainer, update_id)
    finishing = asyncio.create_task(finish(gateway.trainer, update_id))
    await until(lambda: fakes[1].version == 1, "the other has applied")
    error = await refused(gateway.trainer.submit(make_batch(version=1)), "FAILED_PRECONDITION")
    assert details(error)["ErrorInfo"].reason == "UPDATE_APPLYING"
    assert (await versions(gateway.trainer)).policy_version == 0
    await fakes[0].kill()
    finished = await finishing
    assert {each.instance_id: each.applied for each in finished.instances} == {"i0": False, "i1": True}
    request = make_batch(version=1)
    await gateway.trainer.submit(request)
    check_samples(request, await gateway.trainer.collect(request))


async def test_an_instance_frozen_while_applying_does_not_block_longer_than_its_heartbeat(
    cluster: Cluster,
) -> None:
    gateway = await cluster.gateway(apply_timeout_seconds=600)
    fakes = [await cluster.instance(name) for name in ("i0", "i1")]
    await cluster.serving(gateway, 2)
    update_id = (await start(gateway.trainer)).update_id
    await stage(gateway.trainer, update_id)
    fakes[0].apply_gate.clear()
    fakes[0].freeze()
    finished = await finish(gateway.trainer, update_id)
    assert {each.instance_id: each.applied for each in finished.instances} == {"i0": False, "i1": True}


async def test_when_nobody_applies_nothing_is_published(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    fake = await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    fake.fail_apply = ServiceError("the engine broke", code=grpc.StatusCode.INTERNAL)
    update_id = (await start(gateway.trainer)).update_id
    await stage(gateway.trainer, update_id)
    await refused(finish(gateway.trainer, update_id), "FAILED_PRECONDITION")
    now = await versions(gateway.trainer)
    assert (now.policy_version, now.update_id) == (0, "")
    assert await states(gateway) == {"i0": "STALE"}
    # Nobody knows what it has, so it takes no work until an update succeeds.
    await refused(gateway.trainer.submit(make_batch()), "UNAVAILABLE")
    fake.fail_apply = None
    assert (await update(gateway.trainer, version=2)).policy_version == 2
    request = make_batch(version=2)
    await gateway.trainer.submit(request)
    check_samples(request, await gateway.trainer.collect(request))


async def test_an_instance_with_another_version_gets_no_work_until_it_has_been_brought_up(
    cluster: Cluster,
) -> None:
    gateway = await cluster.gateway()
    await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    await update(gateway.trainer)
    late = await cluster.instance("late")
    late.stage_gate.clear()
    await until(lambda: _is(gateway, "late", "STALE"), "the newcomer is seen")
    request = make_batch(version=1)
    await gateway.trainer.submit(request)
    check_samples(request, await gateway.trainer.collect(request))
    assert late.accepted == []
    late.stage_gate.set()
    await cluster.serving(gateway, 2)
    assert late.version == 1
    again = make_batch(version=1, groups=8, samples=8)
    await gateway.trainer.submit(again)
    check_samples(again, await gateway.trainer.collect(again))
    assert late.accepted != []


async def test_a_restarted_instance_serves_after_it_has_the_current_weights(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    fakes = [await cluster.instance(name) for name in ("i0", "i1")]
    await cluster.serving(gateway, 2)
    await update(gateway.trainer)
    await fakes[0].kill()
    await cluster.serving(gateway, 1)
    reborn = await cluster.instance("i0")
    await cluster.serving(gateway, 2)
    assert reborn.applied == [1]


async def test_a_frozen_instance_that_wakes_is_updated_before_it_serves(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    fakes = [await cluster.instance(name) for name in ("i0", "i1")]
    await cluster.serving(gateway, 2)
    await update(gateway.trainer, 1)
    fakes[0].freeze()
    await cluster.serving(gateway, 1)
    await update(gateway.trainer, 2)
    fakes[0].unfreeze()
    await cluster.serving(gateway, 2)
    assert fakes[0].applied == [1, 2]


async def test_the_published_version_survives_a_restart(cluster: Cluster) -> None:
    first = await cluster.gateway()
    await cluster.instance("i0")
    await cluster.serving(first, 1)
    await update(first.trainer)
    await first.kill()
    second = await cluster.gateway()
    await cluster.serving(second, 1)
    now = await versions(second.trainer)
    assert (now.policy_version, now.policy_path) == (1, "/weights/1")
    request = make_batch(version=1)
    await second.trainer.submit(request)
    check_samples(request, await second.trainer.collect(request))


async def test_an_update_cut_off_while_applying_is_finished_by_the_next_gateway(cluster: Cluster) -> None:
    fakes = [await cluster.instance("i0", version=1), await cluster.instance("i1")]
    # What a gateway leaves that dies when one of two instances has applied.
    redis = connect(GatewayConfig(redis_url=cluster.redis_url))
    left = WeightUpdate("u1", "run", 1, UpdatePhase.APPLYING, 0.0, "/weights/1", "")
    await redis.set(f"{cluster.namespace}:{{gateway}}:update", left.to_json())
    await redis.aclose()
    gateway = await cluster.gateway()
    await cluster.serving(gateway, 2)
    assert [fake.version for fake in fakes] == [1, 1]
    assert (await versions(gateway.trainer)).policy_version == 1
    assert (await finish(gateway.trainer, "u1")).policy_version == 1


async def test_weights_that_are_staged_outlive_the_gateway(cluster: Cluster) -> None:
    first = await cluster.gateway()
    fakes = [await cluster.instance(name) for name in ("i0", "i1")]
    await cluster.serving(first, 2)
    update_id = (await start(first.trainer)).update_id
    await stage(first.trainer, update_id)
    await first.kill()
    # One has lost them meanwhile, and is given them afterwards.
    await fakes[0].kill()
    second = await cluster.gateway()
    await cluster.serving(second, 1)
    finished = await finish(second.trainer, update_id)
    assert [(each.instance_id, each.applied) for each in finished.instances] == [("i1", True)]
    reborn = await cluster.instance("i0")
    await cluster.serving(second, 2)
    assert (fakes[1].applied, reborn.applied) == ([1], [1])


async def test_other_weights_that_an_instance_has_staged_are_not_those_of_the_update(
    cluster: Cluster,
) -> None:
    first = await cluster.gateway()
    fake = await cluster.instance("i0")
    await cluster.serving(first, 1)
    update_id = (await start(first.trainer)).update_id
    await stage(first.trainer, update_id)
    await first.kill()
    # Of an update that was given up while the instance did not answer.
    fake.staged = (1, "/weights/other")
    second = await cluster.gateway()
    await cluster.serving(second, 1)
    error = await refused(finish(second.trainer, update_id), "FAILED_PRECONDITION")
    assert details(error)["ErrorInfo"].reason == "WEIGHTS_NOT_STAGED"
    await stage(second.trainer, update_id)
    assert (await finish(second.trainer, update_id)).policy_version == 1
    assert fake.applied == [1]


async def test_what_is_not_served_yet_is_refused_with_a_way_out(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    error = await refused(start(gateway.trainer, target=weight_pb2.WEIGHT_TARGET_DRAFTER), "UNIMPLEMENTED")
    assert "not supported yet" in (error.details() or "")
    device = start(gateway.trainer, transport=weight_pb2.WEIGHT_TRANSPORT_DEVICE)
    error = await refused(device, "UNIMPLEMENTED")
    assert "use transport STREAM" in (error.details() or "")
    assert (await versions(gateway.trainer)).update_id == ""


async def test_a_version_that_was_pushed_to_the_instances_is_had_from_them(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    fakes = [await cluster.instance(name) for name in ("i0", "i1")]
    await cluster.serving(gateway, 2)
    started = await start(gateway.trainer, transport=weight_pb2.WEIGHT_TRANSPORT_STREAM)
    assert started.stream.instance_id in ("i0", "i1")
    error = await refused(stage(gateway.trainer, started.update_id), "INVALID_ARGUMENT")
    assert "STREAM" in (error.details() or "")
    streamed = weight_pb2.StreamedWeights(checksum="sha256:")
    request = weight_pb2.UpdateWeightsRequest(update_id=started.update_id, streamed=streamed)
    await gateway.trainer.weights.UpdateWeights(iter([request]), timeout=CALL)
    finished = await finish(gateway.trainer, started.update_id)
    assert [each.applied for each in finished.instances] == [True, True]
    (first, last) = sorted((fake.peers[-1] for fake in fakes), key=lambda peers: len(peers.peers))
    assert (list(first.peers), first.has_successor) == ([], True)
    assert (list(last.peers), last.has_successor) == ([started.stream.address], False)
    assert first.ticket == last.ticket == started.stream.ticket
    # The next leader knows where it is, too.
    await gateway.kill()
    successor = await cluster.gateway()
    await cluster.serving(successor, 2)
    late = await cluster.instance("late")
    await cluster.serving(successor, 3)
    assert (await versions(successor.trainer)).policy_version == 1
    (source,) = late.peers
    assert set(source.peers) == {fake.address for fake in fakes}
    assert (source.ticket, source.checksum, source.update_id) == ("", "sha256:", started.update_id)


async def test_an_unknown_treatment_of_samples_in_flight_is_refused(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    update_id = (await start(gateway.trainer)).update_id
    await stage(gateway.trainer, update_id)
    unknown: Any = 7
    error = await refused(finish(gateway.trainer, update_id, unknown), "INVALID_ARGUMENT")
    assert "in_flight" in (error.details() or "")
    assert (await versions(gateway.trainer)).policy_version == 0
    assert (await finish(gateway.trainer, update_id)).policy_version == 1, "refused is not dropped"


async def test_a_path_that_is_relative_or_leads_out_of_the_root_is_refused(cluster: Cluster) -> None:
    gateway = await cluster.gateway(weights_root="/weights")
    await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    update_id = (await start(gateway.trainer)).update_id
    for path in ("weights", "/weights/../etc", "/weights-of-others/v1", ""):
        error = await refused(stage(gateway.trainer, update_id, path), "INVALID_ARGUMENT")
        (violation,) = details(error)["BadRequest"].field_violations
        assert violation.field == "disk.path"
        assert ("weights_root, '/weights'" in violation.description) == path.startswith("/")
    for delta in ("delta", "/weights/../etc"):
        outside = stage(gateway.trainer, update_id, "/weights/run/v1", delta)
        (violation,) = details(await refused(outside, "INVALID_ARGUMENT"))["BadRequest"].field_violations
        assert violation.field == "disk.delta"
    await stage(gateway.trainer, update_id, "/weights/run/v1", "/weights/run/delta-1")


async def test_pause_and_resume_lose_nothing(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    fake = await cluster.instance("i0")
    fake.hold_at = 4
    await cluster.serving(gateway, 1)
    request = make_batch(ignore_eos=True)
    await gateway.trainer.submit(request)
    await until(lambda: [s.length for s in fake.running()] == [4] * 12, "all are held")
    paused = await gateway.trainer.fleet.Pause(fleet_pb2.PauseRequest(), timeout=CALL)
    assert list(paused.instance_ids) == ["i0"]
    assert await states(gateway) == {"i0": "PAUSED"}
    fake.hold_at = None
    waiting = make_batch()
    await gateway.trainer.submit(waiting)
    await gateway.trainer.fleet.Resume(fleet_pb2.ResumeRequest(), timeout=CALL)
    check_samples(request, await gateway.trainer.collect(request))
    check_samples(waiting, await gateway.trainer.collect(waiting))
    await refused(
        gateway.trainer.fleet.Pause(fleet_pb2.PauseRequest(instance_ids=["i9"]), timeout=CALL), "NOT_FOUND"
    )


async def test_watchers_see_instances_come_and_go(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    watch = gateway.trainer.fleet.WatchFleet(fleet_pb2.WatchFleetRequest(), timeout=CALL)
    assert list((await watch.read()).instances) == []
    fake = await cluster.instance("i0")
    await _seen(watch, fleet_pb2.INSTANCE_STATE_SERVING)
    await fake.kill()
    await _seen(watch, fleet_pb2.INSTANCE_STATE_DEAD)


async def _seen(watch: Any, state: fleet_pb2.InstanceState) -> None:
    async with asyncio.timeout(CALL):
        while [each.state for each in (await watch.read()).instances] != [state]:
            pass


async def _is(gateway: RunningGateway, instance_id: str, state: str) -> bool:
    return (await states(gateway)).get(instance_id) == state
