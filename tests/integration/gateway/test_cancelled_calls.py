"""Every public RPC is cancelled at each of its waits and made again: it succeeds, and nothing else stays."""

from __future__ import annotations

import asyncio
import gc
import importlib
import pkgutil
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from prometheus_client import CollectorRegistry

import paceline.v1
from paceline.internal.v1 import drafter_pb2, drafter_pb2_grpc
from paceline.v1 import (
    fleet_pb2,
    knobs_pb2,
    rollout_pb2,
    weight_pb2,
    weight_stream_pb2,
    weight_stream_pb2_grpc,
)
from paceline.weights import safetensors
from paceline.weights.pieces import cut
from services.gateway.feeds.learner import SERVICE as LEARNER
from services.platform.config import ServiceConfig
from services.platform.grpc.server import GrpcServer
from services.platform.redis.connection import Keys, connect
from services.platform.redis.registry import InstanceRecord, Registration
from services.platform.service import LEADING
from services.platform.tasks import end
from services.policy.config import PolicyConfig
from services.policy.process import PolicyProcess
from tests.integration.gateway.conftest import CALL, Cluster, RunningGateway, check_samples, make_batch, until
from tests.integration.gateway.test_open_batches import opening
from tests.support.fake_instance import FakeInstance
from tests.support.held_calls import HeldCall, HeldCalls
from tests.unit.gateway.stream_fleet import NEW, STREAM, Tensors, stream_fleet

RUN = "run"
MOST_WAITS = 64
"""Waits of a call beyond which the table would be wrong."""


def public_methods() -> dict[str, MethodDescriptor]:
    """Return the methods of every service of paceline.v1, by their names."""
    names = [f"paceline.v1.{each.name}" for each in pkgutil.iter_modules(paceline.v1.__path__)]
    modules = [importlib.import_module(name) for name in names if name.endswith("_pb2")]
    services = [service for each in modules for service in each.DESCRIPTOR.services_by_name.values()]
    methods = [method for service in services for method in service.methods]
    assert len({method.name for method in methods}) == len(methods)
    return {method.name: method for method in methods}


METHODS = public_methods()


WITHOUT_WAITS = {"ListBatches", "GetVersions", "ListInstances"}
"""Methods whose handler answers at once."""


GRPC_LISTENERS = {"AioServer._request_call", "AioServer._request_registered_call"}
"""Tasks in which a gRPC server waits for the next call."""


PASSED_ON = {"GetKnobs", "SetKnobs", "GetDrafter", "RollBackDrafter"}
"""Methods that another service answers."""


@dataclass
class World:
    """A gateway with two instances, and what of it must be as it was."""

    gateway: RunningGateway
    fakes: list[FakeInstance]
    batches: list[rollout_pb2.SubmitRolloutsRequest] = field(default_factory=list)

    @property
    def term(self) -> Any:
        return self.gateway.gateway.leadership.term

    def call(self, name: str, request: Any) -> Any:
        """Make a call, of which the answer is to be awaited or read."""
        service = METHODS[name].containing_service.name
        stubs = {"RolloutService": "rollouts", "WeightService": "weights", "FleetService": "fleet"}
        method = getattr(getattr(self.gateway.trainer, stubs[service]), name)
        return method(iter([request]) if METHODS[name].client_streaming else request, timeout=CALL)

    async def get(self, name: str, request: Any) -> Any:
        return await self.call(name, request)

    async def submitted(self, **fields: Any) -> rollout_pb2.SubmitRolloutsRequest:
        request = make_batch(1, 2, version=self.term.book.version, **fields)
        await self.get("SubmitRollouts", request)
        return request

    async def opened(self) -> rollout_pb2.SubmitRolloutsRequest:
        """Open the batch of a request, whose groups are not added."""
        request = make_batch(1, 2)
        await self.get("OpenBatch", opening(request))
        return request

    async def started(self, **fields: Any) -> weight_pb2.StartUpdateResponse:
        return await self.get("StartUpdate", start_request(self, **fields))

    async def staged(self) -> str:
        update_id = (await self.started()).update_id
        await self.get("UpdateWeights", disk(update_id))
        return update_id

    async def collected(self, request: rollout_pb2.SubmitRolloutsRequest) -> None:
        """Check that all samples of a batch come, as if nothing had happened."""
        check_samples(request, await self.gateway.trainer.collect(request))

    def left(self) -> list[str]:
        """Return what is still there that belongs to a call, an update or a batch."""
        gc.collect()
        term, found = self.term, list[str]()
        staging = term.updater._staging._current
        found += ["a staging"] if staging is not None and not staging.running else []
        found += ["the lock of updates"] if term.updater._lock.locked() else []
        found += ["a task of an update"] if term.updater._tasks else []
        found += [f"the lock of {key}" for key in term.recovery._locks]
        found += ["reserved samples"] if not term.batches.by_key and term.batches.unfinished else []
        return found


