"""Keeps a connection to every registered instance, brings it to the published version, and drops the dead."""

import asyncio
import contextlib
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import TypeVar

import grpc
import structlog

from paceline.internal.v1 import generation_pb2, generation_pb2_grpc
from paceline.v1 import weight_pb2
from services.gateway.config import GatewayConfig
from services.gateway.dispatcher import Dispatcher
from services.gateway.fleet import Fleet, Loss, Member, State
from services.gateway.links import WorkLink
from services.gateway.metrics import GatewayMetrics
from services.gateway.placement import Slots
from services.gateway.update import Published, UpdateBook
from services.platform.channel import open_channel
from services.platform.pulse import Pulse
from services.platform.registry import INSTANCES, InstanceRecord, Registry
from services.platform.tasks import end

log = structlog.get_logger(__name__)

# Pause before the weights are loaded again on an instance that failed to, doubling up to the second.
_LOAD_PAUSE, _LOAD_PAUSE_MOST = 1.0, 30.0


Reply = TypeVar("Reply")


class ConnectionBroken(Exception):
    """The instance cannot be worked with; the message says why."""


@dataclass(slots=True, eq=False)
class Connection:
    """A connection to one instance under one epoch. `weights` is held by whoever changes its weights."""

    member: Member
    channel: grpc.aio.Channel
    stub: generation_pb2_grpc.GenerationServiceStub
    link: WorkLink
    weights: asyncio.Lock = field(default_factory=asyncio.Lock)
    task: asyncio.Task[None] | None = None
    # Whether the handshake is done.
    ready: bool = False
    # Set when the connection is given up.
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    # Version that an update has staged here; 0 for none.
    staged_version: int = 0

    @property
    def instance_id(self) -> str:
        return self.member.instance_id

    @property
    def epoch(self) -> int:
        return self.member.epoch


