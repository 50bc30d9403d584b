"""Staging of weights of an update on the instances: from a folder, pushed from one to the next, or broadcast."""

import time
from dataclasses import dataclass, field

import grpc
import structlog

from paceline.errors import Violation
from paceline.v1 import weight_pb2 as pb
from services.contracts.errors import InvalidArgument, ServiceError, Unavailable
from services.gateway.connections.connection import Connection, InstanceResult, on_all
from services.gateway.connections.instance_staging import InstanceStaging
from services.gateway.connections.roster import Roster
from services.gateway.connections.staging_verdict import judge
from services.gateway.connections.stream_staging import StreamStaging
from services.gateway.fleet.update_book import WeightUpdate
from services.gateway.metrics import GatewayMetrics

log = structlog.get_logger(__name__)


# Of a folder, which all instances read, damage is a verdict for all. What came to one of them may be damaged there.
_FOLDER_REFUSALS = frozenset({grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DATA_LOSS})


@dataclass(frozen=True, slots=True)
class StagingOutcome:
    """Outcome of staging: folder (empty for pushed weights), checksum, and what each instance says."""

    path: str
    checksum: str
    instances: list[pb.InstanceUpdate]


@dataclass(eq=False)
class UpdateStaging:
    """Staging of one update at a time. Calls must not overlap, but for `results`, which waits."""

    roster: Roster
    metrics: GatewayMetrics
    # Instance id -> result of the last staging.
    _staged: dict[str, pb.InstanceUpdate] = field(init=False, default_factory=dict)
    # What goes on now.
    _current: InstanceStaging | None = field(init=False, default=None)

    @property
    def running(self) -> bool:
        """True while an instance receives or reads weights."""
        return self._current is not None and self._current.running

    async def stream_target(self, update: WeightUpdate) -> pb.StreamTarget:
        """Return the instance that the weights are pushed to now. ServiceError: none can take them."""
        try:
            return (await self._stream(update)).target()
        except ServiceError:
            # Whoever starts the update again finds other instances, or the same ones well.
            self.end()
            raise

    async def collective_ranks(
        self, update: WeightUpdate, rendezvous: pb.CollectiveRendezvous
    ) -> pb.CollectiveRanks:
        """Return the instances that take part in a broadcast now.

        Another rendezvous takes the place of the one before. ServiceError: none can.
        """
        if isinstance(self._current, StreamStaging) and self._current.rendezvous != rendezvous:
            self.end()
        try:
            streaming = await self._stream(update, rendezvous)
            return pb.CollectiveRanks(instance_ids=[each.instance_id for each in streaming.taking_part()])
        except ServiceError:
            self.end()
            raise

    async def begin(
        self, update: WeightUpdate, source: pb.DiskWeights | pb.StreamedWeights
    ) -> InstanceStaging:
        """Have every live instance check and stage the weights, or go on with those that are pushed.

        InvalidArgument: the source is not of the update's transport.
        """
        if isinstance(source, pb.StreamedWeights):
            _check_transport(update, "streamed", bool(update.ticket))
            return await self._stream(update)
        _check_transport(update, "disk", not update.ticket)
        await self.roster.settled()
        self.end()
        if not (live := self.roster.live()):
            raise Unavailable("no live instance", retry_after=2.0)
        sources = dict.fromkeys(live, source)
        self._current = InstanceStaging(update.version, sources, self.roster.pace, _FOLDER_REFUSALS)
        return self._current

    async def results(
        self, staging: InstanceStaging, source: pb.DiskWeights | pb.StreamedWeights
    ) -> list[InstanceResult]:
        """Wait until all instances have staged the weights, or one refuses them. Aborted: it was ended."""
        begin = time.perf_counter()
        try:
            if isinstance(source, pb.StreamedWeights):
                # They go on coming if this caller goes away.
                return await staging.results(source.left_out)
            try:
                return await staging.results()
            finally:
                staging.end()
        finally:
            self.metrics.update_seconds.labels("stage").observe(time.perf_counter() - begin)

    async def conclude(
        self,
        update: WeightUpdate,
        staging: InstanceStaging,
        source: pb.DiskWeights | pb.StreamedWeights,
        results: list[InstanceResult],
    ) -> StagingOutcome:
        """Return what came of a staging; a call that comes again asks the instances again.

        Raises what `judge` makes of the instances' answers; weights that are wrong are discarded everywhere.
        """
        if staging is self._current:
            self.end()
        path, announced = (
            ("", source.checksum) if isinstance(source, pb.StreamedWeights) else (source.path, "")
        )
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

    def end(self) -> None:
        """Let instances stage nothing more; who waits for it is told."""
        if self._current is not None:
            self._current.end()
            self._current = None

    def _instances_with(self, update: WeightUpdate) -> list[Connection]:
        return [each for each in self.roster.live() if each.staged_version == update.version]

    async def _stream(
        self, update: WeightUpdate, rendezvous: pb.CollectiveRendezvous | None = None
    ) -> StreamStaging:
        """Return the staging of pushed weights, which begins with the first call.

        A gateway that has not begun it does not know the rendezvous: instances go on with the one that they know.
        """
        current = self._current
        if isinstance(current, StreamStaging) and current.update_id == update.update_id:
            return current
        self.end()
        await self.roster.settled()
        if rendezvous is None and update.collective:
            rendezvous = pb.CollectiveRendezvous()
        self._current = started = StreamStaging(update, self.roster.live(), self.roster.pace, rendezvous)
        return started


def _check_transport(update: WeightUpdate, field: str, right: bool) -> None:
    if not right:
        transport = "COLLECTIVE" if update.collective else "STREAM" if update.ticket else "DISK"
        raise InvalidArgument([Violation(field, f"is set; the transport of this update is {transport}")])
