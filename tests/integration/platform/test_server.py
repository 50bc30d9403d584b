"""The server around a toy service: errors, tokens, deadlines, limits, request ids, metrics, health, stop."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from redis.exceptions import ConnectionError as RedisConnectionError

from paceline.errors import Violation
from paceline.v1 import fleet_pb2, fleet_pb2_grpc
from services.contracts import errors
from services.platform.config import ConfigError, ServiceConfig
from services.platform.grpc import interceptor
from services.platform.grpc.channel import open_channel
from services.platform.grpc.server import LIVENESS, GrpcServer
from tests.support.waiting import until

LIST = "paceline.v1.FleetService/ListInstances"
WATCH = "paceline.v1.FleetService/WatchFleet"
OK = fleet_pb2.ListInstancesRequest()


async def refused(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def read_all(stream: Any) -> list[Any]:
    return [message async for message in stream]


def status_of(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    """Return the rich status as the SDK finds it."""
    return status_pb2.Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])


def bare(address: str) -> grpc.aio.Channel:
    """Return a channel that adds nothing."""
    return grpc.aio.insecure_channel(address)


def count(toy: Any, method: str, code: str) -> float:
    labels = {"component": "toy", "method": method, "code": code}
    return toy.registry.get_sample_value("paceline_rpc_requests_total", labels) or 0.0


async def test_a_call_is_answered(serve: Any) -> None:
    async with serve(ServiceConfig()) as toy:
        answer = await toy.stub.ListInstances(OK, timeout=60)
        assert [each.instance_id for each in answer.instances] == ["toy"]


async def test_violations_reach_the_client(serve: Any) -> None:
    async with serve(ServiceConfig()) as toy:
        toy.servicer.error = errors.InvalidArgument([Violation("a.b", "is 1; must be 2")])
        error = await refused(toy.stub.ListInstances(OK, timeout=60))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        status = status_of(error)
        assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert status.message == error.details() == "a.b: is 1; must be 2"
        bad_request = error_details_pb2.BadRequest()
        assert status.details[0].Unpack(bad_request)
        assert bad_request.field_violations[0].field == "a.b"
        assert bad_request.field_violations[0].description == "is 1; must be 2"


async def test_many_violations_still_reach_the_client(serve: Any) -> None:
    async with serve(ServiceConfig()) as toy:
        toy.servicer.error = errors.InvalidArgument([Violation(f"f[{i}]", "é" * 300) for i in range(2000)])
        error = await refused(toy.stub.ListInstances(OK, timeout=60))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert status_of(error).details


async def test_an_error_ends_a_stream_after_its_messages(serve: Any) -> None:
    async with serve(ServiceConfig()) as toy:
        toy.servicer.error = errors.Unavailable("going away", retry_after=2)
        stream = toy.stub.WatchFleet(fleet_pb2.WatchFleetRequest(), timeout=60)
        assert (await anext(aiter(stream))).instances[0].instance_id == "toy"
        error = await refused(read_all(stream))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        retry = error_details_pb2.RetryInfo()
        assert any(detail.Unpack(retry) for detail in status_of(error).details)
        assert retry.retry_delay.seconds == 2


@pytest.mark.parametrize("entered", [False, True], ids=["for-its-token", "by-its-servicer"])
async def test_a_refused_stream_has_no_message_of_the_refusal(serve: Any, entered: bool) -> None:
    async with serve(ServiceConfig(token="right")) as toy, bare(toy.server.address) as channel:
        stub: Any = toy.stub if entered else fleet_pb2_grpc.FleetServiceStub(channel)
        toy.servicer.error = errors.FailedPrecondition("BUSY", "come again")
        stream = aiter(stub.WatchFleet(fleet_pb2.WatchFleetRequest(), timeout=60))
        if entered:
            assert (await anext(stream)).instances, "its servicer's own"
        error = await refused(anext(stream))
        refused_for = grpc.StatusCode.FAILED_PRECONDITION if entered else grpc.StatusCode.UNAUTHENTICATED
        assert error.code() is refused_for
        assert status_of(error).details


@pytest.fixture
def collection_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def test_a_refused_call_leaves_nothing_for_the_collector_of_garbage(
    serve: Any, collection_off: None
) -> None:
    """Its request may have megabytes, and full collections are minutes apart."""

    def kept() -> list[errors.ServiceError]:
        return [each for each in gc.get_objects() if isinstance(each, errors.ServiceError)]

    async with serve(ServiceConfig()) as toy:
        junk = toy.channel.unary_unary("/paceline.v1.FleetService/ListInstances")
        for call in (
            lambda: junk(b"\xff" * 100_000, timeout=60),
            lambda: toy.stub.ListInstances(OK, timeout=60),
            lambda: read_all(toy.stub.WatchFleet(fleet_pb2.WatchFleetRequest(), timeout=60)),
        ):
            toy.servicer.error = errors.FailedPrecondition("BUSY", "come again")
            await refused(call())
            toy.servicer.error = None
            await until(lambda: not kept(), "the error is gone, and with it the call")


async def test_an_error_of_a_task_group_is_seen_as_itself(serve: Any) -> None:
    async with serve(ServiceConfig()) as toy:
        toy.servicer.error = ExceptionGroup("tasks", [errors.NotFound("batch", "b")])
        error = await refused(toy.stub.ListInstances(OK, timeout=60))
        assert error.code() == grpc.StatusCode.NOT_FOUND


async def test_a_lost_store_is_unavailable(serve: Any) -> None:
    async with serve(ServiceConfig()) as toy:
        toy.servicer.error = RedisConnectionError("Error 111 connecting to redis-0.internal")
        error = await refused(toy.stub.ListInstances(OK, timeout=60))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert "redis-0" not in str(error)


@pytest.mark.parametrize("method", ["ListInstances", "WatchFleet"])
async def test_a_call_is_answered_when_the_work_that_it_waits_for_is_cancelled(
    serve: Any, method: str
) -> None:
    async with serve(ServiceConfig()) as toy:
        toy.servicer.error = asyncio.CancelledError()
        answer = getattr(toy.stub, method)(OK, timeout=60)
        error = await refused(read_all(answer) if method == "WatchFleet" else answer)
        assert error.code() == grpc.StatusCode.UNAVAILABLE, "not a deadline"
        assert count(toy, LIST if method == "ListInstances" else WATCH, "UNAVAILABLE") == 1


@pytest.mark.parametrize("method", ["ListInstances", "WatchFleet"])
async def test_an_unexpected_error_is_logged_and_not_told(
    serve: Any, method: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serve(ServiceConfig()) as toy:
        toy.servicer.error = RuntimeError("password is hunter2")
        call = getattr(toy.stub, method)
        metadata = (("x-request-id", "req-1"),)
        answer = call(OK, timeout=60, metadata=metadata)
        error = await refused(read_all(answer) if method == "WatchFleet" else answer)
        assert error.code() == grpc.StatusCode.INTERNAL
        assert "req-1" in (error.details() or "")
        assert "hunter2" not in f"{error!r}{status_of(error)}{tuple(error.trailing_metadata())}"
        logged = caplog.text + capsys.readouterr().out
        assert "hunter2" in logged
        assert "Traceback" in logged
        toy.servicer.error = None
        assert (await toy.stub.ListInstances(OK, timeout=60)).instances


async def test_a_failing_call_leaves_a_running_one_alone(serve: Any) -> None:
    async with serve(ServiceConfig()) as toy:
        running = toy.stub.Drain(fleet_pb2.DrainRequest(), timeout=60)
        await asyncio.wait_for(toy.servicer.entered.wait(), 30)
        toy.servicer.error = RuntimeError("boom")
        await refused(toy.stub.ListInstances(OK, timeout=60))
        toy.servicer.release.set()
        assert (await running).handed_over == 3


@pytest.mark.parametrize("token", [None, "wrong", "righ", "right2", ""])
@pytest.mark.parametrize("method", ["ListInstances", "WatchFleet"])
async def test_calls_without_the_token_are_refused(serve: Any, method: str, token: str | None) -> None:
    async with serve(ServiceConfig(token="right")) as toy, bare(toy.server.address) as channel:
        metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        answer = getattr(fleet_pb2_grpc.FleetServiceStub(channel), method)(OK, timeout=60, metadata=metadata)
        error = await refused(read_all(answer) if method == "WatchFleet" else answer)
        assert error.code() == grpc.StatusCode.UNAUTHENTICATED
        assert "right" not in str(status_of(error))
        assert not toy.servicer.entered.is_set()
        assert count(toy, f"paceline.v1.FleetService/{method}", "UNAUTHENTICATED") == 1


async def test_calls_with_the_token_are_answered(serve: Any) -> None:
    async with serve(ServiceConfig(token="right")) as toy:
        assert (await toy.stub.ListInstances(OK, timeout=60)).instances
        stream = toy.stub.WatchFleet(fleet_pb2.WatchFleetRequest(), timeout=60)
        assert (await anext(aiter(stream))).instances
        stream.cancel()


async def test_health_needs_neither_token_nor_deadline(serve: Any) -> None:
    async with serve(ServiceConfig(token="right")) as toy, bare(toy.server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_reflection_needs_the_token_and_names_the_service(serve: Any) -> None:
    async with serve(ServiceConfig(token="right")) as toy, bare(toy.server.address) as channel:
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        error = await refused(read_all(stub.ServerReflectionInfo(iter([request]), timeout=60)))
        assert error.code() == grpc.StatusCode.UNAUTHENTICATED
        stub = reflection_pb2_grpc.ServerReflectionStub(toy.channel)
        (answer,) = await read_all(stub.ServerReflectionInfo(iter([request]), timeout=60))
        names = {each.name for each in answer.list_services_response.service}
        assert {"paceline.v1.FleetService", "grpc.health.v1.Health"} <= names


async def test_reflection_is_there_under_the_name_that_newer_tools_ask_for(serve: Any) -> None:
    async with serve(ServiceConfig(token="right")) as toy:
        call = toy.channel.stream_stream(
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            reflection_pb2.ServerReflectionRequest.SerializeToString,
            reflection_pb2.ServerReflectionResponse.FromString,
        )
        asked = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="paceline.v1.FleetService"),
        ]
        listed, described = await read_all(call(iter(asked), timeout=60))
        names = [each.name for each in listed.list_services_response.service]
        assert "paceline.v1.FleetService" in names
        assert not [name for name in names if "internal" in name], "what is the platform's own is not listed"
        assert described.file_descriptor_response.file_descriptor_proto


async def test_a_unary_call_without_a_deadline_gets_one(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve(ServiceConfig()) as toy:
        assert (await toy.stub.ListInstances(OK)).instances
        monkeypatch.setattr(interceptor, "_UNARY_SECONDS", 0.2)
        error = await refused(toy.stub.Drain(fleet_pb2.DrainRequest()))
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert "took 0.2 s, the most without a deadline" in (error.details() or "")
        assert count(toy, "paceline.v1.FleetService/Drain", "DEADLINE_EXCEEDED") == 1
        assert (await toy.stub.ListInstances(OK, timeout=60)).instances, "one that has a deadline has its own"
        stream = toy.stub.WatchFleet(fleet_pb2.WatchFleetRequest())
        assert (await anext(aiter(stream))).instances
        stream.cancel()


async def test_a_deadline_ends_the_call_and_is_counted(serve: Any, poll: Any) -> None:
    async with serve(ServiceConfig()) as toy:
        # The deadline may pass before the server has the call: then another call has more time.
        for seconds in (0.2, 2, 10):
            error = await refused(toy.stub.Drain(fleet_pb2.DrainRequest(), timeout=seconds))
            assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            if toy.servicer.entered.is_set():
                break

        async def counted() -> bool:
            method = "paceline.v1.FleetService/Drain"
            return count(toy, method, "DEADLINE_EXCEEDED") + count(toy, method, "CANCELLED") >= 1

        await poll(counted)


async def test_a_caller_that_leaves_ends_its_stream(serve: Any, poll: Any) -> None:
    async with serve(ServiceConfig()) as toy:
        stream = toy.stub.WatchFleet(fleet_pb2.WatchFleetRequest())
        await anext(aiter(stream))
        stream.cancel()
        await asyncio.wait_for(toy.servicer.left.wait(), 30)

        async def counted() -> bool:
            return count(toy, WATCH, "CANCELLED") == 1

        await poll(counted)
        labels = {"component": "toy", "method": WATCH}
        assert toy.registry.get_sample_value("paceline_rpc_in_flight", labels) == 0


async def test_a_request_over_the_limit_is_refused_and_harms_nobody(serve: Any) -> None:
    client = ServiceConfig(max_message_bytes=1 << 20)
    async with serve(ServiceConfig(max_message_bytes=4096), client) as toy:
        error = await refused(toy.stub.Drain(fleet_pb2.DrainRequest(instance_id="x" * 5000), timeout=60))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not toy.servicer.entered.is_set()
        assert (await toy.stub.ListInstances(OK, timeout=60)).instances


async def test_an_answer_over_the_limit_is_refused(serve: Any) -> None:
    async with serve(ServiceConfig(max_message_bytes=4096)) as toy:
        toy.servicer.instances = [fleet_pb2.Instance(instance_id="x" * 5000)]
        error = await refused(toy.stub.ListInstances(OK, timeout=60))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_message_over_the_default_of_grpc_passes(serve: Any) -> None:
    async with serve(ServiceConfig()) as toy:
        toy.servicer.release.set()
        request = fleet_pb2.DrainRequest(instance_id="x" * (8 << 20))
        assert (await toy.stub.Drain(request, timeout=60)).handed_over == 3


async def returned_id(toy: Any, *metadata: tuple[str, str]) -> str:
    call = toy.stub.ListInstances(OK, timeout=60, metadata=metadata)
    await call
    return str(dict(await call.trailing_metadata())["x-request-id"])


async def test_the_request_id_is_returned(serve: Any) -> None:
    async with serve(ServiceConfig()) as toy:
        assert await returned_id(toy, ("x-request-id", "train-7/step:3")) == "train-7/step:3"
        made = {await returned_id(toy) for _ in range(3)}
        assert len(made) == 3
        assert all(len(each) == 32 for each in made)
        assert await returned_id(toy, ("x-request-id", "x" * 1000)) not in ("", "x" * 1000)
        assert " " not in await returned_id(toy, ("x-request-id", 'a" b'))


async def test_the_request_id_joins_the_trailer_of_the_servicer(serve: Any) -> None:
    async with serve(ServiceConfig()) as toy:
        toy.servicer.trailer = (("mine", "1"),)
        call = toy.stub.ListInstances(OK, timeout=60, metadata=(("x-request-id", "r1"),))
        await call
        trailer = dict(await call.trailing_metadata())
        assert (trailer["mine"], trailer["x-request-id"]) == ("1", "r1")


async def test_the_request_id_follows_to_the_next_service(serve: Any) -> None:
    async with serve(ServiceConfig()) as first, serve(ServiceConfig()) as second:

        async def pass_on(request: Any, context: Any) -> fleet_pb2.ListInstancesResponse:
            call = second.stub.ListInstances(OK, timeout=60)
            await call
            seen = dict(await call.trailing_metadata())["x-request-id"]
            return fleet_pb2.ListInstancesResponse(instances=[fleet_pb2.Instance(instance_id=seen)])

        first.servicer.ListInstances = pass_on
        server = GrpcServer(ServiceConfig(), service="first", registry=first.registry)
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(first.servicer, server.server)
        await server.start()
        async with open_channel(server.address, ServiceConfig()) as channel:
            stub = fleet_pb2_grpc.FleetServiceStub(channel)
            answer = await stub.ListInstances(OK, timeout=60, metadata=(("x-request-id", "abc"),))
        await server.stop(0)
        assert answer.instances[0].instance_id == "abc"


async def test_calls_are_counted_by_code_and_timed(serve: Any) -> None:
    async with serve(ServiceConfig()) as toy:
        for _ in range(3):
            await toy.stub.ListInstances(OK, timeout=60)
        toy.servicer.error = errors.NotFound("batch", "b")
        await refused(toy.stub.ListInstances(OK, timeout=60))
        toy.servicer.error = ValueError("boom")
        await refused(toy.stub.ListInstances(OK, timeout=60))
        assert [count(toy, LIST, code) for code in ("OK", "NOT_FOUND", "INTERNAL")] == [3, 1, 1]
        labels = {"component": "toy", "method": LIST}
        assert toy.registry.get_sample_value("paceline_rpc_seconds_count", labels) == 5
        assert toy.registry.get_sample_value("paceline_rpc_in_flight", labels) == 0


async def test_running_calls_are_counted(serve: Any) -> None:
    async with serve(ServiceConfig()) as toy:
        running = toy.stub.Drain(fleet_pb2.DrainRequest(), timeout=60)
        await asyncio.wait_for(toy.servicer.entered.wait(), 30)
        labels = {"component": "toy", "method": "paceline.v1.FleetService/Drain"}
        assert toy.registry.get_sample_value("paceline_rpc_in_flight", labels) == 1
        toy.servicer.release.set()
        await running


async def test_health_follows_the_service(serve: Any) -> None:
    async with serve(ServiceConfig()) as toy:
        health = health_pb2_grpc.HealthStub(toy.channel)

        async def status(name: str) -> int:
            return (await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=60)).status

        response = health_pb2.HealthCheckResponse
        for serving, expected in [(True, response.SERVING), (False, response.NOT_SERVING)]:
            await toy.server.set_serving(serving)
            assert await status("") == await status("paceline.v1.FleetService") == expected
            assert await status(LIVENESS) == response.SERVING
        error = await refused(status("no.such.Service"))
        assert error.code() == grpc.StatusCode.NOT_FOUND


async def test_stop_says_not_serving_and_lets_running_calls_end(serve: Any) -> None:
    async with serve(ServiceConfig()) as toy:
        await toy.server.set_serving(True)
        watch = health_pb2_grpc.HealthStub(toy.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        running = toy.stub.Drain(fleet_pb2.DrainRequest(), timeout=60)
        await asyncio.wait_for(toy.servicer.entered.wait(), 30)
        stopping = asyncio.create_task(toy.server.stop(grace=300))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        toy.servicer.release.set()
        assert (await running).handed_over == 3
        # A watcher of health, which never leaves, does not hold up the end.
        await asyncio.wait_for(stopping, 60)


async def test_a_call_that_does_not_end_is_cut_after_the_grace(serve: Any) -> None:
    async with serve(ServiceConfig()) as toy:
        running = asyncio.ensure_future(refused(toy.stub.Drain(fleet_pb2.DrainRequest(), timeout=60)))
        await asyncio.wait_for(toy.servicer.entered.wait(), 30)
        await asyncio.wait_for(toy.server.stop(grace=0.1), 30)
        error = await asyncio.wait_for(running, 60)
        assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


async def test_listening_beyond_loopback_without_tls_is_refused() -> None:
    server = GrpcServer(ServiceConfig(host="0.0.0.0", token="t"), service="toy")
    with pytest.raises(ConfigError, match="needs tls"):
        await server.start()


async def test_listening_beyond_loopback_can_be_allowed(serve: Any) -> None:
    async with serve(ServiceConfig(host="0.0.0.0", insecure=True, advertise_host="127.0.0.1")) as toy:
        assert (await toy.stub.ListInstances(OK, timeout=60)).instances


async def test_two_servers_cannot_have_one_port(serve: Any) -> None:
    async with serve(ServiceConfig()) as toy:
        second = GrpcServer(ServiceConfig(port=toy.server.port), service="toy", registry=toy.registry)
        with pytest.raises(RuntimeError):
            await second.start()


def test_the_token_is_not_sent_in_plain_text_beyond_loopback() -> None:
    with pytest.raises(ValueError, match="plain text"):
        open_channel("10.0.0.1:7400", ServiceConfig(token="t"))


@pytest.fixture(autouse=True)
def _capture_logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
