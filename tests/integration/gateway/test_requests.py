"""Requests that no client of ours makes: every method answers them as the caller's mistake."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import grpc
import pytest

from paceline.internal.v1 import demand_pb2
from paceline.v1 import fleet_pb2, rollout_pb2, weight_pb2
from tests.integration.gateway.conftest import CALL, Cluster, details

FILES = (rollout_pb2, weight_pb2, fleet_pb2, demand_pb2)


def methods() -> Iterator[tuple[str, bool, bool]]:
    """Yield path, and whether the caller and the gateway stream, of every method of a gateway."""
    for file in FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                path = f"/{service.full_name}/{method.name}"
                yield path, method.client_streaming, method.server_streaming


async def refusal(channel: grpc.aio.Channel, path: str, sends: bool, streams: bool) -> grpc.aio.AioRpcError:
    shape = f"{'stream' if sends else 'unary'}_{'stream' if streams else 'unary'}"
    request = iter([b"\xff"]) if sends else b"\xff"
    call = getattr(channel, shape)(path)(request, timeout=CALL)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call.read() if streams else call)
    return caught.value


async def test_bytes_that_are_no_message_are_an_invalid_argument_of_every_method(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    channel = gateway.trainer.channel
    wrong = await asyncio.gather(*(refusal(channel, *method) for method in methods()))
    assert {error.code().name for error in wrong} == {"INVALID_ARGUMENT"}
    fields = {details(error)["BadRequest"].field_violations[0].field for error in wrong}
    assert fields == {"request"}
    assert len(wrong) > 20


@pytest.mark.parametrize(("seconds", "nanos"), [(0, -1), (0, 10**9), (2**62, 0), (-(2**62), 0)])
async def test_a_time_that_is_none_is_an_invalid_argument(cluster: Cluster, seconds: int, nanos: int) -> None:
    gateway = await cluster.gateway(leading=False)
    request = fleet_pb2.WatchDecisionsRequest()
    request.since.seconds, request.since.nanos = seconds, nanos
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await gateway.trainer.fleet.WatchDecisions(request, timeout=CALL).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details(caught.value)["BadRequest"].field_violations[0].field == "since"
