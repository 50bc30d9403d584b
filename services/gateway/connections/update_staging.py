"""Staging of weights of an update on the instances: from a folder, pushed from one to the next, or broadcast."""

import time
from dataclasses import dataclass, field

import structlog

from paceline.errors import Violation
from paceline.v1 import weight_pb2 as pb
from services.contracts.errors import InvalidArgument, ServiceError, Unavailable
from services.gateway.connections.connection import Connection, InstanceResult, on_all
from services.gateway.connections.roster import Roster
from services.gateway.connections.staging_verdict import judge
from services.gateway.connections.stream_staging import StreamStaging
from services.gateway.fleet.update_book import WeightUpdate
from services.gateway.metrics import GatewayMetrics

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StagingOutcome:
    """Outcome of staging: folder (empty for pushed weights), checksum, and what each instance says."""

    path: str
    checksum: str
    instances: list[pb.InstanceUpdate]


@dataclass(eq=False)
class UpdateStaging:
    """Staging of one update at a time. Calls of one update must not overlap."""

    roster: Roster
    metrics: GatewayMetrics
    # Instance id -> result of the last staging.
    _staged: dict[str, pb.InstanceUpdate] = field(init=False, default_factory=dict)
    # Of the update whose weights are pushed now.
    _streaming: StreamStaging | None = field(init=False, default=None)

    @property
    def receiving(self) -> bool:
        """True while an instance receives pushed weights."""
        return self._streaming is not None and self._streaming.running

    async def stream_target(self, update: WeightUpdate) -> pb.StreamTarget:
        """Return the instance that the weights are pushed to now. ServiceError: none can take them."""
        try:
            return (await self._stream(update)).target()
        except ServiceError:
            # Whoever starts the update again finds other instances, or the same ones well.
            self.end_streaming()
            raise

    async def collective_ranks(
        self, update: WeightUpdate, rendezvous: pb.CollectiveRendezvous
    ) -> pb.CollectiveRanks:
        """Return the instances that take part in a broadcast now.

        Another rendezvous takes the place of the one before. ServiceError: none can.
        """
        if self._streaming is not None and self._streaming.rendezvous != rendezvous:
            self.end_streaming()
        try:
            streaming = await self._stream(update, rendezvous)
            return pb.CollectiveRanks(instance_ids=[each.instance_id for each in streaming.taking_part()])
        except ServiceError:
            self.end_streaming()
            raise

    async def stage(
        self, update: WeightUpdate, source: pb.DiskWeights | pb.StreamedWeights
    ) -> StagingOutcome:
        """Have every live instance check and stage the weights, or wait until all have those pushed.

        Raises InvalidArgument for a source that is not of the update's transport, and what `judge` makes of the
        instances' answers; weights that are wrong are discarded everywhere.
        """
        begin = time.perf_counter()
        if isinstance(source, pb.StreamedWeights):
            _check_transport(update, "streamed", bool(update.ticket))
            results = await (await self._stream(update)).results(source.left_out)
            # A call that comes again asks the instances again.
            self.end_streaming()
            path, announced = "", source.checksum
        else:
            _check_transport(update, "disk", not update.ticket)
            await self.roster.settled()
            path, announced = source.path, ""
            results = await on_all(
                self.roster.live(), lambda each: each.stage(update.version, source), self.roster.pace
            )
        self.metrics.update_seconds.labels("stage").observe(time.perf_counter() - begin)
        try:
            self._staged, checksum = judge(results, streamed=bool(update.ticket), announced=announced)
        except ServiceError as error:
            if not isinstance(error, Unavailable):
                await self.discard(update.version)
            raise
        return StagingOutcome(path, checksum, [result.update for result in results])

    async def instances_with(self, update: WeightUpdate) -> list[Connection]:
        """Return the live instances that have staged the weights."""
        if not (found := self._instances_with(update)):
            # After a change of the gateway they may be on their way.
            await self.roster.settled()
            found = self._instances_with(update)
        return found

    def describe(self, result: InstanceResult) -> None:
        """Add what the instance staged to the result of applying it."""
        if staged := self._staged.get(result.connection.instance_id):
            result.update.checksum = staged.checksum
            result.update.stage_time.CopyFrom(staged.stage_time)

    async def discard(self, version: int) -> None:
        """Have all live instances drop what they have staged of a version."""
        for result in await on_all(self.roster.live(), lambda each: each.discard(version), self.roster.pace):
            if result.error is not None:
                instance_id = result.connection.instance_id
                log.warning("discard_failed", instance=instance_id, error=result.error.message)

    def end_streaming(self) -> None:
        """Let instances receive nothing more."""
        if self._streaming is not None:
            self._streaming.end()
            self._streaming = None

    def _instances_with(self, update: WeightUpdate) -> list[Connection]:
        return [each for each in self.roster.live() if each.staged_version == update.version]

    async def _stream(
        self, update: WeightUpdate, rendezvous: pb.CollectiveRendezvous | None = None
    ) -> StreamStaging:
        """Return the staging of pushed weights, which begins with the first call.

        A gateway that has not begun it does not know the rendezvous: instances go on with the one that they know.
        """
        if self._streaming is None or self._streaming.update_id != update.update_id:
            self.end_streaming()
            await self.roster.settled()
            if rendezvous is None and update.collective:
                rendezvous = pb.CollectiveRendezvous()
            self._streaming = StreamStaging(update, self.roster.live(), self.roster.pace, rendezvous)
        return self._streaming


def _check_transport(update: WeightUpdate, field: str, right: bool) -> None:
    if not right:
        transport = "COLLECTIVE" if update.collective else "STREAM" if update.ticket else "DISK"
        raise InvalidArgument([Violation(field, f"is set; the transport of this update is {transport}")])
