"""One version's weights while an instance receives them, from a trainer that pushes or from its peers.

`PeerOrder` chooses the peer to fetch from, the nearest that works. `Followers` knows the positions of the
instances that fetch from this one, which decide how much its own source must keep. A refusal of the weights
passes from instance to instance as `WeightsRefused`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog
from google.rpc import error_details_pb2

from paceline.errors import parse_details
from paceline.internal.v1 import weight_peer_pb2 as peer_pb
from paceline.internal.v1 import weight_peer_pb2_grpc as peer_rpc
from paceline.v1 import weight_stream_pb2 as pb
from paceline.weights.safetensors import unfinished_file
from services.contracts.errors import DOMAIN, DataLoss, ServiceError, Unavailable
from services.generation.weights.files import FileContent, open_weight_file, read_content
from services.generation.weights.stream.metrics import INSTANCE, WeightStreamMetrics
from services.generation.weights.stream.stored_stream import StoredStream
from services.platform.tasks import ExponentialBackoff, Notifier, end

_PAUSE, _LONGEST_PAUSE = 0.25, 4.0
_REASON = "WEIGHTS_REFUSED"
_STATUS_DETAILS = "grpc-status-details-bin"
_log = structlog.get_logger(__name__)
# Number of corrupt pieces in a row after which the reception fails.
_MOST_CORRUPT = 3
# InvalidStateError: the call ended between reading and writing.
_LOST = (
    grpc.aio.AioRpcError,
    asyncio.InvalidStateError,
    grpc.aio.UsageError,
    ServiceError,
    TimeoutError,
    ValueError,
    OSError,
)


@dataclass(eq=False, slots=True)
class StreamFollower:
    """Instance that fetches: the position up to which it has all bytes, and the time of its last message."""

    position: int
    seen_at: float


class Followers:
    """Instances that fetch the same stream. Times are in seconds, monotonic."""

    def __init__(self, grace: float, now: float) -> None:
        """Followers that have sent nothing for `grace` seconds are not waited for."""
        self._grace = grace
        self._followers: set[StreamFollower] = set()
        self._seen_at = now
        self._confirmed = 0

    def join(self, position: int, now: float) -> StreamFollower:
        """Add a follower that begins at this position."""
        follower = StreamFollower(position, now)
        self._followers.add(follower)
        self._seen_at = now
        return follower

    def acknowledge(self, follower: StreamFollower, position: int, now: float) -> None:
        """Record the position of a follower."""
        follower.position = max(follower.position, position)
        follower.seen_at = self._seen_at = now

    def leave(self, follower: StreamFollower) -> None:
        """Remove a follower whose call has ended."""
        self._followers.discard(follower)

    def confirmed(self, received: int, expected: bool, now: float) -> int:
        """Return the position before which nothing needs to be kept at the source.

        It is the position of the foremost follower. If followers are `expected` and there is none, the next one may
        still come; after the grace period it is the position `received`, because no follower would continue from
        there.
        """
        live = [each.position for each in self._followers if now - each.seen_at <= self._grace]
        if live:
            self._confirmed = max(self._confirmed, *live)
        elif not expected or now - self._seen_at > self._grace:
            self._confirmed = received
        return min(self._confirmed, received)


class PeerOrder:
    """Addresses of peers, best first; one that failed rests for a while. Times are in seconds, monotonic."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._rests = {address: ExponentialBackoff(_PAUSE, _LONGEST_PAUSE) for address in addresses}
        self._until: dict[str, float] = {}

    def choose(self, now: float) -> str | None:
        """Return the best address that does not rest; None if all do."""
        return next((each for each in self._rests if self._until.get(each, now) <= now), None)

    def failed(self, address: str, now: float) -> None:
        """Let an address rest, each time longer."""
        self._until[address] = now + self._rests[address].failed()

    def worked(self, address: str) -> None:
        """Forget the failures of an address that sent bytes."""
        self._rests[address].succeeded()

    def wait(self, now: float) -> float | None:
        """Return the seconds until an address may be tried again; None if there are no addresses."""
        return min((max(0.0, until - now) for until in self._until.values()), default=None)


class WeightsRefused(ServiceError):
    """Raised to callers that fetch weights that were refused here; has code, message and details of the refusal."""

    def __init__(self, refusal: ServiceError) -> None:
        # First, because details that have no room are left out.
        marker = error_details_pb2.ErrorInfo(reason=_REASON, domain=DOMAIN)
        super().__init__(refusal.message, marker, *refusal.details, code=refusal.code)


