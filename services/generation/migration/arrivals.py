"""Receive migrating samples: reserve room, run them, and hand them to the gateway that claims them.

`ReceiverLedger` makes the decisions, and `Arrivals` carries them out. Migrations change only in the engine thread,
between two steps, so a commit, a claim and a deadline cannot race.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import structlog
from google.rpc import code_pb2

from paceline.internal.v1 import generation_pb2
from paceline.internal.v1 import migration_pb2 as pb
from paceline.times import seconds_of
from paceline.v1 import fleet_pb2
from services.contracts import rollout as convert
from services.contracts.errors import InvalidArgument, ServiceError
from services.contracts.rollout import StoredRollout
from services.contracts.sampling import check_tokens
from services.generation.config import GenerationConfig
from services.generation.draft_cache.origin import Origin
from services.generation.engine.types import EngineRequest, MigrationEngine
from services.generation.kv_transfer.reason import NotMoved, Reason
from services.generation.loop.engine_loop import EngineLoop
from services.generation.loop.samples import RunningSample
from services.generation.loop.work_items import AdmissionTerms, check_item
from services.generation.loop.work_stream import WorkStream
from services.generation.migration import protocol
from services.generation.migration.metrics import MigrationMetrics
from services.generation.migration.protocol import Incoming, ReceiverLedger, ReceiverState

_log = structlog.get_logger(__name__)
# Handle of the only sample of an `UnclaimedStream`.
HANDLE = 0


class UnclaimedStream:
    """Stand-in for the stream of a sample that no gateway has claimed yet: keeps its events until then.

    For the engine thread only.
    """

    background = False

    def __init__(self) -> None:
        self.samples: dict[int, RunningSample] = {}
        self._ended: RunningSample | None = None
        self._finished: generation_pb2.Finished | None = None
        self._refused: generation_pb2.Refused | None = None

    def add(self, sample: RunningSample, now: float) -> None:
        """Add the sample."""
        self.samples[sample.handle] = sample

    def reached(self, sample: RunningSample) -> None:
        """Do nothing: tokens stay with the sample."""

    def finish(self, sample: RunningSample, event: generation_pb2.Finished) -> None:
        """Keep the end of the sample."""
        self._ended, self._finished = sample, event
        self.samples.clear()

    def refuse(self, event: generation_pb2.Refused) -> None:
        """Keep the refusal of the sample."""
        self._refused = event
        self.samples.clear()

    def flush(
        self, load: fleet_pb2.InstanceLoad, policy_version: int, now: float, *, everything: bool = False
    ) -> None:
        """Do nothing: tokens stay with the sample."""

    def put(self, event: Exception | None) -> None:
        """Do nothing: a gateway that claims the sample finds the engine gone."""

    def hand_over(self, stream: WorkStream, handle: int, now: float) -> None:
        """Move the sample to a gateway's stream, which sends its tokens, and its end, with the next flush."""
        if self._refused is not None:
            self._refused.handle = handle
            stream.refuse(self._refused)
        elif self._ended is not None and self._finished is not None:
            self._ended.handle = self._finished.handle = handle
            stream.finish(self._ended, self._finished)
        else:
            for sample in self.samples.values():
                stream.take_over(sample, handle, now)


