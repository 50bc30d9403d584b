"""Stage an update's weights on the instances: from a folder, or pushed from one to the next.

Each instance has a task that receives or reads the weights and checks them. The tasks belong to the update and
outlive the call that waits for them. Their results give one verdict: an instance that finds the weights wrong
ends the attempt everywhere, and one that does not answer does not count. A new transport of weights is one entry of
`TRANSPORTS`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import structlog

from paceline.errors import Violation
from paceline.internal.v1 import weight_peer_pb2
from paceline.v1 import weight_pb2 as pb
from services.contracts.errors import (
    Aborted,
    DataLoss,
    InvalidArgument,
    ServiceError,
    Unavailable,
    Unimplemented,
)
from services.contracts.files import check_weight_folder
from services.gateway.instances.connection import (
    Connection,
    InstanceResult,
    WeightSource,
    attempt,
    failed,
    on_all,
)
from services.gateway.instances.roster import ChainLink, Roster, chain, predecessors
from services.gateway.metrics import GatewayMetrics
from services.gateway.scheduler.turns import Pace
from services.gateway.state.fleet_health import MemberState
from services.gateway.state.update_book import WeightUpdate

HandedOver = pb.DiskWeights | pb.StreamedWeights
"""Weights as the trainer hands them over: messages of UpdateWeights."""


@dataclass(frozen=True, slots=True)
class GatewayTransport:
    """Staging of the weights of one transport on the instances."""

    number: int
    """Number in the protocol."""
    source: str
    """Field of UpdateWeights with which the trainer hands them over."""
    pushed: bool
    """The trainer sends bytes under a ticket once the update is started. False: the weights are in a folder."""
    refusals: frozenset[grpc.StatusCode]
    """Codes of an instance's error that are a verdict on the weights for all instances."""
    check: Callable[[Any, Path | None], None]
    """Raises ServiceError for what is handed over and cannot be staged; the second argument is `weights_root`."""
    outcome: Callable[[Any], tuple[str, str]]
    """Returns the folder (empty for pushed weights) and the checksum that the trainer announces."""

    @property
    def name(self) -> str:
        """Name in the protocol, without its prefix."""
        return pb.WeightTransport.Name(self.number).removeprefix("WEIGHT_TRANSPORT_")


def _check_folders(disk: pb.DiskWeights, root: Path | None) -> None:
    check_weight_folder(disk.path, root)
    if disk.delta:
        check_weight_folder(disk.delta, root, field="disk.delta")


# All instances read the same folder, so damage is a verdict for all. Pushed weights may be damaged on one instance.
DISK = GatewayTransport(
    number=pb.WEIGHT_TRANSPORT_DISK,
    source="disk",
    pushed=False,
    refusals=frozenset({grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DATA_LOSS}),
    check=_check_folders,
    outcome=lambda disk: (disk.path, ""),
)
STREAM = GatewayTransport(
    number=pb.WEIGHT_TRANSPORT_STREAM,
    source="streamed",
    pushed=True,
    refusals=frozenset({grpc.StatusCode.INVALID_ARGUMENT}),
    check=lambda streamed, root: None,
    outcome=lambda streamed: ("", streamed.checksum),
)
TRANSPORTS = {each.number: each for each in (DISK, STREAM)}
_BY_MESSAGE = {pb.DiskWeights: DISK, pb.StreamedWeights: STREAM}


def transport_of(update: WeightUpdate) -> GatewayTransport:
    """Return the transport with which an update was started."""
    return STREAM if update.ticket else DISK


def check_requested(number: int) -> list[Violation]:
    """Return what is wrong with a requested transport. Unimplemented: it has its place in the protocol alone."""
    if number == pb.WEIGHT_TRANSPORT_DEVICE:
        text = (
            "weights do not go from device to device: use transport STREAM, or DISK with a shared file system"
        )
        raise Unimplemented("DEVICE", text)
    if number in TRANSPORTS:
        return []
    allowed = " or ".join(each.name for each in TRANSPORTS.values())
    return [Violation("transport", f"is {number}; must be {allowed}")]


def transport_for(source: HandedOver, update: WeightUpdate) -> GatewayTransport:
    """Return the transport of handed-over weights; InvalidArgument: the update was started with another one."""
    found, started = _BY_MESSAGE[type(source)], transport_of(update)
    if found is not started:
        text = f"is set; the transport of this update is {started.name}"
        raise InvalidArgument([Violation(found.source, text)])
    return found


log = structlog.get_logger(__name__)