Prepare = Callable[[World], Awaitable[Any]]
Check = Callable[[World, Any, Any], Awaitable[None]]


@dataclass(frozen=True)
class Row:
    """An RPC in one setting: what comes before, and what must be so once it was made again."""

    method: str
    prepare: Prepare
    check: Check
    setting: str = ""
    gate: Callable[[World], asyncio.Event] | None = None
    """Closed until the call is cancelled, so that the last of its `waits` is for an instance."""
    waits: int = 0
    """Waits of a call that does not end by itself."""

    def __str__(self) -> str:
        return f"{self.method}{'-' if self.setting else ''}{self.setting}"


def start_request(world: World, push_id: str = "", transport: int = 1) -> weight_pb2.StartUpdateRequest:
    return weight_pb2.StartUpdateRequest(
        run_id=RUN,
        policy_version=world.term.book.version + 1,
        target=weight_pb2.WEIGHT_TARGET_POLICY,
        transport=weight_pb2.WeightTransport.Name(transport),
        push_id=push_id,
    )


def disk(update_id: str) -> weight_pb2.UpdateWeightsRequest:
    return weight_pb2.UpdateWeightsRequest(update_id=update_id, disk=weight_pb2.DiskWeights(path="/weights"))


def streamed(update_id: str) -> weight_pb2.UpdateWeightsRequest:
    return weight_pb2.UpdateWeightsRequest(update_id=update_id, streamed=weight_pb2.StreamedWeights())


def name_of(request: Any, message: Any, **fields: Any) -> Any:
    """Return a request of this kind about the batch of another one."""
    return message(run_id=request.run_id, batch_id=request.batch_id, **fields)


def from_redis(prepare: Prepare) -> Prepare:
    """Let the gateway have forgotten the batch, so that it looks for it in Redis."""

    async def prepare_and_forget(world: World) -> Any:
        request = await prepare(world)
        world.term.recovery.records.forget((request.run_id, request.batch_id))
        return request

    return prepare_and_forget


# What is prepared, and what must be so ------------------------------------------------------------------


async def a_batch(world: World) -> Any:
    return make_batch(1, 2)


async def comes_back(world: World, request: Any, reply: Any) -> None:
    await world.collected(request)


async def to_open(world: World) -> Any:
    return opening(make_batch(1, 2))


async def is_open(world: World, request: Any, reply: Any) -> None:
    closed = await world.get("CloseBatch", name_of(request, rollout_pb2.CloseBatchRequest))
    assert (closed.total, closed.already_closed) == (0, False)


async def to_add(world: World) -> Any:
    request = await world.opened()
    world.batches.append(request)
    return name_of(request, rollout_pb2.AddSamplesRequest, groups=request.groups)


async def is_added_once(world: World, request: Any, reply: Any) -> None:
    assert reply.total == 2
    batch = world.batches[-1]
    await world.get("CloseBatch", name_of(batch, rollout_pb2.CloseBatchRequest))
    await world.collected(batch)