@dataclass(slots=True)
class ArrivingSample:
    """Sample with reserved blocks whose KV is arriving."""

    request: EngineRequest
    origin: Origin
    rollout: StoredRollout | None
    migrations: int
    trace_parent: str
    streamed: bool
    # The running sample, once its drafters have begun.
    sample: RunningSample | None = None
    stream: UnclaimedStream = field(default_factory=UnclaimedStream)

    @classmethod
    def of(cls, message: pb.ReserveRequest, terms: AdmissionTerms, loop: EngineLoop) -> ArrivingSample:
        """Read the sample of a request. NotMoved if it is not acceptable."""
        try:
            request = check_item(message.item, terms, (), loop.next_sample_id)
            if violations := check_tokens(
                message.cached_token_ids, terms.limits, "cached_token_ids", allow_empty=True
            ):
                raise InvalidArgument(violations)
            rollout = convert.from_proto(message.rollout) if message.HasField("rollout") else None
        except ServiceError as error:
            raise NotMoved(Reason.INVALID, error.message) from error
        if message.cached_token_ids:
            request = replace(request, cached=tuple(message.cached_token_ids))
        request = replace(request, mixed_kv=message.mixed_kv)
        origin, trace = Origin.of(message.item), message.item.trace_parent
        return cls(request, origin, rollout, message.migrations, trace, message.item.streamed)


