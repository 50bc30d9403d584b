"""Limits of a server: who is not admitted costs nothing, and bytes that are no message are the caller's mistake."""

from __future__ import annotations

import asyncio
import gc
import warnings
import weakref
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.v1 import fleet_pb2, weight_pb2, weight_pb2_grpc
from services.contracts.errors import Unavailable
from services.platform.config import ServiceConfig
from services.platform.grpc.channel import open_channel
from services.platform.grpc.server import GrpcServer
from tests.integration.platform.test_server import OK, read_all, refused, status_of

LIST = "/paceline.v1.FleetService/ListInstances"
WATCH = "/paceline.v1.FleetService/WatchFleet"
UPDATE = "/paceline.v1.WeightService/UpdateWeights"
GARBAGE = b"\xff" * (15 << 20)
"""No protobuf message begins like this."""


class Reader(weight_pb2_grpc.WeightServiceServicer):
    """Reads what the caller streams."""

    async def UpdateWeights(self, requests: AsyncIterator[Any], context: Any) -> Any:
        """Answer with one instance for each message."""
        names = [request.update_id async for request in requests]
        return weight_pb2.UpdateWeightsResponse(
            instances=[weight_pb2.InstanceUpdate(instance_id=name) for name in names]
        )


class Refuser(weight_pb2_grpc.WeightServiceServicer):
    """Refuses a call before it reads what the caller streams, and remembers that weakly."""

    def __init__(self) -> None:
        self.unread: weakref.ref[Any] | None = None

    async def UpdateWeights(self, requests: AsyncIterator[Any], context: Any) -> Any:
        """Raise Unavailable."""
        self.unread = weakref.ref(requests)
        raise Unavailable("not now")


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


@pytest.mark.parametrize("method", [LIST, WATCH])
async def test_a_large_message_of_an_unknown_caller_is_refused_and_never_parsed(
    serve: Any, method: str
) -> None:
    async with (
        serve(ServiceConfig(token="right")) as toy,
        grpc.aio.insecure_channel(toy.server.address, [("grpc.max_send_message_length", 1 << 25)]) as channel,
    ):
        for token, code in (("wrong", "UNAUTHENTICATED"), ("right", "INVALID_ARGUMENT")):
            error = await refused(channel.unary_unary(method)(GARBAGE, timeout=60, metadata=bearer(token)))
            assert error.code().name == code
        # On the same connection.
        assert (await toy.stub.ListInstances(OK, timeout=60)).instances


async def test_bytes_that_are_no_message_end_a_stream_of_the_caller(serve: Any) -> None:
    server = GrpcServer(ServiceConfig(), service="reader")
    weight_pb2_grpc.add_WeightServiceServicer_to_server(Reader(), server.server)
    await server.start()
    good = weight_pb2.UpdateWeightsRequest(update_id="u").SerializeToString()
    async with open_channel(server.address, ServiceConfig()) as channel:
        call = channel.stream_unary(UPDATE)
        answer = weight_pb2.UpdateWeightsResponse.FromString(await call(iter([good, good]), timeout=60))
        assert [each.instance_id for each in answer.instances] == ["u", "u"]
        error = await refused(call(iter([good, b"\xff"]), timeout=60))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "request: is not an encoded message" in status_of(error).message
    await server.stop(0)


async def test_a_stream_that_is_refused_unread_is_no_coroutine_that_was_never_awaited() -> None:
    server, servicer = GrpcServer(ServiceConfig(), service="refuser"), Refuser()
    weight_pb2_grpc.add_WeightServiceServicer_to_server(servicer, server.server)
    await server.start()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        async with open_channel(server.address, ServiceConfig()) as channel:
            requests = iter([weight_pb2.UpdateWeightsRequest(update_id="u")])
            stub = weight_pb2_grpc.WeightServiceStub(channel)
            error = await refused(stub.UpdateWeights(requests, timeout=60))
        await server.stop(0)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert servicer.unread is not None
        # The error that was raised keeps the stream alive through the frames of its traceback.
        async with asyncio.timeout(60):
            while servicer.unread() is not None:
                await asyncio.sleep(0)
                gc.collect()
        gc.collect()
    assert not [str(each.message) for each in caught if "never awaited" in str(each.message)]


async def test_a_message_above_the_limit_leaves_other_calls_of_the_connection_alone(serve: Any) -> None:
    config = ServiceConfig(max_message_bytes=1 << 20)
    async with (
        serve(config) as toy,
        grpc.aio.insecure_channel(toy.server.address, [("grpc.max_send_message_length", 1 << 26)]) as channel,
    ):
        running = channel.unary_unary("/paceline.v1.FleetService/Drain")(b"", timeout=60)
        await asyncio.wait_for(toy.servicer.entered.wait(), 30)
        for _ in range(3):
            error = await refused(channel.unary_unary(LIST)(GARBAGE, timeout=60))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        toy.servicer.release.set()
        assert fleet_pb2.DrainResponse.FromString(await running).handed_over == 3


async def test_calls_above_the_limit_are_told_when_to_come_again(serve: Any, poll: Any) -> None:
    async with serve(ServiceConfig(max_concurrent_calls=2)) as toy:
        running = [toy.stub.Drain(fleet_pb2.DrainRequest(), timeout=60) for _ in range(2)]
        labels = {"component": "toy", "method": "paceline.v1.FleetService/Drain"}

        async def both_run() -> bool:
            return toy.registry.get_sample_value("paceline_rpc_in_flight", labels) == 2

        await poll(both_run)
        for call in (toy.stub.ListInstances(OK, timeout=60), read_all(toy.stub.WatchFleet(OK, timeout=60))):
            error = await refused(call)
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "google.rpc.RetryInfo" in [each.TypeName() for each in status_of(error).details]
        # Probes are not counted: a server that is busy is not one to be restarted.
        health = health_pb2_grpc.HealthStub(toy.channel)
        assert await health.Check(health_pb2.HealthCheckRequest(), timeout=60)
        toy.servicer.release.set()
        await asyncio.gather(*running)
        for _ in range(3):
            assert (await toy.stub.ListInstances(OK, timeout=60)).instances


async def test_connections_above_the_limit_are_closed(serve: Any) -> None:
    async with serve(ServiceConfig(max_connections=1)) as toy:
        assert (await toy.stub.ListInstances(OK, timeout=60)).instances
        own = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(toy.server.address, own) as channel:
            error = await refused(channel.unary_unary(LIST)(b"", timeout=60))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert (await toy.stub.ListInstances(OK, timeout=60)).instances
