"""Migration of one instance: the moves that it makes, and the samples that come to it."""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
import structlog

from paceline.internal.v1 import migration_pb2 as pb
from paceline.internal.v1 import migration_pb2_grpc as rpc
from services.generation.config import GenerationConfig
from services.generation.instance import Instance
from services.generation.migration import image, nixl
from services.generation.migration.arrivals import Arrivals, new_token
from services.generation.migration.departure import Departure
from services.generation.migration.engine import MigrationEngine
from services.generation.migration.metrics import MigrationMetrics
from services.generation.migration.place import Place, leaving
from services.generation.migration.port import KvPort
from services.generation.migration.ports import LocalPort, Ports, RankPorts
from services.generation.migration.prefix import hand_back
from services.generation.migration.reason import NotMoved, Reason
from services.generation.migration.store import UnsupportedCaches
from services.generation.migration.terms import Limits, check_geometry, geometry_of
from services.generation.rollouts.origin import Origin
from services.generation.samples import RunningSample
from services.platform.channel import open_channel
from services.platform.config import ConfigError
from services.platform.errors import NotFound, Unavailable

T = TypeVar("T")
_log = structlog.get_logger(__name__)
_REMEMBERED = 4096
# How often deadlines and connections of what is coming are looked at.
_SWEEP_SECONDS = 0.1