class Arrivals:
    """Samples that migrate to one instance. All methods are called in the engine thread."""

    def __init__(
        self,
        loop: EngineLoop,
        engine: MigrationEngine,
        config: GenerationConfig,
        metrics: MigrationMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop = loop
        self._engine = engine
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._ledger = ReceiverLedger(config.migration_incoming)
        self._arriving: dict[str, ArrivingSample] = {}
        # Samples that are committed and not claimed yet.
        self._unclaimed: dict[str, tuple[RunningSample, UnclaimedStream]] = {}
        engine.on_withdrawn = self._withdrawn

    def __len__(self) -> int:
        """Count the samples that are arriving, or waiting for their gateway."""
        return len(self._arriving) + len(self._unclaimed)

    @property
    def room(self) -> int:
        """Number of samples that can be received now."""
        return 0 if self._ledger.full else self._engine.free_capacity

    def get(self, migration_id: str) -> Incoming | None:
        """Return a migration; None if it is unknown."""
        return self._ledger.get(migration_id)

    # -- before the commit --------------------------------------------------------------------------------

    def reserve(self, request: pb.ReserveRequest, terms: AdmissionTerms, token: bytes) -> int:
        """Reserve room for a sample; returns the number of its leading blocks that the prefix cache holds.

        NotMoved if it is refused; nothing has changed then.
        """
        migration_id, loop = request.migration_id, self._loop
        if self._ledger.get(migration_id) is not None:
            raise NotMoved(Reason.INVALID, f"migration {migration_id!r} is known")
        if terms.closed or loop.paused or loop.asleep:
            raise NotMoved(Reason.CLOSED, terms.closed or "the engine is paused or asleep")
        if request.item.policy_version != terms.policy_version:
            raise NotMoved(Reason.VERSION, f"the receiver serves policy version {terms.policy_version}")
        if self._ledger.full:
            raise NotMoved(
                Reason.RECEIVER_BUSY, "the limit of arriving samples (migration_incoming) is reached"
            )
        arriving = ArrivingSample.of(request, terms, loop)
        capacity = request.capacity_tokens
        tokens = len(arriving.request.prompt) + len(arriving.request.prefix)
        if not tokens <= capacity <= terms.limits.max_model_len:
            allowed = f"must be in [{tokens}, {terms.limits.max_model_len}]"
            raise NotMoved(Reason.INVALID, f"capacity_tokens: {capacity} is not allowed; {allowed}")
        # Background samples yield to real ones.
        loop.end_background()
        reserved = self._engine.reserve(arriving.request, capacity)
        size = self._engine.space.block_size
        timeout = self._config.migration_timeout_seconds
        seconds = min(seconds_of(request.timeout) or timeout, 10 * timeout)
        try:
            args = (migration_id, token, reserved.blocks, reserved.shared_blocks * size, seconds)
            self._engine.call_ports("expect", *args)
        except BaseException:
            self._engine.cancel(reserved.sample_id)
            raise
        self._ledger.open(migration_id, reserved.sample_id, self._clock() + seconds)
        self._arriving[migration_id] = arriving
        return reserved.shared_blocks

    def begin_drafters(self, migration_id: str, states: bytes) -> None:
        """Let the drafters begin with a sample whose drafter state has arrived, before the rest of its KV."""
        arriving = self._arriving.get(migration_id)
        if arriving is not None and arriving.sample is None:
            self._begin(arriving, pb.DrafterStates.FromString(states))

    def _begin(self, arriving: ArrivingSample, states: pb.DrafterStates) -> RunningSample:
        sample = RunningSample(
            HANDLE,
            arriving.request,
            arriving.stream,
            self._loop.now,
            arriving.streamed,
            origin=arriving.origin,
            mixed_kv=arriving.request.mixed_kv,
        )
        if arriving.rollout is not None:
            sample.follow(arriving.rollout)
        self._loop.drafts.resume(sample, self._loop.policy_version, protocol.drafter_states_of(states))
        arriving.sample = sample
        return sample

    # -- commit -------------------------------------------------------------------------------------------

    def commit(self, request: pb.CommitRequest, closed: str = "") -> pb.CommitResponse:
        """Run a sample whose KV has arrived. Idempotent. `closed` says why no sample is taken now; "" if it is."""
        migration_id = request.migration_id
        incoming = self._ledger.get(migration_id)
        arriving = self._arriving.get(migration_id)
        if incoming is None or incoming.state is not ReceiverState.OPEN or arriving is None:
            return protocol.commit_answer(incoming)
        try:
            if closed:
                raise NotMoved(Reason.CLOSED, closed)
            self._check(request, arriving)
            self._run(request, arriving, incoming)
        except NotMoved as error:
            self.cancel(migration_id, error.reason, error.message)
        except Exception:
            # Whatever failed, the sample must not run in two places.
            self._loop.release(incoming.sample_id)
            self.cancel(migration_id, Reason.INTERNAL, "the receiver could not run the sample")
            raise
        return protocol.commit_answer(self._ledger.get(migration_id))

    def _check(self, commit: pb.CommitRequest, arriving: ArrivingSample) -> None:
        """Raise NotMoved unless all data of the sample has arrived intact."""
        request = arriving.request
        response = [*request.prefix, *commit.new_token_ids]
        if protocol.tokens_crc(response) != commit.tokens_crc:
            raise NotMoved(Reason.CHECKSUM, "the response arrived corrupted")
        received = self._engine.call_ports("received", commit.migration_id)
        tokens = len(request.prompt) + len(response) - 1
        if [each[0] for each in received] != [tokens] * len(received):
            raise NotMoved(Reason.CHECKSUM, f"KV of {received[0][0]} tokens arrived, {tokens} are needed")
        if [each[1] for each in received] != list(commit.data_crcs):
            raise NotMoved(Reason.CHECKSUM, "the KV arrived corrupted")

    def _run(self, commit: pb.CommitRequest, arriving: ArrivingSample, incoming: Incoming) -> None:
        migration_id, now = incoming.migration_id, self._clock()
        sample = arriving.sample or self._begin(arriving, commit.drafters)
        # Without a reason: the donor waits for this answer, and closes the connections itself.
        self._engine.call_ports("drop", migration_id)
        self._engine.enter(incoming.sample_id, list(commit.new_token_ids))
        prefix = (*arriving.request.prefix, *commit.new_token_ids)
        sample.request = replace(arriving.request, prefix=prefix)
        sample.response = list(prefix)
        protocol.take_counters(sample, commit.counters, self._loop.now)
        sample.acceptance, sample.migrations = commit.acceptance, arriving.migrations + 1
        sample.resumed = lambda: self._metrics.resume_seconds.observe(self._clock() - now)
        sample.entered(arriving.trace_parent)
        self._loop.enter(sample)
        self._ledger.commit(migration_id, now + self._config.migration_claim_seconds)
        del self._arriving[migration_id]
        self._unclaimed[migration_id] = (sample, arriving.stream)
        self._metrics.arrived(ReceiverState.COMMITTED)
        self._metrics.unclaimed.set(len(self._unclaimed))

    # -- after the commit ---------------------------------------------------------------------------------

    def claim(self, stream: WorkStream, claim: generation_pb2.Claim) -> None:
        """Hand a sample to the stream of the gateway that claims it."""
        if claim.handle in stream.samples or claim.handle in stream.parked:
            message = f"{claim.handle} names a sample that is still running"
            stream.refuse(_refused(claim, code_pb2.ALREADY_EXISTS, message, "handle"))
        elif self._ledger.claim(claim.migration_id) is None:
            message = f"there is no sample to claim for migration {claim.migration_id!r}"
            stream.refuse(_refused(claim, code_pb2.NOT_FOUND, message))
        else:
            _, unclaimed = self._unclaimed.pop(claim.migration_id)
            unclaimed.hand_over(stream, claim.handle, self._loop.now)
            self._metrics.arrived(ReceiverState.CLAIMED)
            self._metrics.unclaimed.set(len(self._unclaimed))
            # The gateway is waiting for the tokens so far.
            self._loop.flush()

    def cancel(
        self, migration_id: str, reason: Reason, message: str = "", *, disown: bool = False
    ) -> Incoming:
        """Free a reservation, or end a sample that its donor disowns; returns the migration."""
        incoming, ended = self._ledger.cancel(migration_id, reason, message, disown=disown)
        if ended:
            self._end(incoming, reason)
        return incoming

    def sweep(self, failures: dict[str, NotMoved]) -> None:
        """End migrations past their deadline, and reservations whose connections have failed."""
        for migration_id, error in failures.items():
            incoming = self._ledger.get(migration_id)
            if incoming is not None and incoming.state is ReceiverState.OPEN:
                self.cancel(migration_id, error.reason, error.message)
        for incoming in self._ledger.expire(self._clock()):
            self._end(incoming, Reason.DEADLINE)

    def end_unclaimed(self) -> None:
        """End the samples that no gateway has claimed, before new weights are applied."""
        for migration_id in list(self._unclaimed):
            self.cancel(migration_id, Reason.WITHDRAWN, "the receiver gets new weights", disown=True)

    def end_all(self, reason: Reason, message: str) -> None:
        """Free every reservation. Committed samples stay."""
        for migration_id in list(self._arriving):
            self.cancel(migration_id, reason, message)

    def _end(self, incoming: Incoming, reason: Reason) -> None:
        """Free the resources of an ended migration."""
        arriving = self._arriving.pop(incoming.migration_id, None)
        if arriving is not None:
            self._engine.call_ports("drop", incoming.migration_id, reason)
            self._engine.cancel(incoming.sample_id)
            if arriving.sample is not None:
                self._loop.drafts.end(arriving.request.sample_id)
        unclaimed = self._unclaimed.pop(incoming.migration_id, None)
        if unclaimed is not None:
            self._loop.abort_samples([unclaimed[0]])
            self._metrics.unclaimed.set(len(self._unclaimed))
        self._metrics.arrived(incoming.state)
        _log.info(
            "migration_over", migration=incoming.migration_id, state=incoming.state.name, reason=reason.name
        )

    def _withdrawn(self, sample_id: str) -> None:
        """Cancel a reservation that the engine drops, so that nothing writes to its blocks any more."""
        for migration_id, arriving in list(self._arriving.items()):
            if arriving.request.sample_id == sample_id:
                self.cancel(migration_id, Reason.WITHDRAWN, "the receiver's KV is dropped")


def _refused(
    claim: generation_pb2.Claim, code: code_pb2.Code.ValueType, message: str, field_name: str = ""
) -> generation_pb2.Refused:
    return generation_pb2.Refused(handle=claim.handle, code=code, message=message, field=field_name)


def new_token() -> bytes:
    """Create a token that a donor presents on its connections."""
    return secrets.token_bytes(32)
