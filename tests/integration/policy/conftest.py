"""Policy services in this process, and scripted instances that take knobs, over real sockets and a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, Self

import grpc
import pytest
from prometheus_client import CollectorRegistry

from paceline.convert.fleet import knobs_from_proto, knobs_to_proto
from paceline.internal.v1 import policy_pb2 as pb
from paceline.internal.v1 import policy_pb2_grpc as rpc
from paceline.v1 import knobs_pb2
from services.platform.config import ServiceConfig
from services.platform.grpc.server import GrpcServer
from services.platform.redis.connection import Keys, connect
from services.platform.redis.decision_log import BEGINNING, DecisionLog, DecisionRecord
from services.platform.redis.registry import InstanceRecord, Registration, Registry
from services.platform.service import LEADING
from services.platform.tasks import end
from services.policy.config import PolicyConfig
from services.policy.process import SERVICE, PolicyProcess

CALL = 60.0
"""Deadline of every call and every wait, in seconds: far above what anything takes."""
# Quick where something is waited for, and patient with a machine that is busy.
_QUICK: dict[str, Any] = {
    "report_seconds": 0.05,
    "settle_seconds": 0.4,
    "answer_seconds": 30.0,
    "push_timeout_seconds": 15.0,
}


async def until(condition: Callable[[], Any], what: str) -> None:
    """Wait until the condition holds."""
    try:
        async with asyncio.timeout(CALL):
            while True:
                result = condition()
                if await result if isinstance(result, Awaitable) else result:
                    return
                await asyncio.sleep(0.01)
    except TimeoutError:
        pytest.fail(f"waited in vain until {what}")


class Instance(rpc.KnobServiceServicer):
    """Takes knobs as an instance does, and reports what the test says. `deaf`: it does not answer."""

    def __init__(self, config: ServiceConfig, instance_id: str, pool: str = "", revision: int = 0) -> None:
        self.instance_id = instance_id
        self.applied: list[pb.ApplyKnobsRequest] = []
        self.report = pb.GetSpeculationReportResponse(
            instance_id=instance_id, revision=revision, model="models/m", pool=pool
        )
        self.revision = revision
        self.deaf = False
        self._config = config
        self._redis = connect(config)
        self._server = GrpcServer(config, service="generation")
        self._beating: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        rpc.add_KnobServiceServicer_to_server(self, self._server.server)
        await self._server.start()
        record = InstanceRecord("generation", self.instance_id, address=self._server.address, state="serving")
        # It does not expire while the test is kept from running: nobody waits for that.
        registration = Registration(self._redis, Keys(self._config.namespace), record, ttl=CALL)
        self.report.epoch = await registration.register()
        self._beating = asyncio.create_task(registration.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._beating is not None:
            await end([self._beating])
            self._beating = None
            await self._server.stop(0)
            await self._redis.aclose()

    @property
    def latest(self) -> pb.ApplyKnobsRequest:
        return self.applied[-1]

    @property
    def knobs(self) -> dict[str, Any]:
        return knobs_from_proto(self.latest.knobs) if self.applied else {}

    async def ApplyKnobs(self, request: pb.ApplyKnobsRequest, context: Any) -> pb.ApplyKnobsResponse:
        if self.deaf:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "deaf")
        if request.revision > self.revision:
            self.revision = request.revision
            self.applied.append(request)
        return pb.ApplyKnobsResponse(revision=self.revision, speculates=True)

    async def GetSpeculationReport(
        self, request: pb.GetSpeculationReportRequest, context: Any
    ) -> pb.GetSpeculationReportResponse:
        report = pb.GetSpeculationReportResponse()
        report.CopyFrom(self.report)
        del report.switches[:]
        report.switches.extend(s for s in self.report.switches if s.serial > request.after_switch)
        return report


class Running:
    """A policy service, and a stub of it."""

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self.process = PolicyProcess(config, CollectorRegistry())
        self._task: asyncio.Task[None] | None = None
        self._channel: grpc.aio.Channel | None = None
        self.stub: Any

    async def start(self) -> None:
        await self.process.start()
        self._task = asyncio.create_task(self.process.run())
        self._channel = grpc.aio.insecure_channel(self.process.server.address)
        self.stub = rpc.PolicyServiceStub(self._channel)

    async def leads(self) -> bool:
        """Return True once the registry says so: gateways look there."""
        records = await Registry(self.process.redis, Keys(self._config.namespace)).list(SERVICE)
        record = records.get(self._config.instance_id)
        return record is not None and record.state == LEADING

    async def kill(self) -> None:
        """End it without releasing anything by its own account of the fleet. The lease is free at once."""
        if self._task is not None:
            task, self._task = self._task, None
            await end([task])
            assert self._channel is not None
            await self._channel.close()
            await self.process.stop(0)

    async def get(self, **scope: str) -> pb.GetKnobsResponse:
        return await self.stub.GetKnobs(pb.GetKnobsRequest(**scope), timeout=CALL)

    async def set(
        self, revision: int, knobs: dict[str, Any] | knobs_pb2.Knobs, **scope: str
    ) -> pb.SetKnobsResponse:
        message = knobs if isinstance(knobs, knobs_pb2.Knobs) else knobs_to_proto(knobs)
        request = pb.SetKnobsRequest(revision=revision, knobs=message, **scope)
        return await self.stub.SetKnobs(request, timeout=CALL)


class Fleet:
    """Makes instances and policy services on one namespace, and ends them with the test."""

    def __init__(self, redis_url: str, namespace: str) -> None:
        self.config = ServiceConfig(redis_url=redis_url, namespace=namespace)
        self.stack = AsyncExitStack()
        self.redis = connect(self.config)
        self.decisions_log = DecisionLog(self.redis, namespace)

    async def instance(self, instance_id: str, **fields: Any) -> Instance:
        return await self.stack.enter_async_context(Instance(self.config, instance_id, **fields))

    async def policy(self, name: str = "policy-0", *, leading: bool = True, **settings: Any) -> Running:
        chosen = _QUICK | settings
        config = PolicyConfig(
            port=0,
            redis_url=self.config.redis_url,
            namespace=self.config.namespace,
            instance_id=name,
            **chosen,
        )
        running = Running(config)
        await running.start()
        self.stack.push_async_callback(running.kill)
        if leading:
            await until(running.leads, "the policy service leads")
        return running

    async def linked(self, policy: Running, count: int) -> None:
        """Wait until so many instances work by the latest knobs."""

        def current() -> bool:
            controller = policy.process.leadership.leading()
            links = controller.links.known.values()
            return len(links) == count and all(each.applied >= controller.knobs.revision for each in links)

        await until(current, f"{count} instances are up to date")

    async def decisions(self, kind: str) -> list[DecisionRecord]:
        return [each for each in await self.decisions_log.recent(1000) if each.kind == kind]

    async def decided(self, kind: str, count: int = 1) -> list[DecisionRecord]:
        """Wait for so many decisions of a kind, and read them as a watcher does."""
        found: list[DecisionRecord] = []
        async with asyncio.timeout(CALL):
            async for decision in self.decisions_log.follow(BEGINNING):
                found += [decision] if decision.kind == kind else []
                if len(found) >= count:
                    return found
        raise AssertionError("unreachable")


@pytest.fixture
async def fleet(redis_url: str, namespace: str) -> AsyncIterator[Fleet]:
    fleet = Fleet(redis_url, namespace)
    yield fleet
    await fleet.stack.aclose()
    await fleet.redis.aclose()