async def to_close(world: World) -> Any:
    add = await to_add(world)
    await world.get("AddSamples", add)
    return name_of(add, rollout_pb2.CloseBatchRequest)


async def is_closed(world: World, request: Any, reply: Any) -> None:
    assert reply.total == 2
    await world.collected(world.batches[-1])


async def a_call(world: World) -> Any:
    """Return the answer to the first call of a sample whose every token is one."""
    request = make_batch(1, 1, max_tokens=3, ignore_eos=True)
    request.tools.call_token_ids.extend(range(1, 1000))
    request.tools.max_calls = 1
    await world.get("SubmitRollouts", request)
    events = world.gateway.trainer.events(request)
    async for event in events:
        if event.calls:
            break
    events.cancel()
    world.batches.append(request)
    (call,) = event.calls
    named = {"prompt_id": call.prompt_id, "slot": call.slot, "position": 1}
    going_on = rollout_pb2.Continuation(**named, token_ids=[7])
    return name_of(request, rollout_pb2.ContinueSamplesRequest, continuations=[going_on])


async def goes_on_once(world: World, request: Any, reply: Any) -> None:
    (event,) = await world.gateway.trainer.collect(world.batches[-1])
    given = [(span.begin, span.end) for span in event.sample.environment_spans]
    assert given == [(1, 2)]


async def a_stream(world: World) -> Any:
    return name_of(await world.submitted(), rollout_pb2.StreamRolloutsRequest)


async def to_stream_again(world: World) -> Any:
    return name_of(await to_get(world), rollout_pb2.StreamRolloutsRequest)


async def has_all(world: World, request: Any, reply: Any) -> None:
    assert sum(event.HasField("sample") + len(event.earlier) for event in reply) == 2


async def to_acknowledge(world: World) -> Any:
    request = await world.submitted()
    events = await world.gateway.trainer.collect(request)
    return name_of(request, rollout_pb2.AckRolloutsRequest, cursor=events[-1].cursor)


async def is_let_go(world: World, request: Any, reply: Any) -> None:
    stream = world.call("StreamRollouts", name_of(request, rollout_pb2.StreamRolloutsRequest))
    with pytest.raises(grpc.aio.AioRpcError, match="were acknowledged"):
        await stream.read()


async def a_single(world: World) -> Any:
    batch = make_batch()
    return rollout_pb2.GenerateRequest(
        run_id=RUN, prompt_id="p", prompt_token_ids=[1, 2], sampling=batch.sampling, run_seed=3
    )


async def is_whole(world: World, request: Any, reply: Any) -> None:
    assert reply[-1].sample.tokens.token_ids
    assert not world.term.batches.by_key


async def to_cancel(world: World) -> Any:
    for fake in world.fakes:
        fake.hold_at = 5
    request = await world.submitted(ignore_eos=True)
    world.batches.append(request)
    return name_of(request, rollout_pb2.CancelRolloutsRequest)


async def is_cancelled(world: World, request: Any, reply: Any) -> None:
    events = await world.gateway.trainer.collect(world.batches[-1])
    assert len(events) == 2
    for fake in world.fakes:
        fake.hold_at = None


async def a_hint(world: World) -> Any:
    batch = make_batch(1, 2)
    groups = [rollout_pb2.Group(prompt_id="p", prompt_token_ids=[1, 2], samples=2)]
    return rollout_pb2.HintNextBatchRequest(run_id=RUN, step=5, groups=groups, sampling=batch.sampling)


async def is_hinted(world: World, request: Any, reply: Any) -> None:
    assert reply.samples == 2
    await world.get("EndRun", rollout_pb2.EndRunRequest(run_id=RUN))


async def a_report(world: World) -> Any:
    request = await world.submitted()
    await world.gateway.trainer.collect(request)
    reward = rollout_pb2.Reward(prompt_id="p0", reward=1.0)
    return name_of(request, rollout_pb2.ReportRewardsRequest, rewards=[reward])


