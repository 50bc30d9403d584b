"""CANCELLED that the caller did not cause is tried again; one that it caused is not."""

from __future__ import annotations

import asyncio
import threading

import grpc
import pytest

import paceline
from paceline import AsyncClient, Client, RetryPolicy
from paceline import types as t
from paceline.errors import CALL_DROPPED
from paceline.transport.grpc import AioTransport
from paceline.transport.interface import Unary
from paceline.transport.options import ConnectionOptions
from paceline.v1 import rollout_pb2
from tests.integration.sdk.gateway_double import GatewayDouble, until

DROPPED = (grpc.StatusCode.CANCELLED, "CANCELLED", [])
SOON = RetryPolicy(initial=0.001, maximum=0.01)
REQUEST = t.SampleRequest("run", "p", [1, 2])


def test_a_call_that_the_service_dropped_is_made_again(gateway: GatewayDouble) -> None:
    for method in ("GetVersions", "StreamRollouts", "Generate"):
        gateway.state.failures[method] = [DROPPED, DROPPED]
    batch = t.Batch("run", "b", 0, 4, [t.Group("p", [1], 2)])
    with Client(gateway.address, retry=SOON) as client:
        assert client.versions().policy_version == 4
        client.submit(batch)
        assert len(list(client.stream("run", "b"))) == 2
        assert len(list(client.generate(REQUEST))) == 3
    assert [gateway.names().count(each) for each in ("GetVersions", "StreamRollouts", "Generate")] == [3] * 3


async def test_the_asynchronous_client_makes_it_again_too(gateway: GatewayDouble) -> None:
    gateway.state.failures["GetVersions"] = gateway.state.failures["Generate"] = [DROPPED]
    async with AsyncClient(gateway.address, retry=SOON) as client:
        assert (await client.versions()).policy_version == 4
        assert len([event async for event in client.generate(REQUEST)]) == 3


def test_one_that_is_dropped_for_ever_is_unavailable(gateway: GatewayDouble) -> None:
    gateway.state.failures["GetVersions"] = [DROPPED]
    client = Client(gateway.address, retry=RetryPolicy(seconds=0))
    with client, pytest.raises(paceline.UnavailableError) as caught:
        client.versions()
    assert caught.value.reason == CALL_DROPPED


@pytest.mark.parametrize("method", ["GetVersions", "WatchFleet"])
def test_a_call_that_is_ended_by_close_is_cancelled_and_not_made_again(
    gateway: GatewayDouble, method: str
) -> None:
    gateway.state.hanging.add(method)
    client = Client(gateway.address, retry=SOON)
    raised: list[BaseException] = []

    def ask() -> None:
        try:
            client.versions() if method == "GetVersions" else list(client.watch_fleet())
        except BaseException as error:
            raised.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    until(gateway.state.hung.is_set)
    client.close()
    asking.join(60)
    assert [type(each) for each in raised] == [paceline.CancelledError]
    assert gateway.names() == [method]


@pytest.mark.parametrize("method", ["GetVersions", "WatchFleet"])
async def test_close_ends_a_call_of_the_asynchronous_client_and_cancels_no_task(
    gateway: GatewayDouble, method: str
) -> None:
    gateway.state.hanging.add(method)
    client = AsyncClient(gateway.address, retry=SOON)

    async def ask() -> None:
        await client.versions() if method == "GetVersions" else [each async for each in client.watch_fleet()]

    asking = asyncio.create_task(ask())
    await asyncio.to_thread(until, gateway.state.hung.is_set)
    await client.close()
    await asyncio.wait([asking], timeout=60)
    assert not asking.cancelled()
    assert isinstance(asking.exception(), paceline.CancelledError)
    assert gateway.names() == [method]


async def test_a_task_that_is_cancelled_is_cancelled(gateway: GatewayDouble) -> None:
    gateway.state.hanging.add("GetVersions")
    client = AsyncClient(gateway.address, retry=SOON)
    asking = asyncio.create_task(client.versions())
    await asyncio.to_thread(until, gateway.state.hung.is_set)
    asking.cancel()
    await client.close()
    await asyncio.wait([asking], timeout=60)
    assert asking.cancelled()


async def test_a_call_in_the_background_of_a_closed_client_raises_nothing() -> None:
    transport = AioTransport(ConnectionOptions("127.0.0.1:1", None, "", 60.0, 60.0))
    await transport.close()
    ended: list[grpc.StatusCode] = []
    transport.post(Unary("Rollout", "AckRollouts", rollout_pb2.AckRolloutsRequest()), ended.append)
    (task,) = transport._posted
    await asyncio.wait([task], timeout=60)
    assert task.exception() is None
    assert ended == [grpc.StatusCode.FAILED_PRECONDITION]
