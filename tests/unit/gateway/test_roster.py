"""Connections to instances: brought to the published version, lost, and found again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from paceline.internal.v1 import weight_peer_pb2
from services.gateway.instances import roster
from services.gateway.state.fleet_health import MemberState
from services.gateway.state.update_book import PublishedVersion
from services.platform.config import ServiceConfig
from services.platform.tasks import end
from tests.unit.gateway.fake_engine import rpc_error
from tests.unit.gateway.roster_parts import Fleet
from tests.unit.gateway.scheduler_parts import VERSION, a_batch, tokens, turn

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@pytest.fixture
async def fleet(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    fleet = Fleet(monkeypatch)
    yield fleet
    await end([fleet.task])


async def test_an_instance_with_the_published_version_serves_after_the_handshake(fleet: Fleet) -> None:
    engine = fleet.engine("a")
    await fleet.registry.show(engine)
    await fleet.serving("a")
    assert (engine.calls, fleet.state("a")) == (["GetStatus"], MemberState.SERVING)
    # Five slots: what runs at once, and a quarter of it waiting on the instance.
    assert fleet.parts.placer.links["a"].slots.room == 5
    assert fleet.parts.metric("instance_up", instance_id="a") == 1


async def test_an_instance_with_old_weights_loads_the_published_ones_first(fleet: Fleet) -> None:
    engine = fleet.engine("a", version=3)
    await fleet.registry.show(engine)
    await fleet.serving("a")
    assert engine.calls == ["GetStatus", "StageWeights", "ApplyWeights"]
    assert (engine.version, fleet.health.members["a"].version) == (VERSION, VERSION)
    assert fleet.parts.placer.links["a"].slots.policy_version == VERSION


async def test_an_instance_that_cannot_load_is_quarantined_and_tried_again(fleet: Fleet) -> None:
    engine = fleet.engine("a", version=3)
    engine.errors["StageWeights"] = [rpc_error(grpc.StatusCode.NOT_FOUND, "no such path")]
    engine.gates["ApplyWeights"] = asyncio.Event()
    await fleet.registry.show(engine)
    await fleet.until(lambda: "no such path" in fleet.health.members["a"].reason)
    assert (fleet.state("a"), fleet.parts.placer.links) == (MemberState.STALE, {})
    engine.gates["ApplyWeights"].set()
    await fleet.serving("a")
    assert engine.calls.count("StageWeights") == 2


async def test_nothing_is_loaded_while_an_update_is_being_applied(fleet: Fleet) -> None:
    fleet.book.start("u8", "run", 8, 0.0)
    fleet.book.staged("u8", "/weights/8", "sum", 0.0)
    fleet.book.applying("u8", 0, 0.0)
    engine = fleet.engine("a", version=3)
    await fleet.registry.show(engine)
    await fleet.until(lambda: "a" in fleet.roster.connections and fleet.roster.connections["a"].ready)
    await turn()
    assert engine.calls == ["GetStatus"]
    fleet.health.publish(fleet.book.publish().version, recorded=True, now=0.0)
    fleet.roster.changed.notify()
    await fleet.serving("a")
    assert engine.version == 8


async def test_an_instance_that_must_not_be_dialled_costs_itself_only(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    dial = roster.open_channel

    def guarded(address: str, config: ServiceConfig) -> Any:
        if address == "a":
            raise ValueError("will not send the token")
        return dial(address, config)

    monkeypatch.setattr(roster, "open_channel", guarded)
    first, second = fleet.engine("a"), fleet.engine("b")
    await fleet.registry.show(first, second)
    await fleet.serving("b")
    assert (fleet.state("a"), fleet.health.members["a"].reason) == (
        MemberState.DEAD,
        "will not send the token",
    )
    monkeypatch.setattr(roster, "open_channel", dial)
    await fleet.registry.show(first, second)
    await fleet.serving("a")


@pytest.mark.parametrize(
    ("instance_id", "epoch", "reason"),
    [("other", 1, "'other' answers at its address"), ("a", 2, "epoch 2 answers for epoch 1")],
)
async def test_another_process_at_the_address_is_not_given_work(
    fleet: Fleet, instance_id: str, epoch: int, reason: str
) -> None:
    engine = fleet.engine("a")
    engine.gates["GetStatus"] = asyncio.Event()
    await fleet.registry.show(engine)
    engine.instance_id, engine.epoch = instance_id, epoch
    engine.gates["GetStatus"].set()
    await fleet.until(lambda: fleet.state("a") is MemberState.DEAD)
    assert fleet.health.members["a"].reason == reason
    assert fleet.parts.placer.links == {}


async def test_a_missing_heartbeat_resubmits_the_samples_of_the_instance(fleet: Fleet) -> None:
    one, two = fleet.engine("a"), fleet.engine("b")
    await fleet.registry.show(one)
    await fleet.serving("a")
    running = fleet.parts.scheduler.add(a_batch(1))
    await turn()
    link = fleet.parts.placer.links["a"]
    (handle,) = link.held
    fleet.parts.events.responded(link, tokens(handle, 5, 6))
    await fleet.registry.show(two)
    await fleet.serving("b")
    await turn()
    sample = running.batch.samples[0]
    assert (fleet.state("a"), fleet.health.members["a"].reason) == (MemberState.DEAD, "heartbeat gone")
    assert (sample.instance_id, list(sample.tokens)) == ("b", [5])
    assert (one.closed, fleet.parts.metric("instance_losses_total", instance_id="a")) == (1, 1)
    assert fleet.parts.metric("instance_up", instance_id="a") == 0


@pytest.mark.parametrize("goodbye", [True, False], ids=["ended", "broken"])
async def test_an_instance_that_ends_its_stream_and_its_record_has_left_and_is_not_lost(
    fleet: Fleet, goodbye: bool
) -> None:
    engine, other = fleet.engine("a"), fleet.engine("b")
    await fleet.registry.show(engine, other)
    await fleet.serving("a")
    await turn()
    engine.streams[0].messages.put_nowait(None if goodbye else rpc_error(UNAVAILABLE, "connection reset"))
    await fleet.until(lambda: fleet.state("a") is MemberState.DEAD)
    assert fleet.parts.shown("instance_up", instance_id="a") == 0, "it may have crashed; its record will tell"
    await fleet.registry.show(other)
    await turn()
    assert fleet.parts.shown("instance_up", instance_id="a") == (None if goodbye else 0)
    assert fleet.health.members["a"].left is goodbye
    # It may come back: under its name, as a new process.
    again = fleet.engine("a", epoch=2)
    await fleet.registry.show(again, other)
    await fleet.serving("a")
    assert fleet.parts.shown("instance_up", instance_id="a") == 1


async def test_a_broken_stream_is_a_loss_and_the_instance_comes_back_by_an_update_only(fleet: Fleet) -> None:
    engine = fleet.engine("a")
    await fleet.registry.show(engine)
    await fleet.serving("a")
    await turn()
    engine.streams[0].messages.put_nowait(rpc_error(UNAVAILABLE, "connection reset"))
    await fleet.until(lambda: fleet.state("a") is MemberState.DEAD)
    assert fleet.health.members["a"].reason == "UNAVAILABLE: connection reset"
    assert (fleet.parts.placer.links, fleet.roster.connections) == ({}, {})
    # The same epoch may have missed an update meanwhile, so its word for its version is not enough.
    await fleet.registry.show(engine)
    await fleet.serving("a")
    assert engine.calls == ["GetStatus", "GetStatus", "StageWeights", "ApplyWeights"]


async def test_a_process_that_was_replaced_is_connected_to_under_its_new_epoch(fleet: Fleet) -> None:
    old = fleet.engine("a")
    await fleet.registry.show(old)
    await fleet.serving("a")
    link = fleet.parts.placer.links["a"]
    new = fleet.engine("a", epoch=2)
    await fleet.registry.show(new)
    await fleet.until(lambda: fleet.parts.placer.links.get("a", link) is not link)
    assert (old.closed, fleet.roster.connections["a"].epoch) == (1, 2)


async def test_an_unreadable_registry_kills_nobody(fleet: Fleet) -> None:
    await fleet.registry.show(fleet.engine("a"))
    await fleet.serving("a")
    await fleet.registry.fail()
    assert (fleet.state("a"), list(fleet.parts.placer.links)) == (MemberState.SERVING, ["a"])


async def test_samples_that_wait_are_placed_when_a_paused_instance_resumes(fleet: Fleet) -> None:
    engine = fleet.engine("a")
    engine.state = "paused"
    await fleet.registry.show(engine)
    await fleet.serving("a")
    running = fleet.parts.scheduler.add(a_batch(1))
    await turn()
    assert (fleet.state("a"), running.batch.samples[0].attempt) == (MemberState.PAUSED, 0)
    engine.state = "serving"
    await fleet.registry.show(engine)
    await turn()
    assert (fleet.state("a"), running.batch.samples[0].attempt) == (MemberState.SERVING, 1)


async def test_a_recycled_connection_brings_the_instance_to_a_new_version(fleet: Fleet) -> None:
    engine = fleet.engine("a")
    await fleet.registry.show(engine)
    await fleet.serving("a")
    fleet.book.published = PublishedVersion(9, "/weights/9", "sum", "u9")
    fleet.health.publish(9, recorded=True, now=0.0)
    old = fleet.roster.connections["a"]
    fleet.roster.recycle(old)
    assert old.gone.is_set()
    await fleet.serving("a")
    assert (engine.version, fleet.state("a")) == (9, MemberState.SERVING)


async def test_a_defect_in_one_connection_does_not_cost_the_others(fleet: Fleet) -> None:
    one, two = fleet.engine("a"), fleet.engine("b")
    one.errors["GetStatus"] = [RuntimeError("a defect")]
    await fleet.registry.show(one, two)
    await fleet.serving("b")
    assert fleet.health.members["a"].reason == "internal error of the gateway"


async def test_the_end_of_the_roster_closes_every_connection(fleet: Fleet) -> None:
    engine = fleet.engine("a")
    await fleet.registry.show(engine)
    await fleet.serving("a")
    await end([fleet.task])
    assert (engine.closed, fleet.roster.connections, fleet.parts.placer.links) == (1, {}, {})


async def test_an_instance_is_not_given_up_while_it_is_not_listened_to(fleet: Fleet) -> None:
    engine = fleet.engine("a")
    await fleet.registry.show(engine)
    await fleet.serving("a")
    fleet.parts.backlog.add(1001)
    await fleet.registry.show()
    assert fleet.state("a") is MemberState.SERVING
    fleet.parts.backlog.clear()
    await fleet.registry.show()
    assert fleet.state("a") is MemberState.DEAD


async def test_an_instance_is_given_peers_where_the_version_was_pushed(fleet: Fleet) -> None:
    fleet.book.published = PublishedVersion(VERSION, "", "sum", "u7", streamed=True)
    current, late = fleet.engine("a"), fleet.engine("b", version=VERSION - 1)
    await fleet.registry.show(current)
    await current.called("GetStatus")
    await fleet.registry.show(current, late)
    await late.called("ApplyWeights")
    assert late.version == VERSION
    assert late.requests["StageWeights"].peers == weight_peer_pb2.PeerWeights(
        update_id="u7", peers=["a"], checksum="sum"
    )