async def within(connection: Connection, call: Awaitable[Reply]) -> Reply:
    """The answer of a call to an instance; ConnectionBroken as soon as the instance is given up, however
    long the call's own deadline is."""
    calling = asyncio.ensure_future(call)
    gone = asyncio.ensure_future(connection.gone.wait())
    try:
        await asyncio.wait((calling, gone), return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            raise ConnectionBroken(f"{connection.instance_id} was lost: {connection.member.reason}")
        return await calling
    finally:
        calling.cancel()
        gone.cancel()


class Roster:
    """The connections, by instance id. `changed` beats when something in the fleet has changed."""

    def __init__(
        self,
        config: GatewayConfig,
        registry: Registry,
        fleet: Fleet,
        book: UpdateBook,
        dispatcher: Dispatcher,
        metrics: GatewayMetrics,
    ) -> None:
        self.connections: dict[str, Connection] = {}
        self.changed = Pulse()
        self._config = config
        self._registry = registry
        self._fleet = fleet
        self._book = book
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._revision = -1
        # Instances that metrics tell of.
        self._shown: set[str] = set()

    async def run(self) -> None:
        """Watches the registry until cancelled, then closes all connections."""
        try:
            await self._registry.watch(INSTANCES, self._config.registry_poll_seconds, self._look)
        finally:
            await self._close_all()
            self._show({})
            self.changed.beat()

    def live(self) -> list[Connection]:
        """Connections to instances that answer and are not on their way out."""
        return [
            each
            for each in self.connections.values()
            if each.ready and each.member.state not in (State.DEAD, State.DRAINING)
        ]

    def recycle(self, connection: Connection) -> None:
        """Connects anew, so that the instance is brought to the published version. It must hold no work."""
        self._close(connection, "recycled")
        self._connect(connection.member)

    async def settled(self) -> None:
        """Returns when every instance has answered the handshake, or has had the time for it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.handshake_timeout_seconds):
                while not all(each.ready for each in self.connections.values()):
                    await self.changed.wait()

    def quarantine(self, connection: Connection, reason: str) -> None:
        """Nobody knows the weights of the instance: it serves after a completed update."""
        log.warning("quarantined", instance=connection.instance_id, reason=reason)
        self._fleet.quarantine(connection.instance_id, connection.epoch, reason, self._loop.time())
        self.notify()

    def confirm(self, connection: Connection, version: int, *, updated: bool) -> None:
        """The instance has this version, by its own word or (`updated`) by a completed update."""
        self._fleet.confirm(
            connection.instance_id, connection.epoch, version, self._loop.time(), updated=updated
        )
        if self._book.published is None and self._fleet.published is not None:
            self._book.published = Published(self._fleet.published)
        connection.link.slots.policy_version = version
        self.notify()

    def notify(self) -> None:
        """Tells watchers if the fleet has changed since they were last told."""
        if self._revision == self._fleet.revision:
            return
        self._revision = self._fleet.revision
        self._show({name: member.state for name, member in self._fleet.members.items()})
        self._metrics.policy_version.set(self._fleet.published or 0)
        self.changed.beat()

    def _show(self, states: dict[str, State]) -> None:
        """Tells metrics of these instances, and of no other."""
        for state in State:
            self._metrics.instances.labels(state.value).set(list(states.values()).count(state))
        up = {name: state is not State.DEAD for name, state in states.items()}
        self._metrics.show_instances(up, self._shown - up.keys())
        self._shown = set(up)

    async def _look(self, records: dict[str, InstanceRecord] | None) -> None:
        if records is None:
            self._fleet.unreadable()
            return
        for loss in self._fleet.observe(records, self._loop.time()):
            self._lost(loss)
        for member in self._fleet.due(self._loop.time()):
            if member.instance_id not in self.connections:
                self._connect(member)
        if any(each.member.state is State.SERVING for each in self.connections.values()):
            self._dispatcher.pump_soon()
        self.notify()

    def _connect(self, member: Member) -> None:
        record = member.record
        channel = open_channel(record.address, self._config)
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        room = max(1, int(record.max_running * self._config.room_factor))
        slots = Slots(member.instance_id, member.version, room, 0.0)
        link = WorkLink(member.instance_id, member.epoch, slots, stub, self._dispatcher.responded)
        connection = Connection(member, channel, stub, link)
        self.connections[member.instance_id] = connection
        connection.task = asyncio.create_task(self._drive(connection), name=f"drive-{member.instance_id}")

    async def _drive(self, connection: Connection) -> None:
        reason = "the instance ended the work stream"
        try:
            await self._handshake(connection)
            await self._bring_up(connection)
            self._dispatcher.link_up(connection.link)
            self.notify()
            log.info("instance_serving", instance=connection.instance_id, version=connection.member.version)
            await connection.link.run()
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except (ConnectionBroken, ValueError) as error:
            reason = str(error)
        except Exception:
            # A mistake of ours: it costs this connection, and must not cost the others.
            log.exception("connection_failed", instance=connection.instance_id)
            reason = "internal error of the gateway"
        finally:
            if not connection.gone.is_set():
                for loss in self._fleet.lost(
                    connection.instance_id, connection.epoch, reason, self._loop.time()
                ):
                    self._lost(loss)
                self._close(connection, reason)
                self.notify()
            with contextlib.suppress(asyncio.CancelledError):
                await connection.channel.close()

    async def _handshake(self, connection: Connection) -> None:
        status = await connection.stub.GetStatus(
            generation_pb2.GetStatusRequest(), timeout=self._config.handshake_timeout_seconds
        )
        instance = status.instance
        if instance.instance_id != connection.instance_id:
            raise ConnectionBroken(f"{instance.instance_id!r} answers at its address")
        if instance.epoch != connection.epoch:
            raise ConnectionBroken(f"epoch {instance.epoch} answers for epoch {connection.epoch}")
        connection.ready = True
        self.changed.beat()
        self.confirm(connection, instance.policy_version, updated=False)

    async def _bring_up(self, connection: Connection) -> None:
        """Loads the published version until the instance has it. An update may do so meanwhile."""
        pause = _LOAD_PAUSE
        while connection.member.state is State.STALE:
            published = self._book.published
            if self._book.is_applying() or published is None or not published.path:
                await self.changed.wait()
                continue
            try:
                await self._load(connection, published)
            except grpc.aio.AioRpcError as error:
                if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                    raise
                self.quarantine(connection, f"could not load version {published.version}: {error.details()}")
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LOAD_PAUSE_MOST)

    async def _load(self, connection: Connection, published: Published) -> None:
        log.info("loading_weights", instance=connection.instance_id, version=published.version)
        async with connection.weights:
            connection.staged_version = 0
            await connection.stub.StageWeights(
                generation_pb2.StageWeightsRequest(
                    version=published.version,
                    target=weight_pb2.WEIGHT_TARGET_POLICY,
                    disk=weight_pb2.DiskWeights(path=published.path, checksum=published.checksum),
                ),
                timeout=self._config.stage_timeout_seconds,
            )
            await connection.stub.ApplyWeights(
                generation_pb2.ApplyWeightsRequest(version=published.version),
                timeout=self._config.apply_timeout_seconds,
            )
        self.confirm(connection, published.version, updated=True)

    def _lost(self, loss: Loss) -> None:
        log.warning("instance_lost", instance=loss.instance_id, epoch=loss.epoch, reason=loss.reason)
        connection = self.connections.get(loss.instance_id)
        if connection is not None and connection.epoch == loss.epoch:
            self._metrics.losses.labels(loss.instance_id).inc()
            self._close(connection, loss.reason)

    def _close(self, connection: Connection, reason: str) -> None:
        if connection.gone.is_set():
            return
        connection.gone.set()
        self.connections.pop(connection.instance_id, None)
        self._dispatcher.link_lost(connection.link, reason)
        if connection.task is not None and connection.task is not asyncio.current_task():
            connection.task.cancel()

    async def _close_all(self) -> None:
        tasks = [each.task for each in self.connections.values() if each.task is not None]
        for connection in list(self.connections.values()):
            self._close(connection, "the gateway stops")
        await end(tasks)
