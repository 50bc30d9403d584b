"""Migration of one instance: its RPCs, the moves that it makes, and the samples that arrive."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import structlog

from paceline.internal.v1 import migration_pb2 as pb
from paceline.internal.v1 import migration_pb2_grpc as rpc
from paceline.times import seconds_of
from services.contracts.errors import NotFound, Unavailable
from services.generation.config import GenerationConfig
from services.generation.draft_cache.fetcher import ShardFetcher
from services.generation.draft_cache.origin import Origin
from services.generation.engine.types import MigrationEngine
from services.generation.kv_transfer.block_store import UnsupportedCaches
from services.generation.kv_transfer.links import nixl_installed
from services.generation.kv_transfer.port import KvPort
from services.generation.kv_transfer.reason import NotMoved, Reason
from services.generation.loop.engine_loop import EngineLoop
from services.generation.loop.work_items import AdmissionTerms
from services.generation.migration.arrivals import Arrivals, new_token
from services.generation.migration.departure import Departure
from services.generation.migration.leaving import (
    DonorContext,
    Ports,
    check_geometry,
    geometry_of,
    hand_back,
    listed_sample,
)
from services.generation.migration.metrics import MigrationMetrics, outcome_name, refused
from services.generation.migration.protocol import arrival_report
from services.platform.config import ConfigError
from services.platform.grpc.channel import open_channel

_log = structlog.get_logger(__name__)
_Context = grpc.aio.ServicerContext[Any, Any]
# Idle channels to receivers that are kept.
_MOST_IDLE = 32
# Ended moves that are remembered.
_REMEMBERED = 4096
# Interval at which deadlines and connections of arriving samples are checked.
_SWEEP_SECONDS = 0.1


class ReceiverChannels:
    """Channels to receivers, by address. The `most_idle` most recently used idle channels are kept for later moves.

    Not all are kept, because an instance that restarts has a new address, and their number would only grow.
    """

    def __init__(self, dial: Callable[[str], grpc.aio.Channel], most_idle: int = _MOST_IDLE) -> None:
        self._dial = dial
        self._most_idle = most_idle
        # Least recently used first.
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        self._users: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._channels)

    @asynccontextmanager
    async def to(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        """Return a channel that stays open in the context. ValueError if the token may not be sent there."""
        if address not in self._channels:
            self._channels[address] = self._dial(address)
        self._channels.move_to_end(address)
        self._users[address] += 1
        try:
            yield self._channels[address]
        finally:
            self._users[address] -= 1
            if not self._users[address]:
                del self._users[address]
            await self._close_surplus()

    async def close(self) -> None:
        """Close all channels."""
        channels, self._channels = self._channels, OrderedDict()
        async with AsyncExitStack() as stack:
            for channel in channels.values():
                stack.push_async_callback(channel.close)

    async def _close_surplus(self) -> None:
        idle = [address for address in self._channels if address not in self._users]
        surplus = [self._channels.pop(address) for address in idle[: -self._most_idle or None]]
        for channel in surplus:
            await channel.close()


class Migration(rpc.MigrationServiceServicer):
    """MigrationService of an instance. Call `open` first, and `close` at the end."""

    def __init__(
        self,
        config: GenerationConfig,
        loop: EngineLoop,
        terms: Callable[[], AdmissionTerms],
        fetcher: ShardFetcher | None,
        metrics: MigrationMetrics,
    ) -> None:
        """Create a service that refuses moves until it is opened.

        Args:
            config: settings of the instance.
            loop: loop of its engine, which is ready.
            terms: returns the terms on which samples are accepted.
            fetcher: fetches rollouts for the drafters of arriving samples; None without a draft store.
            metrics: counts moves and arrivals.
        """
        if config.migration_transport == "nixl" and not nixl_installed():
            raise ConfigError(["migration_transport: the package nixl is not installed"])
        self._config = config
        self._loop = loop
        self._terms = terms
        self._fetcher = fetcher
        self._metrics = metrics
        self._address = ""
        self._engine: MigrationEngine = self._loop.ready.result().migration
        self.arrivals = Arrivals(self._loop, self._engine, config, metrics)
        self._donor: DonorContext | None = None
        self._local_port: KvPort | None = None
        # Reason why moves are refused; empty once `open` has found that KV can be moved.
        self._unsupported = "the instance is starting"
        self._addresses: list[str] = []
        self._departures: dict[str, asyncio.Task[pb.Migration]] = {}
        self._ended: OrderedDict[str, pb.Migration] = OrderedDict()
        self._channels = ReceiverChannels(lambda address: open_channel(address, config))
        self._sweeping: asyncio.Task[None] | None = None

    async def open(self, address: str) -> None:
        """Listen for KV on the host of this gRPC address. If KV cannot be moved, every move is refused."""
        config, host = self._config, address.rpartition(":")[0]
        self._address = address
        try:
            kv, ports = await self._loop.execute(self._open_ports)
        except UnsupportedCaches as error:
            _log.info("migration_unsupported", reason=str(error))
            self._unsupported = str(error)
            return
        self._addresses = [f"{host}:{port}" for port in ports]
        local = self._local_port = self._engine.own_port() if len(ports) == 1 else None
        sending = Ports(self._loop, self._engine, local)
        if local is not None:
            local.on_drafters(self._on_drafters)
        limits, model = self._terms().limits, Path(config.model).name
        self._donor = DonorContext(
            self._loop,
            self._engine,
            sending,
            geometry_of(kv, model, limits.vocab_size, len(ports), config.migration_transport),
            config,
            limits.max_model_len,
        )
        self._unsupported = ""
        self._sweeping = asyncio.create_task(self._sweep(sending))

    def _open_ports(self) -> tuple[Any, list[int]]:
        config = self._config
        agent = config.instance_id if config.migration_transport == "nixl" else ""
        geometry = self._engine.open_ports(config.migration_chunk_bytes, config.migration_outgoing, agent)
        listen = (config.host, config.migration_port, config.tls, config.migration_connections)
        return geometry, self._engine.call_ports("listen", *listen)

    async def close(self) -> None:
        """Wait for the moves in progress, free reservations, and close ports and channels."""
        departures = list(self._departures.values())
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.wait([self._sweeping])
        if departures:
            await asyncio.wait(departures)
        try:
            await self._loop.execute(self._close_ports)
        except Unavailable:
            # The engine has ended already, and its other ranks with it.
            if self._local_port is not None:
                self._local_port.close()
        await self._channels.close()

    def _close_ports(self) -> None:
        self.arrivals.end_all(Reason.CLOSED, "the receiver is stopping")
        if self._donor is not None:
            self._engine.call_ports("close")

    def _ready(self) -> DonorContext:
        if self._donor is None:
            raise NotMoved(Reason.UNSUPPORTED, self._unsupported)
        return self._donor

    # -- donor --------------------------------------------------------------------------------------------

    async def ListSamples(self, request: pb.ListSamplesRequest, context: _Context) -> pb.ListSamplesResponse:
        """Return the real samples in the engine, and the free room."""
        return await self._loop.execute(self._list_samples)

    def _list_samples(self) -> pb.ListSamplesResponse:
        loop, engine, space, load = self._loop, self._engine, self._engine.space, self._loop.load
        longest, unsupported = self._terms().limits.max_model_len, bool(self._unsupported)
        real = [key for key in loop.samples if key not in loop.samples.background]
        return pb.ListSamplesResponse(
            samples=[listed_sample(loop, engine, key, longest, unsupported) for key in real],
            block_size=space.block_size,
            free_blocks=space.free_blocks,
            total_blocks=space.total_blocks,
            max_running=loop.ready.result().max_running,
            free_capacity=0 if unsupported else self.arrivals.room,
            policy_version=loop.policy_version,
            steps=load.steps,
            step_time=load.step_time,
        )

    async def Move(self, request: pb.MoveRequest, context: _Context) -> pb.MoveResponse:
        """Move a sample, or return why not. The move continues if the caller disconnects."""
        if not request.migration_id:
            request.migration_id = uuid.uuid4().hex
        migration_id = request.migration_id
        if migration_id in self._ended:
            return pb.MoveResponse(migration=self._ended[migration_id])
        departure = self._departures.get(migration_id)
        if departure is None:
            departure = asyncio.create_task(self._depart(request))
            self._departures[migration_id] = departure
        return pb.MoveResponse(migration=await asyncio.shield(departure))

    async def _depart(self, request: pb.MoveRequest) -> pb.Migration:
        report = pb.Migration(
            migration_id=request.migration_id,
            key=request.key,
            receiver_id=request.receiver_id,
            by=request.by or pb.MOVE_BY_KV,
        )
        try:
            report = await self._move(request, report)
            # Counted before the report can be queried.
            self._metrics.moved(report)
        finally:
            del self._departures[request.migration_id]
            self._ended[request.migration_id] = report
            if len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)
        _log.info(
            "sample_move",
            migration=report.migration_id,
            sample=report.key,
            receiver=report.receiver_id,
            outcome=outcome_name(report),
            reason=report.message,
            stall=seconds_of(report.stall_time),
        )
        return report

    async def _move(self, request: pb.MoveRequest, report: pb.Migration) -> pb.Migration:
        async with AsyncExitStack() as stack:
            try:
                donor = self._ready()
                if request.receiver_address == self._address:
                    raise NotMoved(Reason.SELF, "donor and receiver are the same")
                outgoing = self._config.migration_outgoing
                if len(self._departures) > outgoing:
                    raise NotMoved(Reason.DONOR_BUSY, f"{outgoing} samples are leaving already")
                if request.by == pb.MOVE_BY_PREFIX:
                    await self._loop.execute(partial(hand_back, self._loop, request, report))
                    return report
                channel = await stack.enter_async_context(self._channels.to(request.receiver_address))
            except Unavailable as error:
                return refused(report, Reason.ABORTED, str(error))
            except (NotMoved, ValueError) as error:
                reason = error.reason if isinstance(error, NotMoved) else Reason.INVALID
                return refused(report, reason, str(error))
            receiver: Any = rpc.MigrationServiceStub(channel)
            return await Departure(donor, request, receiver, report).run()

    # -- receiver -----------------------------------------------------------------------------------------

    async def Reserve(self, request: pb.ReserveRequest, context: _Context) -> pb.ReserveResponse:
        """Reserve blocks for a sample of another instance, or refuse it."""
        token = new_token()
        try:
            check_geometry(self._ready().geometry, request.geometry)
            # The terms are read in the engine thread, because an update may change them before it comes to this.
            shared = await self._loop.execute(lambda: self.arrivals.reserve(request, self._terms(), token))
        except NotMoved as error:
            self._metrics.refusals.labels(error.reason.name.lower()).inc()
            return pb.ReserveResponse(refused=pb.Refusal(reason=error.reason.value, message=error.message))
        if self._fetcher is not None:
            # Rollouts for its drafters are fetched while its KV arrives.
            self._fetcher.want(Origin.of(request.item))
        reservation = pb.Reservation(
            data_addresses=self._addresses, token=token, shared_blocks=shared, mixed_kv=request.mixed_kv
        )
        return pb.ReserveResponse(reserved=reservation)

    async def Commit(self, request: pb.CommitRequest, context: _Context) -> pb.CommitResponse:
        """Run a sample that has arrived."""
        return await self._loop.execute(lambda: self.arrivals.commit(request, self._terms().closed))

    async def Cancel(self, request: pb.CancelRequest, context: _Context) -> pb.CancelResponse:
        """Free a reservation, or end a disowned sample; returns the resulting state of the migration."""
        message = "the donor disowned the sample" if request.disown else "the donor cancelled the move"
        incoming = await self._loop.execute(
            lambda: self.arrivals.cancel(request.migration_id, Reason.ABORTED, message, disown=request.disown)
        )
        return pb.CancelResponse(state=incoming.state.value)

    async def GetMigration(
        self, request: pb.GetMigrationRequest, context: _Context
    ) -> pb.GetMigrationResponse:
        """Return a move or an arrival. NotFound if there is neither."""
        migration_id = request.migration_id
        if migration_id in self._ended:
            return pb.GetMigrationResponse(migration=self._ended[migration_id])
        if migration_id in self._departures:
            known = pb.Migration(migration_id=migration_id, state=pb.MIGRATION_STATE_OPEN)
            return pb.GetMigrationResponse(migration=known)
        incoming = await self._loop.execute(lambda: self.arrivals.get(migration_id))
        if incoming is None:
            raise NotFound("migration", migration_id)
        return pb.GetMigrationResponse(migration=arrival_report(incoming, self._config.instance_id))

    def _on_drafters(self, migration_id: str, states: bytes) -> None:
        """Pass the state of drafters on to the engine thread; called in a thread of the port."""
        self._loop.call(lambda: self.arrivals.begin_drafters(migration_id, states))

    async def _sweep(self, ports: Ports) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            if not len(self.arrivals):
                continue
            try:
                await self._loop.execute(partial(self.arrivals.sweep, await ports.failures()))
            except Unavailable:
                return
