"""Connect to all registered instances, bring each to the published version, and drop it when it dies.

Pushed weights pass from instance to instance in a fixed order: the trainer pushes to the first, and each other
one fetches from its predecessor, or from the next nearest if that fails. Instances of one host follow each other,
so that each host receives the bytes once.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import grpc
import structlog

from paceline.internal.v1 import generation_pb2, generation_pb2_grpc, weight_peer_pb2
from paceline.v1 import weight_pb2
from services.gateway.config import GatewayConfig
from services.gateway.instances.connection import Connection, ConnectionBroken, WeightSource
from services.gateway.metrics import GatewayMetrics
from services.gateway.scheduler.instance_events import InstanceEvents
from services.gateway.scheduler.placement import InstanceSlots
from services.gateway.scheduler.placer import Placer
from services.gateway.scheduler.turns import Pace
from services.gateway.scheduler.work_link import WorkLink, message_interval, report_interval
from services.gateway.state.fleet_health import FleetHealth, FleetMember, InstanceLoss, MemberState
from services.gateway.state.update_book import PublishedVersion, UpdateBook
from services.platform.grpc.channel import open_channel
from services.platform.redis.registry import INSTANCES, InstanceRecord, Registry
from services.platform.tasks import ExponentialBackoff, Notifier, end

log = structlog.get_logger(__name__)

MOST_PEERS = 16
"""Most instances that one may fetch from. If all of them die at once, their successor misses this update."""
# Seconds until an instance tries again to load weights, after the first failure and at most.
_LOAD_DELAY, _LONGEST_LOAD_DELAY = 1.0, 30.0
_GOODBYE = "the instance ended the work stream"


@dataclass(eq=False)
class Roster:
    """Connections by instance id. `changed` notifies of every change in the fleet."""

    config: GatewayConfig
    registry: Registry
    fleet: FleetHealth
    book: UpdateBook
    events: InstanceEvents
    placer: Placer
    metrics: GatewayMetrics
    connections: dict[str, Connection] = field(init=False, default_factory=dict)
    changed: Notifier = field(init=False, default_factory=Notifier)
    _loop: asyncio.AbstractEventLoop = field(init=False, default_factory=asyncio.get_running_loop)
    pace: Pace = field(init=False, default_factory=Pace)
    _revision: int = field(init=False, default=-1)
    _notify_due: bool = field(init=False, default=False)
    # Instances that metrics show; True: as up.
    _shown: dict[str, bool] = field(init=False, default_factory=dict)

    async def run(self) -> None:
        """Follow the registry until cancelled, then close all connections."""
        try:
            await self.registry.watch(INSTANCES, self.config.registry_poll_seconds, self._look)
        finally:
            await self._close_all()
            self._show({})
            self.changed.notify()

    def live(self) -> list[Connection]:
        """Return the connections to instances that answer and do not drain."""
        return [
            each
            for each in self.connections.values()
            if each.ready and each.member.state not in (MemberState.DEAD, MemberState.DRAINING)
        ]

    def recycle(self, connection: Connection) -> None:
        """Reconnect, so that the instance is brought to the published version. Its samples continue elsewhere."""
        self._close(connection, "recycled")
        self._connect(connection.member)

    async def settled(self) -> None:
        """Wait until every instance has answered the handshake, or the time for it is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.handshake_timeout_seconds):
                while not all(each.ready for each in self.connections.values()):
                    await self.changed.wait()

    def quarantine(self, connection: Connection, reason: str) -> None:
        """Take an instance whose weights are unknown out of service until an update on it completes."""
        log.warning("quarantined", instance=connection.instance_id, reason=reason)
        self.fleet.quarantine(connection.instance_id, connection.epoch, reason, self._loop.time())
        self.notify()

    def confirm(self, connection: Connection, version: int, *, updated: bool) -> None:
        """Record that an instance has this version, by its own report or (`updated`) by a completed update."""
        self.fleet.confirm(
            connection.instance_id, connection.epoch, version, self._loop.time(), updated=updated
        )
        if self.fleet.published is not None:
            self.book.begin_with(self.fleet.published)
        connection.link.slots.serve(version)
        self.notify()

    def notify(self, *, changed: bool = False) -> None:
        """Notify watchers in the next turn of the event loop if the fleet, or something else (`changed`), changed.

        However many instances change in a turn, metrics are updated and watchers are woken once.
        """
        if not self._notify_due and (changed or self._revision != self.fleet.revision):
            self._notify_due = True
            self._loop.call_soon(self._notify)

    def _notify(self) -> None:
        self._notify_due = False
        if self._revision != self.fleet.revision:
            self._revision = self.fleet.revision
            self._show(self.fleet.members.values())
            self.metrics.policy_version.set(self.fleet.published or 0)
        self.changed.notify()

    def _show(self, members: Iterable[FleetMember]) -> None:
        """Export the states of exactly these instances; an instance that left is neither up nor lost."""
        states = {each.instance_id: each.state for each in members if not each.left}
        counts = Counter(states.values())
        for state in MemberState:
            self.metrics.instances.labels(state.value).set(counts[state])
        up = {name: state is not MemberState.DEAD for name, state in states.items()}
        changed = {name: alive for name, alive in up.items() if self._shown.get(name) is not alive}
        self.metrics.show_instances(changed, self._shown.keys() - up.keys())
        self._shown = up

    async def _look(self, records: dict[str, InstanceRecord] | None) -> None:
        # In a pause no messages of instances are read, so their records would be the only sign of life.
        if records is None or self.placer.backlog.paused:
            return
        # A whole fleet may have appeared or disappeared at once, and may change during these waits.
        for loss in self.fleet.observe(records, self._loop.time()):
            await self.pace.wait()
            self._lost(loss)
        for member in self.fleet.due(self._loop.time()):
            if member.instance_id not in self.connections:
                await self.pace.wait()
                self._connect_to(member)
        if any(each.member.state is MemberState.SERVING for each in self.connections.values()):
            self.placer.pump_soon()
        self.notify()

    def _connect_to(self, member: FleetMember) -> None:
        """Connect to a member, unless it was replaced, has died or is connected by now."""
        current = self.fleet.member(member.instance_id, member.epoch) is member
        if current and member.state is not MemberState.DEAD and member.instance_id not in self.connections:
            self._connect(member)

    def _connect(self, member: FleetMember) -> None:
        record = member.record
        try:
            channel = open_channel(record.address, self.config)
        except ValueError as error:
            # The token must not be sent there. That costs this instance, not the fleet.
            for loss in self.fleet.lost(member.instance_id, member.epoch, str(error), self._loop.time()):
                self._lost(loss)
            return
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        room = max(1, int(record.max_running * self.config.room_factor))
        slots = InstanceSlots(member.instance_id, member.version, room, 0.0)
        refusals = ExponentialBackoff(
            self.config.refusal_pause_seconds, self.config.refusal_pause_most_seconds
        )
        link = WorkLink(
            member.instance_id,
            member.epoch,
            slots,
            refusals,
            stub,
            self.events.responded,
            self.pace,
            self.placer.backlog,
            lambda: message_interval(len(self.placer.links)),
            lambda: report_interval(len(self.placer.links), patient=self.placer.is_patient),
        )
        connection = Connection(self.config, member, channel, stub, link)
        self.connections[member.instance_id] = connection
        connection.task = asyncio.create_task(self._drive(connection), name=f"drive-{member.instance_id}")

    async def _drive(self, connection: Connection) -> None:
        reason, goodbye = "internal error of the gateway", False
        try:
            reason = await self._serve(connection)
            goodbye = reason == _GOODBYE
            # Many may be lost at once.
            await self.pace.wait()
        finally:
            if not connection.gone.is_set():
                for loss in self.fleet.lost(
                    connection.instance_id, connection.epoch, reason, self._loop.time(), goodbye=goodbye
                ):
                    self._lost(loss)
                self._close(connection, reason)
                self.notify()
            with contextlib.suppress(asyncio.CancelledError):
                await connection.channel.close()

    async def _serve(self, connection: Connection) -> str:
        """Work with an instance for as long as possible; return why that ended."""
        try:
            await self._handshake(connection)
            await self._bring_up(connection)
            self.events.link_up(connection.link)
            self.notify()
            log.info("instance_serving", instance=connection.instance_id, version=connection.member.version)
            await connection.link.run()
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        except (ConnectionBroken, ValueError) as error:
            return str(error)
        except Exception:
            # A defect may cost this connection, but not the others.
            log.exception("connection_failed", instance=connection.instance_id)
            return "internal error of the gateway"
        return _GOODBYE

    async def _handshake(self, connection: Connection) -> None:
        status = await connection.stub.GetStatus(
            generation_pb2.GetStatusRequest(), timeout=self.config.handshake_timeout_seconds
        )
        # A whole fleet may answer at once.
        await self.pace.wait()
        instance = status.instance
        if instance.instance_id != connection.instance_id:
            raise ConnectionBroken(f"{instance.instance_id!r} answers at its address")
        if instance.epoch != connection.epoch:
            raise ConnectionBroken(f"epoch {instance.epoch} answers for epoch {connection.epoch}")
        update = self.book.active
        if update is not None and update.is_staged(status.staged_policy_version, status.staged_checksum):
            # A former gateway had it stage them, or this gateway on an earlier connection.
            connection.staged_version = update.version
        connection.ready = True
        self.notify(changed=True)
        self.confirm(connection, instance.policy_version, updated=False)

    async def _bring_up(self, connection: Connection) -> None:
        """Load the published version until the instance has it; an update may do so meanwhile."""
        backoff = ExponentialBackoff(_LOAD_DELAY, _LONGEST_LOAD_DELAY)
        while connection.member.state is MemberState.STALE:
            published = self.book.published
            if self.book.is_applying() or published is None or not published.recorded:
                await self.changed.wait()
                await self.pace.wait()
                continue
            try:
                await self._load(connection, published)
            except grpc.aio.AioRpcError as error:
                if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                    raise
                self.quarantine(connection, f"could not load version {published.version}: {error.details()}")
                await asyncio.sleep(backoff.failed())

    async def _load(self, connection: Connection, published: PublishedVersion) -> None:
        log.info("loading_weights", instance=connection.instance_id, version=published.version)
        peers = self._peers(connection, published)
        source: WeightSource
        if published.streamed:
            source = weight_peer_pb2.PeerWeights(
                update_id=published.update_id, peers=peers, checksum=published.checksum
            )
        else:
            source = weight_pb2.DiskWeights(path=published.path, checksum=published.checksum)
        await connection.load(published.version, source, peers)
        self.confirm(connection, published.version, updated=True)

    def _peers(self, connection: Connection, published: PublishedVersion) -> list[str]:
        """Return addresses of instances that have the published version."""
        peers = [
            each.member.record.address
            for each in self.live()
            if each is not connection and each.member.version == published.version
        ]
        # Shuffle, so that instances that appear at once do not all fetch from the same peers.
        random.shuffle(peers)
        return peers[:MOST_PEERS]

    def _lost(self, loss: InstanceLoss) -> None:
        log.warning("instance_lost", instance=loss.instance_id, epoch=loss.epoch, reason=loss.reason)
        connection = self.connections.get(loss.instance_id)
        if connection is not None and connection.epoch == loss.epoch:
            self.metrics.losses.labels(loss.instance_id).inc()
            self._close(connection, loss.reason)

    def _close(self, connection: Connection, reason: str) -> None:
        if connection.gone.is_set():
            return
        connection.gone.set()
        self.connections.pop(connection.instance_id, None)
        self.events.link_lost(connection.link, reason)
        if connection.task is not None and connection.task is not asyncio.current_task():
            connection.task.cancel()

    async def _close_all(self) -> None:
        tasks = [each.task for each in self.connections.values() if each.task is not None]
        for connection in list(self.connections.values()):
            self._close(connection, "the gateway stops")
        await end(tasks)


@dataclass(frozen=True, slots=True)
class ChainLink:
    """An instance and its address; a `busy` one is loading other weights just now."""

    instance_id: str
    address: str
    busy: bool = False


def chain(links: Iterable[ChainLink]) -> list[ChainLink]:
    """Return instances in the order in which weights pass through them, busy ones last."""
    return sorted(links, key=lambda each: (each.busy, each.address.rpartition(":")[0], each.instance_id))


def predecessors(order: Sequence[ChainLink], place: int) -> list[str]:
    """Return the addresses from which the instance at `place` fetches, the nearest first."""
    return [each.address for each in reversed(order[max(0, place - MOST_PEERS) : place])]
