"""A standby passes calls on to the gateway that leads: whoever is called, the answers are the same."""

from __future__ import annotations

import asyncio
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.tokens import hash_token
from paceline.transport.channel import CALLER, call_metadata
from paceline.v1 import fleet_pb2, rollout_pb2, weight_pb2
from services.gateway.gateway import FORWARDED
from services.gateway.server.fleet_service import WITHOUT_LEADER
from services.platform.redis.leadership import Leader
from services.platform.security.caller import TokenHolder
from tests.integration.gateway.conftest import (
    CALL,
    Cluster,
    RunningGateway,
    check_samples,
    details,
    make_batch,
    until,
)
from tests.integration.gateway.test_requests import methods, refusal
from tests.integration.gateway.test_tenants import answer, method_of, requests
from tests.integration.gateway.test_weights import update
from tests.support.fake_instance import FakeInstance

LEASE = 10.0
"""Seconds of a leader's lease: longer than any stall, in which a standby must not take over."""
SERVICES = {rollout_pb2: "RolloutService", fleet_pb2: "FleetService", weight_pb2: "WeightService"}


async def pair(cluster: Cluster, **settings: Any) -> tuple[RunningGateway, RunningGateway]:
    """Return a gateway that leads, and one that knows of it."""
    leader = await cluster.gateway(lease_seconds=LEASE, **settings)
    standby = await cluster.gateway(leading=False, lease_seconds=LEASE, **settings)
    await follows(standby, leader)
    return leader, standby


async def follows(standby: RunningGateway, leader: RunningGateway) -> None:
    await until(lambda: standby.gateway.forwarder.address == leader.gateway.address, "it knows who leads")


async def health(gateway: RunningGateway) -> int:
    stub: Any = health_pb2_grpc.HealthStub(gateway.trainer.channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(), timeout=CALL)).status)


def ready(gateway: RunningGateway) -> int:
    """Ask as a kubelet does."""
    connection = HTTPConnection("127.0.0.1", gateway.gateway.server.probe_port, timeout=CALL)
    connection.request("GET", "/readyz")
    status = connection.getresponse().status
    connection.close()
    return status


def told(found: Any) -> Any:
    """Return what a caller is told: an error with its details, or the answer."""
    if not isinstance(found, grpc.aio.AioRpcError):
        return found
    return found.code(), found.details(), {name: str(each) for name, each in details(found).items()}


async def test_a_step_over_a_standby_is_that_of_the_leader(cluster: Cluster) -> None:
    leader, standby = await pair(cluster)
    await cluster.instance("i0")
    await cluster.serving(leader, 1)
    request = make_batch()
    await standby.trainer.submit(request)
    check_samples(request, await standby.trainer.collect(request))
    events = await leader.trainer.collect(request)
    check_samples(request, events)
    ack = rollout_pb2.AckRolloutsRequest(run_id="run", batch_id=request.batch_id, cursor=events[-1].cursor)
    assert (await standby.trainer.rollouts.AckRollouts(ack, timeout=CALL)).trimmed == len(events)
    assert standby.gateway.leadership.term is None


async def test_weights_are_updated_over_a_standby(cluster: Cluster) -> None:
    leader, standby = await pair(cluster)
    await cluster.instance("i0")
    await cluster.serving(leader, 1)
    await update(standby.trainer)
    request = make_batch(version=1)
    await standby.trainer.submit(request)
    check_samples(request, await standby.trainer.collect(request))