# Codes with which an instance says that it has a problem, rather than that the weights are wrong.
_UNWELL = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.ABORTED,
    }
)
# Codes with which an instance says that it could not receive what others could: its disk is full, for example.
_UNABLE = frozenset(
    {
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


@dataclass(eq=False)
class UpdateStaging:
    """Staging of one update at a time. Calls must not overlap, except for `results`, which waits."""

    roster: Roster
    metrics: GatewayMetrics
    # Instance id -> result of the last staging.
    _staged: dict[str, pb.InstanceUpdate] = field(init=False, default_factory=dict)
    # The staging in progress, and the id of its update if the weights are pushed.
    _current: InstanceStaging | None = field(init=False, default=None)
    _pushed: str = field(init=False, default="")

    @property
    def running(self) -> bool:
        """True while an instance receives or reads weights."""
        return self._current is not None and self._current.running

    async def stream_target(self, update: WeightUpdate) -> pb.StreamTarget:
        """Return the instance to push the weights to. ServiceError: no instance can take them."""
        try:
            first = (await self._stream(update)).taking_part()[0]
        except ServiceError:
            # If the update is started again, it finds other instances, or the same ones recovered.
            self.end()
            raise
        return pb.StreamTarget(
            instance_id=first.instance_id, address=first.member.record.address, ticket=update.ticket
        )

    async def begin(self, update: WeightUpdate, source: HandedOver) -> InstanceStaging:
        """Have every live instance check and stage the weights, or continue the staging of pushed ones.

        InvalidArgument: the source is not of the update's transport.
        """
        if transport_for(source, update).pushed:
            return await self._stream(update)
        await self.roster.settled()
        self.end()
        if not (live := self.roster.live()):
            raise Unavailable("no live instance", retry_after=2.0)
        described: Any = source
        self._current = InstanceStaging(update, dict.fromkeys(live, described), self.roster.pace)
        return self._current

    async def results(self, staging: InstanceStaging) -> list[InstanceResult]:
        """Wait until all instances have staged the weights, or one refuses them. Aborted: the staging was ended."""
        begin = time.perf_counter()
        try:
            return await staging.results()
        finally:
            if not staging.transport.pushed:
                # A transfer continues if this call is cancelled.
                staging.end()
            self.metrics.update_seconds.labels("stage").observe(time.perf_counter() - begin)

    async def conclude(
        self,
        update: WeightUpdate,
        staging: InstanceStaging,
        source: HandedOver,
        results: list[InstanceResult],
    ) -> tuple[str, str]:
        """Return the folder (empty for pushed weights) and the checksum, and end the staging.

        Another call stages again. Raises the errors of `verdict_on_staging`; wrong weights are discarded on all
        instances.
        """
        if staging is self._current:
            self.end()
        path, announced = staging.transport.outcome(source)
        try:
            self._staged, checksum = verdict_on_staging(
                results, streamed=staging.transport.pushed, announced=announced
            )
        except ServiceError as error:
            if not isinstance(error, Unavailable):
                await self.discard(update.version)
            raise
        return path, checksum

    async def instances_with(self, update: WeightUpdate) -> list[Connection]:
        """Return the live instances that have staged the weights."""
        if not (found := self._instances_with(update)):
            # After a change of the gateway they may be about to connect.
            await self.roster.settled()
            found = self._instances_with(update)
        return found

    def describe(self, result: InstanceResult) -> None:
        """Add the checksum and the time of staging to the result of applying."""
        if staged := self._staged.get(result.connection.instance_id):
            result.update.checksum = staged.checksum
            result.update.stage_time.CopyFrom(staged.stage_time)

    async def discard(self, version: int) -> None:
        """Have all live instances drop the staged weights of a version."""
        for result in await on_all(self.roster.live(), lambda each: each.discard(version), self.roster.pace):
            if result.error is not None:
                instance_id = result.connection.instance_id
                log.warning("discard_failed", instance=instance_id, error=result.error.message)

    def end(self) -> None:
        """End the staging in progress; a wait for its results fails with Aborted."""
        if self._current is not None:
            self._current.end()
        self._current, self._pushed = None, ""

    def _instances_with(self, update: WeightUpdate) -> list[Connection]:
        return [each for each in self.roster.live() if each.staged_version == update.version]

    async def _stream(self, update: WeightUpdate) -> InstanceStaging:
        """Return the staging of pushed weights, which begins with the first call."""
        if self._current is not None and self._pushed == update.update_id:
            return self._current
        self.end()
        await self.roster.settled()
        sources = peer_sources(update, self.roster.live())
        self._current = InstanceStaging(update, sources, self.roster.pace)
        self._pushed = update.update_id
        return self._current


class InstanceStaging:
    """One task for each instance, which receives or reads weights and checks them.

    The tasks belong to the update, not to the call that waits for them: if the wait is cancelled they continue, and
    another wait may begin.
    """

    def __init__(self, update: WeightUpdate, sources: Mapping[Connection, WeightSource], pace: Pace) -> None:
        """Begin to stage the weights of an update on the instances of `sources`."""
        self.transport = transport_of(update)
        self._tasks = {
            connection: asyncio.create_task(
                _stage_on(connection, update.version, source, pace), name=f"stage-{connection.instance_id}"
            )
            for connection, source in sources.items()
        }

    @property
    def running(self) -> bool:
        """True while an instance stages."""
        return any(not task.done() for task in self._tasks.values())

    @property
    def refusal(self) -> ServiceError | None:
        """Error with which an instance refused the weights for all instances; None if there is none."""
        errors = (self._error(each) for each in self._tasks)
        return next((error for error in errors if error and error.code in self.transport.refusals), None)

    def taking_part(self) -> list[Connection]:
        """Return the instances that are alive and have not failed, at least one.

        ServiceError: the weights were refused, or there is no such instance, with the error of the last to fail.
        """
        if refusal := self.refusal:
            raise refusal
        living = [each for each in self._tasks if not each.gone.is_set() and not self._error(each)]
        if living:
            return living
        for connection in reversed(self._tasks):
            if error := self._error(connection):
                raise error
        raise Unavailable("every instance that the weights were pushed to is gone", retry_after=2.0)

    async def results(self) -> list[InstanceResult]:
        """Return the result of each instance, once all are done.

        A refusal ends the wait, since no other result would change it. Aborted: `end` was called.
        """
        pending = {task for task in self._tasks.values() if not task.done()}
        while pending and not self.refusal:
            # `gather` would cancel the tasks together with the call that waits.
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if any(task.cancelled() for task in self._tasks.values()):
            text = "these weights are no longer being staged: the update was aborted, or its staging was restarted"
            raise Aborted("STAGING_ENDED", text)
        return [
            task.result() if task.done() else failed(connection, _without_result())
            for connection, task in self._tasks.items()
        ]

    def end(self) -> None:
        """Cancel the staging on all instances; a wait for results fails with Aborted."""
        for task in self._tasks.values():
            task.cancel()

    def _error(self, connection: Connection) -> ServiceError | None:
        task = self._tasks[connection]
        return task.result().error if task.done() and not task.cancelled() else None


async def _stage_on(connection: Connection, version: int, source: WeightSource, pace: Pace) -> InstanceResult:
    return await attempt(connection, lambda each: each.stage(version, source), pace)


def _without_result() -> ServiceError:
    return Unavailable("another instance refused the weights before this one had them")


def peer_sources(update: WeightUpdate, connections: Sequence[Connection]) -> dict[Connection, WeightSource]:
    """Return sources of pushed weights, in order: each instance fetches from its predecessors in the chain."""
    by_id = {each.instance_id: each for each in connections}
    order = chain(
        ChainLink(each.instance_id, each.member.record.address, each.member.state is MemberState.STALE)
        for each in connections
    )
    return {
        by_id[link.instance_id]: weight_peer_pb2.PeerWeights(
            update_id=update.update_id,
            ticket=update.ticket,
            peers=predecessors(order, place),
            has_successor=place + 1 < len(order),
        )
        for place, link in enumerate(order)
    }


def verdict_on_staging(
    results: Sequence[InstanceResult], *, streamed: bool, announced: str = ""
) -> tuple[dict[str, pb.InstanceUpdate], str]:
    """Return the report of each instance that has staged the weights, and the checksum on which they agree.

    An instance that finds them wrong ends the attempt everywhere, with its error; one that does not answer does not
    count. Weights that were `streamed` may have been damaged on the way to one instance, or its disk may be full:
    such an error counts only if no instance has staged them.

    Raises:
        Unavailable: no instance could stage the weights, but none of them found the weights wrong.
        ServiceError: the weights are wrong, or differ from the checksum that the sender `announced`.
    """
    own = _UNWELL
    if streamed and any(result.error is None for result in results):
        own = _UNWELL | _UNABLE
    staged = {}
    for result in results:
        instance_id, error = result.connection.instance_id, result.error
        if error is None:
            staged[instance_id] = result.update
        elif error.code in own:
            # It serves the old version while that is published, and loads the new one afterwards.
            log.warning("not_staged", instance=instance_id, error=error.message)
        else:
            raise ServiceError(f"{instance_id}: {error.message}", *error.details, code=error.code)
    if not staged:
        raise Unavailable("no instance could stage the weights", retry_after=2.0)
    checksums = {instance_id: update.checksum for instance_id, update in staged.items()}
    if len(set(checksums.values())) > 1:
        raise DataLoss(f"instances read different weights from the same path: {checksums}")
    checksum = next(iter(checksums.values()))
    if announced not in ("", checksum):
        raise DataLoss(f"checksum of what was pushed is {checksum}, the sender has {announced}")
    return staged, checksum