async def is_matched(world: World, request: Any, reply: Any) -> None:
    assert reply.matched == 1


async def to_get(world: World) -> Any:
    request = await world.submitted()
    await world.collected(request)
    world.batches.append(request)
    return name_of(request, rollout_pb2.GetBatchRequest)


async def is_known(world: World, request: Any, reply: Any) -> None:
    assert reply.batch.total == 2
    await world.collected(world.batches[-1])


async def to_list(world: World) -> Any:
    world.batches.append(await world.submitted())
    return rollout_pb2.ListBatchesRequest()


async def is_listed(world: World, request: Any, reply: Any) -> None:
    assert world.batches[-1].batch_id in [each.batch_id for each in reply.batches]
    await world.collected(world.batches[-1])


async def a_run(world: World) -> Any:
    await to_cancel(world)
    return rollout_pb2.EndRunRequest(run_id=RUN)


async def is_ended(world: World, request: Any, reply: Any) -> None:
    assert not world.term.batches.by_key
    for fake in world.fakes:
        fake.hold_at = None


def to_start(transport: int) -> Prepare:
    async def prepare(world: World) -> Any:
        return start_request(world, "push", transport)

    return prepare


async def is_started(world: World, request: Any, reply: Any) -> None:
    assert world.term.book.active.update_id == reply.update_id
    await is_abandoned(world, reply.update_id)


async def is_abandoned(world: World, update_id: str) -> None:
    await world.get("AbortUpdate", weight_pb2.AbortUpdateRequest(update_id=update_id))
    assert world.term.book.active is None
    await until(lambda: not any(fake.staged for fake in world.fakes), "nothing is staged")


def to_stage(transport: int) -> Prepare:
    async def prepare(world: World) -> Any:
        update_id = (await world.started(push_id="push", transport=transport)).update_id
        return disk(update_id) if transport == weight_pb2.WEIGHT_TRANSPORT_DISK else streamed(update_id)

    return prepare


async def is_staged(world: World, request: Any, reply: Any) -> None:
    assert len(reply.instances) == 2
    assert not any(each.error for each in reply.instances)
    await is_abandoned(world, request.update_id)


async def to_finish(world: World) -> Any:
    return weight_pb2.FinishUpdateRequest(update_id=await world.staged())


async def is_published(world: World, request: Any, reply: Any) -> None:
    assert {fake.version for fake in world.fakes} == {reply.policy_version}
    assert world.term.book.version == reply.policy_version
    await world.collected(await world.submitted())


async def to_abort(world: World) -> Any:
    return weight_pb2.AbortUpdateRequest(update_id=await world.staged())


async def is_aborted(world: World, request: Any, reply: Any) -> None:
    assert world.term.book.active is None
    assert not any(fake.staged for fake in world.fakes)
    await is_abandoned(world, (await world.started()).update_id)


def plain(request: Any) -> Prepare:
    async def prepare(world: World) -> Any:
        return request

    return prepare


async def answers(world: World, request: Any, reply: Any) -> None:
    assert reply


async def to_watch(world: World) -> Any:
    """Let there be a decision from the time on that is asked for."""
    request = fleet_pb2.WatchDecisionsRequest()
    request.since.GetCurrentTime()
    await world.get("FinishUpdate", await to_finish(world))
    return request


async def to_read_decisions(world: World) -> Any:
    return fleet_pb2.WatchDecisionsRequest(kept=True, since=(await to_watch(world)).since)


async def to_set_knobs(world: World) -> Any:
    """Return a change of the knobs as they are now."""
    found = await world.get("GetKnobs", fleet_pb2.GetKnobsRequest())
    changed = knobs_pb2.Knobs(mode="fixed", draft_cap=2 + found.revision % 2)
    return fleet_pb2.SetKnobsRequest(revision=found.revision, knobs=changed)