def refusal_of(error: grpc.aio.AioRpcError) -> ServiceError | None:
    """Return the refusal that a peer passes on; None if it failed otherwise."""
    for key, value in error.trailing_metadata() or ():
        if key == _STATUS_DETAILS and isinstance(value, bytes):
            details = parse_details(value)
            others = [each for each in details if getattr(each, "reason", "") != _REASON]
            if len(others) < len(details):
                return ServiceError(error.details() or "", *others, code=error.code())
    return None


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Limits of a reception: bytes of a piece and of all weights, and times in seconds."""

    piece_bytes: int
    most_bytes: int
    """Most bytes of the files of a version."""
    stall_seconds: float
    """Time after which a peer that has bytes and sends none is given up."""
    idle_seconds: float
    """Time without any bytes after which the weights are given up."""


@dataclass(frozen=True, slots=True)
class Received:
    """Complete weights, and the contents of the files that were read during the reception."""

    folder: Path
    checksum: str
    contents: dict[tuple[int, ...], FileContent]


class Reception:
    """Reception of the weights of one update. Its methods run in the event loop; threads write and read files."""

    def __init__(
        self,
        order: peer_pb.PeerWeights,
        version: int,
        folder: Path,
        dial: Callable[[str], grpc.aio.Channel],
        limits: StreamLimits,
        metrics: WeightStreamMetrics,
    ) -> None:
        """Receive into an empty folder, which is removed at a failure. `dial` opens a channel to a peer."""
        self.version = version
        self.ticket = order.ticket
        self.stream = StoredStream(folder, limits.most_bytes)
        self.changed = Notifier()
        """Notifies of new bytes, and of the end."""
        self.refused: WeightsRefused | None = None
        """Refusal of the weights, if their check after the reception failed."""
        self.followers = Followers(limits.stall_seconds, time.monotonic())
        self.done: asyncio.Future[Received] = asyncio.get_running_loop().create_future()
        # Read its error, which asyncio would otherwise log as never retrieved.
        self.done.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._dial, self._limits, self._metrics = dial, limits, metrics
        self._writing = asyncio.Lock()
        self._came_at = time.monotonic()
        self._corrupt = 0
        self._contents: dict[tuple[int, ...], FileContent] = {}
        self._read_files = 0
        self.follow(order)
        self._tasks = [
            asyncio.create_task(work, name=f"weights-{order.update_id}")
            for work in (self._fetching(), self._reading(), self._watching())
        ]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    def follow(self, order: peer_pb.PeerWeights) -> None:
        """Fetch from these peers from now on."""
        self._order = order
        self._peers = PeerOrder(order.peers)

    @property
    def confirmed(self) -> int:
        """Position before which the source need not keep bytes."""
        return self.followers.confirmed(self.stream.log.end, self._order.has_successor, time.monotonic())

    async def take(self, piece: pb.WeightPiece, peer: str) -> None:
        """Put bytes at the end.

        Raises:
            DataLoss: they are corrupt; they can be sent again.
            FailedPrecondition: earlier bytes are missing.
            ServiceError: the reception has ended with this error; the disk is full, for example.
        """
        # The piece is written to its end and notified, also if the caller disconnects.
        await asyncio.shield(asyncio.ensure_future(self._take(piece, peer)))

    async def _take(self, piece: pb.WeightPiece, peer: str) -> None:
        async with self._writing:
            self.check()
            before = self.stream.log.end
            try:
                await asyncio.to_thread(self.stream.put, piece)
            except DataLoss as error:
                self._corrupt += 1
                if self._corrupt >= _MOST_CORRUPT:
                    self.fail(error)
                raise
            except ServiceError as error:
                if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED or piece.position <= before:
                    self.fail(error)
                raise
            self._corrupt = 0
            self._came_at = time.monotonic()
            self._metrics.received.labels(peer).inc(self.stream.log.end - before)
        self.changed.notify()

    def check(self) -> None:
        """Raise the error that ended the reception, if it has failed, or the refusal of the weights."""
        if self.refused is not None:
            raise self.refused
        if self.done.done() and not self.stream.whole:
            self.done.result()

    @property
    def failed(self) -> bool:
        """True once it has ended without the weights, or they were refused."""
        if self.refused is not None:
            return True
        return self.done.done() and (self.done.cancelled() or self.done.exception() is not None)

    def fail(self, error: ServiceError) -> None:
        """End the reception with an error, unless all bytes have arrived."""
        if not self.done.done() and not self.stream.whole:
            self.done.set_exception(error)
            _log.warning("weights_not_received", version=self.version, error=error.message)
            self.changed.notify()

    def refuse(self, error: ServiceError) -> None:
        """Send this refusal to all that fetch the weights from here, or push them."""
        self.refused = WeightsRefused(error)
        self.changed.notify()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Fail the reception when one of its tasks fails, so that waiters do not hang."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.done.done():
            _log.error("weight_reception_failed", version=self.version, task=task.get_name(), exc_info=error)
            text = f"version {self.version} of the weights could not be received: {error!r}"
            self.done.set_exception(ServiceError(text, code=grpc.StatusCode.INTERNAL))
            self.changed.notify()

    async def close(self) -> None:
        """End the reception, and remove incomplete weights."""
        self.fail(Unavailable("the update was given up"))
        await end(self._tasks)
        async with self._writing:
            if not self.stream.whole or not self.done.done():
                await asyncio.to_thread(self.stream.remove)
        self.done.cancel()
        self.changed.notify()

    # Reading complete files -----------------------------------------------------------------------------

    async def _reading(self) -> None:
        """Read each file once it is complete, while the next ones arrive."""
        while not self.done.done():
            whole = self.stream.whole
            # The last files are renamed once all bytes are there; staging reads them then.
            if not whole and self._read_files < self.stream.complete_files:
                await asyncio.to_thread(self._read, self._read_files)
                self._read_files += 1
            elif whole:
                folder, checksum = self.stream.folder, self.stream.checksum
                self.done.set_result(Received(folder, checksum, self._contents))
            else:
                await self.changed.wait()

    def _read(self, number: int) -> None:
        try:
            file = open_weight_file(unfinished_file(self.stream.folder, number), "")
            self._contents[file.stamp] = read_content(file)
        except (ServiceError, OSError) as error:
            # Renamed meanwhile, because all bytes are there; else staging finds the same error and reports it.
            reason = error.message if isinstance(error, ServiceError) else str(error)
            _log.info("weights_not_read", version=self.version, file=number, error=reason)

    async def _watching(self) -> None:
        """Give up when no more bytes arrive."""
        while not self.done.done():
            silent = time.monotonic() - self._came_at
            if silent > self._limits.idle_seconds:
                text = f"no bytes of version {self.version} have come for {self._limits.idle_seconds:g} s"
                self.fail(Unavailable(text))
            await asyncio.wait({self.done}, timeout=min(1.0, self._limits.idle_seconds / 4))
        if not self.stream.whole:
            async with self._writing:
                await asyncio.to_thread(self.stream.remove)

    # Fetching -------------------------------------------------------------------------------------------

    async def _fetching(self) -> None:
        while not self.done.done() and not self.stream.whole:
            peers, now = self._peers, time.monotonic()
            address = peers.choose(now)
            if address is None:
                pause = peers.wait(now)
                await asyncio.sleep(self._limits.stall_seconds if pause is None else max(0.01, pause))
                continue
            try:
                await self._fetch(address, peers)
            except _LOST as error:
                if isinstance(error, grpc.aio.AioRpcError) and (refusal := refusal_of(error)):
                    # The peer had all bytes, and other peers have the same.
                    return self.fail(refusal)
                reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
                _log.info("weights_peer_left", peer=address, position=self.stream.log.end, reason=reason)
                self._metrics.retries.inc()
                peers.failed(address, time.monotonic())

    async def _fetch(self, address: str, peers: PeerOrder) -> None:
        """Fetch from a peer until all bytes are here. TimeoutError: it has more, and sends nothing."""
        async with self._dial(address) as channel:
            call = peer_rpc.WeightPeerServiceStub(channel).FetchWeights()  # type: ignore[no-untyped-call]
            try:
                await call.write(self._request())
                while not self.stream.whole and not self.done.done() and peers is self._peers:
                    answer = await asyncio.wait_for(call.read(), self._limits.stall_seconds)
                    if answer is grpc.aio.EOF:
                        if (await call.code()) is grpc.StatusCode.OK:
                            raise Unavailable(f"{address} ended before all was sent")
                        # Raises the peer's error.
                        await call
                    if answer.HasField("piece"):
                        await self.take(answer.piece, INSTANCE)
                        peers.worked(address)
                    await call.write(self._request())
                if self.stream.whole:
                    # The end is acknowledged, so that the peer's source need not keep any bytes.
                    await call.done_writing()
                    await asyncio.wait_for(call.read(), self._limits.stall_seconds)
            finally:
                call.cancel()

    def _request(self) -> peer_pb.FetchWeightsRequest:
        return peer_pb.FetchWeightsRequest(
            update_id=self._order.update_id,
            policy_version=self.version,
            checksum=self._order.checksum,
            position=self.stream.log.end,
        )