class Migration:
    """Used from the event loop. `open` before anything else; `close` at the end."""

    def __init__(self, config: GenerationConfig, instance: Instance, metrics: MigrationMetrics) -> None:
        if config.migration_transport == "nixl" and not nixl.installed():
            raise ConfigError(["migration_transport: the package nixl is not installed"])
        self._config = config
        self._instance = instance
        self._metrics = metrics
        self._loop = instance.loop
        self._engine: MigrationEngine = self._loop.ready.result().migration
        self._limits = Limits(
            config.migration_timeout_seconds,
            config.migration_stall_seconds,
            config.migration_claim_seconds,
            config.migration_outgoing,
            config.migration_incoming,
            config.migration_chunk_bytes,
        )
        self.arrivals = Arrivals(self._loop, self._engine, self._limits, metrics)
        self._place: Place | None = None
        self._own: KvPort | None = None
        # Why nothing is moved; until `open` has found out that it can be.
        self._unsupported = "the instance is starting"
        self._addresses: list[str] = []
        self._departures: dict[str, asyncio.Task[pb.Migration]] = {}
        self._over: OrderedDict[str, pb.Migration] = OrderedDict()
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._sweeping: asyncio.Task[None] | None = None

    async def open(self, address: str) -> None:
        """Listen for KV beside the gRPC port at this address. Where KV cannot be moved, everything is refused."""
        config, host = self._config, address.rpartition(":")[0]
        try:
            geometry, ports = await self._between_steps(self._open_ports)
        except UnsupportedCaches as error:
            _log.info("migration_unsupported", reason=str(error))
            self._unsupported = str(error)
            return
        self._addresses = [f"{host}:{port}" for port in ports]
        own = self._own = self._engine.own_port() if len(ports) == 1 else None
        sending: Ports = RankPorts(self._loop, self._engine) if own is None else LocalPort(own)
        if own is not None:
            own.on_drafters = self._on_drafters
        limits = self._instance.terms().limits
        model = Path(config.model).name
        self._place = Place(
            config.instance_id,
            self._loop,
            self._engine,
            sending,
            geometry_of(geometry, model, limits.vocab_size, len(ports), config.migration_transport),
            self._limits,
            limits.max_model_len,
        )
        self._unsupported = ""
        self._sweeping = asyncio.create_task(self._sweep(sending))
        self._instance.intake.claims = self.arrivals.claim
        self._instance.leave_unclaimed = self.arrivals.end_unclaimed

    def _open_ports(self) -> tuple[Any, list[int]]:
        config = self._config
        agent = config.instance_id if config.migration_transport == "nixl" else ""
        geometry = self._engine.open_ports(self._limits.chunk_bytes, self._limits.outgoing, agent)
        return geometry, self._engine.call_ports("listen", config.host, config.migration_port, config.tls)

    async def close(self) -> None:
        """Give up what is under way: samples stay where they are."""
        departures = list(self._departures.values())
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.wait([self._sweeping])
        if departures:
            await asyncio.wait(departures)
        try:
            await self._between_steps(self._shut)
        except Unavailable:
            # The engine has ended before, and its other ranks with it.
            if self._own is not None:
                self._own.close()
        async with AsyncExitStack() as stack:
            for channel in self._channels.values():
                stack.push_async_callback(channel.close)

    def _shut(self) -> None:
        self.arrivals.end_all(Reason.CLOSED, "the receiver is stopping")
        if self._place is not None:
            self._engine.call_ports("close")

    # -- donor --------------------------------------------------------------------------------------------

    async def list_samples(self) -> pb.ListSamplesResponse:
        """The real samples in the engine, and the room there is for others."""
        return await self._between_steps(self._list_samples)

    def _list_samples(self) -> pb.ListSamplesResponse:
        loop, space = self._loop, self._engine.space
        load = loop.load
        return pb.ListSamplesResponse(
            samples=[
                self._listed(key, sample)
                for key, sample in loop.samples.items()
                if key not in loop.background
            ],
            block_size=space.block_size,
            free_blocks=space.free_blocks,
            total_blocks=space.total_blocks,
            max_running=self._config.max_num_seqs,
            free_seats=0 if self._unsupported else self.arrivals.room,
            policy_version=loop.policy_version,
            steps=load.steps,
            step_seconds=load.step_seconds,
        )

    def _listed(self, key: str, sample: RunningSample) -> pb.ListedSample:
        request, origin = sample.request, sample.origin
        limits = self._instance.terms().limits
        room = limits.max_model_len - len(request.prompt)
        return pb.ListedSample(
            key=key,
            handle=sample.handle,
            prompt_tokens=len(request.prompt),
            response_tokens=len(sample.response),
            max_tokens=min(request.sampling.max_tokens or room, room),
            acceptance=sample.acceptance,
            kv_blocks=self._engine.blocks_of(key),
            immovable=self._immovable(key),
            run_id=origin.run_id,
            prompt_id=request.prompt_id,
            slot=origin.slot,
            step=origin.step,
            migrations=sample.migrations,
        )

    def _immovable(self, key: str) -> pb.MoveReason:
        if self._unsupported:
            return pb.MOVE_REASON_UNSUPPORTED
        try:
            leaving(self._loop, key)
            self._engine.export(key)
        except NotMoved as error:
            reason: pb.MoveReason = error.reason.value
            return reason
        return pb.MOVE_REASON_UNSPECIFIED

    async def move(self, request: pb.MoveRequest) -> pb.Migration:
        """Move a sample, or say why not. The move goes on when the caller goes away."""
        if not request.migration_id:
            request.migration_id = uuid.uuid4().hex
        migration_id = request.migration_id
        if migration_id in self._over:
            return self._over[migration_id]
        departure = self._departures.get(migration_id)
        if departure is None:
            departure = asyncio.create_task(self._depart(request))
            self._departures[migration_id] = departure
        return await asyncio.shield(departure)

    async def _depart(self, request: pb.MoveRequest) -> pb.Migration:
        report = pb.Migration(
            migration_id=request.migration_id,
            key=request.key,
            receiver_id=request.receiver_id,
            by=request.by or pb.MOVE_BY_KV,
        )
        try:
            report = await self._departed(request, report)
        finally:
            del self._departures[request.migration_id]
            self._over[request.migration_id] = report
            if len(self._over) > _REMEMBERED:
                self._over.popitem(last=False)
        self._metrics.moved(report)
        outcome = pb.MoveOutcome.Name(report.outcome).removeprefix("MOVE_OUTCOME_")
        _log.info(
            "sample_move",
            migration=report.migration_id,
            sample=report.key,
            receiver=report.receiver_id,
            outcome=outcome,
            reason=report.message,
            stall=report.stall_seconds,
        )
        return report

    async def _departed(self, request: pb.MoveRequest, report: pb.Migration) -> pb.Migration:
        try:
            place = self._ready()
            if request.receiver_address == self._instance.address:
                raise NotMoved(Reason.SELF, "donor and receiver are the same")
            if len(self._departures) > self._limits.outgoing:
                raise NotMoved(Reason.DONOR_BUSY, f"{self._limits.outgoing} samples are leaving already")
            if request.by == pb.MOVE_BY_PREFIX:
                await self._between_steps(partial(hand_back, place, request, report))
                return report
            receiver: Any = rpc.MigrationServiceStub(self._channel(request.receiver_address))
        except Unavailable as error:
            return _not_moved(report, Reason.ABORTED, str(error))
        except (NotMoved, ValueError) as error:
            reason = error.reason if isinstance(error, NotMoved) else Reason.INVALID
            return _not_moved(report, reason, str(error))
        return await Departure(place, request, receiver, report).run()

    def _ready(self) -> Place:
        if self._place is None:
            raise NotMoved(Reason.UNSUPPORTED, self._unsupported)
        return self._place

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = open_channel(address, self._config)
        return self._channels[address]

    # -- receiver -----------------------------------------------------------------------------------------

    async def reserve(self, request: pb.ReserveRequest) -> pb.ReserveResponse:
        """Reserve blocks for a sample, or refuse it."""
        token = new_token()
        try:
            place = self._ready()
            check_geometry(place.geometry, request.geometry)
            terms = self._instance.terms()
            shared = await self._between_steps(lambda: self.arrivals.reserve(request, terms, token))
        except NotMoved as error:
            self._metrics.refused(error.reason)
            return pb.ReserveResponse(refused=image.refusal(error.reason, error.message))
        if self._instance.intake.fetcher is not None:
            # What its drafters will want is fetched while its KV is on the way.
            self._instance.intake.fetcher.want(Origin.of(request.item))
        reservation = pb.Reservation(data_addresses=self._addresses, token=token, shared_blocks=shared)
        return pb.ReserveResponse(reserved=reservation)

    async def commit(self, request: pb.CommitRequest) -> pb.CommitResponse:
        """Run a sample that is here."""
        closed = self._instance.terms().closed
        return await self._between_steps(lambda: self.arrivals.commit(request, closed))

    async def cancel(self, migration_id: str, *, disown: bool) -> pb.MigrationState:
        """Free a reservation; the state of the migration from now on."""
        message = "the donor gave the sample up" if disown else "the donor gave the move up"
        incoming = await self._between_steps(
            lambda: self.arrivals.cancel(migration_id, Reason.ABORTED, message, disown=disown)
        )
        state: pb.MigrationState = incoming.state.value
        return state

    async def get(self, migration_id: str) -> pb.Migration:
        """A move, or an arrival. NotFound when neither is known."""
        if migration_id in self._over:
            return self._over[migration_id]
        if migration_id in self._departures:
            return pb.Migration(migration_id=migration_id, state=pb.MIGRATION_STATE_OPEN)
        incoming = await self._between_steps(lambda: self.arrivals.get(migration_id))
        if incoming is None:
            raise NotFound("migration", migration_id)
        return pb.Migration(
            migration_id=migration_id,
            state=incoming.state.value,
            reason=pb.MOVE_REASON_UNSPECIFIED if incoming.reason is None else incoming.reason.value,
            message=incoming.message,
            key=incoming.sample_id,
            receiver_id=self._config.instance_id,
        )

    def _on_drafters(self, migration_id: str, states: bytes) -> None:
        """In a thread of the port."""
        self._loop.call(lambda: self.arrivals.drafters(migration_id, states))

    async def _sweep(self, ports: Ports) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            if not len(self.arrivals):
                continue
            try:
                await self._between_steps(partial(self.arrivals.sweep, await ports.failures()))
            except Unavailable:
                return

    async def _between_steps(self, act: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._loop.call(act))


def _not_moved(report: pb.Migration, reason: Reason, message: str) -> pb.Migration:
    """Nothing was begun."""
    report.state, report.outcome = pb.MIGRATION_STATE_CANCELLED, pb.MOVE_OUTCOME_REFUSED
    report.reason, report.message = reason.value, message
    return report