async def are_set(world: World, request: Any, reply: Any) -> None:
    assert reply.revision == request.revision + 1
    found = await world.get("GetKnobs", fleet_pb2.GetKnobsRequest())
    assert (found.revision, found.knobs.draft_cap) == (reply.revision, request.knobs.draft_cap)


async def is_paused(world: World, request: Any, reply: Any) -> None:
    assert all(fake.paused for fake in world.fakes)
    await goes_on(world, request, await world.get("Resume", fleet_pb2.ResumeRequest()))


async def to_resume(world: World) -> Any:
    await world.get("Pause", fleet_pb2.PauseRequest())
    return fleet_pb2.ResumeRequest()


async def goes_on(world: World, request: Any, reply: Any) -> None:
    assert not any(fake.paused or fake.draining for fake in world.fakes)
    await world.collected(await world.submitted())


async def is_drained(world: World, request: Any, reply: Any) -> None:
    assert world.fakes[0].draining
    await goes_on(world, request, await world.get("Resume", fleet_pb2.ResumeRequest()))


def stage_gate(world: World) -> asyncio.Event:
    return world.fakes[0].stage_gate


def apply_gate(world: World) -> asyncio.Event:
    return world.fakes[0].apply_gate


DISK, STREAMED = weight_pb2.WEIGHT_TRANSPORT_DISK, weight_pb2.WEIGHT_TRANSPORT_STREAM
ROWS = [
    Row("SubmitRollouts", a_batch, comes_back),
    Row("OpenBatch", to_open, is_open),
    Row("AddSamples", to_add, is_added_once),
    Row("CloseBatch", to_close, is_closed),
    Row("ContinueSamples", a_call, goes_on_once),
    Row("StreamRollouts", a_stream, has_all),
    Row("AckRollouts", to_acknowledge, is_let_go),
    Row("Generate", a_single, is_whole),
    Row("CancelRollouts", to_cancel, is_cancelled),
    Row("HintNextBatch", a_hint, is_hinted),
    Row("ReportRewards", from_redis(a_report), is_matched),
    Row("GetBatch", from_redis(to_get), is_known),
    Row("AckRollouts", from_redis(to_acknowledge), is_let_go, "from-redis"),
    Row("StreamRollouts", from_redis(to_stream_again), has_all, "from-redis"),
    Row("ListBatches", to_list, is_listed),
    Row("EndRun", a_run, is_ended),
    Row("StartUpdate", to_start(DISK), is_started, "disk"),
    Row("StartUpdate", to_start(STREAMED), is_started, "stream"),
    Row("UpdateWeights", to_stage(DISK), is_staged, "disk"),
    Row("UpdateWeights", to_stage(STREAMED), is_staged, "stream"),
    Row("UpdateWeights", to_stage(DISK), is_staged, "disk-waiting", stage_gate, 3),
    Row("UpdateWeights", to_stage(STREAMED), is_staged, "stream-waiting", stage_gate, 3),
    Row("FinishUpdate", to_finish, is_published),
    Row("FinishUpdate", to_finish, is_published, "waiting", apply_gate, 1),
    Row("AbortUpdate", to_abort, is_aborted),
    Row("GetVersions", plain(weight_pb2.GetVersionsRequest()), answers),
    Row("ListInstances", plain(fleet_pb2.ListInstancesRequest()), answers),
    Row("WatchFleet", plain(fleet_pb2.WatchFleetRequest()), answers, waits=1),
    Row("Pause", plain(fleet_pb2.PauseRequest()), is_paused),
    Row("Resume", to_resume, goes_on),
    Row("Drain", plain(fleet_pb2.DrainRequest(instance_id="i0")), is_drained),
    Row("GetKnobs", plain(fleet_pb2.GetKnobsRequest()), answers),
    Row("SetKnobs", to_set_knobs, are_set),
    Row("WatchDecisions", to_watch, answers, waits=3),
    Row("WatchDecisions", to_read_decisions, answers, "kept"),
    Row("GetDrafter", plain(fleet_pb2.GetDrafterRequest()), answers),
    Row("RollBackDrafter", plain(fleet_pb2.RollBackDrafterRequest(reason="odd")), answers),
]