async def test_every_method_tells_callers_the_same(cluster: Cluster, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    entry = {"name": "alice", "scopes": ["rollouts", "weights", "fleet"], "runs": ["a-*"]}
    tokens.write_text(yaml.safe_dump([{**entry, "sha256": hash_token("alice")}]))
    leader, standby = await pair(cluster, tokens_file=tokens, token="own")
    fake = await cluster.instance("i0", max_running=64)
    await cluster.serving(leader, 1)
    fake.hold_at = 1
    alice = call_metadata("alice")
    names = set(requests("a-1")) - {"SubmitRollouts", "OpenBatch", "Generate", "StartUpdate"}
    for run_id in ("b-1", "a-1", ""):
        for name in sorted(names - {"WatchDecisions"}):
            request = requests(run_id)[name]
            at_leader = await answer(leader.trainer, name, request, *alice)
            over_standby = await answer(standby.trainer, name, request, *alice)
            assert told(at_leader) == told(over_standby), (name, run_id)
    # Who calls is whom the standby has authenticated, whatever the metadata say.
    for_bob = (CALLER, TokenHolder(name="bob", runs=("b-*",)).metadata())
    refused = await answer(standby.trainer, "GetBatch", requests("b-1")["GetBatch"], *alice, for_bob)
    assert details(refused)["ErrorInfo"].metadata["token"] == "alice"
    unknown = await answer(standby.trainer, "GetBatch", requests("a-1")["GetBatch"], *call_metadata("no"))
    assert unknown.code() is grpc.StatusCode.UNAUTHENTICATED


def every_method() -> list[str]:
    return [
        method.full_name
        for module, service in SERVICES.items()
        for method in module.DESCRIPTOR.services_by_name[service].methods
    ]


@pytest.mark.parametrize("marked", [False, True], ids=["as callers call", "passed on"])
async def test_what_needs_a_leader_is_refused_where_none_is_known(cluster: Cluster, marked: bool) -> None:
    """And by a gateway that a call was passed on to, so that none goes round in circles."""
    leader, standby = await pair(cluster)
    if not marked:
        standby.gateway.forwarder.follow(None)
    metadata = ((FORWARDED, "1"),) if marked else ()
    found = {}
    for full_name in every_method():
        name = full_name.rpartition(".")[2]
        if f"/{'/'.join(full_name.rsplit('.', 1))}" in WITHOUT_LEADER:
            continue
        method = method_of(standby.trainer, name)
        given = _requests_of(method) if name == "UpdateWeights" else _request_of(full_name)
        call = method(given, timeout=CALL, metadata=metadata)
        try:
            found[name] = [each async for each in call] if hasattr(call, "__aiter__") else await call
        except grpc.aio.AioRpcError as error:
            found[name] = error.code()
    assert set(found.values()) <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INVALID_ARGUMENT}, found
    assert leader.gateway.leadership.term is not None


def _request_of(full_name: str) -> Any:
    for module, service in SERVICES.items():
        described = module.DESCRIPTOR.services_by_name[service]
        if full_name.startswith(f"{described.full_name}."):
            kind = described.methods_by_name[full_name.rpartition(".")[2]].input_type
            return getattr(module, kind.name)()
    raise KeyError(full_name)


async def _requests_of(_: Any) -> Any:
    yield weight_pb2.UpdateWeightsRequest(update_id="none")


async def test_health_follows_whether_calls_are_answered(cluster: Cluster) -> None:
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    leader, standby = await pair(cluster)
    assert [await health(each) for each in (leader, standby)] == [serving, serving]
    # The leader lets the lease go, and the standby follows nobody until it leads.
    await leader.kill()
    await until(lambda: standby.gateway.leadership.term is not None, "the standby leads")
    assert (await health(standby), standby.gateway.forwarder.address) == (serving, "")
    alone = await cluster.gateway(leading=False, lease_seconds=LEASE, probe_port=0)
    await follows(alone, standby)
    assert await health(alone) == serving
    assert await asyncio.to_thread(ready, alone) == 200
    # A leader of an older version gives no address; to wait for one would keep it from being replaced.
    term = standby.gateway.leadership.leading().journal.term
    await alone.gateway.follow(Leader(term, ""))
    assert (await health(alone), await asyncio.to_thread(ready, alone)) == (not_serving, 200)
    await alone.gateway.follow(None)
    assert (await health(alone), await asyncio.to_thread(ready, alone)) == (not_serving, 503)


async def test_streams_over_a_standby_end_with_their_leader_and_go_on_at_the_next(cluster: Cluster) -> None:
    leader, standby = await pair(cluster)
    fake = await cluster.instance("i0")
    fake.hold_at = 10
    await cluster.serving(leader, 1)
    request = make_batch(ignore_eos=True)
    await standby.trainer.submit(request)
    reading = asyncio.create_task(standby.trainer.collect(request))
    await until(lambda: leader.metric("streams") == 1, "the leader streams")
    await leader.kill()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await reading
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    await cluster.serving(standby, 1)
    fake.hold_at = None
    check_samples(request, await standby.trainer.collect(request))


async def test_a_caller_who_leaves_is_gone_from_the_leader(cluster: Cluster) -> None:
    leader, standby = await pair(cluster)
    fake: FakeInstance = await cluster.instance("i0")
    fake.hold_at = 10
    await cluster.serving(leader, 1)
    request = make_batch(ignore_eos=True)
    await standby.trainer.submit(request)
    stream = standby.trainer.stream(request)
    reading = asyncio.ensure_future(stream.read())
    await until(lambda: leader.metric("streams") == 1, "the leader streams")
    stream.cancel()
    await until(lambda: leader.metric("streams") == 0, "the leader's stream has ended")
    await asyncio.wait([reading])


async def test_bytes_that_are_no_message_are_refused_as_at_the_leader(cluster: Cluster) -> None:
    _, standby = await pair(cluster)
    for method in methods():
        error = await refusal(standby.trainer.channel, *method)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, method