def test_every_public_method_has_a_row() -> None:
    assert {row.method for row in ROWS} | {"PushWeights"} == set(METHODS)


class Learner(drafter_pb2_grpc.LearnerServiceServicer):
    """The leader of the drafter service, as far as the gateway asks it."""

    async def GetLearner(self, request: Any, context: Any) -> drafter_pb2.GetLearnerResponse:
        return drafter_pb2.GetLearnerResponse(drafter_version=3)

    async def RollBack(self, request: Any, context: Any) -> drafter_pb2.RollBackResponse:
        return drafter_pb2.RollBackResponse(drafter_version=2)


@pytest.fixture
async def learner(redis_url: str, namespace: str) -> AsyncIterator[None]:
    """A learner beside the gateway."""
    server = GrpcServer(ServiceConfig(), service="drafter", registry=CollectorRegistry())
    drafter_pb2_grpc.add_LearnerServiceServicer_to_server(Learner(), server.server)
    await server.start()
    redis = connect(ServiceConfig(redis_url=redis_url))
    record = InstanceRecord(LEARNER, "learner", address=server.address, state=LEADING)
    registration = Registration(redis, Keys(namespace), record)
    await registration.register()

    async def beat() -> None:
        while True:
            await registration.update()
            await asyncio.sleep(0.5)

    beating = asyncio.create_task(beat())
    yield
    await end([beating])
    await server.stop(0)
    await redis.aclose()


@pytest.fixture
async def policy(redis_url: str, namespace: str) -> AsyncIterator[None]:
    """A policy service beside the gateway."""
    config = PolicyConfig(port=0, redis_url=redis_url, namespace=namespace)
    process = PolicyProcess(config, CollectorRegistry())
    await process.start()
    running = asyncio.create_task(process.run())
    await until(lambda: process.leadership.term is not None, "the policy service leads")
    yield
    await end([running])
    await process.stop(0)


async def whole(call: Any, row: Row) -> Any:
    """Return the answer of a call: of a stream all of it, or its first message if it does not end."""
    if not METHODS[row.method].server_streaming:
        return await call
    if row.waits:
        return await call.read()
    return [message async for message in call]


async def cancelled_at(held: HeldCall, call: Any, row: Row) -> bool:
    """Cancel a call where its handler is held; return False if it ended before."""
    answer = asyncio.ensure_future(_drained(call, row))
    holding = asyncio.ensure_future(held.held.wait())
    async with asyncio.timeout(CALL):
        await asyncio.wait({answer, holding}, return_when=asyncio.FIRST_COMPLETED)
        was_held = held.held.is_set()
        call.cancel()
        await end([holding])
        await asyncio.wait({answer})
        await held.ended.wait()
    return was_held


async def _drained(call: Any, row: Row) -> None:
    with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
        if METHODS[row.method].server_streaming:
            async for _ in call:
                pass
        else:
            await call


def tasks_by_kind() -> Counter[str]:
    """Count the tasks by what they run: loops of the services begin small ones all the time.

    gRPC's own listeners do not count. A server has one for each method and replaces it when a call arrives, so that
    for two turns of the event loop one is missing: a count taken then would find one too many for ever after.
    """
    here = asyncio.current_task()
    kinds = (getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks() if task is not here)
    return Counter(kind for kind in kinds if kind not in GRPC_LISTENERS)


async def repeated(world: World, row: Row, request: Any) -> None:
    """Make a call, and check what must be so then."""
    call = world.call(row.method, request)
    try:
        async with asyncio.timeout(CALL):
            await row.check(world, request, await whole(call, row))
    finally:
        call.cancel()


async def nothing_stays(world: World, before: Counter[str], where: str) -> None:
    """Fail if there are tasks that were not there before, or anything else that belongs to a call."""
    left: list[object] = []
    with suppress(TimeoutError):
        async with asyncio.timeout(CALL):
            while left := [*world.left(), *(tasks_by_kind() - before)]:  # noqa: ASYNC110 (no event is set)
                await asyncio.sleep(0.005)
    assert not left, (where, before, tasks_by_kind())


async def cancelled_everywhere(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch, row: Row
) -> None:
    calls = HeldCalls(monkeypatch)
    cluster = Cluster(redis_url, namespace)
    try:
        gateway = await cluster.gateway()
        fakes = [await cluster.instance(name) for name in ("i0", "i1")]
        await cluster.serving(gateway, 2)
        world = World(gateway, fakes)
        # Whatever the first of all calls begins is there from then on.
        await repeated(world, row, await row.prepare(world))
        full_name = f"/{METHODS[row.method].containing_service.full_name}/{row.method}"
        nth, was_held = 0, True
        while was_held and (not row.waits or nth < row.waits):
            nth += 1
            assert nth < MOST_WAITS, f"{row} waits more often than any method does"
            before = tasks_by_kind()
            if row.gate is not None:
                row.gate(world).clear()
            request = await row.prepare(world)
            call = world.call(row.method, request)
            was_held = await cancelled_at(calls.hold(full_name, nth), call, row)
            if row.gate is not None:
                row.gate(world).set()
            await repeated(world, row, request)
            await nothing_stays(world, before, f"{row}, cancelled at wait {nth}")
        cancelled = nth if was_held else nth - 1
        assert cancelled or row.method in WITHOUT_WAITS, f"{row} was never cancelled"
    finally:
        await cluster.close()


@pytest.mark.parametrize("row", [each for each in ROWS if each.method not in PASSED_ON], ids=str)
async def test_a_call_cancelled_anywhere_succeeds_when_it_is_made_again(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch, row: Row
) -> None:
    await cancelled_everywhere(redis_url, namespace, monkeypatch, row)


@pytest.mark.usefixtures("policy", "learner")
@pytest.mark.parametrize("row", [each for each in ROWS if each.method in PASSED_ON], ids=str)
async def test_a_call_that_is_passed_on_succeeds_when_it_is_made_again(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch, row: Row
) -> None:
    await cancelled_everywhere(redis_url, namespace, monkeypatch, row)


@pytest.mark.parametrize("nth", [1, 2, 5])
async def test_bytes_whose_push_is_cancelled_anywhere_are_pushed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    calls = HeldCalls(monkeypatch)
    async with stream_fleet(tmp_path, 2) as fleet:
        await fleet.client.versions()
        await until(
            lambda: any("Health/Watch" in each.get_name() for each in asyncio.all_tasks()), "it watches"
        )
        before = tasks_by_kind()
        started = await fleet.client.start_stream(RUN, NEW, push_id="cancelled")
        await until(
            lambda: len(list(tmp_path.glob("*/.receiving*"))) == 2, "the instances know of the update"
        )
        pieces = cut(safetensors.lay_out(Tensors(), STREAM.shard_bytes), STREAM.piece_bytes)
        requests = [weight_stream_pb2.PushWeightsRequest(piece=piece) for piece in pieces]
        held = calls.hold("/paceline.v1.WeightStreamService/PushWeights", nth)
        async with grpc.aio.insecure_channel(started.address) as channel, asyncio.timeout(CALL):
            stub: Any = weight_stream_pb2_grpc.WeightStreamServiceStub(channel)
            call = stub.PushWeights(iter(requests), metadata=(("authorization", f"Bearer {started.ticket}"),))
            await held.held.wait()
            call.cancel()
            await held.ended.wait()
        finished = await fleet.push(Tensors(seed=5))
        assert [each.applied for each in finished.instances] == [True, True]
        fleet.check(fleet.nodes, seed=5)
        async with asyncio.timeout(CALL):
            while left := tasks_by_kind() - before:  # noqa: ASYNC110 (no event is set)
                await asyncio.sleep(0.005)
        assert not left
